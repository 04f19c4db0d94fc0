# %% [markdown]
# # KVReviver: can an evicted token be read back?
#
# **Before this:** notebook 00 (the KV cache, H2O). **Runs:** one minute. **Afterwards you know** how a count sketch stores many tokens in few slots, how many tokens a slot can take before the reading is useless, and which other methods bring more answers for the same bytes.
#
# A method that evicts cannot take its decision back. If a later question needs an evicted token, the answer is lost. KVReviver calls this *contextual amnesia*. Its cure: add all tokens that would be evicted into a small shared memory, a **count sketch**, and read them back before each attention. The readings are noisy, since tokens share slots.
#
# KVReviver divides a head's budget into three parts. *Recent* holds the newest tokens. *Candidate* holds the tokens with the most attention so far. The sketch, which the paper calls *Vague*, holds all others. Its share is a tenth of the budget.
#
# The code: `methods/count_sketch.py` has the sketch and `methods/kv_reviver.py` the cache. `CLAIMS.md` checks the paper's claims R1 to R15, most of which this lesson leaves out.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from functools import partial
import matplotlib.pyplot as plt
import torch

from experiments import render, sketch_parts
from methods.count_sketch import Sketch
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.ours.kv_reviver_shrunk import ShrunkReviver, ShrunkSketch, SignedReviver, SignedSketch
from methods.snap_kv import SnapKV
from methods.theory.sketch_error import relative_error, revived_logits, rounded
from nanollm import SHIPPED, TINY, tokenizer
from nanollm.attention import probabilities
from nanollm.cache import make_cache
from nanollm.commands import plot
from nanollm.commands.text_table import text_table

# %%
from nanollm.hf import checkpoint
from nanollm.measure import evaluate
from nanollm.measure.replay import Recorder, record
from nanollm.measure.tasks import Tasks

torch.set_grad_enabled(False)
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config

# %% [markdown]
# ## What eviction forgets
#
# Take four texts of 512 tokens. After 448 tokens each head keeps 40 % of the entries: those with the most attention so far, as in H2O. Does one of the next 64 queries look at an evicted token? The paper counts a token as *activated* if a query gives it more than 0.5 % of its attention. The control keeps 40 % at random.

# %%
text = evaluate.text_windows(tasks, 8, 512)
caches = make_cache(model, Recorder)  # full attention that records every query and key
attention = torch.stack([probabilities(x.q, cache.k, cache.pos, None, x.pos) for x, cache
                         in zip(record(model, caches, text[::2]), caches)])
so_far = attention[..., :448, :448].sum((3, 4))  # (layer, text, head, token)
later = attention[..., 448:, :448].amax((3, 4))  # the most that a later query gives a token
chance = torch.rand(so_far.shape, generator=torch.Generator().manual_seed(0))
for name, score in {"H2O": so_far, "random": chance}.items():
    evicted = score <= score.quantile(0.6, -1, keepdim=True)
    much, more = ((later[evicted] > least).float().mean() for least in (0.005, 0.02))
    print(f"evicted by {name:6}: {much:.0%} get more than 0.5 % from a later query, "
          f"{more:.0%} more than 2 %")

# %% [markdown]
# About half of the evicted tokens are activated later. But a random choice leaves hardly more (claim R9). The threshold is low: 0.5 % is only two and a half times the even share of 480 tokens. The harm shows better in answers. In each of 16 documents one of four facts is asked for:

# %%
batch = tasks.batch("needle", 0, 16, 512)
for name, Method in {"H2O": H2O, "SnapKV": partial(SnapKV, window_size=8)}.items():
    right = evaluate.retrieve(model, batch, evaluate.maker(model, Method, 0.25))
    print(f"{name:6} keeps 25 %. Facts found if the question is in the prompt: "
          f"{right['aware'].mean():.2f}; if it comes later: {right['agnostic'].mean():.2f}")

