# %% [markdown]
# # Two decoders: is a finding about the method, or about the model?
#
# **Question.** This repository compares methods on small decoders. Would another decoder give the same verdicts?
#
# Two decoders are shipped. Architecture and tokenizer are the same. They differ in where their retrieval heads come from, and in how long they were trained. A retrieval head finds an earlier match of the current text and copies what followed.
#
# - **built** (`nanollm/tiny`): retrieval heads were written into layer 1 before training.
# - **learned** (`nanollm/tiny_learned`): training started from random weights above layer 0. Heads and whole layers were left out at random during training. It read four times as many tokens, also of the harder tasks (notebook 13).
#
# **Read before:** `00_kv_cache.ipynb`. **Code beside it:** `experiments/inside.py`, `nanollm/training/initial_weights.py`. **Time:** half an hour to read, two minutes to run.

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
# Each training run measured these figures at its end (`train.json`). Commands and notebooks use *built* unless you ask for the other. It answers more of these questions, and we know where it retrieves, so we can see what a method must keep. `--model nanollm/tiny_learned` takes *learned*.
#
# ## Before training
#
# Repeat 32 random tokens. How often does the decoder predict the right next token in the second round?

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
# *learned* starts at chance. Training made all of its copying.
#
# ## Where they retrieve
#
# A needle document ends with a question. How much attention does its last token pay to the first token of the value?

# %%
batch = tasks.batch("needle", seed=0, B=16, T=256)
read = {name: inside.read_at_question(model, batch) for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, weight) in zip(axes, read.items()):
    plot.heads(axis, weight, f"{name}: end of question → value", most=1)

# %% [markdown]
# In *built*, three heads of layer 1 read the value, each with most of its attention. In *learned*, most heads of layers 1 and 2 read it; one of them gives it more than half of its attention.
#
# Attention to the value does not prove that a head matters. The next figure removes the attention of two layers at a time and counts the needles that are still found. The diagonal removes one layer.

# %%
without = {name: inside.without_pairs(model, tasks, documents=8) for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, found) in zip(axes, without.items()):
    plot.heads(axis, found, f"{name}: needles without two layers", most=1)
    axis.set(xlabel="layer left out", ylabel="layer left out")

# %% [markdown]
# *built* depends on layer 1: without it nothing is found. In *learned*, layers 1 and 2 replace each other: one may go, but not both. Both decoders need layer 0, which tells each token what came before it.
#
# Now remove one head at a time:

# %%
without_one = {name: inside.without_each(model, tasks, documents=8)
               for name, model in models.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, found) in zip(axes, without_one.items()):
    plot.heads(axis, found, f"{name}: needles without this head", most=1)

# %% [markdown]
# Above layer 0 no single head matters, in either decoder. The three heads of *built* do the same work.
#
# How many heads must go before retrieval breaks? One curve removes the heads that read the value first. The other removes heads in random order.

