# %% [markdown]
# # One page: which method would you take?
#
# You have a decoder, a long prompt, and memory for a quarter of its cache. This repository has more than twenty methods. Which one would you take?
#
# The answer depends on one thing more than on all others: what do you know about the question when you compress? This lesson shows that on one text, then on one page for most methods on SmolLM2, a pretrained decoder, then for other budgets and two small decoders. Then comes a table to choose by.
#
# **Before:** `00_kv_cache.ipynb`. **Time:** half an hour to read, under a minute to run. Long measurements are not repeated here; their rows are read from `lab/stored/`. RESULTS.md names the command of each. **Then you will know** what each family of methods bets on, when it loses its bet, and which method to try first.
#
# Words: an *entry* is one token's key and value in one head. The *keep ratio* is a head's mean budget, as a share of the prompt without its question. *Aware*: the question is part of the compressed prompt. *Agnostic*: it comes after the compression.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
import matplotlib.pyplot as plt
import numpy as np
import torch

from lab.render_results import by_method
from nanollm import TINY
from nanollm.cache import make_cache
from lab import plot
from lab.loading import load
from lab.methods_by_name import pick
from lab.one_page import FACT, PAGE, QUESTION, answer, prompt

# %%
torch.set_grad_enabled(False)
torch.set_num_threads(1)
model, encoding = load(TINY, "cpu")
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")

# %% [markdown]
# ## Three bets
#
# A method that drops entries bets on what will be asked. It can know three things.
#
# 1. **The question.** If it is in the prompt, keep what it looks at. SnapKV, PyramidKV, AdaKV, CriticalKV and ChunkKV make this bet: the prompt's last queries, the observation window, give each entry a score.
# 2. **The past.** What was attended to often will be attended to again. H2O and Scissorhands make this bet.
# 3. **The text.** Keep what the text can be rebuilt from, whatever the question. KVzip reads the prompt twice: what the reread looks at most stays.
#
# Two kinds of method drop no token for good. KIVI (`full@4`) rounds numbers to a few bits. KVReviver adds evicted entries into shared slots, a sketch.
#
# Others look at neither question nor attention. StreamingLLM keeps the first and the newest tokens, KeyDiff the keys that differ most from their mean.
#
# Some names below are this repository's own: `kvzip_recent`, which always keeps the newest entries; `question_gates`, whose gates have learned from other questions; `kvzip@4` and `question_gates@4`, which store the kept entries in four bits (most methods can: `snap_kv@4`, `h2o@2`); and the variants `_semantic`, `_mean` and `_shrunk`. The first lines of each file in `methods/`, `methods/baselines/` and `methods/ours/` say what it does.
#
# ## One page of text, four caches
#
# The page states four codes. A quarter of its entries may stay. The decoder is *built*, one of the two small ones that ship. A question asks for one code, 2356. Guess first: which of the four caches can answer?

# %%
tokens, cuts = prompt(model, encoding, PAGE, QUESTION)  # cuts: how many tokens are compressed
context = tokens[0, :cuts["agnostic"]].tolist()
end = len(context) - len(encoding.encode_ordinary(PAGE.partition(FACT)[2]))
start = end - len(encoding.encode_ordinary(FACT))

