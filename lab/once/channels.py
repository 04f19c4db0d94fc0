import sys
sys.path.insert(0, ".")
import torch
from lab.registry import load
from lab.tasks import Tasks
from lab.replay import Recorder, record
from methods.baselines.quantized import quantise
from nanollm.cache import make_cache
from nanollm.model import rope, rotate
torch.set_num_threads(1); torch.set_grad_enabled(False)
for name in sys.argv[1:] or ["smollm2"]:
    model, encoding = load(name)
    tokens = torch.from_numpy(Tasks(encoding, "test").batch("plain", 0, 4, 512).tokens)
    rec = record(model, make_cache(model, Recorder), tokens)
    c = model.config; D, H = c.head_dim, c.n_kv_heads; G = c.n_heads // H
    def restored(x, bits, dim):
        code, zero, scale = quantise(x, bits, dim); return code * scale.float() + zero.float()
    stats = {}
    contribution = torch.zeros(c.n_layers, H, D)
    for l, r in enumerate(rec):
        q, k, v = r.q.unflatten(1, (H, G)), r.k, r.v
        cos, sin = rope(model.freq, r.pos)
        raw = rotate(k, cos, -sin)
        for bits in 2, 3, 4:
            for how in "rotated", "unrotated", "token":
                x = {"rotated": k, "unrotated": raw, "token": k}[how].unflatten(2, (-1, 32))
                y = restored(x, bits, 3).flatten(2, 3) if how != "token" else restored(k.unflatten(-1, (-1, 32)), bits, 4).flatten(3)
                if how == "unrotated": y = rotate(y, cos, sin)
                e = y - k
                # error of a score, in nats: sd over queries (later) and keys; sample 64 queries
                s = (q[:, :, :, 448:] @ e.unsqueeze(2).mT * D ** -.5)[..., :448]
                stats.setdefault((bits, how), []).append(s.std(dim=(0, 2, 3, 4)))
                if bits == 2 and how == "rotated":
                    contribution[l] = (e ** 2).mean((0, 2)) * (q ** 2).mean((0, 2, 3))
        stats.setdefault("score", []).append((q[:, :, :, 448:] @ k.unsqueeze(2).mT * D ** -.5)[..., :448].std(dim=(0, 2, 3, 4)))
        for bits in 2, 3, 4:
            y = restored(v.unflatten(-1, (-1, 32)), bits, 4).flatten(3); stats.setdefault((bits, "value"), []).append((y - v).norm(dim=-1).mean((0, 2)) / v.norm(dim=-1).mean((0, 2)))
    print(name)
    for key, x in stats.items(): x = torch.stack(x).flatten(); print(key, "median", round(x.median().item(), 3), "90 %", round(x.quantile(.9).item(), 3), "max", round(x.max().item(), 3))
    share = contribution / contribution.sum(-1, keepdim=True)
    top = share.sort(-1, descending=True).values
    print("share of the worst 1, 2, 4, 8, 16 channels, mean over heads:", [round(top[..., :n].sum(-1).mean().item(), 2) for n in (1, 2, 4, 8, 16)])
    print("by pair (channel mod D/2), mean over heads:", [round(x, 2) for x in (share[..., :D//2] + share[..., D//2:]).mean((0, 1)).tolist()])
    worst = torch.stack(stats[2, "rotated"]); print("worst heads:", [(divmod(i, H), round(worst.flatten()[i].item(), 2)) for i in worst.flatten().topk(8).indices.tolist()])
