"""Memories in transformers' own models: their logits, their tokens, and real eviction."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
import logging
from types import SimpleNamespace

from pytest import fixture, mark, raises
import torch
import transformers as hf

from methods.baselines.h2o import H2O
from methods.baselines.kvzip import KVzip
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.critical_kv import Critical
from common import ENCODING, caches_of
from foreign import SHAPE, V, same
from nanollm import TINY, checkpoint
from nanollm.bridge import Bridged, attach, detach
from nanollm.cache import Method, begin_turn, compress, make_cache
from nanollm.generate import prefill
from nanollm.model import rope, rotate
from lab.methods_by_name import pick

T = 40
WIDE = SHAPE | dict(head_dim=16)  # heads that together are wider than the model
EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=2)
FAMILIES = {
    # GPT2's config takes these names, too
    **dict.fromkeys(
        "Llama Qwen2 Phi Phi3 Olmo2 SmolLM3 GPTNeoX Cohere GPT2".split(), SHAPE
    ),
    "Qwen3": WIDE,
    "Mistral": SHAPE | dict(sliding_window=None),
    "Gemma": WIDE,
    "Granite": SHAPE | dict(attention_multiplier=0.3),
    "Llama4Text": WIDE | dict(num_local_experts=2, intermediate_size_mlp=48),
    "OPT": SHAPE | dict(ffn_dim=48, word_embed_proj_dim=32),
}
# families that do not rotate keys as our decoder does: they pair other dimensions, rotate a part,
# or none
OTHERS = ("Phi", "GPTNeoX", "Cohere", "GPT2", "Llama4Text", "OPT")
TOKENS = torch.randint(3, V, (3, T), generator=torch.Generator().manual_seed(1))
logging.getLogger("transformers").setLevel(logging.ERROR)


def tiny(family="Llama", shape=None, **changed):
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**(shape or FAMILIES[family]) | changed)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@fixture
def model():
    return tiny()


def refused(message, call, *tokens, **options):
    with raises(ValueError, match=message):
        call(*tokens, **options)


@fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def read(memory, tokens, **options):
    """The logits of a memory's model."""
    return memory.model.model(tokens, past_key_values=memory, **options).logits


def own(model, do_sample=False, **options):
    """What the model's own `generate` writes."""
    return model.generate(
        TOKENS,
        attention_mask=torch.ones_like(TOKENS),
        max_new_tokens=6,
        do_sample=do_sample,
        **options,
    )


@mark.parametrize("family", FAMILIES)
def test_a_full_memory_changes_no_logit_and_no_token(family):
    model = tiny(family)
    expected, written = model(TOKENS).logits, own(model)
    memory = attach(model)
    parts = [read(memory, part) for part in TOKENS.split([23, 16, 1], 1)]
    same(torch.cat(parts, 1), expected)
    w_o, o = memory.caches[0].w_o.flatten(1), memory.model.blocks[0].attention.o
    heads = torch.randn(5, w_o.shape[1])
    same(heads @ w_o.T, o(heads) - o(0 * heads))  # without a bias
    turns = {None if freq is None else bool(freq.any()) for freq in memory.model.freq}
    assert turns == ({None} if family in OTHERS else {True})
    memory.compress(TOKENS)
    assert torch.equal(own(model, past_key_values=memory), written)
    assert memory.get_seq_length() == memory.caches[0].seen == T + 5
    detach(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "attachment") for module in model.modules())


@fixture(scope="module")
def both():
    """The decoder *built*, as ours and as transformers', and its tokenizer."""
    theirs = hf.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return checkpoint.from_hf(TINY), Bridged(theirs), ENCODING


