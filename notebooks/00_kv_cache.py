# %% [markdown]
# # The KV cache
#
# **What does a decoder have to remember of a text, and what goes wrong when it forgets a part?**
#
# A decoder writes one token at a time. In full attention each new token attends to all tokens before it. In each head this needs two vectors of each earlier token: its key and its value. The KV cache stores these two, so that later steps need not compute them again.
#
# You should know attention; nothing else comes before this notebook. Reading takes half an hour, running about a minute. The code to read beside it: `nanollm/method.py`, `nanollm/slots.py` and `nanollm/generate.py`.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
from dataclasses import dataclass
import time
import matplotlib.pyplot as plt
import numpy as np
import torch

# %% [markdown]
# ## The idea in a picture
#
# Each row is a query, each column a key. A token sees only itself and the tokens before it, so later tokens never change an earlier row.

# %%
n = 8
row, column = torch.arange(n)[:, None], torch.arange(n)
past = (column <= row).float()
work = {"without a cache: all rows again": past, "with a cache: one new row": past * (row == n - 1)}
figure, axes = plt.subplots(1, 2, figsize=(7, 3.3), layout="constrained")
for axis, (title, computed) in zip(axes, work.items()):
    axis.imshow(0.25 * past + 0.45 * computed, cmap="Blues", vmin=0, vmax=1)
    axis.set(title=title, xlabel="key", ylabel="query", xticks=range(n), yticks=range(n))

# %% [markdown]
# Dark squares are computed to write the next token. Pale squares were computed in earlier steps. With a cache, a step needs one new query, one new key and one new value. The other keys and values are read from memory.

# %% [markdown]
# ## The algorithm in ten lines
#
# Here is one attention head with random weights, once with all tokens together and once token by token with a cache.

# %%
torch.set_grad_enabled(False)
torch.manual_seed(0)
W_q, W_k, W_v = torch.randn(3, 16, 16) / 4
tokens = torch.randn(10, 16)

future = torch.ones(10, 10).triu(1).bool()
scores = (tokens @ W_q) @ (tokens @ W_k).T / 16**0.5
together = scores.masked_fill(future, -torch.inf).softmax(-1) @ (tokens @ W_v)

keys, values, outputs = torch.empty(0, 16), torch.empty(0, 16), []
for token in tokens:
    keys = torch.cat((keys, token[None] @ W_k))        # the cache grows by one key …
    values = torch.cat((values, token[None] @ W_v))    # … and by one value
    weights = (keys @ (token @ W_q) / 16**0.5).softmax(0)
    outputs.append(weights @ values)
assert torch.allclose(torch.stack(outputs), together, atol=1e-6)
print("largest difference:", f"{(torch.stack(outputs) - together).abs().max():.0e}")

# %% [markdown]
# The difference is rounding: the cache is no approximation. No future mask is needed in the loop, because the cache holds no future keys.
#
# ## The same in a trained decoder
#
# `nanollm/tiny` is a decoder of 2.8 million parameters, trained on source code, English text and tasks made by rule. It reads the prompt once (*prefill*), and then one token a step (*decode*).

# %%
from nanollm import TINY, tokenizer
from nanollm.cache import cache_bytes, make_cache
from nanollm.generate import generate
from nanollm import checkpoint
from lab.tasks import Tasks

model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config
text = torch.from_numpy(tasks.filler(np.random.default_rng(0), 2048))[None]  # held-out text
recomputed = text[:, :64]
for _ in range(48):
    best = model(recomputed, last=1)[:, -1].argmax(-1, keepdim=True)
    recomputed = torch.cat((recomputed, best), 1)
cached = generate(model, text[:, :64], 48)
print(f"{c.n_layers} layers, {c.n_heads} query heads that share {c.n_kv_heads} key/value heads, "
      f"head dim {c.head_dim}")
print("same tokens:", torch.equal(recomputed[:, 64:], cached))
print(encoding.decode(text[0, :64].tolist()), "⟦", encoding.decode(cached[0].tolist()), "⟧")

# %% [markdown]
# With and without the cache the decoder writes the same continuation, here between the brackets. But the times differ:

