"""Every method against loops: which tokens it keeps, and that its output is exact attention over just those.

A new method joins CASES with a loop written from its paper; the tests below need nothing else.
"""
from collections import Counter
from collections.abc import Callable
from functools import cache as once
from itertools import pairwise
import math
from typing import NamedTuple

import pytest
import torch

from methods.cam import CaM
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.quantized import LowBitVague
from methods.random_eviction import RandomEviction
from methods.streaming_llm import StreamingLLM
from nanollm.cache import LayerCache, finish_prompt, make_cache, window_rows, window_votes
from nanollm.generate import generate
from nanollm.model import Config, Decoder

B, H, G, D = 2, 2, 3, 8
FREQ = 10.0 ** -(torch.arange(D // 2) / 4)
SLOT = 2 * D * 4 + 4  # bytes of k, v and a position


# ---- which tokens stay: loops. A text comes in parts; from the one that ends the prompt on, each part evicts ---


def streaming(q, k, parts, prompt, budget, sinks=4, relative=True):
    """Section 3.2: the first tokens and the most recent ones."""
    for part in parts:
        n = part.stop
        everything = n < prompt or n <= budget
        kept = list(range(n)) if everything else [*range(sinks), *range(n - (budget - sinks), n)]
        yield [[kept] * H] * B


def heavy_hitters(q, k, parts, prompt, budget, recent=0.5):
    """Algorithm 1: F accumulates attention; as long as there are too many, the least F outside the recent tokens goes."""
    F = [[{} for _ in range(H)] for _ in range(B)]
    for part in parts:
        for b in range(B):
            for h in range(H):
                score = F[b][h]
                score |= dict.fromkeys(part, 0.0)
                for t in part:
                    seen = [i for i in score if i <= t]
                    for g in range(G):
                        p = (k[b, h, seen] @ q[b, h * G + g, t] / math.sqrt(D)).softmax(0)
                        for i, weight in zip(seen, p.tolist()):
                            score[i] += weight
                while part.stop >= prompt and len(score) > budget:
                    old = [i for i in score if i < part.stop - max(1, round(recent * budget))]
                    del score[min(old, key=lambda i: (score[i], i))]
        yield [[sorted(score) for score in row] for row in F]


def reservoir(q, k, parts, prompt, budget, seed=0):
    """Vitter's reservoir by priorities: the highest of all drawn so far."""
    generator = torch.Generator().manual_seed(1000 * seed)
    drawn = torch.empty(B, H, 0)
    for part in parts:
        drawn = torch.cat((drawn, *(torch.rand(B, H, 1, generator=generator) for _ in part)), 2)
        size = part.stop if part.stop < prompt else budget
        yield [[sorted(head.topk(min(size, part.stop)).indices.tolist()) for head in row] for row in drawn]


class Case(NamedTuple):
    Method: type[LayerCache]
    knobs: dict
    kept: Callable            # the loop
    slot: int = SLOT          # bytes per slot
    besides: int = 0          # bytes per key/value head beside the slots, once something was evicted
    in_cache: bool = False    # positions are counted inside the cache


CASES = {
    "streaming": Case(StreamingLLM, dict(budget=9), streaming, besides=4 * D * 4, in_cache=True),
    "streaming absolute": Case(StreamingLLM, dict(budget=9, relative=False), streaming),
    "streaming 1 sink": Case(StreamingLLM, dict(budget=2, sinks=1), streaming, besides=D * 4, in_cache=True),
    "window": Case(StreamingLLM, dict(budget=6, sinks=0), streaming, in_cache=True),
    "h2o": Case(H2O, dict(budget=8), heavy_hitters, SLOT + 4),
    "h2o no recent": Case(H2O, dict(budget=6, recent=0.0), heavy_hitters, SLOT + 4),
    "h2o all recent": Case(H2O, dict(budget=6, recent=1.0), heavy_hitters, SLOT + 4),
    "h2o smallest": Case(H2O, dict(budget=2), heavy_hitters, SLOT + 4),
    "random": Case(RandomEviction, dict(budget=8), reservoir, SLOT + 4),
    "random seeded": Case(RandomEviction, dict(budget=1, seed=3), reservoir, SLOT + 4),
}
each_case = pytest.mark.parametrize("case", CASES)
# prompt tokens, how many come at a time before its end, and after it
each_walk = pytest.mark.parametrize("prompt, chunk, block", [(20, 20, 1), (20, 7, 1), (20, 1, 1), (20, 8, 5),
                                                             (3, 3, 1), (3, 2, 4)])


def turn(x, pos):
    """RoPE as complex numbers: x (..., D) at positions pos (...)."""
    z = torch.complex(x[..., :D // 2], x[..., D // 2:])
    z = z * torch.polar(torch.ones(()), pos.float()[..., None] * FREQ)
    return torch.cat((z.real, z.imag), -1)


class Step(NamedTuple):
    part: range
    before: list     # [b][h]: positions that the loop keeps before these tokens
    after: list      # and after them
    y: torch.Tensor  # (B, H·G, T, D)
    pos: torch.Tensor
    bytes: tuple[int, int]


@once
def walk(case: str, prompt: int, chunk: int, block: int, T: int = 34) -> tuple[tuple, list[Step]]:
    """Feed a text in parts; unrotated q, k, v and what happened at each part."""
    Method, knobs, kept, *_ = CASES[case]
    g = torch.Generator().manual_seed(0)
    raw = q, k, v = [torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H)]
    q, k = turn(q, torch.arange(T)), turn(k, torch.arange(T))
    edges = [*range(0, prompt, chunk), *range(prompt, T, block), T]
    parts = [range(a, b) for a, b in pairwise(edges)]
    cache = Method(**knobs)
    cache.link(0, 1, None, None, FREQ)
    steps, before = [], [[[]] * H] * B
    for part, after in zip(parts, kept(q, k, parts, prompt, **knobs)):
        i = slice(part.start, part.stop)
        y = cache.attend(q[:, :, i], k[:, :, i], v[:, :, i], torch.arange(part.start, part.stop)[None])
        if part.stop == prompt:
            cache.finish_prompt()
        steps.append(Step(part, before, after, y, cache.pos.clone(), cache.bytes()))
        before = after
    return raw, steps


@each_case
@each_walk
def test_kept_tokens_equal_the_loop(case, prompt, chunk, block):
    for step in walk(case, prompt, chunk, block)[1]:
        assert step.pos.sort(-1).values.tolist() == step.after, step.part


@each_case
@each_walk
def test_output_is_dense_attention_over_exactly_the_kept_tokens(case, prompt, chunk, block):
    (q, k, v), steps = walk(case, prompt, chunk, block)
    for step in steps:
        for b in range(B):
            for h in range(H):
                there = torch.tensor([*step.before[b][h], *step.part])
                at = torch.arange(len(there)) if CASES[case].in_cache else there
                keys, query_at = turn(k[b, h, there], at), at[-len(step.part):]
                for g in range(G):
                    score = turn(q[b, h * G + g, step.part], query_at) @ keys.T / math.sqrt(D)
                    score[torch.tensor(step.part)[:, None] < there] = -math.inf
                    assert torch.allclose(step.y[b, h * G + g], score.softmax(-1) @ v[b, h, there], atol=1e-5), step.part


@each_case
@each_walk
def test_slots_never_exceed_the_budget_and_bytes_say_so(case, prompt, chunk, block):
    _, knobs, _, slot, besides, _ = CASES[case]
    for step in walk(case, prompt, chunk, block)[1]:
        n, seen = step.pos.shape[2], step.part.stop
        assert n == (seen if seen < prompt else min(seen, knobs["budget"]))
        rotated = besides if len(step.before[0][0]) < step.part.start else 0  # made when something was missing for the first time
        live, allocated = step.bytes
        assert live == B * H * (n * slot + rotated)
        assert live <= allocated <= B * H * (1.1 * (n + len(step.part)) * slot + rotated)


# ---- in the decoder ---


def decoder(**changed):
    torch.manual_seed(0)
    model = Decoder(Config(**dict(vocab_size=50, max_len=64, n_layers=3, n_heads=6, n_kv_heads=2, d_model=48, d_ff=64) | changed))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()


TOKENS = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))


@each_case
@pytest.mark.parametrize("chunk", [30, 7, 1])
@torch.inference_mode()
def test_room_for_everything_is_full_attention(case, chunk):
    reads_and_decodes_as_the_full_cache(CASES[case].Method, CASES[case].knobs | dict(budget=40), chunk)


def reads_and_decodes_as_the_full_cache(Method, knobs, chunk):
    """A prompt of 30 tokens and 10 more."""
    model = decoder()
    caches = make_cache(model, Method, **knobs)
    out = [model(part, caches) for part in TOKENS[:, :30].split(chunk, 1)]
    finish_prompt(caches)
    out += [model(TOKENS[:, i:i + 1], caches) for i in range(30, 40)]
    assert torch.allclose(torch.cat(out, 1), model(TOKENS), atol=1e-5)
    assert [cache.length for cache in caches] == [40] * 3


@each_case
def test_a_prompt_of_one_token(case):
    """Nothing is cached yet when the prompt ends."""
    model, (Method, knobs, *_) = decoder(), CASES[case]
    expected = generate(model, TOKENS[:, :1], 12)
    assert torch.equal(generate(model, TOKENS[:, :1], 12, make_cache(model, Method, **knobs | dict(budget=12))), expected)
    caches = make_cache(model, Method, **knobs)
    generate(model, TOKENS[:, :1], 12, caches)
    assert [(cache.length, cache.seen) for cache in caches] == [(knobs["budget"], 12)] * 3


# ---- each method's own ---


def fill(cache, T, strong=()):
    """T tokens; every query gives all its weight to the latest `strong` token that it sees, exactly 0 to the others."""
    k = torch.zeros(B, H, T, D)
    for n, i in enumerate(strong):
        k[:, :, i, 0] = 1000 * (n + 1)
    q = torch.zeros(B, H * G, T, D)
    q[..., 0] = 1
    cache.link(0, 1, None, None, FREQ)
    cache.attend(q, k, torch.zeros(B, H, T, D), torch.arange(T)[None])
    cache.finish_prompt()
    return cache


def feed(cache, T=1):
    pos = torch.arange(cache.seen, cache.seen + T)[None]
    cache.attend(*(torch.zeros(B, heads, T, D) for heads in (H * G, H, H)), pos)


def test_h2o_keeps_heavy_hitters_and_of_equals_the_newest():
    cache = fill(H2O(budget=6), 20, strong=(0, 5))
    assert (cache.pos == torch.tensor([0, 5, 16, 17, 18, 19])).all()  # 16 is as light as 1 … 15
    cache = fill(H2O(budget=6), 7, strong=(0, 5))  # one too many: the path that drops a single slot
    assert (cache.pos.sort(-1).values == torch.tensor([0, 2, 3, 4, 5, 6])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [300, 1])
@pytest.mark.parametrize("Method, knobs", [
    (H2O, dict(budget=300)), (CaM, dict(budget=300)), (KVReviver, dict(budget=300)), (LowBitVague, {})])
def test_attention_is_added_up_in_32_bits(Method, knobs, dtype, chunk):
    """Of all the queries, and of each call's: in 16 bits the sum of a token that all look at would hardly grow."""
    class Notes(Method):
        def observe(self, q, p):
            expected[..., :p.shape[-1]] += p.double().sum((2, 3))
            super().observe(q, p)

    cache, expected, g = Notes(**knobs), torch.zeros(B, H, 300, dtype=torch.float64), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, 300, D, generator=g, dtype=torch.float32).to(dtype) for heads in (H * G, H, H))
    k[:, :, 0] = 4 * q[:, ::G].mean(2)
    for part in torch.arange(300).split(chunk):
        cache.attend(*(x[:, :, part] for x in (q, k, v)), part[None])
    total = cache.score if Method is KVReviver else cache.slot("accumulated")
    torch.testing.assert_close(total[..., :300].double(), expected, rtol=1e-5, atol=0)
    assert cache.k.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_votes_of_16_bits_are_averaged_in_32(dtype):
    """Means in 16 bits would often be equal, and equal votes go to the newest token."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, H, G, 32, D, generator=g).to(dtype), torch.randn(B, H, 300, D, generator=g).to(dtype)
    votes = window_votes(q, k)
    assert votes.dtype == torch.float32
    torch.testing.assert_close(votes.double(), window_rows(q, k)[..., :-32].double().mean(3), rtol=1e-5, atol=0)


def test_a_state_that_is_not_given_is_0_where_another_slot_was_before():
    cache, x = LayerCache(), torch.ones(B, H, 4, D)
    cache.write(x, x, torch.arange(4)[None], mass=x[..., 0])
    cache.drop(torch.zeros(B, H, 1, dtype=torch.long))
    cache.write(x[:, :, :1], x[:, :, :1], torch.tensor([[4]]))
    assert cache.slot("mass").tolist() == [[[1, 1, 1, 0]] * H] * B and cache.slots["mass"].shape[2] == 4


def test_random_breaks_ties_towards_the_newest(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda size, generator: torch.zeros(size))
    cache = fill(RandomEviction(budget=6), 20)
    assert (cache.pos == torch.arange(14, 20)).all()
    feed(cache)
    assert (cache.pos.sort(-1).values == torch.arange(15, 21)).all()


def test_random_keeps_every_token_alike():
    """Positions kept by 4000 heads, after the prompt and after a stretch of decoding."""
    cache = RandomEviction(budget=8)
    cache.link(0, 1, None, None, None)
    x = torch.zeros(40, 100, 24, 1)
    cache.attend(x[:, :, :16], x[:, :, :16], x[:, :, :16], torch.arange(16)[None])
    cache.finish_prompt()
    for seen in (16, 24):
        counts = Counter(cache.pos.flatten().tolist())
        mean, sd = 4000 * 8 / seen, math.sqrt(4000 * 8 / seen * (1 - 8 / seen))
        assert sorted(counts) == list(range(seen))
        assert all(abs(n - mean) < 4 * sd for n in counts.values())
        for t in range(seen, min(24, seen + 8)):
            cache.attend(*[x[:, :, t:t + 1]] * 3, torch.tensor([[t]]))


def test_random_differs_by_seed_layer_head_and_row_and_by_nothing_else():
    def kept(seed):
        model = decoder()
        caches = make_cache(model, RandomEviction, budget=8, seed=seed)
        generate(model, TOKENS, 4, caches)
        return torch.stack([cache.pos.sort(-1).values for cache in caches])  # (L, B, H, 8)

    one, again, other = kept(0), kept(0), kept(1)
    assert torch.equal(one, again)
    different = {tuple(head) for head in torch.cat((one, other)).flatten(0, 2).tolist()}
    assert len(different) == 2 * 3 * 2 * 2


@torch.inference_mode()
def test_streaming_on_learned_positions_needs_them_absolute():
    model = decoder(family="gpt2", n_kv_heads=6)
    with pytest.raises(ValueError, match="learned its positions; set relative=False"):
        make_cache(model, StreamingLLM, budget=8)
    caches = make_cache(model, StreamingLLM, budget=40, relative=False)
    assert torch.allclose(model(TOKENS, caches), model(TOKENS), atol=1e-5)


@pytest.mark.parametrize("Method, knobs, message", [
    (H2O, dict(budget=1), "budget 1 must be at least 2"),
    (H2O, dict(budget=8, recent=1.5), "recent 1.5"),
    (H2O, dict(budget=8, recent=-0.1), "recent -0.1"),
    (StreamingLLM, dict(budget=4), "budget 4 must be at least 5: 4 sinks"),
    (StreamingLLM, dict(budget=0, sinks=0), "budget 0 must be at least 1"),
    (StreamingLLM, dict(budget=8, sinks=-1), "sinks -1"),
    (RandomEviction, dict(budget=0), "budget 0 must be at least 1"),
    (RandomEviction, dict(budget=8, seed=2 ** 62), "seed 4611686018427387904 must be a whole number from 0 to"),
    (RandomEviction, dict(budget=8, seed=-1), "seed -1 must be"),
])
def test_bad_knobs_are_refused_at_construction(Method, knobs, message):
    with pytest.raises(ValueError, match=message):
        Method(**knobs)
