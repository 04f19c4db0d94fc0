"""Functions that the tests of `budget` call. They run in the submission's process and hold no answers."""
from dataclasses import dataclass

import torch

from methods import scissorhands
from methods.theory import persistence as theory


@dataclass(eq=False)
class Marked(scissorhands.BudgetCache):
    """A BudgetCache with given importance by position, `marks` (B, H, N); without marks the newest stay."""
    marks = None

    def write(self, k, v, pos):
        super().write(k, v, pos)
        self.most = max(getattr(self, "most", 0), self.length)

    def importance(self):
        return super().importance() if self.marks is None else self.marks.gather(2, self.pos.long())


def fed(cache, q, k, v, pieces, record):
    """Feed all pieces. Return the outputs, and the result of `record()` after each piece."""
    outputs, records, start = [], [], 0
    for n in pieces:
        one = slice(start, start + n)
        pos = torch.arange(start, start + n)[None]
        outputs.append(cache.attend(q[:, :, one], k[:, :, one], v[:, :, one], pos))
        records.append(record())
        start += n
    return torch.cat(outputs, 2), records


def attend(q, k, v, pieces, budget, recent, at_a_time, marks=None):
    """Return the outputs, the sorted positions kept after each piece, and the most slots ever in use."""
    cache = Marked(budget=budget, recent=recent, at_a_time=at_a_time)
    cache.marks = marks
    y, kept = fed(cache, q, k, v, pieces, lambda: cache.pos.sort(-1).values)
    return dict(y=y, kept=kept, most=cache.most, seen=cache.seen)


def observe(p, history):
    """Return counts (B, H, tokens so far) after each piece of p, a list of (B, H, G, w, S), and evictions.

    The tokens of a piece are those by which S grows. w may be smaller than their number.
    """
    @dataclass(eq=False)
    class Counted(scissorhands.Scissorhands):
        ran = 0

        def evict(self):
            self.ran += 1

    cache, counts, start = Counted(budget=10_000, history=history), [], 0
    cache.prompt_done = True
    for each in p:
        B, H, G, _, S = each.shape
        x = each.new_zeros(B, H, S - start, 4)
        cache.write(x, x, torch.arange(start, S)[None])
        cache.observe(x.repeat(1, G, 1, 1), each)
        counts.append(cache.slot("count").clone())
        start = S
    return dict(counts=counts, ran=cache.ran)


def scissorhands_kept(q, k, v, pieces, budget, recent, at_a_time, history):
    """Return the sorted positions kept after each piece, and their counts."""
    cache = scissorhands.Scissorhands(budget=budget, recent=recent, at_a_time=at_a_time, history=history)

    def record():
        position, order = cache.pos.sort(-1)
        return position, cache.slot("count").gather(2, order)

    return fed(cache, q, k, v, pieces, record)[1]


def share(v, beta):
    return theory.smallest_share(v, beta)


def draw(shape, k, u, seed):
    return theory.draw_power_law(tuple(shape), k, u, torch.Generator().manual_seed(seed))


def mass(beta, k, **law):
    return theory.tail_mass(beta, k, **law)


def steps(beta, k, u, eps):
    return theory.proof_steps(beta, k, u, eps)._asdict()


def repaired(beta, k, u, eps, n):
    return theory.repaired_bound(beta, k, u, eps, n)
