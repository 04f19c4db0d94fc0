"""The seam: whatever is written is read back, whatever is evicted is really gone, and attention stays exact on the rest."""
from copy import deepcopy
from itertools import product
import math

from hypothesis import given, settings, strategies as st
import pytest
import torch

from nanollm.cache import (ALL, NEVER, LayerCache, WindowCache, cache_bytes, finish_prompt, full_cache_bytes, held, indices,
                           make_cache, probabilities, rank, top)
from nanollm.model import Config, Decoder


def dense(q, k, v, visible):
    """Attention from the definition, one query head and one query at a time: q (B, H·G, T, D), visible (B, H, T, S)."""
    B, heads, T, D = q.shape
    G = heads // k.shape[1]
    y = torch.zeros_like(q)
    for b in range(B):
        for h in range(heads):
            for t in range(T):
                see = visible[b, h // G, t]
                weight = (k[b, h // G, see] @ q[b, h, t] / math.sqrt(D)).softmax(0)
                y[b, h, t] = weight @ v[b, h // G, see]
    return y


def draw(T, B=2, H=2, G=3, D=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, H * G, T, D, generator=g), torch.randn(B, H, T, D, generator=g),
            torch.randn(B, H, T, D, generator=g))


def fill(cache, T, seed=0, **shape):
    q, k, v = draw(T, seed=seed, **shape)
    y = cache.attend(q, k, v, torch.arange(cache.seen, cache.seen + T)[None])
    return q, k, v, y


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=50, max_len=128, n_layers=3, n_heads=6, n_kv_heads=2, d_model=48, d_ff=64)).eval()
    for p in decoder.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return decoder


class Watched(LayerCache):
    """Full attention that asks for the probabilities of every query, or of a window."""
    def __init__(self, watch):
        super().__init__()
        self.watch, self.heard = watch, []

    def observe(self, q, p):
        self.heard.append(p)


@pytest.mark.parametrize("watch", [0, 1, 3, 5, ALL])
@pytest.mark.parametrize("chunks", [[11], [4, 7], [1] * 11, [5, 1, 5]])
def test_output_is_causal_attention_whatever_the_chunks_and_the_watch(watch, chunks):
    q, k, v = draw(11)
    causal = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 2, 11, 11)
    cache, done, out = Watched(watch), 0, []
    for n in chunks:
        part = slice(done, done + n)
        out.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], torch.arange(done, done + n)[None]))
        done += n
    assert torch.allclose(torch.cat(out, 2), dense(q, k, v, causal), atol=1e-5)


@pytest.mark.parametrize("watch, rows", [(1, 1), (3, 3), (9, 6), (ALL, 6)])
def test_watch_says_how_many_rows_are_made(watch, rows):
    cache = Watched(watch)
    q, k, v, _ = fill(cache, 6)
    (p,) = cache.heard
    assert p.shape == (2, 2, 3, rows, 6)
    assert torch.allclose(p.sum(-1), torch.ones(2, 2, 3, rows))
    assert (p[..., 0, 6 - rows + 1:] == 0).all()  # causal: the first watched query sees nothing newer


def test_watch_0_makes_no_probabilities():
    cache = Watched(0)
    fill(cache, 6)
    assert cache.heard == [None]


def test_whole_chunked_and_single_token_prefill_agree(model):
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(tokens)
        for chunk in (1, 7, 13, 39, 40):
            caches = make_cache(model)
            parts = torch.cat([model(part, caches) for part in tokens.split(chunk, 1)], 1)
            assert torch.allclose(parts, whole, atol=1e-5), chunk
            assert caches[0].length == caches[0].seen == 40


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


def test_keep_moves_every_slot_tensor_together_and_frees_the_rest():
    cache = LayerCache()
    _, k, v, _ = fill(cache, 9)
    cache.slots["score"] = cache.pos.float() * 10
    kept = torch.tensor([[[1, 4, 8], [0, 2, 3]], [[5, 6, 7], [2, 4, 6]]])
    full = cache.bytes()
    cache.keep(kept)
    assert (cache.pos == kept).all() and (cache.slot("score") == kept * 10).all()
    for b in range(2):
        for h in range(2):
            assert (cache.k[b, h] == k[b, h, kept[b, h]]).all() and (cache.v[b, h] == v[b, h, kept[b, h]]).all()
    assert (cache.length, cache.seen) == (3, 9)
    assert cache.bytes()[1] == full[1] // 3  # the memory is given back, not masked


