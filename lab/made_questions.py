"""Questions made by rule, from which question_gates learns: facts of many kinds in real text.

    python -m lab.made_questions --model smollm2 --kinds seen unseen --out made.jsonl

writes questions that judge gates: of held-out text and words, in wordings that teach (seen), in
others (unseen), or in words that a small decoder can complete (copied). Names of people also
occur in lessons.

A context is text of a split (corpus.py) with facts in it. Facts are sentences here and there, or
lines of a list, of a table or of JSON. A value is a number, a word, two words, a name or a date; a
key has one value or several. A question asks for the values of one key, straight or in other words,
or for those of several keys at once.
"""

import argparse
import json
from pathlib import Path
import sys

import numpy as np

from lab import command_line, corpus
from lab.question_file import Question

# what is told; how it is asked, straight and in other words; what stands before the reply
FORMS = """
The code of {key} is {value}.
What is the code of {key}?
What has to be typed in for {key}?
The code of {key} is

{key} keeps {value} in the drawer.
What does {key} keep in the drawer?
What would one find in the drawer of {key}?
In the drawer {key} keeps

For {key}, write down {value}.
What was to be written down for {key}?
Which note belongs to {key}?
For {key} it was

The answer that {key} gave was {value}.
Which answer did {key} give?
How did {key} reply?
The answer was

{value} was chosen by {key}.
What did {key} choose?
What was the decision of {key}?
{key} chose

On the label of {key} stands {value}.
What stands on the label of {key}?
How is {key} marked?
On the label stands
"""
# no gates learn from these
UNSEEN = """
At the counter {key} asked for {value}.
What did {key} ask for at the counter?
What did {key} want there?
At the counter {key} asked for

The parcel for {key} contains {value}.
What does the parcel for {key} contain?
What will {key} unpack?
The parcel contains

{value} is the password of {key}.
What is the password of {key}?
How does {key} log in?
The password is

Beside {key} somebody had painted {value}.
What had somebody painted beside {key}?
Which picture was next to {key}?
Somebody had painted
"""
COPIED = """
The code of {key} is {value}.
Q:
Q:
The code of {key} is
"""
KINDS = {}
for kind, text in dict(seen=FORMS, unseen=UNSEEN, copied=COPIED).items():
    KINDS[kind] = [form.splitlines() for form in text.strip().split("\n\n")]
FIRST_NAMES = (
    "Ada Bruno Clara Daniel Elena Felix Greta Hugo Irene Jonas Karin Leon Maria Nora Oscar Paula"
).split()
LAST_NAMES = (
    "Adler Becker Castro Duval Engel Fischer Garcia Hansen Ivanov Jensen Keller Lindt Moreau Novak"
).split()
MONTHS = "January February March April May June July August September October".split()


