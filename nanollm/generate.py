"""Prefill, end of prompt, decode, sampling.

The prompt's last token is fed *after* the cache has been compressed: otherwise the first new token would
be answered by the full cache.
"""
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanollm.cache import cache_bytes, end_prefill, make_cache
from nanollm.check import check_caches, check_seed, check_tokens, fits, whole

LEAST = 1e-6  # below it a temperature would make logits overflow, and a top_p round to 0


def check_prompt(model, tokens: Tensor, new: int = 0):
    """ValueError unless tokens (B, T) are a prompt that the model can read and continue by `new` tokens."""
    V, longest = model.config.vocab_size, model.config.max_len
    check_tokens(tokens, "the prompt's tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= V:
        raise ValueError(f"token id {low if low < 0 else high} lies outside the vocabulary 0 … {V - 1}; "
                         f"use the model's own tokenizer")
    if tokens.shape[1] + new > longest:
        raise ValueError(f"{tokens.shape[1]} prompt tokens and {new} new ones exceed the model's length "
                         f"of {longest}; shorten the prompt or ask for fewer")


def check_chunk(chunk_size: int | None):
    """ValueError unless a prompt can be fed so many tokens at a time, or whole."""
    if chunk_size is not None:
        whole("chunk", chunk_size, 1)


@torch.no_grad()
def prefill(model, tokens: Tensor, caches, chunk_size: int | None = None) -> Tensor:
    """Feed tokens (B, T), whole or at most `chunk_size` at a time; returns the last token's logits (B, V).

    Chunks bound the memory of all that stands between two layers. A cache that watches every query makes its
    probabilities of 128 queries at a time in either case.
    """
    check_prompt(model, tokens)
    check_chunk(chunk_size)
    T, longest = tokens.shape[1], model.config.max_len
    all_of_it = T + (caches[0].seen if caches else 0)
    if all_of_it > longest:  # else the first chunks would be read and a later one refused
        raise ValueError(f"{all_of_it} tokens exceed the model's length of {longest}; shorten the text")
    for part in tokens.split(min(chunk_size or T, T), 1):
        logits = model(part, caches, last=1)
    return logits[:, -1]


def tell_chunk_ends(caches, ends: Tensor):
    """Tell every layer which of the prompt's tokens end a chunk of text, ends (B, T) of bool.

    Only methods that cut the prompt into such chunks read it (methods/ours/chunk_kv_semantic.py).
    `boundaries(encoding, V)[prompt]` of nanollm/tokenizer.py makes it.
    """
    if ends.dtype != torch.bool or ends.dim() != 2:
        raise ValueError(f"ends {tuple(ends.shape)} of {ends.dtype} must be (B, T) of bool, "
                         "the prompt's tokens that end a chunk; give boundaries(encoding, V)[prompt]")
    for cache in caches:
        cache.chunk_ends = ends


@torch.no_grad()
def end_prompt(model, tokens: Tensor, caches) -> int:
    """Tell every layer that the prompt, tokens (B, T), is over; those that read it twice read it again first.

    Returns the most bytes that the caches allocated for the second reading, 0 if there is none.
    """
    if caches[0].seen != tokens.shape[1]:
        raise ValueError(f"the caches have seen {caches[0].seen} tokens, and the prompt that ends has "
                         f"{tokens.shape[1]}; give the prompt that they have read, all of it")
    peak = reread(caches, lambda part: prefill(model, tokens[:, part], caches))
    end_prefill(caches)
    return peak


def rereads(caches) -> int:
    """Tokens that come at a time when the prompt is read a second time, as KVzip asks; 0: it is not."""
    return getattr(caches[0], "rereads", 0)


def reread_slices(T: int, n: int) -> list[slice]:
    """The parts of a prompt of T tokens that come a second time: `n` tokens, and the 8 before them."""
    return [slice(max(start - 8, 0), min(start + n, T)) for start in range(0, T, n)] if n else []


def check_rereads(model, caches, T: int):
    """ValueError if a prompt of T tokens is too long for the second reading, which comes behind it."""
    again, longest = reread_slices(T, rereads(caches)), model.config.max_len
    need = T + max((part.stop - part.start for part in again), default=0)
    if again and need > longest:
        raise ValueError(f"{need} tokens exceed the model's length of {longest}, as this method reads "
                         f"a prompt of {T} twice; shorten the text")


def reread(caches, read: Callable[[slice], object]) -> int:
    """The second reading of methods that ask for one: `rereads` tokens at a time, and the 8 before them, come
    after the whole prompt, and are then taken out again. `read` feeds a part of the prompt. Returns the most
    bytes that the caches allocated.
    """
    peak = 0
    T, n = caches[0].seen, rereads(caches)
    if n and caches[0].prompt_done:
        raise ValueError("the prompt was already ended; call end_prompt once per prompt")
    for cache in caches if n else ():
        cache.reserve(T + min(n + 8, T))
    for part in reread_slices(T, n):
        for cache in caches:
            cache.rereading = T
        read(part)
        peak = max(peak, cache_bytes(caches)[1])
        for cache in caches:
            cache.rereading, cache.length, cache.seen = 0, T, T
    return peak


def check_sampling(temperature: float, top_k: int, top_p: float):
    """ValueError unless `sample` can work with these."""
    whole("top_k", top_k, 0)
    if not fits(temperature, float) or not (temperature == 0 or temperature >= LEAST):
        raise ValueError(f"temperature {temperature!r:.60} must be 0 or a finite number from {LEAST:g} on")
    if not fits(top_p, float) or not LEAST <= top_p <= 1:
        raise ValueError(f"top_p {top_p!r:.60} must be a number from {LEAST:g} to 1")


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float,
           generator: torch.Generator | None) -> Tensor:
    """Next token (B,) from logits (B, V). Temperature 0 takes the most likely one."""
    if temperature == 0:
        return logits.argmax(-1)
    check_sampling(temperature, top_k, top_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # 16 bits overflow
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(-1)
    if top_p < 1:  # nucleus sampling, arXiv 1904.09751: the fewest tokens whose mass reaches top_p
        ordered, token = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, token, ordered.masked_fill(before >= top_p, 0))
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def stream(model, prompt: Tensor, new: int, caches=None, *, temperature: float = 0.0, top_k: int = 0,
           top_p: float = 1.0, stop: tuple[int, ...] = (), seed: int = 0,
           chunk_size: int | None = None) -> Iterator[Tensor]:
    """Yield up to `new` tokens (B,) as they come, after prompt (B, T).

    `caches` are fresh ones from `make_cache`, by default full attention. A row that has met a token of
    `stop` repeats it; the stream ends when all rows have. Raises ValueError, at the call, for what is out
    of range.
    """
    check_prompt(model, prompt, whole("new", new, 1))
    check_sampling(temperature, top_k, top_p)
    check_seed(seed)
    check_chunk(chunk_size)
    if not isinstance(stop, (tuple, list)):
        raise ValueError(f"stop {stop!r:.60} must be a tuple of token ids, (3,) for one")
    for token in stop:
        whole("stop", token, 0, model.config.vocab_size - 1)
    caches = make_cache(model) if caches is None else caches
    check_caches(caches, model.config.n_layers, len(prompt))
    if caches[0].seen:
        raise ValueError(f"the cache has already seen {caches[0].seen} tokens; "
                         "make a new one for a new prompt")

    check_rereads(model, caches, prompt.shape[1] - 1)
    generator = torch.Generator(prompt.device).manual_seed(seed)
    return _stream(model, prompt, new, caches, generator, temperature, top_k, top_p, stop, chunk_size)


@torch.no_grad()
def _stream(model, prompt, new, caches, generator, temperature, top_k, top_p, stop, chunk):
    if prompt.shape[1] > 1:
        prefill(model, prompt[:, :-1], caches, chunk)
    end_prompt(model, prompt[:, :-1], caches)
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