# %%
lengths = [64, 128, 256, 512, 1024, 2047]
steps = {"recompute all": [], "one step with the cache": []}
for T in lengths:
    caches = make_cache(model)
    model(text[:, :T], caches)
    ways = lambda: model(text[:, :T + 1], last=1), lambda: model(text[:, T:T + 1], caches)
    for times, way in zip(steps.values(), ways):
        clock = [time.perf_counter()]
        for _ in range(4):
            way()
            clock.append(time.perf_counter())
        times.append(1000 * np.diff(clock).min())

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, times), style in zip(steps.items(), ("o--", "s-")):
    axis.loglog(lengths, times, style, base=2, label=name)
axis.set(xlabel="tokens so far", ylabel="ms per new token", xticks=lengths, xticklabels=lengths)
axis.yaxis.set_major_formatter("{x:g}")
axis.grid(alpha=0.3)
axis.legend();

# %% [markdown]
# Recomputing pays for every token again: linear cost for the projections, quadratic cost for attention. A step with the cache projects one token and reads the stored keys and values. (Your times will differ from these.)
#
# ## The price: bytes
#
# The full cache holds a key and a value for each layer, key/value head and token:
#
# $$\text{bytes} = 2 \cdot \text{layers} \cdot \text{key/value heads} \cdot \text{tokens} \cdot \text{head dim} \cdot \text{bytes per number}$$

# %%
def full_cache_bytes(layers, kv_heads, head_dim, tokens, bytes_per_number=2):
    return 2 * layers * kv_heads * tokens * head_dim * bytes_per_number


caches = make_cache(model)
model(text[:, :1024], caches)
formula = full_cache_bytes(c.n_layers, c.n_kv_heads, c.head_dim, 1024, bytes_per_number=4)
print(f"this decoder, 1024 tokens: {formula / 1024:.0f} KiB by the formula, "
      f"{cache_bytes(caches)[0] / 1024:.0f} KiB in its tensors")
shapes = {"Llama-2-7B": (32, 32, 128), "Llama-3-8B": (32, 8, 128), "Llama-3-70B": (80, 8, 128)}
print("Llama-2-7B, 2048 tokens:", full_cache_bytes(*shapes["Llama-2-7B"], 2048) / 2**30, "GiB")

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
counts = 2 ** np.arange(10, 18)
for (name, shape), style in zip(shapes.items(), ("o-", "s--", "^:")):
    axis.loglog(counts, full_cache_bytes(*shape, counts) / 2**30, style, base=2, label=name)
axis.axhline(6.74e9 * 2 / 2**30, color="black", linewidth=1)
axis.annotate("weights of Llama-2-7B", (1024, 14))
axis.set(xlabel="tokens, all sequences of a batch together", ylabel="GiB, 16 bit", xticks=counts,
         xticklabels=[f"{n // 1024} k" for n in counts])
axis.yaxis.set_major_formatter("{x:g}")
axis.legend();

# %% [markdown]
# Our tensors take a little more than the formula says, because the cache also stores each token's position.
#
# Llama-2-7B needs 1 GiB for 2048 tokens. At about 26 thousand tokens its cache outgrows its weights. Llama-3-8B lets four query heads share one key/value head (grouped-query attention), so it needs a quarter. Each new token reads all of these bytes: the cache costs memory and, at length, time.
#
# ## Which entries do heads read?
#
# An **entry** is the key and value of one token in one key/value head. If we want to keep fewer entries, we should know which ones are read.
#
# Two kinds of object share the work:
# - A **store** keeps the entries of one layer. Here it holds each entry in a **slot**: a place for one key, one value and the token's position. The decoder calls the store's `attend(q, k, v, pos)`, which writes the new keys and values and computes attention over the slots.
# - A **method** decides which entries stay. Here all layers share one object. The decoder reads in **pieces**: the prompt is one piece or several, and later each token that it writes is one. After each piece the store calls `observe(layer, q, p)`, with the piece's queries and the attention probabilities of its last `watch` queries. By default the method's `evict(layer)` runs when the prompt is compressed, and after each later piece. `layer` is the store of the layer in question.
#
# This method evicts nothing, and notes the probabilities in the store:

# %%
from nanollm.cache import Method


class Recorder(Method):
    """Full attention that notes the probabilities p (B, H, G, T, S) of its last call."""
    watch = 256  # `observe` receives the probabilities of the last 256 queries

    def observe(self, layer, q, p):
        layer.notes["p"] = p.flatten(1, 2)  # (B, heads, T, S)


