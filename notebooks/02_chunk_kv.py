# %% [markdown]
# # Whole chunks, or the best tokens?
#
# **A cache may keep a part of the prompt: should it choose single tokens, or chunks of neighbouring tokens?**
#
# SnapKV, PyramidKV and AdaKV choose single tokens. **ChunkKV** (arXiv 2502.00299) cuts the prompt into chunks of ten tokens and keeps the best chunks, because a token means little without its neighbours. It also lets neighbouring layers share one choice, and its paper argues that whole chunks help in-context learning.
#
# Read `00_kv_cache.ipynb` first, and in `01_critical_kv.ipynb` the part about window scores. The code beside this notebook: `methods/chunk_kv.py`. Reading takes 30 minutes, running under two. C1 to C4 are claims in [CLAIMS.md](../CLAIMS.md). The cells run *built*, a decoder with 2.8 million parameters.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""

# %%
from dataclasses import dataclass
import time
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from lab import plot
from lab.benchmark import standard_error, text_windows
from lab.replay import Recorder, record, replay
from lab.retrieval import answer, maker
from lab.tasks import Tasks, Unmarked
from methods.baselines.snap_kv import SnapKV
from methods.chunk_kv import ChunkKV, Chunks
from methods.ours.chunk_kv_semantic import SemanticChunkKV, cut_at
from nanollm import TINY, checkpoint, tokenizer
from nanollm.cache import compress, crop, make_cache

# %%
torch.set_grad_enabled(False)
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config
w = 8  # queries of the observation window; the default, 32, is too many for our short prompts
ends = tokenizer.boundaries(encoding, c.vocab_size)  # tokens that end a line, sentence or clause
methods = {"single tokens": (SnapKV, dict(kernel_size=1)), "SnapKV": (SnapKV, {}),
           "ChunkKV": (ChunkKV, {}), "ChunkKV, c = 20": (ChunkKV, dict(select=Chunks(20))),
           "semantic chunks": (SemanticChunkKV, dict(ends=ends)),
           "pool and maximum": (ChunkKV, dict(kernel_size=7, select=Chunks(score="max")))}


def make(name, ratio, **more):
    """A function that makes fresh caches of a method, for a keep ratio."""
    Kind, options = methods[name]
    return maker(model, Kind, ratio, window_size=w, **options | more)

# %% [markdown]
# ## The idea in a picture
#
# Two facts with long values (four numbers, eight tokens) stand in a text, and the question for one of them at the end. Each head keeps an eighth of the entries. Which rule keeps the whole value?
# - *Single tokens*: the tokens with the highest window scores.
# - *SnapKV*: the same after a max-pool over seven neighbours.
# - *ChunkKV*: chunks of ten tokens, on a fixed grid, with the highest sum of window scores.
# - *Semantic chunks*, ours: chunks that end where a line, a sentence or a clause ends, or at a greatest length.

# %%
def compressed(name, tokens, ratio):
    """Caches of all layers that have read tokens (B, n) and then evicted."""
    caches = make(name, ratio)(tokens.shape[1])
    model(tokens, caches)
    compress(model, tokens, caches)
    return caches


batch = tasks.batch("needle", seed=5, B=1, T=256, facts=2, numbers=4)
n = batch.answers[0].start  # tokens of the prompt: all before the answer
prompt, facts = torch.from_numpy(batch.tokens[:, :n]), batch.facts[0, :n]
pieces = [encoding.decode([token]) for token in prompt[0].tolist()]
panels = {name: plot.kept(compressed(name, prompt, 1 / 8), n)[1].mean(0)
          for name in ("single tokens", "SnapKV", "ChunkKV", "semantic chunks")}
plot.text(pieces, panels, facts, columns=2, width=72);

# %% [markdown]
# This is layer 1, where this decoder's retrieval heads are. Facts are underlined; a darker token is kept by more of the three heads. The question asks for the second fact. Single tokens keep the start of its value. SnapKV's pool widens each choice by three tokens to either side, and still loses the middle of the value. ChunkKV keeps this value whole. Its grid cuts the other fact in two, and the half with the value is lost. Chunks that end with the sentence hold both facts, though not in all heads.
#
# ## ChunkKV in ten lines
#
# The input is the window scores of notebook 01: the attention that each earlier token got from the last 8 queries, averaged over them and over the query heads of a group.

