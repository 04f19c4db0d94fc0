# %% [markdown]
# # The KV cache
#
# A decoder writes one token at a time, and each new token attends to all tokens before it.
# What attention needs from an earlier token is its key and its value, so a decoder keeps these two and never computes them twice: that is the KV cache.
# This notebook shows the cache of the small decoder that ships in `nanollm/tiny`: that it changes nothing but the time, how many bytes it takes, how trained heads read it, and what is lost when a part of it is thrown away.
#
# **Before:** nothing here; you should know attention. **Runs:** about a minute. **Then you will know** what a KV cache holds, what it costs, what trained heads read in it, and what is lost when entries are thrown away.
#
# The code to read beside it: `nanollm/cache.py` and `nanollm/generate.py`.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import time
import matplotlib.pyplot as plt
import numpy as np
import torch

from methods import h2o, random_eviction, streaming_llm
from nanollm import tokenizer
from nanollm.cache import LayerCache, cache_bytes, end_prefill, make_cache
from nanollm.commands import plot
from nanollm.generate import generate
from nanollm.hf import checkpoint
from nanollm.measure.evaluate import answer, full_cache_bytes, held, maker, retrieve
from nanollm.measure.tasks import Tasks
from nanollm.model import Config, Decoder
from nanollm.training.train import CONFIG, TINY, induction_start

# %%
torch.set_grad_enabled(False)
torch.manual_seed(0)
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks = Tasks(encoding, "test")  # held-out text and retrieval tasks made from it
text = torch.from_numpy(tasks.filler(np.random.default_rng(0), 2048))[None]
c = model.config
print(f"{c.n_layers} layers, {c.n_heads} query heads that share {c.n_kv_heads} key/value heads, "
      f"head dim {c.head_dim}")

# %% [markdown]
# ## Old keys and values never change
#
# A token sees only what lies before it. Whatever comes later, its keys and values stay as they were, in every layer.
# Here the decoder reads 100 tokens, and then, with a second cache, the same text up to token 200.

# %%
short, long = make_cache(model), make_cache(model)
model(text[:, :100], short)
model(text[:, :200], long)
print("keys of one layer (batch, key/value heads, slots, head dim):", *long[0].k.shape)
pairs = [pair for a, b in zip(short, long) for pair in ((a.k, b.k), (a.v, b.v))]
change = max((x - y[:, :, :100]).abs().max().item() for x, y in pairs)
print(f"largest change of a key or value of the first 100 tokens: {change:.1g}")

# %% [markdown]
# The difference is rounding. So it is enough to compute each token once and to keep its key and value.

# %% [markdown]
# ## The same tokens
#
# Without a cache, each new token costs a pass over the whole text so far. With one, the prompt is read once (*prefill*); then the decoder is handed only the newest token, step by step (*decode*), and finds the rest in memory.
# RoPE rotates a key by the token's position in the text, so keys can be stored rotated; the newest query is rotated by the number of tokens *seen*.

# %%
prompt = text[:, :64]
recomputed = prompt
for _ in range(48):
    best = model(recomputed, last=1)[:, -1].argmax(-1, keepdim=True)
    recomputed = torch.cat((recomputed, best), 1)
cached = generate(model, prompt, 48)
print("same tokens:", torch.equal(recomputed[:, 64:], cached))
print(encoding.decode(prompt[0].tolist()), "⟦", encoding.decode(cached[0].tolist()), "⟧")

# %% [markdown]
# Both ways write the same continuation, here between the brackets. The cache is no approximation.

# %% [markdown]
# ## Time per token
#
# Recomputing is linear in the text for the projections and quadratic for attention; a step with the cache is constant for the projections and linear for attention.

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
for name, times in steps.items():
    print(f"{name}: {times[-1] / times[0]:.1f} times as long "
          f"at {lengths[-1]} tokens as at {lengths[0]}")

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, times), style in zip(steps.items(), ("o--", "s-")):
    axis.loglog(lengths, times, style, base=2, label=name)
axis.set(xlabel="tokens so far", ylabel="ms per new token", xticks=lengths, xticklabels=lengths)
axis.yaxis.set_major_formatter("{x:g}")
axis.grid(alpha=0.3)
axis.legend();

# %% [markdown]
# Recomputing grows with the text, faster and faster. The step with the cache grows far more slowly: a part of it, the projections and the calls, is the same at every length. (Times are of one machine, and of what else it did; the factors are printed above the figure.)

