"""Layers that see the last tokens alone, compared with the model's own on longer texts."""

from copy import deepcopy

import pytest
from pytest import mark
import torch
import transformers as hf

from foreign import SHAPE, V, same
from lab.kept import full_cache_bytes, held, slots_per_head
from lab.methods_by_name import pick
from lab.replay import Recorder, record
from lab.retrieval import as_decoded
from lab.saved import header, load, save
from methods.baselines.kvzip import KVzip
from methods.baselines.kvzip_fast import FastKVzip, Teacher
from methods.baselines.pyramid_kv import PyramidKV
from methods.baselines.snap_kv import SnapKV
from methods.ours.question_gates import Lesson, surprise
from nanollm.bridge import Bridged, attach
from nanollm.cache import compress, crop, full_layers, make_cache, rereading
from nanollm.generate import prefill
from nanollm.sliding import SlidingSlots

W, T = 16, 53
SHAPE = SHAPE | dict(num_hidden_layers=4)
WIDE = SHAPE | dict(head_dim=16, sliding_window=W)
MIXED = WIDE | dict(layer_types=["sliding_attention", "full_attention"] * 2)
CHUNKS = dict(num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=W)
HALF = dict(sliding_window=W, use_sliding_window=True, max_window_layers=2)
FAMILIES = {
    **dict.fromkeys(["Gemma3Text", "Olmo3", "Cohere2", "Exaone4"], MIXED),
    "Qwen2": SHAPE | HALF,  # its first layers see everything
    "Mistral": WIDE,  # all layers slide
    "Llama4Text": SHAPE | dict(head_dim=16) | CHUNKS,
}
METHODS = (
    "snap_kv ada_kv+critical pyramid_kv chunk_kv_reuse h2o kvzip "
    "key_diff streaming_llm_absolute"
)
TOKENS = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(1))
AFTER = torch.randint(3, V, (2, 2 * W), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def no_gradient():
    with torch.no_grad():
        yield


def tiny(family="Gemma3Text"):
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**FAMILIES[family])
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter *= 2  # positions hardly matter to small weights
    return model


def read(model, memory, tokens, size=T):
    parts = tokens.split(size, 1)
    return torch.cat([model(x, past_key_values=memory).logits for x in parts], 1)


@mark.parametrize("size", [T, 1, 7, W, W + 1])
@mark.parametrize("family", FAMILIES)
def test_logits_are_the_model_s_own_past_what_layers_see(family, size):
    model = tiny(family)
    expected = model(TOKENS).logits
    memory = attach(model)
    same(read(model, memory, TOKENS, size), expected)
    lengths = {layer.length for layer in memory.caches}
    newest = T % W if family == "Llama4Text" else W
    assert min(lengths) == newest and lengths <= {newest, T}


@mark.parametrize("family", FAMILIES)
def test_a_padded_batch_and_generate_go_on(family):
    model = tiny(family)
    greedy = dict(max_new_tokens=2 * W, do_sample=False)
    own = model.generate(TOKENS[:, :20], **greedy)
    memory = attach(model)
    found = model.generate(TOKENS[:, :20], past_key_values=memory, **greedy)
    assert found.equal(own)
    tokens = TOKENS[:1, :30].repeat(1, 2)
    greedy |= dict(prompt_lookup_num_tokens=3)
    own = model.generate(tokens, **greedy)
    memory = attach(model)
    assert model.generate(tokens, past_key_values=memory, **greedy).equal(own)
    alone = model(TOKENS[1:, 9:]).logits
    mask = torch.ones_like(TOKENS)
    mask[1, :9] = 0
    memory = attach(model)
    logits = []
    for end in 20, 40, T:
        part = TOKENS[:, memory.seen : end]
        given = dict(attention_mask=mask[:, :end], past_key_values=memory)
        logits.append(model(part, **given).logits)
    same(torch.cat(logits, 1)[1:, 9:], alone)