@mark.parametrize("name", pick([]))
def test_the_shipped_model_keeps_and_answers_the_same_in_both(both, name):
    *models, encoding = both
    ids = encoding.encode("A method keeps some of these tokens. " * 9)
    tokens = torch.tensor([ids[:90], ids[5:95]])
    kept, results = [], []
    for model in models:
        caches = caches_of(model, pick([name])[name], budget=40, window_size=8)
        prefill(model, tokens[:, :-1], caches, 64)
        compress(model, tokens[:, :-1], caches)
        results.append(model(tokens[:, -1:], caches))
        kept.append(caches)
    expected, logits = results
    # a number halfway between two codes may get either
    same(logits, expected, 1e-3 if "@" in name else 1e-4)
    for a, b in zip(*kept):
        assert a.bytes() == b.bytes()
        # Compactor's scores of a text that repeats itself nearly tie
        assert torch.equal(a.pos, b.pos) or name == "compactor"


# ---- the user's five lines, and conversations ---


@mark.parametrize(
    "Method, options", [(KVzip, {}), (SnapKV, dict(window_size=8)), (H2O, {})]
)
def test_a_conversation_is_compressed_after_each_turn_as_by_hand(both, Method, options):
    """A memory answers as our own decoder does, whose caches are compressed by hand."""
    ours, bridged, encoding = both
    ids = encoding.encode("A method keeps some of these tokens. " * 18)
    text = torch.tensor([ids[:80]])
    memory = attach(bridged.model, Method, budget=24, **options)
    caches = make_cache(ours, Method, budget=24, **options)
    for turn in ids[80:130], ids[:1]:
        read(memory, text[:, memory.get_seq_length() :])
        prefill(ours, text[:, caches[0].seen :], caches)
        memory.compress(text)
        compress(ours, text, caches, again=True)
        for a, b in zip(memory.caches, caches):
            assert torch.equal(a.pos, b.pos) and a.seen == text.shape[1] - 1
        text = bridged.model.generate(
            text, past_key_values=memory, max_new_tokens=5, do_sample=False
        )
        fed = text[:, -6:-1].split(1, 1)
        written = [ours(token, caches).argmax(-1) for token in fed]
        assert torch.cat(written, 1).equal(text[:, -5:])
        text = torch.cat((text, torch.tensor([turn])), 1)
        memory.begin_turn()
        begin_turn(caches)


def test_a_memory_is_compressed_for_the_prompt_that_it_has_read(model):
    memory = attach(model, StreamingLLM, budget=8)
    refused("seen 0 tokens .* 40 of 3", memory.compress, TOKENS)
    given = TOKENS.clone()
    read(memory, given)
    given.zero_()
    twin = deepcopy(memory)
    refused("not been compressed", own, model, past_key_values=memory)
    refused("another text", memory.compress, TOKENS.flip(0))
    refused("int64 tensor", memory.compress, TOKENS[0])
    memory.compress(TOKENS)
    refused("call begin_turn", memory.compress, TOKENS)
    refused("forgotten the prompt's last token", read, memory, NEW[:, :1])
    for message, tokens in ("another text", TOKENS.flip(0)), ("30 tokens.* 39", READ):
        refused(message, model.generate, tokens, past_key_values=memory)
    assert memory.caches[0].length == 8 and twin.caches[0].length == T
    memory.begin_turn()
    assert not any(layer.prompt_done for caches in memory.texts for layer in caches)
    assert twin.model is memory.model and twin.caches[0].model is memory.caches[0].model


