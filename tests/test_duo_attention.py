"""DuoAttention against loops: who holds what, dense attention over exactly that, the split of the budget, who retrieves."""
import copy
from functools import cache as once, partial
from itertools import pairwise
import math
from types import SimpleNamespace
import weakref

from hypothesis import given, settings, strategies as st
import pytest
from test_data import tasks
import torch
import torch.nn.functional as F

from methods import duo_attention
from methods.duo_attention import DuoAttention, importance, retrieval_heads
from nanollm import TINY, tokenizer, weights
from nanollm.__main__ import calibrated, pick
from nanollm.cache import LayerCache, cache_bytes, finish_prompt, held, make_cache
from nanollm.evaluate import prompt_and_question
from nanollm.generate import generate, prefill
from nanollm.model import Config, Decoder

V, B, L, H, G, D, T = 40, 2, 3, 3, 2, 8, 40
SLOT = 2 * D * 4 + 4  # bytes of k, v and a position
SINKS, LEAST = 2, 6
ORDER = ((2, 2), (0, 1), (0, 0), (2, 0), (0, 2), (1, 1))  # of five, layer 0 has all of its heads, layer 1 none, layer 2 some
ALL_HEADS = tuple((layer, head) for head in (1, 2, 0) for layer in range(L))
TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


@once
def decoder(vocab: int = V, layers: int = L, H: int = H, max_len: int = 80) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(Config(vocab_size=vocab, max_len=max_len, n_layers=layers, n_heads=H * G, n_kv_heads=H, d_model=48, d_ff=48,
                           head_dim=D, tie_embeddings=False)).eval().requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def turn(x, freq):
    """RoPE as complex numbers: x (..., T, D), at positions 0 … T−1."""
    a, b = x.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones(()), torch.arange(x.shape[-2])[:, None] * freq)
    return torch.cat((z.real, z.imag), -1)


def dense(model, tokens, seen):
    """Logits (B, T, V) of a plain forward; seen (L, H, T, T) says to which tokens a key/value head attends."""
    heads, groups, x = model.config.n_kv_heads, model.config.n_heads // model.config.n_kv_heads, model.embed(tokens)
    D = model.config.head_dim
    freq = model.config.rope_theta ** -(torch.arange(D // 2) / (D // 2))
    for block, of_layer in zip(model.blocks, seen):
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in
                   block.attention.qkv(block.norm1(x)).split([heads * groups * D, heads * D, heads * D], -1))
        q, k = (turn(y, freq) for y in (q, k))
        out = []
        for h in range(heads):
            for g in range(groups):
                score = q[:, h * groups + g] @ k[:, h].mT / math.sqrt(D)
                out.append(score.masked_fill(~of_layer[h], -math.inf).softmax(-1) @ v[:, h])
        x = x + block.attention.o(torch.cat(out, -1))
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x))


def by_hand(n: int, budget: int, layers: int, H: int, order, least: int):
    """Who keeps everything, and how much the others keep: one more head, or entry, as long as the total allows it."""
    total, every, m = budget * layers * H, layers * H, 0
    while m < len(order) and (m + 1) * n + (every - m - 1) * least <= total:
        m += 1
    w = least
    while m < every and m * n + (every - m) * (w + 1) <= total and w < budget:
        w += 1
    return order[:m], w


def walk(prompt: int, chunk: int, block: int, budget: int, order):
    """Parts of the text: `prompt` tokens, `chunk` at a time, then `block` at a time. What each head holds after each part,
    [part][layer][head], and the tokens that it attends to, (L, H, T, T): those held before, and those of the part up to itself."""
    parts = [range(a, b) for a, b in pairwise([*range(0, prompt, chunk), *range(prompt, T, block), T])]
    whole, w = by_hand(prompt, budget, L, H, order, LEAST)
    held, seen = [], torch.zeros(L, H, T, T, dtype=torch.bool)
    for part in parts:
        n = part.stop
        streams = [*range(SINKS), *range(n - (w - SINKS), n)] if n >= prompt and n > w else [*range(n)]
        held.append([[[*range(n)] if n < prompt or (layer, head) in whole else streams for head in range(H)] for layer in range(L)])
        for layer in range(L):
            for head in range(H):
                before = held[-2][layer][head] if len(held) > 1 else []
                for t in part:
                    seen[layer, head, t, [*before, *range(part.start, t + 1)]] = True
    return parts, held, seen


knobs = partial(dict, sinks=SINKS, least=LEAST)


