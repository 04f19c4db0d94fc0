# %% [markdown]
# # Two decoders: is a finding about the method, or about the model?
#
# **Question.** This repository compares methods on small decoders. Would another decoder give the same verdicts?
#
# Two decoders are shipped. Architecture and tokenizer are the same. They differ in where their retrieval heads come from, and in how long they were trained. A retrieval head finds an earlier match of the current text and copies what followed.
#
# - **built** (`nanollm/tiny`): retrieval heads were written into layer 1 before training.
# - **learned** (`nanollm/tiny_learned`): training started from random weights above layer 0. Heads and whole layers were left out at random during training. It read four times as many tokens.
#
# **Read before:** `00_kv_cache.ipynb`. **Code beside it:** `lab/initial_weights.py`. **Time:** a quarter of an hour to read, a minute to run.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import json
import matplotlib.pyplot as plt
import torch

from lab import plot
from lab.benchmark import Benchmark
from lab.evaluate import continuation, maker, mean_and_error, reference, text_windows
from lab.registry import given, load, pick
from lab.render_results import rows
from lab.replay import Recorder, record
from lab.tasks import Tasks
from lab.initial_weights import CONFIG, induction_start, learned_start
from methods.baselines.streaming_llm import StreamingLLM
from nanollm import SHIPPED, TINY
from nanollm.attention import probabilities
from nanollm.cache import make_cache
from nanollm.model import Config, Decoder

# %%
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # two threads on so small a model wait for each other
models = {name: load(folder, "cpu")[0] for name, folder in SHIPPED.items()}
tasks = Tasks(load(TINY, "cpu")[1], "test")  # both have the same tokenizer
reports = {name: json.loads((folder / "train.json").read_text())
           for name, folder in SHIPPED.items()}
print(f"{'256 held-out documents each':30}{'built':>14}{'learned':>14}")
for task in reports["built"]["exact_match"]:
    cells = [reports[name]["exact_match"][task] for name in models]
    print(f"{task:30}" + "".join(f"{x['value']:8.3f} ±{x['standard_error']:.3f}" for x in cells))
bits = [reports[name]["bits_per_byte"]["model"] for name in models]
print(f"{'bits per byte of text':30}" + "".join(f"{x:14.3f}" for x in bits))

# %% [markdown]
# Each training run measured these figures at its end (`train.json`). Commands and notebooks use *built* unless you ask for the other with `--model nanollm/tiny_learned`. *built* answers more of these questions, and we know where it retrieves, so we can see what a method must keep.
#
# Repeat 32 random tokens. How often does each decoder predict the right next token in the second round, before and after its training?

# %%
once = torch.randint(tasks.bos, (64, 32), generator=torch.Generator().manual_seed(0))
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
batch = tasks.batch("needle", seed=0, B=32, T=256)
prompts = torch.from_numpy(batch.tokens[:, :batch.answers[0].start])
value = torch.from_numpy(batch.stated)  # where each document states the value
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for axis, (name, model) in zip(axes, models.items()):
    weights = []  # of each layer: from the last token to the value, (heads,)
    for layer in record(model, make_cache(model, Recorder), prompts):
        p = probabilities(layer.q[:, :, -1:], layer.k, None, None, None)  # the last token sees all
        weights.append(p.flatten(1, 2)[torch.arange(32), :, 0, value].mean(0))
    plot.heads(axis, torch.stack(weights), f"{name}: end of question → value", most=1)

# %% [markdown]
# In *built*, three heads of layer 1 read the value, each with most of its attention. In *learned*, most heads of layers 1 and 2 read it. A method that drops a fact from one layer can be forgiven in *learned*, but hardly in *built*.
#
# ## Attention sinks
#
# An attention **sink** is a first token that receives much attention and carries no information. Training texts of *learned* begin with BOS, so a sink could form. The next cell lets StreamingLLM keep a quarter of the entries, with one, no, or four first tokens among them, and prints the KL.

# %%
for name, model in models.items():
    full = reference(model, text_windows(tasks, 16, 512, model), 64)
    kl = {sinks: continuation(model, full, maker(model, StreamingLLM, 0.25, sinks=sinks),
                               full.recording)["kl"]
          for sinks in (1, 0, 4)}
    print(f"{name:8} one first token: {kl[1].mean():.3f}", *(
        "{}: {:+.3f} ±{:.3f}".format(sinks, *mean_and_error(kl[sinks] - kl[1]))
        for sinks in (0, 4)), sep="   ")