def test_each_thread_has_a_memory_of_its_own(model):
    """Four threads answer from memories, two from the model's own cache, all at once."""
    prompts = [TOKENS[i % 3 :][:1, i:] for i in range(6)]
    memories = [None, None]
    for prompt in prompts[2:]:
        memory = attach(model, SnapKV, budget=12, window_size=4)
        read(memory, prompt)
        memory.compress(prompt)
        memories.append(memory)

    @torch.no_grad()
    def written(prompt, memory):
        options = dict(max_new_tokens=4, do_sample=False)
        return model.generate(prompt, past_key_values=deepcopy(memory), **options)

    alone = [*map(written, prompts, memories)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            now = pool.map(written, prompts, memories)
            assert all(map(torch.equal, now, alone))


def test_a_text_given_as_embeddings_cannot_be_read_again(model):
    x = model.get_input_embeddings()(READ)
    for Kind in H2O, KVzip:
        memory = attach(model, Kind, budget=16)
        model(inputs_embeds=x, past_key_values=memory)
        if Kind is KVzip:
            refused("reads the text again", memory.compress, READ)
        else:
            memory.compress(READ)
    memory = attach(model.model, KVzip, budget=16)
    model.model(READ, past_key_values=memory)
    refused("has no head", memory.compress, READ)


# ---- what is refused ---

DEEPSEEK = (
    SHAPE
    | EXPERTS
    | dict(
        num_key_value_heads=4,
        n_routed_experts=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        n_group=1,
        topk_group=1,
    )
)


@mark.parametrize(
    "family, shape, message",
    [
        ("Gemma2", WIDE, "caps"),
        (
            "GptOss",
            WIDE | EXPERTS | dict(num_local_experts=4),
            "layer 0 has sink logits",
        ),
        ("DeepseekV3", DEEPSEEK, "keys of 8 numbers and values of [46]; take"),
        ("Falcon", SHAPE, "FalconForCausalLM"),
        (
            "Lfm2",
            SHAPE | dict(layer_types=["conv", "full_attention", "conv"]),
            "layers without attention .conv.",
        ),
        (
            "Mamba",
            dict(vocab_size=V, hidden_size=32, num_hidden_layers=2),
            "no attention heads; take",
        ),
    ],
)
def test_what_no_cache_here_knows_is_refused_by_name(family, shape, message):
    model = tiny(family, shape)
    written = own(model)
    refused(message, lambda: read(attach(model), TOKENS))
    detach(model)
    assert torch.equal(own(model), written)


READ, NEW = TOKENS.split([30, 10], 1)
HIDDEN = (torch.arange(T) > 0).expand(3, T).float()
SKIPS = torch.ones(3, 1, 10, T).tril(30).bool() & (torch.arange(T) != 4)


@mark.parametrize(
    "message, call",
    [
        ("all 40 tokens", dict(attention_mask=HIDDEN)),
        ("all 40 tokens", dict(attention_mask=HIDDEN[:, -10:])),
        ("all 40 tokens", dict(attention_mask=torch.ones(1, 40))),
        ("not causal", dict(attention_mask=torch.zeros(3, 1, 10, T))),
        ("hides tokens", dict(attention_mask=SKIPS)),
        ("attention weights", dict(output_attentions=True)),
        ("use_cache=False", dict(use_cache=False)),
        ("go on from the 30", dict(position_ids=torch.arange(23, 33)[None])),
        ("go on from", dict(position_ids=torch.arange(30, 40)[None] % 35)),
        ("beyond the 30", dict(tokens=NEW[:, :0])),
        ("1 texts .* read 3", dict(tokens=NEW[:1])),
        ("call model.eval", {}),
    ],
)
@mark.parametrize("family", ["Llama", "GPT2"])
def test_a_refused_call_leaves_the_memory_as_it_was(family, message, call):
    model = tiny(family)
    memory, expected = attach(model), model(TOKENS[:, :35]).logits[:, 30:]
    read(memory, READ, attention_mask=torch.ones_like(READ))
    model.train(message == "call model.eval")
    refused(message, read, **dict(memory=memory, tokens=NEW) | call)
    model.eval()
    shown = torch.full((3, 1, 5, 35), -torch.inf).triu(31)
    pos = torch.arange(30, 35)[None]
    found = read(memory, NEW[:, :5], attention_mask=shown, position_ids=pos)
    same(found, expected)


def test_a_call_that_was_broken_off_spoils_its_memory_alone(model, monkeypatch):
    memory, expected = attach(model), model(TOKENS).logits
    with monkeypatch.context() as patch:
        attention = lambda **_: (torch.zeros(3, T, 32), None)
        patch.setattr(model.model.layers[1].self_attn, "forward", attention)
        refused("layer 1 does not go", read, memory, TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", lambda _: 1 / 0)
        with raises(ZeroDivisionError):
            read(attach(model), TOKENS)
    # no memory is left in use
    same(model(TOKENS).logits, expected)
    refused("after some layers", read, memory, TOKENS)
    refused("after some layers", memory.compress, TOKENS)
    same(read(attach(model), TOKENS), expected)


def test_a_memory_is_read_by_its_own_model_while_that_is_attached(model):
    other = tiny()
    bridged, memory = Bridged(model), attach(model)
    read(memory, READ)
    refused("never attached", other, NEW, past_key_values=memory)
    attach(other)
    refused("another model", other, NEW, past_key_values=memory)
    detach(model)
    refused("was detached", read, memory, NEW)
    # wrapped as by torch.compile; `attach` takes the model itself
    attach(SimpleNamespace(_orig_mod=model))
    # a model whose config is the same object, and so names our attention
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    of_twin = attach(twin)
    read(of_twin, READ)
    for each in memory, of_twin:
        same(read(each, NEW), bridged(TOKENS)[:, 30:])


def test_drafts_write_what_the_model_writes_unless_the_memory_is_compressed(model):
    tokens = TOKENS[:1].repeat(1, 2)  # what comes again can be looked up
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=2)
    expected = model.generate(tokens, **options)
    options |= dict(prompt_lookup_num_tokens=3)
    memory = attach(model)
    assert model.generate(tokens, past_key_values=memory, **options).equal(expected)
    seen = {layer.seen for layer in memory.caches}
    assert seen == {memory.seen} == {expected.shape[1] - 1}
    memory = attach(model, H2O, budget=12)
    memory._is_user_defined = True  # by a `generate` that was looked up before `attach`
    refused("has not been compressed", read, memory, tokens)
    memory = attach(model)
    read(memory, tokens)
    memory.compress(tokens)
    refused("beams", model.generate, tokens, past_key_values=memory, **options)


@torch.enable_grad()
def test_gradients_are_refused(model):
    refused("no gradient", read(attach(model), READ).sum().backward)
    x = model.get_input_embeddings()(READ).detach().requires_grad_()
    y = model(inputs_embeds=x, past_key_values=attach(model)).logits
    refused("no gradient", torch.autograd.grad, y.sum(), x)


# ---- batches, other layers, other weights ---


SNAP_KV = SnapKV, dict(budget=12, window_size=4)


@mark.parametrize(
    "family, Method, options",
    [
        ("Llama", Method, {}),
        ("Llama", *SNAP_KV),
        ("Llama", H2O, dict(budget=12)),
        ("GPT2", *SNAP_KV),  # learned positions
        ("OPT", Method, {}),  # counts positions by the mask itself
    ],
)
def test_texts_padded_on_the_left_are_answered_as_alone(family, Method, options):
    """Read, compressed and decoded in a batch, a padded text has the logits that it has alone."""
    model, pads = tiny(family), [0, 7, 3]
    for parameter in model.parameters():
        parameter *= 2  # positions hardly matter to small weights

    def decoded(tokens, pads, sizes):
        memory = attach(model, Method, **options)
        mask = torch.arange(tokens.shape[1]) >= torch.tensor(pads)[:, None]
        for part in tokens.split(sizes, 1):
            seen = memory.get_seq_length() + part.shape[1]
            read(memory, part, attention_mask=mask[:, :seen])
        memory.compress(tokens)
        twice = [pad for pad in pads for _ in "ab"]
        assert memory.pads_of(None, len(twice), tokens.shape[1]) == twice
        output = model.generate(
            tokens,
            attention_mask=mask.long(),
            past_key_values=memory,
            max_new_tokens=8,
            eos_token_id=None,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences[:, -8:], torch.stack(output.logits, 1)

    written, logits = decoded(TOKENS, pads, [5, 20, T - 25])
    for row, pad in enumerate(pads):
        text = TOKENS[row : row + 1, pad:]
        written_alone, logits_alone = decoded(text, [0], [text.shape[1]])
        assert torch.equal(written[row], written_alone[0])
        same(logits[row], logits_alone[0], 1e-4)


def test_positions_may_begin_elsewhere_but_not_jump(model):
    """As in PaliGemma, which counts from 1."""
    pos = torch.arange(5, T + 5)[None]
    memory, expected = attach(model), model(TOKENS, position_ids=pos).logits
    parts = [
        read(memory, part, position_ids=at)
        for part, at in zip(TOKENS.split(30, 1), pos.split(30, 1))
    ]
    same(torch.cat(parts, 1), expected)
    memory.compress(TOKENS)
    refused("go on from the 39", own, model, past_key_values=memory)
    mask = torch.arange(T) >= torch.tensor([[7], [0], [3]])
    given = dict(attention_mask=mask, position_ids=pos)  # which count the padding
    refused("without padding", read, attach(model), TOKENS, **given)


@mark.parametrize(
    "options",
    [
        dict(num_beams=4, num_return_sequences=2),
        dict(do_sample=True, num_return_sequences=3),
    ],
)
def test_beams_and_samples_are_those_of_the_model_s_own_cache(model, options):
    memory, results = attach(model), []
    read(memory, TOKENS)
    memory.compress(TOKENS)
    for cache in None, memory:
        torch.manual_seed(3)
        results.append(own(model, past_key_values=cache, **options))
    assert torch.equal(*results)


class Bits(torch.nn.Linear):
    """A linear layer with weights of 8 bits, as bitsandbytes has them."""

    def forward(self, x):
        return x @ (self.weight / 100).T + 3  # a bias


def test_quantized_weights_and_adapters_are_taken_for_what_they_compute(model):
    for layer in model.model.layers:
        o = layer.self_attn.o_proj
        o.__class__ = Bits
        o.weight = torch.nn.Parameter((100 * o.weight).char(), False)
    wrapped = SimpleNamespace(get_base_model=lambda: model)  # as PEFT wraps it
    memory = attach(wrapped, SnapKV, budget=12, window_size=4, select=Critical())
    read(memory, READ[:1])
    memory.compress(READ[:1])
    assert memory.caches[0].length == 12
    same(memory.caches[-1].w_o.flatten(1), o.weight / 100)
    o.active_adapters, o.disable_adapters = ["mine"], True
    assert memory.model.adapters == [(["mine"], True)]


DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)


@mark.parametrize(
    "family, config, turns",
    [
        ("SmolLM3", SHAPE, [1, 1, 1, 0]),
        ("Cohere2", WIDE | dict(sliding_window=256), [None, None, None, 0]),
        ("Gemma3Text", WIDE | dict(sliding_window=256), [1, 1, 1, 1]),  # two bases
        ("Llama", SHAPE | dict(rope_parameters=DYNAMIC), [None] * 4),
    ],
)
def test_each_layer_is_asked_how_it_rotates(family, config, turns):
    model = tiny(family, config, num_hidden_layers=4)
    memory = attach(model)
    read(memory, torch.full((1, 9), 7))
    for layer, turn in zip(memory.caches, turns):
        if turn is None:
            refused("rotates its keys", lambda: layer.freq)
            continue
        assert turn == float(layer.freq.any())
        moved = rotate(layer.k[:, :, :1], *rope(layer.freq, torch.tensor([8])))
        same(moved, layer.k[:, :, 8:], 1e-4)
    if turns[-1] is None:  # this layer sees everything, so the method gets it
        refused("rotates its keys", attach, model, StreamingLLM, budget=8)
