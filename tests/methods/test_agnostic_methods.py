"""Compare Expected Attention, KVzip and OneReading, which use no observation window, with loops."""
import math

import pytest
import torch

from common import B, D, FREQ, G, H, TOKENS, decoder, link, turn
from methods.expected_attention import ExpectedAttention
from methods.kvzip import KVzip
from methods.ours.one_reading import OneReading
from nanollm.cache import NEVER, end_prefill, make_cache
from nanollm.generate import end_prompt, generate, prefill, reread

n = 30
g = torch.Generator().manual_seed(5)
Q, K, V = (torch.randn(B, heads, n, D, generator=g) for heads in (H * G, H, H))
W_O = torch.randn(20, H * G, D, generator=g)


def kept(cache):
    """Return the kept positions by row and head."""
    return [[sorted(i for i in head if i != NEVER) for head in row] for row in cache.pos.tolist()]


# ---- Expected Attention ---


def expected(sinks, future, epsilon, rotated=True):
    """Section 3: (â + ε) ‖W_O v‖ of every entry, mean over the group, one number at a time."""
    ahead = torch.arange(n, n + future)
    score = torch.zeros(B, H, n, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for query in range(h * G, h * G + G):
                x = Q[b, query, sinks:].double()
                if rotated:
                    x = turn(x, -torch.arange(sinks, n)).double()
                mean = x.mean(0)
                spread = sum(torch.outer(y - mean, y - mean) for y in x) / len(x)
                R = torch.eye(D, dtype=torch.float64)
                if rotated:  # R̄, the mean of the rotation matrices
                    R = sum(turn(torch.eye(D), at.expand(D)).double().T for at in ahead) / future
                mean, spread = R @ mean, R @ spread @ R.T
                keys = K[b, h].double()
                log_z = [(mean @ k / math.sqrt(D) + k @ spread @ k / (2 * D)).item() for k in keys]
                total = sum(math.exp(z) for z in log_z)
                for i, z in enumerate(log_z):
                    norm = (W_O[:, query].double() @ V[b, h, i].double()).norm()
                    score[b, h, i] += (math.exp(z) / total + epsilon) * norm / G
    return score


@pytest.mark.parametrize("options, freq", [
    (dict(sinks=4, future=50, epsilon=0.02), FREQ), (dict(sinks=0, future=1, epsilon=0.0), FREQ),
    (dict(sinks=2, future=7, epsilon=0.5), None)])
@pytest.mark.parametrize("cut", [[n], [11, 1, 18]])
def test_expected_attention_is_the_loop(options, freq, cut):
    """Expected Attention keeps the loop's entries, however the prompt is cut."""
    cache = ExpectedAttention(budget=12, **options)
    link(cache, w_o=W_O, freq=freq)
    for part in torch.arange(n).split(cut):
        cache.attend(Q[:, :, part], K[:, :, part], V[:, :, part], part[None])
    score = expected(**options, rotated=freq is not None)
    score[:, :, :options["sinks"]] = math.inf
    torch.testing.assert_close(cache.score().double(), score, rtol=1e-4, atol=1e-6)
    cache.end_prefill()
    assert kept(cache) == [[sorted(head.topk(12).indices.tolist()) for head in row] for row in score]
    assert not cache.beside()  # the sums over queries were freed
    cache.attend(Q[:, :, :1], K[:, :, :1], V[:, :, :1], torch.tensor([[n]]))
    with pytest.raises(ValueError, match="already called"):
        cache.end_prefill()


# ---- KVzip ---


def looks(caches, sees=lambda t: [*range(t + 1)]):
    """Return the attention of each layer's recorded queries: {(b, layer, h): [(t, weights of all slots), …]}.

    The query at position t sees the slots sees(t).
    """
    rows_by_head = {}
    for layer, (q, k) in enumerate(caches):
        total = k.shape[2]
        for b in range(B):
            for h in range(H):
                rows = []
                for query in range(h * G, h * G + G):
                    for t in range(total - q.shape[2], total):
                        one_query = q[b, query, t - total + q.shape[2]]
                        p = torch.zeros(total)
                        p[sees(t)] = (k[b, h, sees(t)] @ one_query / math.sqrt(D)).softmax(0)
                        rows.append((t, p.tolist()))
                rows_by_head[b, layer, h] = rows
    return rows_by_head


def ranked(score, budget, layers, across):
    """Return kept positions by (row, layer, head), from scores by the same key; ties: the later entry."""
    stays = {key: [] for key in score}
    for b in range(B):
        groups = [[(b, la, h) for la in range(layers) for h in range(H)]] if across else \
            [[(b, la, h)] for la in range(layers) for h in range(H)]
        for group in groups:
            every = [(score[key][i], key, i) for key in group for i in range(len(score[key]))]
            every.sort(key=lambda x: -x[0])
            for _, key, i in every[:budget * len(group)]:
                stays[key].append(i)
    return stays


@pytest.mark.parametrize("how", ["max", "sum"])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("Method, recent, sinks", [(KVzip, 0, 0), (KVzip, 3, 4), (OneReading, 0, 0),
                                                   (OneReading, 0, 1)])
@torch.no_grad()
def test_kvzip_is_the_loop(Method, recent, sinks, how, across):
    """KVzip and OneReading keep the loop's entries after the decoder read and reread the prompt."""
    model, prompt, budget = decoder(), TOKENS[:, :24], 10
    recorded = []

    class Recording(Method):
        def attend(self, q, k, v, pos):
            y = super().attend(q, k, v, pos)
            recorded[self.layer].append((q.clone(), self.k.clone()))
            return y

    recorded[:] = [[] for _ in range(3)]
    caches = make_cache(model, Recording, budget=budget, score=how, across=across, recent=recent, sinks=sinks)
    prefill(model, prompt, caches)
    end_prompt(model, prompt, caches)

    score = {}
    for key, rows in looks([pieces[-1] for pieces in recorded]).items():
        column = [[p[i] for t, p in rows if Method is KVzip or t - i >= 8] for i in range(24)]
        combine = max if how == "max" else sum
        score[key] = [combine(x) if x and (Method is KVzip or i < 16) else math.inf
                      for i, x in enumerate(column)]
        score[key][24 - recent:], score[key][:sinks] = [math.inf] * recent, [math.inf] * sinks
    stays = ranked(score, budget, 3, across)
    for layer, cache in enumerate(caches):
        assert cache.seen == 24
        assert kept(cache) == [[sorted(stays[b, layer, h]) for h in range(H)] for b in range(B)], layer


@pytest.mark.parametrize("how", ["max", "sum"])
@pytest.mark.parametrize("own", [True, False])
@torch.no_grad()
def test_a_piece_scores_the_entries_that_it_repeats_or_all(own, how):
    """The scores equal the loop's: the softmax covers the first 4 tokens, the piece's entries, the reread."""
    model, prompt, recorded = decoder(), TOKENS[:, :24], [[] for _ in range(3)]

    class Recording(KVzip):
        reread_size = 10

        def attend(self, q, k, v, pos):
            y = super().attend(q, k, v, pos)
            if self.rereading:
                recorded[self.layer].append((self.rereading, (q.clone(), self.k.clone())))
            return y

    caches = make_cache(model, Recording, budget=10, score=how, own=own)
    prefill(model, prompt, caches)
    reread(caches, lambda part: [prefill(model, x, caches) for x in prompt[:, part].split(7, 1)])
    score = [[[0.0] * 24 for _ in range(B * H)] for _ in range(3)]
    for pieces in zip(*recorded):
        part = pieces[0][0]
        scored = [*range(24)[part]] if own else [*range(24)]
        seen = sorted({*range(4), *scored})
        rows_by_head = looks([x for _, x in pieces], lambda t: seen + [*range(24, t + 1)])
        for (b, layer, h), rows in rows_by_head.items():
            old = score[layer][b * H + h]
            for _, p in rows:
                for i in scored:
                    old[i] = max(old[i], p[i]) if how == "max" else old[i] + p[i]
    for layer, cache in enumerate(caches):
        assert torch.allclose(cache.scores().flatten(0, 1), torch.tensor(score[layer]), atol=1e-5)


@torch.no_grad()
def test_a_long_prompt_is_read_again_in_parts():
    """The reread comes in pieces, each with the 8 tokens before it, at positions after the prompt.

    Afterwards the cache is the same as before.
    """
    class Short(KVzip):
        reread_size = 10

        def attend(self, q, k, v, pos):
            if self.rereading and self.layer == 0:
                seen.append(pos[0].tolist())
            return super().attend(q, k, v, pos)

    model, prompt, seen = decoder(), TOKENS[:, :25], []
    caches = make_cache(model, Short, budget=25)
    prefill(model, prompt, caches)
    before = [cache.k.clone() for cache in caches]
    end_prompt(model, prompt, caches)
    assert seen == [[*range(25, 35)], [*range(25, 43)], [*range(25, 38)]]
    assert all(torch.equal(cache.k, k) and cache.seen == 25 for cache, k in zip(caches, before))


def test_a_prompt_that_was_not_read_again_is_refused():
    """KVzip without a reread raises ValueError at the prompt's end."""
    model = decoder()
    caches = make_cache(model, KVzip, budget=5)
    prefill(model, TOKENS, caches)
    with pytest.raises(ValueError, match="reads a prompt twice; .* end_prompt"):
        end_prefill(caches)


def test_a_second_reading_must_fit_into_the_models_length():
    """A prompt whose reread exceeds the model's length raises ValueError."""
    model = decoder(max_len=70)
    with pytest.raises(ValueError, match="78 tokens exceed the model's length of 70"):
        generate(model, TOKENS, 5, make_cache(model, KVzip, budget=5))


@pytest.mark.parametrize("Method, options, message", [
    (KVzip, dict(budget=0), "budget 0 must be at least 1"),
    (KVzip, dict(budget=9, score="mean"), "score is 'mean'"),
    (KVzip, dict(budget=9, recent=-1), "recent -1"),
    (KVzip, dict(budget=9, sinks=-1), "sinks -1"),
    (KVzip, dict(budget=12, recent=8, sinks=4), "budget 12 must be at least 13: 4 sinks and the newest 8"),
    (OneReading, dict(budget=9, later=0), "later 0 must be a whole number of at least 1"),
    (OneReading, dict(budget=9, sinks=1), "budget 9 must be at least 10"),
    (ExpectedAttention, dict(budget=4), "budget 4 must be at least 5"),
    (ExpectedAttention, dict(budget=9, future=0), "future 0"),
    (ExpectedAttention, dict(budget=9, future=2 ** 40), "future 1099511627776 must be .* to 65536"),
    (ExpectedAttention, dict(budget=9, sinks=-1), "sinks -1"),
    (ExpectedAttention, dict(budget=9, epsilon=-0.1), "epsilon is -0.1")])
def test_bad_options_are_refused(Method, options, message):
    """A wrong option raises ValueError when the cache is made."""
    with pytest.raises(ValueError, match=message):
        Method(**options)
