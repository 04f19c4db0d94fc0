"""Checkpoints in and out: we read what transformers saves, and it opens what we write."""

from functools import cache as once
import json
import shutil

from pytest import fixture, mark, raises
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch
from transformers import AutoModelForCausalLM

from nanollm.checkpoint import (
    from_hf,
    hf_model,
    hf_tokenizer,
    to_hf,
)
from nanollm.model import Decoder
from nanollm.tokenizer import check_vocabulary
from oracle import CASES, LLAMA3, TOKENS, oracle, same, tiny


@fixture(scope="module")
def saved(tmp_path_factory):
    """saved(case): a checkpoint that transformers saved. Not to be changed."""

    @once
    def save(case):
        folder = tmp_path_factory.mktemp("saved")
        oracle(case).save_pretrained(folder)
        return folder

    return save


DROP = object()  # as a new value: no such entry


@fixture
def copy(saved, tmp_path):
    """copy(case, config=…, tensors=…): a checkpoint with other entries and other tensors."""

    def copied(case, config=(), tensors=()):
        folder = tmp_path / "copy"
        shutil.copytree(saved(case), folder, dirs_exist_ok=True)
        file = folder / "config.json"
        entries = changed(json.loads(file.read_text()), config)
        file.write_text(json.dumps(entries))
        file = folder / "model.safetensors"
        save_file(changed(load_file(file), tensors), file)
        return folder

    return copied


def changed(content, changes):
    return {key: x for key, x in (content | dict(changes)).items() if x is not DROP}


def refused(folder, *words, read=from_hf, **options):
    """The folder is refused with a ValueError of one line that has all words."""
    with raises(ValueError) as error:
        read(folder, **options)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value).splitlines()) == 1


def equal(a: Decoder, b: Decoder):
    assert a.config == b.config
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


# ---- out, and in again ---


@torch.no_grad()
@mark.parametrize("case", [case for case in CASES if "llama" in case])
def test_what_we_write_transformers_opens(saved, tmp_path, case):
    ours = from_hf(saved(case))
    to_hf(ours, tmp_path, torch.float32)
    equal(from_hf(tmp_path), ours)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())  # no missing, unexpected or mismatched tensors
    same(theirs(TOKENS).logits, oracle(case)(TOKENS).logits)
    # generate would stop at the token of another tokenizer
    assert theirs.config.eos_token_id is None


def test_half_precision_round_trip_is_exact(saved, tmp_path):
    ours = from_hf(saved("llama3.1"), torch.float16)
    assert ours.freq.dtype == torch.float32
    assert torch.equal(ours.freq, Decoder(ours.config).freq)
    assert {p.dtype for p in ours.parameters()} == {torch.float16}
    to_hf(ours, tmp_path)
    equal(from_hf(tmp_path, torch.float16), ours)
    assert hf_model(tmp_path, "auto").dtype == torch.float16
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers 4 insists on it


def test_what_llamas_form_or_the_dtype_cannot_hold_is_not_written(tmp_path):
    large = Decoder(tiny())
    large.blocks[1].mlp.up.weight.data[0, 0] = 1e5
    for model, words in (
        (Decoder(tiny(family="gpt2")), "has not Llama's form"),
        (Decoder(tiny(qkv_bias=True)), "has not Llama's form"),
        (large, "layers.1.mlp.up_proj.weight holds inf"),
    ):
        refused(tmp_path / "new", words, read=lambda folder: to_hf(model, folder))
    assert not (tmp_path / "new").exists()


# ---- the forms a checkpoint comes in ---


def test_shards(saved, tmp_path):
    oracle("gpt2 untied").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (tmp_path / "other.safetensors").write_text("which the index does not list")
    equal(from_hf(tmp_path), from_hf(saved("gpt2 untied")))
    min(tmp_path.glob("model-*.safetensors")).unlink()
    refused(tmp_path, "Missing key(s)")