# %%
def in_order(weight) -> list:
    """(layer, head) above layer 0, those with the most weight first."""
    order = weight[1:].flatten().argsort(descending=True).tolist()
    return [(1 + i // weight.shape[1], i % weight.shape[1]) for i in order]


counts = [0, 1, 2, 4, 8, 12, 20, 30]
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
# *built* loses needles from the second head on; after four, none is left. *learned* finds all needles until more than eight heads are gone. A method that drops a fact from one head can be forgiven in *learned*, but hardly in *built*.
#
# ## Attention sinks
#
# An attention **sink** is a first token that receives much attention and carries no information. Training texts of *learned* begin with BOS, so a sink could form. The table shows the attention that the second half of a text pays to its first token, and to the most-read token of the first half.

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
# *learned* has sinks: a head of layer 2 gives BOS 0.81 of its attention, and a head of layer 1 gives it 0.41. *built* has none. Without BOS no other token takes over. For this reason the `config.json` of *learned* names BOS, and all measurements begin its texts with BOS.
#
# The layers with sinks are the layers that retrieve. A head that finds no match must put its attention somewhere.
#
# StreamingLLM keeps the first tokens for this reason. The next cell changes how many it keeps, at a keep ratio of 25 %, and prints the change of the KL.

# %%
for name, model in models.items():
    full = reference(model, texts[name], 64)
    kl = {sinks: continuation(model, full, maker(model, StreamingLLM, 0.25, sinks=sinks))["kl"]
          for sinks in (1, 0, 4)}
    print(f"{name:8} one first token: {kl[1].mean():.3f}", *(
        f"{sinks}: {(kl[sinks] - kl[1]).mean():+.3f} ±{standard_error(kl[sinks] - kl[1]):.3f}"
        for sinks in (0, 4)), sep="   ")

# %% [markdown]
# In *built* the first token may go. In *learned* the KL more than triples without it, as the authors of StreamingLLM saw in large models. Three more first tokens bring little.
#
# ## Value norms and attention tails
#
# CriticalKV weighs an entry by the norm of its value. This helps only if norms differ within a head. Scissorhands expects a power law: a few tokens receive most of the attention.

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
# Norms differ by similar factors in both decoders. Theorem B.3 of Scissorhands requires a tail exponent of at least 2. Three of the six layers of *built* and five of *learned* are below it. A token is *pivotal* if a later query gives it more than the even share. Tokens that were pivotal before are pivotal again hardly more often than by chance.
#
# ## How long window scores stay true
#
# SnapKV scores entries by the prompt's last queries. Later queries may need other entries. The figure compares the quarter of entries with the highest window scores with the same quarter for a later window.

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
# Window scores fade with distance. Layer 1 of *built*, which retrieves, starts at 0.37, where chance is 0.25: each query looks for something else. In the upper layers window scores last longer.
#
# ## The same methods on both
#
# Stored rows of `python -m nanollm --all` for both decoders: 32 needles and 32 lists of pairs, keep ratio 25 %.

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
# A point on the diagonal is a finding about the method. A point off the diagonal depends on the decoder.
#
# On the diagonal: SnapKV, PyramidKV and AdaKV find nearly all facts if the question is known, and fewer than half if it is not. KVzip and DuoAttention keep what the full cache finds. Two bits a number lose only some pairs.
#
# Off the diagonal: ChunkKV with shared indices. In *built*, layer 1 must use the entries that layer 0 chose, and four of five needles are lost. In *learned*, layer 2 chooses for itself, and few needles are lost.
#
# ## Which heads need a full cache?
#
# DuoAttention gives a full cache to a few heads. `importance` lets one head alone stream and counts the lost answers. `gates` trains one gate a head, for all heads together. Do they find the same heads?

# %%
train_tasks, kept = Tasks(tasks.encoding, "train"), {}
asked = {task: tasks.batch(task, 0, 32, 512) for task in ("needle", "pairs")}
for name, model in models.items():
    alone = importance(model, train_tasks, documents=8)
    together = gates(model, train_tasks, rows=4)
    kept[name] = {"one head alone": retrieval_heads(alone),
                  "gates together": retrieval_heads(together, 0.3)}
    for how, heads in kept[name].items():
        make = maker(model, DuoAttention, 0.25, heads=heads)
        print(f"{name:8} {how}:", *(
            f"{task}, agnostic {found_agnostic(model, batch, make).mean():.2f} "
            for task, batch in asked.items()), sep="  ")
        print(f"    (layer, head): {' '.join(map(str, heads))}")

# %% [markdown]
# In *built* both find the three heads of layer 1. In *learned* no single head is missed, so `importance` finds none, and DuoAttention loses the facts. The gates find five heads of layers 1 and 2. A keep ratio of 25 % has room for four of them, which is enough. `DuoAttention.calibrate` therefore uses gates, as the paper does.
#
# ## Claims with two verdicts
#
# `python -m nanollm claims` judges 22 claims on both decoders by the same rules. These verdicts differ:

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
# Each difference has its explanation in [CLAIMS.md](../CLAIMS.md). "Undecided" means that 32 documents or 64 texts were too few. All other verdicts agree.
#
# ## Three things to remember
#
# 1. Two decoders of one architecture can retrieve in different places. Test a method on both before you believe it.
# 2. Redundant heads forgive a method that drops a fact from one head.
# 3. A sink is a habit that the training texts create. Keep the first token if your model has one.
#
# ## Exercises
#
# 1. What spread the retrieval, the training or the dropped heads? Train two runs of 400 steps, one with `LEAVE_OUT = 0, 0` in `nanollm/training/train.py`, and compare the figure of layers.
#    <details><summary>Hint</summary><code>python -m nanollm train --start learned --steps 400</code> takes ten minutes.</details>
# 2. Choose the heads of *learned* that get a full cache yourself, from the figure of single heads.
#    <details><summary>Hint</summary><code>maker(..., heads=...)</code> counts key/value heads; two query heads share one.</details>
# 3. Does a sink form in *built* if you put BOS before the text? Predict first.
#    <details><summary>Hint</summary>Read the rows of <i>built</i> in the table of sinks.</details>
