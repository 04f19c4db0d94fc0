# %% [markdown]
# # Two decoders
#
# Every verdict of this repository is about a decoder, and a decoder has habits. Two of them ship. They have the same architecture, tokenizer and tasks. They differ in how they came to retrieve:
# **built** (`nanollm/tiny`) was started with heads that match and copy, in layer 1, made by hand. **learned** (`nanollm/tiny_learned`) was started without any, and while it was trained, heads and whole layers were left out at random.
# This notebook looks inside both, and asks which findings about methods are about the methods.
#
# **Read before:** `00_kv_cache.ipynb`. The code beside it: `nanollm/training/initial_weights.py` and `experiments/inside.py`.
#
# **How long it takes:** half an hour to read, two minutes to run.
#
# **What you will know:** where each of the two retrieves and what that hangs on; whether they have attention sinks; what a sink is worth; and which verdicts on methods change with the decoder.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import json
import matplotlib.pyplot as plt
import numpy as np
import torch

# %%
from experiments import inside
from experiments.inside import importance
from experiments.render import by_method, rows
from methods.duo_attention import DuoAttention
from methods.duo_gates import gates, retrieval_heads
from methods.streaming_llm import StreamingLLM
from methods.theory.sketch_error import found_agnostic
from nanollm import SHIPPED, TINY
from nanollm.commands import plot
from nanollm.commands.registry import load
from nanollm.commands.text_table import text_table
from nanollm.measure.evaluate import continuation, maker, reference, standard_error, text_windows
from nanollm.measure.tasks import Tasks
from nanollm.model import Config, Decoder
from nanollm.training.initial_weights import induction_start, learned_start
from nanollm.training.train import CONFIG

# %%
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # two threads on so small a model wait for each other
models = {name: load(folder, "cpu")[0] for name, folder in SHIPPED.items()}
tasks = Tasks(load(TINY, "cpu")[1], "test")  # both have the same tokenizer
told = {name: json.loads((folder / "train.json").read_text()) for name, folder in SHIPPED.items()}
print(f"{'256 held-out documents each':30}{'built':>14}{'learned':>14}")
for task in told["built"]["exact_match"]:
    cells = [told[name]["exact_match"][task] for name in models]
    print(f"{task:30}" + "".join(f"{x['value']:8.3f} ±{x['standard_error']:.3f}" for x in cells))
bits = [told[name]["bits_per_byte"]["model"] for name in models]
print(f"{'bits per byte of text':30}" + "".join(f"{x:14.3f}" for x in bits))

# %% [markdown]
# The figures are those that each training run measured at its end (`train.json`). RESULTS.md has them with the commands.
# *built* is what every command and the other notebooks take if nothing else is said: it answers more, and where it retrieves is known, so that one can see what a method would have to keep. `--model nanollm/tiny_learned` takes the other.
#
# ## How they began
#
# In both starts the heads of layer 0 look back one to four tokens. In *built*, heads of layer 1 then look for what stands after an earlier occurrence and copy it. In *learned*, all that is above layer 0 is random.
# To see the difference, take 32 random tokens twice. In the second round, how often is the right next token the likeliest of 2048?

# %%
rng = np.random.default_rng(0)
once = torch.from_numpy(rng.integers(0, tasks.bos, (64, 32)))
twice = torch.cat((once, once), 1)


def copied(model) -> float:
    """Share of the second round's tokens that are the likeliest."""
    best = model(twice)[:, 32:-1].argmax(-1)
    return (best == twice[:, 33:]).double().mean().item()


for name, start in {"built": induction_start, "learned": learned_start}.items():
    begun = Decoder(Config(**CONFIG))
    start(begun, 0)
    print(f"{name:8} before training {copied(begun):.3f}, after {copied(models[name]):.3f}")

# %% [markdown]
# *learned* starts at chance. What copies in it, training has made.
#
# ## Where they retrieve
#
# A needle document ends with a question. From the question's last token, how much weight does each head give to the first token of the value that it asks for?

# %%
batch = tasks.batch("needle", seed=0, B=16, T=256)
read = {name: inside.read_at_question(model, batch) for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, weight) in zip(axes, read.items()):
    plot.heads(axis, weight, f"{name}: end of question → value", most=1)

# %% [markdown]
# In *built* three heads of layer 1 read the value, each with most of its weight. Those are the ones that were built. In *learned* all six heads of layer 1 and all six of layer 2 read it, and none with more than a third of its weight.
#
# A head that looks at the value need not be the one that matters. So leave attention out, and see what is still found: two layers at a time, and on the diagonal one.