class Maker:
    """Makes contexts with questions from the text and the words of a split."""

    def __init__(self, encoding, split: str, seed: int):
        self.encoding = encoding
        self.rng = np.random.default_rng([seed, split == "train"])
        self.words = corpus.words(split)
        self.text = "\n\n".join(corpus.text(split))
        self.asked_so_far = 0
        self.values = self.number, self.word, self.phrase, self.name, self.date

    def context(self, tokens: int, questions: int = 4) -> list[Question]:
        """Return questions on one context of about so many tokens."""
        keys = self.different(self.one_of((self.word, self.name)), self.below(2, 7))
        n = self.one_of((1, 1, 2, 3))  # values of a key
        value = self.one_of(self.values)
        values = self.different(value, n * len(keys))
        facts = {}
        for key in keys:
            facts[key] = [values.pop() for _ in range(n)]
        form = self.one_of(KINDS["seen"])
        context = self.placed(self.told(facts, form[0]), tokens)

        chosen = [[key] for key in keys[:questions]]
        if n == 1:
            chosen[-1] = keys[-self.below(2, 4) :]
        task = value.__name__
        return [self.asked(context, some, facts, form, task) for some in chosen]

    def simple(self, tokens: int, form: list[str], value, task: str) -> list[Question]:
        """Return four questions on four facts of one form, by turns in its two wordings."""
        told, *questions, lead = form
        facts = [*zip(self.different(self.word, 4), self.different(value, 4))]
        pieces = [told.format(key=key, value=x) for key, x in facts]
        context = self.placed(pieces, tokens)
        found = []
        for i, (key, x) in enumerate(facts):
            question = questions[i % 2].format(key=key)
            found.append(Question(context, question, [x], lead.format(key=key), task))
        return found

    def asked(
        self, context: str, keys: list[str], facts: dict, form: tuple, task: str
    ) -> Question:
        """Return the question for the values of some keys."""
        _, straight, reworded, lead = form
        answers = [value for key in keys for value in facts[key]]
        question = self.one_of((straight, reworded))
        if len(answers) > 1:
            question = self.one_of(
                (f"{question} List all.", f"All of them: {question}")
            )
        if len(keys) > 1 or self.below(0, 4) == 0:
            lead = ""
        those = " and ".join(keys)
        question = question.format(key=those)
        self.asked_so_far += 1
        return Question(
            context,
            question,
            answers,
            lead.format(key=those),
            task,
            line=self.asked_so_far,
        )

    def told(self, facts: dict[str, list[str]], form: str) -> list[str]:
        """Return what stands together in the text: each fact, or a block with all of them."""
        lists = {key: ", ".join(values) for key, values in facts.items()}
        layout = self.below(0, 7)
        if layout == 0:
            return [json.dumps(facts, indent=1)]
        if layout == 1:
            rows = [f"| {key} | {values} |" for key, values in lists.items()]
            return ["\n".join(("| key | value |", "|---|---|", *rows))]
        if layout == 2:
            return ["\n".join(f"- {key}: {values}" for key, values in lists.items())]
        sentences = []
        for key, values in facts.items():
            sentences += [form.format(key=key, value=value) for value in values]
        return sentences

    def placed(self, pieces: list[str], tokens: int) -> str:
        """Return text of about so many tokens with the pieces in it, in their order."""
        own = len(self.encoding.encode_ordinary("\n".join(pieces)))
        text = self.filler(max(tokens - own, 32))
        gap = "\n" if len(pieces) == 1 else self.one_of(("\n", " "))
        gaps = [i for i, x in enumerate(text) if x == gap] or [0]
        parts = []
        before = 0
        for place, piece in zip(sorted(self.rng.choice(gaps, len(pieces))), pieces):
            parts += [text[before:place], gap, piece]
            before = place
        return "".join([*parts, text[before:]])

    def filler(self, tokens: int) -> str:
        """Return so many tokens of text from a random place."""
        n = 8 * tokens  # characters, more than enough
        start = self.below(0, len(self.text) - n)
        ids = self.encoding.encode_ordinary(self.text[start : start + n])
        return self.encoding.decode(ids[:tokens])

    # ---- draws ----

    def below(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def one_of(self, these):
        return these[self.below(0, len(these))]

    def different(self, make, n: int) -> list[str]:
        """Return n different strings that make() returns."""
        found = {}  # in the order of the draws, which is the same in every process
        while len(found) < n:
            found[make()] = None
        return [*found]

    def number(self) -> str:
        digits = self.below(2, 8)
        return str(self.below(10 ** (digits - 1), 10**digits))

    def word(self) -> str:
        return self.one_of(self.words)

    def phrase(self) -> str:
        return f"{self.word()} {self.word()}"

    def name(self) -> str:
        return f"{self.one_of(FIRST_NAMES)} {self.one_of(LAST_NAMES)}"

    def date(self) -> str:
        return f"{self.below(1, 29)} {self.one_of(MONTHS)}"


def main(argv: list[str]):
    """Write questions on held-out text, which judge gates."""
    parser = argparse.ArgumentParser(
        "python -m lab.made_questions", description=main.__doc__
    )
    option = parser.add_argument
    option("--model", type=Path, default=command_line.TINY, help="counts the tokens")
    option("--kinds", nargs="+", choices=KINDS, default=["copied"])
    option("--documents", type=int, default=22, help="of each kind and value")
    option("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    marks = [f'"task": "{kind} '.encode() for kind in KINDS]
    before = command_line.check_output(
        args.out, "questions", lambda data: any(mark in data for mark in marks)
    )
    from lab.loading import load  # loads torch

    maker = Maker(load(args.model)[1], "test", 0)
    text = ""
    for kind in args.kinds:
        for value in maker.number, maker.word, maker.name:
            for i in range(args.documents):
                form = KINDS[kind][i % len(KINDS[kind])]
                task = f"{kind} {value.__name__}"
                for question in maker.simple(400, form, value, task):
                    fields = vars(question) | dict(max_new_tokens=16)
                    del fields["line"]
                    text += json.dumps(fields) + "\n"
    command_line.replace(args.out, text.encode(), before)


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