# %%
def window_scores(q, k):
    """Window scores (B, H, n − w) of queries (B, heads, n, D) and keys (B, H, n, D)."""
    logits = q[:, :, -w:].unflatten(1, (k.shape[1], -1)) @ k.mT.unsqueeze(2) / q.shape[-1] ** 0.5
    future = torch.ones(w, k.shape[2], dtype=torch.bool).triu(k.shape[2] - w + 1)
    return logits.masked_fill(future, -torch.inf).softmax(-1)[..., :-w].mean((2, 3))


def chunk_kv(scores, budget, size=10):
    """Mask (B, H, n) of the entries that each head keeps."""
    chunk = torch.arange(scores.shape[-1]) // size                     # each token's chunk
    total = scores.new_zeros(*scores.shape[:2], chunk[-1] + 1).index_add(2, chunk, scores)
    rank = total.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)[..., chunk]
    by_rank = rank.argsort(dim=-1, stable=True)                        # tokens, best chunk first
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept = kept.scatter(-1, by_rank[..., :budget - w], True)           # the last chunk may be cut
    return F.pad(kept, (0, w), value=True)                             # … and the window stays

# %% [markdown]
# The library's ChunkKV keeps the same entries in all layers and heads:

# %%
layers = record(model, make_cache(model, store=Recorder), prompt)  # q, k, v, pos of each layer
library = plot.kept(compressed("ChunkKV", prompt, 1 / 8), n)
ours = [chunk_kv(window_scores(layer.q, layer.k), round(n / 8))[0] for layer in layers]
assert (torch.stack(ours).numpy() == library).all()
print(library.sum(-1).min(), "entries in every head")

# %% [markdown]
# ## Long facts and short ones
#
# Unless a cell says otherwise: 32 documents of 256 tokens for each task, the question in the prompt (*aware*), a quarter of the entries. Each prompt is read once and recorded; `found` replays it to a method's caches. The prompt's last token is read twice: first its query scores the entries; then it is forgotten and fed again, so that the answer comes from the compressed cache. The values of needles have 2, 4 or 8 tokens. The facts are `Unmarked`: they have no full stop and no line break, which would help chunks that end with sentences.

# %%
unmarked, asked = Unmarked(encoding, "test"), {}
for task, options in {"needle": {}, "pairs": {}, "few_shot": {}, "2": dict(facts=1, numbers=1),
                      "4": dict(facts=1, numbers=2), "8": dict(facts=1, numbers=4)}.items():
    batch = unmarked.batch("needle" if task.isdigit() else task, 1, 32, 256, **options)
    prompts = torch.from_numpy(batch.tokens[:, :batch.answers[0].start])
    asked[task] = batch, record(model, make_cache(model, store=Recorder), prompts)


def found(task, make_caches):
    """Which of the 32 questions are answered, as numbers 0 and 1."""
    batch, recording = asked[task]
    tokens, last = torch.from_numpy(batch.tokens), batch.answers[0].start - 1
    caches = make_caches(batch.question)
    replay([recording], caches)  # the whole prompt, as the model read it
    crop(caches, last)           # its last token is fed again after the compression
    return answer(model, tokens, batch.answers, last, caches)

# %%
figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
looks = "snap_kv_tokens", "snap_kv", "chunk_kv", "chunk_kv_20", "chunk_kv_semantic"
for name, look, fill in zip(methods, looks, ("white", None, None, None, "white")):
    right = [found(tokens, make(name, 1 / 4)).mean() for tokens in "248"]
    axis.plot((2, 4, 8), right, label=name, markerfacecolor=fill, **plot.style(look))
    print(f"{name:16} ", "  ".join(f"{n} tokens {x:.0%}" for n, x in zip("248", right)))
axis.set(xlabel="tokens of the value", xticks=[2, 4, 8], ylabel="needles found")
axis.grid(alpha=0.3)
figure.legend(loc="outside right center");

