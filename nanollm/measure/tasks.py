"""Retrieval tasks made from real text (corpus.py).

Every task fills a document of exactly T tokens with text and places facts, questions and answers in it,
each token tagged with its role. Training weighs tokens by role; evaluation cuts the document where the
question starts.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from nanollm.check import check_seed, whole
from nanollm.measure import corpus
from nanollm.tokenizer import Foreign

TEXT, FACT, QUESTION, ANSWER = range(4)  # roles of tokens
# few-shot: classes of source lines, by how they begin
LINE_KINDS = ("def ", "return ", "raise ", "if ", "for ", "# ", ("import ", "from "), "self.")


@dataclass
class Batch:
    """B documents of one task, aligned: the question and the answers lie at the same places in every row."""
    tokens: np.ndarray     # (B, T) int64
    roles: np.ndarray      # (B, T) uint8
    question: int          # index of the first question's first token: `agnostic` compresses what lies before
    answers: list[slice]   # one span per question

    @property
    def facts(self) -> np.ndarray:
        """(B, T) bool: the tokens that carry facts."""
        return self.roles == FACT

    @property
    def stated(self) -> np.ndarray:
        """(B,): the index at which the facts first state the first answer."""
        answer = self.tokens[:, self.answers[0]]
        spans = [slice(i, i + answer.shape[1]) for i in range(self.question)]
        stated = [((self.tokens[:, at] == answer) & self.facts[:, at]).all(1) for at in spans]
        return np.argmax(stated, 0)


class Tasks:
    """Makes the documents of one split with one tokenizer; each call is given its random numbers as `rng`.

    encoding: a tiktoken.Encoding of nanollm/tokenizer.py, or any tokenizer as `Foreign`. filler: a text of
    your own around the facts, in place of the split's. chat: a document is a user's turn, and the answer
    begins with the question's words again.

    A task is called as task(rng, T, ...) and returns tokens and roles, (T,) each. Keys are English words
    and values four-digit numbers. Those of the test split never occur as keys or values in training.
    """
    KNOWN = "needle", "pairs", "few_shot", "copy", "plain"

    def __init__(self, encoding, split: str, filler: str | None = None, chat: bool = False):
        foreign = isinstance(encoding, Foreign)
        if not foreign and getattr(encoding, "encode_ordinary", len)("0099") != [256, 355]:
            raise ValueError("the tasks need a tokenizer of nanollm/tokenizer.py, in which tokens 256 to 355 "
                             "are 00 to 99, or one of transformers, as Foreign")
        self.encoding, self.split = encoding, split
        # the space before a number: a token's end in nanollm/tokenizer.py, in most others its beginning
        self.gap = " " if foreign else ""
        self.bos = encoding.bos if foreign else encoding.n_vocab - 1
        self.first = [] if self.bos is None else [self.bos]
        if chat and not foreign:
            raise ValueError("this tokenizer has no chat template; leave --chat out")
        self.opening, self.reply = encoding.turn() if chat else (self.first, None)
        encoded = encoding.encode_ordinary_batch(corpus.text(split) if filler is None else [filler])
        self.stream = np.concatenate([[*self.first, *ids] for ids in encoded]).astype(np.int64)

        # tiktoken's batch is a thread per piece
        encode = encoding.encode_ordinary_batch if foreign else lambda pieces: [*map(self.ids, pieces)]
        encoded = encode([" " + word for word in corpus.words(split)])
        # words of one length in tokens, of which there are 100 if possible: 2, or else the shortest
        length = max(range(1, 9), key=lambda n: (min(sum(len(ids) == n for ids in encoded), 100), n == 2, -n))
        self.words = [ids for ids in encoded if len(ids) == length]
        self.values = [n for n in range(10_000) if corpus.held_out(str(n), 5) == (split == "test")]

        lines = sorted({line.strip() for doc in corpus.text(split) for line in doc.splitlines()})
        self.lines = [[ids for ids in encode([line for line in lines if line.startswith(kind)])
                       if 4 <= len(ids) <= 12] for kind in LINE_KINDS]

    def ids(self, string: str) -> list[int]:
        return self.encoding.encode_ordinary(string)

    def filler(self, rng, n: int) -> np.ndarray:
        """n consecutive tokens of real text."""
        if n < 0:
            raise ValueError(f"the facts and questions need {-n} tokens more than the document has; "
                             "make it longer")
        if n >= len(self.stream):
            raise ValueError(f"{n} tokens asked for, but the {self.split} text has {len(self.stream)}; "
                             "ask for fewer")
        start = rng.integers(0, len(self.stream) - n)
        return self.stream[start:start + n]

    def draw_pairs(self, rng, n: int, numbers: int = 1) -> list[tuple[list[int], list[int]]]:
        """n different keys (2 tokens each) with their values, 2 tokens for each of their `numbers`."""
        whole("the number of keys", n, 1, len(self.words))
        whole("numbers", numbers, 1, len(self.values) // n)
        keys = rng.choice(len(self.words), n, replace=False)
        values = rng.choice(self.values, (n, numbers), replace=False)
        return [(self.words[key], [t for n in value for t in self.number(n, 4)])
                for key, value in zip(keys, values)]

    def number(self, n: int, digits: int) -> list[int]:
        return self.ids(f"{self.gap}{n:0{digits}}")

    def before(self, string: str) -> list[int]:
        """The tokens before a number: the space between them belongs to one of the two."""
        return self.ids(string if self.gap else f"{string} ")

    def ask(self, before: list[int], words: list[int]) -> list[int]:
        """A question up to its answer."""
        return before + words + ([] if self.reply is None else self.reply + words)

    def assemble(self, rng, T: int, facts, questions, depths=None) -> tuple[np.ndarray, np.ndarray]:
        """A document of T tokens: text, the facts in it at `depths` (0 start … 1 end), then the questions.

        facts: token lists. questions: (question, answer, tail) token lists.
        """
        asked = [part for question in questions for part in question]
        fill = self.filler(rng, T - len(self.opening) - sum(map(len, [*facts, *asked])))
        depths = rng.random(len(facts)) if depths is None else np.asarray(depths)

        parts, done = [(self.opening, TEXT)], 0
        for i in np.argsort(depths, kind="stable"):
            at = round(depths[i] * len(fill))
            parts += [(fill[done:at], TEXT), (facts[i], FACT)]
            done = at
        parts.append((fill[done:], TEXT))
        for question, answer, tail in questions:
            parts += [(question, QUESTION), (answer, ANSWER), (tail, QUESTION)]

        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in parts])
        roles = np.concatenate([np.full(len(ids), role, dtype=np.uint8) for ids, role in parts])
        return tokens, roles

    def needle(self, rng, T: int, facts: int = 4, questions: int = 1, depth: float | None = None,
               numbers: int = 1):
        """Facts scattered in real text; one or several are asked for.

        depth: the place of the first one asked for, from 0 (the start) to 1. numbers: four-digit numbers in
        a value; the model is trained on one.
        """
        whole("questions", questions, 1, whole("facts", facts, 1))
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depth {depth} must lie between 0, the text's start, and 1, its end")

        pairs = self.draw_pairs(rng, facts, numbers)
        start, stop, ask = (self.ids(s) for s in (" The code of", ".", "\nQ:"))
        is_ = self.before(" is")
        depths, asked = rng.random(facts), rng.permutation(facts)[:questions]
        if depth is not None:
            depths[asked[0]] = depth

        stated = [start + key + is_ + value + stop for key, value in pairs]
        questions = [(self.ask(ask, start + pairs[i][0] + is_), pairs[i][1], stop) for i in asked]
        return self.assemble(rng, T, stated, questions, depths)

    def pairs(self, rng, T: int, listed: int = 16, questions: int = 1):
        """A list of key: value lines, as one block somewhere in the text; some keys are asked for."""
        whole("questions", questions, 1, whole("listed", listed, 1))
        items = self.draw_pairs(rng, listed)
        line, ask, colon = self.ids("\n"), self.ids("\nQ:"), self.before(":")
        block = [t for k, v in items for t in line + k + colon + v] + line
        asked = rng.permutation(listed)[:questions]
        questions = [(self.ask(ask, items[i][0] + colon), items[i][1], []) for i in asked]
        return self.assemble(rng, T, [block], questions)

    def few_shot(self, rng, T: int, shots: int = 16, classes: int = 4, every_label: bool = False):
        """Lines of source code, labelled by kind with labels drawn for this prompt; a new line is asked for.

        Its class has been seen. The answer is one token; chance is 1/classes. With `every_label` (training)
        each label after the first of its class is an answer too.
        """
        whole("shots", shots, 1, T)
        whole("classes", classes, 2, len(LINE_KINDS))
        kinds = rng.choice(len(LINE_KINDS), classes, replace=False)
        labels = [self.number(n, 2) for n in rng.choice(100, classes, replace=False)]
        which = rng.permutation(np.arange(shots + classes) % classes)[:shots]
        arrow, newline = self.ids(" =>"), self.ids("\n")

        def line_of(c: int) -> list[int]:
            lines = self.lines[kinds[c]]
            return newline + lines[rng.integers(len(lines))] + arrow

        query = rng.choice(which)
        shown = [(line_of(c), labels[c]) for c in which]
        last = (self.ask([], line_of(query)), labels[query], [])
        if not every_label:
            return self.assemble(rng, T, [line + label for line, label in shown], [last], [1.0] * shots)

        asked = [(line, label, []) if c in which[:i] else (line + label, [], [])
                 for i, (c, (line, label)) in enumerate(zip(which, shown))]
        return self.assemble(rng, T, [], [*asked, last])

    def copy(self, rng, T: int, length: int = 32, start: int = 8, answer: int = 16):
        """A passage of other text within the text. The end quotes its beginning, and the rest follows."""
        whole("answer", answer, 1, whole("length", length, 2) - whole("start", start, 1, length - 1))
        passage = self.filler(rng, length)
        quoted = self.ask([], passage[:start].tolist())
        return self.assemble(rng, T, [passage], [(quoted, passage[start:start + answer], [])])

    def plain(self, rng, T: int):
        """Just text."""
        return self.filler(rng, T), np.full(T, TEXT, dtype=np.uint8)

    def drawn(self, task: str, seed: int, B: int, T: int, options: dict) -> Iterator:
        """Check what is asked for; return documents of a task without end."""
        if task not in self.KNOWN:
            raise ValueError(f"task {task!r} is unknown; known are {', '.join(self.KNOWN)}")
        check_seed(seed)
        whole("documents", B, 1, 2 ** 31 // whole("tokens", T, 1, 2 ** 31))  # memory holds no more
        rng, make = np.random.default_rng(seed), getattr(self, task)
        return (make(rng, T, **options) for _ in count())

    def batch(self, task: str, seed: int, B: int, T: int, **options) -> Batch:
        """B documents of a task ("needle", "pairs", …), drawn until question and answers align."""
        rows, missed = [], 0
        for tokens, roles in self.drawn(task, seed, B, T, options):
            if rows and (shape_of(roles) != shape_of(rows[0][1])).any():
                missed += 1
            else:
                rows.append((tokens, roles))
                missed = 0
            if len(rows) == B:
                return aligned(rows)
            if missed == 1000:
                raise ValueError(f"1000 documents of {task} in a row do not align with the first; B {B} must "
                                 "be 1 here")

    def batches(self, task: str, seed: int, B: int, T: int, **options) -> list[Batch]:
        """B documents of a task as they are drawn, in as few batches as align.

        With our tokenizer that is `batch`. In others a question, and a number, may have any number of tokens.
        """
        if not isinstance(self.encoding, Foreign):
            return [self.batch(task, seed, B, T, **options)]
        groups = {}
        for tokens, roles in islice(self.drawn(task, seed, B, T, options), B):
            groups.setdefault(shape_of(roles).tobytes(), []).append((tokens, roles))
        return [aligned(rows) for rows in groups.values()]


def shape_of(roles: np.ndarray) -> np.ndarray:
    """Return roles (T,) with facts as text: they show where question and answers lie."""
    return np.where(roles == FACT, np.uint8(TEXT), roles)


def aligned(rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Return documents of one shape as a batch."""
    tokens, roles = (np.stack(x) for x in zip(*rows))
    shape = shape_of(roles[0])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], shape == ANSWER, [0]]).astype(int)))
    answers = [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]
    return Batch(tokens, roles, int(np.argmax(shape != TEXT)) if answers else len(shape), answers)


class Unmarked(Tasks):
    """The same tasks, but no full stop, colon or line break of theirs tells where a fact ends.

    The text around the facts keeps its own, and so do the labelled source lines within.
    """

    def ids(self, string: str) -> list[int]:
        return super().ids({".": "", ": ": " is ", "\n": ","}.get(string, string))
