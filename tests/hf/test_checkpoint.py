"""Checkpoints in and out. The oracle is transformers: what it saves we read, what we write it opens."""
import json
from pathlib import Path
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch
from transformers import AutoModelForCausalLM

from nanollm.hf.checkpoint import from_hf, hf_tokenizer, to_hf
from nanollm.model import Decoder
from nanollm.tokenizer import check_vocabulary
from oracle import CASES, LLAMA3, TOKENS, oracle, same, tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """folder(case): a checkpoint that transformers saved. Not to be changed."""
    folders = {}

    def folder(case):
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("saved")
            oracle(case).save_pretrained(folders[case])
        return folders[case]
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """copy(case, config=…, tensors=…): a checkpoint with other entries in config.json and other tensors."""
    def copied(case, config=None, tensors=None):
        folder = tmp_path / "copy"
        shutil.copytree(saved(case), folder, dirs_exist_ok=True)
        for change, file, read, write in ((config, "config.json", read_config, write_config),
                                          (tensors, "model.safetensors", load_file, save_file)):
            if change:
                content = read(folder / file) | change
                write({key: x for key, x in content.items() if x is not DROP}, folder / file)
        return folder
    return copied


DROP = object()  # as a new value: no such entry
def read_config(path):
    return json.loads(path.read_text())


def write_config(content, path):
    path.write_text(json.dumps(content))


def refused(folder, *words, **options):
    """from_hf refuses the folder with a ValueError whose message has all words."""
    with pytest.raises(ValueError) as error:
        from_hf(folder, **options)
    for word in words:
        assert str(word) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def equal(a: Decoder, b: Decoder):
    assert a.config == b.config
    b = b.state_dict()
    assert a.state_dict().keys() == b.keys()
    for name, x in a.state_dict().items():
        assert torch.equal(x, b[name]), name


# ---- out, and in again ---


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_what_we_write_transformers_opens(saved, tmp_path, case):
    ours = from_hf(saved(case))
    to_hf(ours, tmp_path, torch.float32)
    equal(from_hf(tmp_path), ours)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())  # no missing, unexpected or mismatched tensors
    assert theirs.dtype == torch.float32
    same(theirs(TOKENS).logits, oracle(case)(TOKENS).logits)
    assert theirs.config.eos_token_id is None  # generate would stop at the token of another tokenizer


def test_half_precision_round_trip_is_exact(saved, tmp_path):
    ours = from_hf(saved("llama3.1"), torch.float16)
    assert torch.equal(ours.freq, Decoder(ours.config).freq) and ours.freq.dtype == torch.float32  # exact
    assert {p.dtype for p in ours.parameters()} == {torch.float16}
    to_hf(ours, tmp_path)
    equal(from_hf(tmp_path, torch.float16), ours)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float16
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers 4 insists on it


def test_loading_ties_the_head_draws_no_random_numbers(saved):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = from_hf(saved("llama grouped tied"))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.head.weight is model.embed.weight and not model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("changed, message", [
    (dict(family="gpt2", n_kv_heads=4), "qkv_bias=False.*GPT-2 has every bias"),
    (dict(o_bias=True), "o_bias=True.*Llama has qkv_bias = o_bias"),
    (dict(qkv_bias=True, mlp_bias=True), "mlp_bias=True.*Qwen2 has qkv_bias alone"),
    (dict(d_model=20, n_heads=3, n_kv_heads=3, head_dim=14), "d_model=20.*d_model a multiple of n_heads")])
