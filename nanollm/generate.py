"""Prefill, end of prompt, decode, sampling.

The prompt's last token is fed *after* the cache has been compressed: otherwise the first new token would be answered
by the full cache.
"""
from collections.abc import Iterator

import torch
from torch import Tensor

from nanollm.cache import finish_prompt, make_cache


def check_prompt(model, tokens: Tensor, new: int = 0):
    """ValueError unless tokens (B, T) are a prompt that the model can read and continue by `new` tokens."""
    V, longest = model.config.vocab_size, model.config.max_len
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise ValueError(f"the prompt is empty or not of shape (B, T): {tuple(tokens.shape)}; give at least one token")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= V:
        raise ValueError(f"token id {low if low < 0 else high} lies outside the vocabulary 0 … {V - 1}; "
                         f"use the model's own tokenizer")
    if tokens.shape[1] + new > longest:
        raise ValueError(f"{tokens.shape[1]} prompt tokens and {new} new ones exceed the model's length of {longest}; "
                         f"shorten the prompt or ask for fewer")


@torch.no_grad()
def prefill(model, tokens: Tensor, caches, chunk: int | None = None) -> Tensor:
    """Feed tokens (B, T), whole or at most `chunk` at a time; returns the last token's logits (B, V).

    Chunks bound the memory: a cache that watches every query makes a matrix of chunk × S probabilities, not T × S.
    """
    check_prompt(model, tokens)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1")
    for part in tokens.split(chunk or tokens.shape[1], 1):
        logits = model(part, caches, last=1)
    return logits[:, -1]


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Next token (B,) from logits (B, V). Temperature 0 takes the most likely one."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(-1)
    if top_p < 1:  # nucleus sampling, arXiv 1904.09751: the fewest tokens whose mass reaches top_p
        ordered, token = p.sort(-1, descending=True)
        p = torch.zeros_like(p).scatter(-1, token, ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0))
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def stream(model, prompt: Tensor, new: int, caches=None, *, temperature: float = 0.0, top_k: int = 0,
           top_p: float = 1.0, stop: tuple[int, ...] = (), seed: int = 0, chunk: int | None = None) -> Iterator[Tensor]:
    """Yield up to `new` tokens (B,) as they come, after prompt (B, T).

    `caches` are fresh ones from `make_cache`, by default full attention. A row that has met a token of `stop` repeats
    it; the stream ends when all rows have.
    """
    check_prompt(model, prompt, new)
    if new < 1:
        raise ValueError(f"new {new} must be at least 1 token")
    if not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} and top_k {top_k} must be at least 0, top_p {top_p} in (0, 1]")
    caches = make_cache(model) if caches is None else caches
    if caches[0].seen:
        raise ValueError(f"the cache has already seen {caches[0].seen} tokens; make a new one for a new prompt")
    generator = torch.Generator(prompt.device).manual_seed(seed)
    return _stream(model, prompt, new, caches, generator, temperature, top_k, top_p, stop, chunk)


@torch.no_grad()
def _stream(model, prompt, new, caches, generator, temperature, top_k, top_p, stop, chunk):
    if prompt.shape[1] > 1:
        prefill(model, prompt[:, :-1], caches, chunk)
    finish_prompt(caches)
    token, ended = prompt[:, -1], None
    for _ in range(new):
        following = sample(model(token[:, None], caches)[:, -1], temperature, top_k, top_p, generator)
        if stop:
            following = following if ended is None else torch.where(ended, token, following)
            ended = torch.isin(following, torch.tensor(stop, device=following.device))
        token = following
        yield token
        if stop and ended.all():
            return


def generate(model, prompt: Tensor, new: int, caches=None, **options) -> Tensor:
    """The tokens of `stream` in one tensor (B, ≤ new)."""
    return torch.stack([*stream(model, prompt, new, caches, **options)], 1)
