# %% [markdown]
# # What is one cache entry worth?
#
# **Before this:** notebook 00 (the KV cache) and 10 (KVzip). **Runs:** a minute. **Afterwards you know** what attention tells about an entry, what it does not, and why the worth of single entries does not add up.
#
# Every method in this repository ranks entries by a score, most often by attention. Does the score tell what the answer would lose without the entry? In a large model nobody can check this for every entry. Here a document has about 4,400 entries and a step takes milliseconds, so we leave out each of them, once. The long run is `python -m experiments.worth`.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import matplotlib.pyplot as plt
import torch

from experiments import render, worth as experiment
from nanollm import SHIPPED, TINY, tokenizer
from nanollm.attention import probabilities
from nanollm.cache import NEVER, copied, make_cache
from nanollm.commands import plot
from nanollm.commands.text_table import text_table
from nanollm.generate import prefill
from nanollm.hf import checkpoint
from nanollm.measure.replay import Recorder, record
from nanollm.measure.tasks import Tasks

# %% [markdown]
# ## Leave one out
#
# The decoder reads a document and keeps all entries. Then it gets the question and the true answer. We do this once with the whole cache, and once for each entry (layer, head, token) with this entry hidden. The entry's *worth* is what the answer's log probability loses:
#
# $$\text{worth}_i = \log p(\text{answer} \mid \text{all entries}) - \log p(\text{answer} \mid \text{all but } i).$$
#
# A copy of the cache is one row of a batch. Row $r$ hides entry $r$ by giving its slot a position that no query ever reaches.

# %%
torch.set_grad_enabled(False)
model = checkpoint.from_hf(TINY).double()  # 64 bits: most entries change the answer by very little
encoding = tokenizer.load(TINY / "tokenizer.tiktoken")
batch = Tasks(encoding, "test").batch("needle", seed=3, B=1, T=200)
tokens, n = torch.from_numpy(batch.tokens), batch.question
rest, answer = tokens[:, n:batch.answers[0].stop], 2  # the question, and the answer's two tokens
full = make_cache(model)
prefill(model, tokens[:, :n], full);

# %%
def log_p(hidden):
    """The answer's log probability, (R,), if row r lacks hidden[r]: hidden (R, L, H, n) of bool."""
    caches = copied(full)
    for cache, rows in zip(caches, hidden.unbind(1)):
        cache.slots = {name: cache.slot(name).repeat(len(rows), *[1] * (x.dim() - 1))
                       for name, x in cache.slots.items()}
        cache.slots["pos"][rows] = NEVER
        cache.ragged = True
    logits = model(rest[:, :-1].repeat(len(hidden), 1), caches)[:, -answer:]
    said = logits.log_softmax(-1).gather(-1, rest[:, -answer:, None].expand(len(hidden), -1, 1))
    return said.sum((1, 2))

# %%
shape = len(full), full[0].k.shape[1], n
each = torch.eye(full[0].k.shape[1] * len(full) * n, dtype=torch.bool).view(-1, *shape)
nothing = torch.zeros(1, *shape, dtype=torch.bool)
worth = (log_p(nothing) - torch.cat([log_p(part) for part in each.split(128)])).view(shape)
top = worth.flatten().sort(descending=True)
print(f"{worth.numel()} entries. Worth more than 0.01 nats: {(worth > 0.01).sum()}. "
      f"The highest: {', '.join(f'{x:.3f}' for x in top.values[:5])}")

# %% [markdown]
# The experiment in `experiments/worth.py` measures the same:

# %%
again = experiment.removed(model, full, rest, answer, each[:50]).worth
assert torch.allclose(again, worth.flatten()[:50])

# %% [markdown]
# A handful of entries out of thousands are worth anything at all. Below, a token is as dark as its worthiest entry, beside the attention of the observation window (the last 8 queries of the document, SnapKV) and the attention of the question itself. The facts are underlined.

# %%
recording = record(model, make_cache(model, Recorder), tokens[:, :batch.answers[0].stop])
p = torch.stack([probabilities(q, k, pos[:, None], None, pos)[0].double()
                 for q, k, v, pos in recording])  # (L, H, G, T, T)
window = p[..., n - 8:n, :n].mean((2, 3))
question = p[..., n:, :n].amax((2, 3))
pieces = [encoding.decode([token]) for token in tokens[0, :n].tolist()]
darkest = lambda x: (x.clamp(min=0) / x.max()).amax((0, 1)) ** 0.5
panels = {"worth": darkest(worth), "the window's attention": darkest(window),
          "the question's attention": darkest(question)}
plot.text(pieces, panels, batch.facts[0, :n], columns=3, width=48, low="nothing", high="most");

# %% [markdown]
# The worth lies on one fact, the one that is asked for. The question's attention finds it, among other things. The window's attention does not: no query of the window knows the question.
#
# ## What the scores of methods tell
#
# The stored run does this for 8 needles and 8 pairs on each decoder, and compares the worth with every method's score. ρ is Spearman's rank correlation: 1 if both rank the entries alike, 0 if one says nothing about the other. Worth has a sign: without some entries the answer is *likelier*. So there is also ρ with |worth|, the size of the effect on the answer, and with the KL, the size of the effect on the next tokens. *top 1 %* is the share of the worthiest 1 % of entries that the score also ranks there.