def test_a_model_that_no_layout_fits_is_not_written(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        to_hf(Decoder(tiny(**changed)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_weight_too_large_for_the_dtype_is_not_written(tmp_path):
    model = Decoder(tiny())
    model.blocks[1].mlp.up.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight holds inf or nan as torch.float16"):
        to_hf(model, tmp_path / "new")
    to_hf(model, tmp_path / "new", torch.bfloat16)


# ---- the forms a checkpoint comes in ---


@pytest.mark.parametrize("case", ["gpt2 untied", "llama3.1"])
def test_shards(saved, tmp_path, case):
    oracle(case).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (tmp_path / "other.safetensors").write_text("which the index does not list")
    equal(from_hf(tmp_path), from_hf(saved(case)))
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    refused(tmp_path, first.name, "is missing")


@pytest.mark.parametrize("case, prefix", [("gpt2", "transformer."), ("llama grouped tied", "model.")])
def test_names_without_prefix(saved, copy, case, prefix):
    file = copy(case) / "model.safetensors"
    save_file({name.removeprefix(prefix): x for name, x in load_file(file).items()}, file)
    equal(from_hf(file.parent), from_hf(saved(case)))


def test_tensors_that_follow_from_others_are_ignored(saved, copy):
    derived = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(),
               "h.1.attn.masked_bias": torch.tensor(-1e4)}
    equal(from_hf(copy("gpt2", tensors=derived)), from_hf(saved("gpt2")))
    tied = "llama grouped tied"
    head = load_file(saved(tied) / "model.safetensors")["model.embed_tokens.weight"].clone()
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": head}
    equal(from_hf(copy(tied, tensors=derived)), from_hf(saved(tied)))
    head[3, 3] += 1
    refused(copy(tied, tensors={"lm_head.weight": head}), "lm_head.weight differs", "tie_word_embeddings")


NO_LENGTH = {key: x for key, x in LLAMA3.items() if key != "original_max_position_embeddings"}
SCALING = {key: x for key, x in LLAMA3.items() if not key.startswith("rope")}


@pytest.mark.parametrize("case, config", [
    *(("llama3.1", dict(rope_parameters=DROP, rope_theta=LLAMA3["rope_theta"],  # as transformers 4 wrote it
                        rope_scaling=SCALING | {name: "llama3"})) for name in ("rope_type", "type")),
    ("llama3.1", dict(original_max_position_embeddings=32)),
    ("llama multi-head", dict.fromkeys((  # as Llama 2's first config.json
        "head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "rope_parameters",
        "tie_word_embeddings", "hidden_act"), DROP)),
    ("gpt2", dict.fromkeys(("n_inner", "tie_word_embeddings", "scale_attn_weights", "add_cross_attention"),
                           DROP)),
    ("mistral", dict(sliding_window=64)),  # it never bites
    ("llama multi-head", dict(rope_parameters=None, rope_theta=10_000, quantization_config=None))])
def test_other_entries_that_say_the_same(saved, copy, case, config):
    equal(from_hf(copy(case, config)), from_hf(saved(case)))


def test_an_interrupted_save_leaves_the_old_checkpoint(copy, monkeypatch):
    folder = copy("qwen2")
    old = {file: file.read_bytes() for file in folder.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", lambda file, text: file.write_bytes(b"{") and interrupt())
        to_hf(from_hf(folder), folder)
    assert all(file.read_bytes() == data for file, data in old.items())
    to_hf(from_hf(folder), folder)
    assert {*old} == {*folder.iterdir()}


def interrupt():
    raise KeyboardInterrupt


# ---- errors ---


@pytest.mark.parametrize("case, config, words", [
    *(("llama3.1", dict(model_type=x), "is unknown; known are gpt2, llama, ") for x in ("bert", ["llama"])),
    ("llama3.1", dict(quantization_config={}), "quantization_config {} is not"),
    ("llama3.1", dict(hidden_size=DROP), "config.json lacks 'hidden_size'"),
    ("llama3.1", dict(hidden_act="gelu"), "hidden_act 'gelu' is not implemented; only 'silu' is"),
    ("llama3.1", dict(rope_parameters=LLAMA3 | {"rope_type": "yarn"}), "'yarn' is not"),
    ("llama3.1", dict(rope_scaling={"type": "linear", "factor": 2.0}), "'linear' is not"),
    ("llama3.1", dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "lacks 'factor'"),
    ("llama3.1", dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    ("llama3.1", dict(original_max_position_embeddings=16), "is 16 at the top level and 32 in rope_scaling"),
    ("mistral", dict(sliding_window=63), "sliding_window 63 is below max_position_embeddings 64"),
    ("mistral", dict(sliding_window=DROP, max_position_embeddings=8192), "sliding_window 4096"),
    ("qwen2", dict(use_sliding_window=True), "use_sliding_window True"),
    ("gpt2", dict(activation_function="gelu"), "activation_function 'gelu' is not"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ("gpt2", dict(n_head=5), "d_model 32 is not a multiple of n_heads 5"),
    # of another type
    ("qwen2", dict(hidden_size="32"), "hidden_size '32' must be a whole number from 1 to 2147483647"),
    ("qwen2", dict(rope_parameters=None, rope_theta="1e4"), "rope_theta '1e4' must be a finite number"),
    ("qwen2", dict(tie_word_embeddings="false"), "tie_word_embeddings 'false' must be True or False"),
    ("qwen2", dict(rope_scaling=[8.0]), "rope_scaling [8.0] must be an object"),
    # sizes of another checkpoint, before memory is taken
    ("qwen2", dict(num_hidden_layers=10 ** 9), "num_hidden_layers 1000000000 must be a whole number"),
    ("qwen2", dict(hidden_size=2 ** 30, intermediate_size=2 ** 30), "more than 2**63 bytes"),
    ("qwen2", dict(vocab_size=2 ** 30), f"is [61, 32] and should be [{2 ** 30}, 32]")])
def test_a_config_that_is_not_understood_is_refused(copy, case, config, words):
    refused(copy(case, config), words)


NAME = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize("case, tensors, words", [
    ("qwen2", {NAME: DROP}, f"tensor {NAME} [16] is missing"),
    ("gpt2 3 heads", {"transformer.h.1.mlp.c_fc.weight": torch.ones(40, 24)},
     "c_fc.weight is [40, 24] and should be [24, 40]"),
    ("llama3.1", {NAME: torch.ones(32)}, f"{NAME!r} has"),  # a bias that config.json does not announce
    ("qwen2", {"embed_tokens.weight": torch.zeros(61, 32)}, "is the second tensor model.embed_tokens.weight"),
    ("qwen2", {NAME: torch.tensor([1.0] * 15 + [torch.nan])}, f"tensor {NAME} holds inf or nan"),
    ("qwen2", {NAME: torch.ones(16, dtype=torch.int8)}, f"tensor {NAME} holds torch.int8")])
def test_a_tensor_that_does_not_belong_is_refused(copy, case, tensors, words):
    refused(copy(case, tensors=tensors), words)


def test_a_folder_without_a_whole_checkpoint_is_refused(saved, tmp_path):
    refused(tmp_path / "nowhere", tmp_path / "nowhere" / "config.json", "is missing")
    shutil.copy(saved("qwen2") / "config.json", tmp_path)
    refused(tmp_path, "model.safetensors", "is missing")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "pytorch_model.bin", "pickle", "convert it to safetensors")
    (tmp_path.parent / "above.safetensors").touch()
    for content, words in (([], "has no weight_map"), (dict(a=3), "/3' is missing"),
                           (dict(a="../above.safetensors"), "above.safetensors' is missing")):
        write_config(dict(weight_map=content), tmp_path / "model.safetensors.index.json")
        refused(tmp_path, tmp_path, words)
    file, whole = tmp_path / "model.safetensors", (saved("qwen2") / "model.safetensors").read_bytes()
    for content in whole[:-4], b"version https://git-lfs.github.com/spec/v1":
        file.write_bytes(content)
        refused(tmp_path, file, "truncated or not a safetensors file")
    for text, words in ("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "holds a list"):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, f"config.json {words}")


def test_what_is_no_device_and_no_dtype_for_weights_is_refused(saved, tmp_path):
    for name in "meta", "hpu", "x":
        refused(saved("qwen2"), f"device {name!r} is not available", "use cpu", device=name)
    for dtype in torch.int8, "float16":
        refused(saved("qwen2"), "is not for weights; use one of torch.float16, torch.bfloat16", dtype=dtype)
        with pytest.raises(ValueError, match="is not for weights"):
            to_hf(Decoder(tiny()), tmp_path / "new", dtype)
    assert not (tmp_path / "new").exists()


def test_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer, neither tokenizer.json"):
        hf_tokenizer(tmp_path)
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({"the": 0, "cache": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = hf_tokenizer(tmp_path)
    assert tokenizer.encode_ordinary("the cache evicts") == [0, 1, 2]
    assert tokenizer.decode([1, 0]) == "cache the" and tokenizer.bos is None
    check_vocabulary(tokenizer, 3)


@pytest.mark.parametrize("name, content, words", [
    ("tokenizer.json", "{", "tokenizer.json is not JSON"),
    ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}}', "broken tokenizer"),
    ("vocab.json", "7", "vocab.json holds a int"),
    ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}', "custom code"),  # not run
])
def test_a_broken_tokenizer_is_named_in_one_line(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run the folder's code"))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        hf_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value) and len(str(error.value).splitlines()) == 1
