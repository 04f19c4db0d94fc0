"""kvzip_gain_coded: its coordinates, its entropy coder, and the file that another process reads."""
from functools import partial
import math

import numpy as np
import pytest
import torch

from common import ENCODING, TOKENS, decoder
from methods.ours import karhunen_loeve, rans
from methods.ours.karhunen_loeve import TokenGainKVzip, measured
from methods.ours.kvzip_gain import GainKVzip
from methods.ours.kvzip_gain_coded import CodedGainKVzip, from_bytes, to_bytes
from methods.ours.retrieval_layers import RetrievalLayers
from nanollm import TINY
from nanollm.cache import NEVER, bytes_in_16_bits, make_cache
from nanollm.generate import end_prompt, prefill
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.evaluate import maker, retrieve
from nanollm.measure.hard_tasks import HardTasks

PROMPT = TOKENS[:, :24]


@pytest.mark.parametrize("n", [0, 1, rans.lanes(1), 5000, 10_000])
def test_codes_come_back_and_take_hardly_more_than_their_entropy(n):
    g = np.random.default_rng(0)
    spread = 2.0 ** g.uniform(-4, 3, n)
    code = np.round(g.logistic(size=n) * spread * math.sqrt(3) / math.pi).clip(-rans.MOST, rans.MOST)
    code, kind = code.astype(np.int64), rans.class_of(spread)
    data = rans.encode(code, kind)
    assert (rans.decode(data, kind) == code).all()
    below = lambda x: 1 / (1 + np.exp(-x * math.pi / math.sqrt(3) / spread))
    bits = -np.log2(below(code + 0.5) - below(code - 0.5)).sum()
    assert len(data) < 1.01 * bits / 8 + 4 * rans.lanes(n) + 2


def test_every_code_of_every_class_comes_back():
    code, kind = (x.ravel() for x in np.mgrid[-rans.MOST:rans.MOST + 1, :len(rans.SPREAD)])
    assert (rans.decode(rans.encode(code, kind), kind) == code).all()


def test_centres_are_the_means_of_the_numbers_that_are_rounded_to_a_code():
    centres, code = rans.centres(), np.arange(-rans.MOST, rans.MOST + 1)
    assert (np.abs(centres) <= np.abs(code)).all() and (centres.round() == code).all()
    for spread in 0.5, 1, 8:
        x = np.random.default_rng(0).logistic(size=10 ** 6) * spread * math.sqrt(3) / math.pi
        for z in -3, -1, 0, 1, 2:
            found = centres[rans.class_of(np.array(spread)), z + rans.MOST]
            assert found == pytest.approx(x[x.round() == z].mean(), abs=0.01)


def read(model, Method, budget=8, **options):
    caches = make_cache(model, Method, budget=budget, **options)
    prefill(model, PROMPT[:1], caches)
    end_prompt(model, PROMPT[:1], caches)
    return caches


@torch.no_grad()
def test_a_token_stays_in_all_heads_by_its_highest_score():
    model, found = decoder(), {}

    class Scores(GainKVzip):
        def scores(self):
            found[self.layer] = super().scores()
            return found[self.layer]

    read(model, Scores)
    best = {(layer, i): found[layer][0, :, i].max().item() for layer in found for i in range(24)}
    best = {*sorted(best, key=best.get)[-8 * len(found):]}
    for layer, cache in enumerate(read(model, TokenGainKVzip)):
        for head in cache.pos[0]:
            assert {(layer, i) for i in head.tolist() if i != NEVER} == {x for x in best if x[0] == layer}


