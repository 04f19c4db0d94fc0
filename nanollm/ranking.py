"""Turn scores into slots: ranks, masks of the highest, indices. Ties go to the newest token."""

import torch
from torch import Tensor


def rank(score: Tensor, pos: Tensor) -> Tensor:
    """Return each slot's rank, (..., S): 0 for the highest score. Ties go to the largest pos."""
    newest_first = pos.argsort(descending=True, stable=True)
    score = score.gather(-1, newest_first)
    by_score = score.argsort(descending=True, stable=True)
    order = newest_first.gather(-1, by_score)

    # order lists the slots from the best on; the ranks are its inverse.
    # The order 2 0 3 1 gives the ranks 1 3 0 2.
    S = order.shape[-1]
    place = torch.arange(S, device=order.device)
    place = place.expand_as(order)
    ranks = torch.empty_like(order)
    return ranks.scatter_(-1, order, place)


def top(score: Tensor, budget: int | Tensor) -> Tensor:
    """Return a mask (..., S) of the `budget` highest scores; budget is a number or (...).

    The slots must be in the order of their tokens. Ties then go to the newest token, as in `rank`.
    """
    # `rank(score, slot) < budget` is the same mask, but its two sorts took two to eight times
    # as long on one CPU. Here one threshold is enough: the lowest score that stays.
    S = score.shape[-1]
    if torch.is_tensor(budget):
        budget = budget.clamp(0, S)
        budget = budget[..., None]
        most = int(budget.max())
        most = max(most, 1)
        highest = score.topk(most).values
        last = (budget - 1).clamp(min=0)
        least = highest.gather(-1, last)
    else:  # one number for all rows: no need to sort
        budget = min(budget, S)
        last = max(budget, 1)
        nth = S + 1 - last  # kthvalue counts from the lowest
        least = score.kthvalue(nth, keepdim=True).values
        stays = score >= least
        rows = stays.numel() // S
        if int(stays.sum()) == budget * rows:  # no ties at the threshold
            return stays

    # Scores 2 2 5 2 with budget 3: least is 2, above 0 0 1 0, tied 1 1 0 1, and 2 places are
    # left. newer 3 2 1 1 counts the tied slots from each one on, so the mask is 0 1 1 1.
    above = score > least
    tied = score == least
    certain = above.sum(-1, keepdim=True)
    left = budget - certain
    newer = tied.flip(-1).cumsum(-1).flip(-1)
    tied = tied & (newer <= left)
    return above | tied


def indices(kept: Tensor) -> Tensor:
    """Return the slots where kept (B, H, S) is true, in order, as (B, H, n).

    n is the number of slots in the head that keeps most. Other heads are filled up with −1.
    """
    count = kept.sum(-1)
    n = int(count.max())
    slots = kept.nonzero()  # head after head
    slots = slots[:, -1]
    rows = count.numel()
    if len(slots) == n * rows:  # all heads keep n
        return slots.view(*count.shape, n)

    # Heads 1 0 1 1 and 0 1 0 0 have the counts 3 1 and the slots 0 2 3 1.
    # filled is 1 1 1 and 1 0 0, so the result is 0 2 3 and 1 −1 −1.
    place = torch.arange(n, device=kept.device)
    filled = place < count[..., None]
    result = filled.long()
    result.masked_scatter_(filled, slots)
    return result.masked_fill_(~filled, -1)


def expand_index(i: Tensor, x: Tensor) -> Tensor:
    """Expand slots i (B, H, n) to indices (B, H, n, ...) into x (B, H, S, ...), for gather."""
    further = x.shape[3:]
    ones = [1] * len(further)
    narrow = i.view(*i.shape, *ones)
    return narrow.expand(*i.shape, *further)


def taken(x: Tensor, i: Tensor) -> Tensor:
    """Return slots i (B, H, n) of x (B, H, S, ...): (B, H, n, ...)."""
    # gather looks up every number; index_select copies whole rows of one long table, which was
    # 1.7 to 15 times as fast on one CPU.
    # With S = 4, slots 0 3 of head 0 and 1 2 of head 1 are rows 0 3 5 6 of the table.
    B, H, S = x.shape[:3]
    table = x.flatten(0, 2)
    first = torch.arange(B * H, device=x.device) * S
    rows = i + first.view(B, H, 1)
    rows = rows.flatten()
    chosen = table.index_select(0, rows)
    rest = x.shape[3:]
    return chosen.view(*i.shape, *rest)