@mark.parametrize("name", METHODS.split())
@mark.parametrize("family", ["Gemma3Text", "Qwen2", "Cohere2"])
def test_a_method_compresses_the_layers_that_see_everything(family, name):
    model = tiny(family)
    variant = pick([name])[name]
    options = variant.given(budget=13, window_size=4)
    memories = []
    for size in T, 7:
        memory = attach(model, variant.kind, **options)
        read(model, memory, TOKENS, size)
        with pytest.raises(ValueError, match="has not been compressed"):
            model.generate(TOKENS, past_key_values=memory)
        memory.compress(TOKENS)
        memories.append(memory)
    memory, in_pieces = memories
    assert held(memory.caches, T).equal(held(in_pieces.caches, T))
    assert slots_per_head(memory.caches) <= 13
    for layer in memory.caches:
        if isinstance(layer, SlidingSlots):
            assert layer.pos[0, 0].tolist() == [*range(T - W, T - 1)]
    kept = [full_layers(caches) for caches in memory.texts]
    hidden = evicted(model, kept)
    after = torch.cat((TOKENS[:, -1:], AFTER), 1)
    appends = kept[0][0].method.appends
    assert len(as_decoded(AFTER, memory.caches)) == (1 if appends else 2 * W)
    if appends:
        same(read(model, memory, after, 1), masked(model, hidden, after))
    # else the method evicts on; test_contract.py follows that


def evicted(model, kept):
    """Return by layer which of the prompt's tokens each head has lost, (B, H, T − 1)."""
    lost = {}
    for layers in zip(*kept):
        rows = []
        for layer in layers:
            rows.append(~held([layer], T - 1)[0, 0])
        lost[layers[0].block] = torch.stack(rows)
    return lost


