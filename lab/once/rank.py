"""Spearman's rank correlation of gates' scores with KVzip's, by layer, on 8 held-out texts; and how many of KVzip's top 12.5 % they keep."""
import sys, glob, os, json
sys.path.insert(0, ".")
import torch
from safetensors.torch import load_file
from lab.registry import load, calibrated, pick
from lab.tasks import Tasks
from methods.baselines.kvzip_fast import lessons
torch.set_num_threads(1)
model, encoding = load("smollm2")
x, y = lessons(model, Tasks(encoding, "test"), documents=8, seed=5)
gates = {os.path.basename(f)[:-12]: load_file(f)["gates"] for f in sorted(glob.glob("lab/once/*.safetensors"))}
gates["shipped"] = calibrated(pick(["kvzip_fast"])["kvzip_fast"], model, encoding)["gates"]
L, N, H = y.shape
rank = lambda z: z.argsort(1).argsort(1).float()  # over tokens of all documents, per layer and head
ry = rank(y); ry = ry - ry.mean(1, keepdim=True)
for name, g in gates.items():
    s = x @ g[:, :-1] + g[:, -1:]
    rs = rank(s); rs = rs - rs.mean(1, keepdim=True)
    rho = (rs * ry).sum(1) / (rs.norm(dim=1) * ry.norm(dim=1))  # (L, H)
    kept = []
    for d in range(8):  # per document, over all layers and heads
        a, b = s[:, d*512:(d+1)*512].flatten(), y[:, d*512:(d+1)*512].flatten()
        for f in (.25, .125, .0625):
            k = int(f * len(a)); kept.append(len(set(a.topk(k).indices.tolist()) & set(b.topk(k).indices.tolist())) / k)
    kept = torch.tensor(kept).view(8, 3).mean(0)
    print(json.dumps(dict(name=name, mean=round(rho.mean().item(), 3), overlap=[round(v, 3) for v in kept.tolist()], by_layer=[round(v, 2) for v in rho.mean(1).tolist()])), flush=True)