@pytest.mark.parametrize("T", [1, 4])
def test_attention_after_keep_is_dense_attention_over_what_is_left(T):
    cache = LayerCache()
    _, k0, v0, _ = fill(cache, 9)
    kept = torch.tensor([[[1, 4, 8], [0, 2, 3]], [[5, 6, 7], [2, 4, 6]]])
    cache.keep(kept)
    q, k, v, y = fill(cache, T, seed=5)
    visible = torch.zeros(2, 2, T, 9 + T, dtype=torch.bool)
    visible[..., 9:] = torch.ones(T, T, dtype=torch.bool).tril()
    visible.scatter_(3, kept.unsqueeze(2).expand(2, 2, T, 3), True)
    assert torch.allclose(y, dense(q, torch.cat((k0, k), 2), torch.cat((v0, v), 2), visible), atol=1e-5)
    assert (cache.pos[..., -T:] == torch.arange(9, 9 + T)).all()  # absolute positions go on


@pytest.mark.parametrize("T", [1, 3])
def test_ragged_heads_never_see_empty_slots(T):
    cache = LayerCache()
    _, k0, v0, _ = fill(cache, 9)
    cache.keep(torch.tensor([[[1, 4, 8], [2, -1, -1]], [[5, 6, -1], [2, 4, 6]]]))
    assert cache.ragged and (cache.pos == NEVER).sum() == 3
    live, allocated = cache.bytes()
    assert live == allocated * 9 // 12
    q, k, v, y = fill(cache, T, seed=5)
    visible = torch.zeros(2, 2, T, 9 + T, dtype=torch.bool)
    visible[..., 9:] = torch.ones(T, T, dtype=torch.bool).tril()
    for b, h, i in ((0, 0, [1, 4, 8]), (0, 1, [2]), (1, 0, [5, 6]), (1, 1, [2, 4, 6])):
        visible[b, h, :, i] = True
    assert torch.allclose(y, dense(q, torch.cat((k0, k), 2), torch.cat((v0, v), 2), visible), atol=1e-5)


def uneven():
    """The same slots padded and packed; heads keep 3, 1, 2 and no token, and a score travels along."""
    padded = LayerCache()
    fill(padded, 9)
    padded.slots["score"] = padded.pos.float() * 10
    padded.keep(torch.tensor([[[1, 4, 8], [2, -1, -1]], [[5, 6, -1], [-1, -1, -1]]]))
    packed = deepcopy(padded)
    packed.pack()
    return padded, packed


def same_slots(padded, packed):
    there = padded.pos != NEVER
    assert torch.equal(packed.pos, padded.pos)  # NEVER where there is nothing
    assert padded.slots.keys() == packed.slots.keys()
    assert all(torch.equal(packed.slot(name)[there], padded.slot(name)[there]) for name in padded.slots)


def test_packed_heads_are_those_of_the_padded_cache():
    padded, packed = uneven()
    each, table = 2 * 8 * 4 + 4 + 4, 4 * 8
    assert padded.bytes() == (6 * each, 12 * each) and packed.bytes() == (6 * each + table,) * 2
    for T in (1, 3, 1, 20):
        before = deepcopy(packed)
        (*_, y), (*_, expected) = fill(packed, T, seed=T), fill(padded, T, seed=T)
        assert torch.equal(y, expected)
        same_slots(padded, packed)
        assert (packed.length, packed.seen, before.length) == (padded.length, padded.seen, padded.length - T)
        live, allocated = packed.bytes()
        assert live == (6 + 4 * (packed.seen - 9)) * each + table and live <= allocated <= 1.1 * live
        assert torch.equal(before.pos, padded.pos[..., :-T])  # a copy is not written to


def test_keep_takes_from_packed_and_later_slots_and_may_pack_again():
    padded, packed = uneven()
    for cache in (padded, packed):
        fill(cache, 4)
        cache.keep(torch.tensor([[[0, 2, 5], [0, 3, -1]], [[1, 3, 4], [6, -1, -1]]]))
    same_slots(padded, packed)
    assert packed.pos[0, 0].tolist() == [1, 8, 11] and packed.pos[1, 1].tolist() == [12, NEVER, NEVER]
    assert packed.bytes() == padded.bytes() and not packed.packed
    packed.pack()
    for T in (1, 2):
        assert torch.equal(fill(packed, T)[-1], fill(padded, T)[-1])
        same_slots(padded, packed)