def record(model, tokens):
    caches = make_cache(model, Recorder)
    model(tokens, caches)
    return torch.stack([layer.notes["p"] for layer in caches], 1)  # (B, L, heads, T, S)

# %% [markdown]
# The text to read is a *needle* task: four facts stand in real text, and a question at the end asks for one of them. The facts are random, so only the text can tell the answer.

# %%
batch = tasks.batch("needle", seed=0, B=32, T=256)
needle, span = torch.from_numpy(batch.tokens), batch.answers[0]
p = record(model, needle[:16])
asking = span.start - 1  # the question's last token; the answer follows
value = torch.from_numpy(batch.stated)  # where the value asked for starts
print(encoding.decode(needle[0].tolist()))

# %%
from lab import plot

query, key = torch.arange(256)[:, None], torch.arange(256)
late, old = slice(128, span.start), slice(0, 128)
even = (1 / (query + 1.0))[late].mean()  # the weight of each token if all were read alike
average = p[..., late, old].mean(-2) / even  # (B, L, heads, 128)
measures = {"most read token, × even share": average.amax(-1),
            "weight on the last 8 tokens": (p * (key > query - 8))[..., late, :].sum(-1).mean(-1),
            "end of question → value": p[torch.arange(16), :, :, asking, value[:16]]}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.3), layout="constrained")
for axis, (name, numbers), form in zip(axes, measures.items(), ("{:.1f}", "{:.2f}", "{:.2f}")):
    plot.heads(axis, numbers.mean(0), name, form)

# %% [markdown]
# Each square is one query head, averaged over 16 documents. The left map counts in *even shares*. An even share is the weight that a token would get if all were read alike. Heads divide the work:
# - **Recency heads** read their neighbourhood.
# - **Retrieval heads** put most of the weight of the question's last token on one of about 250 tokens: the first of the value that is asked for.
# - Other heads have **heavy hitters**: tokens that many queries read. A heavy hitter at the very start is called a **sink** (StreamingLLM, arXiv 2309.17453). SmolLM2 has strong sinks (notebook 08); this decoder has none.
#
# Here is the strongest head of each kind, on the first document:

# %%
def strongest(score):
    """Return (layer, head) of the largest number in (L, heads)."""
    return divmod(score.argmax().item(), score.shape[1])


figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
kinds = "heavy hitters", "recency", "retrieval"
for axis, kind, numbers in zip(axes, kinds, measures.values()):
    layer, head = strongest(numbers.mean(0))
    axis.imshow(p[0, layer, head].sqrt(), cmap="Greys", vmax=1)  # so that small ones show
    axis.set(title=f"{kind}: layer {layer}, head {head}", xlabel="key", ylabel="query")
axes[2].annotate("value", (value[0], asking), (0.7, 0.8), textcoords="axes fraction",
                 arrowprops=dict(arrowstyle="->"));

# %% [markdown]
# A heavy hitter is a vertical stroke. A recency head is the diagonal. In the retrieval head, the arrow marks one weight: the question's last token reads a value far back.
#
# While the retrieval head reads a token, it looks for the token that followed an earlier copy of it. Such a head is an **induction head**: a head in a lower layer writes into each token which token came before it, and the induction head looks for a match. In other models induction heads form in training (Olsson et al., arXiv 2209.11895). In this small decoder both heads were built into the initial weights, in layers 0 and 1, and then trained. Notebook 08 compares it with two decoders that learned to match and copy; one is SmolLM2.
#
# ## Forgetting two entries
#
# The value has two tokens. A store's `keep` takes the slots that stay, and forgets the others. Just before the question's last token is read, `keep` drops the value's two tokens: in no layer, in the retrieving layer alone, or in all layers but that one.

# %%
from lab.retrieval import answer

retrieval, _ = strongest(measures["end of question → value"].mean(0))
others = [[i for i in range(asking) if i not in (start, start + 1)] for start in value.tolist()]
slots = torch.tensor(others)[:, None].expand(-1, c.n_kv_heads, -1)  # (B, H, asking − 2)
cases = {"no layer": [], f"layer {retrieval}, which retrieves": [retrieval],
         "all other layers": [i for i in range(c.n_layers) if i != retrieval]}
