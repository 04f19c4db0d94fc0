"""StreamingLLM keeps sinks and the newest; positions count in the cache, or in the text."""

import pytest
import torch

from common import FREQ, TOKENS, B, H, alone, decoder, dense, end, turn
from loops import PROMPT, check_kept, each_cut, parts_of, text
from methods.baselines.streaming_llm import AbsoluteStreamingLLM, StreamingLLM
from nanollm.cache import make_cache


def first_and_newest(q, k, parts, budget, sinks):
    """Section 3.2: keep the first tokens and the most recent ones."""
    for part in parts:
        n = part.stop
        kept = [*range(n)]
        if n >= PROMPT and n > budget:
            kept = [*range(sinks), *range(n - budget + sinks, n)]
        yield [[kept] * H] * B


@pytest.mark.parametrize("budget, sinks", [(9, 4), (6, 0)])
@pytest.mark.parametrize("Method", [StreamingLLM, AbsoluteStreamingLLM])
@each_cut
def test_kept_tokens_and_bytes_equal_the_loop(cut, Method, budget, sinks):
    """The keys of relative sinks are stored twice."""
    twice = sinks if Method is StreamingLLM else 0
    check_kept(cut, Method(budget, sinks), first_and_newest, twice=twice)


def test_positions_count_in_the_cache():
    """The output is attention with keys and queries rotated by their places in the cache."""
    q, k, v = text()
    layer = alone(StreamingLLM(budget=9, sinks=4), freq=FREQ)
    token = torch.arange(q.shape[2])
    stored_q = turn(q, token)
    stored_k = turn(k, token)
    parts = parts_of("pieces")
    kept = []
    for part, later in zip(parts, first_and_newest(q, k, parts, 9, 4)):
        n = len(part)
        i = slice(part.start, part.stop)
        y = layer.attend(
            stored_q[:, :, i], stored_k[:, :, i], v[:, :, i], token[None, i]
        )
        tokens = [*kept, *part]
        place = torch.arange(len(tokens))
        rotated_q = turn(q[:, :, i], place[-n:])
        rotated_k = turn(k[:, :, tokens], place)
        visible = (place <= place[-n:, None]).expand(B, H, n, -1)
        expected = dense(rotated_q, rotated_k, v[:, :, tokens], visible)
        assert torch.allclose(y, expected, atol=1e-5), part
        if part.stop == PROMPT:
            end(layer)
        kept = later[0][0]


@torch.inference_mode()
def test_on_learned_positions_they_must_be_absolute():
    model = decoder(family="gpt2", n_kv_heads=6)
    message = "which this model does not have; use streaming_llm_absolute"
    with pytest.raises(ValueError, match=message):
        make_cache(model, StreamingLLM, budget=8)
    caches = make_cache(model, AbsoluteStreamingLLM, budget=40)
    assert torch.allclose(model(TOKENS, caches), model(TOKENS), atol=1e-5)