def test_state_that_is_not_given_is_zero_and_may_come_late():
    cache = LayerCache()
    fill(cache, 9), fill(cache, 1)  # now there is room for one more
    cache.slots["score"] = torch.ones(2, 2, 10)
    cache.drop(torch.zeros(2, 2, 1, dtype=torch.long))  # leaves a stale 1 behind the last slot
    fill(cache, 3)
    _, k, v = draw(1)
    cache.write(k, v, torch.tensor([[13]]), late=torch.full((2, 2, 1), 7))
    assert cache.slot("score")[0, 0].tolist() == [1] * 9 + [0] * 4
    assert cache.slot("late")[0, 0].tolist() == [0] * 12 + [7]


@pytest.mark.parametrize("budget", [2, 3])
def test_shrinking_ragged_heads_drops_empty_slots_first_and_never_shows_them(budget):
    cache = LayerCache()
    _, k0, v0, _ = fill(cache, 9)
    cache.keep(torch.tensor([[[1, 4, 6, 8], [2, 3, -1, -1]], [[0, 5, 7, -1], [2, 4, 6, 8]]]))
    cache.shrink(cache.pos.float(), budget)
    newest = [[[4, 6, 8], [2, 3]], [[0, 5, 7], [4, 6, 8]]]
    for b in range(2):
        for h in range(2):
            assert sorted(at for at in cache.pos[b, h].tolist() if at != NEVER) == newest[b][h][-budget:]
    q, k, v, y = fill(cache, 1, seed=5)
    visible = torch.zeros(2, 2, 1, 10, dtype=torch.bool)
    visible[..., 9] = True
    for b in range(2):
        for h in range(2):
            for at in cache.pos[b, h, :-1]:
                if at != NEVER:
                    visible[b, h, 0, at] = True
    assert torch.allclose(y, dense(q, torch.cat((k0, k), 2), torch.cat((v0, v), 2), visible), atol=1e-5)


@pytest.mark.parametrize("hole", [0, 4, 8])
def test_drop_moves_the_last_slot_into_the_hole(hole):
    cache = LayerCache()
    _, k, _, _ = fill(cache, 9)
    cache.drop(torch.full((2, 2, 1), hole))
    left = sorted(set(range(9)) - {hole})
    assert cache.length == 8 and (cache.pos.sort(-1).values == torch.tensor(left)).all()
    assert (cache.k.gather(2, cache.pos.argsort(-1)[..., None].expand(2, 2, 8, 8)) == k[:, :, left]).all()


@pytest.mark.parametrize("T", [1, 3])
def test_bias_is_added_to_the_scores(T):
    """A slot with bias log n weighs as much as n copies of it."""
    many, one = LayerCache(), LayerCache()
    _, k, v, _ = fill(many, 4)
    many.keep(torch.tensor([0, 1, 2, 3, 3, 3]).expand(2, 2, 6))
    many.pos[..., 3:] = 3
    one.write(k, v, torch.arange(4)[None])
    one.slots["bias"] = torch.zeros(2, 2, 4)
    one.slot("bias")[..., 3] = math.log(3)
    q, k, v = draw(T, seed=7)
    expected = many.attend(q, k, v, torch.arange(4, 4 + T)[None])
    for watch in (0, ALL):
        again = one.attend(q, k, v, torch.arange(4, 4 + T)[None])
        assert torch.allclose(again, expected, atol=1e-5)
        one.keep(torch.arange(4).expand(2, 2, 4))
        one.watch = ALL


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.randoms())
@settings(max_examples=60, deadline=None)
def test_rank_orders_by_score_and_breaks_ties_towards_the_newest(scores, random):
    pos = list(range(len(scores)))
    random.shuffle(pos)
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], -pos[i]))
    got = rank(torch.tensor([scores]).float(), torch.tensor([pos]))[0].tolist()
    assert [got.index(r) for r in range(len(scores))] == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(-2, 14), min_size=2, max_size=2))
@settings(max_examples=60, deadline=None)
def test_top_keeps_the_highest_and_of_equals_the_newest(scores, budgets):
    backwards = scores[::-1]
    expected = []
    for row, budget in zip((scores, backwards), budgets):
        best = sorted(range(len(row)), key=lambda i: (-row[i], -i))[:max(0, budget)]
        expected.append([i in best for i in range(len(row))])
    both = torch.tensor([scores, backwards]).float()
    assert top(both, torch.tensor(budgets)).tolist() == expected
    assert top(both[0].log(), budgets[0]).tolist() == expected[0]  # −inf is a score like any other