for name, layers in cases.items():
    caches = make_cache(model)
    model(needle[:, :asking], caches)
    for i in layers:
        caches[i].keep(slots)
    right = answer(model, needle, [span], asking, caches).mean()
    print(f"value dropped in {name:25} {right:.2f} of the answers are right")

# %% [markdown]
# Two of about 250 tokens in the retrieving layer decide the answer. The other layers do not need them. A compression method has to guess which entries matter, and in which head.
#
# ## Two rules for forgetting
#
# **StreamingLLM** keeps the first four tokens and the newest. **H2O** keeps the newest and the heavy hitters: the entries with the largest sum of attention from all queries so far, for each head apart. This is the whole of H2O. Its options are the fields of a dataclass:

# %%
from nanollm.cache import ALL


@dataclass
class HeavyHitters(Method):
    budget: int                       # entries that each head may keep
    watch = ALL                       # `observe` receives every query's probabilities
    entry = {"sum": torch.float32}    # a number that the store keeps beside each entry

    def observe(self, layer, q, p):   # p (B, H, G, queries, S): G query heads share an entry
        layer.put("sum", layer.slot("sum") + p.sum((2, 3)))

    def evict(self, layer):
        newest = layer.pos >= layer.seen - round(self.budget / 2)
        score = layer.slot("sum").masked_fill(newest, torch.inf)
        layer.shrink(score, self.budget)  # the highest scores of each head stay

# %% [markdown]
# The library's H2O keeps the same entries. In the figure both rules keep a quarter of the prompt, and the prompt ends before the question.

# %%
from methods.baselines import h2o, random_eviction, streaming_llm
from nanollm.cache import compress

prompt, facts = needle[:1, :batch.question], batch.facts[0, :batch.question]
pieces = [encoding.decode([token]) for token in prompt[0].tolist()]
panels = {}
for name, Kind in {"StreamingLLM": streaming_llm.StreamingLLM, "H2O": h2o.H2O}.items():
    caches = make_cache(model, Kind, budget=round(batch.question / 4))
    model(prompt, caches)
    compress(model, prompt, caches)  # the whole prompt has been read: each layer evicts
    kept = plot.kept(caches, batch.question)  # (L, H, tokens) of bool
    panels[f"{name}, layer {retrieval}"] = kept[retrieval].mean(0)
own = make_cache(model, HeavyHitters, budget=round(batch.question / 4))
model(prompt, own)
compress(model, prompt, own)
assert (plot.kept(own, batch.question) == kept).all()  # as the library's H2O
plot.text(pieces, panels, facts, columns=2, width=72);

# %% [markdown]
# Facts are underlined, bold if kept and orange if dropped. On a dark ground every head keeps the token; grey tokens are dropped. StreamingLLM drops the middle in every head. H2O gives half of its budget to the newest tokens. The other half goes to heavy hitters, many of them at the start, where tokens have been read longest. Where the background is pale, only some heads keep the token.
#
# There are two moments to compress:
# - **Query-agnostic** (short: agnostic): the cache is compressed before the question is known, as when a document is stored for later questions.
# - **Query-aware** (short: aware): the question is part of the prompt that is compressed, as in a chat.

# %%
from lab.benchmark import Benchmark
from lab.retrieval import maker
methods = {"streaming_llm": streaming_llm.StreamingLLM, "h2o": h2o.H2O,
           "random": random_eviction.RandomEviction}
ratios = [0.0625, 0.125, 0.25, 0.5, 0.75]
read = Benchmark.read(model, {"needle": batch}, None)  # each prompt is read once, and recorded
full, _ = read.measured(model, maker(model, Method, None))
accuracy = {name: [read.measured(model, maker(model, Kind, ratio))[0] for ratio in ratios]
            for name, Kind in methods.items()}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for axis, setting in zip(axes, ("agnostic", "aware")):
    for name, results in accuracy.items():
        found = [right[f"needle_{setting}"].mean() for right in results]
        axis.semilogx(ratios, found, base=2, label=name, **plot.style(name))
    axis.axhline(full[f"needle_{setting}"].mean(), color="k", linewidth=1, label="full cache")
    axis.set(title=setting, xlabel="keep ratio, %")
    axis.set_xticks(ratios, [f"{100 * ratio:g}" for ratio in ratios])
    axis.grid(alpha=0.3)