DERIVED = {
    "gpt2": {
        "h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    },
    "llama grouped tied": {
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": oracle("llama grouped tied").lm_head.weight.detach().clone(),
    },
}


@mark.parametrize(
    "case, prefix", [("gpt2", "transformer."), ("llama grouped tied", "model.")]
)
def test_names_without_prefix_and_tensors_that_follow_from_others(
    saved, copy, case, prefix
):
    file = copy(case) / "model.safetensors"
    tensors = load_file(file)
    bare = {name.removeprefix(prefix): x for name, x in tensors.items()}
    save_file(bare | DERIVED[case], file)
    equal(from_hf(file.parent), from_hf(saved(case)))


SCALING = {key: x for key, x in LLAMA3.items() if not key.startswith("rope")}
# as transformers 4 wrote them
THETA_APART = dict(rope_parameters=DROP, rope_theta=LLAMA3["rope_theta"])
OLD_SCALING = dict(rope_scaling=SCALING | dict(rope_type="llama3"))
OLDER_SCALING = dict(rope_scaling=SCALING | dict(type="llama3"))
# entries that an older config.json may lack
LATER = (
    "head_dim num_key_value_heads attention_bias mlp_bias "
    "rope_parameters tie_word_embeddings hidden_act"
).split()
DEFAULTS = (
    "n_inner tie_word_embeddings scale_attn_weights add_cross_attention"
).split()


@mark.parametrize(
    "case, config",
    [
        ("llama3.1", THETA_APART | OLD_SCALING),
        ("llama3.1", THETA_APART | OLDER_SCALING),
        ("llama multi-head", dict.fromkeys(LATER, DROP)),
        ("gpt2", dict.fromkeys(DEFAULTS, DROP)),
        (
            "llama multi-head",
            dict(rope_parameters=None, rope_theta=10_000, quantization_config=None),
        ),
    ],
)
def test_other_entries_that_say_the_same(saved, copy, case, config):
    equal(from_hf(copy(case, config)), from_hf(saved(case)))


# ---- errors ---

LINEAR = {"type": "linear", "factor": 2.0}


@mark.parametrize(
    "case, config, words",
    [
        ("llama3.1", dict(model_type="bert"), "'bert' is not one of llama, mistral"),
        ("llama3.1", dict(quantization_config={}), "quantization_config {} is not"),
        ("llama3.1", dict(hidden_size=DROP), "'hidden_size'"),
        ("llama3.1", dict(hidden_act="gelu"), "hidden_act 'gelu' is not 'silu'"),
        ("llama3.1", dict(rope_scaling=LINEAR), "'linear' is not"),
        ("llama3.1", dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        ("mistral", dict(sliding_window=DROP), "a sliding window"),
        ("qwen2", dict(use_sliding_window=True), "use_sliding_window True"),
        ("gpt2", dict(activation_function="gelu"), "activation_function 'gelu' is not"),
        ("gpt2", dict(n_head=5), "d_model 32 is not a multiple of n_heads 5"),
    ],
)
def test_a_config_that_decoder_would_compute_otherwise_is_refused(
    copy, case, config, words
):
    folder = copy(case, config)
    refused(folder, words, "config.json is not one that", "--engine transformers")


NAME = "model.layers.1.self_attn.k_proj.bias"
WIDE = {"transformer.h.1.mlp.c_fc.weight": torch.ones(40, 24)}
BIAS = {NAME.replace("k_proj", "o_proj"): torch.ones(32)}
WITH_NAN = {NAME: torch.tensor([1.0] * 15 + [torch.nan])}


@mark.parametrize(
    "case, tensors, words",
    [
        ("qwen2", {NAME: DROP}, "blocks.1.attention.k.bias"),
        (
            "qwen2",
            {"model.embed_tokens.weight": DROP},
            'Missing key(s) in state_dict: "embed',
        ),
        ("gpt2 3 heads", WIDE, "size mismatch for blocks.1"),
        ("llama3.1", BIAS, "Unexpected key(s) in state_dict"),
        ("qwen2", WITH_NAN, "attention.qkv.bias holds inf or nan"),
    ],
)
def test_a_tensor_that_does_not_belong_is_refused(copy, case, tensors, words):
    refused(copy(case, tensors=tensors), words)


def test_a_folder_without_a_whole_checkpoint_is_refused(saved, tmp_path):
    whole_folder = saved("qwen2")
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere" / "config.json"))
    shutil.copy(whole_folder / "config.json", tmp_path)
    # a pickle is never opened
    shutil.copy(whole_folder / "config.json", tmp_path / "pytorch_model.bin")
    refused(tmp_path, "model.safetensors")
    whole = (whole_folder / "model.safetensors").read_bytes()
    for content in whole[:-4], b"version https://git-lfs.github.com/spec/v1":
        (tmp_path / "model.safetensors").write_bytes(content)
        refused(tmp_path, "is damaged")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json")
    for device in "meta", "x":
        words = f"device {device!r} is not available", "use cpu"
        refused(whole_folder, *words, device=device)


def test_what_transformers_reads_is_whole_or_refused(copy, tmp_path):
    assert hf_model(copy("qwen2"), torch.bfloat16).dtype == torch.bfloat16
    folder = copy("qwen2", tensors={NAME: DROP})
    refused(folder, "it lacks 1 tensors", NAME, read=hf_model)
    refused(tmp_path / "nowhere", "transformers cannot read", read=hf_model)


def test_tokenizer(tmp_path):
    refused(tmp_path, "has no tokenizer", read=hf_tokenizer)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"the": 0, "cache": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = hf_tokenizer(tmp_path)
    assert tokenizer.encode_ordinary("the cache evicts") == [0, 1, 2]
    assert tokenizer.decode([1, 0]) == "cache the"
    assert tokenizer.bos is None
    check_vocabulary(tokenizer, 3)
    for content in "{", '{"version": "1.0", "model": {"type": "BPE"}}':
        (tmp_path / "tokenizer.json").write_text(content)
        refused(tmp_path, "transformers cannot read", read=hf_tokenizer)
    (tmp_path / "tokenizer.json").unlink()
    refused(tmp_path, "transformers cannot read", read=hf_tokenizer)
