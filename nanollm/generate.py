"""Prefill, end of the prompt, decoding and sampling.

The prompt's last token is fed *after* the cache has been compressed. Otherwise the full cache would predict
the first new token.
"""
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanollm.cache import cache_bytes, end_prefill, make_cache
from nanollm.check import check_caches, check_seed, check_tokens, fits, whole

LEAST = 1e-6  # a lower temperature would make logits overflow, and a lower top_p would round to 0


def check_prompt(model, tokens: Tensor, new: int = 0):
    """Raise ValueError unless the model can read tokens (B, T) and add `new` tokens."""
    V, longest = model.config.vocab_size, model.config.max_len
    check_tokens(tokens, "the prompt's tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= V:
        raise ValueError(f"token id {low if low < 0 else high} lies outside the vocabulary 0 … {V - 1}; "
                         f"use the model's own tokenizer")
    if tokens.shape[1] + new > longest:
        raise ValueError(f"{tokens.shape[1]} prompt tokens and {new} new ones exceed the model's length "
                         f"of {longest}; shorten the prompt or ask for fewer new tokens")


@torch.no_grad()
def prefill(model, tokens: Tensor, caches, chunk_size: int | None = None) -> Tensor:
    """Feed tokens (B, T), at most `chunk_size` at a time; return the last token's logits (B, V).

    Chunks limit the memory of activations.
    """
    check_prompt(model, tokens)
    T, longest = tokens.shape[1], model.config.max_len
    total = T + (caches[0].seen if caches else 0)
    if total > longest:  # checked here, so that not even the first chunk is read
        raise ValueError(f"{total} tokens exceed the model's length of {longest}; shorten the text")
    for part in tokens.split(T if chunk_size is None else chunk_size, 1):
        logits = model(part, caches, last=1)
    return logits[:, -1]


def tell_chunk_ends(caches, ends: Tensor):
    """Tell every layer which of the prompt's tokens end a chunk of text: ends (B, T) of bool.

    `boundaries(encoding, V)[prompt]` (tokenizer.py) computes it, for methods with semantic chunks.
    """
    if ends.dtype != torch.bool or ends.dim() != 2:
        raise ValueError(f"ends {tuple(ends.shape)} of {ends.dtype} must be (B, T) of bool, true for tokens "
                         "that end a chunk; give boundaries(encoding, V)[prompt]")
    for cache in caches:
        cache.chunk_ends = ends


def tell_prompt(tokens: Tensor, caches):
    """Tell every layer the prompt's tokens (B, T), if its method has an attribute `prompt_tokens`."""
    for cache in caches:
        if hasattr(cache, "prompt_tokens"):
            cache.prompt_tokens = tokens


@torch.no_grad()
def end_prompt(model, tokens: Tensor, caches) -> int:
    """Tell every layer that the prompt, tokens (B, T), is over; reread it first if necessary.

    Returns the most bytes that the caches allocated during the reread, or 0 if there is none.
    """
    if caches[0].seen != tokens.shape[1]:
        raise ValueError(f"the caches have seen {caches[0].seen} tokens, but the prompt has "
                         f"{tokens.shape[1]}; give the whole prompt that the caches have seen")
    tell_prompt(tokens, caches)
    peak = reread(caches, lambda part: prefill(model, tokens[:, part], caches))
    end_prefill(caches)
    return peak


def reread_size(caches) -> int:
    """Return how many tokens a method rereads at a time (KVzip); 0 if it does not reread."""
    return getattr(caches[0], "reread_size", 0)


def reread_slices(T: int, n: int) -> list[slice]:
    """Return the parts of T tokens to reread: `n` tokens each, and the 8 before them."""
    return [slice(max(start - 8, 0), min(start + n, T)) for start in range(0, T, n)] if n else []


def check_rereads(model, caches, T: int):
    """Raise ValueError if a prompt of T tokens leaves no room to reread its parts after it."""
    parts, longest = reread_slices(T, reread_size(caches)), model.config.max_len
    need = T + max((part.stop - part.start for part in parts), default=0)
    if parts and need > longest:
        raise ValueError(f"{need} tokens exceed the model's length of {longest}: the prompt has {T}, and "
                         "this method rereads parts of it after its end; shorten the text")


def reread(caches, read: Callable[[slice], object]) -> int:
    """Reread the prompt if the method asks for it; return the caches' peak allocated bytes.

    `read` feeds a part of the prompt once more, behind the whole prompt. Its entries are then removed, before
    the next part comes. Meanwhile `rereading` of each cache says which entries the part repeats.
    """
    peak = 0
    T, n = caches[0].seen, reread_size(caches)
    if n and caches[0].prompt_done:
        raise ValueError("the prompt was already ended; call end_prompt once per prompt")
    for cache in caches if n else ():
        cache.reserve(T + min(n + 8, T))
    for i, part in enumerate(reread_slices(T, n)):
        for cache in caches:
            cache.rereading, cache.first_pass = slice(i * n, part.stop), T
        read(part)
        peak = max(peak, cache_bytes(caches)[1])
        for cache in caches:
            cache.rereading, cache.length, cache.seen = None, T, T
    return peak


def check_sampling(temperature: float, top_k: int, top_p: float):
    """Raise ValueError unless `sample` can work with these options."""
    whole("top_k", top_k, 0)
    if not fits(temperature, float) or not (temperature == 0 or temperature >= LEAST):
        raise ValueError(f"temperature {temperature!r:.60} must be 0 or a finite number, at least {LEAST:g}")
    if not fits(top_p, float) or not LEAST <= top_p <= 1:
        raise ValueError(f"top_p {top_p!r:.60} must be a number from {LEAST:g} to 1")


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float,
           generator: torch.Generator | None) -> Tensor:
    """Return the next token (B,), drawn from logits (B, V). Temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # 16 bits may overflow
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(-1)
    if top_p < 1:  # nucleus sampling (arXiv 1904.09751): the fewest tokens whose probabilities sum to top_p
        ordered, token = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, token, ordered.masked_fill(before >= top_p, 0))
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def stream(model, prompt: Tensor, new: int, caches=None, *, temperature: float = 0.0, top_k: int = 0,
           top_p: float = 1.0, seed: int = 0) -> Iterator[Tensor]:
    """Yield `new` tokens (B,) that continue prompt (B, T), one by one.

    `caches` are fresh ones from `make_cache`, by default full attention. Raises ValueError at the call, not
    at the first token, if an argument is out of range.
    """
    whole("new", new, 1)
    check_prompt(model, prompt, new)
    check_sampling(temperature, top_k, top_p)
    check_seed(seed)
    caches = make_cache(model) if caches is None else caches
    check_caches(caches, model.config.n_layers, len(prompt))
    if caches[0].seen:
        raise ValueError(f"the cache has already seen {caches[0].seen} tokens; "
                         "make a new one for a new prompt")

    check_rereads(model, caches, prompt.shape[1] - 1)
    generator = torch.Generator(prompt.device).manual_seed(seed)
    return _stream(model, prompt, new, caches, generator, temperature, top_k, top_p)


@torch.no_grad()
def _stream(model, prompt, new, caches, generator, temperature, top_k, top_p):
    if prompt.shape[1] > 1:
        prefill(model, prompt[:, :-1], caches)
    end_prompt(model, prompt[:, :-1], caches)
    token = prompt[:, -1]
    for _ in range(new):
        token = sample(model(token[:, None], caches)[:, -1], temperature, top_k, top_p, generator)
        yield token


def generate(model, prompt: Tensor, new: int, caches=None, **options) -> Tensor:
    """Return the tokens of `stream` in one tensor (B, new)."""
    return torch.stack([*stream(model, prompt, new, caches, **options)], 1)
