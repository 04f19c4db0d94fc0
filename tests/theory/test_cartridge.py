"""A cartridge: slots fitted by gradient to one text."""
import torch

from common import TOKENS, decoder
from methods.kvzip import KVzip
from methods.theory.cartridge import caches_of, fit, read, stacked

TEXT, LATER = TOKENS[:, :24], TOKENS[:, 24:29]


@torch.no_grad()
def test_slots_of_the_whole_cache_answer_as_the_cache_does():
    model = decoder()
    whole = read(model, TEXT)
    expected, caches = model(LATER, whole), caches_of(model, *stacked(read(model, TEXT)), 24)
    assert torch.allclose(model(LATER, caches), expected, atol=1e-5)


def test_fitted_slots_predict_more_of_the_text_than_chosen_ones():
    model = decoder()
    k, v, losses = fit(model, TEXT, 4, steps=60, piece=8)
    assert k.shape == v.shape == (3, len(TEXT), 2, 4, 8)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    kl = {}
    with torch.no_grad():
        right = model(TEXT, read(model, TEXT)).log_softmax(-1)
        for name, caches in (("chosen", read(model, TEXT, KVzip, budget=4, across=False)),
                             ("fitted", caches_of(model, k, v, 24))):
            kl[name] = (right.exp() * (right - model(TEXT, caches).log_softmax(-1))).sum(-1).mean().item()
    assert kl["fitted"] < 0.9 * kl["chosen"]


def test_texts_of_a_batch_are_fitted_alone():
    model = decoder()
    both, one = (fit(model, text, 4, steps=1, piece=24) for text in (TEXT[:1].repeat(2, 1), TEXT[:1]))
    for x, y in zip(both[:2], one[:2]):
        assert torch.allclose(x[:, :1], y, atol=1e-5) and torch.allclose(x[:, 1:], y, atol=1e-5)
