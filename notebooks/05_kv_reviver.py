# %% [markdown]
# # KVReviver: can an evicted token be read back?
#
# **Before this:** notebook 00 (the KV cache, H2O). **Time:** half an hour to read, a quarter of a minute to run. **Afterwards you know** how a count sketch stores many tokens in few slots, how many tokens a slot can take before the reading is useless, and which other methods bring more answers for the same bytes.
#
# A method that evicts cannot take its decision back. If a later question needs an evicted token, the answer may be lost. KVReviver calls this *contextual amnesia*. Its cure: add all tokens that would be evicted into a small shared memory, a **count sketch**, and read them back (*revive* them) before each attention. The readings are noisy, since tokens share slots.
#
# KVReviver divides a head's budget into three parts. *Recent* holds the newest tokens. *Candidate* holds those of the others with the most attention so far. The sketch, which the paper calls *Vague*, holds the rest. Its share is a tenth of the budget.
#
# The code: `methods/kv_reviver.py` has the sketch, the store that reads it, and the method. [CLAIMS.md](../CLAIMS.md) checks claims R1 to R15 (R7 is ours); most of them this lesson leaves out. All numbers are of the decoder *built*, unless another is named.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
import matplotlib.pyplot as plt
import torch

from lab import plot, render_results
from lab.benchmark import text_windows
from lab.replay import Recorder, record
from lab.retrieval import maker, retrieve
from lab.table import text_table
from lab.tasks import Tasks

# %%
from methods.baselines.h2o import H2O
from methods.baselines.snap_kv import SnapKV
from methods.kv_reviver import Sketch
from methods.ours.kv_reviver_shrunk import ShrunkSketch, SignedSketch
from methods.theory.sketch_error import relative_error
from methods.baselines.rounded import rounded
from nanollm import TINY, checkpoint, tokenizer
from nanollm.attention import probabilities, visible
from nanollm.cache import make_cache

# %%
torch.set_grad_enabled(False)
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config

# %% [markdown]
# ## What eviction forgets
#
# Take four texts of 512 tokens. After 448 tokens each head keeps 40 % of the entries: those with the most attention so far, as H2O's heavy hitters. Does one of the next 64 queries look at an evicted token? The paper counts a token as *activated* if a query gives it more than 0.5 % of its attention. The control keeps 40 % at random.

# %%
text = text_windows(tasks, 8, 512)
caches = make_cache(model, store=Recorder)  # full attention that records every query and key
maps = []
for layer, cache in zip(record(model, caches, text[::2]), caches):
    mask = visible(cache.pos, None, layer.pos)  # a query sees the tokens up to itself
    maps.append(probabilities(layer.q, cache.k, mask))
attention = torch.stack(maps)
so_far = attention[..., :448, :448].sum((3, 4))  # (layer, text, head, token)
later = attention[..., 448:, :448].amax((3, 4))  # the most that a later query gives a token
chance = torch.rand(so_far.shape, generator=torch.Generator().manual_seed(0))
for name, score in {"H2O": so_far, "random": chance}.items():
    evicted = score <= score.quantile(0.6, -1, keepdim=True)
    much, more = ((later[evicted] > least).float().mean() for least in (0.005, 0.02))
    print(f"evicted by {name:6}: {much:.0%} get more than 0.5 % from a later query, "
          f"{more:.0%} more than 2 %")

# %% [markdown]
# About half of the evicted tokens are activated later, and hardly more after random eviction. On SmolLM2, with a quarter kept, it is 41 %, and 48 % after random eviction (claim R9). The threshold is low: with 480 tokens to look at, 0.5 % is only about two and a half times the even share. The harm shows better in answers. In each of 16 documents one of four facts is asked for:

# %%
batch = tasks.batch("needle", 0, 16, 512)
for name, Kind, options in ("H2O", H2O, {}), ("SnapKV", SnapKV, dict(window_size=8)):
    right = retrieve(model, batch, maker(model, Kind, 0.25, **options))
    print(f"{name:6} keeps 25 %. Facts found if the question is in the prompt: "
          f"{right['aware'].mean():.2f}; if it comes later: {right['agnostic'].mean():.2f}")