# prompt tokens, how many come at a time before its end, and after it; budget; heads that retrieve: m and w follow
@pytest.mark.parametrize("prompt, chunk, block, budget, order", [
    (20, 20, 1, 14, ORDER), (20, 7, 1, 14, ORDER), (20, 1, 3, 14, ORDER), (20, 8, 5, 14, ORDER),  # 5, 6
    (20, 6, 4, 8, ORDER), (20, 6, 1, 6, ORDER),            # 1, 6 and 0, 6
    (20, 20, 4, 19, ORDER), (20, 9, 1, 19, ALL_HEADS),     # 6, 17 and 8, 11
    (20, 9, 1, 20, ALL_HEADS), (20, 20, 2, 9, ()),         # 9 and 0, 9
    (10, 4, 5, 14, ORDER), (5, 5, 3, 7, ORDER), (0, 1, 1, 7, ORDER), (0, 1, 6, 7, ALL_HEADS[:8])])  # prompts within the budget
def test_held_tokens_bytes_and_logits_equal_the_loop_and_dense_attention_over_just_those(prompt, chunk, block, budget, order):
    model, (parts, afters, seen) = decoder(), walk(prompt, chunk, block, budget, order)
    caches = make_cache(model, DuoAttention, **knobs(budget=budget, heads=order))
    logits, before, capacity = [], [[[]] * H] * L, [[0] * H for _ in range(L)]
    if not prompt:
        finish_prompt(caches)
    for part, after in zip(parts, afters):
        logits.append(model(TOKENS[:, part.start:part.stop], caches))
        if part.stop == prompt:
            old = [weakref.ref(x) for cache in caches for x in cache.slots.values()]
            finish_prompt(caches)
            assert len(old) == 3 * L and not any(x() is not None for x in old)
            assert sum(map(len, sum(after, []))) <= L * H * budget
        expected = torch.zeros(L, H, part.stop, dtype=torch.bool)
        for layer in range(L):
            for h in range(H):
                expected[layer, h, after[layer][h]] = True
                # buffers: exact after a prompt, or where more than one goes; a tenth more where they have to grow
                slots, room = len(before[layer][h]) + len(part), capacity[layer][h]
                if slots > room:
                    room = slots + (slots // 10 if before[layer][h] else 0)
                if part.stop == prompt or slots - len(after[layer][h]) > 1:
                    room = len(after[layer][h])
                capacity[layer][h] = room
        assert torch.equal(held(caches, part.stop), expected.expand(B, -1, -1, -1)), part
        assert [cache.seen for cache in caches] == [part.stop] * L
        assert [cache.length for cache in caches] == [max(map(len, of_layer)) for of_layer in after]
        there = [B * SLOT * sum(map(len, of_layer)) for of_layer in after]
        assert [cache.bytes()[0] for cache in caches] == there
        assert [cache.bytes()[1] for cache in caches] == [B * SLOT * sum(of_layer) for of_layer in capacity], part
        before = after
    assert torch.allclose(torch.cat(logits, 1), dense(model, TOKENS, seen), atol=1e-5)


@pytest.mark.parametrize("order", [ORDER, ALL_HEADS, ()])
@pytest.mark.parametrize("prompt, chunk, block", [(T - 1, T - 1, 1), (20, 20, 1), (20, 7, 4), (20, 1, 1), (1, 1, 3), (0, 1, 1)])
def test_a_budget_of_all_tokens_is_full_attention(order, prompt, chunk, block):
    g = torch.Generator().manual_seed(1)
    text = [2 * torch.randn(B, heads, T, D, generator=g) for heads in (G * H, H, H)] + [torch.arange(T).expand(1, 1, T)]
    for layer in range(L):
        cache, full, y = DuoAttention(**knobs(budget=T, heads=order)), LayerCache(), []
        cache.link(layer, L, None, None, None)
        if not prompt:
            cache.finish_prompt()
        for part in walk(prompt, chunk, block, T, order)[0]:
            q, k, v, pos = (x[:, :, part.start:part.stop] for x in text)
            y.append(cache.attend(q, k, v, pos[0]))
            if part.stop == prompt:
                cache.finish_prompt()
        assert torch.allclose(torch.cat(y, 2), full.attend(*text[:3], text[3][0]), atol=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 50), st.integers(1, 12), st.integers(0, 30))
def test_as_many_heads_as_the_budget_allows_keep_everything_and_the_others_share_the_rest(data, layers, H, n, least, more):
    every = [(layer, head) for layer in range(layers) for head in range(H)]
    order = tuple(data.draw(st.permutations(every))[:data.draw(st.integers(0, len(every)))])
    sinks, budget, later = data.draw(st.integers(0, least - 1)), least + more, 420
    total = budget * len(every)
    caches = [DuoAttention(budget, order, sinks, least) for _ in range(layers)]
    for layer, cache in enumerate(caches):
        cache.link(layer, layers, None, None, None)
    for start, stop in ((0, n), (n, n + later)):
        x = torch.zeros(1, H, stop - start, 1)
        for cache in caches:
            if stop > start:
                cache.attend(x, x, x, torch.arange(start, stop)[None])
        if stop == n:
            finish_prompt(caches)
            assert not n or held(caches, n).sum() <= total
    there = held(caches, n + later)[0].sum(-1)
    m = int((there == n + later).sum())
    assert {tuple(x) for x in (there == n + later).nonzero().tolist()} == {*order[:m]}
    assert m == len(order) or (m + 1) * n + (len(every) - m - 1) * least > total
    if m < len(every):
        (w,) = there[there < n + later].unique().tolist()
        assert least <= w <= budget and m * n + (len(every) - m) * w <= total
        assert w == budget or total < m * n + (len(every) - m) * (w + 1)
    else:
        assert m * n <= total