# %% [markdown]
# ## Bytes over length
#
# The cache holds a key and a value, for each layer, key/value head and token (KVReviver, Eq. 1):
#
# $$\text{bytes} = 2 \cdot \text{layers} \cdot \text{key/value heads} \cdot \text{tokens} \cdot \text{head dim} \cdot \text{bytes per number}$$
#
# `cache_bytes` counts the tensors themselves: what is *live*, and what is *allocated*, for buffers grow in steps so that not every new token copies the whole cache.

# %%
print("tokens   formula      live  allocated, KiB")
for T in (64, 256, 1024):
    caches = make_cache(model)
    model(text[:, :T - 16], caches)
    for i in range(T - 16, T):  # the prompt at once, the rest one by one
        model(text[:, i:i + 1], caches)
    formula = full_cache_bytes(c, T, bytes_per_number=4)
    print(f"{T:6d}" + "".join(f"{n / 1024:10.0f}" for n in (formula, *cache_bytes(caches))))

# %% [markdown]
# Live is what the formula says plus 1/(2 · head dim): with each slot this cache keeps its token's position, 4 bytes.
# As long as nothing is evicted, one could count; afterwards the position can no longer be told from the slot.

# %%
# …, layers, query heads, key/value heads, …
shapes = {"Llama-2-7B": Config(32_000, 4096, 32, 32, 32, 4096, 11_008),
          "Llama-3-8B": Config(128_256, 8192, 32, 32, 8, 4096, 14_336),
          "Llama-3-70B": Config(128_256, 8192, 80, 64, 8, 8192, 28_672)}
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
tokens = 2 ** np.arange(10, 18)
for (name, shape), style in zip(shapes.items(), ("o-", "s--", "^:")):
    axis.loglog(tokens, full_cache_bytes(shape, tokens) / 2**30, style, base=2, label=name)
axis.axhline(6.74e9 * 2 / 2**30, color="black", linewidth=1)
axis.annotate("weights of Llama-2-7B", (1024, 14))
axis.set(xlabel="tokens, all sequences of a batch together", ylabel="GiB, 16 bit", xticks=tokens,
         xticklabels=[f"{n // 1024} k" for n in tokens])
axis.yaxis.set_major_formatter("{x:g}")
axis.legend()
print("Llama-2-7B at 2048 tokens:", full_cache_bytes(shapes["Llama-2-7B"], 2048) / 2**30, "GiB")

# %% [markdown]
# Llama-2-7B needs 1 GiB for 2048 tokens, and at about 25 k tokens the cache outgrows the weights.
# Llama-3-8B lets 4 query heads share one key/value head (grouped-query attention) and so needs a quarter.
# All of these bytes are read for each new token: the cache costs memory and, at length, time.

# %% [markdown]
# ## The seam
#
# The decoder says one thing to memory, `y = cache.attend(q, k, v, pos)`, and that is four steps: `write` the new keys and values, `read` what attention may see, attention, `observe`.
# A method of compression overrides one of the steps. The smallest override there is forgets nothing and looks on: with `watch = 256`, `observe` is handed the probabilities of the last 256 queries, and no text here has more. (`ALL` stands for any number; then it is told of a long prompt 128 queries at a time.)

# %%
class Recorder(LayerCache):
    """Full attention that keeps the probabilities p (B, H, G, T, S) of its last call."""
    watch = 256

    def observe(self, q, p):
        self.p = p.flatten(1, 2)  # (B, heads, T, S)


def record(model, tokens):
    caches = make_cache(model, Recorder)
    model(tokens, caches)
    return torch.stack([cache.p for cache in caches], 1)  # (B, L, heads, T, S)

# %% [markdown]
# What the heads are to read is a needle task: four facts in a real text, one of which is asked for at the end.
# The words and numbers never occurred as facts in training, so the answer is nowhere but in the text.

# %%
batch = tasks.batch("needle", seed=0, B=32, T=256)
needle, span = torch.from_numpy(batch.tokens), batch.answers[0]
p = record(model, needle[:16])
asking = span.start - 1  # the question's last token: the answer follows
value = torch.from_numpy(batch.stated)  # where the value of the fact in question starts
print(encoding.decode(needle[0].tolist()))

# %% [markdown]
# ## What heads read
#
# Four numbers for each head, averaged over documents and, but for the last, over the queries of the second half: how strongly the first token is read; how strongly the one token that is read most; how much weight goes to the last eight tokens; and how much goes from the end of the question to the value that it asks for.
# The first two are in units of the even share, which a token would get if all were read alike.

