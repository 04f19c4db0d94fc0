"""Measure a cache: accuracy, perplexity, KL, L1 of attention outputs, bytes and speed.

Retrieval is measured in two settings. `aware`: the question is part of the prompt that is
compressed. `agnostic`: the context is compressed before the question arrives. An aware prompt is
read to its end, but its last token's entry is forgotten before the compression, and the token is
fed again: otherwise the full cache would predict the first token of the answer. After the prompt,
tokens come one at a time, as in decoding, or at once if the method only appends them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import math

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from lab.replay import Recorder, Recording, feed, record, replay
from lab.tasks import Batch, Tasks
from nanollm.attention import wide
from nanollm.cache import (
    NEVER,
    LayerCache,
    bytes_in_16_bits,
    cache_bytes,
    compress,
    copied,
    crop,
    make_cache,
)
from nanollm.check import check_budget, fits, whole
from nanollm.generate import check_prompt, tell_chunk_ends
from nanollm.tokenizer import opening

# A function make(tokens, prompt) that returns fresh caches. A budget is a fraction of `tokens`. The
# prompt (B, T) may be longer: in the aware setting the question follows these tokens.
Make = Callable[[int, Tensor], list[LayerCache]]


# ---- the caches to measure ---


def budget_for(keep_ratio: float, tokens: int) -> int:
    """Return the budget, in entries per key/value head, for a prompt of `tokens` tokens."""
    return round(keep_ratio * tokens)


def maker(
    model, Method, keep_ratio: float | None, ends: Tensor | None = None, **options
) -> Make:
    """Return a function that makes caches whose budget is keep_ratio times the prompt's tokens.

    keep_ratio: None for a method without a budget. ends (V,): `tokenizer.boundaries`, for semantic
    chunks.
    """
    if keep_ratio is not None and (
        not fits(keep_ratio, float) or not 0 < keep_ratio <= 1
    ):
        raise ValueError(
            f"keep_ratio {keep_ratio} of the prompt must lie above 0 and be at most 1"
        )

    def make(tokens: int, prompt: Tensor | None = None) -> list[LayerCache]:
        budget = (
            {} if keep_ratio is None else dict(budget=budget_for(keep_ratio, tokens))
        )
        if budget:
            check_budget(budget["budget"], 1, "one slot")
        caches = make_cache(model, Method, **budget, **options)
        if ends is not None and prompt is not None:
            tell_chunk_ends(caches, ends.to(prompt.device)[prompt])
        return caches

    return make


def reading_within(make: Make) -> Make:
    """Return a function that makes caches which evict while they read, as if the prompt had ended."""

    def ready(tokens: int, prompt: Tensor | None = None) -> list[LayerCache]:
        caches = make(tokens, prompt)
        for cache in caches:
            cache.prompt_done = True
        return caches

    return ready


# ---- retrieval ---


def prompt_and_question(model, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens (B, T), context, and question."""
    tokens = torch.from_numpy(batch.tokens).to(model.embed.weight.device)
    check_prompt(model, tokens)
    if not batch.answers:
        raise ValueError("these documents have no question; take a task with questions")
    return (
        tokens,
        tokens[:, : batch.question],
        tokens[:, batch.question : batch.answers[0].start],
    )


@torch.no_grad()
def retrieve(
    model,
    batch: Batch,
    make: Make,
    recordings: list[list[Recording]] | None = None,
    chunk_size: int = 64,
    settings: tuple[str, ...] = ("aware", "agnostic"),
) -> dict[str, Tensor]:
    """Return each document's fraction of exact answers, (B,), in each of the settings.

    With several questions, `aware` sees only the first before the compression. The others come
    later, each after the answer given to the one before. `recordings` are those of
    `prompt_and_question`'s two parts. Without them the decoder reads `chunk_size` tokens at a time.
    """
    tokens, *parts = prompt_and_question(model, batch)
    end = batch.answers[0].start

    agnostic = make(batch.question, tokens[:, :end])
    if recordings is None:
        feed(model, parts[0], agnostic, chunk_size)
    else:
        replay(recordings[:1], agnostic)
    right = {}
    if "aware" in settings:
        aware = copied(agnostic) if "agnostic" in settings else agnostic
        read_all_but_last(model, parts[1], aware, recordings, chunk_size)
        right["aware"] = answer(model, tokens, batch.answers, end - 1, aware)
    if "agnostic" in settings:
        right["agnostic"] = answer(
            model, tokens, batch.answers, batch.question, agnostic
        )
    return right