# %% [markdown]
# Values of eight tokens are the paper's case (claim C1). SnapKV finds values of two and four tokens, because its pool reaches three tokens beyond the first; of eight tokens it finds none here. Chunks of 10 find some long values, chunks of 20 more. Semantic chunks find nearly all.
#
# ## The grid cuts
#
# A fixed grid has a cost. `PlacedChunks` shifts the grid so that the value's first token has a given place in its chunk, 0 to 9. The value has two tokens. If the first has place 9, the grid cuts the value in two. If it has place 0, the grid cuts between the value and the words before it.

# %%
@dataclass(frozen=True)
class PlacedChunks(Chunks):
    """Shift each document's grid so that token `value` (B,) has place `place` in its chunk."""
    value: torch.Tensor | None = None
    place: int = 0

    def cut(self, window, scores):
        ends = torch.zeros_like(scores[:, 0], dtype=torch.bool)
        ends.scatter_(1, (self.value[:, None] - self.place - 1) % self.chunk_size, True)
        return cut_at(ends, self.chunk_size)[:, None].expand(scores.shape)

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for task, style in (("needle", "o-"), ("pairs", "s--")):
    stated = torch.from_numpy(asked[task][0].stated)  # where the value starts
    right = []
    for place in range(10):
        select = PlacedChunks(value=stated, place=place)
        right.append(found(task, make("ChunkKV", 1 / 4, select=select)).mean().item())
    axis.plot(right, style, label=task)
    snap = found(task, make("SnapKV", 1 / 4)).mean()
    print(f"{task:7} at places 0 to 8 {np.mean(right[:9]):.0%}, at place 9 {right[9]:.0%}; "
          f"SnapKV {snap:.0%}")
axis.set(xlabel="place of the value's first token in its chunk", ylabel="answered, aware",
         xticks=range(10))
axis.grid(alpha=0.3)
axis.legend();

# %% [markdown]
# Only the grid has moved. If the value lies in one chunk, nearly all answers survive; if the grid cuts it, most are lost. The prompt's last query looks for the value's first token, and the queries before it look for the words before the value. So the chunk with the first token gathers the scores. The chunk after it gathers hardly any.
#
# Two repairs: *pool and maximum* takes SnapKV's pooled scores and a chunk's maximum in place of its sum, so that a score counts beside a cut, too. *Semantic chunks* move the cuts.

# %%
names = "SnapKV", "ChunkKV", "pool and maximum", "semantic chunks"
titles = {"needle": "needle", "pairs": "pairs", "8": "8 tokens", "few_shot": "few-shot"}
print(" " * 18, *(f"{title:>14}" for title in titles.values()))
for name in names:
    right = [found(task, make(name, 1 / 4)) for task in titles]
    print(f"{name:18}", *(f"{x.mean():7.0%} ± {standard_error(x):3.0%} " for x in right))

# %% [markdown]
# *Few-shot* asks for the label of a line of code after 16 labelled lines. Each repair has a price. With the pool and the maximum, short values are safe, but many long values are lost. Semantic chunks keep long values, but need marks in the text: the list of pairs has none, and they do no better there than a fixed grid.
#
# ## Can layers share a choice?
#
# Neighbouring layers choose chunks more alike than tokens, the paper says (claim C2). The Jaccard similarity |A ∩ B| / |A ∪ B| of two kept sets is 1 for equal sets. Four texts, a tenth of the entries:

# %%
texts = text_windows(tasks, 4, 512, model)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
for axis, name in zip(axes, ("single tokens", "SnapKV", "ChunkKV")):
    caches = compressed(name, texts, 0.1)
    kept = torch.zeros(4, c.n_layers, c.n_kv_heads, 512, dtype=torch.bool)
    for i, cache in enumerate(caches):
        kept[:, i].scatter_(-1, cache.pos.long(), True)
    a, b = kept[:, :, None, :, :-w], kept[:, None, :, :, :-w]  # without the window
    alike = ((a & b).sum(-1) / (a | b).sum(-1)).mean((0, 3))   # (L, L)
    plot.heads(axis, alike, f"{name}: neighbours {alike.diag(1).mean():.2f}", most=1)
    axis.set_xlabel("layer")

# %% [markdown]
# It holds, but not for all layers. Layers 2 to 5 agree; layer 1, which retrieves, agrees with none. What does it cost if the lowest layer of a group chooses for the others (`reuse`)? `FromLayer1` lets layer 0 choose for itself, and layer 1 for all layers above it.

