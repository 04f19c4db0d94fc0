"""End-to-end gates: STE hard eviction, KL on questions. e2e.py OUT key=value..."""
import sys, time, json, math
sys.path.insert(0, ".")
import torch, torch.nn.functional as F
from torch import Tensor
from safetensors.torch import save_file, load_file
from lab.registry import load
from lab.tasks import Tasks
from nanollm.cache import make_cache, LayerCache
from nanollm.generate import prefill
from nanollm.model import rope, rotate
from methods.baselines.kvzip_fast import gate_inputs
opt = dict(threads=2, docs=64, T=512, steps=300, rows=4, n=64, rate=0.002, tau=1.0, budgets="0.0625,0.125,0.125,0.25", seed=0,
           kind="repeat", init="nanollm/calibrated/smollm2/FastKVzip.safetensors", dev=24, model="smollm2", every=50, lam=1, loss='kl', sinks=4, noq=0, recent=8)
out = sys.argv[1]
for a in sys.argv[2:]:
    k, v = a.split("=", 1); opt[k] = type(opt[k])(v)
print(opt, flush=True)
torch.set_num_threads(opt["threads"])
torch.manual_seed(opt["seed"])
model, encoding = load(opt["model"])
for p in model.parameters(): p.requires_grad_(False)
c = model.config; L, H = c.n_layers, c.n_kv_heads; D = c.head_dim or c.d_model // c.n_heads
SINKS, RECENT = opt["sinks"], opt["recent"]

class Rec(LayerCache):
    def attend(self, q, k, v, pos):
        y = super().attend(q, k, v, pos)
        self.inputs = getattr(self, "inputs", []) + [gate_inputs(self, q).half()]
        return y

def read(tokens):
    """x (L, B, T, n) half"""
    caches = [Rec() for _ in range(L)]
    caches = make_cache(model, Rec)
    prefill(model, tokens, caches, 64)
    return torch.stack([torch.cat(x.inputs, 1) for x in caches])

