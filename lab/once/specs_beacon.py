"""BeaconKV's queries (arXiv 2609.04971): the newest ones and those farthest from each other, the maximum over them."""
from dataclasses import dataclass
import math
import sys

import torch

sys.path.insert(0, "lab/once")
from nanollm.attention import probabilities
from specs_free import Free, budgets


def farthest(x, n):
    """Return n places (B, H, n) of x (B, H, T, D): the last one, then each time the farthest from those chosen."""
    chosen = [x.new_full(x.shape[:2], x.shape[2] - 1, dtype=torch.long)]
    distance = x.new_full(x.shape[:3], math.inf)
    for _ in range(n - 1):
        last = x.gather(2, chosen[-1][..., None, None].expand(-1, -1, 1, x.shape[3]))
        distance = torch.minimum(distance, (x - last).norm(dim=-1))
        chosen.append(distance.argmax(-1))
    return torch.stack(chosen, -1)


@dataclass(eq=False)
class Beacon(Free):
    def score(self):
        k, T = self.k, self.k.shape[2]
        q = torch.cat(self.qs, 2)  # (B, H·G, T, D)
        B, H, G = k.shape[0], k.shape[1], q.shape[1] // k.shape[1]
        grouped = q.unflatten(1, (H, G))
        at = farthest(grouped.transpose(2, 3).flatten(3), self.n)
        at = torch.cat((at, torch.arange(T - 8, T).expand(B, H, -1)), -1)  # (B, H, w)
        best = k.new_zeros(k.shape[:3])
        for h in range(H):
            for b in range(B):
                i = at[b, h]
                some = grouped[b:b + 1, h, :, i]
                p = probabilities(some, k[b:b + 1, h:h + 1], self.pos[b:b + 1, h:h + 1], None, i[None])
                best[b, h] = p[0, 0].amax((0, 1))
        return best


@torch.no_grad()
def specs(model, encoding):
    share = budgets(model, encoding, .25)
    return [("beacon 32, all heads", Beacon, dict(n=32), [.25]),
            ("beacon 32, equal", Beacon, dict(n=32, heads=torch.ones_like(share)), [.25]),
            ("beacon 32, budgets of one text", Beacon, dict(n=32, heads=share), [.25])]