# %%
class FromLayer1(ChunkKV):
    def compress(self, model, tokens, layers):
        for leader, others in (layers[0], []), (layers[1], layers[2:]):
            window = self.window(leader, tokens)  # the prompt's last queries, and all keys
            chosen = self.select(window, window.scores(), window.room)
            for layer in (leader, *others):
                layer.keep_chosen(window.with_window(chosen))


for name, Kind, reuse in (("every layer chooses", ChunkKV, 1),
                            ("groups of 2 from layer 0", ChunkKV, 2),
                            ("group of 5 from layer 1", FromLayer1, 1)):
    shared = maker(model, Kind, 1 / 4, window_size=w, reuse=reuse)
    right = [found(task, shared).mean() for task in ("needle", "pairs")]
    print("{:26} needles {:.0%}, pairs {:.0%}".format(name, *right))

# %% [markdown]
# If layer 1 must take layer 0's indices, most answers are lost. If it chooses for itself, the four layers above can share its choice. Here the place where a group begins matters more than its size. The similarity of choices did not predict this: layer 1 resembles layer 0 as much as the layers above, whose choice it can make.
#
# Sharing saves time here (claim C4). The paper's 26.5 % more throughput is a number of large models on a GPU. On one CPU core, for 1024 tokens:

# %%
prompt = torch.from_numpy(tasks.batch("needle", 0, 1, 1024).tokens)
threads = torch.get_num_threads()
torch.set_num_threads(1)
for reuse in (1, 2, 4):
    choosing, reading = [], []
    for _ in range(5):
        caches = maker(model, ChunkKV, 1 / 4, reuse=reuse)(1024)
        began = time.perf_counter()
        model(prompt, caches)
        read = time.perf_counter()
        compress(model, prompt, caches)
        choosing.append(time.perf_counter() - read)
        reading.append(read - began)
    print(f"reuse {reuse}: {1e3 * min(choosing):.1f} ms to choose and evict, "
          f"{min(choosing) / min(reading):.1%} of the time to read the prompt")
torch.set_num_threads(threads)

# %% [markdown]
# ## In-context learning: do whole examples help?
#
# The paper argues (claim C3): an example teaches as a whole. A choice of tokens takes a bit from every example and adds noise to all; chunks keep some examples whole. We measure the share of the 16 examples of which a head keeps *every* token, and the KL divergence at the answer from the full cache's prediction.

# %%
batch = tasks.batch("few_shot", 2, 32, 256, shots=16)
tokens, last = torch.from_numpy(batch.tokens), batch.answers[0].start - 1
(line_break,) = encoding.encode_ordinary("\n")
lines = [[*row.nonzero()[0], batch.question] for row in batch.facts & (batch.tokens == line_break)]


def at_the_answer(caches):
    """Kept tokens (B, L, H, last) after the compression; log-probabilities (B, V) of the answer."""
    model(tokens[:, :last + 1], caches)
    crop(caches, last)
    compress(model, tokens[:, :last], caches)
    kept = torch.zeros(len(tokens), c.n_layers, c.n_kv_heads, last, dtype=torch.bool)
    for i, cache in enumerate(caches):
        kept[:, i].scatter_(-1, cache.pos.long(), True)
    return kept, model(tokens[:, last:last + 1], caches)[:, -1].log_softmax(-1)

# %%
_, full = at_the_answer(make_cache(model))
for name in ("single tokens", "SnapKV", "ChunkKV"):
    kept, log_p = at_the_answer(make(name, 1 / 4)(last))
    whole = torch.stack([head[..., a:b].all(-1).float().mean() for head, row in zip(kept, lines)
                         for a, b in zip(row, row[1:])])
    kl = F.kl_div(log_p, full, log_target=True, reduction="none").sum(-1)
    print(f"{name:14} examples whole {whole.mean():4.0%}   "
          f"KL {kl.mean():.4f} ± {standard_error(kl):.4f}")

