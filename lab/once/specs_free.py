"""Methods without training: scores from the first pass alone, budgets over all heads or from one calibration text."""
from dataclasses import dataclass
import math, os, torch
import torch.nn.functional as F
from nanollm.attention import probabilities
from nanollm.packed import PackedCache, keep_highest
from nanollm.cache import make_cache
from lab.registry import pick
from lab.tasks import Tasks

@dataclass(eq=False)
class Free(PackedCache):
    budget: int = 0
    rule: str = "spread"      # scores
    n: int = 32               # queries
    gap: int = 0              # queries closer than this do not count
    heads: object = None      # (L, H) shares of the budget, mean 1; None: one ranking over all heads
    recent: int = 8
    sinks: int = 4
    appends = True
    def __post_init__(self):
        super().__post_init__(); self.qs = []
    def observe(self, q, p):
        if not self.prompt_done: self.qs.append(q)
        super().observe(q, p)
    def score(self):
        k, v, T = self.k, self.v, self.k.shape[2]
        if self.rule in ("keydiff", "valuediff"):
            x = F.normalize((k if self.rule == "keydiff" else v).float(), dim=-1)
            return -(x * x.mean(2, keepdim=True)).sum(-1)
        if self.rule == "random": return torch.rand(k.shape[:3], generator=torch.Generator().manual_seed(self.layer))
        q = torch.cat(self.qs, 2)
        if self.rule == "end": at = torch.arange(T - self.n, T)
        elif self.rule == "spread": at = torch.linspace(0, T - 1, self.n).long()
        else: at = torch.arange(T)
        best = k.new_zeros(k.shape[:3])
        for some in at.split(32):
            p = probabilities(q[:, :, some], k, self.pos, None, some[None]).amax(2)  # (B, H, w, S)
            if self.gap: p = p * (some[:, None] - torch.arange(T) >= self.gap)
            best = torch.maximum(best, p.amax(2))
        return best
    @classmethod
    def compress(cls, model, tokens, caches):
        first, T = caches[0], tokens.shape[1]
        scores = [c.score() for c in caches]
        if first.heads is not None:
            out = []
            for c, s in zip(caches, scores):
                share = first.heads[c.layer]
                order = s.argsort(-1, descending=True).argsort(-1).float()  # rank in its head
                out.append(-order / (share.view(1, -1, 1) + 1e-6))
            scores = out
        scores = [s.masked_fill((c.pos < first.sinks) | (c.pos >= T - first.recent), math.inf) for c, s in zip(caches, scores)]
        keep_highest(caches, scores, first.budget)
        for c in caches: c.qs = []

def budgets(model, encoding, keep):
    """Each head's share of KVzip's entries on one training text."""
    KVzip = pick(["kvzip"])["kvzip"]
    text = torch.from_numpy(Tasks(encoding, "train").batch("plain", 0, 1, 512).tokens)
    caches = make_cache(model, KVzip, budget=512)
    model(text, caches)
    s = torch.stack([x[0] for x in KVzip.scores(model, text, caches)])  # (L, H, T)
    L, H, T = s.shape
    top = s.flatten().topk(int(keep * s.numel())).indices
    count = torch.zeros(L * H).scatter_add_(0, top // T, torch.ones(len(top))).view(L, H)
    return count / count.mean()

@torch.no_grad()
def specs(model, encoding):
    m = pick(["full", "snap_kv", "worst_query", "key_diff", "defensive_kv"])
    q = [.25]
    out = [("full", m["full"], {}, [None]), ("snap_kv", m["snap_kv"], {}, q), ("worst_query", m["worst_query"], {}, q)]
    b = budgets(model, encoding, .25)
    for n in 8, 32:
        out.append((f"end {n}, all heads", Free, dict(rule="end", n=n), q))
        out.append((f"spread {n}, all heads", Free, dict(rule="spread", n=n), q))
    for gap in 0, 32: out.append((f"every query, gap {gap}, all heads", Free, dict(rule="every", gap=gap), q))
    for rule in "keydiff", "valuediff", "random": 
        out.append((f"{rule}, equal", Free, dict(rule=rule, heads=torch.ones_like(b)), q))
        out.append((f"{rule}, budgets of one text", Free, dict(rule=rule, heads=b), q))
    for rule, n in ("end", 32), ("spread", 32), ("every", 0): out.append((f"{rule} {n}, budgets of one text", Free, dict(rule=rule, n=n, heads=b), q))
    out.append(("every gap 32, budgets of one text", Free, dict(rule="every", gap=32, heads=b), q))
    return out