class Ctx:
    """Cache of one layer: context k, v, gate g (B,H,T) or None; question is written once."""
    def __init__(self, x, g):
        B, T, n = x.shape
        k, v = x[..., c.n_heads * D:].view(B, T, 2 * H, D).transpose(1, 2).split(H, 1)
        cos, sin = rope(model.freq, torch.arange(T)[None])
        self.k, self.v, self.g, self.seen, self.length = rotate(k, cos, sin), v, g, T, T
    def attend(self, q, k, v, pos):
        B, HG, n, _ = q.shape
        k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        T = self.length
        q = q.reshape(B, H, HG // H * n, D)
        s = (q @ k.mT * D ** -.5).view(B, H, HG // H, n, T + n)
        mask = torch.full((n, T + n), 0.).masked_fill_(torch.ones(n, T + n).triu(T + 1).bool(), -math.inf)
        p = (s + mask).softmax(-1)
        if self.g is not None:
            g = F.pad(self.g, (0, n), value=1.)[:, :, None, None]
            p = p * g
            p = p / p.sum(-1, keepdim=True)
        y = p.view(B, H, -1, T + n) @ v
        return y.view(B, HG, n, D)

def forward(tokens, x, gates, last):
    caches = [Ctx(x[i].float(), None if gates is None else gates[:, i]) for i in range(L)]
    T = x.shape[2]
    pos = torch.arange(T, T + tokens.shape[1])[None]
    h = model.embed(tokens); angles = rope(model.freq, pos)
    for block, cache in zip(model.blocks, caches):
        h = block(h, angles, pos, cache)
    return model.head(model.norm(h[:, -last:]))

def score(W, x):
    if opt["noq"]: W = torch.cat((torch.zeros_like(W[:, :c.n_heads * D]), W[:, c.n_heads * D:]), 1)  # x (L,B,T,n) → (B,L,H,T)
    return (x.flatten(1, 2).float() @ W[:, :-1] + W[:, -1:]).view(L, x.shape[1], x.shape[2], H).permute(1, 0, 3, 2)

def hard(s, b):
    """s (B,L,H,T) → threshold per document, and protected mask"""
    T = s.shape[-1]
    stay = torch.zeros(T, dtype=torch.bool); stay[:SINKS] = True; stay[T - RECENT:] = True
    s = s.masked_fill(stay, math.inf)
    n = int(b * T) * L * H
    theta = s.detach().flatten(1).kthvalue(s[0].numel() - n + 1, 1).values[:, None, None, None]
    return theta, (s >= theta)

def gate(s, b, tau):
    theta, keep = hard(s, b)
    if opt["lam"]:
        with torch.no_grad():
            w = torch.sigmoid((s - theta) / tau); w = w * (1 - w); w = w / w.sum((1, 2, 3), keepdim=True)
        theta = theta + (w * (s - s.detach())).sum((1, 2, 3), keepdim=True)
    soft = torch.sigmoid((s - theta) / tau)
    return keep.float() + (soft - soft.detach())

def questions(tasks, kind, docs, T, seed, rng):
    """list of (context tokens (B,T'), question tokens (B,n), last)"""
    if kind == "repeat":
        batch = tasks.batch("plain", seed, docs, T)
        return torch.from_numpy(batch.tokens)
    raise ValueError

train, test = Tasks(encoding, "train"), None
rows = opt["rows"]
def facts(task, seed, docs):
    parts = []
    for b in train.batches(task, seed, docs, opt["T"]):
        a = b.answers[0]
        t = torch.from_numpy(b.tokens)
        for i in range(0, len(t), rows):
            parts.append((read(t[i:i + rows, :b.question]), t[i:i + rows, b.question:a.stop], a.stop - a.start))
    return parts

t0 = time.time()
with torch.no_grad():
    import os
    def cached(name, make):
        f = f"lessons/{name}.pt"
        if not os.path.exists(f):
            os.makedirs("lessons", exist_ok=True); torch.save(make(), f + "~%d" % os.getpid()); os.rename(f + "~%d" % os.getpid(), f)
        return torch.load(f, mmap=True)
    dev = {task: cached(f"dev_{task}_{opt['T']}_{opt['dev']}", lambda: facts(task, 777, opt["dev"])) for task in ("needle", "pairs", "few_shot")}
    kinds = opt["kind"].split("+")
    data = []
    if "repeat" in kinds:
        plain = torch.from_numpy(train.batch("plain", opt["seed"], opt["docs"], opt["T"]).tokens)
        data.append(cached(f"repeat_{opt['T']}_{opt['docs']}", lambda: [(x, read(x)) for x in plain.split(rows)]))
    for task in kinds:
        if task != "repeat": data.append(cached(f"{task}_{opt['T']}_{opt['docs']}", lambda: facts(task, 1000 + opt["seed"], opt["docs"])))
print("read", time.time() - t0, flush=True)

def evaluate(W, budgets=(.0625, .125, .25)):
    r = {}
    with torch.no_grad():
        for task, parts in dev.items():
            for b in (None, *budgets):
                kl, right, n, ce = 0, 0, 0, 0
                for i, (x, q, last) in enumerate(parts):
                    g = None if b is None else gate(score(W, x), b, 1.)
                    lp = forward(q[:, :-1], x, g, last).log_softmax(-1)
                    if b is None: full.setdefault((task, i), lp)
                    kl += F.kl_div(lp, full[task, i], log_target=True, reduction="none").sum(-1).mean(1).sum().item()
                    right += (lp.argmax(-1) == q[:, -last:]).all(1).sum().item(); n += len(q); ce -= lp.gather(-1, q[:, -last:, None]).mean((1, 2)).sum().item()
                r[task, b] = (round(right / n, 3), round(kl / n, 3), round(ce / n, 3))
    return r
full = {}
W0 = load_file(opt["init"])["gates"]
t1 = time.time(); r = evaluate(W0); print("init", time.time() - t1, r, flush=True)

# normalised parametrisation
xs = torch.stack([p[-2 if len(p) == 2 else 0] if False else (p[1] if len(p) == 2 else p[0]) for p in [data[0][0]]])[0].float()
mean, spread = xs.flatten(1, 2).mean(1, keepdim=True), xs.flatten(1, 2).std(1, keepdim=True) + 1e-6
Wn = (W0[:, :-1] * spread.mT).clone(); bn = (W0[:, -1:] + mean @ W0[:, :-1]).clone()
def unnorm(): 
    w = Wn / spread.mT
    return torch.cat((w, bn - mean @ w), 1)
Wn.requires_grad_(); bn.requires_grad_()
adam = torch.optim.Adam([Wn, bn], opt["rate"], betas=(.9, .99))
rng = torch.Generator().manual_seed(opt["seed"])
budgets = [float(b) for b in opt["budgets"].split(",")]
log, t1 = [], time.time()
for step in range(opt["steps"]):
    frac = step / opt["steps"]
    for gparam in adam.param_groups: gparam["lr"] = opt["rate"] * min(1, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * frac))
    d = data[step % len(data)]; part = d[torch.randint(len(d), (1,), generator=rng).item()]
    b = budgets[torch.randint(len(budgets), (1,), generator=rng).item()]
    if len(part) == 2:
        tokens, x = part; T = tokens.shape[1]; n = opt["n"]
        start = torch.randint(0, T - n - 8, (1,), generator=rng).item()
        q = tokens[:, start:start + n + 8]; last = n
    else:
        x, q, last = part
    with torch.no_grad(): target = forward(q[:, :-1], x, None, last).log_softmax(-1)
    g = gate(score(unnorm(), x), b, opt["tau"])
    lp = forward(q[:, :-1], x, g, last).log_softmax(-1)
    kl = F.kl_div(lp, target, log_target=True, reduction="none").sum(-1).mean()
    if opt["loss"] == "ce": kl = F.nll_loss(lp.flatten(0, 1), q[:, -last:].flatten())
    if opt["loss"] == "both": kl = kl / 2 + F.nll_loss(lp.flatten(0, 1), q[:, -last:].flatten()) / 2
    Wn.grad, bn.grad = torch.autograd.grad(kl, (Wn, bn))
    adam.step()
    log.append((b, kl.item()))
    if step % 10 == 9:
        m = {bb: round(sum(k for b2, k in log[-50:] if b2 == bb) / max(1, sum(b2 == bb for b2, _ in log[-50:])), 3) for bb in sorted(set(budgets))}
        print(step + 1, round(time.time() - t1), m, flush=True)
    if (step + 1) % opt["every"] == 0 or step + 1 == opt["steps"]:
        W = unnorm().detach(); W[:, :c.n_heads * D * opt["noq"]] = 0; save_file(dict(gates=W.contiguous()), out)
        print("dev", step + 1, evaluate(W), flush=True)