# %% [markdown]
# On *built* SnapKV finds every fact if the question is in the prompt, and few if the question comes later. This is amnesia. H2O finds hardly any either way.
#
# ## A sketch by hand
#
# A count sketch has $r$ rows of $b$ slots. In row $i$, a hash function $h_i$ chooses a slot for token $J$. Another hash function, $g_i$, chooses a sign, $+1$ or $-1$. To **insert** a token, add it with its sign to its slot in every row. To **read** it, take its slot in every row, multiply by its signs, and take the median of the rows:
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
        total = f" = {S[i, place]:+.0f}" if len(inside) > 1 else ""
        axis.text(place, i, " ".join(inside) + total, ha="center", va="center")
axis.set(xticks=range(width), yticks=range(rows), xlabel="slot", ylabel="row");

# %% [markdown]
# A token that is alone in two of its three slots is always read correctly: here token 7. Tokens 3, 5 and 6 are alone in one slot. They are read correctly by luck, because one of their other rows errs upwards and one downwards. Tokens 1, 2, 4 and 8 are never alone, and are read wrongly. This sketch has 12 slots for 8 tokens, so it does not even compress.
#
# ## The error grows with the tokens in a slot
#
# Now with real keys and values: 1024 tokens of a text, in sketches of 12,288 down to 12 slots. The squared error is in units of the variance of the tokens about their mean. So a reader that answers every query with the *mean of all tokens* has an error of 1, and needs one slot. *Tokens per slot* is 1024 divided by the slots of all rows together.
#
# *sum (printed)* is the paper's sketch: it gives signs to the values, and adds up keys without signs. *signed keys* gives signs to both, as above. *shrunk* is ours: it stores the mean exactly, sketches the differences from it, and scales each reading by $1/(1+\rho)$, where $\rho$ is the expected number of other tokens in a slot.

# %%
recording = record(model, make_cache(model, store=Recorder), text_windows(tasks, 1, 1024))
k, v = (torch.cat([getattr(layer, name) for layer in recording]) for name in "kv")  # (L, H, n, D)
tokens = torch.arange(1024).expand(c.n_layers, c.n_kv_heads, -1)
kinds = {"sum (printed)": (Sketch, 3), "signed keys": (SignedSketch, 3),
         "shrunk": (ShrunkSketch, 1)}  # (class, rows)
