"""Weights in a GGUF file's blocks: the same numbers, few rows in 4 bits, the same fingerprint."""

import gguf as files
import numpy as np
from pytest import fixture, mark, raises
import torch
from torch import nn
import torch.nn.functional as F

from lab import loading
from nanollm import TINY, block_linear
from nanollm.block_linear import BLOCK, BlockLinear, blocks, number_format
from nanollm.cache import make_cache
from nanollm.generate import prefill
from lab.saved import fingerprint
from small_gguf import written

KINDS = [*block_linear.BYTES]


def quantised(kind, rows=160, d=96) -> tuple[np.ndarray, torch.Tensor]:
    """Return bytes in GGUF, and the numbers (rows, d) that gguf's authors read in them."""
    kind = files.GGMLQuantizationType[kind]
    x = np.random.default_rng(0).normal(size=(rows, d)).astype(np.float32)
    data = files.quantize(x, kind)
    return data, torch.tensor(files.dequantize(data, kind))


@fixture
def processor(monkeypatch):
    """Return processor(capability, bfloat16): it sets what this machine's processor can do."""

    def has(capability, bfloat16=False):
        patch = monkeypatch.setattr
        patch(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        patch(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
        patch(torch.cpu, "_is_amx_tile_supported", lambda: False)

    has("AVX512")
    return has


@mark.parametrize("kind", KINDS)
def test_blocks_are_the_files_numbers(kind):
    data, right = quantised(kind)
    q, scale_and_zero = blocks(data, kind)
    scale, zero = scale_and_zero.split(1, -1)
    found = scale * (q.view(*scale.shape[:2], BLOCK).float() - 8) + zero
    found = found.view(len(q), -1, 2 if kind == "Q8_0" else 1, BLOCK).sum(2)
    torch.testing.assert_close(found.flatten(1), right, rtol=1e-6, atol=1e-6)


@mark.parametrize("kind", KINDS)
@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_few_rows_are_multiplied_in_4_bits_and_more_by_the_weight(
    kind, dtype, monkeypatch
):
    monkeypatch.setattr(block_linear, "ROWS", 64)  # pieces
    data, weight = quantised(kind)
    linear = nn.Linear(96, 160, dtype=dtype)
    linear.weight.copy_(weight)
    packed = BlockLinear(linear, data, kind)
    for shape in ((1, 1), (2, 4), (3, 40)):
        x = torch.randn(*shape, 96, dtype=dtype)
        y = packed(x)
        right = linear(x)
        assert y.dtype == dtype
        if shape == (3, 40):
            assert torch.equal(y, right)
        else:
            off = (y - right).float().norm() / right.float().norm()
            assert 1e-5 < off < 0.01  # numbers in bfloat16 have 8 bits
    with torch.enable_grad():
        x = torch.randn(1, 96, dtype=dtype, requires_grad=True)
        assert torch.equal(packed(x), linear(x))


@mark.parametrize("kind", KINDS)
@mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_a_decoder_in_4_bits_computes_what_it_does_in_32(
    kind, family, tmp_path, processor
):
    """Its layers read a prompt by their weights, and a later token by the file's blocks."""
    file = tmp_path / "m.gguf"
    size = dict(hidden_size=64, intermediate_size=96)
    written(file, family, quantised=kind, tie_word_embeddings=True, **size)
    plain, _ = loading.load(file, dtype="float32")
    packed, _ = loading.load(file)  # "auto"
    assert number_format(packed) == "4bit"
    is_block = [isinstance(x, BlockLinear) for x in packed.modules()]
    assert sum(is_block) == 2 * 5 + 1  # 5 a layer, and the head
    assert plain.state_dict().keys() == packed.state_dict().keys()
    assert fingerprint(plain) == fingerprint(packed)

    tokens = torch.arange(40)[None]
    caches = [make_cache(model) for model in (plain, packed)]
    prefill(plain, tokens, caches[0])
    prefill(packed, tokens, caches[1])
    for layer, other in zip(*caches):
        assert torch.equal(layer.k, other.k)
    right = plain(tokens[:, :1], caches[0])[0, 0]
    found = packed(tokens[:, :1], caches[1])[0, 0]
    assert F.cosine_similarity(found, right, 0) > 0.999
    assert not torch.equal(found, right)

    processor("AVX512", bfloat16=True)
    packed, _ = loading.load(file)
    assert packed.embed.weight.dtype == torch.bfloat16
    assert fingerprint(plain) == fingerprint(packed)
    later = packed(tokens[:, :5])[0, -1].float()
    assert F.cosine_similarity(later, plain(tokens[:, :5])[0, -1], 0) > 0.99


def test_where_4_bits_are_slow_they_are_refused_or_32_in_their_place(
    tmp_path, processor
):
    file = tmp_path / "m.gguf"
    written(file, "llama", quantised="Q4_0")
    with raises(ValueError, match="^dtype is 4bit, but .*tiny is no GGUF file"):
        loading.load(TINY, dtype="4bit")
    with raises(ValueError, match="runs on the CPU, and the device is cuda"):
        loading.load(file, "cuda", dtype="4bit")
    written(file, "llama")
    with raises(ValueError, match="has no blocks of Q4_0, Q4_1, Q8_0"):
        loading.load(file, dtype="4bit")
    processor("AVX2")
    with raises(ValueError, match="needs a processor with AVX512, and this one has"):
        loading.load(file, dtype="4bit")
    assert number_format(loading.load(file)[0]) == "float32"


def test_a_fingerprint_misses_no_weight_and_no_format_changes_it():
    model, _ = loading.load(TINY)
    name = fingerprint(model)
    assert fingerprint(model.to(torch.bfloat16)) == name
    for weight in model.parameters():
        weight.data.view(-1)[-1] += 1
        before, name = name, fingerprint(model)
        assert name != before
