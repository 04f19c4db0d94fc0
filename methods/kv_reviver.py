"""KVReviver: a compressed cache that can be read back (Yuan et al., Peking University, ByteDance).

The newest tokens (Recent) and the tokens with the most attention so far (Candidate) have slots of
their own. All other tokens (Vague) are added into a few shared slots, a sketch. Before each
attention the Vague tokens are estimated ("revived") from the sketch. Tokens that share a slot
disturb one another's estimates.

    Recent:    the newest tokens
    Candidate: of the others, those with the largest Σ_{s ≤ t} α_s
    swap:      a Vague token with more than replace_rate times the lowest Candidate's Σ takes
               its place

The sketch (Charikar et al. 2002) has r rows of b slots. A hash h_i gives each token one slot in row
i, and g_i gives it a sign:

    insert J:  S_i[h_i(J)] += (k_J, g_i(J) v_J)  for i = 1 … r
    query J:   median over i of (key of S_i[h_i(J)], g_i(J) · value of S_i[h_i(J)])
    h_i: token → 1 … b,  g_i: token → ±1

The paper's Algorithms 1 and 2 are `Sketch.insert` and `Sketch.query`, Algorithm 3 is
`KVReviver.evict`, Algorithm 4 `SketchSlots.read`.

Differs from the paper:
- By default the prompt is read with full attention and compressed at its end.
- The budget counts bytes. It includes the scores of all tokens ever seen, 4 bytes each, so a very
  long text finally leaves no room (ValueError).
- The paper gives no value of its slack; here it is 8.
- The paper divides the budget among layers by the Fisher information, without a formula (R5). Here
  all layers have the same budget.

No code was published. Related files: theory/sketch_error.py has the paper's error bound,
ours/kv_reviver_shrunk.py has fairer readings of the sketch, and our repair of it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.attention import wide
from nanollm.cache import ALL, NEVER, Method, Slots
from nanollm.check import check_seed
from nanollm.ranking import expand_index, indices, rank
from nanollm.slots import Stored, all_live

PRIME = 2**31 - 1


# ---- the sketch --------------------------------------------------------------------------------


class Sketch:
    """A count sketch. `x` (B, H, r·b, 2D) holds sums of the tokens' [k | v], row after row.

    The hashes are cubic polynomials, so any four tokens hash independently over the seeds. Linear
    hashes would spread consecutive tokens far too evenly under some seeds, which biases the
    estimates.
    """

    signed_keys = False  # the paper gives signs to values only

    def __init__(
        self,
        k: Tensor,
        rows: int,
        width: int,
        seed: int,
    ):
        B, H, _, D = k.shape
        self.rows = rows
        self.width = width
        self.x = k.new_zeros(B, H, rows * width, 2 * D)
        key_sign = -1 if self.signed_keys else 1
        self.flip = torch.tensor([key_sign] * D + [-1] * D).to(k)  # factors for sign −1
        generator = torch.Generator().manual_seed(seed)
        coefficients = torch.randint(PRIME, (2, 4, rows), generator=generator)
        self.bucket_by, self.sign_by = coefficients.to(k.device)
        # above every token's number; 0: `above` computes it, which waits for the GPU
        self.tokens = 0

    def above(self, J: Tensor) -> int:
        """Return a number above all tokens J."""
        if self.tokens:
            return self.tokens
        if not J.numel():
            return 1
        return int(J.max()) + 1

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
        negative = self.sign_bit(J).bool()
        return torch.where(negative.unsqueeze(-1), self.flip, 1.0)

    def insert(
        self,
        J: Tensor,
        k: Tensor,
        v: Tensor,
        times: Tensor | float = 1.0,
    ):
        """Add tokens J (B, H, n) with k and v (B, H, n, D) to the sketch (Algorithm 1).

        times (B, H, n, 1) multiplies k and v; −1 deletes a token.
        """
        x = torch.cat((k, v), -1) * times
        total = wide(self.x)
        slots = self.bucket(J)
        signs = self.sign(J)
        for row in range(self.rows):
            slot = expand_index(slots[..., row], total)
            signed = x * signs[:, :, :, row]
            total.scatter_add_(2, slot, signed.to(total))
        # round only once, if x has 16 bits: else small terms would vanish in a large sum
        self.x.copy_(total)
        if not self.x.isfinite().all():
            most = total.abs().max()
            raise ValueError(
                f"a slot's sum, {most:.0f}, exceeds {self.x.dtype}; use bfloat16"
            )

    def query(
        self,
        J: Tensor,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return estimates of k and v, (B, H, n, D) each, for tokens J (B, H, n) (Algorithm 2).

        among (B, H, a): all tokens in the sketch, J if not given; only subclasses use it.
        """
        among = J if among is None else among
        heads = torch.stack([*self.revive(J, among)])  # (B·H, n, 2D)
        return heads.view(*J.shape, -1).chunk(2, -1)

    def revive(
        self,
        J: Tensor,
        among: Tensor,
    ) -> Iterable[Tensor]:
        """Yield the estimates [k | v] of each head, (n, 2D), one head at a time to save memory."""
        return self.median(self.x, J)

    def median(
        self,
        x: Tensor,
        J: Tensor,
    ) -> Iterator[Tensor]:
        """Yield each head's median over rows of slots x (B, H, r·b, 2D) of tokens J: (n, 2D)."""
        # A table of all slots as read with sign 1, then as read with sign −1. Example: token 5 has
        # slot 2 of 4 and sign −1, so it reads row 4 + 2 of the table.
        table = torch.cat((x, x * self.flip), 2)
        token = torch.arange(self.above(J), device=J.device)
        token = token.view(1, 1, -1)
        slots = self.bucket(token) + self.sign_bit(token) * x.shape[2]
        slots = slots[0, 0].T.contiguous()  # (r, tokens): the same in all heads

        tables = table.flatten(0, 1)
        for head, j in zip(tables, J.flatten(0, 1).long()):
            read = [F.embedding(row[j], head) for row in slots]
            if self.rows == 1:
                yield read[0]
            else:
                yield median_of_three(*read)

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose bytes count."""
        return [self.x]


def median_of_three(
    a: Tensor,
    b: Tensor,
    c: Tensor,
) -> Tensor:
    """Return the elementwise median: a, unless both others lie on one side of it."""
    return a.clamp(torch.minimum(b, c), torch.maximum(b, c))


# ---- the store: exact tokens in slots, all others in the sketch --------------------------------


class SketchSlots(Slots):
    """Recent and Candidate tokens have slots; the Vague ones are in the sketch."""

    def __init__(self, *place):
        super().__init__(*place)
        # (B, H, capacity): attention that each token ever seen got so far
        self.score = torch.zeros(0, 0, 0)
        self.sketch: Sketch | None = None
        # result of `vague_tokens` during one step
        self.cached_vague: Tensor | None = None
        self.in_recent = 0  # tokens in Recent

    def vague_tokens(self) -> Tensor:
        """Return all tokens without a slot of their own, (B, H, a), in order."""
        if self.cached_vague is None:
            # Example: of tokens 0 … 3, tokens 0 and 2 have slots. vague = 0 1 0 1, so place =
            # 0 1 0 2: token 1 goes to place 1, token 3 to place 2; place 0 collects the others and
            # is cut off.
            score = self.score[:, :, : self.seen]
            vague = torch.ones_like(score, dtype=torch.int64)
            vague.scatter_(2, self.pos.long(), 0)
            place = vague.cumsum(-1) * vague
            order = place.new_empty(*place.shape[:2], self.seen - self.length + 1)
            token = torch.arange(self.seen, device=place.device).expand_as(place)
            self.cached_vague = order.scatter_(2, place, token)[..., 1:]
        return self.cached_vague

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ):
        super().write(k, v, pos)
        self.in_recent += k.shape[2]
        if self.seen == k.shape[2]:
            self.score = k.new_zeros(*k.shape[:2], self.seen, dtype=torch.float32)
        elif self.seen > self.score.shape[2]:  # grows by a tenth, like the slots
            more = self.seen + self.seen // 10 - self.score.shape[2]
            self.score = F.pad(self.score, (0, more))
        if self.sketch is not None:
            self.sketch.tokens = self.seen

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the tokens in slots, then the revived ones (Algorithm 4)."""
        k, v, pos, _ = super().read()
        if self.revives:
            tokens = self.vague_tokens()
            revived_k, revived_v = self.sketch.query(tokens, tokens)
            k = torch.cat((k, revived_k), 2)
            v = torch.cat((v, revived_v), 2)
            pos = torch.cat((pos, tokens), 2)
        return k, v, pos, None

    @property
    def revives(self) -> bool:
        """Return whether the sketch contains tokens."""
        return self.sketch is not None and self.length < self.seen

    def attention(
        self,
        q: Tensor,
        pos: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Attend from one new token head by head, so that one head is revived at a time.

        Several new tokens attend to what `read` returns.
        """
        if q.shape[2] > 1 or not self.revives:
            return super().attention(q, pos)
        D = q.shape[-1]
        tokens = self.vague_tokens()
        # (B·H, G, D)
        B, H, _, _ = self.k.shape
        q_h = wide(q) * D**-0.5
        q_h = q_h.view(B * H, -1, D)
        exact = q_h @ wide(self.k).flatten(0, 1).mT
        rows = []
        outputs = []
        for i, revived in enumerate(self.sketch.revive(tokens, tokens)):
            k, v = revived.chunk(2, 1)
            score = torch.cat((exact[i], q_h[i] @ wide(k).T), 1)
            p = score.softmax(-1)
            rows.append(p)
            outputs.append(p[:, self.length :].to(v) @ v)
        p = torch.stack(rows)
        y = p[..., : self.length].to(q) @ self.v.flatten(0, 1)
        y = torch.stack(outputs) + y
        return y.view_as(q), p.view(B, H, -1, 1, p.shape[-1])

    def crop(self, n: int):
        seen = self.seen
        super().crop(n)
        self.in_recent -= seen - n
        self.score[:, :, n:] = 0

    def slot_scores(self) -> Tensor:
        """Return the scores of the slots, (B, H, S); infinite in Recent."""
        score = self.score.gather(2, self.pos.long())
        return score.masked_fill(self.pos >= self.seen - self.in_recent, math.inf)

    def add(self, i: Tensor, width: int):
        """Add the slots i (B, H, n) to the sketch; the first call makes the sketch."""
        method = self.method
        if self.sketch is None:
            seed = 1000 * method.seed + self.index
            self.sketch = method.kind(self.k, method.rows, width, seed)
        k = self.k.gather(2, expand_index(i, self.k))
        v = self.v.gather(2, expand_index(i, self.v))
        self.sketch.insert(self.pos.gather(2, i), k, v)

    def stored(self) -> list[Stored]:
        scores = self.score[:, :, : self.seen].numel()
        stored = [*super().stored(), Stored(self.score, scores, model_dtype=False)]
        if self.sketch is not None:
            stored += map(all_live, self.sketch.tensors())
        return stored


# ---- the method --------------------------------------------------------------------------------


@dataclass
class KVReviver(Method):
    """After each eviction, all that a head stores fits into the bytes of `budget` entries."""

    budget: int  # bytes, in entries (key, value, position) per key/value head
    # fraction of the budget for the sketch, at least a slot per row; 0: none
    vague: float = 0.1
    recent: float = 0.45  # fraction for the newest tokens; the rest is for candidates
    rows: int = 3  # rows of the sketch, r: 1 or 3
    slack: int = 8  # tokens by which Recent grows before it is cut back
    # factor by which a vague token's score must be higher to take a slot
    replace_rate: float = 1.1
    seed: int = 0  # of hashes and signs, which differ by layer
    watch = ALL
    store = SketchSlots
    kind = Sketch

    def __post_init__(self):
        if self.rows not in (1, 3) or self.slack < 0 or self.replace_rate < 1:
            raise ValueError(
                f"rows {self.rows} must be 1 or 3, slack {self.slack} at least 0 tokens and "
                f"replace_rate {self.replace_rate} at least 1"
            )
        fractions = self.vague + self.recent
        if not (0 <= self.vague and 0 < self.recent and fractions < 1):
            raise ValueError(
                f"vague is {self.vague} and recent {self.recent}; these fractions of the budget "
                "must be at least 0 and above 0, and their sum below 1"
            )
        check_seed(self.seed, 1000)

    def observe(
        self,
        layer: SketchSlots,
        q: Tensor,
        p: Tensor,
    ):
        tokens = layer.pos
        if p.shape[-1] > layer.length:  # the sketch was read, too
            tokens = torch.cat((tokens, layer.vague_tokens()), 2)
        new = p.sum((2, 3), dtype=torch.float32)
        layer.score.scatter_add_(2, tokens.long(), new)

    def sizes(self, layer: SketchSlots) -> tuple[int, int, int]:
        """Return three numbers of slots: in a row of the sketch, in Recent, in Candidate."""
        # bytes of one key and one value
        vector = 2 * layer.k.shape[-1] * layer.k.element_size()
        all_bytes = self.budget * (vector + 4)
        width = 0
        if self.vague:
            width = max(int(self.vague * all_bytes // (self.rows * vector)), 1)
        free = (
            all_bytes - self.rows * width * vector - self.beside(layer) - 4 * layer.seen
        )
        room = int(free // (vector + 4)) - self.slack
        newest = round(self.recent / (1 - self.vague) * room)
        if not 1 <= newest < room:
            raise ValueError(
                f"budget {self.budget} has no room for exact tokens beside {self.rows} rows, "
                f"{layer.seen} scores and a slack of {self.slack}; raise it, or lower the others"
            )
        return width, newest, room - newest

    def beside(self, layer: SketchSlots) -> int:
        """Return the bytes of a head that the sketch takes beside its slots (here none)."""
        return 0

    def evict(self, layer: SketchSlots):
        """Move the candidates with the lowest scores into the sketch (Algorithm 3).

        Of equal ones the oldest moves. Then exchange vague tokens and candidates.
        """
        width, newest, candidates = self.sizes(layer)
        if layer.length > newest + candidates + self.slack:
            layer.in_recent = min(layer.in_recent, newest)
            stays = rank(layer.slot_scores(), layer.pos) < layer.in_recent + candidates
            if width:
                layer.add(indices(~stays), width)
            layer.keep(indices(stays))
            layer.cached_vague = None
        if layer.revives:
            self.swap(layer)
        layer.cached_vague = None

    def swap(self, layer: SketchSlots):
        """Exchange vague tokens and candidates while a vague token beats the lowest candidate.

        The vague token's estimate takes the candidate's slot. The estimate, not the true value, is
        deleted from the sketch, so the error of the estimate stays in the sketch.
        """
        tokens = layer.vague_tokens()
        while True:
            score = layer.slot_scores()
            vague = layer.score.gather(2, tokens)
            lowest = score.amin(-1, keepdim=True)
            highest = vague.amax(-1, keepdim=True)
            swaps = lowest * self.replace_rate < highest  # (B, H, 1)
            if not swaps.any():
                return

            # ties: the oldest candidate, the newest vague token
            slot = layer.pos.masked_fill(score > lowest, NEVER).argmin(-1, keepdim=True)
            best = tokens.masked_fill(vague < highest, -1).argmax(-1, keepdim=True)
            token = tokens.gather(2, best)
            out = layer.pos.gather(2, slot)
            where = expand_index(slot, layer.k)
            leaving_k = layer.k.gather(2, where)
            leaving_v = layer.v.gather(2, where)
            revived_k, revived_v = layer.sketch.query(token, tokens)

            swaps_k = swaps.unsqueeze(-1)
            times = swaps_k.to(layer.k)
            layer.sketch.insert(token, revived_k, revived_v, times=-times)
            layer.sketch.insert(out, leaving_k, leaving_v, times=times)
            k = torch.where(swaps_k, revived_k, leaving_k)
            v = torch.where(swaps_k, revived_v, leaving_v)
            layer.k.scatter_(2, where, k)
            layer.v.scatter_(2, where, v)
            layer.pos.scatter_(2, slot, torch.where(swaps, token.int(), out))
            # `tokens` is not sorted any more
            tokens.scatter_(2, best, torch.where(swaps, out.long(), token))


variants = {"kv_reviver": KVReviver}
