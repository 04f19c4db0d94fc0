"""What question_gates learns from: contexts in tokens, each with questions and their right answers.

The recipe, one for every decoder: questions made by rule (made_questions.py), the tasks of
tasks.py, plain text, whose continuation is the answer, and natural questions on passages of our
own. No measurement uses one of these contexts. In some contexts the first question is known: it is
appended to the context before the gates thin it.
"""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.made_questions import Maker
from lab.question_file import Encoder, Question, contexts, read
from lab.tasks import Batch, Tasks

NATURAL = Path(__file__).parent / "natural_teach.jsonl"
T = 512  # tokens of a document of Tasks; a made context has about half of them or more
# of each: the task, how many contexts, and the options of Tasks.batch
TASKS = dict(
    needle=("needle", 9, dict(questions=4)),
    words=("needle", 18, dict(questions=4, numbers=0)),
    pairs=("pairs", 9, dict(questions=4)),
    pairs_of_words=("pairs", 9, dict(questions=4, numbers=0)),
    labels=("few_shot", 9, {}),
    copy=("copy", 6, {}),
)
PLAIN = 9  # texts
CONTINUED = 64  # tokens of their ends; all but the first are the answer
MADE = 48  # contexts


class Asked(NamedTuple):
    """A context, and R rows of questions on it."""

    context: Tensor  # (1, T)
    tokens: Tensor  # (R, T'), questions and answers; zeros fill the rows
    right: Tensor  # (R, T') of bool, the answers' tokens


def lessons(tasks: Tasks, config, without: str = "", seed: int = 0) -> list[Asked]:
    """Return the contexts of the recipe that a decoder can read, `without` one of its parts."""
    encoder = Encoder(tasks.encoding, config)
    maker = Maker(tasks.encoding, "train", seed)
    length = min(T, config.max_len)
    groups = contexts(read(NATURAL))
    natural = [of_questions(encoder, some) for some in groups]
    for some in groups[::6]:
        natural.append(of_questions(encoder, some, known=True))
    parts = dict(natural=natural, made=[])
    for i in range(MADE):
        some = maker.context(length * (2 + i % 3) // 4)
        parts["made"].append(of_questions(encoder, some, known=i % 3 == 2))
    for name, (task, n, options) in TASKS.items():
        batch = tasks.batch(task, seed, n, length, **options)
        parts[name] = []
        for i in range(n):
            parts[name].append(of_task(batch, i, known=i % 3 == 2))
    plain = torch.from_numpy(tasks.batch("plain", seed, PLAIN, length).tokens)
    parts["plain"] = [continued(text) for text in plain.split(1)]
    parts.pop(without, None)
    found = chain(*parts.values())
    return [x for x in found if length_of(x) <= config.max_len]


def length_of(asked: Asked) -> int:
    """Return the tokens of the context and of its longest row of questions."""
    return asked.context.shape[1] + asked.tokens.shape[1]


def of_questions(
    encoder: Encoder, questions: list[Question], known: bool = False
) -> Asked:
    """Return questions of one context in tokens; if `known`, the first, as part of the context."""
    context = encoder.context(questions[0].context)
    rows = []
    right = []
    for question in questions[:1] if known else questions:
        asked, lead, answer = encoder.question(question)
        if known:
            context = torch.cat((context, asked), 1)
            asked = asked[:, :0]
        row = torch.cat((asked, lead, answer), 1)[0]
        n = len(row)
        rows.append(row)
        right.append(torch.arange(n) >= n - answer.shape[1])
    return Asked(context, pad_sequence(rows, True), pad_sequence(right, True))


def of_task(batch: Batch, i: int, known: bool = False) -> Asked:
    """Return document i, whose questions are one row; the first one may be `known`."""
    end = batch.answers[-1].stop
    row = batch.tokens[i : i + 1, :end]
    tokens = torch.from_numpy(row)
    right = torch.zeros_like(tokens, dtype=torch.bool)
    for answer in batch.answers:
        right[:, answer] = True
    q = batch.question
    if known:
        q = batch.answers[0].start - 1
    return Asked(tokens[:, :q], tokens[:, q:], right[:, q:])


def continued(text: Tensor) -> Asked:
    """Return plain text (1, T) whose last CONTINUED − 1 tokens are the answer."""
    n = text.shape[1] - CONTINUED
    tokens = text[:, n:]
    right = torch.ones_like(tokens, dtype=torch.bool)
    right[:, 0] = False
    return Asked(text[:, :n], tokens, right)