panels = {}
for name, setting in (("snap_kv", "aware"), ("snap_kv", "agnostic"),
                      ("h2o", "agnostic"), ("kvzip", "agnostic")):
    variant = pick([name])[name]
    options = variant.given(budget=len(context) // 4, window_size=8)
    caches = make_cache(model, variant.kind, variant.store, **options)
    kept, written = answer(model, tokens, cuts[setting], caches, new=2)
    title = f"{name}, {setting}: answers {encoding.decode(written)}"
    panels[title] = kept.float().mean((0, 1))[:len(context)]
pieces = [encoding.decode([token]) for token in context]
plot.text(pieces, panels, [start <= i < end for i in range(len(context))],
          low="kept by no head", mark="the fact asked for", columns=2, width=70);

# %% [markdown]
# Each token is as dark as the share of heads that keep it. Aware, SnapKV keeps the fact in some heads, and these are enough. Agnostic, its window is the page's end, which says nothing about codes; the answer is made up. H2O keeps the page's end in every head, its beginning in many, and scattered words. KVzip keeps every token in some heads, those of the fact too.
#
# ## All methods on one page
#
# Here is one row for most methods on SmolLM2-135M-Instruct, with a quarter of the entries; `full` and `full@2` to `full@4` keep all of them. A ring is the aware score, a dot the agnostic one; a grey line joins them.
#
# *Needle*: one of four facts in a text is asked for. *Pairs*: the value of one of 16 listed keys. *Label*: the label of a line, after 16 examples. *KL*: how far predictions of plain text move from those of the full cache; less is better.

# %%
FAMILIES = {
    "window scores": "snap_kv pyramid_kv ada_kv snap_kv+critical",
    "chunks, window scores": "chunk_kv chunk_kv_reuse chunk_kv_semantic",
    "the past": "h2o scissorhands",
    "sums of entries": "kv_reviver kv_reviver_mean kv_reviver_shrunk",
    "the text": "kvzip kvzip_recent",
    "learned before": "question_gates kvzip_fast",
    "keys, places, chance": "key_diff streaming_llm streaming_llm_absolute random",
    "few bits": "full@2 full@3 full@4 kvzip@4 question_gates@4",
    "everything held": "full",
}

# %%
names = [name for family in FAMILIES.values() for name in family.split()]
# python -m nanollm --all --model smollm2 --dtype float32 --lengths 256 --keep 25 12.5
stored = by_method("smollm2")
page = [stored.get((name, 0.25)) or stored[name, None] for name in names]
sizes = [len(family.split()) for family in FAMILIES.values()]
height = -np.arange(len(names)) - np.repeat(range(len(sizes)), sizes)  # a gap between families
documents = page[0]["documents"]
print(f"{len(names)} rows, {documents} documents a task, standard error at most "
      f"{0.5 / documents ** 0.5:.2f}")

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 9.5), layout="constrained", sharey=True)
for axis, task in zip(axes, ("needle", "pairs", "few_shot")):
    aware, agnostic = ([row[f"{task}_{x}"] for row in page] for x in ("aware", "agnostic"))
    axis.hlines(height, aware, agnostic, color="0.75")
    axis.plot(aware, height, "o", markerfacecolor="white", color="#0072b2", label="aware")
    axis.plot(agnostic, height, "o", color="#d55e00", markersize=4, label="agnostic")
    axis.set(title=task.replace("few_shot", "label"), xlim=(-0.05, 1.05), xlabel="right answers")
axes[3].plot([row["kl"] for row in page], height, "D", color="black", markersize=5)
axes[3].set_xscale("symlog", linthresh=0.01)
axes[3].set_xticks([0, 0.01, 0.1, 1], ["0", "0.01", "0.1", "1"])
axes[3].set(title="KL", xlabel="nats a token", xlim=(-0.003, 9), ylim=(height[-1] - 1, 1))
axes[0].set_yticks(height, names)
for axis in axes:
    axis.grid(alpha=0.3)
for family, end, size in zip(FAMILIES, np.cumsum(sizes), sizes):
    axes[3].text(1.04, height[end - size:end].mean(), family, va="center",
                 transform=axes[3].get_yaxis_transform())
axes[2].legend(loc="center left", bbox_to_anchor=(0, 0.4));

# %% [markdown]
# Read one column at a time.
#
# - **Long grey lines** are lost bets. SnapKV, ChunkKV and `chunk_kv_semantic` find half of the needles or more aware, and none agnostic. With CriticalKV on top (`+critical`) SnapKV loses most needles and pairs even aware, though the outputs change less (notebook 01).
# - **Ring and dot together, on the left**: the past does not know which fact will be asked for, and the newest, the oldest and the strangest entries do not either. H2O finds two thirds of the labels that the full cache finds, because many examples say the same.
# - **Ring and dot together, on the right**: KVzip, its variants and three or four bits a number answer either way. Fast KVzip reads once, with gates that it has learned. `question_gates` has learned from questions.
# - **In between**: two bits find an eighth of the later needles. On the small decoders they find nearly all (notebook 08).
# - KVReviver as printed stands apart in the last column. Its repaired variants (`mean`, `shrunk`) have a larger KL than H2O, and no more answers.
#
# The largest standard error of an accuracy stands above the figure. A difference of less than two of them decides little.
#
# ## How small may the budget be?
#
# The page shows one budget. Now the budget changes, and the question comes later. Each line is the share of the full cache's answers that a method keeps, mean of needles and pairs. Of the two small decoders, *built* started with retrieval heads in its weights, and *learned* learned its own.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
for axis, decoder in zip(axes, ("smollm2", "built", "learned")):
    measured = by_method("all" if decoder == "built" else decoder)
    answers = lambda row: row["needle_agnostic"] + row["pairs_agnostic"]
    full = answers(measured["full", None])
    for name in "snap_kv h2o kvzip_fast question_gates kvzip".split():
        ratios = sorted(ratio for method, ratio in measured if method == name)
        line = [answers(measured[name, ratio]) for ratio in ratios]
        axis.plot(ratios, np.divide(line, full), label=name, **plot.style(name))
    axis.plot(ratios, ratios, color="0.6", linewidth=1)
    axis.set(title=decoder, xscale="log", xlabel="keep ratio, %", xticks=ratios,
             xticklabels=[f"{100 * ratio:g}" for ratio in ratios])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set(ylabel="answers kept, agnostic")