def read_all_but_last(
    model,
    tokens: Tensor,
    caches: list[LayerCache],
    recordings: list[list[Recording]] | None,
    chunk_size: int,
) -> int:
    """Read tokens (B, T), a prompt's end, and forget the last; return the most bytes allocated."""
    # they evict while they read, and cannot undo what they evicted for it
    if caches[0].prompt_done:
        return feed(model, tokens[:, :-1], caches, chunk_size)
    peak = (
        feed(model, tokens, caches, chunk_size)
        if recordings is None
        else replay(recordings, caches)
    )
    crop(caches, caches[0].seen - 1)
    return peak


def answer(
    model, tokens: Tensor, spans: list[slice], fed: int, caches: list[LayerCache]
) -> Tensor:
    """Compress the first `fed` of tokens (B, T), answer each span; return the fraction right (B,)."""
    compress(model, tokens[:, :fed], caches)
    said = answers(model, tokens, spans, fed, caches)
    right = [(answer == tokens[:, span]).all(1) for answer, span in zip(said, spans)]
    return torch.stack(right).float().mean(0)


def answers(
    model, tokens: Tensor, spans: list[slice], fed: int, caches: list[LayerCache]
) -> list[Tensor]:
    """Feed tokens (B, T) from `fed` on; return the tokens that greedy decoding says in place of
    each span."""
    said = []
    for span in spans:
        for part in as_decoded(tokens[:, fed : span.start], caches):
            logits = model(part, caches, last=1)
        guesses = [logits[:, -1:].argmax(-1)]
        for _ in range(span.start + 1, span.stop):
            guesses.append(model(guesses[-1], caches).argmax(-1))
        if span != spans[-1]:
            model(guesses[-1], caches)
        said.append(torch.cat(guesses, 1))
        fed = span.stop
    return said


def as_decoded(tokens: Tensor, caches: list[LayerCache]) -> Iterable[Tensor]:
    """Return the tokens (B, T) after a prompt, one by one, or at once if all caches only append them."""
    return [tokens] if all(cache.appends for cache in caches) else tokens.split(1, 1)


@contextmanager
def head_outputs(model):
    """Record the inputs of every layer's W_O: yields a list per layer of tensors (B, T, H·G·D)."""
    record = [[] for _ in model.blocks]
    hooks = [
        block.attention.o.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(args[0])
        )
        for block, seen in zip(model.blocks, record)
    ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Reference:
    """The full cache's results on texts whose last `new` tokens are the continuation."""

    tokens: Tensor  # (B, T)
    new: int
    # (B, new, V): prediction of each token of the continuation
    log_p: Tensor
    recording: list[Recording]  # of the prompt, one per layer
    continuation: list[Recording]  # of the tokens after the prompt, one per layer
    # attention's outputs at these tokens, (B, H·G, new, D) per layer
    answers: list[Tensor]

    @property
    def prompt(self) -> Tensor:
        """Return (B, T − new). Its last token is fed again after the compression."""
        return self.tokens[:, : -self.new]

    def split(self, n: int) -> Iterator["Reference"]:
        """Yield references of n texts each."""
        for i in range(0, len(self.tokens), n):
            # one row of pos serves all texts
            some = lambda x, at=slice(i, i + n): x[at] if len(x) > 1 else x
            layers = [
                [Recording(*map(some, layer)) for layer in part]
                for part in (self.recording, self.continuation)
            ]
            yield Reference(
                some(self.tokens),
                self.new,
                some(self.log_p),
                *layers,
                [*map(some, self.answers)],
            )


