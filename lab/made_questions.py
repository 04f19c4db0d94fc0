"""Questions made by rule, from which gates learn: facts of many kinds in real text.

A context is real text (corpus.py) with facts in it, and has several questions. Facts are sentences
here and there in the text, or lines of a list, of a table or of JSON. A value is a number, a word,
a name, a date or a time. A question asks for one value, straight or in other words, for all values
of a key, or for those of several keys at once.
"""

import json

import numpy as np

from lab import corpus
from lab.question_file import Question

# what is told; how that is asked, straight and in other words; how the reply begins
FORMS = (
    (
        "The code of {key} is {value}.",
        "What is the code of {key}?",
        "What has to be typed in for {key}?",
        "The code of {key} is",
    ),
    (
        "{key} keeps {value} in the drawer.",
        "What does {key} keep in the drawer?",
        "What would one find in the drawer that belongs to {key}?",
        "In the drawer {key} keeps",
    ),
    (
        "For {key}, write down {value}.",
        "What was to be written down for {key}?",
        "Which note belongs to {key}?",
        "For {key} it was",
    ),
    (
        "The answer that {key} gave was {value}.",
        "Which answer did {key} give?",
        "How did {key} reply?",
        "The answer was",
    ),
    (
        "{value} was chosen by {key}.",
        "What did {key} choose?",
        "What was the decision of {key}?",
        "{key} chose",
    ),
    (
        "On the label of {key} stands {value}.",
        "What stands on the label of {key}?",
        "How is {key} marked?",
        "On the label stands",
    ),
    (
        "We met {key} at {value}.",
        "Where or when did we meet {key}?",
        "{key} was met by us. At what?",
        "We met {key} at",
    ),
    (
        "{key}: {value}",
        "What belongs to {key}?",
        "Tell me the entry of {key}.",
        "{key}:",
    ),
)
FIRST_NAMES = (
    "Ada Bruno Clara Daniel Elena Felix Greta Hugo Irene Jonas Karin Leon Maria Nora Oscar Paula "
    "Quentin Rosa Simon Tara Ulrich Vera Walter Yara"
).split()
LAST_NAMES = (
    "Adler Becker Castro Duval Engel Fischer Garcia Hansen Ivanov Jensen Keller Lindt Moreau "
    "Novak Olsen Peters Rossi Silva Thomas Weber Young Ziegler"
).split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()


class Maker:
    """Makes contexts with questions, from the text and the words of a split."""

    def __init__(self, encoding, split: str, seed: int):
        self.encoding = encoding
        self.rng = np.random.default_rng([seed, split == "train"])
        self.words = corpus.words(split)
        self.stream = "\n\n".join(corpus.text(split))

    def one_of(self, these):
        return these[self.rng.integers(len(these))]

    def filler(self, tokens: int) -> str:
        """Return about so many tokens of real text."""
        start = self.rng.integers(len(self.stream) - 8 * tokens)
        ids = self.encoding.encode_ordinary(self.stream[start : start + 8 * tokens])
        return self.encoding.decode(ids[:tokens])

    def number(self) -> str:
        digits = self.rng.integers(2, 8)
        return str(self.rng.integers(10 ** (digits - 1), 10**digits))

    def word(self) -> str:
        return self.one_of(self.words)

    def name(self) -> str:
        return f"{self.one_of(FIRST_NAMES)} {self.one_of(LAST_NAMES)}"

    def date(self) -> str:
        return f"{self.rng.integers(1, 29)} {self.one_of(MONTHS)}"

    def time(self) -> str:
        return f"{self.rng.integers(24)}:{self.rng.integers(60):02}"

    def phrase(self) -> str:
        return f"{self.word()} {self.word()}"

    def distinct(self, make, n: int) -> list[str]:
        """Return n different strings that make() returns."""
        found = {}
        while len(found) < n:
            found[make()] = None
        return [*found]

    def context(self, tokens: int, questions: int = 4) -> list[Question]:
        """Return questions of one context of about so many tokens."""
        kinds = self.number, self.word, self.name, self.date, self.time, self.phrase
        make = self.one_of(kinds)
        key = self.one_of((self.word, self.name))
        keys = self.distinct(key, self.rng.integers(2, 9))
        each = self.one_of((1, 1, 2, 4))  # values of a key
        values = self.distinct(make, each * len(keys))
        facts = {k: values[i * each : (i + 1) * each] for i, k in enumerate(keys)}
        form = self.one_of(FORMS)
        layout = self.one_of((self.sentences, self.sentences, self.listed))
        context = layout(tokens, facts, form)
        asked = []
        for k in self.rng.permutation(keys)[:questions]:
            asked.append(self.asked(context, [k], facts, form, make.__name__))
        n = min(len(keys), self.rng.integers(2, 5))
        several = [*self.rng.permutation(keys)[:n]]
        if each == 1:
            asked[-1] = self.asked(context, several, facts, form, make.__name__)
        return asked

    def asked(self, context, keys, facts, form, kind) -> Question:
        """Return the question for the values of keys."""
        told, straight, reworded, lead = form
        question = self.one_of((straight, reworded))
        answers = [value for key in keys for value in facts[key]]
        those = " and ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))
        if len(answers) > 1:
            question = self.one_of(
                (question, f"{question} Give all {len(answers)}.", f"All of them: {question}")
            )
        if len(answers) > 1 or self.rng.random() < 0.3:
            lead = self.one_of((lead, "")) if len(keys) == 1 else ""
        question = question.format(key=those)
        return Question(
            context, question, answers, lead.format(key=those), task=kind
        )

    def sentences(self, tokens, facts, form) -> str:
        """Return text with the facts in it, here and there."""
        told = [form[0].format(key=k, value=v) for k, some in facts.items() for v in some]
        told = [*self.rng.permutation(told)]
        left = tokens - sum(len(self.encoding.encode_ordinary(x)) for x in told)
        text = self.filler(max(left, 32))
        # facts stand between words or, in half of the texts, at the ends of lines
        at = "\n" if self.rng.random() < 0.5 else " "
        places = [i for i, x in enumerate(text) if x == at] or [0]
        cuts = sorted(self.rng.choice(places, len(told)))
        parts = []
        before = 0
        for cut, fact in zip(cuts, told):
            parts += [text[before:cut], at, fact]
            before = cut
        return "".join([*parts, text[before:]])

    def listed(self, tokens, facts, form) -> str:
        """Return text with a list, a table or JSON in it."""
        style = self.one_of(("list", "table", "json", "lines"))
        if style == "json":
            block = json.dumps(facts, indent=self.one_of((None, 1)))
        elif style == "table":
            rows = [f"| {k} | {', '.join(v)} |" for k, v in facts.items()]
            block = "\n".join(["| name | entry |", "|---|---|", *rows])
        elif style == "list":
            block = "\n".join(f"- {k}: {', '.join(v)}" for k, v in facts.items())
        else:
            block = "\n".join(
                form[0].format(key=k, value=", ".join(v)) for k, v in facts.items()
            )
        left = tokens - len(self.encoding.encode_ordinary(block))
        text = self.filler(max(left, 32))
        places = [i for i, x in enumerate(text) if x == "\n"] or [0]
        cut = self.one_of(places)
        return f"{text[:cut]}\n\n{block}\n\n{text[cut:]}"