sizes = 12288, 3072, 1536, 768, 384, 192, 96, 48, 24, 12
errors = {name: [] for name in kinds}
for name, (Kind, rows) in kinds.items():
    for N in sizes:
        sketch = Kind(k, rows, N // rows, seed=0)
        sketch.insert(tokens, k, v)
        errors[name].append([relative_error(*pair) for pair in zip(sketch.query(tokens), (k, v))])

# %%
def in_groups(x, bits, dim):
    """x at `bits` bits a number; 32 neighbours along `dim` share a range."""
    groups = x.unflatten(dim, (-1, 32))
    return rounded(groups, bits, dim + 1).flatten(dim, dim + 1)


few_bits = {n: [relative_error(in_groups(k, n, 2), k), relative_error(in_groups(v, n, 3), v)]
            for n in (2, 3, 4)}  # keys share ranges over tokens, values over channels, as in KIVI

# %%
shown = [["squared error / variance; tokens per slot:", *(f"{1024 / N:.2f}" for N in sizes[1:7])]]
for name in kinds:
    for part, column in zip(("keys", "values"), zip(*errors[name][1:7])):
        shown.append([f"{name}, {part}", *(f"{error:.2f}" for error in column)])
print(text_table(shown))
per_slot = {n: 32 / (n + 1) for n in few_bits}  # bits: 32 a number in a slot; n and 1 for ranges
for n, pair in few_bits.items():
    print(f"{n} bits a number, the bytes of {per_slot[n]:.1f} tokens per slot: "
          "{:.2f} for keys, {:.2f} for values".format(*pair))

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
looks = {"sum (printed)": plot.style("kv_reviver"), "shrunk": plot.style("kv_reviver_shrunk"),
         "signed keys": plot.style("kv_reviver") | dict(marker="s", linestyle="--")}
for part, axis in enumerate(axes):
    for name, pairs in errors.items():
        axis.loglog([1024 / N for N in sizes], [pair[part] for pair in pairs], label=name,
                    **looks[name])
    axis.loglog(list(per_slot.values()), [pair[part] for pair in few_bits.values()],
                label="4, 3, 2 bits a number", **plot.style("full@2") | dict(linestyle=""))
    axis.axhline(1, color="black", linewidth=1)
    for tokens_per_slot, what in ((4, "at least 4"), (31, "paper: 31")):
        axis.axvline(tokens_per_slot, color="0.6", linewidth=1)
        if part:
            axis.text(1.1 * tokens_per_slot, 4e4, f"keep 25 %,\n{what}", va="top", fontsize=8)
    axis.set(title=("keys", "values")[part], xlabel="tokens per slot of memory")
axes[0].set_ylabel("squared error / variance")
axes[0].legend(fontsize=8);

# %% [markdown]
# Far below one token per slot, reading works: most tokens are alone in their slots. Then the errors grow.
#
# - From 0.67 tokens per slot on, the printed sum of keys has a larger error than the mean. Keys have a mean, and without signs every token of a slot adds its own. At 10.67 tokens per slot the error is 607 variances.
# - With signs the means cancel on average. From 0.67 tokens per slot on, keys still have a larger error than the mean; values do from 1.33.
# - The shrunk reading stays below 1 at every size. But from a few tokens per slot on it is nearly the mean: little is left to read.
# - The stars are what the same bytes buy if every token stays, rounded to few bits. With as many bytes as a sketch of 10.7 tokens per slot, 2 bits have an error of 0.09 for keys and 0.18 for values. Rounding keeps the tokens apart; a sketch adds them up.
#
# Can another split of the budget help? Let a head have a budget of $B\,n$ entries for $n$ tokens, $N \le Bn$ of them slots of the sketch. The other $Bn - N$ entries hold exact tokens, so the sketch holds $a = n - Bn + N$ tokens, and
#
# $$\frac aN = 1 + \frac{(1-B)\,n}{N} \;\ge\; 1 + \frac{1-B}{B} = \frac1B.$$
#
# With a quarter of the entries a slot holds at least 4 tokens, and 31 if the sketch gets a tenth of the budget, as in the paper. These are the vertical lines. At both lines the sums are far worse than the mean, and the shrunk reading is better than the mean by about a fifth at most. **With a quarter of the entries, no split of the budget makes the printed sums tell more than the mean of all tokens** (claim R4 measures three splits).
#
# ## What helps instead
#
# These rows come from the tables of all methods in [RESULTS.md](../RESULTS.md): for SmolLM2, which is pretrained, for *built*, the decoder above, and for *learned*, the second small decoder of this repository. Needles and pairs are asked for after the compression. The KL tells how far the predictions of a text's next tokens move from the full cache's, in nats. KiB are the bytes of a text's cache after 64 more tokens. `kv_reviver_mean` is a kinder interpretation of the paper: it divides each sum by the tokens in the slot. `kv_reviver_shrunk` is ours.

# %%
names = ("full", "h2o", "kv_reviver", "kv_reviver_mean", "kv_reviver_shrunk", "full@2",
         "full@3", "kvzip", "kvzip@4")
sections = dict(smollm2="smollm2", built="all", learned="learned")
stored = {}
for decoder, section in sections.items():
    stored[decoder] = render_results.by_method(section)
    shown = [[decoder, "keep", "KiB", "needle", "pairs", "KL"]]
    for (method, keep_ratio), row in stored[decoder].items():
        if method in names and keep_ratio in (None, 0.25):
            shown.append([method, "all" if keep_ratio is None else f"{keep_ratio:.0%}",
                          f"{row['live_16'] / 1024:.0f}", f"{row['needle_agnostic']:.2f}",
                          f"{row['pairs_agnostic']:.2f}", f"{row['kl']:.3f}"])
    print(text_table(shown) + "\n")

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
lines = "kv_reviver", "kv_reviver_mean", "kv_reviver_shrunk", "h2o", "kvzip", "kvzip@4"
for axis, decoder in zip(axes, stored):
    for line in (*lines, "full@N"):
        points = [row for (method, _), row in stored[decoder].items()
                  if method == line or line == "full@N" and method.startswith("full@")]
        axis.plot([row["live_16"] / 1024 for row in points],
                  [row["needle_agnostic"] for row in points], label=line,
                  **plot.style(line))
    axis.set(title=decoder, xscale="log", xlabel="cache, KiB per text, 16-bit numbers")
    sizes = (500, 1000, 2000, 4000) if decoder == "smollm2" else (64, 128, 256, 512)
    axis.set_xticks(sizes, sizes)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set_ylabel("needles found, question later")
figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper");

# %% [markdown]
# With a quarter of the entries, the three KVReviver rows find at most 3 % of the needles on any decoder. Two other ways answer the questions:
#
# - **Few bits for every token.** On the small decoders `full@2` (KIVI) finds nearly all needles. It takes two fifths more bytes than KVReviver there, because the 64 tokens after the compression stay exact. SmolLM2 needs more: it finds 0.12 of the needles with two bits, 0.66 with three, and 0.81 with four, as many as the full cache.
# - **A better choice.** KVzip rereads the prompt to find out which entries matter. With a quarter of the entries it finds all needles on the small decoders, and 0.75 on SmolLM2. With a quarter and 4 bits on top (`kvzip@4`) it takes fewer bytes on the small decoders than KVReviver, and nearly twice as many on SmolLM2. Notebook 10 is about KVzip.
#
# The paper's models have 7 billion parameters. On SmolLM2, with 135 million, the printed sums harm more than on *built*: the KL is 7.0 nats after a text of 192 tokens, there 4.9 after one of 448. By the formula above, the number of tokens per slot does not depend on the model.
#
# ## Three things to remember
#
# 1. **Eviction forgets.** With a quarter of the entries and a later question, SnapKV loses all needles and pairs on SmolLM2, and half of the labels.
# 2. **A sketch stores sums.** On *built*, beyond about one token per slot the printed readings are worse than the mean of all tokens. At a keep ratio of 25 % a slot holds at least 4 tokens.
# 3. **Bytes buy more elsewhere:** few bits for every token, or entries that are chosen better.
#
# ## Exercises
#
# 1. In the sketch by hand, use one row of 12 slots. How many tokens are read correctly? Then try other seeds, with three rows and with one.
#    <details><summary>Hint</summary>Set <code>rows, width = 1, 12</code>. With one row a token is right if it is alone in its slot, or if the others cancel.</details>
# 2. Subtracting a token's true vector removes the token completely. KVReviver subtracts its *estimate* when the token moves out of the sketch. What happens to the others?
#    <details><summary>Hint</summary><code>library.insert(token, *library.query(token), times=-1.0)</code> takes out an estimate. Claim R2 has the numbers for 120 tokens.</details>
# 3. A sketch is linear: each slot is one equation. When can all tokens be computed exactly?
#    <details><summary>Hint</summary>If the tokens' patterns of signs are linearly independent, which needs at least as many slots as tokens. Put <code>sign</code> into a matrix of (slots, tokens), and call <code>torch.linalg.lstsq</code>.</details>
# 4. Give neighbouring tokens the same slot: token $J$ goes to slot $\lfloor J b/a \rfloor$, and its reading is the mean of the slot. Is the error lower than that of the shrunk sketch?
#    <details><summary>Hint</summary>No sketch is needed: <code>k.unflatten(2, (b, -1)).mean(3)</code> has the means. Repeat them and use <code>relative_error</code>.</details>
# 5. With 1 bit a number, `quantise` in `methods/baselines/rounded.py` takes the ends of the range as its two levels. Take the mean plus and minus the mean deviation instead. How much does the error fall?
#    <details><summary>Hint</summary>Group the tokens as <code>rounded</code> does, and compute <code>m ± (x − m).abs().mean()</code> in each group.</details>
