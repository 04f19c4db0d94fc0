"""KVReviver: a compressed cache that can be read back (Yuan et al., Peking University and ByteDance, preprint).

The newest tokens (Recent) and those with the most attention (Candidate) are kept as they are; every other token is added
into a few shared slots of a sketch (Vague), from where it is revived, with the noise of all that shares its slots, before
each attention.

    insert J:  S_i[h_i(J)] += (k_J, g_i(J) v_J)  for i = 1 … r        h_i: token → 1 … b,  g_i: token → ±1
    query J:   median over i of (key of S_i[h_i(J)], g_i(J) · value of S_i[h_i(J)])

Differs from the paper: the prompt is read with full attention and compressed at its end; the budget is one of bytes, so the
scores of all tokens ever seen, which the paper keeps beside it, take their bytes from the exact part, 4 for each token: a very
long text leaves no room in the end, which is a ValueError. The slack, which the paper does not give, is 8. No code was published.

Beyond the paper: kind="signed" gives keys their signs too; kind="shrunk" also sketches what is left when the mean of the
vague tokens, kept exactly, is taken off, and shrinks what it reads towards that mean as far as collisions ask for (Wiener).
Until swaps leave residues, its squared error is, on average over the hashes, at most that of the mean alone: with one row by
construction, whatever the vectors are. A single token may be farther off. vague=0 has no sketch. One row is linear, so that
a new token attends to its slots and nothing is read back.
"""
from dataclasses import dataclass
from functools import partial
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm import check_seed
from nanollm.cache import ALL, NEVER, LayerCache, indices, kernel_for, rank, spread

PRIME = 2 ** 31 - 1
MEDIAN = {1: 1.0, 3: 1 - math.sqrt(3) / math.pi}  # variance of the median of so many standard normals (Lemma 2)