def masked(model, lost, after):
    """Return the logits of `after` by the model itself, with what is lost hidden from them."""
    tokens = torch.cat((TOKENS[:, :-1], after), 1)
    n = after.shape[1]
    hooks = []
    for module in model.modules():
        if getattr(module, "layer_idx", None) in lost and hasattr(module, "o_proj"):

            def hide(module, args, kwargs):
                gone = lost[module.layer_idx].repeat_interleave(2, 1)
                S = tokens.shape[1]
                mask = torch.ones(S, S).tril().bool().repeat(2, 4, 1, 1)
                mask[:, :, -n:, : T - 1] &= ~gone[:, :, None]
                return args, kwargs | dict(attention_mask=mask)

            hooks.append(module.register_forward_pre_hook(hide, with_kwargs=True))
    logits = model(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits[:, -n:]


def test_a_reread_leaves_what_slides_as_it_was_and_scores_what_the_model_attends_to():
    bridged = Bridged(tiny())
    caches = make_cache(bridged, KVzip, budget=10)
    prefill(bridged, TOKENS, caches)
    before = deepcopy([(layer.k, layer.pos) for layer in caches])
    layers = full_layers(caches)
    again = rereading(bridged, caches)
    scores = layers[0].method.scores(again, TOKENS, layers)
    for layer, (k, pos) in zip(caches, before):
        assert layer.k.equal(k) and layer.pos.equal(pos) and layer.seen == T
    twice = torch.cat((TOKENS, TOKENS), 1)
    recorded = record(bridged, make_cache(bridged, store=Recorder), twice)
    for layer, score in zip(layers, scores):
        q, k = recorded[layer.block][:2]
        logits = q[:, :, T:] @ k.repeat_interleave(2, 1).mT / 4
        later = torch.arange(2 * T) > torch.arange(T, 2 * T)[:, None]
        p = logits.masked_fill(later, -torch.inf).softmax(-1)[..., :T]
        same(score, p.amax(2).view(2, 2, 2, T).amax(2), 1e-5)


def test_layers_are_counted_among_those_of_the_method():
    bridged = Bridged(tiny())
    caches = make_cache(bridged, PyramidKV, budget=13, window_size=4, beta=4)
    places = [(layer.index, layer.of, layer.block) for layer in full_layers(caches)]
    assert places == [(0, 2, 1), (1, 2, 3)]
    w_o = [layer.w_o.data_ptr() for layer in caches]
    assert w_o == [block.attention.w_o.data_ptr() for block in bridged.blocks]
    prefill(bridged, TOKENS, caches)
    compress(bridged, TOKENS, caches)
    assert [layer.length for layer in full_layers(caches)] == [20, 6]
    gates = torch.zeros(2, 4 * 16 + 2 * 2 * 16 + 1, 2)
    gates[1, -1] = 1  # the second of them
    caches = make_cache(bridged, FastKVzip, budget=13, gates=gates)
    prefill(bridged, TOKENS, caches)
    compress(bridged, TOKENS, caches)
    stays = held(caches, T).sum((0, 2, 3))
    assert stays.tolist() == [4 * 12, 4 * 14]


def test_gates_learn_through_layers_that_slide():
    """With everything kept the loss is the model's own; differences give its steepest slope."""
    model = tiny()
    bridged = Bridged(model)
    n = 40
    caches = make_cache(bridged, Teacher, budget=T)
    context = TOKENS[:1, :n]
    prefill(bridged, context, caches)
    layers = full_layers(caches)
    inputs = torch.cat([layer.notes["inputs"] for layer in layers])
    sliding = [layer for layer in caches if layer not in layers]
    asked = TOKENS[:, n:]
    right = torch.zeros_like(asked, dtype=torch.bool)
    right[:, -3:] = True
    right[0, -1] = False  # answers of unlike length
    lesson = Lesson(inputs, sliding, asked, right)
    keep = torch.ones(1, 2, 2, n)
    logits = model(torch.cat((context.expand(2, -1), asked), 1)).logits[:, -4:-1]
    own = torch.nn.functional.cross_entropy(logits.mT, TOKENS[:, -3:], reduction="none")
    with torch.enable_grad():
        keep.requires_grad_()
        found = surprise(bridged, lesson, keep)
        (slope,) = torch.autograd.grad(found.sum(), keep)
    same(found, torch.stack((own[0, :2].mean(), own[1].mean())))
    step = 0.05 * slope / slope.norm()
    more, less = (surprise(bridged, lesson, keep + x).sum() for x in (step, -step))
    same((more - less) / 0.1, slope.norm(), 1e-3)


def test_a_saved_cache_goes_on_bit_for_bit(tmp_path):
    bridged = Bridged(tiny())
    options = dict(budget=13, window_size=4)
    caches = make_cache(bridged, SnapKV, **options)
    prefill(bridged, TOKENS, caches)
    compress(bridged, TOKENS, caches)
    save(caches, tmp_path / "file")
    assert header(tmp_path / "file")["method"] == "SnapKV"
    fresh = make_cache(bridged, SnapKV, **options)
    load(tmp_path / "file", fresh)
    for token in AFTER.split(1, 1):
        assert bridged(token, caches).equal(bridged(token, fresh))


def test_only_the_newest_token_can_be_forgotten():
    model = tiny("Qwen2")
    bridged = Bridged(model)
    caches = make_cache(bridged)
    prefill(bridged, TOKENS, caches)
    with pytest.raises(ValueError, match="newest 2 cannot be forgotten"):
        crop(caches, T - 2)
    assert {layer.seen for layer in caches} == {T} and caches[0].length == T
    short = make_cache(bridged)
    prefill(bridged, TOKENS[:, :9], short)
    crop(short, 4)  # all that it sees is there
    assert {layer.length for layer in short} == {4}
    crop(caches, T - 1)
    same(bridged(TOKENS[:, -1:], caches), model(TOKENS).logits[:, -1:])


def test_if_all_layers_slide_methods_take_what_they_see():
    model = tiny("Mistral")
    memory = attach(model, SnapKV, budget=8, window_size=4)
    assert not any(isinstance(layer, SlidingSlots) for layer in memory.caches)
    read(model, memory, TOKENS[:, :9])
    with pytest.raises(ValueError, match="last 16 tokens alone, and the text has 18"):
        read(model, memory, TOKENS[:, 9:18])


def test_a_full_cache_holds_no_more_than_layers_see():
    entries = 2 * W + 2 * T
    assert full_cache_bytes(Bridged(tiny()), T, 2) == 2 * 2 * entries * 16 * 2
