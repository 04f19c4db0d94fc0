"""Ours, beyond KVReviver: a sketch that is read back with less noise.

Signed: keys get signs as well. What is read back is then right on average over the hashes. The paper's keys
have a mean, and all that share a slot add theirs.

Shrunk: the mean of the vague tokens is kept exactly, and what is left of each token is sketched. What is read
is shrunk towards that mean by as much as collisions ask for (Wiener). With a tokens on b slots a row:

    k̂_J = mean + median_i(g_i(J) S_i[h_i(J)]) / (1 + variance of the median · (a − 1)/b),   v̂_J likewise

On average over the hashes its squared error is at most that of the mean alone: with one row by construction,
whatever the vectors are. A single token may be farther off, and swaps leave residues that spoil it.

One row: without a median reading is linear. So a new token attends to the slots, and nothing is read back.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from methods.count_sketch import Sketch
from methods.kv_reviver import KVReviver
from nanollm.cache import Stored
from nanollm.kernel_switch import kernel_for

MEDIAN = {1: 1.0, 3: 1 - math.sqrt(3) / math.pi}  # variance of the median of so many normals (Lemma 2)


class SignedSketch(Sketch):
    signed_keys = True

    def centred(self, bucket: Tensor, sign: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """What is read is mean + factor · median of x: x, mean (B, H, 1, 2D), factor. Here there is no mean.

        bucket and sign (B, H, a, r) are those of all tokens that are in.
        """
        return self.x, None, 1.0

    def signs(self, J: Tensor) -> Tensor:
        """±1, (B, H, n, r)."""
        return 1 - 2 * self.sign_bit(J)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to the slots of one row: nothing is read back, and nothing is approximated.

        q (B, H, G, D) over exact tokens k, v (B, H, S, D) and tokens J (B, H, a), all that are in → output
        (B, H, G, D) and probabilities (B, H, G, S + a). All tokens of a slot have its score, but for signs.
        The slot's value goes out once, with the sum of their signed weights:

            score of J   = q·mean + g(J) q·S[h(J)]
            Σ_J p_J v̂_J = Σ_J p_J · mean + Σ_slots (Σ_{J in slot} g(J) p_J) S
        """
        (*shape, D), bucket, sign = q.shape, self.bucket(J), self.signs(J)
        x, mean, factor = self.centred(bucket, sign)
        slot_k, slot_v = x.chunk(2, -1)
        at, sign = bucket.mT.expand(*shape, -1), sign.to(q).mT  # (B, H, G, a) and (B, H, 1, a)

        q = q * D ** -0.5
        vague = (factor * q @ slot_k.mT).gather(3, at) * sign
        if mean is not None:
            vague = vague + q @ mean[..., :D].mT
        p = torch.cat((q @ k.mT, vague), -1).softmax(-1, dtype=torch.float32).to(q)

        exact, vague = p.split((k.shape[2], J.shape[2]), -1)
        weight = vague.new_zeros(*shape, x.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))
        weight.scatter_add_(3, at, (vague * sign).to(weight))  # 16 bits would lose the sum of many
        y = exact @ v + factor * weight.to(q) @ slot_v
        if mean is not None:
            y = y + vague.sum(-1, keepdim=True) * mean[..., D:]
        return y, p


class ShrunkSketch(SignedSketch):

    def __init__(self, k: Tensor, rows: int, width: int, seed: int):
        super().__init__(k, rows, width, seed)
        exact = torch.promote_types(k.dtype, torch.float32)  # 16 bits would lose the mean of thousands
        self.sum = k.new_zeros(*k.shape[:2], 2 * k.shape[-1], dtype=exact)  # of all that is in

    def insert(self, J: Tensor, k: Tensor, v: Tensor, times: Tensor | float = 1.0):
        super().insert(J, k, v, times)
        self.sum += (torch.cat((k, v), -1) * times).to(self.sum).sum(2)

    def query(self, J: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Estimates of tokens J among all that are in (B, H, a); J itself, if not given."""
        among = J if among is None else among
        x, mean, factor = self.centred(self.bucket(among), self.signs(among))
        return (mean + factor * self.median(x, J)).chunk(2, -1)

    def centred(self, bucket: Tensor, sign: Tensor) -> tuple[Tensor, Tensor, float]:
        """What the mean has put into each slot is known: take it off."""
        a, mean = bucket.shape[2], (self.sum / bucket.shape[2]).unsqueeze(2).to(self.x)
        signs = self.x.new_zeros(self.x.shape[:3])
        signs.scatter_add_(2, bucket.flatten(2), sign.flatten(2).to(self.x))
        noise = MEDIAN[self.rows] * (a - 1) / self.width  # of (a − 1)/b others in a slot, to a signal of 1
        return self.x - mean * signs.unsqueeze(3), mean, 1 / (1 + noise)


@dataclass(eq=False)
class SignedReviver(KVReviver):
    kind = SignedSketch

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """By slots, if the sketch has one row, else by a kernel."""
        if not self.revives(q):
            return super().attention(q, pos)

        tokens = self.vague_tokens()
        if self.rows == 1:
            grouped = q[:, :, 0].unflatten(1, (self.k.shape[1], -1))  # (B, H, G, D)
            y, p = self.sketch.attend(grouped, self.k, self.v, tokens)
            return y.view_as(q), p.unsqueeze(3)
        if fast := kernel_for(q, "revive_attention", "attend_one"):
            return fast(self, q, *self.sketch.centred(self.sketch.bucket(tokens), self.sketch.signs(tokens)))
        return super().attention(q, pos)


@dataclass(eq=False)
class ShrunkReviver(SignedReviver):
    rows: int = 1
    kind = ShrunkSketch

    def sizes(self) -> tuple[int, int, int]:
        """The mean takes bytes of its own, in 32 bits."""
        mean = 2 * self.k.shape[-1] * max(self.k.element_size(), 4) if self.vague else 0
        return super().sizes(beside=mean)

    def stored(self) -> list[Stored]:
        mean = [] if self.sketch is None else [self.sketch.sum]
        return super().stored() + [Stored(x, x.numel(), follows=False) for x in mean]


variants = {"kv_reviver_shrunk": ShrunkReviver}
