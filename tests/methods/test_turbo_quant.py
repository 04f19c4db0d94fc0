"""TurboQuant: the codebook, the rotation, and what attention reads back."""
import math

import pytest
import torch

from common import TOKENS, decoder
from methods.turbo_quant import TurboQuant, codebook, decode, encode, random_matrix
from nanollm.cache import make_cache
from nanollm.generate import end_prompt, prefill


@pytest.mark.parametrize("bits, error", [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_codebook_is_the_best_one_for_a_normal_number(bits, error):
    """The mean squared errors are those of Max (1960), table I."""
    centroids, borders = codebook(bits)
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    rounded = centroids[torch.bucketize(x, borders)]
    assert (x - rounded).square().mean().item() == pytest.approx(error, rel=0.02)
    assert torch.allclose(centroids, -centroids.flip(0), atol=1e-5)


def test_a_vector_is_rounded_equally_well_wherever_it_points():
    g = torch.Generator().manual_seed(1)
    turn = random_matrix(32, True)
    assert torch.allclose(turn @ turn.mT, torch.eye(32), atol=1e-5)
    spike = torch.eye(32).repeat(16, 1) * 7.0  # one channel has everything, as a key's outlier
    spike += 0.1 * torch.randn(512, 32, generator=g)
    for x in (torch.randn(500, 32, generator=g) * 3, spike):
        code, length = encode(x, 3)
        assert code.max() < 8 and torch.allclose(length.float(), x.norm(dim=1, keepdim=True), rtol=1e-3)
        lost = (x - decode(code, length.float(), 3)).square().sum() / x.square().sum()
        assert lost < 0.05  # 0.0345 for normal numbers; a vector's rotation is not quite normal


def attended(bits, second):
    """Caches of a decoder after a prompt: as they were, and as they are read back."""
    model, tokens = decoder(), TOKENS[:, :30]
    caches = make_cache(model, TurboQuant, bits=bits, second=second)
    prefill(model, tokens, caches)
    before = [(cache.k.clone(), cache.v.clone()) for cache in caches]
    end_prompt(model, tokens, caches)
    return model, caches, before


@pytest.mark.parametrize("second", [False, True])
@torch.no_grad()
def test_what_is_read_is_the_papers_formula(second):
    model, caches, before = attended(2, second)
    centroids, borders = codebook(2)
    for cache, (k, v) in zip(caches, before):
        D = k.shape[-1]
        turn, S, half_pi = random_matrix(D, True), random_matrix(D, False), math.sqrt(math.pi / 2)
        for name, x in (("k", k), ("v", v)):
            for place in ((0, 0, 3), (1, 1, 29)):
                y, got = x[place], cache.slot(name)[place]
                length = y.norm().half().float()
                code = torch.bucketize(turn @ y * D ** 0.5 / length, borders)
                expected = turn.mT @ centroids[code] * length / D ** 0.5
                if name == "k" and second:
                    rest = y - expected
                    expected = expected + half_pi / D * rest.norm() * (S.mT @ (S @ rest).sign())
                assert torch.allclose(got, expected, atol=2e-3), (name, place)
    late = model(TOKENS[:, 30:31], caches)
    assert late.isfinite().all() and caches[0].length == 31
    assert torch.equal(caches[0].pos, torch.arange(31).int().expand_as(caches[0].pos))


@torch.no_grad()
def test_the_second_stage_makes_products_right_on_average():
    """The keys are rounded toward 0 by the first stage; the second takes that away."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(20_000, 32, generator=g)
    code, length = encode(x, 1)
    once = decode(code, length.float(), 1)
    rest, S = x - once, random_matrix(32, False)
    twice = once + (rest @ S.mT).sign() @ S * (rest.norm(dim=1, keepdim=True) * math.sqrt(math.pi / 2) / 32)
    along = lambda y: ((x * y).sum() / x.square().sum()).item()
    assert along(once) < 0.7 and along(twice) == pytest.approx(1, abs=0.05)


@torch.no_grad()
def test_bytes_are_codes_and_lengths():
    for second, more in ((False, 0), (True, 1)):
        _, caches, before = attended(3, second)
        k = before[0][0]
        n, D = k[..., 0].numel(), k.shape[-1]
        heads = k.shape[0] * k.shape[1]
        positions, lengths = 4 * n, (2 + second) * 2 * n
        live, _ = caches[0].bytes()
        assert live == n * D * (3 + 3 + more) // 8 + lengths + positions + 8 * heads
