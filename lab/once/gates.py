"""Lessons and gates of SmolLM2 by kind and number of texts. gates.py KIND DOCS..."""
import sys, time, torch, unicodedata
sys.path.insert(0, ".")
from pathlib import Path
from safetensors.torch import save_file
from lab import corpus
from lab.registry import load
from lab.tasks import Tasks
from methods.baselines.kvzip_fast import lessons, fit
torch.set_num_threads(1)
model, encoding = load("smollm2")
kind, docs = sys.argv[1], [int(x) for x in sys.argv[2:]]
def filler():
    if kind == "train": return None
    if kind == "news": return open("news.txt").read()
    if kind == "source": return "\n\n".join(x for x in corpus.one_side([f.read_text("utf8", "ignore") for f in sorted(corpus.sources(Path(torch.__file__).parent / "nn"))], test=False))
    if kind == "lists": return "\n".join(f"U+{i:04X} {unicodedata.name(chr(i)).lower()}" for i in range(0x20, 0x3000) if unicodedata.name(chr(i), ""))
tasks = Tasks(encoding, "train", filler()) if kind != "train" else Tasks(encoding, "train")
t = time.time()
x, y = lessons(model, tasks, documents=max(docs))
print(kind, "lessons", max(docs), time.time() - t, x.shape, flush=True)
torch.save(dict(y=y[:, :8192], x=x[:, :8192]), f"lab/once/{kind}.pt")
for n in docs:
    t = time.time(); g = fit(x[:, :n * 512], y[:, :n * 512]); print(kind, n, "fit", time.time() - t, flush=True)
    save_file(dict(gates=g), f"lab/once/{kind}_{n}.safetensors")