# %% [markdown]
# The premise holds: chunks keep the most examples whole. The conclusion does not follow. The query that asks for the label is in the observation window. Each method keeps what this query looks at, and predicts nearly as the full cache does, however few examples are whole.
#
# The appendix (Eq. 10 to 16) bounds the error of a wrong model θ that a prompt cannot tell from the true θ\*. It expands the KL of each token around θ\*, with $I_j$ the Fisher information: $\mathrm{KL}_j = \frac12\delta^\top I_j\delta + \text{remainder}$, where $\delta = \theta - \theta^*$. Then Eq. 11 drops the remainder, which may be negative. With $R$ the largest remainder over $\lVert\delta\rVert^2$, the repaired bounds have $\lambda_{\min} - 2R$ in place of $\lambda_{\min}$, and Eq. 15 has $2R$ for O(1). We compute all of this exactly in two models: a Markov chain of five tokens, and ten independent tokens.

# %%
from methods.theory.chunk_bounds import bounds, markov, mirrored

vector = lambda *x: torch.tensor(x, dtype=torch.float64)
cases = {"Eq. 12, Markov chain: bound / ‖δ‖²":
         ("distance", lambda theta: markov(theta, 5), vector(.2, .8), vector(.3, -.3)),
         "Eq. 15, independent tokens: bound / KL": ("answer", mirrored, vector(.3), vector(.2))}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for axis, (title, (which, table, theta, delta)) in zip(axes, cases.items()):
    parts = np.linspace(0.05, 1, 20)
    rows = [bounds(table, theta, part * delta) for part in parts]
    for kind, style in (("paper", "s--"), ("repaired", "o-")):
        axis.plot(parts * delta.norm().item(), [row[f"{which}_{kind}"] for row in rows], style,
                  label=kind, markersize=4)
    print(f"{title}, at the largest δ: paper {rows[-1][f'{which}_paper']:.2f}, "
          f"repaired {rows[-1][f'{which}_repaired']:.2f}")
    axis.axhline(1, color="black", linewidth=1)
    axis.set(xlabel="‖δ‖", title=title, ylim=(0, 3))
    axis.grid(alpha=0.3)
axes[0].legend();

# %% [markdown]
# A bound over what it bounds must not lie below 1. The paper's Eq. 12 falls below. So does its Eq. 15, if the term O(1), which the paper leaves open, is 0. With the remainder both hold. They say nothing about a decoder's weights, though: double a layer's value matrix and halve its output matrix, and no prediction changes, so $\lambda_{\min} = 0$ (exercise 5).
#
# The section *Every method* of [RESULTS.md](../RESULTS.md) has both settings at 25 %, and `lab/stored/all.json` has all keep ratios.
#
# ## Three things to remember
#
# 1. On *built*, whole chunks keep long facts that single tokens lose. On SmolLM2, with half of the entries, only longer chunks do, and chunks that end with sentences (claim C1).
# 2. A fixed grid loses most values that it cuts. A pool with the maximum repairs this for values of two tokens, chunks that end with sentences for needles of all three lengths.
# 3. Similar choices, or more whole examples, do not by themselves mean better answers.
#
# ## Exercises
#
# 1. How long should a chunk be? Draw needles with values of 2 and 8 tokens over c = 1, 2, 5, 10, 20, 40.
#    <details><summary>Hint</summary><code>make("ChunkKV", 1 / 8, select=Chunks(c))</code>. With c = 1 and the pool, ChunkKV is SnapKV.</details>
# 2. Where must the grid lie for a value of eight tokens? Predict the ten places for `asked["8"]`, then measure.
#    <details><summary>Hint</summary>At how many places does a chunk of ten hold all eight tokens? Which of these also hold the words before the value?</details>
# 3. Semantic chunks end at six marks. Try line breaks alone. Which task gains, which loses?
#    <details><summary>Hint</summary>Build your own <code>ends</code>: a mask of bool over the vocabulary, as <code>tokenizer.boundaries</code> does.</details>
# 4. Write a rule that chooses where a group begins from what a layer has seen of the prompt. Does it find layer 1?
#    <details><summary>Hint</summary>Similarity is not enough. Compare the window scores that a layer's own choice gathers with those that the lower layer's choice gathers.</details>
# 5. Show that no token tells two sets of this decoder's weights apart: change two matrices, but no logit.
#    <details><summary>Hint</summary>In one layer, double the value part of <code>attention.qkv.weight</code> and halve <code>attention.o.weight</code>.</details>