# %%
T = needle.shape[1]
query, key = torch.arange(T)[:, None], torch.arange(T)
late, old = slice(T // 2, span.start), slice(0, T // 2)
even = (1 / (query + 1.0))[late].mean()
average = p[..., late, old].mean(-2) / even  # (B, L, heads, S), in even shares
measures = {"first token, even shares": average[..., 0],
            "most read token, even shares": average.amax(-1),
            "last 8 tokens": (p * (key > query - 8))[..., late, :].sum(-1).mean(-1),
            "end of question → value": p[torch.arange(16), :, :, asking, value[:16]]}
figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
for axis, (name, numbers), form in zip(axes, measures.items(), ["{:.1f}"] * 2 + ["{:.2f}"] * 2):
    plot.heads(axis, numbers.mean(0), name, form)

# %% [markdown]
# Heads divide the work. **Recency** heads read their neighbourhood. A few **retrieval** heads put most of their weight on the one value that is asked for, out of 250 tokens.
# Other heads have **heavy hitters**: tokens that many queries read, whatever they look for.
# A heavy hitter at the very start that says nothing is called a **sink**: softmax has to spend its weight somewhere, and the first token is visible to every query.
# In large language models sinks "often account for over 90 % of attention scores" (KVReviver's paper; StreamingLLM, arXiv 2309.17453, gave them the name). On the left map a head with half of its weight on the first token would read about 100.

# %%
def strongest(score):
    """(layer, head) of the largest number in (L, heads)."""
    return divmod(score.argmax().item(), score.shape[1])


figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
kinds = "heavy hitters", "recency", "retrieval"
for axis, kind, numbers in zip(axes, kinds, list(measures.values())[1:]):
    layer, head = strongest(numbers.mean(0))
    plot.attention(axis, p[0, layer, head], f"{kind}: layer {layer}, head {head}")
axes[2].annotate("value", (value[0], asking), (0.7, 0.8), textcoords="axes fraction",
                 arrowprops=dict(arrowstyle="->"));

# %% [markdown]
# Each row is a query, each column a key; what lies right of the diagonal is the future.
# A heavy hitter is a vertical stroke, a sink would be one along the whole left edge, a recency head is the diagonal. The retrieval head shows single dots and short slanted strokes: at the arrow, the end of the question reads a value far back.

# %%
retrieval = strongest(measures["end of question → value"].mean(0))
pieces = [encoding.decode([token]) for token in needle[0].tolist()]
panels = {"at the end of the question": asking,
          "one token later, at the answer's first half": asking + 1}
weights_of = {name: p[(0, *retrieval, i)] for name, i in panels.items()}
plot.text(pieces, weights_of, batch.facts[0], "no weight", "all the weight");

# %% [markdown]
# The head goes to the first half of the value, then to the second. It finds "the token that came after what I am reading now": an **induction head**.
#
# How much hangs on two entries? `keep` is how every method forgets; here it drops the value, just before the last token of the question, in one layer or in all others.

# %%
layer = retrieval[0]
others = [[i for i in range(asking) if i not in (at, at + 1)] for at in value.tolist()]
slots = torch.tensor(others)[:, None].expand(-1, c.n_kv_heads, -1)  # (B, H, S − 2)
cases = {"in no layer": [], "in the retrieval head's layer": [layer],
         "in all other layers": [i for i in range(c.n_layers) if i != layer]}
for name, layers in cases.items():
    caches = make_cache(model)
    model(needle[:, :asking], caches)
    for i in layers:
        caches[i].keep(slots)
    right = answer(model, needle, [span], asking, caches).mean()
    print(f"value dropped {name:30} {right:.2f} of the answers are right")

# %% [markdown]
# Without two of 250 entries, in the layer that fetches, the answer is lost; in the other layers they are hardly missed. Which entries matter, and where, is what a method of compression has to guess.

# %% [markdown]
# ## How an induction head is built
#
# It takes two layers. A head of the lower layer writes into each token *which token came before it*; a head of the upper layer looks for the token that says "before me came what you are reading now".
# In larger models such heads were found to form in training (Olsson et al., arXiv 2209.11895). This model was started with them, by hand (`induction_start`). Only the starting weights are special, and all of them are trained. It retrieves in layer 1, in three heads, because we put retrieval there. What training builds without it is shown in `08_two_decoders.ipynb`.
#
# First the lower layer. Let queries and keys read one embedding dimension that is the same for all tokens: then they are constant, but for RoPE's rotation.
# Let the query be turned back by the angle of Δ tokens. Then the score of a key $d$ tokens back is $\sum_i \cos((d - Δ)\,\theta_i)$ over the angles $\theta_i$ that are used. It peaks at $d = Δ$, whatever the tokens say.

# %%
start = Decoder(Config(**CONFIG))
induction_start(start, seed=0)
distance, angles = torch.arange(13), start.freq[:6]  # the fastest angles tell neighbours apart
figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
for back, style in zip((1, 2, 4), ("o-", "s--", "^:")):
    score = ((distance - back)[:, None] * angles).cos().sum(-1)
    axis.plot(distance, score, style, label=f"Δ = {back}")
axis.set(xlabel="tokens back, d", ylabel="score, unscaled")
axis.grid(alpha=0.3)
axis.legend();

# %% [markdown]
# Each curve peaks at its Δ. The score is scaled up until softmax gives the peak nearly all the weight.
#
# The upper layer matches what the current token *is* with what the lower layer wrote, and its values carry the token that was found to where the output head reads it.
# To see both, take random tokens, twice the same: for a token of the second round, the induction head should look at the token *after* its first occurrence.
# The heads are again found by measurement, in the untrained start and in the trained model.

# %%
n = 32
twice = torch.from_numpy(np.random.default_rng(1).integers(0, tasks.bos, n)).repeat(2)[None]
figure, axes = plt.subplots(2, 2, figsize=(7, 7.4), layout="constrained")
for row, (name, decoder) in zip(axes, {"before training": start, "trained": model}.items()):
    q = record(decoder, twice)[0]
    scores = {"previous token": q.diagonal(-1, -2, -1), "induction": q.diagonal(1 - n, -2, -1)}
    for axis, (kind, score) in zip(row, scores.items()):
        layer, head = strongest(score[..., 1:].mean(-1))
        plot.attention(axis, q[layer, head], f"{name}, {kind}\nlayer {layer}, head {head}")

# %% [markdown]
# On the left, the weight lies one below the diagonal. On the right, in the second round, it follows the first round, one token ahead. Training keeps the mechanism and cleans it up.
#
# Does the start already help to copy? Here is the rank of the right next token among all tokens of the vocabulary, in the second round:

# %%
plain = Decoder(Config(**CONFIG))
for name, decoder in {"random weights": plain, "structured start": start, "trained": model}.items():
    logits, right = decoder(twice)[0, n:-1], twice[0, n + 1:, None]
    rank = (logits > logits.gather(-1, right)).sum(-1) + 1
    print(f"{name:16} median rank {rank.median():4d} of {c.vocab_size}")

# %% [markdown]
# Before any training, the structured start brings the right token near the top, in this one sequence at least.

# %% [markdown]
# ## Throwing entries away
#
# To keep less than everything, one has to choose, and these are two of the first rules.
# **StreamingLLM** (`methods/streaming_llm.py`) keeps the first four tokens, as sinks, and the newest.
# **H2O** (`methods/h2o.py`) keeps the newest and the *heavy hitters*: those that collected the most attention from all queries so far, chosen apart for each layer and head.
#
# Both get a quarter of the prompt as their budget. The prompt is read with full attention, and at its end, `end_prefill`, they evict. Here it ends before the question.

# %%
def compress(Method, prompt, share=0.25, **options):
    """Caches that have read the prompt (B, T) and evicted at its end."""
    caches = make_cache(model, Method, budget=round(share * prompt.shape[1]), **options)
    model(prompt, caches)
    end_prefill(caches)
    return caches


prompt = needle[:1, :batch.question]
caches = compress(streaming_llm.StreamingLLM, prompt)
streaming = plot.kept(caches, batch.question)  # (L, H, T) of bool
pieces, facts = pieces[:batch.question], batch.facts[0, :batch.question]
plot.text(pieces, {"StreamingLLM, every layer": streaming.mean((0, 1))}, facts);

# %% [markdown]
# Dark tokens are kept, grey ones dropped, facts are underlined. All layers and heads agree, as no score is involved: what lies in the middle is gone.

# %%
heavy = plot.kept(compress(h2o.H2O, prompt), batch.question)
panels = {f"H2O, layer {i}": heavy[i].mean(0) for i in range(c.n_layers)}
plot.text(pieces, panels, facts, columns=2, width=72);

# %% [markdown]
# Half of the budget is the newest text, as before. The other half is scattered, and differs from layer to layer and, where the ground is pale, from head to head: each keeps what *it* has read most.
# The start of the text is favoured, for it has been there to be read the longest.
#
# ## What gets lost: `agnostic` and `aware`
#
# There are two moments to compress. **Agnostic**: the context is compressed first and the question comes afterwards, as when a document is kept to be asked about later. **Aware**: the question is part of the prompt that gets compressed, as in a chat.
# First, what becomes of the entries that the retrieval heads need? A value is two tokens: how many of the key/value heads in their layer still hold the one, and how many hold both? Random eviction draws with four seeds.

# %%
methods = {"StreamingLLM": streaming_llm.StreamingLLM, "H2O": h2o.H2O,
           "random": random_eviction.RandomEviction}
pair = value[:, None, None] + torch.arange(2).expand(c.n_kv_heads, 2)  # (B, H, 2)
print("a quarter of the entries       a token  both  answered")
for name, Method in methods.items():
    draws = [dict(seed=seed) for seed in range(4)] if name == "random" else [{}]
    right = [retrieve(model, batch, maker(model, Method, 0.25, **draw)) for draw in draws]
    for setting, end in (("agnostic", batch.question), ("aware", asking)):
        caches = [compress(Method, needle[:, :end], **draw) for draw in draws]
        kept = [held(of_draw, end)[:, retrieval[0]].gather(-1, pair) for of_draw in caches]
        kept = torch.stack(kept).float()  # (draws, B, H, 2)
        found = torch.stack([x[setting] for x in right]).mean()
        print(f"{name:17} {setting}: {kept.mean():13.2f} {kept.amin(-1).mean():5.2f} {found:9.2f}")

# %% [markdown]
# Both tokens are needed. Random eviction keeps a token in a quarter of the cases, as the budget says, and two given tokens together in a sixteenth. So it holds the most tokens of values here, and the fewest whole values. StreamingLLM keeps neighbours or drops them. H2O stands between.
#
# No rule can know in `agnostic` which value will be asked for. In `aware` the question's own attention could save it. But H2O sums over all queries, and the few of the question add little to what the many before them have said.

# %%
shares = [0.0625, 0.125, 0.25, 0.5, 0.75]
full = retrieve(model, batch, maker(model, LayerCache, None))
accuracy = {name: [retrieve(model, batch, maker(model, Method, share)) for share in shares]
            for name, Method in methods.items()}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for axis, setting in zip(axes, ("agnostic", "aware")):
    for name, known in zip(accuracy, ("streaming_llm", "h2o", "random")):
        found = [result[setting].mean() for result in accuracy[name]]
        axis.semilogx(shares, found, base=2, label=name, **plot.style(known))
    axis.axhline(full[setting].mean(), color="black", linewidth=1, label="full cache")
    axis.set(title=setting, xlabel="budget, % of the prompt", xticks=shares,
             xticklabels=[f"{100 * x:g}" for x in shares])
    axis.grid(alpha=0.3)
axes[0].set_ylabel("needles found")
axes[0].legend();

# %% [markdown]
# StreamingLLM finds needles whose value happens to lie in its window, and H2O some of those whose value drew attention before anybody asked for it; seeing the question hardly helps either. (With 32 documents, differences below 0.2 mean little.)
# That is the problem which the methods in this repository work on: which entries to keep, for which head, how many of them, and whether what is dropped can be kept in some cheaper form.

# %% [markdown]
# ## Exercises
#
# 1. How many GiB of cache do 64 conversations of 8192 tokens with Llama-3-70B take in 16 bits? How many tokens fit into 80 GiB? *Hint: `shapes`.*
# 2. How much does the model depend on its retrieval head? Copy the model, set the head's columns of `blocks[layer].attention.o.weight` to zero, and measure `exact_match` (`nanollm/measure/evaluate.py`) on `"needle"`; then with the next strongest heads of the last map, one after the other. *Hint: head h owns the columns h·D to (h+1)·D.*
# 3. Does this model need its sinks? Compare `StreamingLLM` with `sinks=0` and `sinks=4` by the perplexity of `continuation` after `reference` (`nanollm/measure/evaluate.py`), and look again at the first of the four maps. *Hint: `maker` passes options on.*
# 4. What is `H2O` with `recent=1`, and what with `recent=0`? Predict both curves of the last figure, then draw them. *Hint: the newest token is always kept.*
# 5. Write an oracle: a `LayerCache` that keeps exactly the facts and the newest tokens. How small may the budget become before needles are lost? Could a method that does not know the facts do better, `agnostic`? *Hint: give it the roles as a option, and call `shrink` in `evict` with a score that is high for facts.*
