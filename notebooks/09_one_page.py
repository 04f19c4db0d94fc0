# %% [markdown]
# # One page: which method would you take?
#
# You have a decoder, a long prompt, and memory for a quarter of its cache. This repository has more than thirty methods. Which one would you take?
#
# The answer depends on one thing more than on all others: what do you know about the question when you compress? This lesson shows that on one text, then on one page for all methods, then in bytes and time. It ends with a table to choose by, and a playground.
#
# **Before:** `00_kv_cache.ipynb`. **Runs:** under a minute. Long measurements are not repeated here; their rows are read from `experiments/stored/`. RESULTS.md names the command of each. **Then you will know** what each family of methods bets on, when it loses its bet, and which method to try first.
#
# Words: an *entry* is one token's key and value in one head. The *keep ratio* is the share of the prompt's entries that stay. *Aware*: the question is part of the compressed prompt. *Agnostic*: it comes after the compression.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import matplotlib.pyplot as plt
import numpy as np
import torch

from experiments import fewest_bytes
from experiments.render import by_method, rows
from nanollm import TINY
from nanollm.cache import make_cache
from nanollm.commands import plot
from nanollm.commands.demo import FACT, PAGE, QUESTION, answer, prompt
from nanollm.commands.registry import given, load, pick
from nanollm.commands.text_table import text_table

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
# 3. **The text.** Keep what the text can be rebuilt from, whatever the question. KVzip reads the prompt twice: what the reread looks at must stay.
#
# Two kinds of method drop no token for good. KIVI (`quantized`) rounds each number to a few bits. KVReviver adds evicted entries into shared slots, a sketch.
#
# Others look at neither question nor attention. StreamingLLM keeps the first and the newest tokens, KeyDiff the keys that are least alike. ExpectedAttention guesses the queries to come. DuoAttention gives the whole cache to a few calibrated heads.
#
# Some names below are this repository's own: `theta` and `residual` on top of SnapKV; `one_reading`, which is KVzip without the reread; `kvzip_recent`, which always keeps the newest entries; `kvzip_4` and `snap_kv_4`, which store the kept entries in four bits; and the variants `_semantic`, `_weight` and `_shrunk`. The first lines of each file in `methods/` and `methods/ours/` say what it does.
#
# ## One page of text, four caches
#
# The page states four codes. A quarter of its entries may stay. Then comes a question for one code, 2356. Guess first: which of the four caches can answer?

# %%
tokens, cuts = prompt(model, encoding, PAGE, QUESTION)  # cuts: how many tokens are compressed
context = tokens[0, :cuts["agnostic"]].tolist()
end = len(context) - len(encoding.encode_ordinary(PAGE.partition(FACT)[2]))
start = end - len(encoding.encode_ordinary(FACT))

