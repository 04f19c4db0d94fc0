"""KVReviver: a compressed cache that can be read back (Yuan et al., Peking University, ByteDance,
preprint).

The newest tokens (Recent) and the tokens with the most attention so far (Candidate) are kept
exactly. All other tokens (Vague) are added into a few shared slots, a sketch (count_sketch.py).
Before each attention the Vague tokens are estimated ("revived") from the sketch. Tokens that share
a slot disturb one another's estimates.

    Recent:    the newest tokens          Candidate: of the others, those with the largest Σ_{s ≤ t} α_s
    swap:      a Vague token with more than replace_rate times the lowest Candidate's Σ takes its place

Differs from the paper:
- The prompt is read with full attention and compressed at its end.
- The budget counts bytes. It includes the scores of all tokens ever seen, 4 bytes each, so a very
  long text finally leaves no room (ValueError).
- The paper gives no slack; here it is 8.

No code was published. Related files: theory/sketch_error.py has the paper's budgets by layer,
ours/kv_reviver_shrunk.py has fairer readings of the sketch, and our repair of it.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.baselines.count_sketch import Sketch
from nanollm.attention import wide
from nanollm.cache import ALL, NEVER, LayerCache, Stored
from nanollm.check import check_seed
from nanollm.ranking import expand_index, indices, rank


@dataclass(eq=False)
class KVReviver(LayerCache):
    """Algorithms 3 and 4. Everything that a head stores fits into the bytes of `budget` entries."""

    # bytes, in entries (key, value, position) per key/value head
    budget: int
    # fraction of the budget for the sketch, at least a slot per row; 0: no sketch
    vague: float = 0.1
    # fraction for the newest tokens; the rest is for candidates
    recent: float = 0.45
    rows: int = 3  # rows of the sketch, r: 1 or 3
    slack: int = 8  # tokens by which Recent grows before it is cut back
    # a vague token with this many times the lowest candidate's score replaces it
    replace_rate: float = 1.1
    seed: int = 0  # of hashes and signs, which differ by layer
    watch = ALL
    kind = Sketch

    def __post_init__(self):
        super().__post_init__()
        if self.rows not in (1, 3) or self.slack < 0 or self.replace_rate < 1:
            raise ValueError(
                f"rows {self.rows} must be 1 or 3, slack {self.slack} at least 0 tokens and "
                f"replace_rate {self.replace_rate} at least 1"
            )
        if not (0 <= self.vague and 0 < self.recent and self.vague + self.recent < 1):
            raise ValueError(
                f"vague is {self.vague} and recent {self.recent}; these fractions of the budget "
                "must be at least 0 and above 0, and their sum below 1"
            )
        check_seed(self.seed, 1000)
        # (B, H, capacity): attention that each token ever seen got so far
        self.score = torch.zeros(0, 0, 0)
        self.sketch: Sketch | None = None
        # result of `vague_tokens` during one step
        self.cached_vague: Tensor | None = None
        self.in_recent = 0  # tokens in Recent

    def vague_tokens(self) -> Tensor:
        """Return all tokens without a slot of their own, (B, H, a), in order; computed once per step."""
        if self.cached_vague is None:
            # Example: of tokens 0 … 3, tokens 0 and 2 have slots. vague = 0 1 0 1, so place = 0 1 0
            # 2: token 1 goes to place 1, token 3 to place 2; place 0 collects the others and is cut
            # off.
            vague = torch.ones_like(self.score[:, :, : self.seen], dtype=torch.int64)
            vague.scatter_(2, self.pos.long(), 0)
            place = vague.cumsum(-1) * vague
            order = place.new_empty(*place.shape[:2], self.seen - self.length + 1)
            token = torch.arange(self.seen, device=place.device).expand_as(place)
            self.cached_vague = order.scatter_(2, place, token)[..., 1:]
        return self.cached_vague

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos)
        self.in_recent += k.shape[2]
        if self.seen == k.shape[2]:
            self.score = k.new_zeros(*k.shape[:2], self.seen, dtype=torch.float32)
        elif self.seen > self.score.shape[2]:  # grows by a tenth, like the slots
            self.score = F.pad(
                self.score, (0, self.seen + self.seen // 10 - self.score.shape[2])
            )
        if self.sketch is not None:
            self.sketch.tokens = self.seen

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the exact tokens, then the revived ones (Algorithm 4)."""
        k, v, pos, _ = super().read()
        if self.sketch is not None and self.length < self.seen:
            tokens = self.vague_tokens()
            revived = *self.sketch.query(tokens, tokens), tokens
            k, v, pos = (torch.cat(x, 2) for x in zip((k, v, pos), revived))
        return k, v, pos, None

    def revives(self, q: Tensor) -> bool:
        """Return whether q is a single new token and the sketch contains tokens."""
        return q.shape[2] == 1 and self.sketch is not None and self.length < self.seen

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to exact and revived tokens head by head, so that only one head is revived at a time."""
        if not self.revives(q):
            return super().attention(q, pos)
        tokens = self.vague_tokens()
        q_h = (wide(q) * q.shape[-1] ** -0.5).view(
            q.shape[0] * self.k.shape[1], -1, q.shape[-1]
        )
        # of q_h (B·H, G, D)
        exact, rows, outputs = q_h @ wide(self.k).flatten(0, 1).mT, [], []
        for one, score, revived in zip(q_h, exact, self.sketch.revive(tokens, tokens)):
            k, v = revived.chunk(2, 1)
            p = torch.cat((score, one @ wide(k).T), 1).softmax(-1)
            rows.append(p)
            outputs.append(p[:, self.length :].to(v) @ v)
        p = torch.stack(rows)
        y = torch.stack(outputs) + p[..., : self.length].to(q) @ self.v.flatten(0, 1)
        return y.view_as(q), p.view(*self.k.shape[:2], -1, 1, p.shape[-1])

    def observe(self, q: Tensor, p: Tensor):
        revived = p.shape[-1] > self.length
        tokens = torch.cat((self.pos, self.vague_tokens()), 2) if revived else self.pos
        self.score.scatter_add_(2, tokens.long(), p.sum((2, 3), dtype=torch.float32))
        super().observe(q, p)

    def crop(self, n: int):
        self.in_recent -= self.seen - n
        super().crop(n)
        self.score[:, :, n:] = 0

    def sizes(self, beside: int = 0) -> tuple[int, int, int]:
        """Return three numbers of slots: in a row of the sketch, in Recent, in Candidate.

        beside: bytes per head that something else takes.
        """
        # bytes of one key and one value
        vector = 2 * self.k.shape[-1] * self.k.element_size()
        all_bytes = self.budget * (vector + 4)
        width = (
            max(int(self.vague * all_bytes // (self.rows * vector)), 1)
            if self.vague
            else 0
        )
        free = all_bytes - self.rows * width * vector - beside - 4 * self.seen
        room = int(free // (vector + 4)) - self.slack
        newest = round(self.recent / (1 - self.vague) * room)
        if not 1 <= newest < room:
            raise ValueError(
                f"budget {self.budget} has no room for exact tokens beside {self.rows} rows, "
                f"{self.seen} scores and a slack of {self.slack}; raise it, or lower the others"
            )
        return width, newest, room - newest

    def evict(self):
        """Move the candidates with the lowest scores into the sketch (Algorithm 3); ties: the oldest."""
        width, newest, candidates = self.sizes()
        if self.length > newest + candidates + self.slack:
            self.in_recent = min(self.in_recent, newest)
            stays = rank(self.slot_scores(), self.pos) < self.in_recent + candidates
            if width:
                self.move_out(indices(~stays), width)
            self.keep(indices(stays))
            self.cached_vague = None
        if self.sketch is not None and self.length < self.seen:
            self.swap()
        self.cached_vague = None

    def slot_scores(self) -> Tensor:
        """Return the scores of the slots, (B, H, S); infinite in Recent."""
        score = self.score.gather(2, self.pos.long())
        return score.masked_fill(self.pos >= self.seen - self.in_recent, math.inf)

    def move_out(self, i: Tensor, width: int):
        """Add the slots i (B, H, n) to the sketch; the first call makes the sketch."""
        if self.sketch is None:
            self.sketch = self.kind(
                self.k, self.rows, width, 1000 * self.seed + self.layer
            )
        k, v = (x.gather(2, expand_index(i, x)) for x in (self.k, self.v))
        self.sketch.insert(self.pos.gather(2, i), k, v)

    def swap(self):
        """Exchange vague tokens and candidates while a vague token beats the lowest candidate.

        The vague token's estimate takes the candidate's slot. The estimate, not the true value, is
        deleted from the sketch, so the error of the estimate stays in the sketch.
        """
        tokens = self.vague_tokens()
        while True:
            score, vague = self.slot_scores(), self.score.gather(2, tokens)
            lowest, highest = score.amin(-1, keepdim=True), vague.amax(-1, keepdim=True)
            # ties: the oldest
            slot = self.pos.masked_fill(score > lowest, NEVER).argmin(-1, keepdim=True)
            # ties: the newest
            best = tokens.masked_fill(vague < highest, -1).argmax(-1, keepdim=True)
            swaps = lowest * self.replace_rate < highest  # (B, H, 1)
            if not swaps.any():
                return

            token, out = tokens.gather(2, best), self.pos.gather(2, slot)
            times = swaps.unsqueeze(-1).to(self.k)
            revived = self.sketch.query(token, tokens)
            leaving = [x.gather(2, expand_index(slot, x)) for x in (self.k, self.v)]
            self.sketch.insert(token, *revived, times=-times)
            self.sketch.insert(out, *leaving, times=times)
            for x, old, new in zip((self.k, self.v), leaving, revived):
                x.scatter_(
                    2, expand_index(slot, x), torch.where(swaps.unsqueeze(-1), new, old)
                )
            self.pos.scatter_(2, slot, torch.where(swaps, token.int(), out))
            # not sorted any more
            tokens.scatter_(2, best, torch.where(swaps, out.long(), token))

    def stored(self) -> list[Stored]:
        scores = self.score[:, :, : self.seen].numel()
        return super().stored() + [Stored(self.score, scores, model_dtype=False)]

    def beside(self) -> list[Tensor]:
        return [] if self.sketch is None else [self.sketch.x]


variants = {"kv_reviver": KVReviver}
