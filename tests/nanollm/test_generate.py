"""Decoding against recomputation from scratch, sampling against its distribution."""

import math

import pytest
import torch

from common import decoder
from methods.baselines.h2o import H2O
from methods.baselines.kvzip import KVzip
from nanollm.cache import Method, PackedSlots, compress, make_cache
from nanollm.generate import LEAST, generate, prefill, sample, stream

V = 50
PROMPT = torch.randint(0, V, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return decoder(tie_embeddings=False)


class Probe(PackedSlots):
    """Notes how many tokens came at a time, and after how many it was compressed."""

    def __init__(self, *place):
        super().__init__(*place)
        self.parts = []
        self.compressed = []

    def write(self, k, v, pos):
        super().write(k, v, pos)
        self.parts.append(k.shape[2])

    def end_prompt(self):
        super().end_prompt()
        self.compressed.append(self.seen)


def probes(model):
    return make_cache(model, Method, Probe)


@torch.inference_mode()
def from_scratch(model, prompt, new):
    text = prompt
    for _ in range(new):
        text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
    return text[:, prompt.shape[1] :]


def test_greedy_decoding_equals_recomputing_everything_for_each_token(model):
    expected = from_scratch(model, PROMPT, 30)
    assert len(set(expected[0].tolist())) > 10  # the text is no short loop
    assert torch.equal(generate(model, PROMPT, 30), expected)
    first = PROMPT[:, :1]
    assert torch.equal(generate(model, first, 10), from_scratch(model, first, 10))


@torch.inference_mode()
def test_prefill_in_chunks_gives_the_same_logits_and_compresses_nothing(model):
    caches = probes(model)
    logits = prefill(model, PROMPT, caches, 6)
    assert torch.allclose(logits, model(PROMPT)[:, -1], atol=1e-5)
    assert caches[1].parts == [6, 6, 6, 2]
    assert caches[1].compressed == []


def test_the_whole_prompt_is_read_and_compressed_once_and_tokens_come_as_they_are_made(
    model,
):
    caches = probes(model)
    tokens = stream(model, PROMPT, 5, caches)
    assert caches[0].seen == 0
    for n in range(5):  # the fifth is never fed
        next(tokens)
        assert caches[0].parts == [20] + [1] * n
    assert next(tokens, None) is None
    for layer in caches:
        assert layer.compressed == [20]
        assert layer.seen == 24


@pytest.mark.parametrize("Method, budget", [(KVzip, 2), (H2O, 4)])
@torch.inference_mode()
def test_the_first_token_comes_from_the_whole_prompt_and_the_next_from_the_compressed_cache(
    model, Method, budget
):
    caches = make_cache(model, Method, budget=budget)
    prefill(model, PROMPT, caches)
    compress(model, PROMPT, caches)
    first = model(PROMPT)[:, -1].argmax(-1)
    expected = [first]
    for _ in range(8):
        expected.append(model(expected[-1][:, None], caches)[:, -1].argmax(-1))
    found = generate(model, PROMPT, 9, make_cache(model, Method, budget=budget))
    assert torch.equal(found, torch.stack(expected, 1))
    full = generate(model, PROMPT, 9)
    assert torch.equal(found[:, 0], full[:, 0])
    assert not torch.equal(found[:, 1:], full[:, 1:])


def distribution(logits: list[float], temperature: float, top_k: int) -> list[float]:
    """Softmax over the k most likely, in plain Python."""
    weight = [math.exp(x / temperature) for x in logits]
    likeliest = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = likeliest[: top_k or None]
    total = sum(weight[i] for i in kept)
    return [x / total if i in kept else 0.0 for i, x in enumerate(weight)]


LOGITS = [0.3, 2.0, -1.0, 1.2, 1.7, -0.5, 0.9, 0.0]


@pytest.mark.parametrize(
    "temperature, top_k", [(0.5, 0), (1.0, 1), (1.0, 99), (0.7, 5)]
)
def test_samples_follow_the_distribution(temperature, top_k):
    """Rows of two kinds, each cut by its own logits."""
    n = 20_000
    generator = torch.Generator().manual_seed(0)
    kinds = torch.tensor([LOGITS, [x / 2 for x in LOGITS[::-1]]])
    drawn = sample(kinds.repeat(n, 1), temperature, top_k, generator).view(n, 2)
    for logits, column in zip(kinds.tolist(), drawn.T):
        p = torch.tensor(distribution(logits, temperature, top_k))
        count = column.bincount(minlength=8)
        assert (count > 0).tolist() == (p > 0).tolist()
        chi2 = ((count - n * p) ** 2 / (n * p))[p > 0].sum().item()
        # with 7 degrees of freedom 26 is exceeded once in 2000 seeds, with fewer less often
        assert chi2 < 26


def test_a_small_temperature_is_greedy_in_16_bits_too():
    logits = torch.tensor([[60.0, -70.0, 65.0, 0.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for temperature in (LEAST, 1e-3):
            assert sample(logits.to(dtype), temperature, 0, None) == 2


def test_temperature_0_is_greedy_else_a_seed_decides(model):
    greedy = generate(model, PROMPT, 20)
    seeded = generate(model, PROMPT, 20, temperature=0.0, top_k=5, seed=9)
    assert torch.equal(seeded, greedy)
    a, b, c = (generate(model, PROMPT, 20, temperature=1.0, seed=s) for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert (a != c).float().mean() > 0.5


def test_a_used_cache_and_a_text_too_long_for_it_are_refused_whole(model):
    caches = probes(model)
    prefill(model, PROMPT, caches)
    with pytest.raises(ValueError, match="already seen 20 tokens"):
        stream(model, PROMPT, 3, caches)
    with pytest.raises(ValueError, match="70 tokens exceed the model's length of 64"):
        prefill(model, torch.zeros(2, 50, dtype=torch.long), caches, chunk_size=10)
    assert caches[0].parts == [20]


EMPTY = torch.zeros(1, 0, dtype=torch.long)
LONG = torch.zeros(1, 62, dtype=torch.long)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(prompt=EMPTY), r"prompt's tokens are .*\(1, 0\)"),
        (dict(prompt=torch.tensor([[3, 50]])), "token id 50 lies outside .* 0 … 49"),
        (dict(prompt=LONG), "62 prompt tokens and 3 new ones exceed .* of 64"),
        (dict(new=0), "new 0 must be a whole number of at least 1"),
        (dict(temperature=math.nan), "temperature is .* must be 0"),
        (dict(temperature=1e-40), "temperature is .* must be 0"),
        (dict(top_k=-1), "top_k -1 must"),
        (dict(seed=-1), "seed -1 must be a whole number"),
        (dict(caches=[]), "3 layers need a cache each"),
    ],
)
def test_bad_input_is_refused_at_the_call_and_not_at_the_first_token(
    model, wrong, message
):
    caches = probes(model)
    with pytest.raises(ValueError, match=message):
        stream(model, **dict(prompt=PROMPT, new=3, caches=caches) | wrong)
    assert caches[0].parts == []
    assert generate(model, LONG[:, :61], 3).shape == (1, 3)  # the longest


def test_numbers_that_overflow_are_told(model):
    large = decoder(tie_embeddings=False)
    large.embed.weight.data *= 1e6
    assert not large(PROMPT).isnan().any()
    with pytest.raises(ValueError, match="overflow in torch.float16"):
        generate(large.half(), PROMPT, 3)