@pytest.mark.parametrize("when", [0, 7, 20, 33])
def test_a_copy_midway_has_the_same_future_and_does_not_share_it(when):
    model = decoder()

    def read(caches, start):
        logits = []
        for t in range(start, T):
            logits.append(model(TOKENS[:, t:t + 1], caches))
            if t == 19:
                finish_prompt(caches)
        return torch.cat(logits, 1), held(caches, T), cache_bytes(caches)

    caches = make_cache(model, DuoAttention, **knobs(budget=14, heads=ORDER))
    for t in range(when):
        model(TOKENS[:, t:t + 1], caches)
        if t == 19:
            finish_prompt(caches)
    twin = copy.deepcopy(caches)
    first, second = read(caches, when), read(twin, when)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]) and first[2] == second[2]


@pytest.mark.parametrize("prompt", [1, 2, 20])
def test_it_generates_as_a_greedy_loop_over_dense_attention_does(prompt):
    """The prompt's last token is fed after its end: of a prompt of one token nothing has been seen by then."""
    got = generate(decoder(), TOKENS[:, :prompt], 20, make_cache(decoder(), DuoAttention, **knobs(budget=7, heads=ORDER)))
    text, seen = TOKENS[:, :prompt], walk(prompt - 1, T, 1, 7, ORDER)[2]
    for _ in range(20):
        n = text.shape[1]
        text = torch.cat((text, dense(decoder(), text, seen[..., :n, :n])[:, -1:].argmax(-1)), 1)
    assert torch.equal(got, text[:, prompt:]) and len(got.unique()) > 4


@pytest.mark.parametrize("bad, message", [
    (dict(sinks=-1), "sinks -1 must be at least 0"), (dict(sinks=16), "sinks 16 .* less than the 16"),
    (dict(sinks=0, least=0), "sinks 0 .* less than the 0"), (dict(budget=15), "budget 15 must be at least 16"),
    (dict(budget=30, least=31), "budget 30 must be at least 31"), (dict(heads=((0, 1), (1, 1), (0, 1))), "name a head twice"),
    (dict(window=8), "knobs are its dataclass fields")])
def test_bad_knobs_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        make_cache(decoder(), DuoAttention, **dict(budget=40) | bad)


@pytest.mark.parametrize("prompt", [0, 1, 9])
@pytest.mark.parametrize("head", [(L, 0), (0, H), (-1, 0), (0, -1)])
def test_heads_that_the_decoder_does_not_have_are_refused(prompt, head):
    caches = make_cache(decoder(), DuoAttention, budget=16, heads=((1, 1), head))
    if prompt:
        prefill(decoder(), TOKENS[:, :prompt], caches)
    else:
        finish_prompt(caches)
    with pytest.raises(ValueError, match="must be among 3 layers of 3 key/value heads"):
        finish_prompt(caches) if prompt else decoder()(TOKENS[:, :1], caches)


def test_the_least_knobs_work_and_the_defaults_are_four_sinks_of_sixteen():
    model = decoder()
    caches = make_cache(model, DuoAttention, budget=2, heads=((0, 1),), sinks=0, least=1)
    generate(model, TOKENS[:, :9], 3, caches)  # 9 heads, 18 entries: one keeps 9, and 9 are left for eight
    expected = (torch.arange(11) == 10).repeat(B, L, H, 1)
    expected[:, 0, 1] = True
    assert torch.equal(held(caches, 11), expected)
    caches = make_cache(model, DuoAttention, budget=16)
    generate(model, TOKENS[:, :30], 3, caches)
    assert held(caches, 32).nonzero()[:, 3].unique().tolist() == [*range(4), *range(20, 32)]


# ---- who retrieves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [dict(), dict(T=150, sinks=3, window=9, seed=5), dict(T=150, sinks=0, window=1),
                                   dict(T=150, of=("copy",))])
