"""A count sketch of keys and values (Charikar et al. 2002): tokens are added into shared slots and
read back.

The sketch has r rows of b slots. A hash h_i gives each token one slot in row i, and a sign g_i.
Inserting a token adds its key and its signed value to its r slots. A query reads these slots and
takes the median.

    insert J:  S_i[h_i(J)] += (k_J, g_i(J) v_J)  for i = 1 … r    h_i: token → 1 … b,  g_i: token → ±1
    query J:   median over i of (key of S_i[h_i(J)], g_i(J) · value of S_i[h_i(J)])

These are Algorithms 1 and 2 of KVReviver, whose cache is in kv_reviver.py. The file
ours/kv_reviver_shrunk.py reads means instead of sums, and repairs the sketch.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import wide
from nanollm.ranking import expand_index

PRIME = 2**31 - 1


class Sketch:
    """A count sketch. `x` (B, H, r·b, 2D) holds sums of the tokens' [k | v], row after row of b slots.

    The hashes are cubic polynomials, so any four tokens hash independently over the seeds. Linear
    hashes would spread consecutive tokens far too evenly under some seeds, which biases the
    estimates.
    """

    signed_keys = False  # the paper gives signs to values only

    def __init__(self, k: Tensor, rows: int, width: int, seed: int):
        B, H, _, D = k.shape
        self.rows, self.width, self.x = (
            rows,
            width,
            k.new_zeros(B, H, rows * width, 2 * D),
        )
        # factors for sign −1
        self.flip = torch.tensor([-1 if self.signed_keys else 1] * D + [-1] * D).to(k)
        coefficients = torch.randint(
            PRIME, (2, 4, rows), generator=torch.Generator().manual_seed(seed)
        )
        self.bucket_by, self.sign_by = coefficients.to(k.device)
        # above every token's number; 0: `above` computes it, which waits for the GPU
        self.tokens = 0

    def above(self, J: Tensor) -> int:
        """Return a number above all tokens J."""
        return self.tokens or (int(J.max()) + 1 if J.numel() else 1)

    def number(self, J: Tensor, coefficients: Tensor) -> Tensor:
        """Return c₀J³ + c₁J² + c₂J + c₃ mod p in every row: tokens J (B, H, n) → (B, H, n, r)."""
        token = torch.arange(self.above(J), device=J.device).unsqueeze(-1)
        f = torch.zeros_like(token)
        for c in coefficients:
            f = (f * token + c) % PRIME
        return F.embedding(J.long(), f)

    def bucket(self, J: Tensor) -> Tensor:
        """Return h(J), the slots of tokens J (B, H, n): (B, H, n, r)."""
        first = torch.arange(self.rows, device=J.device) * self.width
        return first + self.number(J, self.bucket_by) % self.width

    def sign_bit(self, J: Tensor) -> Tensor:
        """Return 1 where g(J) is −1, else 0: (B, H, n, r)."""
        return self.number(J, self.sign_by) & 1

    def sign(self, J: Tensor) -> Tensor:
        """Return the factors ±1 of every component of tokens J in every row, (B, H, n, r, 2D)."""
        return torch.where(self.sign_bit(J).bool().unsqueeze(-1), self.flip, 1.0)

    def insert(self, J: Tensor, k: Tensor, v: Tensor, times: Tensor | float = 1.0):
        """Add tokens J (B, H, n) with k and v (B, H, n, D) to the sketch (Algorithm 1).

        times (B, H, n, 1) multiplies k and v; −1 deletes a token.
        """
        x, total = torch.cat((k, v), -1) * times, wide(self.x)
        for slot, sign in zip(self.bucket(J).unbind(3), self.sign(J).unbind(3)):
            total.scatter_add_(2, expand_index(slot, total), (x * sign).to(total))
        # round to 16 bits once: one by one, small terms would vanish in a large sum
        self.x.copy_(total)
        if not self.x.isfinite().all():
            raise ValueError(
                f"a slot's sum, {total.abs().max():.0f}, exceeds {self.x.dtype}; use bfloat16"
            )

    def query(self, J: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return estimates of k and v, (B, H, n, D) each, for tokens J (B, H, n) (Algorithm 2).

        among (B, H, a): all tokens in the sketch, J if not given; only subclasses use it.
        """
        return torch.stack([*self.revive(J, among)]).view(*J.shape, -1).chunk(2, -1)

    def revive(self, J: Tensor, among: Tensor | None = None) -> Iterable[Tensor]:
        """Yield the estimates [k | v] of each head, (n, 2D). A head fits into the processor's cache."""
        return self.median(self.x, J)

    def median(self, x: Tensor, J: Tensor) -> Iterator[Tensor]:
        """Yield each head's median over rows of the slots x (B, H, r·b, 2D) of tokens J: (n, 2D)."""
        # all slots as read with sign 1, then as read with sign −1
        both = torch.cat((x, x * self.flip), 2)
        token = torch.arange(self.above(J), device=J.device).view(1, 1, -1)
        slots = self.bucket(token) + self.sign_bit(token) * x.shape[2]
        slots = slots[0, 0].T.contiguous()  # (r, tokens): the same in all heads
        for head, j in zip(both.flatten(0, 1), J.flatten(0, 1).long()):
            one, *others = (F.embedding(row[j], head) for row in slots)
            if others:
                two, three = others
                one = one.clamp(torch.minimum(two, three), torch.maximum(two, three))
            yield one


variants = {}  # not a method: KVReviver stores evicted tokens in it
