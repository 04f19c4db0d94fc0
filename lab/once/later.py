"""later.py MODEL TASK DOCS OUT SPECS.py: right answers to later questions, one JSON line for each (label, keep). SPECS.py defines specs(model, encoding) → list of (label, Method, options, keeps)."""
import sys, json, time, os, runpy
sys.path.insert(0, os.environ.get("TREE", "."))
import torch
from lab.registry import load
from lab.tasks import Tasks
from lab.benchmark import cut
from lab.replay import Recorder, record, replay, CannotReplay
from nanollm.generate import prefill
from lab.evaluate import maker, retrieve, prompt_and_question
from nanollm.cache import make_cache, compress, bytes_in_16_bits
name, task, docs, out, spec = sys.argv[1:6]
T = int(os.environ.get("T", 512)); torch.set_num_threads(int(os.environ.get("THREADS", 1)))
model, encoding = load(name)
tasks = Tasks(encoding, "test", *( [open(os.environ["TEXT"]).read()] if "TEXT" in os.environ else []))
n = max(min(32, 2**14 // T), 1)
done = {(r["label"], r["keep"], r["task"]) for r in map(json.loads, open(out))} if os.path.exists(out) else set()
specs = [s for s in runpy.run_path(spec)["specs"](model, encoding)]
left = [(l, M, o, k) for l, M, o, ks in specs for k in ks if (l, k, task) not in done]
if not left: sys.exit()
right, full = {}, 1
with torch.no_grad():
    parts = [part for batch in tasks.batches(task, 0, int(docs), T) for part in cut(batch, n)]
    for i, part in enumerate(parts):
        t = time.time()
        caches = make_cache(model, Recorder)
        rec = [record(model, caches, x) for x in prompt_and_question(model, part)[1:]]
        print(task, i, len(parts), "recorded", round(time.time() - t, 1), flush=True)
        for l, M, o, k in left:
            t = time.time()
            make = maker(model, M, k, **o)
            try: y = retrieve(model, part, make, rec, settings=("agnostic",))["agnostic"]
            except CannotReplay: y = retrieve(model, part, make, settings=("agnostic",))["agnostic"]
            if i == 0:
                caches = make(part.question, torch.from_numpy(part.tokens[:, :part.question]))
                try: replay(rec[:1], caches)
                except CannotReplay: prefill(model, torch.from_numpy(part.tokens[:, :part.question]), caches)
                compress(model, torch.from_numpy(part.tokens[:, :part.question]), caches); right[l, k, "b"] = bytes_in_16_bits(caches)
                full = full if l != 'full' else right[l, k, 'b']
            right.setdefault((l, k), []).extend(y.tolist())
            right.setdefault((l, k, "s"), []).append(time.time() - t)
        del caches, rec
with open(out, "a") as f:
    for l, M, o, k in left:
        y = torch.tensor(right[l, k])
        f.write(json.dumps(dict(model=name, task=task, label=l, keep=k, n=len(y), share=right[l, k, 'b'] / full, right=y.mean().item(), se=(y.std() / len(y) ** .5).item(), seconds=round(sum(right[l, k, "s"]), 1), each=y.tolist())) + "\n")