axes[2].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1));

# %% [markdown]
# On the grey curve a method keeps as many answers as entries. H2O and SnapKV lie on it or below, on all three decoders. KVzip lies far above, because most tokens of a text follow from the others: on SmolLM2 an eighth of the entries keeps 93 % of the answers. Fast KVzip follows with a quarter; with an eighth it loses about a sixth. With an eighth or less `question_gates` loses no more than KVzip. Its gates have learned from questions of these kinds, about other facts, and of other kinds.
#
# Bytes are not the only price. With KVzip's reread, reading takes about three times as long on *built* (notebook 10). Fast KVzip and `question_gates` avoid it, but must learn first, once for a decoder. Few bits must become numbers again at each step. RESULTS.md, "Speed and memory", has the times of seven other methods.
#
# ## Which one would you take?
#
# | you know | try first | because | it costs |
# |---|---|---|---|
# | the question is in the prompt, and no other comes | `kvzip_recent`; `chunk_kv_semantic` reads once | the first keeps what any question needs, the second what this one looks at | reading twice; most later answers with `chunk_kv_semantic` |
# | other questions come; half of the memory is there | `full@4` | nothing is chosen, so nothing is chosen wrongly | slower steps |
# | other questions come, and you know their kind | `question_gates@4` | it has learned what such questions need | learning; slower steps; other kinds of question |
# | other questions come, of any kind | `kvzip@4` | it keeps what the text can be rebuilt from | reading twice; slower steps |
# | many prompts, each read once | `kvzip_fast` | it has learned what a reread would say | a calibration |
# | a question in the prompt, and others later | `kvzip_recent` | KVzip alone may drop the prompt's end | reading twice; 8 entries of the budget |
# | a long stream | `streaming_llm`, `h2o` | the cache stays within its budget | most of what is old |
#
# The table is for SmolLM2, one pretrained decoder. On *built* and *learned* some rows would read otherwise: there two bits keep nine tenths of the answers. On your model the answer may differ again, and finding out takes minutes: `python -m nanollm --model FOLDER` (notebook 07).
#
# The page of text is also in a browser: [docs/index.html](../docs/index.html) shows it with some of the methods, and needs no installation.
#
# ## Three things to remember
#
# 1. Ask first what is known about the question. On SmolLM2, with a quarter of the entries, SnapKV answers about half of the questions for a fact that are in the prompt, and none that come later.
# 2. If any question may come, keep every token in fewer bits, or keep what the text can be rebuilt from. The two multiply.
# 3. Bytes are one price. Reading time, calibration and slower steps are the others.
#
# ## Exercises
#
# 1. At which budget does SnapKV, agnostic, find the code of the page above? Guess before you run it.
#
# <details><summary>Hint</summary>
#
# Replace `len(context) // 4` in the cell that draws the page of text.
# </details>
#
# 2. Draw the page again for *learned*. Which families move?
#
# <details><summary>Hint</summary>
#
# `by_method("learned")` has the rows. Look at `full@2` first.
# </details>
#
# 3. Draw the page with an eighth of the entries. Which dots fall, and why KVzip's ring for labels?
#
# <details><summary>Hint</summary>
#
# Replace 0.25 by 0.125. Aware, the question stands at the prompt's end, and KVzip protects no entry. Compare `kvzip_recent`: on SmolLM2 the difference is within the error, on *built* it mends the labels (notebook 10).
# </details>
#
# 4. A method of your own: which bet would it make? Write it (README, "Yours") and put it on the page.
#
# <details><summary>Hint</summary>
#
# `python -m nanollm --methods NAME --keep 25 --json rows.json` measures one row. A row has the keys that this notebook draws.
# </details>
