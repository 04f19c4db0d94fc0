"""A count sketch (Charikar et al. 2002) of keys and values: tokens added into shared slots, and read back.

    insert J:  S_i[h_i(J)] += (k_J, g_i(J) v_J)  for i = 1 … r    h_i: token → 1 … b,  g_i: token → ±1
    query J:   median over i of (key of S_i[h_i(J)], g_i(J) · value of S_i[h_i(J)])

Algorithms 1 and 2 of KVReviver, whose cache is in kv_reviver.py. kv_reviver_mean.py reads means in place of
sums; kv_reviver_shrunk.py repairs the sketch.
"""
import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.kernel_switch import kernel_for
from nanollm.ranking import expand_index, taken

PRIME = 2 ** 31 - 1


class Sketch:
    """A count sketch: `x` (B, H, r·b, 2D) holds sums of tokens' [k | v], row after row of b slots.

    Over the seeds any four tokens fall independently, by cubic hashes. (Linear ones place tokens that follow
    one another far too evenly under some seeds, and estimates have a bias.)
    """
    signed_keys = False  # the paper's keys have no signs

    def __init__(self, k: Tensor, rows: int, width: int, seed: int):
        B, H, _, D = k.shape
        self.rows, self.width, self.x = rows, width, k.new_zeros(B, H, rows * width, 2 * D)
        self.flip = torch.tensor([-1 if self.signed_keys else 1] * D + [-1] * D).to(k)  # what −1 does
        coefficients = torch.randint(PRIME, (2, 4, rows), generator=torch.Generator().manual_seed(seed))
        self.bucket_by, self.sign_by = coefficients.to(k.device)
        self.tokens = 0  # more than any token's number; 0: has to be looked up, and a GPU waited for

    def number(self, J: Tensor, coefficients: Tensor) -> Tensor:
        """The cubic c₀J³ + c₁J² + c₂J + c₃ mod p of tokens J in every row, (B, H, n, r)."""
        last = self.tokens or (int(J.max()) + 1 if J.numel() else 1)
        token = torch.arange(last, device=J.device).unsqueeze(-1)
        f = torch.zeros_like(token)
        for c in coefficients:
            f = (f * token + c) % PRIME
        return F.embedding(J.long(), f)

    def bucket(self, J: Tensor) -> Tensor:
        """h: slots (B, H, n, r) of tokens J (B, H, n)."""
        first = torch.arange(self.rows, device=J.device) * self.width
        return first + self.number(J, self.bucket_by) % self.width

    def sign_bit(self, J: Tensor) -> Tensor:
        """1 where g(J) is −1, else 0, (B, H, n, r)."""
        return self.number(J, self.sign_by) & 1

    def sign(self, J: Tensor) -> Tensor:
        """g: ±1 for every number of tokens J in every row, (B, H, n, r, 2D)."""
        return torch.where(self.sign_bit(J).bool().unsqueeze(-1), self.flip, 1.0)

    def insert(self, J: Tensor, k: Tensor, v: Tensor, times: Tensor | float = 1.0):
        """Algorithm 1: add tokens J (B, H, n), k and v (B, H, n, D), `times` (B, H, n, 1): −1 deletes."""
        times = k.new_ones(*J.shape, 1) * times
        if fast := kernel_for(k, "revive_attention", "insert"):
            return fast(self.x, J, k, v, times.squeeze(-1), self.bucket_by, self.sign_by, self.signed_keys)

        x, total = torch.cat((k, v), -1) * times, self.x.to(torch.promote_types(self.x.dtype, torch.float32))
        for slot, sign in zip(self.bucket(J).unbind(3), self.sign(J).unbind(3)):
            total.scatter_add_(2, expand_index(slot, total), (x * sign).to(total))
        self.x.copy_(total)  # a 16-bit sum is rounded once, or a slot that is full would no longer change

    def query(self, J: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Algorithm 2: estimates of k and v (B, H, n, D) of tokens J (B, H, n).

        among: all tokens that are in, for a subclass that takes them into account.
        """
        return self.median(self.x, J).chunk(2, -1)

    def median(self, x: Tensor, J: Tensor) -> Tensor:
        """What tokens J find in slots x (B, H, r·b, 2D): the median over rows, (B, H, n, 2D)."""
        both = torch.cat((x, x * self.flip), 2)  # every slot as a token of sign 1 sees it, then of sign −1
        slots = self.bucket(J) + self.sign_bit(J) * x.shape[2]
        found = [taken(both, slot) for slot in slots.unbind(3)]
        if self.rows == 1:
            return found[0]
        one, two, three = found
        return one.clamp(torch.minimum(two, three), torch.maximum(two, three))


variants = {}  # what KVReviver evicts goes into it
