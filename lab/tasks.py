"""Retrieval tasks made from real text (corpus.py).

A task makes a document of exactly T tokens: real text with facts in it, then questions and answers.
Each token has a role. Evaluation cuts the document where the question starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from nanollm.check import check_seed, whole
from lab import corpus
from nanollm.tokenizer import Foreign

TEXT, FACT, QUESTION, ANSWER = range(4)  # roles of tokens
# few-shot: the classes of source lines, by their first characters
LINE_KINDS = (
    "def ",
    "return ",
    "raise ",
    "if ",
    "for ",
    "# ",
    ("import ", "from "),
    "self.",
)


@dataclass
class Batch:
    """B documents of one task, with question and answers at the same positions in every row."""

    tokens: np.ndarray  # (B, T) int64
    roles: np.ndarray  # (B, T) uint8
    # index of the first question's first token; `agnostic` compresses all before it
    question: int
    answers: list[slice]  # the span of each question's answer

    @property
    def facts(self) -> np.ndarray:
        """Return (B, T) of bool: the tokens of facts."""
        return self.roles == FACT

    @property
    def stated(self) -> np.ndarray:
        """Return (B,): the index of the first place in the facts that states the first answer."""
        answer = self.tokens[:, self.answers[0]]
        spans = [slice(i, i + answer.shape[1]) for i in range(self.question)]
        stated = [
            ((self.tokens[:, span] == answer) & self.facts[:, span]).all(1)
            for span in spans
        ]
        return np.argmax(stated, 0)


class Tasks:
    """The tasks of one split with one tokenizer.

    encoding: a tiktoken.Encoding of nanollm/tokenizer.py, or any tokenizer as `Foreign`. filler:
    your own text around the facts, in place of the split's.

    Each task is a method (rng, T, ...) that returns tokens and roles, (T,) each. rng is a NumPy
    generator. Keys are English words, and values are four-digit numbers. Training uses no keys or
    values of the test.
    """

    KNOWN = "needle", "pairs", "few_shot", "copy", "plain"

    def __init__(self, encoding, split: str, filler: str | None = None):
        foreign = isinstance(encoding, Foreign)
        if not foreign and getattr(encoding, "encode_ordinary", len)("0099") != [
            256,
            355,
        ]:
            raise ValueError(
                "the tasks need a tokenizer of nanollm/tokenizer.py, in which tokens 256 to 355 "
                "are 00 to 99, or one of transformers, as Foreign"
            )
        self.encoding, self.split, self.own = encoding, split, filler
        # The space before a number belongs to the token before it in nanollm/tokenizer.py. In most
        # other tokenizers it belongs to the number's first token.
        self.gap = " " if foreign else ""
        self.bos = encoding.bos if foreign else encoding.n_vocab - 1
        self.first = [] if self.bos is None else [self.bos]
        encoded = encoding.encode_ordinary_batch(
            corpus.text(split) if filler is None else [filler]
        )
        self.stream = np.concatenate([[*self.first, *ids] for ids in encoded]).astype(
            np.int64
        )

        # tiktoken would start a thread for each piece of a batch
        encode = (
            encoding.encode_ordinary_batch
            if foreign
            else lambda pieces: [*map(self.ids, pieces)]
        )
        encoded = encode([" " + word for word in corpus.words(split)])
        # All words have one length in tokens. Take a length with 100 words or more: 2, else the
        # shortest of them.
        length = max(
            range(1, 9),
            key=lambda n: (min(sum(len(ids) == n for ids in encoded), 100), n == 2, -n),
        )
        self.words = [ids for ids in encoded if len(ids) == length]
        self.values = [
            n for n in range(10_000) if corpus.held_out(str(n), 5) == (split == "test")
        ]

        lines = sorted(
            {line.strip() for doc in corpus.text(split) for line in doc.splitlines()}
        )
        self.lines = [
            [
                ids
                for ids in encode([line for line in lines if line.startswith(kind)])
                if 4 <= len(ids) <= 12
            ]
            for kind in LINE_KINDS
        ]
        # lines that another tokenizer's documents ask about have one length, too, so that documents
        # align
        n = max(
            range(4, 13),
            key=lambda n: min(sum(len(x) == n for x in kind) for kind in self.lines),
        )
        alike = [[ids for ids in kind if len(ids) == n] for kind in self.lines]
        self.asked = alike if foreign and all(alike) else self.lines

    def ids(self, string: str) -> list[int]:
        return self.encoding.encode_ordinary(string)

    def filler(self, rng, n: int) -> np.ndarray:
        """Return n consecutive tokens of real text, from a random place."""
        if n < 0:
            raise ValueError(
                f"the facts and questions need {-n} tokens more than the document has; "
                "make it longer"
            )
        if n >= len(self.stream):
            raise ValueError(
                f"{n} tokens of text were asked for, but the {self.split} text has only "
                f"{len(self.stream)}; ask for fewer"
            )
        start = rng.integers(0, len(self.stream) - n)
        return self.stream[start : start + n]

    def draw_pairs(
        self, rng, n: int, numbers: int = 1
    ) -> list[tuple[list[int], list[int]]]:
        """Draw n different keys (2 tokens each) and a value for each, `numbers` numbers of 2 tokens."""
        whole("the number of keys", n, 1, len(self.words))
        whole("numbers", numbers, 1, len(self.values) // n)
        keys = rng.choice(len(self.words), n, replace=False)
        values = rng.choice(self.values, (n, numbers), replace=False)
        return [
            (self.words[key], [t for n in value for t in self.number(n, 4)])
            for key, value in zip(keys, values)
        ]

    def number(self, n: int, digits: int) -> list[int]:
        return self.ids(f"{self.gap}{n:0{digits}}")

    def before(self, string: str) -> list[int]:
        """Return the tokens of text before a number, with the space between them if it belongs here."""
        return self.ids(string if self.gap else f"{string} ")

    def begun(self, key: list[int], is_number: bool = True) -> list[int]:
        """Return the tokens of " The code of KEY is", before a number or a word."""
        return (
            self.ids(" The code of")
            + key
            + (self.before(" is") if is_number else self.ids(" is"))
        )

    def fact(
        self, key: list[int], value: list[int], is_number: bool = True
    ) -> list[int]:
        return self.begun(key, is_number) + value + self.ids(".")

    def question(self, key: list[int], is_number: bool = True) -> list[int]:
        return self.ids("\nQ:") + self.begun(key, is_number)

    def assemble(
        self, rng, T: int, facts, questions, depths=None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and roles of a document: text with facts in it, then the questions.

        facts are token lists. depths are their places in the text, from 0 (start) to 1 (end),
        random by default. questions are triples of token lists: question, answer, and text after
        the answer.
        """
        asked = [part for question in questions for part in question]
        fill = self.filler(rng, T - len(self.first) - sum(map(len, [*facts, *asked])))
        depths = rng.random(len(facts)) if depths is None else np.asarray(depths)

        parts, done = [(self.first, TEXT)], 0
        for i in np.argsort(depths, kind="stable"):
            place = round(depths[i] * len(fill))
            parts += [(fill[done:place], TEXT), (facts[i], FACT)]
            done = place
        parts.append((fill[done:], TEXT))
        for question, answer, tail in questions:
            parts += [(question, QUESTION), (answer, ANSWER), (tail, QUESTION)]

        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in parts])
        roles = np.concatenate(
            [np.full(len(ids), role, dtype=np.uint8) for ids, role in parts]
        )
        return tokens, roles

    def needle(
        self,
        rng,
        T: int,
        facts: int = 4,
        questions: int = 1,
        depth: float | None = None,
        numbers: int = 1,
    ):
        """Make a document with facts scattered in real text, and ask for one or several of them.

        depth: the place of the first fact asked for, from 0 (start) to 1 (end). numbers: four-digit
        numbers per value; the model is trained with one.
        """
        whole("questions", questions, 1, facts)
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(
                f"depth {depth} must lie between 0, the text's start, and 1, its end"
            )

        pairs = self.draw_pairs(rng, facts, numbers)
        depths, asked = rng.random(facts), rng.permutation(facts)[:questions]
        if depth is not None:
            depths[asked[0]] = depth

        stated = [self.fact(key, value) for key, value in pairs]
        questions = [
            (self.question(pairs[i][0]), pairs[i][1], self.ids(".")) for i in asked
        ]
        return self.assemble(rng, T, stated, questions, depths)

    def pairs(self, rng, T: int, listed: int = 16, questions: int = 1):
        """Make a document with a block of `key: value` lines in the text, and ask for some keys."""
        whole("questions", questions, 1, listed)
        items = self.draw_pairs(rng, listed)
        line, ask, colon = self.ids("\n"), self.ids("\nQ:"), self.before(":")
        block = [t for k, v in items for t in line + k + colon + v] + line
        asked = rng.permutation(listed)[:questions]
        questions = [(ask + items[i][0] + colon, items[i][1], []) for i in asked]
        return self.assemble(rng, T, [block], questions)

    def few_shot(self, rng, T: int, shots: int = 16, classes: int = 4):
        """Make a document with labelled lines of source code, and ask for a new line's label.

        The label of a class is drawn anew for each document. The new line's class has been shown.
        The answer is one token; chance is 1/classes.
        """
        whole("shots", shots, 1, T)
        whole("classes", classes, 2, len(LINE_KINDS))
        kinds = rng.choice(len(LINE_KINDS), classes, replace=False)
        labels = [self.number(n, 2) for n in rng.choice(100, classes, replace=False)]
        which = rng.permutation(np.arange(shots + classes) % classes)[:shots]
        arrow, newline = self.ids(" =>"), self.ids("\n")

        def line_of(c: int, all_lines: list) -> list[int]:
            lines = all_lines[kinds[c]]
            return newline + lines[rng.integers(len(lines))] + arrow

        query = rng.choice(which)
        shown = [(line_of(c, self.lines), labels[c]) for c in which]
        last = (line_of(query, self.asked), labels[query], [])
        return self.assemble(
            rng, T, [line + label for line, label in shown], [last], [1.0] * shots
        )

    def copy(self, rng, T: int, length: int = 32, start: int = 8, answer: int = 16):
        """Make a document with an inserted passage; its end quotes the start and asks for the rest."""
        whole("length", length, 2)
        whole("start", start, 1, length - 1)
        whole("answer", answer, 1, length - start)
        passage = self.filler(rng, length)
        quoted = passage[:start].tolist()
        return self.assemble(
            rng, T, [passage], [(quoted, passage[start : start + answer], [])]
        )

    def plain(self, rng, T: int):
        """Make a document of text only."""
        return self.filler(rng, T), np.full(T, TEXT, dtype=np.uint8)

    def drawn(self, task: str, seed: int, B: int, T: int, options: dict) -> Iterator:
        """Check the arguments, and return an endless iterator over a task's documents."""
        if task not in self.KNOWN:
            raise ValueError(
                f"task {task!r} is unknown; known are {', '.join(self.KNOWN)}"
            )
        check_seed(seed)
        whole("documents", B, 1)
        rng, make = np.random.default_rng(seed), getattr(self, task)
        return (make(rng, T, **options) for _ in count())

    def batch(self, task: str, seed: int, B: int, T: int, **options) -> Batch:
        """Return B aligned documents of a task ("needle", "pairs", …); others are drawn again."""
        rows = []
        for tokens, roles in islice(self.drawn(task, seed, B, T, options), 1000 * B):
            if not rows or (shape_of(roles) == shape_of(rows[0][1])).all():
                rows.append((tokens, roles))
            if len(rows) == B:
                return aligned(rows)
        raise ValueError(
            f"of {1000 * B} documents of {task}, {len(rows)} align; B {B} must be 1 here"
        )

    def batches(self, task: str, seed: int, B: int, T: int, **options) -> list[Batch]:
        """Return the first B documents drawn of a task, in as few aligned batches as possible.

        With our tokenizer all align, as in `batch`. With another, questions and numbers vary in
        tokens.
        """
        if not isinstance(self.encoding, Foreign):
            return [self.batch(task, seed, B, T, **options)]
        groups = {}
        for tokens, roles in islice(self.drawn(task, seed, B, T, options), B):
            groups.setdefault(shape_of(roles).tobytes(), []).append((tokens, roles))
        return [aligned(rows) for rows in groups.values()]


def shape_of(roles: np.ndarray) -> np.ndarray:
    """Return roles (T,) with FACT replaced by TEXT. Documents align if these are equal."""
    return np.where(roles == FACT, np.uint8(TEXT), roles)


def aligned(rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Return aligned documents as a batch."""
    tokens, roles = (np.stack(x) for x in zip(*rows))
    shape = shape_of(roles[0])
    edges = np.flatnonzero(
        np.diff(np.concatenate([[0], shape == ANSWER, [0]]).astype(int))
    )
    answers = [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]
    return Batch(
        tokens, roles, int(np.argmax(shape != TEXT)) if answers else len(shape), answers
    )


class Unmarked(Tasks):
    """The same tasks without the full stops, colons and line breaks that mark where a fact ends.

    Punctuation of the text around the facts stays, and so does that inside the labelled source
    lines.
    """

    def ids(self, string: str) -> list[int]:
        return super().ids({".": "", ": ": " is ", "\n": ","}.get(string, string))
