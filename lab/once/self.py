"""Texts that SmolLM2 writes itself, from BOS alone, and gates of them."""
import sys, time, torch
sys.path.insert(0, ".")
from safetensors.torch import save_file
from lab.registry import load
from lab.tasks import Tasks
from nanollm.generate import generate
from methods.baselines.kvzip_fast import lessons, fit
torch.set_num_threads(1)
model, encoding = load("smollm2")
t = time.time()
start = torch.full((16, 1), encoding.bos if encoding.bos is not None else 0)
out = generate(model, start, 511, temperature=1.0, seed=0)
tokens = torch.cat((start, out), 1)
print("written", time.time() - t, flush=True)
for i in range(3): print(repr(encoding.decode(tokens[i].tolist())[:500]), flush=True)
torch.save(tokens, "lab/once/self_tokens.pt")
class Own:
    def batch(self, task, seed, B, T):
        return type("B", (), dict(tokens=tokens[:B].numpy()))
x, y = lessons(model, Own(), documents=16)
for n in 16, 4:
    save_file(dict(gates=fit(x[:, :n*512], y[:, :n*512])), f"lab/once/self_{n}.safetensors")
    print(n, time.time() - t, flush=True)