# %% [markdown]
# SnapKV finds every fact if the question is in the prompt, and few if the question comes later. This is amnesia. H2O finds few either way.
#
# ## A sketch by hand
#
# A count sketch has $r$ rows of $b$ slots. In row $i$, a hash function $h_i$ gives token $J$ a slot and a second one, $g_i$, gives it a sign. To **insert** a token, add it with its sign to its slot in every row. To **read** it, take its slot in every row, multiply by its signs, and take the median of the rows:
#
# $$S_i[h_i(J)] \mathrel{+}= g_i(J)\,x_J \qquad\qquad \hat x_J = \mathrm{median}_i\; g_i(J)\,S_i[h_i(J)]$$
#
# Here are eight tokens with the values 1 to 8, in three rows of four slots. The hash functions are the library's.

# %%
rows, width, x = 3, 4, torch.arange(1.0, 9)
library = SignedSketch(torch.zeros(1, 1, 1, 1), rows, width, seed=1)
tokens = torch.arange(1, 9).view(1, 1, 8)
slot, sign = library.bucket(tokens)[0, 0] % width, library.signs(tokens)[0, 0]  # (token, row) each

S = torch.zeros(rows, width)
for J in range(8):  # insert
    for i in range(rows):
        S[i, slot[J, i]] += sign[J, i] * x[J]

says = torch.tensor([[sign[J, i] * S[i, slot[J, i]] for i in range(rows)] for J in range(8)])
found = says.median(1).values  # read
for J in range(8):
    print(f"token {J + 1}: the rows say {says[J].int().tolist()}, median {found[J]:.0f}")
library.insert(tokens, x.view(1, 1, 8, 1), x.view(1, 1, 8, 1))
assert torch.equal(library.query(tokens)[0].flatten(), found)

# %%
figure, axis = plt.subplots(figsize=(8, 2.1), layout="constrained")
axis.imshow(S.abs(), cmap="Blues", vmax=30, aspect="auto")
for i in range(rows):
    for place in range(width):
        inside = [f"{sign[J, i] * x[J]:+.0f}" for J in range(8) if slot[J, i] == place]
        label = f"{' '.join(inside)} = {S[i, place]:+.0f}" if inside else "empty"
        axis.text(place, i, label, ha="center", va="center")
axis.set(xticks=range(width), yticks=range(rows), xlabel="slot", ylabel="row");

# %% [markdown]
# TODO
#
# ## The error grows with the tokens in a slot
#
# Now with real keys and values: 1024 tokens of a text, in sketches of 12,288 down to 12 slots. The squared error is in units of the variance of the tokens about their mean. So a reader that answers every query with the *mean of all tokens* has an error of 1, and needs one slot.
#
# *sum (printed)* is the paper's sketch, whose keys have no signs. *signed keys* gives them signs as well. *shrunk* is ours: it stores the mean exactly, sketches the differences from it, and scales each reading by $1/(1+\rho)$, where $\rho$ is the expected number of other tokens in a slot.

