"""Run texts through a window method, and compare its slots with loops written from the papers.

`Case` names a method and the loops that say what it keeps; `Prompt` says how a text is read.
`check_walk(case, prompt)` compares positions; test_contract.py has the tests of all methods.

Loops work on lists. A head's weights A and norms are [g][i], of query head g and entry i.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
import math
from statistics import fmean
from typing import NamedTuple

import pytest
import torch

from common import alone, end, feed
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import ChunkKV
from nanollm.cache import NEVER, begin_turn
from nanollm.window import Selection, Window

B, D, LAYER, LAYERS = 2, 4, 1, 4


# ---- loops: how many entries a head keeps, and which ---


def highest(score, n, but=()):
    """Return the indices of the n highest scores; ties: the newest."""
    others = [i for i in range(len(score)) if i not in but]
    return sorted(others, key=lambda i: (-score[i], -i))[:n]


def pool(score, kernel_size):
    half = kernel_size // 2
    return [max(score[max(0, i - half) : i + half + 1]) for i in range(len(score))]


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows)]


def fair(exact):
    """Round to whole numbers with the same sum: the largest remainders up, the first of equals."""
    counts = [math.floor(x) for x in exact]
    while sum(counts) < sum(exact):
        i = max(range(len(exact)), key=lambda i: exact[i] - counts[i])
        counts[i] += 1
    return counts


def same_for_all(scores, b, **_):
    return [b] * len(scores)


def by_depth(scores, b, beta=20, layer=LAYER, layers=LAYERS, seen=None, **_):
    """PyramidKV: the layers' mean is b; the last is as far below b as the first is above."""
    first = min(2 * b - Fraction(b, beta), seen or len(scores[0]))
    step = Fraction(2 * (first - b), layers - 1)
    counts = fair([first - i * step for i in range(layers)])
    return [counts[layer]] * len(scores)


def by_head(scores, b, floor=0.2, **_):
    """AdaKV: a head gets a floor, and its entries among the layer's highest scores."""
    H = len(scores)
    floor = Fraction(str(floor))
    ranked = [(x, i, h) for h in range(H) for i, x in enumerate(scores[h])]
    heads = [h for *_, h in sorted(ranked, reverse=True)[: H * b]]
    return fair([floor * b + (1 - floor) * heads.count(h) for h in range(H)])


def by_weight(A, norms, out, b, kernel_size, **_):
    """Algorithm 2 of CriticalKV, line 6."""
    return highest(pool(mean(A)[:out], kernel_size), b)


def in_two_stages(
    A,
    norms,
    out,
    b,
    kernel_size,
    alpha,
    pooled=False,
    epsilon=0,
    of_means=False,
    **_,
):
    """Algorithm 1 of CriticalKV with Algorithm 2, lines 8 to 10."""
    A = [a[:out] for a in A]
    by_weight_alone = math.floor(Fraction(str(alpha)) * b)
    first = highest(pool(mean(A), kernel_size), by_weight_alone)
    if pooled:
        A = [pool(a, kernel_size) for a in A]
    if of_means:
        A = [mean(A)]
        norms = [mean(norms)]
    products = []
    for a, norm in zip(A, norms):
        products.append([(x + epsilon) * y for x, y in zip(a, norm)])
    return first + highest(mean(products), b - len(first), but=first)


def chunk_numbers(n, longest, ends=None):
    """Return the chunk of each of n tokens; `ends` says after which tokens a chunk ends, too."""
    numbers = [0]
    for i in range(1, n):
        full = numbers.count(numbers[-1]) == longest
        ended = ends is not None and ends[i - 1]
        numbers.append(numbers[-1] + (full or ended))
    return numbers


def by_chunk(
    A,
    norms,
    out,
    b,
    kernel_size,
    chunk_size,
    score,
    fill,
    places,
    ends=None,
    **_,
):
    """ChunkKV: take chunks by their scores: those that fit whole, or with `fill` cut to b tokens.

    places: each entry's place in the text.
    """
    scores = pool(mean(A)[:out], kernel_size)
    if ends:
        chunk_size = min(chunk_size, b)
    number = chunk_numbers(places[-1] + 1, chunk_size, ends)
    chunks = {}
    for i in range(out):
        chunks.setdefault(number[places[i]], []).append(i)
    total = {"sum": math.fsum, "mean": fmean, "max": max}[score]
    ranked = [(total([scores[i] for i in own]), own) for own in chunks.values()]
    kept = []
    for _, chunk in sorted(ranked, reverse=True):
        if fill or len(kept) + len(chunk) <= b:
            kept += chunk
    return kept[:b]


# ---- cases and prompts ---


