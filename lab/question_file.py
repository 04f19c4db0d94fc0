"""Read a file of questions, one JSON object a line, and encode its prompts.

    {"context": "…", "question": "Who came?", "answers": ["Ann"], "answer_prefix": "It was",
     "task": "names", "score": "any", "max_new_tokens": 32}

`context`, `question` and `answers` must be there. The score of a reply is the share of the answers
that it contains (RULER, arXiv 2404.06654), or with `score` "any" 1 if it contains one of them;
upper and lower case are the same. Lines with the same context share its compressed caches in the
setting `agnostic`. Of other fields only `haystack` is used: it names the text around RULER's facts.
"""

from dataclasses import dataclass
import json
from pathlib import Path
import sys

import torch
from torch import Tensor

from lab.ask import around
from lab.command_line import read_text


@dataclass
class Question:
    """A line of the file. After the context comes the question, and after it a reply."""

    context: str
    question: str
    answers: list[str]
    answer_prefix: str = ""  # stands before the reply
    task: str = "questions"
    score: str = "all"  # or "any"
    max_new_tokens: int = 64  # of the reply
    haystack: str = ""  # the text around RULER's facts
    line: int = 0

    def __post_init__(self):
        texts = "context", "question", "answer_prefix", "task", "haystack"
        for name in texts:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is no string")
        for name in ("context", "question", "task"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty")
        answers = self.answers
        if not isinstance(answers, list) or not answers:
            raise ValueError(f"answers is {answers!r:.40}; give a list of strings")
        if not all(isinstance(x, str) and x.strip() for x in answers):
            raise ValueError(f"an answer of {answers!r:.40} is empty, or no string")
        if self.score not in ("all", "any"):
            raise ValueError(f"score is {self.score!r}; it must be all or any")
        most = self.max_new_tokens
        if type(most) is not int or most < 1:
            raise ValueError(f"max_new_tokens is {most!r}; it must be at least 1")

    def scored(self, reply: str) -> float:
        """Return the score of a reply, from 0 to 1."""
        reply = reply.lower()
        said = [answer.lower() in reply for answer in self.answers]
        return float(any(said)) if self.score == "any" else sum(said) / len(said)


FIELDS = {*Question.__dataclass_fields__} - {"line"}


def read(file: Path) -> list[Question]:
    """Return the questions of a file. ValueError, with the line, if one is wrong."""
    questions = []
    unused = {}
    for n, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json_object(line)
            given = {name: x for name, x in found.items() if name in FIELDS}
            questions.append(Question(**given, line=n))
        except ValueError as error:
            raise ValueError(f"{file}, line {n}: {error}") from None
        unused |= dict.fromkeys(found.keys() - given.keys())
    if not questions:
        raise ValueError(f"{file} has no questions; give one JSON object a line")
    if unused:
        print(f"{file}: not used: {', '.join(sorted(unused))}", file=sys.stderr)
    return questions


def json_object(line: str) -> dict:
    """Return a line's object. ValueError if it is none, or lacks a field that must be there."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object; write {…}")
    for name in ("context", "question", "answers"):
        if name not in found:
            raise ValueError(f"no {name!r}")
    return found


def contexts(questions: list[Question]) -> list[list[Question]]:
    """Return the questions by context, in the order of the file."""
    groups = {}
    for question in questions:
        groups.setdefault(question.context, []).append(question)
    return [*groups.values()]


class Encoder:
    """Encode contexts and questions; a model that chats gets them in its template."""

    def __init__(self, encoding, config):
        self.encoding = encoding
        self.before, self.after = around(encoding, config)
        self.chats = bool(self.after)

    def context(self, text: str) -> Tensor:
        """Return the tokens (1, T) of the prompt up to the question."""
        return torch.tensor([[*self.before, *self.encoding.encode_ordinary(text)]])

    def question(self, asked: Question) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (1, T) of the question, of what leads to the reply, of the answer."""
        lead = asked.answer_prefix
        if not self.chats:
            lead = f"\n{lead}"
        gap = "" if lead[-1:].isspace() or self.chats and not lead else " "
        some = asked.answers if asked.score == "all" else asked.answers[:1]
        apart = "" if asked.context[-1].isspace() else "\n\n"
        parts = apart + asked.question, lead, gap + ", ".join(some)
        question, lead, answer = map(self.encoding.encode_ordinary, parts)
        return tuple(torch.tensor([x]) for x in (question, self.after + lead, answer))