# %%
without = {name: inside.without_pairs(model, tasks, documents=8) for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, found) in zip(axes, without.items()):
    plot.heads(axis, found, f"{name}: needles without two layers", most=1)
    axis.set(xlabel="layer left out", ylabel="layer left out")

# %% [markdown]
# *built* hangs on layer 1: without it nothing is found. In *learned* layers 1 and 2 stand in for one another. Either can go, and next to nothing is lost; without both nothing is found. Layer 0 has no stand-in in either: it tells each token what came before it.
#
# And one head at a time:

# %%
without_one = {name: inside.without_each(model, tasks, documents=8)
               for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, found) in zip(axes, without_one.items()):
    plot.heads(axis, found, f"{name}: needles without this head", most=1)

# %% [markdown]
# Above layer 0 no single head matters in either decoder. That holds for *built* as well: its three heads do the same.
#
# How many have to go until retrieval breaks? Here heads above layer 0 are left out in the order of the first figure, those that look at the value first; and, to compare, in an order drawn at random.

# %%
def in_order(weight) -> list:
    """(layer, head) above layer 0, those with the most weight first."""
    order = weight[1:].flatten().argsort(descending=True).tolist()
    return [(1 + i // weight.shape[1], i % weight.shape[1]) for i in order]


counts = [0, 1, 2, 4, 6, 8, 12, 16, 20, 24, 30]
drawn = in_order(torch.rand(6, 6, generator=torch.Generator().manual_seed(0)))
curves = {}
for name, model in models.items():
    for kind, order in (("by weight", in_order(read[name])), ("at random", drawn)):
        curves[name, kind] = [inside.found_without(model, tasks, order[:n], 16) for n in counts]
        print(f"{name:8} {kind}:", *(f"{x:5.2f}" for x in curves[name, kind]))

# %%
COLORS = {"built": "#0072b2", "learned": "#d55e00"}
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (name, kind), found in curves.items():
    axis.plot(counts, found, "o-" if kind == "by weight" else "s:", color=COLORS[name],
              label=f"{name}, {kind}")
axis.set(xlabel="heads left out, of 30 above layer 0", ylabel="needles found")
axis.grid(alpha=0.3)
axis.legend();

# %% [markdown]
# *built* begins to lose needles with the second head that goes, and has none left after four. *learned* finds nearly all until more than eight are gone: twelve heads look at the value. So a method that drops a fact from one of its heads may be forgiven; in *built* it hardly is.
#
# ## What they read anyway
#
# An attention **sink** is a first token that gets much weight and says nothing. Every training document of *learned* begins with BOS, so that one could form. Here is the weight that the second half of a text gives to its first token, and to the token of the first half that it reads most. The texts begin with BOS in one row, and as they stand in the other.

# %%
texts = {name: text_windows(tasks, 16, 512, model) for name, model in models.items()}
bare = text_windows(tasks, 16, 512)
begun = torch.cat((torch.full((16, 1), tasks.bos), bare[:, :-1]), 1)
print("strongest head of each layer         layer " + "".join(f"{i:7}" for i in range(6)))
for name, model in models.items():
    for what, tokens in {"BOS, then text": begun, "text": bare}.items():
        for which, weight in zip(("first token", "most read"), inside.sinks(model, tokens)):
            print(f"{name:8} {what:15} {which:17}"
                  + "".join(f"{x:7.3f}" for x in weight.amax(1)))

# %% [markdown]
# *learned* has sinks, and *built* has none. With BOS before the text, a head of layer 2 gives it 0.57 of its weight, and one of layer 1 gives it 0.26. Without BOS no token takes its place, and the decoder reads the text worse. So its `config.json` names BOS, and every measurement here begins its texts as the checkpoint says.
# The layers with sinks are those that retrieve: a head that looks for something and does not find it has to look somewhere.
#
# Does a sink have to stay? StreamingLLM keeps the first tokens for its sake. Here are its KL to the full cache with a quarter of the entries, and what changes if it keeps no first token, or four.

# %%
for name, model in models.items():
    full = reference(model, texts[name], 64)
    kl = {sinks: continuation(model, full, maker(model, StreamingLLM, 0.25, sinks=sinks))["kl"]
          for sinks in (1, 0, 4)}
    print(f"{name:8} one first token: {kl[1].mean():.3f}", *(
        f"{sinks}: {(kl[sinks] - kl[1]).mean():+.3f} ±{standard_error(kl[sinks] - kl[1]):.3f}"
        for sinks in (0, 4)), sep="   ")

# %% [markdown]
# In *built* the first token may go, and nothing changes. In *learned* the KL nearly triples without it. That is what StreamingLLM's authors saw in large models; three first tokens more bring little.
#
# ## Norms and tails
#
# CriticalKV weighs entries by the norms of their values, so norms should differ within a head. Scissorhands expects a power law: few tokens with most of the weight.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, model) in zip(axes, models.items()):
    spread = inside.norm_spread(model, texts[name])
    plot.heads(axis, spread, f"{name}: norms, 95 % over 5 %", "{:.1f}", most=4)
seen = {name: inside.observed(model, texts[name]).mean(1) for name, model in models.items()}
labels = "pivotal before", "cosine of x, F(x)", "tail exponent", "before, by chance"
for name in models:
    for row, x in zip(labels, seen[name]):
        print(f"{name:8} {row:18}", *(f"{value:6.2f}" for value in x))

# %% [markdown]
# Norms in *learned* differ about as much as in *built*, and least in layers 0 to 2. The tails are no thinner: in five of six layers the exponent is below the 2 that Theorem B.3 asks for. Of all tokens 85 to 87 % are pivotal in layers 0 to 2 (the rows *by chance*), and more above. And the share that was pivotal before is still within 1.3 points of chance, but for layer 3 of *learned* (0.97, where chance has 0.94).
#
# ## How far window scores last
#
# SnapKV lets the last queries of the prompt vote. Do the window scores still hold for later queries? Of the tokens that a later window reads most, a quarter of them, this part was among those that the prompt's last window read most.

# %%
scores = {name: inside.scores_kept(model, texts[name]) for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for axis, (name, of_layer) in zip(axes, scores.items()):
    for i, line in enumerate(of_layer):
        axis.plot(inside.DISTANCES, line, "o-", color=plt.cm.viridis(i / 6), label=f"layer {i}")
    axis.axhline(0.25, color="black", linewidth=1)
    axis.set(title=name, xlabel="tokens later", xticks=inside.DISTANCES, ylim=(0, 1))
    axis.grid(alpha=0.3)
axes[0].set_ylabel("of the later window's quarter")
axes[1].legend(ncols=2);

# %% [markdown]
# In both, window scores fade with distance. Up to 64 tokens they are lowest in layer 1 of *built*, which retrieves: 0.37 from the start, where chance is 0.25. There a query reads what it asks for, and the next one asks for something else. In layers 1 and 2 of *learned* they begin at 0.41 and 0.50, about as in its layer 0. Window scores last in the upper layers.
#
# ## What that does to methods
#
# The same methods on both, with a quarter of the entries: 32 needles and 32 lists of pairs, the question with the prompt (*aware*) or after it (*agnostic*). These are rows of `python -m nanollm --all` and of the same with `--model nanollm/tiny_learned`, as RESULTS.md keeps them.

# %%
NAMES = ["snap_kv", "pyramid_kv", "ada_kv", "chunk_kv", "chunk_kv_reuse", "snap_kv+critical", "h2o",
         "streaming_llm", "duo_attention", "kvzip", "quantized_2"]
columns = [f"{task}_{setting}" for task in ("needle", "pairs") for setting in ("aware", "agnostic")]
found = {}  # (decoder, method) → share of right answers, a column each
for name, section in {"built": "all", "learned": "learned"}.items():
    for (method, part), row in by_method(section).items():
        if part in (0.25, None):
            found[name, method] = [row[column] for column in columns]

table = [["", *(name for name in models for column in columns)],
         ["", *["needle", "agnostic", "pairs", "agnostic"] * 2]]
for method in NAMES:
    table.append([method, *(f"{x:.2f}" for name in models for x in found[name, method])])
print(text_table(table))

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.6), layout="constrained", sharey=True)
for i, (axis, column) in enumerate(zip(axes, columns)):
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for method in NAMES:
        x, y = (found[name, method][i] for name in models)
        look = plot.style(method) | dict(linestyle="")
        if "+" in method or "reuse" in method:  # the same colour as what it is a variant of
            look["fillstyle"] = "none"
        axis.plot(x, y, label=method if i == 3 else None, **look)
    axis.set(title=column.replace("_", ", "), xlabel="built", xlim=(-.05, 1.05), ylim=(-.05, 1.05))
axes[0].set_ylabel("learned")
figure.legend(loc="outside right center", fontsize=8);

# %% [markdown]
# A point on the diagonal is a finding about the method. What lies off it depends on the decoder.
# On the diagonal: with the question SnapKV, PyramidKV and AdaKV find nearly all, and without it less than half. H2O and StreamingLLM find few needles in both. KVzip, which reads the prompt twice, and DuoAttention keep what the full cache finds. Two bits a number keep all but some pairs (0.84 of 0.97, and 0.81 of 0.88).
# Off it: ChunkKV's shared indices. In *built* a group that begins with layer 0 hands its choice to layer 1, the only one that retrieves, and four of five needles are lost. In *learned* layer 2 chooses for itself, and few needles are lost, but a third of the pairs. CriticalKV's two stages lose next to none in either here. With an eighth of 256 tokens they lose many, and more in *learned* (RESULTS.md, the papers read in other ways).
#
# ## Which heads need everything?
#
# DuoAttention keeps a whole cache for a few heads. `importance` asks what is lost if one head alone streams. `gates` trains a gate for every head, all together, with a penalty that closes those that are not needed. The question is whether they find the same heads.

# %%
train_tasks, kept = Tasks(tasks.encoding, "train"), {}
asked = {task: tasks.batch(task, 0, 32, 512) for task in ("needle", "pairs")}
for name, model in models.items():
    alone = importance(model, train_tasks, documents=16)
    together = gates(model, train_tasks, rows=4)
    kept[name] = {"one head alone": retrieval_heads(alone),
                  "gates together": retrieval_heads(together, 0.3)}
    for how, heads in kept[name].items():
        for share in (0.5, 0.25):
            make = maker(model, DuoAttention, share, heads=heads)
            print(f"{name:8} {how}, {share:.0%}:", *(
                f"{task}, agnostic {found_agnostic(model, batch, make).mean():.2f} "
                for task, batch in asked.items()), sep="  ")
        print(f"    (layer, head): {' '.join(map(str, heads))}")

# %% [markdown]
# In *built* both ways find the three heads of layer 1. In *learned* no single head is missed, so `importance` finds none, every head streams, and DuoAttention is as agnostic as StreamingLLM. The gates find five heads of layers 1 and 2. A quarter of the entries has room for four of them, and these are enough: all needles are found, and 0.88 of the pairs, as with half of the entries.
# So `DuoAttention.calibrate` goes by the gates. The paper does, too.
#
# ## Verdicts
#
# `python -m nanollm claims` judges 22 claims on both by one rule each. What it printed is kept in `experiments/stored/claims.json`, and CLAIMS.md has a column for each decoder. Here are the verdicts that are not the same.

# %%
verdicts = {}
for row in rows("claims"):
    verdicts.setdefault(row["claim"], {})[row["model"]] = row
for claim, on in verdicts.items():
    if len({row["verdict"] for row in on.values()}) > 1:
        print(f"{claim}: {on['built']['says']}")
        for name, row in on.items():
            numbers = (f"{what} {x:.3g} ± {error:.1g}"
                       for what, (x, error) in row["numbers"].items())
            print(f"    {name}: {row['verdict']}\n        " + "\n        ".join(numbers))

# %% [markdown]
# C1: chunks of ten tokens keep long facts better than single tokens in *learned*. In *built* 32 documents do not decide it.
# C2: sharing indices costs most of the pairs in *built*. In *learned* it costs a quarter of them, and 32 documents do not decide whether that is too much.
# R5: in *built* the Fisher shares leave some layers no room. In *learned* they leave enough, and help the paper's sketch; our fix, which helped in *built*, costs a little.
# P12: where a cache is compressed while the answer is written, CriticalKV's norms make the text worse in *built*. In *learned* 64 texts do not decide it.
# P8: with a sixteenth of the entries, and window scores pooled in both stages, CriticalKV's norms find more than SnapKV in *built*. In *learned* 32 documents do not decide it.
# R15: in *learned* more room for Recent, 0.6 of the budget, lowers the KL by a quarter. In *built* nothing is decided.
# All other verdicts are the same, among them P5 and P7 on CriticalKV's norms, those on KVReviver's sketch and on what is forgotten when the question comes later. Sinks bring P6 near to what the paper assumes: from 74 % of the heads and prompts to 92 %, at a quarter of the entries. The rule asks for 95 % beyond the first layer.
#
# ## Exercises
#
# 1. Is it the training that spread retrieval, or the dropping of heads? Train two runs of 400 steps, with `LEAVE_OUT = 0, 0` in `nanollm/training/train.py` for one, and compare the maps of layers. *Hint: `python -m nanollm train --start learned --steps 400`, ten minutes.*
# 2. Which heads of *learned* would you give a whole cache? Let DuoAttention keep those of the last map of heads instead of its own. *Hint: `maker(..., heads=...)`; it counts key/value heads, two query heads to one.*
# 3. Does a sink form if you put BOS before the text in *built*? Predict first. *Hint: the table of sinks.*
