"""KVReviver and our repairs by loops: the sketch, the store's lists, the bytes, one head at a time.

`check_walk(Method, walk, changed)` compares a method with them after every step.
"""

from itertools import pairwise, product
import math

import numpy as np
import pytest
import torch

from common import alone, end, feed
from exact import F64, random
from methods.kv_reviver import PRIME, Sketch
from methods.ours.kv_reviver_shrunk import MeanSketch, ShrunkReviver, ShrunkSketch

B, H, G, D = 2, 2, 3, 4
VECTOR = 2 * D * 8  # bytes of a key and a value
ENTRY = VECTOR + 4


class Lists:
    """Algorithms 1 and 2 for one head: r rows of b slots; a slot is an array of 2D numbers."""

    def __init__(self, sketch):
        self.kind = type(sketch)
        self.r = sketch.rows
        self.b = sketch.width
        self.x = np.zeros((self.r, self.b, 2 * D))
        self.total = np.zeros(2 * D)
        self.inside = set()
        self.bucket_by = sketch.bucket_by.T.tolist()
        self.sign_by = sketch.sign_by.T.tolist()

    def h(self, i, J):
        return hashed(self.bucket_by[i], J) % self.b

    def g(self, i, J):
        return 1 - 2 * (hashed(self.sign_by[i], J) % 2)

    def signed(self, i, J, x):
        sign = self.g(i, J)
        of_keys = 1 if self.kind in (Sketch, MeanSketch) else sign
        return x * np.repeat((of_keys, sign), D)

    def insert(
        self,
        J,
        x,
        times=1,
    ):
        for i in range(self.r):
            self.x[i, self.h(i, J)] += times * self.signed(i, J, x)
        self.total += times * x
        self.inside ^= {J}

    def query(self, J):
        mean = 0.0
        factor = 1.0
        if self.kind is ShrunkSketch:
            variance = 1 if self.r == 1 else 1 - math.sqrt(3) / math.pi
            others = len(self.inside) - 1
            factor = 1 / (1 + variance * others / self.b)
            mean = self.total / len(self.inside)
        rows = []
        for i in range(self.r):
            slot = self.h(i, J)
            there = [other for other in self.inside if self.h(i, other) == slot]
            x = self.x[i, slot]
            if self.kind is MeanSketch:
                x = x / len(there)
            signs = sum(self.g(i, other) for other in there)
            rows.append(self.signed(i, J, x - signs * mean))
        return mean + factor * np.sort(rows, 0)[self.r // 2]


def hashed(c, J):
    return (c[0] * J**3 + c[1] * J**2 + c[2] * J + c[3]) % PRIME


def sizes(seen, Method, options):
    """Return the slots of a row, of Recent and of Candidate, and the sketch's bytes."""
    budget = options["budget"] * ENTRY
    vague = options["vague"]
    row = options["rows"] * VECTOR  # a slot in each row
    width = max(1, math.floor(vague * budget / row)) if vague else 0
    sketch = width * row
    if Method is ShrunkReviver and width:
        sketch += VECTOR
    slots = math.floor((budget - sketch - 4 * seen) / ENTRY) - options["slack"]
    newest = round(slots * options["recent"] / (1 - vague))
    return (width, newest, slots - newest), sketch


class Head:
    """Algorithms 3 and 4 for one head.

    Recent is cut back when the exact tokens outnumber their slots and the slack.
    """

    def __init__(self, Method, options):
        self.Method = Method
        self.options = options
        self.lists = None
        self.swaps = 0
        self.recent = []
        self.candidate = []
        self.vague = []
        self.exact = {}
        self.seen = {}
        self.score = {}

    def attend(self, q, x, part):
        """Add up the attention of a part's tokens: q (G, T, D), x = [k, v] (T, 2D)."""
        self.recent += part
        new = dict(zip(part, x))
        self.exact |= new
        self.seen |= new
        self.score |= dict.fromkeys(part, 0.0)
        tokens = np.array([*self.seen])
        x = np.stack([*self.seen.values()])
        visible = tokens <= np.array(part)[:, None]
        weight = np.exp(q @ x[:, :D].T / math.sqrt(D)) * visible
        weight /= weight.sum(-1, keepdims=True)
        for J, w in zip(tokens, weight.sum((0, 1))):
            self.score[J] += w

    def rank(self, J):
        return self.score[J], J

    def compress(self, seen, sketch):
        (_, newest, candidates), _ = sizes(seen, self.Method, self.options)
        if len(self.exact) > newest + candidates + self.options["slack"]:
            n = max(len(self.recent) - newest, 0)
            old = self.candidate + self.recent[:n]
            self.candidate = sorted(old, key=self.rank)
            self.recent = self.recent[n:]
            while len(self.candidate) > candidates:
                self.forget(self.candidate.pop(0), sketch)
        while self.vague:
            J = min(self.candidate, key=self.rank)
            best = max(self.vague, key=self.rank)
            if self.score[J] * self.options["replace_rate"] >= self.score[best]:
                break
            self.swap(J, best)
        self.seen = self.exact | {J: self.lists.query(J) for J in self.vague}

    def forget(self, J, sketch):
        x = self.exact.pop(J)
        if self.options["vague"]:
            self.lists = self.lists or Lists(sketch)
            self.lists.insert(J, x)
            self.vague.append(J)

    def swap(self, J, best):
        x = self.lists.query(best)
        self.lists.insert(best, x, -1)
        self.lists.insert(J, self.exact.pop(J))
        self.exact[best] = x
        self.candidate[self.candidate.index(J)] = best
        self.vague[self.vague.index(best)] = J
        self.swaps += 1


def texts(T, dtype=F64):
    """Return random q, k, v.

    From token 36 on, queries attend to tokens that earlier queries avoided.
    """
    q = random(B, H * G, T, D, seed=0)
    k = random(B, H, T, D, seed=1)
    v = random(B, H, T, D, seed=2)
    k[:, :, :20:2] += 1
    q += torch.where(torch.arange(T) < 36, -1, 2).unsqueeze(1)
    return [x.to(dtype) for x in (q, k, v)]


def parts_of(
    T,
    prompt,
    chunk=None,
    block=1,
):
    starts = *range(0, prompt, chunk or prompt), *range(prompt, T, block), T
    return [range(a, b) for a, b in pairwise(starts)]


def step(layer, text, part, prompt):
    """Feed a part of the text; compress if it ends the prompt."""
    y = feed(layer, text, len(part))
    if part.stop == prompt:
        end(layer)
    return y


OPTIONS = dict(budget=26, vague=0.3, recent=0.3, slack=2, replace_rate=1.1, rows=3)
# tokens of the prompt; per part in it; after it
WHOLE, PARTS, SHORT = (36, 36, 1), (36, 7, 3), (3, 2, 1)


def check_walk(
    Method,
    walk,
    changed,
    T=50,
):
    """Compare exact and vague tokens, scores, sketch and bytes after every step."""
    options = OPTIONS | changed
    prompt = walk[0]
    q, k, v = texts(T)
    x = torch.cat((k, v), -1).numpy()
    asked = q.unflatten(1, (H, G)).numpy()
    layer = alone(Method(**options))
    heads = {at: Head(Method, options) for at in product(range(B), range(H))}
    for part in parts_of(T, *walk):
        step(layer, (q, k, v), part, prompt)
        assert layer.cached_vague is None  # `bytes` does not count it
        for at, head in heads.items():
            head.attend(asked[at][:, part], x[at][part], part)
            if part.stop >= prompt:
                head.compress(part.stop, layer.sketch)
            check_head(layer, at, head)
        layer.cached_vague = None
        check_bytes(layer, part.stop >= prompt, Method, options)
    assert (layer.sketch is None) == (not options["vague"])
    swaps = sum(head.swaps for head in heads.values())
    assert bool(swaps) == bool(options["vague"])


def check_head(layer, at, head):
    keys, values, pos, bias = layer.read()
    assert bias is None
    read = torch.cat((keys[at], values[at]), -1)
    shown = dict(zip(pos[at].tolist(), read))
    assert head.seen.keys() == shown.keys()
    for J, x in head.seen.items():
        assert np.allclose(x, shown[J], atol=1e-9)
    assert sorted(layer.pos[at].tolist()) == sorted(head.exact)
    if head.lists:
        assert layer.vague_tokens()[at].tolist() == sorted(head.vague)
        sums = head.lists.x.reshape(-1, 2 * D)
        assert np.allclose(layer.sketch.x[at], sums, rtol=0, atol=1e-9)
    score = [head.score[J] for J in range(layer.seen)]
    assert layer.score[at][: layer.seen].tolist() == pytest.approx(score, abs=1e-4)


def check_bytes(layer, ended, Method, options):
    numbers, sketch = sizes(layer.seen, Method, options)
    if layer.sketch is None:
        sketch = 0
    live, _ = layer.bytes()
    assert live == B * H * (layer.length * ENTRY + 4 * layer.seen + sketch)
    if ended:
        assert layer.method.sizes(layer) == numbers
        assert live <= B * H * options["budget"] * ENTRY
        exact = sum(numbers[1:])
        assert min(layer.seen, exact) <= layer.length <= exact + options["slack"]