NONE = {}


class Case(NamedTuple):
    Method: type = SnapKV
    options: dict = NONE
    # or a function of a prompt; None: the Method's own
    select: Selection | Callable | None = None
    deal: Callable = same_for_all  # entries per head, from [h][i] pooled window scores
    choose: Callable = by_weight  # entries of a head


def chunk_case(
    select,
    Method=ChunkKV,
    options=NONE,
    deal=same_for_all,
    choose=by_chunk,
):
    """Return a case of ChunkKV. Chunks that must fit whole are no longer than the room."""

    def fitting(prompt):
        room = prompt.budget - prompt.window_size
        return replace(select, chunk_size=min(select.chunk_size, room))

    return Case(Method, options, select if select.fill else fitting, deal, choose)


class Prompt(NamedTuple):
    turns: tuple[int, ...]  # tokens; the layer is compressed after each turn
    chunk_size: int  # tokens per part
    H: int
    G: int
    window_size: int
    budget: int
    kernel_size: int = 7
    # the window's weights are a few exact numbers, and so are the norms
    tied: bool = False
    cropped: int = 0  # newest tokens that are forgotten before the compression


GROUPED = Prompt((53,), 53, 2, 2, 8, 20)
TIED = Prompt((37,), 36, 2, 4, 4, 17, 3, tied=True)
# as in the measurements where the prompt has the question
AGAIN = GROUPED._replace(cropped=1)
TURNS = [
    Prompt(turns, 53, 2, 2, 4, 12, 3) for turns in ((30, 5, 9, 2, 1), (3, 8, 12, 4, 4))
]
OTHER_TURNS = [
    Prompt((8, 5, 5, 5), 53, H, G, 4, budget, 3)
    for H, G, budget in ((1, 4, 12), (3, 1, 9), (4, 2, 6))
]
PROMPTS = (
    Prompt((53,), 1, 2, 2, 8, 20),
    Prompt((37,), 37, 3, 1, 4, 13, 1),
    Prompt((37,), 9, 2, 4, 5, 6),
    Prompt((38,), 38, 4, 1, 7, 37),
    # equal scores of neighbours would add up to sums that rounding makes unequal
    Prompt((9,), 2, 3, 2, 1, 4, 1),
    Prompt((37,), 37, 4, 1, 4, 13, 1, tied=True),
    # everything fits
    Prompt((13,), 4, 2, 1, 8, 13),
    Prompt((5,), 3, 2, 2, 8, 9),
    Prompt((37,), 9, 2, 2, 4, 9, 3, cropped=3),
    Prompt((21,), 21, 2, 1, 1, 6, 1, cropped=1),
    Prompt((21,), 21, 2, 2, 4, 20, cropped=1),
)


def each_walk(cases, *prompts):
    """Parametrise a test by the name of a case and by a prompt."""
    walks = [*product(cases, prompts)]
    names = [f"{case}-{','.join(str(x) for x in prompt)}" for case, prompt in walks]
    return pytest.mark.parametrize("case, prompt", walks, ids=names)


# ---- the walk ---


class GivenWindow(Window):
    """A window whose weights are given: rounding must not break ties."""

    def scores(self):
        return self.method.given[..., : self.n].mean(3)


