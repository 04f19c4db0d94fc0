# %% [markdown]
# # KVzip: which entries will a question need that nobody has asked yet?
#
# TODO

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from functools import partial
import matplotlib.pyplot as plt
import torch

from experiments import render
from methods.kvzip import KVzip
from methods.kvzip_fast import FastKVzip, fit, lessons
from methods.snap_kv import SnapKV
from nanollm import SHIPPED, TINY, tokenizer
from nanollm.cache import make_cache
from nanollm.commands import plot
from nanollm.commands.text_table import text_table
from nanollm.generate import end_prompt, prefill
from nanollm.hf import checkpoint
from nanollm.measure.evaluate import maker, retrieve
from nanollm.measure.replay import Recorder, record
from nanollm.measure.tasks import Tasks

# %%
torch.set_grad_enabled(False)
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config
batch = tasks.batch("needle", seed=0, B=32, T=512)  # four facts in each text; one is asked for
snap_kv = partial(SnapKV, window_size=8)
for name, Method in {"SnapKV": snap_kv, "KVzip": KVzip}.items():
    right = retrieve(model, batch, maker(model, Method, 0.25))
    print(f"{name:6} keeps 25 %. Facts found if the question is in the prompt: "
          f"{right['aware'].mean():.2f}; if it comes later: {right['agnostic'].mean():.2f}")

# %% [markdown]
# ## The reread

# %%
def reread(text):
    """Attention that each query of the second time gives each entry of the first, (L, H, G, n, n)."""
    n, attention = text.shape[1], []
    recording = record(model, make_cache(model, Recorder), torch.cat((text, text), 1))
    for layer in recording:
        q = layer.q[0, :, n:].unflatten(0, (c.n_kv_heads, -1))  # (H, G, n, D): the second time
        logits = q @ layer.k[0, :, None].mT / c.head_dim ** 0.5  # (H, G, n, 2n): all that came before
        future = layer.pos[0] > layer.pos[0, n:, None]
        attention.append(logits.masked_fill(future, -torch.inf).softmax(-1)[..., :n])
    return torch.stack(attention)


text = torch.from_numpy(batch.tokens)[:1, :batch.question]  # one text, without its question
n = text.shape[1]
attention = reread(text)
score = attention.amax((2, 3))  # (L, H, n)
entries = c.n_layers * c.n_kv_heads * (n // 8)  # what an eighth leaves, in all heads together
kept = score >= score.flatten().topk(entries).values[-1]

# %%
caches = make_cache(model, KVzip, budget=n // 8)
prefill(model, text, caches)
end_prompt(model, text, caches)  # rereads, ranks and evicts
assert torch.equal(torch.from_numpy(plot.kept(caches, n)), kept)
print(f"{kept.sum()} of {kept.numel()} entries stay, the same as in methods/kvzip.py")

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
for axis, (layer, head) in zip(axes, ((0, 0), (1, 0), (4, 1))):
    plot.attention(axis, attention[layer, head, 0, :120, :120], f"layer {layer}, head {head}")
    axis.set(xlabel="entry of the first time", ylabel="token of the reread")

# %%
pieces = [encoding.decode([token]) for token in text[0].tolist()]
caches = make_cache(model, snap_kv, budget=n // 8)
prefill(model, text, caches)
end_prompt(model, text, caches)
panels = {"SnapKV, layer 1": plot.kept(caches, n)[1].mean(0), "KVzip, layer 1": kept[1].float().mean(0)}
plot.text(pieces, panels, batch.facts[0, :n], columns=2, width=72);

# %% [markdown]
# ## The largest attention, not the sum

# %%
total = attention.sum((2, 3))
facts = torch.from_numpy(batch.facts[0, :n])
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
axis.loglog(score.flatten(), total.flatten(), ".", color="0.8", markersize=2, label="all entries")
axis.loglog(score[1][:, facts].flatten(), total[1][:, facts].flatten(), ".",
            color=plot.style("kvzip")["color"], label="facts, in layer 1")
axis.axvline(score.flatten().topk(entries).values[-1], color="black", linewidth=1)
axis.axhline(total.flatten().topk(entries).values[-1], color="black", linewidth=1, linestyle="--")
axis.set(xlabel="largest attention", ylabel="sum of the attention", xlim=(1e-4, 1.2))
axis.legend();
by_sum = total >= total.flatten().topk(entries).values[-1]
for name, mask in {"largest": kept, "sum": by_sum}.items():
    print(f"by the {name}: {mask[1][:, facts].float().mean():.0%} of the facts' entries in layer 1 stay")

# %% [markdown]
# ## One ranking for all layers

# %%
figure, axis = plt.subplots(figsize=(4, 4), layout="constrained")
plot.heads(axis, kept.float().mean(-1) * 100, "% of the entries that stay", "{:.0f}")

# %%
import time
t0=time.time()
shown = [["facts found", "one ranking", "a budget per head"]]
for name in ("max", "sum"):
    found = [retrieve(model, batch, maker(model, KVzip, 0.125, score=name, across=across))
             for across in (True, False)]
    shown.append([name, *(f"{right['agnostic'].mean():.2f}" for right in found)])
print(text_table(shown))
print(time.time()-t0)

# %% [markdown]
# ## Gates

# %%
t0=time.time()
x, y = lessons(model, Tasks(encoding, "train"))
print(x.shape, y.shape, time.time()-t0)
gates = fit(x, y)
print(gates.shape, time.time()-t0)
for keep in (0.25, 0.125):
    right = retrieve(model, batch, maker(model, FastKVzip, keep, gates=gates))
    print(keep, right["agnostic"].mean())
print(time.time()-t0)
