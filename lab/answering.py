"""Answer the questions of one context from every method's compressed cache.

The context is read once and recorded. Each method's cache gets the recording, or reads the context
itself if it cannot replay or evicts early, and is compressed. Then the decoder reads what follows
for up to 64 caches at once: a batch has a row for each, and in attention each row meets its own
cache. There are two settings.
`agnostic`: the context is compressed, and the question comes later. `aware`: context and question
are compressed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lab.methods_by_name import one_line
from lab.question_file import Encoder, Question
from lab.replay import CannotReplay, Recorder, Recording, feed, record, replay
from lab.retrieval import Make
from methods.baselines.kvzip import KVzip
from nanollm.attention import wide
from nanollm.cache import (
    Slots,
    bytes_in_16_bits,
    compress,
    copied,
    full_layers,
    make_cache,
    rereading,
)
from nanollm.generate import prefill_evicting
from nanollm.tokenizer import special_ids

PIECE = 512  # tokens of a prompt that are read at once
ROWS = 64  # caches in a batch
EARLY = "_early"  # ends the name of a method that evicts while it reads, too


class Job(NamedTuple):
    """A method, and what part of the prompt's entries it keeps."""

    method: str
    keep_ratio: float | None  # None: the method has no budget
    make: Make


class Compressed(NamedTuple):
    """A job's cache after the compression of a prompt."""

    job: Job
    caches: list[Slots]
    kib: float  # with 16-bit numbers
    prompt: int  # how many tokens it has


@torch.no_grad()
def answered(
    model, encoder: Encoder, questions: list[Question], jobs: dict[str, list[Job]]
) -> list[dict]:
    """Return a record of each question, setting and job. The questions have one context.

    jobs: by setting. A record's `context` is the line of questions[0]. A compression that fails
    gives one record, with the `error`.
    """
    device = model.embed.weight.device
    context = encoder.context(questions[0].context).to(device)
    recorder = make_cache(model, store=Recorder)
    recordings = [record(model, recorder, context, PIECE)]
    before = []
    records = []
    if "agnostic" in jobs:
        before = compressed(model, context, recordings, jobs["agnostic"], records)
    for question in questions:
        asked, lead, answer = (x.to(device) for x in encoder.question(question))
        later = torch.cat((asked, lead), 1)
        records += replies(model, encoder, question, "agnostic", before, later, answer)
        if "aware" in jobs:
            known = record(model, copied(recorder), asked, PIECE)
            prompt = torch.cat((context, asked), 1)
            both = [*recordings, known]
            mine = compressed(model, prompt, both, jobs["aware"], records)
            records += replies(model, encoder, question, "aware", mine, lead, answer)
    return [record | dict(context=questions[0].line) for record in records]


# ---- compressed caches ----


def compressed(
    model,
    prompt: Tensor,
    recordings: list[list[Recording]],
    jobs: list[Job],
    records: list[dict],
) -> list[Compressed]:
    """Return the jobs' caches of a prompt (1, T). Note in `records` which methods fail."""
    T = prompt.shape[1]
    scores = {}  # by method
    found = []
    for job in jobs:
        try:
            if job.method.endswith(EARLY):
                caches = job.make(T)
                prefill_evicting(model, prompt, caches)
            else:
                caches = read(model, prompt, recordings, job.make)
                share_scores(model, prompt, caches, scores, job.method)
            compress(model, prompt, caches)
        except Exception as error:
            place = dict(method=job.method, keep_ratio=job.keep_ratio)
            records.append(place | dict(error=one_line(error)))
            continue
        kib = bytes_in_16_bits(caches) / 1024
        found.append(Compressed(job, caches, kib, T))
    return found


def read(
    model, prompt: Tensor, recordings: list[list[Recording]], make: Make
) -> list[Slots]:
    """Return caches that have read a prompt (1, T)."""
    caches = make(prompt.shape[1])
    try:
        for i in range(len(recordings)):
            replay(recordings[: i + 1], caches)
    except CannotReplay:
        caches = make(prompt.shape[1])
        feed(model, prompt, caches, PIECE)
    return caches