panels = {}
for name, setting in (("snap_kv", "aware"), ("snap_kv", "agnostic"),
                      ("h2o", "agnostic"), ("kvzip", "agnostic")):
    Method = pick([name])[name]
    caches = make_cache(model, Method, budget=len(context) // 4, **given(Method, window_size=8))
    kept, written = answer(model, tokens, cuts[setting], caches, new=2)
    title = f"{name}, {setting}: answers {encoding.decode(written)}"
    panels[title] = kept.float().mean((0, 1))[:len(context)]
pieces = [encoding.decode([token]) for token in context]
plot.text(pieces, panels, [start <= i < end for i in range(len(context))],
          low="kept by no head", mark="the fact asked for", columns=2, width=70);

# %% [markdown]
# Each token is as dark as the share of heads that keep it. Aware, SnapKV keeps the fact in some heads, and these are enough. Agnostic, its window is the page's end, which says nothing about codes; the answer is made up. H2O keeps the page's two ends and frequent words. KVzip keeps something of every fact, and little of what repeats or follows from the words before.
#
# ## All methods on one page
#
# Here is one row for most methods, with a quarter of the entries; `quantized` has its bits instead. A ring is the aware score, a dot the agnostic one; a grey line joins them.
#
# *Needle*: one of four facts in a text is asked for. *Pairs*: the value of one of 16 listed keys. *Label*: the label of a line, after 16 examples. *KL*: how far predictions of plain text move from those of the full cache; less is better.

# %%
FAMILIES = {
    "window scores": "snap_kv pyramid_kv ada_kv snap_kv+critical snap_kv+theta "
                     "snap_kv+residual r_kv drop_kv tova",
    "worst window query": "defensive_kv layer_defensive_kv worst_query",
    "chunks, window scores": "chunk_kv chunk_kv_reuse chunk_kv_semantic",
    "the past": "h2o scissorhands scissorhands_weight cam",
    "sums of entries": "kv_reviver kv_reviver_mean kv_reviver_shrunk moment_kv",
    "the text": "kvzip kvzip_recent kvzip_gain kvzip_fast one_reading",
    "calibrated heads": "duo_attention duo_attention_kvzip retrieval_layers",
    "keys, places, chance": "expected_attention key_diff streaming_llm "
                            "streaming_llm_absolute random",
    "few bits": "quantized_2 quantized_3 quantized_4 turbo_2 kvzip_4 snap_kv_4",
    "everything held": "quest full",
}

# %%
names = [name for family in FAMILIES.values() for name in family.split()]
stored = by_method("all")  # python -m nanollm --all, on the decoder *built*
page = [stored.get((name, 0.25)) or stored[name, None] for name in names]
sizes = [len(family.split()) for family in FAMILIES.values()]
height = -np.arange(len(names)) - np.repeat(range(len(sizes)), sizes)  # a gap between families
documents = page[0]["documents"]
print(f"{len(names)} rows, {documents} documents a task, standard error at most "
      f"{0.5 / documents ** 0.5:.2f}")

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 11.5), layout="constrained", sharey=True)
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
# - **Long grey lines** are lost bets. Methods that go by window scores find nearly everything aware, and little agnostic. CriticalKV's norms on top (`critical`) do not change that.
# - **Ring and dot together, on the left**: the past does not know which fact will be asked for. It does keep enough of 16 examples to label a line, since many examples say the same.
# - **Ring and dot together, on the right**: KVzip, its fast variant and DuoAttention answer either way. So do few bits. `worst_query` needs neither a second reading nor a calibration: it ranks all entries of all layers by the window query that wants them most.
# - KVReviver as printed stands apart in the last column. Its repaired variants (`mean`, `shrunk`) come near H2O and do not pass it.
# - Quest holds the whole cache and reads a quarter of it. It saves no memory.
#
# The standard error of a dot stands above the figure. A difference of less than two of them decides nothing.
#
# ## How few bytes?
#
# The page shows one budget. Now the budget shrinks, and the question comes later. Each line is the share of the full cache's answers that a method keeps, mean of needles and pairs. The left decoder, *built*, started with retrieval heads in its weights. The right one, *learned*, learned its own.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
measured = rows("fewest_bytes")  # python -m experiments.fewest_bytes
shown = ("snap_kv h2o one_reading duo_attention worst_query kvzip_fast kvzip kvzip_4 "
         "kvzip_gain_turbo")
for axis, decoder in zip(axes, ("built", "learned")):
    for name in shown.split():
        line = sorted((row["bytes"], row["kept"]) for row in measured
                      if (row["decoder"], row["method"]) == (decoder, name))
        axis.plot(*zip(*line), label=name, **plot.style(name))
    line = sorted((row["bytes"], row["kept"]) for row in measured
                  if row["decoder"] == decoder and row["method"].startswith("quantized"))
    axis.plot(*zip(*line), label="quantized, 2 to 4 bits", **plot.style("quantized_2"))
    axis.plot(*[np.geomspace(0.015, 0.7)] * 2, color="0.6", linewidth=1)
    axis.axhline(0.95, color="black", linewidth=0.8, linestyle=":")
    axis.set(title=decoder, xscale="log", xlabel="share of a full cache's bytes, 16 bits",
             xticks=[0.02, 0.05, 0.1, 0.2, 0.5], xticklabels=["2 %", "5 %", "10 %", "20 %", "50 %"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set(ylabel="answers kept, agnostic")
axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1));

# %% [markdown]
# On the grey curve a method keeps as many answers as bytes; the dotted line is 95 %. H2O lies below the curve on both decoders. So does SnapKV; only on *learned*, with half of the bytes, does it reach the curve. KVzip lies far above, because most tokens of a text follow from the others. What stays can be rounded too: `kvzip_4` stores KVzip's entries in four bits, and the two savings multiply. `kvzip_gain_turbo` (notebook 10) counts only what the reread gains, and stores it in three bits: 3.0 % of the bytes keep 98 % of the answers on *built* and all on *learned*; half as many keep 96 % on both.
#
# ## What does it cost?
#
# Which methods keep 95 % of the answers on both decoders, and what do they ask in return? *Reading* is the time until a question may come, in units of the full cache's. *A step* is a decoding step of a batch of 8 after 2,048 tokens, with a quarter of the entries, in the same units. Both are times of a CPU.

# %%
enough = {decoder: fewest_bytes.enough([row for row in measured if row["decoder"] == decoder])
          for decoder in ("built", "learned")}
