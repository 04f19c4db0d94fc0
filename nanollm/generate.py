"""Prefill, decoding and sampling.

`stream` reads the whole prompt and then compresses the cache; the prompt's own logits, computed
before, give the first new token. `prefill_evicting` evicts while it reads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanollm.attention import wide
from nanollm.cache import compress, full_layers, make_cache, rereading
from nanollm.check import check_caches, check_ids, check_seed, check_tokens, whole

LEAST = 1e-6  # temperatures near 0, such as 1e-40, would make logits overflow


def check_prompt(model, tokens: Tensor, new: int = 0):
    """Raise ValueError unless the model can read tokens (B, T) and add `new` tokens."""
    longest = model.config.max_len
    check_tokens(tokens, "the prompt's tokens")
    check_ids(tokens, model.config.vocab_size)
    if tokens.shape[1] + new > longest:
        raise ValueError(
            f"{tokens.shape[1]} prompt tokens and {new} new ones exceed the model's length "
            f"of {longest}; shorten the prompt or ask for fewer new tokens"
        )


@torch.no_grad()
def prefill(model, tokens: Tensor, caches, chunk_size: int | None = None) -> Tensor:
    """Feed tokens (B, T), at most `chunk_size` at a time; return the last token's logits (B, V).

    Chunks limit the memory of activations.
    """
    check_prompt(model, tokens)
    T, longest = tokens.shape[1], model.config.max_len
    total = T + (caches[0].seen if caches else 0)
    if total > longest:  # checked here, so that not even the first chunk is read
        raise ValueError(
            f"{total} tokens exceed the model's length of {longest}; shorten the text"
        )
    for part in tokens.split(T if chunk_size is None else chunk_size, 1):
        logits = model(part, caches, last=1)
    if logits.isnan().any():
        raise ValueError(
            f"the logits are NaN, for numbers overflow in {logits.dtype}; use bfloat16 or float32"
        )
    return logits[:, -1]


@torch.no_grad()
def prefill_evicting(model, tokens: Tensor, caches, piece: int = 512):
    """Feed a prompt, tokens (B, T), and evict between its pieces; `compress` then ends the prompt.

    So a head of the compressed layers holds on average at most the method's budget and a piece
    (KVzip's reread adds more), however long the prompt is. Later tokens do not see what has been
    evicted, but for what KVReviver reads back. A method's notes, such as scores, stay until the
    end.
    """
    layers = full_layers(caches)
    for part in tokens.split(piece, 1):
        read = tokens[:, : caches[0].seen]
        if read.numel():
            layers[0].method.compress(rereading(model, caches), read, layers)
        prefill(model, part, caches)


def sample(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """Return the next token (B,), drawn from logits (B, V). Temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = wide(logits) / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def stream(
    model,
    prompt: Tensor,
    new: int,
    caches=None,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield `new` tokens (B,) that continue prompt (B, T), one by one.

    `caches` are fresh ones from `make_cache`, by default full attention. Raises ValueError at the
    call, not at the first token, if an argument is out of range.
    """
    whole("new", new, 1)
    check_prompt(model, prompt, new)
    whole("top_k", top_k, 0)
    if not (temperature == 0 or LEAST <= temperature < torch.inf):
        raise ValueError(
            f"temperature is {temperature}; it must be 0 or a finite number, at least {LEAST:g}"
        )
    check_seed(seed)
    caches = make_cache(model) if caches is None else caches
    check_caches(caches, model.config.n_layers, len(prompt))
    if caches[0].seen:
        raise ValueError(
            f"the cache has already seen {caches[0].seen} tokens; "
            "make a new one for a new prompt"
        )

    generator = torch.Generator(prompt.device).manual_seed(seed)
    return _stream(model, prompt, new, caches, generator, temperature, top_k)


@torch.no_grad()
def _stream(model, prompt, new, caches, generator, temperature, top_k):
    logits = prefill(model, prompt, caches)
    compress(model, prompt, caches)
    for left in reversed(range(new)):
        token = sample(logits, temperature, top_k, generator)
        yield token
        if left:
            logits = model(token[:, None], caches)[:, -1]


def generate(model, prompt: Tensor, new: int, caches=None, **options) -> Tensor:
    """Return the tokens of `stream` in one tensor (B, new)."""
    return torch.stack([*stream(model, prompt, new, caches, **options)], 1)
