"""Measure retrieval: how many questions a compressed cache answers exactly.

There are two settings. `aware`: the question is part of the prompt that is compressed. `agnostic`:
the context is compressed before the question arrives. An aware prompt is read to its end, but its
last token's entry is forgotten before the compression, and the token is fed again: otherwise the
full cache would predict the first token of the answer. If the method evicts while it reads, the
last token is read only after the compression. A question's later tokens come one at a time, as in
decoding, or at once if the method only appends them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lab.replay import Recording, feed, replay
from lab.tasks import Batch
from nanollm.cache import (
    Method,
    Slots,
    compress,
    copied,
    crop,
    full_layers,
    make_cache,
)
from nanollm.check import check_budget, fits
from nanollm.generate import check_prompt

# A function that returns fresh caches. A budget is a fraction of the tokens that it is given.
Make = Callable[[int], list[Slots]]


# ---- the caches to measure ----


def budget_for(keep_ratio: float, tokens: int) -> int:
    """Return the budget, in entries per key/value head, for a prompt of `tokens` tokens."""
    return round(keep_ratio * tokens)


def maker(
    model,
    kind: type[Method],
    keep_ratio: float | None,
    store: Callable | None = None,
    **options,
) -> Make:
    """Return a function that makes caches whose budget is keep_ratio times the tokens it is given.

    keep_ratio: None for a method without a budget. store: as in `make_cache`.
    """
    if keep_ratio is None:
        return lambda tokens: make_cache(model, kind, store, **options)
    if not fits(keep_ratio, float) or not 0 < keep_ratio <= 1:
        raise ValueError(
            f"keep_ratio {keep_ratio} of the prompt must lie above 0 and be at most 1"
        )

    def make(tokens: int) -> list[Slots]:
        budget = budget_for(keep_ratio, tokens)
        check_budget(budget, 1, "raise the keep ratio, --keep")
        return make_cache(model, kind, store, budget=budget, **options)

    return make


# ---- questions and answers ----


def prompt_and_question(model, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens (B, T), context, and question."""
    tokens = torch.from_numpy(batch.tokens).to(model.embed.weight.device)
    check_prompt(model, tokens)
    if not batch.answers:
        raise ValueError("these documents have no question; take a task with questions")
    question = tokens[:, batch.question : batch.answers[0].start]
    return tokens, tokens[:, : batch.question], question


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
    later, each after the answer given to the one before. In both settings the budget is a share of
    the context's tokens. `recordings` are those of context and question. Without them the decoder
    reads the prompt `chunk_size` tokens at a time.
    """
    tokens, context, question = prompt_and_question(model, batch)
    agnostic = make(batch.question)
    if recordings is None:
        feed(model, context, agnostic, chunk_size)
    else:
        replay(recordings[:1], agnostic)

    right = {}
    if "aware" in settings:
        aware = copied(agnostic) if "agnostic" in settings else agnostic
        read_all_but_last(model, question, aware, recordings, chunk_size)
        fed = batch.answers[0].start - 1
        right["aware"] = answer(model, tokens, batch.answers, fed, aware)
    if "agnostic" in settings:
        fed = batch.question
        right["agnostic"] = answer(model, tokens, batch.answers, fed, agnostic)
    return right


def read_all_but_last(
    model,
    tokens: Tensor,
    caches: list[Slots],
    recordings: list[list[Recording]] | None,
    chunk_size: int,
) -> int:
    """Read a prompt's end, (B, T), without its last entry; return the most bytes allocated."""
    if caches[0].prompt_done:
        # they evict while they read, and cannot undo what they evicted for the last token
        return feed(model, tokens[:, :-1], caches, chunk_size)
    if recordings is None:
        peak = feed(model, tokens, caches, chunk_size)
    else:
        peak = replay(recordings, caches)
    crop(caches, caches[0].seen - 1)
    return peak


def answer(
    model, tokens: Tensor, spans: list[slice], fed: int, caches: list[Slots]
) -> Tensor:
    """Compress the first `fed` of tokens (B, T), answer each span; return the share right (B,)."""
    compress(model, tokens[:, :fed], caches)
    said = answers(model, tokens, spans, fed, caches)
    right = [(answer == tokens[:, span]).all(1) for answer, span in zip(said, spans)]
    return torch.stack(right).float().mean(0)


def answers(
    model, tokens: Tensor, spans: list[slice], fed: int, caches: list[Slots]
) -> list[Tensor]:
    """Feed tokens (B, T) from `fed` on; return what greedy decoding says in place of each span."""
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


def as_decoded(tokens: Tensor, caches: list[Slots]) -> Iterable[Tensor]:
    """Return tokens (B, T) after a prompt: one by one, or at once if the method only appends."""
    method = full_layers(caches)[0].method
    return [tokens] if method.appends else tokens.split(1, 1)