def test_importance_is_what_dense_attention_loses_when_one_head_streams_after_the_context(given):
    model = decoder(vocab=2048, layers=2, H=2, max_len=600)
    sinks, window, n = given.get("sinks", 4), given.get("window", 16), given.get("T", 512)
    expected, of = torch.zeros(2, 2), given.get("of", ("needle", "recall"))
    for task in of:
        batch = tasks("test").batch(task, given.get("seed", 0), 3, n)
        tokens, (answer, *_) = torch.from_numpy(batch.tokens), batch.answers
        causal = torch.ones(2, 2, n, n, dtype=torch.bool).tril()

        def loss(seen):
            logits = dense(model, tokens, seen)[:, answer.start - 1:answer.stop - 1]
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, answer].flatten())

        for layer in range(2):
            for h in range(2):
                seen = causal.clone()
                seen[layer, h, batch.question:, sinks:batch.question - (window - sinks)] = False
                expected[layer, h] += (loss(seen) - loss(causal)) / len(of)
    got = importance(model, tasks("test"), documents=3, **given)
    assert got.shape == (2, 2) and expected.abs().min() > 1e-4
    assert torch.allclose(got, expected, atol=5e-6)


def test_a_window_longer_than_the_context_loses_nothing():
    model = decoder(vocab=2048, layers=2, H=2, max_len=600)
    for window in (150, 200, 1000):
        assert importance(model, tasks("test"), documents=2, T=150, window=window).abs().max() < 1e-6


def test_calibration_without_the_tokenizer_of_the_tasks_is_refused():
    with pytest.raises(ValueError, match="need a tiktoken tokenizer; give DuoAttention its heads"):
        DuoAttention.calibrate(None, object())


def test_retrieval_heads_lose_more_than_the_least_and_come_in_order_ties_in_that_of_the_decoder():
    lost = torch.tensor([[0.25, 0.5, -3.0, 0.0], [0.75, 0.5, 0.125, 2.0]])
    assert retrieval_heads(lost, 0.25) == ((1, 3), (1, 0), (0, 1), (1, 1))
    assert retrieval_heads(lost) == ((1, 3), (1, 0), (0, 1), (1, 1), (0, 0), (1, 2))
    assert retrieval_heads(lost.T, 0.6) == ((3, 1), (0, 1)) and retrieval_heads(lost, 2.0) == ()
    assert retrieval_heads(torch.full((3, 20), 0.101)) == tuple((i, j) for i in range(3) for j in range(20))
    assert retrieval_heads(torch.full((3, 20), 0.099)) == ()


@once
def shipped():
    return weights.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")


@pytest.fixture
def asked(monkeypatch):
    """The documents that calibration asks for; it is given two short ones of the test split, as that is loaded."""
    asked = []

    def batch(split, *what):
        asked.append((split, *what))
        return tasks("test").batch(what[0], what[1], 2, 160)

    monkeypatch.setattr(duo_attention, "Tasks", lambda encoding, split: SimpleNamespace(batch=partial(batch, split)))
    return asked


def test_the_shipped_decoder_retrieves_in_layer_1_and_nowhere_else():
    lost = importance(shipped()[0], tasks("test"), documents=4, T=256)
    assert {layer for layer, _ in retrieval_heads(lost)} == {1} and len(retrieval_heads(lost)) == 3
    lost[1] = 0
    assert lost.abs().max() < 0.01


@pytest.mark.parametrize("of", ["copy", "few_shot"])
def test_tasks_that_it_is_not_calibrated_on_need_the_same_three_heads_of_the_shipped_decoder(of):
    lost = importance(shipped()[0], tasks("train"), documents=8, of=(of,))
    assert {*lost.flatten().topk(3).indices.tolist()} == {3, 4, 5} and lost[1].min() > 4 * lost[[0, 2, 3, 4, 5]].abs().max()


def test_calibrate_and_the_command_line_give_the_knobs_that_depend_on_the_decoder(asked):
    model, encoding = shipped()
    found = DuoAttention.calibrate(model, encoding)
    assert asked == [("train", "needle", 0, 32, 512), ("train", "recall", 0, 32, 512)]
    assert found.keys() == {"heads"} and sorted(found["heads"]) == [(1, 0), (1, 1), (1, 2)]
    (Method,) = pick(["duo_attention"]).values()
    assert Method is DuoAttention
    assert calibrated(Method, model, encoding) == found and calibrated(LayerCache, model, encoding) == {}
    _, context, _ = prompt_and_question(model, tasks("test").batch("needle", 1, 2, 160))
    caches, n = make_cache(model, Method, budget=32, **found), context.shape[1]
    prefill(model, context, caches)
    finish_prompt(caches)
    assert (18 * 32 - 18 * 16) // (n - 16) == 2
    assert {tuple(x) for x in (held(caches, n).sum(-1)[0] == n).nonzero().tolist()} == {*found["heads"][:2]}


def test_a_decoder_of_short_texts_is_calibrated_on_such(asked):
    DuoAttention.calibrate(decoder(vocab=2048, layers=1, H=2, max_len=170), shipped()[1])
    assert asked == [("train", "needle", 0, 32, 170), ("train", "recall", 0, 32, 170)]
