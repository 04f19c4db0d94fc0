"""Functions that the tests of `budget` call. They run in the submission's process and hold no answers."""
from dataclasses import dataclass

import torch

from methods import scissorhands
from methods.theory import persistence as theory
from nanollm.cache import Method


@dataclass
class Marked(Method):
    """Drops the `leave` entries with the lowest marks, (B, H, N) by position; without marks the oldest."""
    budget: int
    leave: int
    marks: torch.Tensor | None

    def evict(self, layer):
        marks = layer.pos if self.marks is None else self.marks.gather(2, layer.pos.long())
        layer.shrink(marks.float(), self.budget - self.leave)


class Watched(scissorhands.BudgetSlots):
    most = 0  # slots ever in use

    def write(self, k, v, pos):
        super().write(k, v, pos)
        self.most = max(self.most, self.length)


def fed(layer, q, k, v, pieces, record):
    """Feed all pieces. Return the outputs, and the result of `record()` after each piece."""
    outputs, records, start = [], [], 0
    for n in pieces:
        one = slice(start, start + n)
        pos = torch.arange(start, start + n)[None]
        outputs.append(layer.attend(q[:, :, one], k[:, :, one], v[:, :, one], pos))
        records.append(record())
        start += n
    return torch.cat(outputs, 2), records


def attend(q, k, v, pieces, budget, leave, marks=None):
    """Return the outputs, the sorted positions kept after each piece, and the most slots ever in use."""
    layer = Watched(Marked(budget, leave, marks))
    y, kept = fed(layer, q, k, v, pieces, lambda: layer.pos.sort(-1).values)
    return dict(y=y, kept=kept, most=layer.most, seen=layer.seen)


def observe(p, history):
    """Return counts (B, H, tokens so far) after each piece of p, a list of (B, H, G, w, S).

    The tokens of a piece are those by which S grows. w may be smaller than their number.
    """
    method = scissorhands.Scissorhands(budget=10_000, history=history)
    layer, counts, start = scissorhands.BudgetSlots(method), [], 0
    for each in p:
        B, H, G, _, S = each.shape
        x = each.new_zeros(B, H, S - start, 4)
        layer.write(x, x, torch.arange(start, S)[None])
        method.observe(layer, x.repeat(1, G, 1, 1), each)
        counts.append(layer.slot("count").clone())
        start = S
    return counts


def scissorhands_kept(q, k, v, pieces, budget, recent, at_a_time, history):
    """Return the sorted positions kept after each piece, and their counts."""
    layer = scissorhands.BudgetSlots(scissorhands.Scissorhands(budget, recent, at_a_time, history))

    def record():
        position, order = layer.pos.sort(-1)
        return position, layer.slot("count").gather(2, order)

    return fed(layer, q, k, v, pieces, record)[1]


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