# %% [markdown]
# In *built* the first token may go. In *learned* the KL more than triples without it, as the authors of StreamingLLM saw in large models. Three more first tokens bring little. For this reason the `config.json` of *learned* names BOS, and all measurements begin its texts with BOS.
#
# ## The same methods on both
#
# Ten methods keep a quarter of the entries (`quantized_2` keeps all, in two bits), and answer 32 needles and 32 lists of pairs.

# %%
NAMES = ["snap_kv", "pyramid_kv", "ada_kv", "snap_kv+critical", "chunk_kv", "chunk_kv_reuse", "h2o",
         "streaming_llm", "kvzip", "quantized_2"]
batches = {task: tasks.batch(task, seed=0, B=32, T=256) for task in ("needle", "pairs")}
found = {}  # (task and setting, method) → right answers of each decoder
for model in models.values():
    benchmark = Benchmark.read(model, batches, None)  # each prompt is read once, and recorded
    for name, Method in pick(NAMES).items():
        ratio = None if name.startswith("quantized") else 0.25
        make = maker(model, Method, ratio, **given(Method, window_size=8))
        for panel, right in benchmark.measured(model, make)[0].items():
            found.setdefault((panel, name), []).append(right.mean().item())

# %%
panels = [f"{task}_{setting}" for task in batches for setting in ("aware", "agnostic")]
figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained", sharey=True)
for axis, panel in zip(axes, panels):
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name in NAMES:
        look = plot.style(name) | dict(linestyle="")
        if "+" in name or "reuse" in name:  # the same colour as what it is a variant of
            look["fillstyle"] = "none"
        axis.plot(*found[panel, name], label=name if axis is axes[0] else None, **look)
    axis.set(title=panel.replace("_", ", "), xlabel="built", xlim=(-.05, 1.05), ylim=(-.05, 1.05))
axes[0].set_ylabel("learned")
figure.legend(loc="outside right center", fontsize=8);

# %% [markdown]
# A point on the diagonal is a finding about the method. A point off the diagonal depends on the decoder. A standard error is at most 0.09.
#
# On the diagonal: SnapKV, PyramidKV, AdaKV and CriticalKV find nearly all facts if the question is known, and less than a third if it is not. KVzip finds most facts either way; so do two bits a number.
#
# Off the diagonal: ChunkKV with shared indices (`chunk_kv_reuse`), aware. In *built*, layer 1 must use the chunks that layer 0 chose, and most facts are lost. In *learned*, layer 2 chooses for itself, and most facts are found.
#
# ## Claims with two verdicts
#
# `python -m nanollm claims` judges claims of the papers on both decoders by the same rules. These verdicts differ:

# %%
verdicts = {}
for row in rows("claims"):
    verdicts.setdefault((row["claim"], row["says"]), {})[row["model"]] = row["verdict"]
for (claim, says), by_model in verdicts.items():
    if len(set(by_model.values())) > 1:
        print(f"{claim}: {says}")
        print(*(f"    {name}: {verdict}" for name, verdict in by_model.items()), sep="\n")

# %% [markdown]
# [CLAIMS.md](../CLAIMS.md) explains each difference. "Undecided" means that the documents were too few. All other verdicts agree.
#
# ## Three things to remember
#
# 1. Two decoders of one architecture can retrieve in different places. Test a method on both before you believe it.
# 2. Redundant heads forgive a method that drops a fact from one head or layer.
# 3. A sink is a habit that the training texts create. Keep the first token if your model has one.
#
# ## Exercises
#
# 1. Attention to the value does not prove that a head matters. Remove heads, the strongest first, and count the needles that are found. How many may go in each decoder?
#    <details><summary>Hint</summary><code>without_heads(model, stays)</code> in <code>lab/initial_weights.py</code> multiplies the heads' outputs. Measure with <code>retrieve</code> and <code>make_cache(model)</code>.</details>
# 2. Does a sink form in *built* if you put BOS before the text? Predict first.
#    <details><summary>Hint</summary>Put <code>tasks.bos</code> before the tokens of <code>text_windows</code>, and measure the weight of the first token as in the figure of heads.</details>
# 3. Draw the last figure with an eighth of the entries. Which findings still hold on both decoders?
#    <details><summary>Hint</summary>Replace 0.25 by 0.125.</details>