axes[0].set_ylabel("needles found")
axes[0].legend();

# %% [markdown]
# With half of the entries or fewer, each method loses more than half of the needles. StreamingLLM finds a needle only if its value lies in the kept end. H2O finds one only if its value is new or has drawn much attention. The aware setting hardly helps H2O: it sums over all queries, and the question has few. (With 32 documents, differences below 0.2 mean little.)
#
# ## The memory of a conversation
#
# Here is what four caches hold during a conversation of three turns. In a turn the decoder reads 96 tokens in pieces of 16, the cache is compressed, and 64 more tokens come one by one, as if the decoder wrote them.

# %%
from methods import scissorhands
from methods.baselines import snap_kv
from nanollm.cache import begin_turn, cache_bytes

text = torch.from_numpy(tasks.stream[:480])[None]
kinds = {"full": Method, "snap_kv": snap_kv.SnapKV, "h2o": h2o.H2O,
         "scissorhands": scissorhands.Scissorhands}
figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, Kind in kinds.items():
    caches, KiB = make_cache(model, Kind, **({} if Kind is Method else dict(budget=64))), []
    for turn in text.split(160, 1):
        begin_turn(caches)
        for piece in (*turn[:, :96].split(16, 1), *turn[:, 96:].split(1, 1)):
            model(piece, caches)
            KiB += [cache_bytes(caches)[0] / 1024] * piece.shape[1]
            if len(KiB) % 160 == 96:  # the turn's prompt ends
                compress(model, text[:, :len(KiB)], caches)
    axis.plot(KiB, **plot.style(name) | dict(marker=""), label=name)
axis.set(xlabel="tokens of the conversation", ylabel="KiB", title="a budget of 64 entries")
axis.legend();

# %% [markdown]
# SnapKV falls to its budget when the prompt of a turn ends, and grows while it writes; while it reads it also stores the last queries. H2O holds its budget while it writes, and grows while it reads. Scissorhands never exceeds its budget, so its memory is bounded before the conversation begins; when it is full, it drops half. It also stores a count and 400 bits an entry: in which of the last 400 steps the entry was unimportant.
#
# Most other methods in this repository try to find better entries. Notebook 01 begins with the simplest step: let only the prompt's last queries decide.
#
# ## Three things to remember
#
# 1. A full KV cache stores each token's key and value once; it changes the time and the memory, not the output.
# 2. Its bytes grow with layers × key/value heads × tokens, and at length they exceed the weights.
# 3. In this decoder few entries in few heads carry an answer, and a method that forgets must guess them before or after it knows the question.
#
# ## Exercises
#
# 1. How many GiB of cache do 64 conversations of 8192 tokens with Llama-3-70B take in 16 bits? How many tokens fit into 80 GiB?
#    <details><summary>Hint</summary>Call <code>full_cache_bytes(*shapes["Llama-3-70B"], …)</code>. Only the total number of tokens matters.</details>
# 2. How much does the model depend on its retrieval head? Set the head's columns of `blocks[layer].attention.o.weight` to zero and measure `retrieve(model, batch, maker(model, Method, None))` of `lab/retrieval.py`.
#    <details><summary>Hint</summary>Head h owns the columns h·D to (h+1)·D. Work on a copy of the model; then remove the next strongest head as well.</details>
# 3. Does this model need its first token? Compare `StreamingLLM` with `sinks=0` and `sinks=4`.
#    <details><summary>Hint</summary><code>maker</code> passes options on to the method. `continuation` and `reference` in <code>lab/continuation.py</code> measure −log p (`nll`).</details>
# 4. What is `H2O` with `recent=1`, and what with `recent=0`? Predict both curves of the figure of needles found, then draw them.
#    <details><summary>Hint</summary>The newest token is always kept.</details>
# 5. Write an oracle: a method that keeps exactly the facts and the newest tokens. How small may its budget be before needles are lost, agnostic?
#    <details><summary>Hint</summary>Change <code>HeavyHitters</code>: give it the facts' positions as an option, and a score that is high for facts. It needs no <code>observe</code>.</details>