@torch.no_grad()
def reference(model, tokens: Tensor, new: int) -> Reference:
    """Return the full cache's results on tokens (B, T); the last `new` are the continuation."""
    check_prompt(model, tokens)
    if not fits(new, int) or not 0 < new < tokens.shape[1] - 1:
        raise ValueError(
            f"a continuation of {new} tokens must be shorter than the text's {tokens.shape[1]} "
            "by at least 2"
        )
    caches = make_cache(model, Recorder)
    recording = record(model, caches, tokens[:, :-new])
    crop(caches, tokens.shape[1] - new - 1)
    log_p = wide(model(tokens[:, -new - 1 : -1], caches)).log_softmax(-1)
    return Reference(
        tokens,
        new,
        log_p,
        recording,
        [cache.recorded[0] for cache in caches],
        [cache.answers[0] for cache in caches],
    )


@torch.no_grad()
def continuation(
    model,
    full: Reference,
    make: Make,
    recording: list[Recording] | None = None,
    chunk_size: int = 64,
    alone: bool = False,
) -> dict:
    """Compress the prompt, feed the continuation (`as_decoded`), and return measurements.

    kl         KL(full ‖ compressed) of the next token in nats, mean over the continuation, (B,)
    nll        −log p of the true token, mean over the continuation, (B,); perplexity is over all texts
    l1         ‖o − ô‖₁ with o = y W_O (Definition 1 of CriticalKV), mean over the continuation, (B, L, H·G);
               the changes of lower layers are included
    l1_alone   if `alone`: `perturbation`
    live, allocated, live_16
               bytes after the continuation, and `bytes_in_16_bits`
    peak       most bytes allocated while the prompt was read

    For `excess`: prompt, the number of tokens compressed; slots per head right after the
    compression, and slots_end after the last token; evicts, whether the method overrides `evict`;
    keeps_all, the method's own.

    With `recording` (`full.recording`) the prompt is replayed. Without it the decoder reads
    `chunk_size` tokens at a time.
    """
    tokens, new, cut = full.tokens, full.new, full.prompt.shape[1] - 1
    caches = make(cut, full.prompt)
    peak = read_all_but_last(
        model, full.prompt, caches, recording and [recording], chunk_size
    )
    compress(model, full.prompt[:, :-1], caches)
    row = dict(prompt=cut, slots=slots(caches), peak=peak)
    if alone:  # a replayed prompt is the one that `perturbation` would read
        row["l1_alone"] = perturbation(model, full, make, recording and copied(caches))

    with head_outputs(model) as heads:
        steps = [model(part, caches) for part in as_decoded(tokens[:, cut:-1], caches)]

    # against the full cache
    log_p = wide(torch.cat(steps, 1)).log_softmax(-1)
    live, allocated = cache_bytes(caches)
    answers = [
        torch.cat(after, 1).unflatten(-1, cache.w_o.shape[1:]).transpose(1, 2)
        for cache, after in zip(caches, heads)
    ]
    nll = -log_p.gather(-1, tokens[:, -new:, None])[..., 0].mean(-1)
    kl = F.kl_div(log_p, full.log_p, log_target=True, reduction="none").sum(-1).mean(-1)
    return row | dict(
        perplexity=math.exp(nll.mean().item()),
        nll=nll,
        kl=kl,
        l1=changes(full, caches, answers),
        live=live,
        allocated=allocated,
        live_16=bytes_in_16_bits(caches),
        slots_end=slots(caches),
        evicts=any(type(cache).evict is not LayerCache.evict for cache in caches),
        keeps_all=all(cache.keeps_all for cache in caches),
    )


def slots(caches: list[LayerCache]) -> float:
    """Return live slots per key/value head: the mean over heads, in the text with the most.

    The mean allows heads and layers to share budgets. Only slots count.
    """
    live = [cache.pos != NEVER for cache in caches]
    return sum(layer.sum((1, 2)) for layer in live).max().item() / sum(
        layer.shape[1] for layer in live
    )