class Walk:
    """A text in a method's store, and beside it the positions that loops say it should hold."""

    def __init__(self, case: Case, prompt: Prompt):
        self.case = case
        self.prompt = prompt
        self.semantic = hasattr(case.Method, "ends")
        n = sum(prompt.turns)
        H, G, w = prompt.H, prompt.G, prompt.window_size
        g = torch.Generator().manual_seed(n)
        self.q = 2 * torch.randn(B, H, G, n, D, generator=g)
        self.k = torch.randn(B, H, n, D, generator=g)
        self.v = torch.randn(B, H, n, D, generator=g)
        self.w_o = torch.randn(6, H * G, D, generator=g)
        # a token of the text is a word of 60, of which some end a chunk
        self.tokens = torch.randint(60, (B, n), generator=g)
        self.ends = torch.rand(60, generator=g) < 1 / 6
        self.given = None
        if prompt.tied:
            shape = B, H, G, w, prompt.turns[0]
            self.given = torch.randint(0, 4, shape, generator=g) / 16
            self.v = self.v.round()
            self.w_o = self.w_o.round()

        self.method = self.make_method()
        self.options = case.options | vars(self.method.select)
        self.layer = alone(self.method, LAYER, LAYERS, w_o=self.w_o)
        self.slots = {(b, h): [] for b in range(B) for h in range(H)}
        self.read = 0  # tokens so far

    def make_method(self):
        select = self.case.select or self.case.Method.select
        if not isinstance(select, Selection):
            select = select(self.prompt)
        options = dict(self.case.options, select=select)
        for name in ("budget", "window_size", "kernel_size"):
            options[name] = getattr(self.prompt, name)
        if self.semantic:
            options["ends"] = self.ends
        method = self.case.Method(**options)
        if self.given is not None:
            method.given = self.given
            method.window = partial(GivenWindow, method)
        return method

    def feed(self, n, chunk):
        """Read n more tokens."""
        text = self.q.flatten(1, 2), self.k, self.v
        feed(self.layer, text, n, chunk)
        for slots in self.slots.values():
            slots += range(self.read, self.read + n)
        self.read += n

    def forget(self, n):
        """Forget the newest n tokens, in two steps."""
        if n:
            self.layer.forget(self.read - n // 2)
            self.layer.forget(self.read - n)
            for slots in self.slots.values():
                del slots[-n:]

    def compress_by_loops(self, turn):
        """Keep what the loops choose: Algorithm 2 of CriticalKV."""
        prompt = self.prompt
        n = self.read - prompt.cropped  # tokens that are left
        if n <= prompt.budget:
            return
        w = min(prompt.window_size, turn)
        for b in range(B):
            # the window's weights [h][g][t][i], and their means over the entries that are left
            rows = [self.rows(b, h, w, n) for h in range(prompt.H)]
            A = []
            for h, head in enumerate(rows):
                A.append([mean(each)[: len(self.slots[b, h])] for each in head])
            out = [len(head[0]) - (w - prompt.cropped) for head in A]
            pooled = [pool(mean(a)[:m], prompt.kernel_size) for a, m in zip(A, out)]
            budget = prompt.budget - (w - prompt.cropped)
            rooms = self.case.deal(pooled, budget, seen=self.read - w, **self.options)
            for h, room in enumerate(rooms):
                self.keep(b, h, min(room, out[h]), out[h], A[h])

    def rows(self, b, h, w, n):
        """Return the weights [g][t][i] of the last w queries: to slots and forgotten ones."""
        if self.given is not None:
            return self.given[b, h].tolist()
        places = torch.tensor([*self.slots[b, h], *range(n, self.read)])
        queries = torch.arange(self.read - w, self.read)
        score = self.q[b, h, :, queries] @ self.k[b, h, places].T / math.sqrt(D)
        later = places > queries[:, None]
        return score.masked_fill(later, -math.inf).softmax(-1).tolist()

    def keep(self, b, h, room, out, A):
        """Keep `room` of a head's first `out` slots."""
        places = self.slots[b, h]
        more = dict(places=places, **self.options)
        if self.semantic:
            more["ends"] = self.ends[self.tokens[b]].tolist()
        norms = self.norms(b, h, places)
        size = self.prompt.kernel_size
        chosen = self.case.choose(A, norms, out, room, size, **more)
        stay = [places[i] for i in chosen] + places[out:]
        self.slots[b, h] = sorted(stay)

    def norms(self, b, h, places):
        """Return ‖v W_O‖₁, [g][i]."""
        G = self.prompt.G
        w_o = self.w_o[:, h * G : h * G + G].permute(1, 2, 0)
        return (self.v[b, h, places] @ w_o).abs().sum(-1).tolist()

    def check(self):
        for (b, h), slots in self.slots.items():
            pos = self.layer.pos[b, h]
            assert pos[pos != NEVER].tolist() == slots


def check_walk(case: Case, prompt: Prompt):
    """Read the turns, and compress after each; compare with loops each time."""
    walk = Walk(case, prompt)
    for turn in prompt.turns:
        begin_turn([walk.layer])
        walk.feed(turn, prompt.chunk_size)
        walk.forget(prompt.cropped)
        walk.compress_by_loops(turn)
        walk.read -= prompt.cropped
        end(walk.layer, tokens=walk.tokens[:, : walk.read])
        walk.check()


# ---- stores after a prompt ---


def compressed(method, q, k, v, w_o=None, layer=0, layers=1):
    """Return a method's store after a prompt fed at once."""
    store = alone(method, layer, layers, w_o)
    feed(store, (q, k, v))
    end(store)
    return store


def uneven(method, T, H=4, G=2, d=2):
    """Feed a prompt: head 0 attends to all tokens alike, others, from token 5 on, to that alone."""
    q = torch.zeros(B, H * G, T, d)
    k = torch.zeros(B, H, T, d)
    v = torch.randn(B, H, T, d)
    q[..., 0] = 1
    k[:, 1:, 5, 0] = 1000
    return compressed(method, q, k, v, torch.randn(3, H * G, d))
