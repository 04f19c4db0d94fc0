"""Retrieval tasks made from real text (corpus.py).

A task makes a document of exactly T tokens: real text with facts in it, then questions and answers
(`plain` is text alone). Each token has a role. Evaluation cuts the document where the question
starts (`agnostic`), or before the last token of the question (`aware`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from nanollm.check import check_seed, whole
from lab import corpus
from nanollm.tokenizer import Foreign

Ids = list[int]  # tokens
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
        stated = []
        for place in range(self.question):
            span = slice(place, place + answer.shape[1])
            is_answer = self.tokens[:, span] == answer
            stated.append((is_answer & self.facts[:, span]).all(1))
        return np.argmax(stated, 0)


def lines_of(split: str) -> set[str]:
    """Return the lines of a split's text, without white space at their ends."""
    documents = corpus.text(split)
    return {line.strip() for text in documents for line in text.splitlines()}


class Tasks:
    """The tasks of one split with one tokenizer.

    encoding: a tiktoken.Encoding of nanollm/tokenizer.py, or any tokenizer as `Foreign`. filler:
    your own text around the facts, in place of the split's.

    Each task is a method (rng, T, ...) that returns tokens and roles, (T,) each. rng is a NumPy
    generator. Keys are words (corpus.py). Values are four-digit numbers, or words if `numbers` is
    0. Training draws no keys, values or few-shot lines of the test, and from another seed.
    """

    KNOWN = "needle", "pairs", "few_shot", "copy", "plain"

    def __init__(self, encoding, split: str, filler: str | None = None):
        foreign = isinstance(encoding, Foreign)
        encode = getattr(encoding, "encode_ordinary", None)
        numbers = encode("0099") if encode else None
        if not foreign and numbers != [256, 355]:
            raise ValueError(
                "the tasks need a tokenizer of nanollm/tokenizer.py, in which tokens 256 to 355 "
                "are 00 to 99, or one of transformers, as Foreign"
            )
        self.encoding = encoding
        self.split = split
        self.own = filler
        # The space before a number belongs to the token before it in nanollm/tokenizer.py. With
        # other tokenizers it is encoded with the number.
        self.gap = " " if foreign else ""
        self.bos = encoding.bos if foreign else encoding.n_vocab - 1
        self.first = [] if self.bos is None else [self.bos]
        documents = corpus.text(split) if filler is None else [filler]
        encoded = encoding.encode_ordinary_batch(documents)
        stream = np.concatenate([[*self.first, *ids] for ids in encoded])
        self.stream = stream.astype(np.int64)

        self.words = self.alike_words()
        test = split == "test"
        self.values = [n for n in range(10_000) if corpus.held_out(str(n), 5) == test]
        self.lines = self.lines_of_kinds()
        self.asked_lines = self.alike_lines() if foreign else self.lines

    def alike_words(self):
        """Return the tokens of words of one length: 2 if 100 words have it, else the shortest such.

        If no length has 100 words, it is the length of most words.
        """
        encoded = self.encode([f" {word}" for word in corpus.words(self.split)])
        words_of = Counter(map(len, encoded))

        def preference(length: int):
            return min(words_of[length], 100), length == 2, -length

        chosen = max(range(1, 9), key=preference)
        return [ids for ids in encoded if len(ids) == chosen]

    def lines_of_kinds(self):
        """Return for each kind in LINE_KINDS the source lines of 4 to 12 tokens.

        Lines that both splits have, such as "import os", are the test's alone.
        """
        lines = lines_of(self.split)
        if self.split == "train":
            lines = lines - lines_of("test")
        kinds = []
        for start in LINE_KINDS:
            of_kind = sorted(line for line in lines if line.startswith(start))
            encoded = self.encode(of_kind)
            short = [ids for ids in encoded if 4 <= len(ids) <= 12]
            kinds.append(short)
        return kinds

    def alike_lines(self):
        """Return lines of one length, so that documents align; all if no length is in each kind."""
        lines_of = [Counter(map(len, kind)) for kind in self.lines]
        least = lambda length: min(count[length] for count in lines_of)
        chosen = max(range(4, 13), key=least)
        if not least(chosen):
            return self.lines
        return [[ids for ids in kind if len(ids) == chosen] for kind in self.lines]

    def encode(self, pieces: list[str]) -> list[Ids]:
        if isinstance(self.encoding, Foreign):
            return self.encoding.encode_ordinary_batch(pieces)
        # tiktoken would start a thread for each piece of a batch
        return [self.ids(piece) for piece in pieces]

    def ids(self, string: str) -> Ids:
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

    def draw_pairs(self, rng, n: int, numbers: int = 1) -> list[tuple[Ids, Ids]]:
        """Draw n keys, each with a value: `numbers` four-digit numbers, or if that is 0 a word."""
        whole("the number of keys", n, 1, len(self.words))
        whole("numbers", numbers, 0, len(self.values) // n)
        words = rng.choice(len(self.words), n, replace=False)
        if numbers == 0:
            values = rng.choice(len(self.words), n, replace=False)
            return [(self.words[i], self.words[j]) for i, j in zip(words, values)]
        values = rng.choice(self.values, (n, numbers), replace=False)
        pairs = []
        for word, value in zip(words, values):
            key = self.words[word]
            digits = [self.number(number, 4) for number in value]
            pairs.append((key, sum(digits, [])))
        return pairs

    def number(self, n: int, digits: int) -> Ids:
        return self.ids(f"{self.gap}{n:0{digits}}")

    def before(self, string: str, numbers: int = 1) -> Ids:
        """Return the tokens before a value, with the space between them if it belongs here."""
        return self.ids(string if self.gap or not numbers else f"{string} ")

    def begun(self, key: Ids, numbers: int) -> Ids:
        """Return the tokens of " The code of KEY is", before a value."""
        return self.ids(" The code of") + key + self.before(" is", numbers)

    def assemble(
        self, rng, T: int, facts, questions, depths=None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and roles of a document: text with facts in it, then the questions.

        facts are token lists. depths are their places in the text, from 0 (start) to 1 (end),
        random by default. questions are triples of token lists: question, answer, and text after
        the answer.
        """
        asked = [part for question in questions for part in question]
        given = [self.first, *facts, *asked]
        fill = self.filler(rng, T - sum(map(len, given)))
        if depths is None:
            depths = rng.random(len(facts))

        tokens = []
        roles = []

        def add(ids, role: int):
            tokens.append(np.asarray(ids, dtype=np.int64))
            roles.append(np.full(len(ids), role, dtype=np.uint8))

        add(self.first, TEXT)
        done = 0
        for i in np.argsort(depths, kind="stable"):
            place = round(depths[i] * len(fill))
            add(fill[done:place], TEXT)
            add(facts[i], FACT)
            done = place
        add(fill[done:], TEXT)
        for question, answer, tail in questions:
            add(question, QUESTION)
            add(answer, ANSWER)
            add(tail, QUESTION)
        return np.concatenate(tokens), np.concatenate(roles)

    def needle(
        self,
        rng,
        T: int,
        facts: int = 4,
        questions: int = 1,
        numbers: int = 1,
    ):
        """Make a document with facts scattered in real text, and ask for one or several of them.

        numbers: four-digit numbers per value, 0 for a word; nanollm/tiny was trained with one.
        """
        whole("questions", questions, 1, facts)
        pairs = self.draw_pairs(rng, facts, numbers)
        depths = rng.random(facts)
        chosen = rng.permutation(facts)[:questions]
        begun = [self.begun(key, numbers) for key, _ in pairs]
        end = self.ids(".")
        stated = [start + value + end for start, (_, value) in zip(begun, pairs)]
        q = self.ids("\nQ:")
        asked = [(q + begun[i], pairs[i][1], end) for i in chosen]
        return self.assemble(rng, T, stated, asked, depths)

    def pairs(
        self,
        rng,
        T: int,
        listed: int = 16,
        questions: int = 1,
        numbers: int = 1,
    ):
        """Make a document with a block of `key: value` lines in the text, and ask for some keys."""
        whole("questions", questions, 1, listed)
        items = self.draw_pairs(rng, listed, numbers)
        newline = self.ids("\n")
        colon = self.before(":", numbers)
        block = []
        for key, value in items:
            block += newline + key + colon + value
        asked = []
        for i in rng.permutation(listed)[:questions]:
            key, value = items[i]
            question = self.ids("\nQ:") + key + colon
            asked.append((question, value, []))
        return self.assemble(rng, T, [block + newline], asked)

    def few_shot(self, rng, T: int, shots: int = 16, classes: int = 4):
        """Make a document with labelled lines of source code, and ask for the label of one more.

        The label of a class is drawn anew for each document. The last line's class has been shown.
        With our tokenizer the answer is one token. Chance is 1/classes.
        """
        whole("shots", shots, 1, T)
        whole("classes", classes, 2, len(LINE_KINDS))
        kinds = rng.choice(len(LINE_KINDS), classes, replace=False)
        labels = [self.number(n, 2) for n in rng.choice(100, classes, replace=False)]
        shown = rng.permutation(np.arange(shots + classes) % classes)[:shots]
        last = rng.choice(shown)
        newline = self.ids("\n")
        arrow = self.ids(" =>")

        def line_of(c: int, lines_of_kinds: list) -> Ids:
            lines = lines_of_kinds[kinds[c]]
            line = lines[rng.integers(len(lines))]
            return newline + line + arrow

        block = [line_of(c, self.lines) + labels[c] for c in shown]
        asked = (line_of(last, self.asked_lines), labels[last], [])
        return self.assemble(rng, T, block, [asked], depths=[1.0] * shots)

    def copy(self, rng, T: int, length: int = 32, start: int = 8, answer: int = 16):
        """Make a document with a passage in it; quote its start, and ask for what follows."""
        whole("length", length, 2)
        whole("start", start, 1, length - 1)
        whole("answer", answer, 1, length - start)
        passage = self.filler(rng, length)
        rest = passage[start : start + answer]
        asked = passage[:start], rest, []
        return self.assemble(rng, T, [passage], [asked])

    def plain(self, rng, T: int):
        """Make a document of text only."""
        return self.filler(rng, T), np.full(T, TEXT, dtype=np.uint8)

    def drawn(self, task: str, seed: int, B: int, T: int, options: dict) -> Iterator:
        """Check the arguments, and return an endless iterator over a task's documents."""
        if task not in self.KNOWN:
            known = ", ".join(self.KNOWN)
            raise ValueError(f"task {task!r} is unknown; known are {known}")
        check_seed(seed)
        whole("documents", B, 1)
        # else training would draw the depths, labels and orders of the test
        rng = np.random.default_rng([seed, 1] if self.split == "train" else seed)
        make = getattr(self, task)
        return (make(rng, T, **options) for _ in count())

    def batch(self, task: str, seed: int, B: int, T: int, **options) -> Batch:
        """Return B aligned documents of a task ("needle", "pairs", …); others are drawn again."""
        rows = []
        documents = self.drawn(task, seed, B, T, options)
        for tokens, roles in islice(documents, 1000 * B):
            if not rows or (shape_of(roles) == shape_of(rows[0][1])).all():
                rows.append((tokens, roles))
            if len(rows) == B:
                return aligned(rows)
        raise ValueError(
            f"of {1000 * B} documents of {task}, {len(rows)} align; B {B} must be 1 here"
        )

    def batches(self, task: str, seed: int, B: int, T: int, **options) -> list[Batch]:
        """Return B documents of a task, in as few aligned batches as possible.

        With our tokenizer this is one `batch`. With another, questions and numbers may vary in
        tokens, and these are the first B documents drawn.
        """
        if not isinstance(self.encoding, Foreign):
            return [self.batch(task, seed, B, T, **options)]
        groups = {}
        documents = self.drawn(task, seed, B, T, options)
        for tokens, roles in islice(documents, B):
            group = groups.setdefault(shape_of(roles).tobytes(), [])
            group.append((tokens, roles))
        return [aligned(rows) for rows in groups.values()]


def shape_of(roles: np.ndarray) -> np.ndarray:
    """Return roles (T,) with FACT replaced by TEXT. Documents align if these are equal."""
    return np.where(roles == FACT, np.uint8(TEXT), roles)


def aligned(rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Return aligned documents as a batch."""
    tokens, roles = (np.stack(x) for x in zip(*rows))
    shape = shape_of(roles[0])
    # where answers begin and end: ANSWER at places 1 and 2 gives the span 1 to 3
    is_answer = np.concatenate([[0], shape == ANSWER, [0]])
    edges = np.flatnonzero(np.diff(is_answer)).reshape(-1, 2)
    answers = [slice(start, end) for start, end in edges.tolist()]
    question = int(np.argmax(shape != TEXT)) if answers else len(shape)
    return Batch(tokens, roles, question, answers)


class Unmarked(Tasks):
    """The same tasks without the full stops and line breaks that mark where a fact ends.

    A comma replaces a line break; with our tokenizer " is " replaces a pair's colon before a
    number. The line break before "Q:" stays, and so does the punctuation of the text and of the
    source lines.
    """

    def ids(self, string: str) -> Ids:
        without_mark = {".": "", ": ": " is ", "\n": ","}
        return super().ids(without_mark.get(string, string))