def held(caches: list[LayerCache], tokens: int) -> Tensor:
    """Return (B, L, H, tokens) of bool: which of the first `tokens` tokens a head still holds.

    A head holds a token if a slot has its position, or if the method says `keeps_all`.
    """
    token = torch.arange(tokens, device=caches[0].pos.device)
    return torch.stack(
        [
            torch.stack(
                [
                    (head[..., None] == token).any(-2) | cache.keeps_all
                    for head in cache.pos.unbind(1)
                ],
                1,
            )
            for cache in caches
        ],
        1,
    )


def changes(full: Reference, caches: list[LayerCache], answers: list[Tensor]) -> Tensor:
    """Return ‖o − ô‖₁ = ‖(y − ŷ) W_O‖₁, (B, L, H·G), from ŷ (B, H·G, new, D); mean over tokens."""
    return torch.stack(
        [
            torch.einsum("bhtd,ohd->bhto", wide(answer - y), wide(cache.w_o))
            .abs()
            .sum(-1)
            .mean(-1)
            for y, cache, answer in zip(full.answers, caches, answers)
        ],
        1,
    )


@torch.no_grad()
def perturbation(
    model, full: Reference, make: Make, caches: list[LayerCache] | None = None
) -> Tensor:
    """Return ‖o − ô‖₁ (Definition 1 of CriticalKV) of each layer alone, (B, L, H·G).

    Each layer gets the queries of the full cache. In `continuation`, the queries also change,
    because the layers below have changed. caches: those to which the prompt has been replayed, if
    there are any.
    """
    if caches is None:
        cut = full.prompt.shape[1] - 1
        caches = make(cut, full.prompt)
        for cache, recording in zip(caches, full.recording):
            for part in recording.split(64, cache.w_o.device):
                cache.attend(*part)
        crop(caches, cut)
        compress(model, full.prompt[:, :-1], caches)

    answers = []
    for cache, recording in zip(caches, full.continuation):
        at_once = recording.q.shape[2] if cache.appends else 1
        answers.append(
            [cache.attend(*part) for part in recording.split(at_once, cache.w_o.device)]
        )
    return changes(full, caches, [torch.cat(answer, 2) for answer in answers])


# ---- documents, texts, and the model itself ---


def check_size(model, documents: int, least: int, T: int):
    """Raise ValueError if the documents would be too few, or longer than the model can read."""
    whole("documents", documents, least)
    whole("T", T, 2)
    if T > model.config.max_len:
        raise ValueError(
            f"{T} tokens exceed the model's length of {model.config.max_len}; "
            "make the documents shorter"
        )


def text_windows(tasks: Tasks, windows: int, T: int, model=None) -> Tensor:
    """Return (windows, T) tokens: evenly spaced windows of text, after BOS if `model` uses it."""
    first = opening(tasks.encoding, model.config) if model else []
    stream, n = tasks.stream[tasks.stream != tasks.bos], T - len(first)
    whole("windows", windows, 1)
    whole("T", T, 2, len(stream))
    starts = np.linspace(0, len(stream) - n, windows).astype(int)
    return torch.from_numpy(
        np.stack([np.append(first, stream[s : s + n]) for s in starts]).astype(np.int64)
    )


def standard_error(x: Tensor) -> float:
    """Return the standard error of the mean of x (n,)."""
    return (x.std() / len(x) ** 0.5).item()


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Return the mean of x (n,) and its standard error."""
    return x.double().mean().item(), standard_error(x.double())


def full_cache_bytes(config, tokens: int, bytes_per_number: int = 2) -> int:
    """Return the bytes of a full cache's keys and values (KVReviver, Eq. 1).

    They are 2 · layers · key/value heads · tokens · head dim · bytes.
    """
    return (
        2
        * config.n_layers
        * config.n_kv_heads
        * tokens
        * config.head_dim
        * bytes_per_number
    )