class Sketch:
    """A count sketch of vectors (B, H, n, D): `x` (B, H, r·b, 2D) holds sums of [k | v], row after row of b slots.

    h(J) = (f(J) mod p) mod b and, drawn apart, g(J) = ±1 by the lowest bit of such a number, with cubic f and p = 2³¹ − 1:
    over the seeds, any four tokens fall independently, and evenly but for b/p. (Linear f place tokens that follow one
    another far too evenly under some seeds, and estimates have a bias.)
    """

    def __init__(self, k: Tensor, rows: int, width: int, kind: str, seed: int):
        B, H, _, D = k.shape
        self.rows, self.width, self.kind = rows, width, kind
        self.tokens = 0  # more than any token's number, if that is known; 0: it has to be looked up, and a GPU waited for
        self.x = k.new_zeros(B, H, rows * width, 2 * D)
        exact = torch.promote_types(k.dtype, torch.float32)  # 16 bits would lose the mean of thousands
        self.sum = k.new_zeros(B, H, 2 * D if kind == "shrunk" else 0, dtype=exact)  # of all that is in
        self.flip = k.new_full((2 * D,), -1)                            # what a sign of −1 does
        if kind == "paper":
            self.flip[:D] = 1
        self.place_by, self.sign_by = torch.randint(PRIME, (2, 4, rows), generator=torch.Generator().manual_seed(seed)).to(k.device)

    def number(self, J: Tensor, coefficients: Tensor) -> Tensor:
        """f(J) mod p in every row, (B, H, n, r)."""
        token = torch.arange(self.tokens or (int(J.max()) + 1 if J.numel() else 1), device=J.device).unsqueeze(-1)
        f = torch.zeros_like(token)
        for c in coefficients:
            f = (f * token + c) % PRIME
        return f[J.long()]

    def place(self, J: Tensor) -> Tensor:
        """Slots (B, H, n, r) of tokens J (B, H, n)."""
        return self.number(J, self.place_by) % self.width + torch.arange(self.rows, device=J.device) * self.width

    def negative(self, J: Tensor) -> Tensor:
        """1 where the sign of tokens J is −1, else 0, (B, H, n, r)."""
        return self.number(J, self.sign_by) % 2

    def sign(self, J: Tensor) -> Tensor:
        """±1 for every number of tokens J in every row, (B, H, n, r, 2D); by the paper's rule, the keys' are all 1."""
        return torch.where(self.negative(J).bool().unsqueeze(-1), self.flip, 1.0)

    def insert(self, J: Tensor, k: Tensor, v: Tensor, times: Tensor | float = 1.0):
        """Add tokens J (B, H, n) with k and v (B, H, n, D), each `times` (B, H, n, 1): −1 deletes, 0 does nothing."""
        times = k.new_ones(*J.shape, 1) * times
        x = torch.cat((k, v), -1) * times
        if insert := kernel_for(k, "revive_attention", "insert"):
            insert(self.x, J, k, v, times.squeeze(-1), *self.cubics())
        else:
            total = self.x.to(self.sum)  # in 16 bits a sum is rounded once, or a slot that is full enough would no longer change
            for i, sign in zip(self.place(J).unbind(3), self.sign(J).unbind(3)):
                total.scatter_add_(2, spread(i, total), (x * sign).to(total))
            self.x.copy_(total)
        if self.kind == "shrunk":
            self.sum += x.to(self.sum).sum(2)

    def query(self, J: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Estimates of k and v (B, H, n, D) of tokens J (B, H, n) among all that are in (B, H, a); J itself, if not given."""
        place, negative = self.place(J), self.negative(J)
        x, mean, factor = self.centred(*(place, negative) if among is None else (self.place(among), self.negative(among)))
        x = torch.cat((x, x * self.flip), 2)  # every slot as a token with a sign of 1 sees it, and one with −1
        x = [x.gather(2, spread(row, x)) for row in (place + negative * self.x.shape[2]).unbind(3)]
        if self.rows == 1:
            x, = x
        else:  # the median of three, without a sort
            one, two, three = x
            x = torch.maximum(torch.minimum(one, two), torch.minimum(torch.maximum(one, two), three))
        if mean is not None:
            x = mean + x * factor
        return x.chunk(2, -1)

    def centred(self, place: Tensor, negative: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """What is read is mean + factor · median of x. If nothing is shrunk, None, 1 and x as it is; place and negative (B, H, a, r)
        are those of all tokens that are in."""
        if self.kind != "shrunk":
            return self.x, None, 1.0
        a = place.shape[2]  # what the mean (B, H, 1, 2D) has put into each slot is known: take it off
        mean, sign = (self.sum / a).unsqueeze(2).to(self.x), (1 - 2 * negative).to(self.x)
        x = self.x - mean * self.x.new_zeros(self.x.shape[:3]).scatter_add_(2, place.flatten(2), sign.flatten(2)).unsqueeze(3)
        return x, mean, 1 / (1 + MEDIAN[self.rows] * (a - 1) / self.width)  # signal to signal and noise: of the others, (a − 1)/b a slot

    def attend(self, q: Tensor, k: Tensor, v: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """Ours, for one row: q (B, H, G, D) over exact tokens k, v (B, H, S, D) and tokens J (B, H, a) → output (B, H, G, D) and
        probabilities (B, H, G, S + a), without reading J back. A row without a median is linear: all tokens of a slot have its
        score, but for signs, and the slot's value goes out once, with the sum of their signed weights.

            score of J = q·mean + g(J) q·S[h(J)],   Σ_J p_J v̂_J = Σ_J p_J · mean + Σ_slots (Σ_{J in slot} g(J) p_J) S
        """
        place, negative = self.place(J), self.negative(J)
        x, mean, factor = self.centred(place, negative)
        q = q * q.shape[-1] ** -0.5
        of_slot, of_value = x.chunk(2, -1)
        G, sign = q.shape[2], (1 - 2 * negative).to(q).mT                                       # (B, H, 1, a)
        at = place.mT.expand(-1, -1, G, -1)
        vague = (factor * q @ of_slot.mT).gather(3, at) * (1 if self.kind == "paper" else sign)  # (B, H, G, a)
        if mean is not None:
            vague = vague + q @ mean[..., :q.shape[-1]].mT
        p = torch.cat((q @ k.mT, vague), -1).softmax(-1, dtype=torch.float32).to(q)
        exact, vague = p.split((k.shape[2], J.shape[2]), -1)
        of_slots = vague.new_zeros(*q.shape[:3], x.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))
        of_slots = of_slots.scatter_add(3, at, (vague * sign).to(of_slots))  # 16 bits would lose the sum of many
        y = exact @ v + factor * of_slots.to(q) @ of_value
        if mean is not None:
            y = y + vague.sum(-1, keepdim=True) * mean[..., q.shape[-1]:]
        return y, p

    def cubics(self) -> tuple[Tensor, Tensor, bool]:
        """Of places and of signs, (4, r) each, and whether keys have signs: what kernels hash by."""
        return self.place_by, self.sign_by, self.kind != "paper"

    def solve(self, J: Tensor) -> tuple[Tensor, Tensor]:
        """Ours: k and v (B, H, a, D) of all tokens J (B, H, a) that are in, by least squares: nearest to the mean (kind="shrunk";
        otherwise to 0) of all that would give this sketch. Exact while no token's signs in the slots are a combination of
        others'; with more tokens than slots they are, and then no reader is exact."""
        x, mean, found = self.x.to(self.sum), (self.sum / J.shape[2]).unsqueeze(2), []  # no pseudo-inverse in 16 bits
        for x, sign, near in zip(x.chunk(2, -1), self.sign(J)[..., [0, -1]].to(x).unbind(-1), mean.chunk(2, -1)):
            pattern = x.new_zeros(*J.shape, x.shape[2]).scatter_add_(3, self.place(J), sign)  # (B, H, a, r·b): part in each slot
            if self.kind != "shrunk":
                near = x.new_zeros(())
            found.append((near + torch.linalg.pinv(pattern.mT) @ (x - pattern.sum(2).unsqueeze(-1) * near)).to(self.x))
        return *found,


@dataclass(eq=False)
class KVReviver(LayerCache):
    """Algorithms 1 to 4. Everything it holds fits into the bytes of `budget` entries (key, value, position) a head."""
    budget: int                  # in entries per key/value head
    vague: float = 0.1           # share of the budget for the sketch, which has one slot a row at least; 0: no sketch
    recent: float = 0.45         # share for the newest tokens; what is left is for candidates
    kind: str = "paper"          # "paper", "signed" or "shrunk"
    rows: int = 3                # of the sketch, r: 1 or 3
    slack: int = 8               # Recent grows by so many tokens before it is cut back
    replace_rate: float = 1.1    # a vague token is swapped in for the lowest candidate if its score is higher by this factor
    shares: tuple[float, ...] | None = None  # of the layers, of all budgets together (`fisher_shares`); None: all alike
    seed: int = 0                # of hashes and signs, which differ by layer
    watch = ALL

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in ("paper", "signed", "shrunk") or self.rows not in MEDIAN:
            raise ValueError(f"kind {self.kind!r} must be 'paper', 'signed' or 'shrunk', and rows {self.rows} 1 or 3")
        if not (0 <= self.vague and 0 < self.recent and self.vague + self.recent < 1):
            raise ValueError(f"vague {self.vague} and recent {self.recent} are shares; their sum must leave some for candidates")
        if self.slack < 0 or self.replace_rate < 1:
            raise ValueError(f"slack {self.slack} must be at least 0 tokens and replace_rate {self.replace_rate} at least 1")
        if self.shares is not None and not (min(self.shares, default=-1) >= 0 and abs(sum(self.shares) - 1) < 1e-3):
            raise ValueError(f"shares {self.shares!r:.60} of all budgets together must be at least 0 and add up to 1")
        check_seed(self.seed, 1000)
        self.score: Tensor | None = None  # (B, H, capacity): attention that each token ever seen has had; a token is its position
        self.sketch: Sketch | None = None
        self.in_recent = 0

    def link(self, layer: int, layers: int, *place):
        super().link(layer, layers, *place)
        if self.shares is not None:
            if len(self.shares) != layers:
                raise ValueError(f"{len(self.shares)} shares for {layers} layers; give one each")
            self.budget = round(self.budget * layers * self.shares[layer])

    def vague_tokens(self) -> Tensor:
        """(B, H, a): all that have no slot of their own, in order."""
        held = torch.zeros_like(self.score[:, :, :self.seen], dtype=torch.uint8).scatter_(2, self.pos.long(), 1)
        return held.argsort(dim=-1, stable=True)[..., :self.seen - self.length]

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        super().write(k, v, pos)
        if self.score is None:
            self.score = k.new_zeros(*k.shape[:2], self.seen, dtype=torch.float32)
        elif self.seen > self.score.shape[2]:  # grows by a tenth, as the slots do
            self.score = F.pad(self.score, (0, self.seen + self.seen // 10 - self.score.shape[2]))
        if self.sketch is not None:
            self.sketch.tokens = self.seen
        self.in_recent += k.shape[2]

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Algorithm 4: the exact tokens, then the revived ones."""
        exact = super().read()
        if self.length == self.seen or self.sketch is None:
            return exact
        tokens = self.vague_tokens()
        return *(torch.cat(x, 2) for x in zip(exact[:3], (*self.sketch.query(tokens), tokens))), None

    def decode(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor] | None:
        """Without revived keys and values in memory: by slots, if the sketch has one row, else by a kernel."""
        if self.length == self.seen or self.sketch is None:
            return super().decode(q, pos)
        H, tokens = self.k.shape[1], self.vague_tokens()
        grouped = q[:, :, 0].unflatten(1, (H, -1))  # (B, H, G, D)
        if self.rows == 1:
            y, p = self.sketch.attend(grouped, self.k, self.v, tokens)
        elif fast := kernel_for(q, "revive_attention", "attend_one"):
            hashes = (self.sketch.place(tokens), self.sketch.negative(tokens)) if self.kind == "shrunk" else (None, None)
            y, p = fast(grouped, self.k, self.v, tokens, *self.sketch.centred(*hashes), *self.sketch.cubics())
        else:
            return None
        return y.view_as(q), p.unsqueeze(3)

    def observe(self, q: Tensor, p: Tensor):
        at = self.pos
        if p.shape[-1] > self.length:
            at = torch.cat((at, self.vague_tokens()), 2)
        self.score.scatter_add_(2, at.long(), p.sum((2, 3), dtype=torch.float32))
        super().observe(q, p)

    def sizes(self) -> tuple[int, int, int]:
        """Slots of a row of the sketch, of Recent and of Candidate: what fits beside a score for every token seen."""
        numbers, size = 2 * self.k.shape[-1], self.k.element_size()
        entry, of_sum = numbers * size, numbers * max(size, 4)  # an entry without its position, and the sum of such in 32 bits
        all_bytes = self.budget * (entry + 4)
        width = max(int(self.vague * all_bytes // (self.rows * entry)), 1) if self.vague else 0
        held = self.rows * width * entry + (of_sum if width and self.kind == "shrunk" else 0) + 4 * self.seen
        room = int((all_bytes - held) // (entry + 4)) - self.slack
        newest = round(self.recent / (1 - self.vague) * room)
        if not 1 <= newest < room:
            raise ValueError(f"budget {self.budget} has no room for a sketch of {self.rows} rows, the scores of {self.seen} tokens, "
                             f"a slack of {self.slack} and recent and candidate tokens; raise it, or lower rows or slack")
        return width, newest, room - newest

    def forget(self):
        """Algorithm 3."""
        if not self.seen:  # the prompt was one token
            return
        width, newest, candidates = self.sizes()
        if self.length > newest + candidates + self.slack:
            self.in_recent = min(self.in_recent, newest)
            self.move_out(self.length - self.in_recent - candidates, width)
        if self.sketch is not None and self.length < self.seen:
            self.swap()

    def slot_scores(self) -> Tensor:
        """Scores (B, H, S) of the slots, Recent's infinite."""
        score = self.score.gather(2, self.pos.long())
        return score.masked_fill(self.pos >= self.seen - self.in_recent, math.inf)

    def move_out(self, n: int, width: int):
        """The n candidates with the lowest scores go into the sketch; of equal ones the oldest."""
        if self.sketch is None and width:
            self.sketch = Sketch(self.k, self.rows, width, self.kind, 1000 * self.seed + self.layer)
            self.sketch.tokens = self.seen
        stays = rank(self.slot_scores(), self.pos) < self.length - n
        if self.sketch is not None:
            leave = indices(~stays)
            self.sketch.insert(self.pos.gather(2, leave), *(x.gather(2, spread(leave, x)) for x in (self.k, self.v)))
        self.keep(indices(stays))

    def swap(self):
        """As long as a vague token beats the lowest candidate, its estimate takes that one's slot. What is deleted from the
        sketch is the estimate, so the estimate's error stays in the sketch."""
        while True:
            score, tokens = self.slot_scores(), self.vague_tokens()
            vague = self.score.gather(2, tokens)
            slot = self.pos.masked_fill(score > score.amin(-1, keepdim=True), NEVER).argmin(-1, keepdim=True)
            best = tokens.masked_fill(vague < vague.amax(-1, keepdim=True), -1).argmax(-1, keepdim=True)
            swaps = score.gather(2, slot) * self.replace_rate < vague.gather(2, best)  # (B, H, 1)
            if not swaps.any():
                return
            token, times = tokens.gather(2, best), swaps.unsqueeze(-1).to(self.k)
            revived = self.sketch.query(token, tokens)
            leaving = [x.gather(2, spread(slot, x)) for x in (self.k, self.v)]
            out = self.pos.gather(2, slot)
            self.sketch.insert(token, *revived, times=-times)
            self.sketch.insert(out, *leaving, times=times)
            for x, old, new in zip((self.k, self.v), leaving, revived):
                x.scatter_(2, spread(slot, x), torch.where(swaps.unsqueeze(-1), new, old))
            self.pos.scatter_(2, slot, torch.where(swaps, token.int(), out))

    def bytes(self) -> tuple[int, int]:
        live, allocated = super().bytes()
        sketch = 0 if self.sketch is None else self.sketch.x.nbytes + self.sketch.sum.nbytes
        scores = 0 if self.score is None else self.score[:, :, :self.seen].nbytes
        return live + sketch + scores, allocated + sketch + (0 if self.score is None else self.score.nbytes)


# ---- layer budgets, and the appendix -----------------------------------------------------------------------------


def fisher_shares(model, tokens: Tensor, even: float = 0.0) -> tuple[float, ...]:
    """Each layer's share of all budgets, by the Fisher information of its W_K and W_V on calibration texts (B, T).

    That is the mean of squared gradients of log p(text), over texts and entries; the two matrices' are added. `even` of the
    whole is shared out evenly (ours), so that no layer is left with too little to hold anything.
    """
    if not 0 <= even <= 1:
        raise ValueError(f"even {even} is a share of all budgets, 0 to 1")
    weights = [block.attention.qkv.weight for block in model.blocks]
    fisher = torch.zeros(len(weights))
    for text in tokens.split(1):
        with torch.enable_grad():
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        for layer, (block, grad) in enumerate(zip(model.blocks, torch.autograd.grad(loss, weights))):
            fisher[layer] += sum(part.square().mean() for part in block.attention.split(grad)[1:])
    return tuple((even / len(weights) + (1 - even) * fisher / fisher.sum()).tolist())


def relative_error(found: Tensor, true: Tensor) -> float:
    """Squared error over the variance of true (B, H, n, D) about its mean over tokens, mean over heads: the mean alone is at 1."""
    spread_out = (true - true.mean(2, keepdim=True)).square().sum((2, 3))
    return ((found - true).square().sum((2, 3)) / spread_out).mean().item()


def take_out(sketch: Sketch, J: Tensor, k: Tensor, v: Tensor, n: int, true: bool = False):
    """Delete the first n of the tokens J (B, H, a) that are in a sketch, one by one: their estimates, as swaps do, or the `true`
    k and v. Returns the relative error of the values still in after each, and what was deleted, k and v (B, H, n, D)."""
    errors, deleted = [], []
    for i in range(n):
        one = J[:, :, i:i + 1]
        deleted.append((k[:, :, i:i + 1], v[:, :, i:i + 1]) if true else sketch.query(one, J[:, :, i:]))
        sketch.insert(one, *deleted[-1], times=-1.0)
        errors.append(relative_error(sketch.query(J[:, :, i + 1:])[1], v[:, :, i + 1:]))
    return errors, [torch.cat(x, 2) for x in zip(*deleted)]


def activations(p: Tensor, kept: Tensor, least: float = 0.005) -> Tensor:
    """Figure 2: how often each token that is not kept, (B, H, S) of bool, is activated: gets more than `least` of the attention
    p (B, H, G, w, S) of a later query; (B, H, S). As in the paper, that is attention as it would be if nothing were dropped."""
    return (p > least).sum((2, 3)) * ~kept


def median_moments(factor: float, points: int = 200_001) -> tuple[float, float]:
    """∫ w and ∫ x² w of the density w = factor · Φ(1 − Φ)φ that Lemmas 1 and 2 give the median of three standard normals.

    They print the factor 3; the density is that of 6, which integrates to 1.
    """
    x = torch.linspace(-10, 10, points, dtype=torch.float64)
    below = torch.special.ndtr(x)
    density = factor * below * (1 - below) * (-x ** 2 / 2).exp() / math.sqrt(2 * math.pi)
    return torch.trapezoid(density, x).item(), torch.trapezoid(x ** 2 * density, x).item()


def collision_variance(a: float, width: int, rows: int) -> float:
    """Expected squared error of a revived number whose a − 1 fellows have mean 0 and variance 1, where slots hold many: signs
    on, r rows of b slots. Above 1, the 0 that is read off an empty sketch is nearer."""
    return MEDIAN[rows] * (a - 1) / width


def printed_bound(a: float, slots: int) -> tuple[float, float]:
    """The appendix: the variance of a revived number exceeds πa/N (of single ones) with a probability below e^(−a/N), N = r·b."""
    return math.pi * a / slots, math.exp(-a / slots)


def score_variance(p: Tensor, variance: float) -> Tensor:
    """The appendix: Var Δp_i ≈ σ_A² [p_i²(1 − p_i)² + Σ_{j ≠ i} p_j² p_i²], of attention weights p (..., S) whose logits have
    independent errors of that variance; first order in them."""
    square = p.square()
    return variance * (square * (1 - p).square() + square * (square.sum(-1, keepdim=True) - square))


variants = {"kv_reviver": KVReviver, "kv_reviver_shrunk": partial(KVReviver, kind="shrunk", rows=1)}