def test_indices_are_in_order_and_filled_with_minus_one():
    kept = torch.tensor([[[1, 0, 1, 1], [0, 1, 0, 0]]], dtype=torch.bool)
    assert indices(kept).tolist() == [[[0, 2, 3], [1, -1, -1]]]


@pytest.mark.parametrize("over", [1, 4])
def test_shrink_keeps_the_best_and_of_equals_the_newest(over):
    cache = LayerCache()
    fill(cache, 8)
    score = torch.tensor([3.0, 1, 2, 1, 5, 2, 1, 3]).expand(2, 2, 8)
    cache.shrink(score, 8 - over)
    kept = {1: [0, 2, 3, 4, 5, 6, 7], 4: [0, 4, 5, 7]}[over]
    assert (cache.pos.sort(-1).values == torch.tensor(kept)).all()


def window_votes(q, k, window, kernel):
    """Algorithm 2, lines 2–4, as loops: mean over the window's queries and the group, then max over neighbours."""
    B, heads, T, D = q.shape
    H, G = k.shape[1], heads // k.shape[1]
    votes = torch.zeros(B, H, T - window)
    for b in range(B):
        for h in range(H):
            for g in range(G):
                for t in range(T - window, T):
                    p = (k[b, h, :t + 1] @ q[b, h * G + g, t] / math.sqrt(D)).softmax(0)
                    votes[b, h] += p[:T - window] / (window * G)
    half = kernel // 2
    return torch.stack([votes[..., max(0, i - half):i + half + 1].amax(-1) for i in range(T - window)], -1)


@pytest.mark.parametrize("chunks", [[30], [1] * 30, [10, 2, 18], [27, 3]])
@pytest.mark.parametrize("kernel", [1, 5])
def test_window_cache_keeps_what_algorithm_2_says(chunks, kernel):
    q, k, v = draw(30, seed=3)
    cache, done = WindowCache(budget=10, window=4, kernel=kernel), 0
    for n in chunks:
        part = slice(done, done + n)
        cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], torch.arange(done, done + n)[None])
        done += n
    cache.finish_prompt()
    votes = window_votes(q, k, 4, kernel)
    for b in range(2):
        for h in range(2):
            best = sorted(range(26), key=lambda i: (-votes[b, h, i].item(), -i))[:6]
            if kernel > 1:  # pooling makes ties, and a tie at the cut may fall either way by rounding alone
                assert votes[b, h, cache.pos[b, h, :6].long()].sum().item() == pytest.approx(votes[b, h, best].sum().item())
            else:
                assert cache.pos[b, h].tolist() == sorted(best) + [26, 27, 28, 29]
    assert cache.length == 10 and cache.seen == 30 and cache.queries is None


def test_window_cache_with_room_for_all_is_full_attention(model):
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(tokens)
        caches = make_cache(model, WindowCache, budget=40, window=8)
        out = [model(tokens[:, :30], caches)]
        finish_prompt(caches)
        out += [model(tokens[:, i:i + 1], caches) for i in range(30, 40)]
    assert torch.allclose(torch.cat(out, 1), whole, atol=1e-5)


def test_the_windows_queries_count_as_memory_until_the_prompt_ends():
    cache = WindowCache(budget=10, window=4)
    fill(cache, 20)
    queries = 2 * 6 * 4 * 8 * 4
    assert cache.queries.untyped_storage().nbytes() == queries  # not a view of all of them
    assert cache.bytes()[0] == queries + 2 * 2 * 20 * (2 * 8 * 4 + 4)
    cache.finish_prompt()
    assert cache.bytes() == (2 * 2 * 10 * (2 * 8 * 4 + 4),) * 2


def test_after_the_prompt_the_windows_queries_are_gone():
    cache = WindowCache(budget=10, window=4)
    fill(cache, 20)
    cache.finish_prompt()
    fill(cache, 1)
    for ask in (lambda: cache.rows, cache.finish_prompt):
        with pytest.raises(ValueError, match="the prompt is over"):
            ask()


def test_budgets_per_head_make_ragged_heads():
    class Uneven(WindowCache):
        def budgets(self, votes):
            return torch.tensor([[2, 5], [6, 3]])

    cache = Uneven(budget=10, window=4)
    fill(cache, 20)
    cache.finish_prompt()
    assert (cache.pos != NEVER).sum(-1).tolist() == [[6, 9], [10, 7]]