@torch.no_grad()
def test_only_scores_from_least_on_stay():
    model = decoder()
    all_of_them = [cache.pos[0, 0].tolist() for cache in read(model, TokenGainKVzip)]
    scores = []

    class Scores(TokenGainKVzip):
        def scores(self):
            scores.append(super().scores()[0, 0])
            return super().scores()

    read(model, Scores)
    least = torch.cat([x[torch.tensor(stay)] for x, stay in zip(scores, all_of_them)]).median().item()
    for x, stay, cache in zip(scores, all_of_them, read(model, TokenGainKVzip, least=least)):
        assert cache.pos[0].tolist() == [[i for i in stay if x[i] >= least]] * 2
    for x, cache in zip(scores, read(model, TokenGainKVzip, budget=24, least=least)):  # room for all
        assert cache.pos[0].tolist() == [[i for i in range(24) if x[i] >= least]] * 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_one_step_in_each_direction_costs_what_the_metric_says(family):
    """Errors of one step in every coordinate, summed: D squared steps for the keys and values of a head."""
    model, T = decoder(family=family, vocab_size=2048, max_len=512), 160
    bases = measured(model, HardTasks(ENCODING, "train"), documents=8, T=T).double()
    N = bases.shape[2]
    into, back, mean, spread = bases.split((N, N, 1, 1), 1)
    assert torch.allclose(into @ back, torch.eye(N).double().expand_as(into), atol=1e-2)
    assert (spread >= 0).all() and spread.sum() > 0

    batch, queries = HardTasks(ENCODING, "train").batch("turns", 0, 8, T), []
    hooks = [block.attention.qkv.register_forward_hook(lambda module, of, out: queries.append(out))
             for block in model.blocks]
    model(torch.from_numpy(batch.tokens))
    for hook in hooks:
        hook.remove()
    for layer, block in enumerate(model.blocks):
        w_o, (heads, H, _) = block.attention.w_o.double(), block.attention.heads
        D = w_o.shape[2]
        dk, dv = back[layer].unflatten(1, (2, H, D)).unbind(1)
        cost = torch.einsum("nhd,mhgd->nmhg", dv, w_o.unflatten(1, (H, -1))).square().sum((0, 1)).mean(1)
        assert torch.allclose(cost, cost.new_tensor(D * karhunen_loeve.VALUE_STEP ** 2), rtol=0.02)
        if layer == 0:  # later queries see what the compression of the first layer changed
            q = queries[0][:, batch.question:, :heads * D].unflatten(2, (H, -1, D)).double()
            cost = torch.einsum("nhd,bthgd->nbthg", dk, q).square().mean((1, 2, 4)).sum(0) / D
            turned = 0.2 if family == "llama" else 0.02  # here the queries are not rotated
            assert torch.allclose(cost, cost.new_tensor(D * karhunen_loeve.KEY_STEP ** 2), rtol=turned)


class EmptyLayer(CodedGainKVzip):
    def scores(self):
        return super().scores() * (self.layer != 1)


Layers = partial(RetrievalLayers, layers=(1, 0), sinks=1, recent=1)


@pytest.mark.parametrize("Method", [CodedGainKVzip, EmptyLayer, Layers])
@torch.no_grad()
def test_the_file_answers_as_the_cache_that_wrote_it(Method):
    model = decoder()
    N = 2 * 2 * 8
    g = torch.Generator().manual_seed(3)
    into = torch.randn(3, N, N, generator=g) + 4 * torch.eye(N)
    bases = torch.cat((into, torch.linalg.inv(into), torch.zeros(3, 1, N), torch.full((3, 1, N), 3.0)), 1)
    caches = read(model, Method, bases=bases, least=0)
    assert (caches[1].pos.shape[2] == 0) == (Method is EmptyLayer)
    loaded = make_cache(model, Method, budget=8, bases=bases)
    from_bytes(to_bytes(caches), loaded)
    for cache, other in zip(caches, loaded):
        assert all(torch.equal(cache.slot(name), other.slot(name)) for name in ("k", "v", "pos"))
    assert torch.equal(model(PROMPT[:1, :5], loaded), model(PROMPT[:1, :5], caches))
    assert bytes_in_16_bits(loaded) == bytes_in_16_bits(caches)


@pytest.mark.parametrize("budget, whole", [(9, []), (10, [1]), (16, [1]), (17, [1, 0]), (24, [0, 1, 2])])
@torch.no_grad()
def test_as_many_retrieval_layers_keep_everything_as_fit(budget, whole):
    caches = make_cache(decoder(), RetrievalLayers, budget=budget, layers=(1, 0), sinks=2, recent=1)
    prefill(caches[0].model, PROMPT[:1], caches)
    end_prompt(caches[0].model, PROMPT[:1], caches)
    for layer, cache in enumerate(caches):
        kept = [*range(24)] if layer in whole else [0, 1, 23]
        assert cache.pos[0].tolist() == [kept] * 2


def test_the_layers_with_retrieval_heads_are_found():
    found = RetrievalLayers.calibrate(from_hf(TINY), ENCODING)
    assert found["layers"] == (1,) and found["bases"].shape == (6, 2 * 192 + 2, 192)


def test_on_built_one_percent_answers():
    """Pairs, asked later, from files of less than a hundredth of the full cache's bytes in 16 bits."""
    model = from_hf(TINY)
    bases = CodedGainKVzip.calibrate(model, ENCODING)["bases"]
    Method = partial(CodedGainKVzip, bases=bases)
    batch = HardTasks(ENCODING, "test").batch("pairs", 4, 12, 512)
    assert retrieve(model, batch, maker(model, Method, 0.1))["agnostic"].mean() > 0.9
    full = 512 * 6 * 3 * 32 * 4
    for text in torch.from_numpy(batch.tokens[:2, :batch.question]).split(1):
        caches = make_cache(model, Method, budget=51)
        prefill(model, text, caches)
        end_prompt(model, text, caches)
        assert 0.004 * full < len(to_bytes(caches)) < 0.01 * full