ms = {row["method"]: row["batch 8 ms"] for row in rows("speed") if row["table"] == "step"}
table = [["method", "bytes, built", "bytes, learned", "reading", "a step"]]
for name, best in sorted(enough["built"].items(), key=lambda item: item[1]["bytes"]):
    if name in enough["learned"]:
        shares = (f"{enough[decoder][name]['bytes']:.1%}" for decoder in enough)
        step = f"{ms[name] / ms['full']:.1f}" if name in ms else "–"
        table.append([name, *shares, f"{best['reading']:.1f}", step])
print(text_table(table))

# %% [markdown]
# Nobody saves memory for nothing. KVzip's reread makes reading three times as long, and weighing it by its gain six times. Fast KVzip and DuoAttention avoid the reread, but must learn something about the decoder first. Few bits must become numbers again at each step. KVzip's heads keep unlike numbers of entries, so a step attends to them one by one; it is still faster than the full cache's. No method of the five papers is in this list: they bet on a known question, or on the past.
#
# ## Which one would you take?
#
# | you know | try first | because | it costs |
# |---|---|---|---|
# | the question is in the prompt, and no other comes | `snap_kv`, `pyramid_kv` | the question says what to keep | every later question |
# | other questions come; a third of the memory is there | `quantized_3` | nothing is chosen, so nothing is chosen wrongly | slower steps |
# | questions come early or late; a quarter of the memory is there | `worst_query` | the query that wants an entry most shows what it is for | with an eighth, later questions |
# | other questions come; less memory is there | `kvzip_4` | it keeps what the text can be rebuilt from | reading twice, slower steps |
# | the fewest bytes in memory; reading may take six times as long | `kvzip_gain_turbo` | only what the text does not foretell must be kept | reading four times, slower steps, some pairs |
# | the smallest file ([RECORDS.md](../RECORDS.md)) | `kvzip_gain_coded`; after one reading `retrieval_layers` | keys and values of a token depend on each other | calibration; all but facts in the first |
# | many prompts, each read once | `kvzip_fast`, `duo_attention` | they have learned what a reread would say | a calibration |
# | a question in the prompt, and others later | `kvzip_recent` | KVzip alone may drop the prompt's end | a little memory for the newest |
# | examples, then a label | `h2o` | many lines say the same | single facts |
# | an endless stream | `streaming_llm`, `h2o` | the budget holds for ever | all that is old |
# | enough memory, little bandwidth | `quest` | each query reads the pages that it needs | more memory than the full cache |
#
# All this was measured on two decoders of 2.8 M parameters. On your model the answer may differ, and finding out takes minutes: `python -m nanollm --model FOLDER` (notebook 07).
#
# ## The playground
#
# Change the text, the question, the method, the budget or the window: the text is read, compressed and asked anew. It runs where this notebook runs; a stored notebook shows a picture. [docs/index.html](../docs/index.html) shows the same in a browser, with six methods and no installation.
#
# ![the playground in a browser](playground.png)
#
# Take `snap_kv`, *agnostic*, and raise the budget until it finds the code. Take `kvzip` and lower it until the code is lost. Write a text of your own: `The code of NAME is NUMBER.` is the kind of fact that this decoder was trained on.

# %%
from nanollm.commands.playground import Playground
Playground(model, encoding)

# %% [markdown]
# ## Three things to remember
#
# 1. Ask first what is known about the question. Window scores answer the question in the prompt, and lose most others.
# 2. If any question may come, keep every token in fewer bits, or keep what the text can be rebuilt from. The two multiply.
# 3. Bytes are one price. Reading time, calibration and slower steps are the others.
#
# ## Exercises
#
# 1. At which budget does SnapKV, agnostic, find the code of the page above? Guess before you run it.
#
# <details><summary>Hint</summary>
#
# Replace `len(context) // 4` in the cell that draws the page of text, or use the playground.
# </details>
#
# 2. Draw the page again for *learned*. Which families move?
#
# <details><summary>Hint</summary>
#
# `by_method("learned")` has the rows. Look at `expected_attention` first.
# </details>
#
# 3. Draw the page with an eighth of the entries. Which dots fall, and why KVzip's ring for labels?
#
# <details><summary>Hint</summary>
#
# Replace 0.25 by 0.125. Aware, the question stands at the prompt's end, and KVzip protects no entry. Compare `kvzip_recent`.
# </details>
#
# 4. A method of your own: which bet would it make? Write its `score` (README, "Your own method") and put it on the page.
#
# <details><summary>Hint</summary>
#
# `python -m nanollm --methods NAME --keep 25 --json rows.json` measures one row. A row has the keys that this notebook draws.
# </details>
