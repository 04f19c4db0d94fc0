"""The interface: what is written is read, what is evicted is gone, attention stays exact on the rest."""

from copy import deepcopy
from itertools import product
import math

from hypothesis import given, settings, strategies as st
import pytest
import torch

from common import decoder, dense, end
from lab.evaluate import full_cache_bytes
from methods.baselines.snap_kv import SnapKV
from nanollm.cache import (
    ALL,
    NEVER,
    LayerCache,
    PerEntry,
    ScoredCache,
    begin_turn,
    cache_bytes,
    compress,
    crop,
    make_cache,
)
from nanollm.model import Config
from nanollm.packed import keep_highest
from nanollm.ranking import top


def draw(T, B=2, H=2, G=3, D=8, seed=0):
    """q, k, v; q as a view of another order, as from a decoder."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, heads, D, generator=g) for heads in (H * G, H, H))
    return (
        q.transpose(1, 2),
        k.transpose(1, 2).contiguous(),
        v.transpose(1, 2).contiguous(),
    )


def fill(cache, T, seed=0, **shape):
    q, k, v = draw(T, seed=seed, **shape)
    y = cache.attend(q, k, v, torch.arange(cache.seen, cache.seen + T)[None])
    return q, k, v, y


def causal(q, k, bias=0):
    """Return the probabilities (B, H, G, T, T) of causal attention by definition."""
    score = (q.unflatten(1, (k.shape[1], -1)) @ k.mT.unsqueeze(2)) / math.sqrt(
        k.shape[3]
    )
    score = score + (bias[:, :, None, None] if torch.is_tensor(bias) else bias)
    return score.masked_fill(
        torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf
    ).softmax(-1)


class Watched(LayerCache):
    """Full attention that asks for the probabilities of every query, or of a window; perhaps biased."""

    def __init__(self, watch, bias=None):
        super().__init__()
        self.watch, self.heard, self.bias = watch, [], bias

    def write(self, k, v, pos):
        super().write(
            k, v, pos, **{} if self.bias is None else dict(bias=self.bias[:, :, pos[0]])
        )

    def observe(self, q, p):
        self.heard.append(p)


def test_a_long_prompt_is_watched_in_tiles_and_a_long_question_whole():
    # the question may evict once
    for prompt_done, tiles in ((False, [64, 64, 64, 64, 44]), (True, [300])):
        (q, k, v), cache = draw(300), Watched(ALL)
        cache.prompt_done = prompt_done
        y = cache.attend(q, k, v, torch.arange(300)[None])
        assert torch.allclose(
            y, (causal(q, k) @ v.unsqueeze(2)).flatten(1, 2), atol=1e-5
        )
        assert [p.shape[3] for p in cache.heard] == tiles


@pytest.mark.parametrize("watch", [0, 1, 3, ALL])
@pytest.mark.parametrize("chunks", [[11], [5, 1, 5]])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("G", [1, 3])
def test_output_and_watched_weights_are_those_of_causal_attention(
    watch, chunks, biased, G
):
    (q, k, v), bias, done = draw(11, G=G), torch.randn(2, 2, 11) * biased, 0
    weights = causal(q, k, bias)
    expected, cache = (
        (weights @ v.unsqueeze(2)).flatten(1, 2),
        Watched(watch, bias if biased else None),
    )
    for n in chunks:
        part, done = slice(done, done + n), done + n
        y = cache.attend(
            q[:, :, part], k[:, :, part], v[:, :, part], torch.arange(11)[None, part]
        )
        assert torch.allclose(y, expected[:, :, part], atol=1e-5)
        p, w = cache.heard[-1], min(watch, n)
        assert (p is None) == (w == 0)
        if w:
            assert p.shape == (2, 2, G, w, done)
            assert torch.allclose(
                p, weights[..., done - w : done, :done], rtol=1e-5, atol=1e-7
            )
            # the first watched query sees nothing newer
            assert (p[..., 0, done - w + 1 :] == 0).all()


def test_growth_keeps_slack_small_and_does_not_copy_at_every_token():
    cache, moved, before = LayerCache(), 0, None
    for T in [100] + [1] * 400:
        fill(cache, T, seed=cache.seen, B=1, H=1, G=1)
        moved += cache.slots["k"].data_ptr() != before
        before = cache.slots["k"].data_ptr()
    live, allocated = cache.bytes()
    assert live == 500 * (2 * 8 * 4 + 4)  # k and v of 8 floats, and a 4-byte position
    assert live <= allocated <= live * 1.1 + 1
    assert moved < 20


@pytest.mark.parametrize(
    "kept",
    [
        [[[1, 4, 8], [0, 2, 3]], [[5, 6, 7], [2, 4, 6]]],
        [[[1, 4, 8], [2, -1, -1]], [[5, 6, -1], [2, 4, 6]]],
        [[[*range(9)], [2] + [-1] * 8], [[-1] * 9, [5, 6] + [-1] * 7]],
    ],
)
@pytest.mark.parametrize("T", [1, 4])
def test_keep_moves_every_slot_and_attention_sees_what_is_left(kept, T):
    # in the last case a head keeps everything
    cache, kept = LayerCache(), torch.tensor(kept)
    n = kept.shape[2]
    _, k0, v0, _ = fill(cache, 9)
    cache.slots["score"], full, there = cache.pos.float() * 10, cache.bytes(), kept >= 0
    cache.keep(kept)
    assert (cache.pos == kept.where(there, NEVER)).all() and cache.ragged == (
        not there.all()
    )
    assert (cache.slot("score")[there] == kept[there] * 10).all()
    i = kept.clamp(min=0)[..., None].expand(2, 2, n, 8)
    assert torch.equal(cache.k[there], k0.gather(2, i)[there])
    assert (cache.length, cache.seen) == (n, 9)
    live, allocated = cache.bytes()
    assert allocated == (full[1] + 9 * 4 * 4) * n // 9  # given back, not masked
    assert live == allocated * there.sum() // (4 * n)

    q, k, v, y = fill(cache, T, seed=5)
    visible = torch.zeros(2, 2, T, 9 + T, dtype=torch.bool)
    visible[..., 9:] = torch.ones(T, T, dtype=torch.bool).tril()
    visible[..., :9] = (torch.arange(9) == kept[..., None]).any(2).unsqueeze(2)
    assert torch.allclose(
        y, dense(q, torch.cat((k0, k), 2), torch.cat((v0, v), 2), visible), atol=1e-5
    )
    # absolute positions go on
    assert (cache.pos[..., -T:] == torch.arange(9, 9 + T)).all()


def uneven():
    """The same slots padded and packed; heads keep 3, 1, 2 and no token, and a score travels along."""
    padded = SnapKV(budget=33)
    fill(padded, 9)
    padded.prompt_done, padded.queries = True, None
    padded.slots["score"] = padded.pos.float() * 10
    padded.keep(torch.tensor([[[1, 4, 8], [-1, -1, 2]], [[-1, 5, 6], [-1, -1, -1]]]))
    packed = deepcopy(padded)
    packed.pack(packed.pos != NEVER)
    return padded, packed


def same_slots(padded, packed):
    there = padded.pos != NEVER
    assert torch.equal(packed.pos, padded.pos)  # NEVER where there is nothing
    assert padded.slots.keys() == packed.slots.keys()
    assert all(
        torch.equal(packed.slot(name)[there], padded.slot(name)[there])
        for name in padded.slots
    )


def test_packed_heads_are_those_of_the_padded_cache():
    padded, packed = uneven()
    each, table = 2 * 8 * 4 + 4 + 4, 4 * 8
    assert (
        padded.bytes() == (6 * each, 12 * each)
        and packed.bytes() == (6 * each + table,) * 2
    )
    for T in (1, 3, 1, 20):
        before = deepcopy(packed)
        (*_, y), (*_, expected) = fill(packed, T, seed=T), fill(padded, T, seed=T)
        assert torch.allclose(y, expected, atol=1e-6)
        same_slots(padded, packed)
        assert (packed.length, packed.seen, before.length) == (
            padded.length,
            padded.seen,
            padded.length - T,
        )
        live, allocated = packed.bytes()
        assert (
            live == (6 + 4 * (packed.seen - 9)) * each + table
            and live <= allocated <= 1.1 * live
        )
        assert torch.equal(before.pos, padded.pos[..., :-T])  # a copy is not written to


def test_keep_takes_from_packed_and_later_slots():
    padded, packed = uneven()
    for cache in (padded, packed):
        fill(cache, 4)
        cache.keep(torch.tensor([[[0, 2, 5], [2, 3, -1]], [[2, 3, 4], [6, -1, -1]]]))
    same_slots(padded, packed)
    assert packed.pos[0, 0].tolist() == [1, 8, 11] and packed.pos[1, 1].tolist() == [
        12,
        NEVER,
        NEVER,
    ]
    assert packed.bytes() == padded.bytes() and not packed.packed


def test_a_packed_cache_may_watch_and_have_a_bias():
    padded = uneven()[0]
    padded.slots["bias"], padded.watch = (
        padded.pos.masked_fill(padded.pos == NEVER, 0) / 7,
        3,
    )
    packed = deepcopy(padded)
    packed.pack(packed.pos != NEVER)
    for _ in range(2):
        q, k, v = draw(1, seed=5)
        pos = torch.tensor([[padded.seen]])
        for cache in (padded, packed):
            cache.write(k, v, pos, bias=torch.full((2, 2, 1), 0.5))
        (y, p), (expected_y, expected_p) = (
            packed.attention(q, pos),
            padded.attention(q, pos),
        )
        assert torch.allclose(y, expected_y, atol=1e-6) and torch.allclose(
            p, expected_p, atol=1e-6
        )


# slots that heads keep; −1: no slot
EVEN = [[[1, 4, 8], [8, 0, 3]], [[8, 7, 6], [2, 4, 6]]]
UNEVEN = [[[1, 4, 8], [2, -1, -1]], [[5, 8, -1], [6, 7, -1]]]


@pytest.mark.parametrize(
    "kept, packed", [(None, False), (EVEN, False), (UNEVEN, False), (UNEVEN, True)]
)
@pytest.mark.parametrize(
    "new, n", [(0, 9), (0, 8), (0, 6), (2, 11), (2, 10), (2, 7), (2, 0)]
)
def test_crop_forgets_the_newest_tokens(kept, packed, new, n):
    """Entries of tokens before n are left, and new tokens come as if the others had never been there."""
    cache = SnapKV(budget=33)
    k0, v0 = fill(cache, 9)[1:3]
    cache.prompt_done, cache.queries = True, None
    if kept is not None:
        cache.keep(torch.tensor(kept))
    if packed:
        cache.pack(cache.pos != NEVER)
    k1, v1 = fill(cache, new, seed=1)[1:3] if new else (k0[:, :, :0], v0[:, :, :0])
    held = [[{*pos} & {*range(n)} for pos in row] for row in cache.pos.tolist()]
    if n < cache.seen:
        with pytest.raises(ValueError, match="call crop before compress"):
            cache.crop(n)
    begin_turn([cache])
    cache.crop(n)
    assert [[{*pos} - {NEVER} for pos in row] for row in cache.pos.tolist()] == held
    assert cache.seen == n and cache.length == max(
        len(pos) for row in held for pos in row
    )

    q, k, v, y = fill(cache, 3, seed=2)
    visible = torch.ones(3, 12 + new).tril(9 + new).bool().repeat(2, 2, 1, 1)
    for b, h in product(range(2), range(2)):
        visible[b, h, :, [*{*range(9 + new)} - held[b][h]]] = False
    expected = dense(q, torch.cat((k0, k1, k), 2), torch.cat((v0, v1, v), 2), visible)
    assert (
        torch.allclose(y, expected, atol=1e-5)
        and (cache.pos[..., -3:] == torch.arange(n, n + 3)).all()
    )


@torch.no_grad()
def test_wrong_numbers_of_tokens_are_refused():
    """`crop` leaves 0 to all tokens; `compress` needs exactly the tokens that were read."""
    model, tokens = decoder(), torch.zeros(1, 9, dtype=torch.long)
    caches = make_cache(model)
    model(tokens, caches)
    for n in (-1, 10):
        with pytest.raises(
            ValueError, match=f"{n} tokens cannot be left of 9; give 0 to 9"
        ):
            crop(caches, n)
    crop(caches, 8)
    assert [cache.seen for cache in caches] == [8, 8, 8]
    with pytest.raises(ValueError, match="seen 8 tokens, but the prompt has 9"):
        compress(model, tokens, caches)


@pytest.mark.parametrize(
    "budget, expected",
    [
        (1, [[[2], [8]], [[4, 8], []]]),
        (2, [[[2], [5, 7, 8]], [[1, 4, 8], [2]]]),
        (9, None),
    ],
)
def test_the_highest_scores_of_all_heads_and_caches_stay_and_no_empty_slot(
    budget, expected
):
    """Of equal scores, here 0, the newest entry of the last head of the last cache stays."""
    held = [[[2, 4, 6], [5, 7, 8]], [[1, 4, 8], [2]]]
    # there is no entry where the score is 9
    scores = [[[4, 0, 0], [0, 0, 5]], [[1, 3, 3], [0, 9, 9]]]
    caches = [SnapKV(budget=33), SnapKV(budget=33)]
    for cache, (a, b) in zip(caches, held):
        fill(cache, 9, B=1)
        cache.keep(torch.tensor([[a, b + [-1] * (3 - len(b))]]))
    keep_highest(caches, [torch.tensor([x]).float() for x in scores], budget)
    found = [
        [[i for i in head if i != NEVER] for head in cache.pos[0].tolist()]
        for cache in caches
    ]
    assert found == (expected or held)


def test_state_that_is_not_given_is_zero_and_may_come_late():
    cache = LayerCache()
    fill(cache, 9), fill(cache, 1)  # now there is room for one more
    cache.slots["score"] = torch.ones(2, 2, 10)
    # leaves a stale 1 behind the last slot
    cache.drop(torch.zeros(2, 2, 1, dtype=torch.long))
    _, k, v = draw(1)
    cache.write(k, v, torch.tensor([[10]]))  # into its place
    assert (
        cache.slot("score")[0, 0].tolist() == [1] * 9 + [0]
        and cache.slots["score"].shape[2] == 10
    )
    fill(cache, 2)
    cache.write(k, v, torch.tensor([[13]]), late=torch.full((2, 2, 1), 7))
    assert cache.slot("score")[0, 0].tolist() == [1] * 9 + [0] * 4
    assert cache.slot("late")[0, 0].tolist() == [0] * 12 + [7]


@pytest.mark.parametrize("budget", [2, 3])
def test_shrinking_ragged_heads_drops_empty_slots_first(budget):
    cache = LayerCache()
    fill(cache, 9)
    cache.keep(
        torch.tensor([[[1, 4, 6, 8], [2, 3, -1, -1]], [[0, 5, 7, -1], [2, 4, 6, 8]]])
    )
    cache.shrink(cache.pos.float(), budget)
    newest = [[4, 6, 8], [2, 3], [0, 5, 7], [4, 6, 8]]
    assert [
        sorted(at for at in head if at != NEVER)
        for head in cache.pos.flatten(0, 1).tolist()
    ] == [head[-budget:] for head in newest]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.randoms(),
    st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_shrink_keeps_the_best_and_of_equals_the_newest_in_any_order(
    scores, random, budget
):
    pos, cache = random.sample(range(len(scores)), len(scores)), LayerCache()
    k = torch.zeros(1, 1, len(scores), 8)
    cache.write(k, k, torch.tensor([pos]))
    cache.seen += 1  # a token has left, so slots may have any order
    cache.shrink(torch.tensor([[scores]]).float(), budget)
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], -pos[i]))[:budget]
    assert {*cache.pos[0, 0].tolist()} == {
        pos[i] for i in best
    } and cache.length == len(best)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.tuples(*[st.integers(-2, 14)] * 2),
)
@settings(max_examples=40, deadline=None)
def test_top_keeps_the_highest_and_of_equals_the_newest(scores, budgets):
    both, expected = torch.tensor([scores, scores[::-1]]).float(), []
    for row, budget in zip(both.tolist(), budgets):
        best = sorted(range(len(row)), key=lambda i: (-row[i], -i))[: max(0, budget)]
        expected.append([i in best for i in range(len(row))])
    assert top(both, torch.tensor(budgets)).tolist() == expected
    # −inf is a score like any other
    assert top(both[0].log(), budgets[0]).tolist() == expected[0]


class Oldest(ScoredCache):
    """The whole of a method: a score."""

    def score(self):
        return -self.pos


class Marked(ScoredCache):
    """Each entry remembers how many queries came since it did, and its position in other numbers."""

    age, mark = PerEntry(torch.int32), PerEntry(torch.float64)
    watch = 1

    def observe(self, q, p):
        self.age += q.shape[2]
        self.mark = self.pos + 0.5
        super().observe(q, p)

    def score(self):
        return (self.pos * 7 % 11).float()  # leaves holes anywhere


def test_a_method_is_a_score_and_a_budget():
    cache = Oldest(budget=5)
    fill(cache, 12)
    assert cache.length == 12  # all of the prompt, until it is compressed
    end(cache)
    for _ in range(3):
        fill(cache, 1)
        assert (cache.pos.sort(-1).values == torch.arange(5)).all() and cache.seen > 12


def test_what_a_method_declares_per_entry_moves_with_it():
    cache = Marked(budget=6)
    fill(cache, 9)
    assert cache.age.dtype == torch.int32 and (cache.age == 9).all()
    end(cache)
    # the last token of the piece that brought it
    arrived = {t: 8 if t < 9 else t for t in range(20)}
    for t in range(9, 20):
        fill(cache, 1)
        expected = cache.pos.clone().apply_(
            lambda i: 9 * (i < 9) + t - arrived[i] + (i >= 9)
        )
        assert torch.equal(cache.age, expected) and torch.equal(
            cache.mark, cache.pos.double() + 0.5
        )
    assert cache.bytes()[0] == 2 * 2 * 6 * (2 * 8 * 4 + 4 + 4 + 8)
    # a declaration belongs to the class, its numbers to the cache
    other = Marked(budget=6)
    fill(other, 2)
    assert (other.age == 2).all() and Oldest.per_entry == {}


def test_the_windows_queries_count_as_memory_until_the_prompt_is_compressed():
    cache = SnapKV(budget=10, window_size=4)
    fill(cache, 20)
    queries = 2 * 6 * 4 * 8 * 4
    # not a view of all of them
    assert cache.queries.untyped_storage().nbytes() == queries
    assert cache.bytes()[0] == queries + 2 * 2 * 20 * (2 * 8 * 4 + 4)
    cache.crop(18)
    # two keys that they saw
    assert cache.bytes()[0] == queries + 2 * 2 * (18 * (2 * 8 * 4 + 4) + 2 * 8 * 4)
    end(cache)
    assert cache.bytes() == (2 * 2 * 10 * (2 * 8 * 4 + 4),) * 2


@pytest.mark.claim("R8")
def test_the_memory_formula_counts_what_is_allocated(note):
    model = decoder()
    llama = Config(
        vocab_size=32_000,
        max_len=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        d_model=4096,
        d_ff=11_008,
    )
    assert full_cache_bytes(llama, 2048) == 2**30
    note("R8", llama_2_7b_gib=full_cache_bytes(llama, 2048) / 2**30)
    caches = make_cache(model)
    with torch.inference_mode():
        model(torch.zeros(1, 30, dtype=torch.long), caches)
    # this cache also remembers where its tokens stood
    positions = sum(cache.pos.nbytes for cache in caches)
    assert cache_bytes(caches)[0] - positions == full_cache_bytes(
        model.config, 30, bytes_per_number=4
    )
