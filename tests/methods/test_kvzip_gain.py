"""KVzip weighed by what the reread gains."""
import zlib

import pytest
import torch

from common import TOKENS, decoder, tasks
from methods.kvzip import KVzip
from methods.ours.kvzip_gain import GainKVzip, from_bytes, gains, to_bytes, variants
from nanollm import TINY, saved
from nanollm.cache import make_cache
from nanollm.generate import end_prompt, prefill, reread, tell_prompt
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.evaluate import maker, retrieve

PROMPT = TOKENS[:, :24]


@torch.no_grad()
def log_p(model, tokens, seen):
    """The log probability of each of the last tokens, by a reading without a cache."""
    out = model(tokens).log_softmax(-1)
    return torch.stack([out[:, t - 1].gather(1, tokens[:, t:t + 1])[:, 0] for t in seen], 1)


@torch.no_grad()
def test_the_gain_is_what_a_second_reading_knows_better():
    model = decoder()
    once = log_p(model, PROMPT, range(1, 24))
    again = log_p(model, torch.cat((PROMPT, PROMPT), 1), range(25, 48))
    found = gains(model, PROMPT, 512)
    assert torch.allclose(found[:, :-1], (again - once).clamp(min=0), atol=1e-4) and (found[:, -1] == 0).all()
    assert (found > 0).any()

    pieces = gains(model, PROMPT, 10)  # three parts, each behind the whole prompt, with 8 tokens before it
    part = torch.cat((PROMPT, PROMPT[:, 2:21]), 1)  # tokens 2 … 19 and the one to predict
    again = log_p(model, part, range(24 + 9, 24 + 19))
    expected = (again - log_p(model, PROMPT, range(11, 21))).clamp(min=0)
    assert torch.allclose(pieces[:, 10:20], expected, atol=1e-4)


@pytest.mark.parametrize("size, how", [(512, "max"), (10, "max"), (10, "sum")])
@torch.no_grad()
def test_each_query_of_the_reread_counts_by_its_gain(size, how):
    model, seen = decoder(), []

    class Plain(KVzip):
        reread_size = size

        def add(self, p, start=0):
            if self.layer == 1:
                seen.append((start, p))
            super().add(p, start)

    class Gain(GainKVzip):
        reread_size = size

    again = lambda caches: reread(caches, lambda part: prefill(model, PROMPT[:, part], caches))
    plain, caches = (make_cache(model, Method, budget=8, score=how) for Method in (Plain, Gain))
    for each in (plain, caches):
        prefill(model, PROMPT, each)
        tell_prompt(PROMPT, each)
        again(each)
    gain = gains(model, PROMPT, size)
    expected = torch.zeros_like(caches[1].entry_scores)
    for start, p in seen:  # a part begins 8 tokens early
        t = torch.arange(max(start - 8, 0), max(start - 8, 0) + p.shape[3])
        weighed = (p * gain[:, t][:, None, None, :, None]).flatten(2, 3)
        part = expected[:, :, start:start + p.shape[4]]
        part.copy_(torch.maximum(part, weighed.amax(2)) if how == "max" else part + weighed.sum(2))
    assert torch.allclose(caches[1].entry_scores, expected, atol=1e-5)
    assert not torch.allclose(plain[1].entry_scores, expected, atol=1e-2)


@torch.no_grad()
def test_it_needs_the_prompts_tokens_and_forgets_them():
    model = decoder()
    caches = make_cache(model, GainKVzip, budget=8)
    prefill(model, PROMPT, caches)
    with pytest.raises(ValueError, match="needs the prompt's tokens; call tell_prompt"):
        reread(caches, lambda part: prefill(model, PROMPT[:, part], caches))
    caches = make_cache(model, GainKVzip, budget=8)
    prefill(model, PROMPT, caches)
    end_prompt(model, PROMPT, caches)
    assert all(cache.prompt_tokens is None and cache.gain is None for cache in caches)
    assert sum(cache.length for cache in caches) >= 8 and caches[0].seen == 24


@pytest.mark.parametrize("name", variants)
@torch.no_grad()
def test_a_records_file_needs_no_positions(name):
    """What from_bytes restores answers as the cache itself, from a smaller file than that of `save`."""
    model = decoder()
    caches, loaded = (make_cache(model, variants[name], budget=8) for _ in range(2))
    prefill(model, PROMPT, caches)
    end_prompt(model, PROMPT, caches)
    whole = saved.to_bytes(caches, half=True)
    saved.from_bytes(whole, exact := make_cache(model, variants[name], budget=8))
    data = to_bytes(caches)
    from_bytes(data, loaded)
    later = PROMPT[:, :5]
    assert torch.equal(model(later, loaded), model(later, exact))
    assert len(data) < len(zlib.compress(whole, 9))


def test_with_few_entries_it_finds_more_than_kvzip():
    """A thirty-second of the entries, the question later: most facts stay, where KVzip loses many."""
    model, found = from_hf(TINY), {}
    batch = tasks("test").batch("pairs", 3, 12, 384)
    for Method in (KVzip, GainKVzip):
        found[Method] = retrieve(model, batch, maker(model, Method, 1 / 32))["agnostic"]
    assert found[GainKVzip].mean() > found[KVzip].mean() + 0.1