def share_scores(model, prompt: Tensor, caches: list[Slots], scores: dict, name: str):
    """Let a method of KVzip's kind score a prompt once: its scores do not depend on the budget."""
    layers = full_layers(caches)
    method = layers[0].method
    if not isinstance(method, KVzip):
        return
    name = name.partition("@")[0]
    if name not in scores:
        scores[name] = method.scores(rereading(model, caches), prompt, layers)
    method.scores = lambda *_: scores[name]


# ---- replies ----


class Apart:
    """Stands in for the store of a layer: each row of the batch attends to a cache of its own."""

    def __init__(self, layers: tuple[Slots, ...]):
        self.layers = layers
        self.sliding = getattr(layers[0], "sliding", None)

    @property
    def seen(self) -> int:
        return self.layers[0].seen

    @property
    def slots(self) -> dict[str, Tensor]:
        return {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        rows = zip(self.layers, q.split(1), k.split(1), v.split(1))
        return torch.cat([layer.attend(*row, pos) for layer, *row in rows])


def logits(model, tokens: Tensor, several: list[list[Slots]], last: int = 1) -> Tensor:
    """Feed tokens (R or 1, T) to R caches, a row each; return the last logits (R, last, V)."""
    layers = [Apart(layers) for layers in zip(*several)]
    return model(tokens.expand(len(several), -1), layers, last=last)


def replies(
    model,
    encoder: Encoder,
    question: Question,
    setting: str,
    found: list[Compressed],
    fed: Tensor,
    answer: Tensor,
) -> Iterator[dict]:
    """Yield a record of each cache: its reply after tokens `fed` (1, T), and −log p of `answer`.

    −log p is the mean over the tokens of the right answer (1, A).
    """
    A = answer.shape[1]
    for start in range(0, len(found), ROWS):
        some = found[start : start + ROWS]
        caches = [copied(x.caches) for x in some]
        first = logits(model, fed, caches)
        foreseen = first
        if A > 1:
            behind = [copied(x) for x in caches]
            more = logits(model, answer[:, :-1], behind, A - 1)
            foreseen = torch.cat((first, more), 1)
        log_p = wide(foreseen).log_softmax(-1)
        surprise = -log_p[:, torch.arange(A), answer[0]].mean(-1)
        said = decoded(
            model, encoder, question, caches, first[:, 0].argmax(-1).tolist()
        )
        for x, reply, nats in zip(some, said, surprise.tolist()):
            yield dict(
                method=x.job.method,
                keep_ratio=x.job.keep_ratio,
                setting=setting,
                task=question.task,
                line=question.line,
                score=question.scored(reply),
                surprise=round(nats, 4),
                kib=x.kib,
                prompt=x.prompt,
                reply=reply,
            )


def decoded(
    model,
    encoder: Encoder,
    question: Question,
    caches: list[list[Slots]],
    first: list[int],
) -> list[str]:
    """Return each cache's reply by greedy decoding; `first` has the first token of each.

    A reply ends at a special token, after max_new_tokens, or when its score is 1.
    """
    special = special_ids(encoder.encoding, model.config)
    said = [[token] for token in first]
    texts = [""] * len(first)
    left = [*range(len(first))]
    while left:
        going = []
        for i in left:
            if said[i][-1] in special:
                continue
            texts[i] = encoder.encoding.decode(said[i])
            is_long = len(said[i]) == question.max_new_tokens
            if not is_long and question.scored(texts[i]) < 1:
                going.append(i)
        left = going
        if left:
            newest = torch.tensor([[said[i][-1]] for i in left])
            newest = newest.to(model.embed.weight.device)
            found = logits(model, newest, [caches[i] for i in left])
            for i, token in zip(left, found[:, -1].argmax(-1).tolist()):
                said[i].append(token)
    return texts