# %%
recording = record(model, make_cache(model, Recorder), evaluate.text_windows(tasks, 1, 1024))
k, v = (torch.cat([getattr(layer, name) for layer in recording]) for name in "kv")  # (L, H, n, D)
tokens = torch.arange(1024).expand(c.n_layers, c.n_kv_heads, -1)
kinds = {"sum (printed)": (Sketch, 3), "signed keys": (SignedSketch, 3), "shrunk": (ShrunkSketch, 1)}
sizes = 12288, 3072, 1536, 768, 384, 192, 96, 48, 24, 12
errors = {name: [] for name in kinds}
for name, (Kind, rows) in kinds.items():
    for N in sizes:
        sketch = Kind(k, rows, N // rows, seed=0)
        sketch.insert(tokens, k, v)
        errors[name].append([relative_error(*pair) for pair in zip(sketch.query(tokens), (k, v))])
few_bits = {n: [relative_error(rounded(k, n, over_tokens=True), k),
                relative_error(rounded(v, n, over_tokens=False), v)] for n in (2, 3, 4)}

# %%
shown = [["squared error / variance; tokens per slot:", *(f"{1024 / N:.2f}" for N in sizes[1:7])]]
for name in kinds:
    for part, column in zip(("keys", "values"), zip(*errors[name][1:7])):
        shown.append([f"{name}, {part}", *(f"{error:.2f}" for error in column)])
print(text_table(shown))
for n, pair in few_bits.items():
    print(f"{n} bits a number, the bytes of {256 / (8 * n + 8):.1f} tokens per slot: "
          "{:.2f} for keys, {:.2f} for values".format(*pair))

figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
looks = {"sum (printed)": plot.style("kv_reviver"), "shrunk": plot.style("kv_reviver_shrunk"),
         "signed keys": plot.style("kv_reviver") | dict(marker="s", linestyle="--")}
for part, axis in enumerate(axes):
    for name, pairs in errors.items():
        axis.loglog([1024 / N for N in sizes], [pair[part] for pair in pairs], label=name,
                    **looks[name])
    axis.loglog([256 / (8 * n + 8) for n in few_bits], [pair[part] for pair in few_bits.values()],
                label="4, 3, 2 bits a number", **plot.style("quantized_2") | dict(linestyle=""))
    axis.axhline(1, color="black", linewidth=1)
    for tokens_per_slot, what in ((4, "any split"), (31, "paper's split")):
        axis.axvline(tokens_per_slot, color="0.6", linewidth=1)
        axis.annotate(f"25 %,\n{what}", (tokens_per_slot, 0.02), xytext=(3, 0),
                      textcoords="offset points", fontsize=8)
    axis.set(title=("keys", "values")[part], xlabel="tokens per slot of memory")
axes[0].set_ylabel("squared error / variance")
axes[0].legend(fontsize=8);

# %% [markdown]
# TODO
#
# ## What the decoder makes of the readings

# %%
full = evaluate.reference(model, text[:, :480], 32)
shown = [["mean over the layers", "logits off by", "logits vary by", "attention", "true attention"]]
for name, Method in {"sum (printed)": KVReviver, "signed keys": SignedReviver,
                     "shrunk": ShrunkReviver}.items():
    by_layer = torch.tensor(revived_logits(model, full, evaluate.maker(model, Method, 0.25)))
    off, _, vary, part, true_part = by_layer.mean(0).tolist()
    shown.append([name, *(f"{number:.2f}" for number in (off, vary, part, true_part))])
print(text_table(shown))

# %% [markdown]
# TODO
#
# ## What the slots add

# %%
quarter = [row for row in render.rows("sketch") if row["keep_ratio"] == 0.25]
print(sketch_parts.show(quarter))

# %% [markdown]
# TODO
#
# ## What helps instead

# %%
names = ("full", "h2o", "kv_reviver", "kv_reviver_mean", "kv_reviver_shrunk", "quantized_2",
         "quantized_3", "kvzip", "kvzip_4")
stored = {"built": render.by_method("all"), "learned": render.by_method("learned")}
for decoder in SHIPPED:
    shown = [[decoder, "keep", "KiB", "needle", "pairs", "KL"]]
    for (method, keep_ratio), row in stored[decoder].items():
        if method in names and keep_ratio in (None, 0.25):
            shown.append([method, "all" if keep_ratio is None else f"{keep_ratio:.0%}",
                          f"{row['live_16'] / 1024:.0f}", f"{row['needle_agnostic']:.2f}",
                          f"{row['pairs_agnostic']:.2f}", f"{row['kl']:.3f}"])
    print(text_table(shown) + "\n")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
lines = "kv_reviver", "kv_reviver_mean", "kv_reviver_shrunk", "h2o", "kvzip", "kvzip_4"
for axis, decoder in zip(axes, SHIPPED):
    for line in (*lines, "quantized"):
        points = [row for (method, _), row in stored[decoder].items()
                  if method == line or line == "quantized" and method.startswith("quantized_")]
        axis.plot([row["live_16"] / 1024 for row in points],
                  [row["needle_agnostic"] for row in points], label=line, **plot.style(line))
    axis.set(title=decoder, xscale="log", xlabel="cache, KiB per text, 16-bit numbers")
    axis.set_xticks((64, 128, 256, 512), (64, 128, 256, 512))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set_ylabel("needles found, question later")
axes[1].legend(fontsize=8);
