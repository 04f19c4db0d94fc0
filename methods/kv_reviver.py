"""KVReviver: a compressed cache that can be read back (Yuan et al., Peking University, ByteDance, preprint).

The newest tokens (Recent) and those with the most attention so far (Candidate) are kept as they are. All
others (Vague) are added into a few shared slots, a sketch (count_sketch.py). Before each attention they are
revived from it, with the noise of whatever shares their slots.

    Recent:    the newest tokens          Candidate: of the others, those with the largest Σ_{s ≤ t} α_s
    swap:      a Vague token with more than replace_rate times the lowest Candidate's Σ takes its place

Differs from the paper: the prompt is read with full attention and compressed at its end. The budget is one of
bytes, and the scores of all tokens ever seen are part of it, 4 bytes each: a very long text leaves no room in
the end (ValueError). The slack, which the paper does not give, is 8. No code was published. Its budgets by
layer are in theory/kv_reviver.py, a fairer reading of the sketch in kv_reviver_mean.py, our repair of it in
kv_reviver_shrunk.py.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.count_sketch import Sketch
from nanollm.cache import ALL, NEVER, LayerCache, Stored
from nanollm.check import check_seed
from nanollm.kernel_switch import kernel_for
from nanollm.ranking import expand_index, indices, rank


@dataclass(eq=False)
class KVReviver(LayerCache):
    """Algorithms 3 and 4. All that a head holds fits into the bytes of `budget` entries."""
    budget: int                # in entries (key, value, position) per key/value head
    vague: float = 0.1         # share of the budget for the sketch, at least a slot a row; 0: no sketch
    recent: float = 0.45       # share for the newest tokens; what is left is for candidates
    rows: int = 3              # of the sketch, r: 1 or 3
    slack: int = 8             # Recent grows by so many tokens before it is cut back
    replace_rate: float = 1.1  # a vague token with so many times the lowest candidate's score takes its place
    seed: int = 0              # of hashes and signs, which differ by layer
    watch = ALL
    kind = Sketch

    def __post_init__(self):
        super().__post_init__()
        if self.rows not in (1, 3) or self.slack < 0 or self.replace_rate < 1:
            raise ValueError(f"rows {self.rows} must be 1 or 3, slack {self.slack} at least 0 tokens and "
                             f"replace_rate {self.replace_rate} at least 1")
        if not (0 <= self.vague and 0 < self.recent and self.vague + self.recent < 1):
            raise ValueError(f"vague {self.vague} and recent {self.recent} are shares; "
                             "they must be above 0 and leave some for candidates")
        check_seed(self.seed, 1000)
        self.score = torch.zeros(0, 0, 0)  # (B, H, capacity): attention that each token ever seen has had
        self.sketch: Sketch | None = None
        self.found: Tensor | None = None   # vague tokens, while a step lasts
        self.in_recent = 0

    def vague_tokens(self) -> Tensor:
        """(B, H, a): all that have no slot of their own, in order. Found once a step, and then forgotten."""
        if self.found is None:
            free = torch.ones_like(self.score[:, :, :self.seen], dtype=torch.int64)
            free.scatter_(2, self.pos.long(), 0)
            place = free.cumsum(-1) * free  # 1, 2, … of the vague ones; all others go to place 0
            order = place.new_empty(*place.shape[:2], self.seen - self.length + 1)
            token = torch.arange(self.seen, device=place.device).expand_as(place)
            self.found = order.scatter_(2, place, token)[..., 1:]
        return self.found

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos)
        self.in_recent += k.shape[2]
        if self.seen == k.shape[2]:
            self.score = k.new_zeros(*k.shape[:2], self.seen, dtype=torch.float32)
        elif self.seen > self.score.shape[2]:  # grows by a tenth, as the slots do
            self.score = F.pad(self.score, (0, self.seen + self.seen // 10 - self.score.shape[2]))
        if self.sketch is not None:
            self.sketch.tokens = self.seen

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Algorithm 4: exact and revived tokens."""
        k, v, pos, _ = super().read()
        if self.sketch is not None and self.length < self.seen:
            tokens = self.vague_tokens()
            revived = *self.sketch.query(tokens, tokens), tokens
            k, v, pos = (torch.cat(x, 2) for x in zip((k, v, pos), revived))
        return k, v, pos, None

    def revives(self, q: Tensor) -> bool:
        """Whether q is one new token's, and some tokens are in the sketch."""
        return q.shape[2] == 1 and self.sketch is not None and self.length < self.seen

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """As `read` and attention, without a copy of the exact tokens beside the revived ones.

        On a GPU a kernel revives tile by tile, and there are no revived keys and values in memory.
        """
        if not self.revives(q):
            return super().attention(q, pos)
        if fast := kernel_for(q, "revive_attention", "attend_one"):
            return fast(self, q, self.sketch.x)

        tokens = self.vague_tokens()
        revived_k, revived_v = self.sketch.query(tokens, tokens)
        grouped = q[:, :, 0].unflatten(1, (self.k.shape[1], -1))  # (B, H, G, D)
        score = torch.cat((grouped @ self.k.mT, grouped @ revived_k.mT), -1) * q.shape[-1] ** -0.5
        p = score.softmax(-1, dtype=torch.float32).to(q)
        y = p[..., :self.length] @ self.v + p[..., self.length:] @ revived_v
        return y.view_as(q), p.unsqueeze(3)

    def observe(self, q: Tensor, p: Tensor):
        at = self.pos if p.shape[-1] == self.length else torch.cat((self.pos, self.vague_tokens()), 2)
        self.score.scatter_add_(2, at.long(), p.sum((2, 3), dtype=torch.float32))
        super().observe(q, p)

    def sizes(self, beside: int = 0) -> tuple[int, int, int]:
        """Slots of a row of the sketch, of Recent and of Candidate, where `beside` bytes are taken."""
        vector = 2 * self.k.shape[-1] * self.k.element_size()  # bytes of a key and a value
        all_bytes = self.budget * (vector + 4)
        width = max(int(self.vague * all_bytes // (self.rows * vector)), 1) if self.vague else 0
        free = all_bytes - self.rows * width * vector - beside - 4 * self.seen
        room = int(free // (vector + 4)) - self.slack
        newest = round(self.recent / (1 - self.vague) * room)
        if not 1 <= newest < room:
            raise ValueError(f"budget {self.budget} has no room for exact tokens beside {self.rows} rows, "
                             f"{self.seen} scores and a slack of {self.slack}; raise it, or lower these")
        return width, newest, room - newest

    def evict(self):
        """Algorithm 3: the candidates with the lowest scores leave, of equal ones the oldest."""
        width, newest, candidates = self.sizes()
        if self.length > newest + candidates + self.slack:
            self.in_recent = min(self.in_recent, newest)
            stays = rank(self.slot_scores(), self.pos) < self.in_recent + candidates
            if width:
                self.move_out(indices(~stays), width)
            self.keep(indices(stays))
            self.found = None
        if self.sketch is not None and self.length < self.seen:
            self.swap()
        self.found = None

    def slot_scores(self) -> Tensor:
        """Scores (B, H, S) of the slots, Recent's infinite."""
        score = self.score.gather(2, self.pos.long())
        return score.masked_fill(self.pos >= self.seen - self.in_recent, math.inf)

    def move_out(self, i: Tensor, width: int):
        """Add the slots i (B, H, n) to the sketch, which is made when it is first needed."""
        if self.sketch is None:
            self.sketch = self.kind(self.k, self.rows, width, 1000 * self.seed + self.layer)
        k, v = (x.gather(2, expand_index(i, x)) for x in (self.k, self.v))
        self.sketch.insert(self.pos.gather(2, i), k, v)

    def swap(self):
        """While a vague token beats the lowest candidate, its estimate takes that one's slot.

        What is deleted from the sketch is the estimate, so that the estimate's error stays in the sketch.
        """
        tokens = self.vague_tokens()
        while True:
            score, vague = self.slot_scores(), self.score.gather(2, tokens)
            lowest, highest = score.amin(-1, keepdim=True), vague.amax(-1, keepdim=True)
            slot = self.pos.masked_fill(score > lowest, NEVER).argmin(-1, keepdim=True)  # if equal: oldest
            best = tokens.masked_fill(vague < highest, -1).argmax(-1, keepdim=True)      # if equal: newest
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
                x.scatter_(2, expand_index(slot, x), torch.where(swaps.unsqueeze(-1), new, old))
            self.pos.scatter_(2, slot, torch.where(swaps, token.int(), out))
            tokens.scatter_(2, best, torch.where(swaps, out.long(), token))  # no longer in order

    def stored(self) -> list[Stored]:
        scores = self.score[:, :, :self.seen].numel()
        return super().stored() + [Stored(self.score, scores, follows=False)]

    def beside(self) -> list[Tensor]:
        return [] if self.sketch is None else [self.sketch.x]


variants = {"kv_reviver": KVReviver}