def test_make_cache_links_the_layers(model):
    caches = make_cache(model)
    assert [cache.layer for cache in caches] == [0, 1, 2] and caches[0].below is None and caches[2].below is caches[1]
    y = torch.randn(1, 6 * 8)
    by_head = torch.einsum("hd,ohd->o", y.view(6, 8), caches[1].w_o)
    assert torch.allclose(by_head, model.blocks[1].attention.o(y)[0], atol=1e-6)
    assert cache_bytes(caches) == (0, 0)


@pytest.mark.parametrize("knobs, message", [
    (dict(budget=32, window=32), "budget 32 must exceed the window 32"),
    (dict(budget=64, window=0), "window 0"),
    (dict(budget=64, kernel=4), "kernel 4"),
])
def test_bad_knobs_are_refused_at_construction(knobs, message):
    with pytest.raises(ValueError, match=message):
        WindowCache(**knobs)


@pytest.mark.claim("R8")
def test_the_memory_formula_gives_1_gib_for_llama_2_7b_and_counts_what_is_allocated(model):
    llama = Config(vocab_size=32_000, max_len=4096, n_layers=32, n_heads=32, n_kv_heads=32, d_model=4096, d_ff=11_008)
    assert full_cache_bytes(llama, 2048) == 2 ** 30
    caches = make_cache(model)
    with torch.inference_mode():
        model(torch.zeros(1, 30, dtype=torch.long), caches)
    positions = sum(cache.pos.nbytes for cache in caches)  # this cache also remembers where its tokens stood
    assert cache_bytes(caches)[0] - positions == full_cache_bytes(model.config, 30, bytes_per_number=4)


def test_held_tells_for_every_head_which_tokens_still_have_a_slot():
    caches = [LayerCache(), LayerCache()]
    for cache in caches:
        fill(cache, 6)
    kept = [[[0, 2, 5], [1, -1, -1]], [[3, 4, -1], [0, 1, 2]]]  # per row and head
    caches[1].keep(torch.tensor(kept))
    caches[1].pack()
    fill(caches[1], 1)
    expected = [[[i in head or i == 6 for i in range(8)] for head in row] for row in kept]
    assert held(caches, 8)[:, 1].tolist() == expected
    assert held(caches, 8)[:, 0].tolist() == [[[True] * 6 + [False] * 2] * 2] * 2
    assert held(caches, 2).tolist() == [[[head[:2] for head in layer] for layer in row] for row in held(caches, 8).tolist()]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Told(LayerCache):
    """Full attention, all of it explicit, with a bias if one is given; what it has observed is in `p`."""
    watch, bias = 2**62, None

    def write(self, k, v, pos):
        super().write(k, v, pos, **{} if self.bias is None else dict(bias=self.bias[:, :, pos[0]]))

    def observe(self, q, p):
        self.p = p


@pytest.mark.parametrize("G", [1, 2, 3])
@pytest.mark.parametrize("chunks", [[7], [1] * 7, [4, 3], [5, 1, 1]])
@pytest.mark.parametrize("biased", [False, True])
def test_explicit_weights_and_what_is_read_with_them_are_those_of_each_query_head(G, chunks, biased, B=2, H=2, D=8):
    """The queries of a group are rows of one product; they come as a view of another order, as from a decoder."""
    q = normal(B, 7, H * G, D).transpose(1, 2)
    k, v, bias = normal(B, H, 7, D, seed=1), normal(B, H, 7, D, seed=2), normal(B, H, 7, seed=3)
    cache, done = Told(), 0
    cache.bias = bias if biased else None
    for n in chunks:
        part = slice(done, done + n)
        y = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], torch.arange(done, done + n)[None])
        done += n
        assert y.shape == (B, H * G, n, D) and cache.p.shape == (B, H, G, n, done) and not (n > 1 and q[:, :, part].is_contiguous())
        assert torch.equal(cache.p, probabilities(q[:, :, part], cache.k, cache.pos, cache.slot("bias") if biased else None,
                                                  torch.arange(done - n, done)[None]))
        for b, h, g, t in product(range(B), range(H), range(G), range(done - n, done)):
            logits = k[b, h, :t + 1] @ q[b, h * G + g, t] / math.sqrt(D) + (bias[b, h, :t + 1] if biased else 0)
            p = logits.softmax(0)
            assert torch.allclose(cache.p[b, h, g, t - done, :t + 1], p, rtol=1e-5, atol=1e-7)
            assert (cache.p[b, h, g, t - done, t + 1:] == 0).all()
            assert torch.allclose(y[b, h * G + g, t - done], p @ v[b, h, :t + 1], rtol=1e-5, atol=1e-6)