# %%
rows = render.rows("worth")
scores = [row for row in rows if row["table"] == "scores" and row["score"] != "worth"]
names = list(dict.fromkeys(row["score"] for row in scores))
figure, axes = plt.subplots(1, 4, figsize=(12, 4.5), layout="constrained", sharex=True, sharey=True)
titles = {"worth": "ρ worth", "size": "ρ |worth|", "kl": "ρ KL", "top": "top 1 %"}
for axis, (key, title) in zip(axes, titles.items()):
    for place, name in enumerate(SHIPPED):
        mine = [[row[key] for row in scores if (row["decoder"], row["score"]) == (name, score)]
                for score in names]
        means = [sum(mean for mean, _ in x) / len(x) for x in mine]
        errors = [sum(error ** 2 for _, error in x) ** 0.5 / len(x) for x in mine]
        height = [i + 0.38 * place for i in range(len(names))]
        axis.barh(height, means, 0.36, xerr=errors, label=name, color=("C0", "C1")[place])
    axis.set_title(title)
    axis.axvline(0, color="black", linewidth=0.8)
axes[0].set_yticks([i + 0.19 for i in range(len(names))], names)
axes[0].invert_yaxis()
axes[0].legend();

# %% [markdown]
# Attention tells how much an entry changes the answer (second panel) and the next tokens (third), most of all the attention of the question's own queries. It does not tell whether the entry helps or hurts: all ρ with the worth itself are near 0. The question's queries find a third of the worthiest entries (on the right). Without the question nothing finds more than a tenth, on average.
#
# *one removal* is the exact change of a head's output if one entry goes (DropKV; CriticalKV bounds the same change for many). It ranks entries as plain attention does. So what these methods miss is not the value's norm. It is what the rest of the decoder does with the change.
#
# Now the answers after a real eviction. Only the entries with the highest scores stay, all heads ranked together:

# %%
kept = {(row["decoder"], row["task"], row["score"]): row["right"]
        for row in rows if row["table"] == "kept"}
columns = [(name, task) for name in SHIPPED for task in ("needle", "pairs")]
shown = [["keeps 6.25 %", *(f"{task}, {name}" for name, task in columns)]]
for score in ("worth", "one removal, question", "window, question", "reread", "gates", "keys",
              "window", "random"):
    shown.append([score, *(f"{kept[name, task, score][2][0]:.2f}" for name, task in columns)])
print(text_table(shown))

# %% [markdown]
# The window ranks *all* entries much better than KVzip's reread does, and its cache answers nothing. The reread puts the few entries that matter near the top, and its cache finds nearly all needles. Where a handful of entries out of thousands decide, a rank correlation over all of them says little about a method.
#
# ## Why the sum misleads
#
# Evicting is not leaving out one entry. Take the entries of highest worth and remove them together:

# %%
order = top.indices
print("entries   sum of their worth   worth of all together, in nats")
for k in (1, 2, 4, 8, 16, 64):
    together = nothing.clone()
    together.view(-1)[order[:k]] = True
    lost = (log_p(nothing) - log_p(together)).item()
    print(f"{k:7} {top.values[:k].sum():20.3f} {lost:20.3f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
for axis, name in zip(axes, SHIPPED):
    for task, marker in (("needle", "o"), ("pairs", "s")):
        mine = [row for row in rows if row["table"] == "sums" and row["chosen"] == "highest"
                and (row["decoder"], row["task"]) == (name, task)]
        for key, dash in (("together", "-"), ("alone", "--")):
            lost = [row[key][0] for row in mine]
            axis.plot([row["n"] for row in mine], lost, dash, marker=marker,
                      color=f"C{task == 'pairs':d}", label=f"{task}, {key}")
    axis.set(xscale="log", title=name, xlabel="entries removed, the worthiest first")
axes[0].set_ylabel("loss of the answer's log probability, nats")
axes[0].legend();

# %% [markdown]
# One by one the worthiest entries seem to cost almost nothing: each of them has a double in another head, which still answers. Together they are the answer. Where worth is shared by copies, the sum over single entries says nothing about a set.
#
# Yet the *order* is right: kept by their worth, 1.6 % of the entries answered every question of the stored run.
#
# ## Three things to remember
#
# 1. **Attention tells how much an entry matters, not whether it helps or hurts.** And only the attention of the question's own queries tells that much about the answer.
# 2. **Nobody is indispensable.** Hardly any single entry costs the answer anything; a few of them together cost all of it.
# 3. **So a method must be judged by the answers after a real eviction.** Neither an entry's attention nor its single worth predicts them.
#
# ## Exercises
#
# 1. Which heads hold the copies? Find the 16 worthiest entries' layers, heads and tokens. Remove those of one layer only.
#    <details><summary>Hint</summary><code>torch.unravel_index(order[:16], shape)</code>.</details>
# 2. Choose entries one after another: in each step remove the entry that costs least *given all that were removed before*. How many can go until the answer changes?
#    <details><summary>Hint</summary>Keep one mask, add each remaining entry in turn, and take many at a time to save steps.</details>
# 3. Measure the worth for the text's next tokens in place of the answer. Which score is closest now?
#    <details><summary>Hint</summary><code>experiment.removed</code> also returns the KL.</details>
