# %% [markdown]
# # Tensor attention: must attention to pairs of tokens be slow or large?
#
# **Question.** In ordinary attention a query looks at tokens. In **tensor attention** it looks at *pairs* of tokens. What should a decoder cache for that: four small matrices, or two huge ones?
#
# Each token has two keys and two values. The pair $(a, b)$ has the key $k_{1,a} \circ k_{2,b}$ and the value $v_{1,a} \circ v_{2,b}$ (elementwise products). After $n$ tokens there are $n^2$ pairs. $K_1 \oslash K_2$ is the matrix of all pair keys.
#
# The paper (Chen et al., arXiv 2503.11108) finds a trade-off of time against memory, proves lower bounds on the memory, and uses SubGen, an estimate for keys that form clusters. This notebook runs all three. T1 to T13 are claims in [CLAIMS.md](../CLAIMS.md). The dimension of a head is $d$ here, and `D` in the caches' code.
#
# **Read before:** `00_kv_cache.ipynb`. **Code beside it:** `methods/tensor_attention.py`, `methods/theory/clustering.py`, `methods/theory/index_game.py`. **Time:** half an hour to read, a minute to run, mostly to train two small decoders.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""

# %%
import math
import time
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw, ImageFont
import torch
import torch.nn.functional as F

from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache, pair_decoder, pairs
from methods.theory import clustering, index_game as theory
from nanollm.model import Config, Decoder

torch.set_num_threads(1)
torch.set_grad_enabled(False)


def seeded(seed): return torch.Generator().manual_seed(seed)

# %% [markdown]
# ## From attention to tensor attention, in one picture
#
# One query attends to eight tokens. Left: the weights of ordinary attention, with the keys $k_1$. Middle: tensor attention, one softmax over 64 pairs. A token has no weight of its own; only pairs have. Right: the decoding step that adds each pair. A pair is as late as its later token, so step $i$ adds $2i - 1$ pairs. This is the only causal rule that the caches need.

# %%
n, d = 8, 16
q, k1, k2, v1, v2 = torch.randn(5, n, d, dtype=torch.float64, generator=seeded(3))
one = (q[-1] @ k1.T / d ** .5).softmax(-1)
score = (k1 * q[-1]) @ k2.T / d ** .5                     # of every pair, without forming any
two = score.flatten().softmax(-1).view(n, n)
token = torch.arange(1, n + 1)
born = torch.maximum(token[:, None], token)

figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
titles = ("attention: weight of token b, %", "tensor attention: weight of pair (a, b), %",
          "the step that adds the pair")
for axis, x, title in zip(axes, (100 * one[None], 100 * two, born), titles):
    rows = len(x)
    axis.imshow(x, cmap="Greys", vmin=0, vmax=2 * x.max(), extent=(.5, n + .5, rows + .5, .5))
    for (i, j), y in np.ndenumerate(x.numpy()):
        axis.text(j + 1, i + 1, f"{y:.0f}", ha="center", va="center", fontsize=9)
    axis.set(title=title, xlabel="token b", xticks=token)
    axis.set(ylabel="token a" if rows > 1 else "", yticks=token if rows > 1 else ())

# %% [markdown]
# Three stores take the place of the ordinary `Slots`, with $k = [k_1 | k_2]$ and $v = [v_1 | v_2]$:
#
# - `FourCache` keeps $K_1, K_2, V_1, V_2$ and forms all pairs for each query, as the paper describes it.
# - `TwoCache` keeps all pairs. To form new ones it also keeps the four matrices, which the count below leaves out.
# - `FactoredFourCache` keeps the four matrices and never forms a pair.
#
# Token by token they compute the same function:

# %%
k, v = torch.cat((k1, k2), 1), torch.cat((v1, v2), 1)
definition = []
for i in range(n):
    K, V = pairs(k1[:i + 1], k2[:i + 1]), pairs(v1[:i + 1], v2[:i + 1])
    definition.append((q[i] @ K.T / d ** .5).softmax(-1) @ V)
definition = torch.stack(definition)

for Cache in (FourCache, TwoCache, FactoredFourCache):
    cache, y = Cache(), []
    for i in range(n):
        new = (x[None, None, i:i + 1] for x in (q, k, v))
        y.append(cache.attend(*new, torch.tensor([[i]])))
    apart = (torch.cat(y, 2)[0, 0] - definition).abs().max()
    print(f"{Cache.__name__:<18} farthest from the definition {apart:.0e}   "
          f"holds {cache.k.numel() + cache.v.numel()} numbers")

# %% [markdown]
# ## Is the two-cache form faster?
#
# Remark 3.9 and Theorem 4.3 say that four matrices need $\Omega(n^2 d)$ more time a step than two, because all pairs must be formed again. But nobody has to form them:
#
# $$\text{score}_{ab} = \sum_j k_{1,aj}\, q_j\, k_{2,bj} = \big[(K_1 \circ q) K_2^\top\big]_{ab}, \qquad \text{out}_j = \sum_a V_{1,aj} \big[P V_2\big]_{aj}.$$
#
# Each needs one matrix product. The factored form multiplies about as often as the two-cache form. But at 768 tokens its $4nd$ numbers (0.8 MB) fit into most processors' caches; the $2n^2d$ numbers of all pairs (302 MB) do not. Below is one decoding step of each: one head, $d = 64$, float32, one thread, the best of three.

# %%
lengths, times = (128, 256, 512, 768), {}
for n in lengths:
    k, v, q = (torch.randn(1, 1, n + 3, size, generator=seeded(n)) for size in (128, 128, 64))
    for Cache in (TwoCache, FourCache, FactoredFourCache):
        cache, seconds = Cache(), []
        cache.write(k[:, :, :n], v[:, :, :n], torch.arange(n)[None])
        for t in range(n, n + 3):
            new = [x[:, :, t:t + 1] for x in (q, k, v)]
            began = time.perf_counter()
            cache.attend(*new, torch.tensor([[t]]))
            seconds.append(time.perf_counter() - began)
        times.setdefault(Cache.__name__, []).append(1e3 * min(seconds))
        if n == lengths[-1]:
            print(f"{n} tokens: {Cache.__name__:<18}{1e3 * min(seconds):>7.1f} ms a step, "
                  f"{cache.bytes()[0] / 1e6:>7.2f} MB cached")

# %%
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (name, milliseconds), marker in zip(times.items(), "s^o"):
    axis.loglog(lengths, milliseconds, marker=marker, label=name)
axis.set(xlabel="tokens n", ylabel="time of a decoding step, ms")
axis.set_xticks(lengths, lengths)
axis.minorticks_off()
axis.grid(alpha=.3)
axis.legend(fontsize=8);

# %% [markdown]
# The factored form is the fastest at every length measured here, and it caches as little as `FourCache`.
#
# Theorem 4.3 compares the two algorithms of the paper's Figure 1, and for these it is true. But the trade-off of Remark 3.9 does not exist: keep $K_1, K_2, V_1, V_2$ (claim T4: *does not hold*).
#
# ## The Index game: how much must a cache hold?
#
# The lower bounds are games. Alice writes $n \times d$ bits into a cache: token $t$ gets a key $k_{1,t}$ of its own, and the bits of row $t$ as its value $v_{1,t}$; $k_2 = v_2 = 1$. Bob gets only the cache. To read row $t$ he asks with the query $C\,k_{1,t}$. If $C = 2 \ln n$, the right key outweighs all others. If Bob can read every row, the cache must hold all $nd$ bits, whatever it looks like inside.
#
# The keys are random. They are orthonormal up to ε, if $d$ is large compared with $\log n$. The bits are a picture, 16 times side by side: 32 rows and 2048 columns. Coins that Bob knows flip about half of the bits, so that no bit can be guessed from its neighbours.

# %%
picture = Image.new("1", (128, 32))
ImageDraw.Draw(picture).text((3, 1), "KV cache", 1, font=ImageFont.load_default(26))
coins = torch.rand(32, 2048, generator=seeded(1)) < .5
bits = torch.from_numpy(np.array(picture)).repeat(1, 16) ^ coins
n, d = bits.shape
keys = theory.projected_basis(n, d, seeded(0))
exact = theory.index_game_four(bits, keys)
evict = theory.keep_rows(slice(0, n, 2), n)  # every other token stays
evicted = theory.index_game_four(bits, keys, compress=evict)
zero, one = exact.read[~bits].max(), exact.read[bits].min()
print(f"ε = {theory.distortion(keys):.3f}: "
      f"Bob reads at most {zero:.2f} for a 0 (predicted {exact.zero:.2f}) "
      f"and at least {one:.2f} for a 1 (predicted {exact.one:.2f})")

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 4.4), layout="constrained", sharex=True)
games = {"exact": exact, "every other token evicted": evicted}
for axis, (name, game) in zip(axes, games.items()):
    axis.imshow((game.guesses() ^ coins)[:, :128], cmap="Greys", vmin=0, vmax=1, aspect="auto",
                interpolation="nearest")
    axis.set(title=f"{name}: {game.right(bits):.1%} of the bits right", ylabel="row")
axes[-1].set_xlabel("component of the value, the first 128 of 2048");

# %% [markdown]
# With the exact cache every bit comes back. The readings lie within the predicted margins, once the prediction counts the $2n+1$ pairs with the zero key that Bob must append. The proof leaves these out (claim T6). If every other token is evicted, about half of the bits in the evicted rows are right by luck.
#
# The keys must be nearly orthonormal. How many dimensions does that take?

# %%
dimensions = 2 ** np.arange(1, 10)
print("bits right, mean of 4 games, d =", *(f"{d:6}" for d in dimensions))
for count in 8, 32, 128:
    deals = [[theory.deal(count, int(d), seed) for seed in range(4)] for d in dimensions]
    right = [np.mean([theory.index_game_four(*x).right(x[0]) for x in four]) for four in deals]
    eps = np.array([np.mean([theory.distortion(keys) for _, keys in four]) for four in deals])
    print(f"    n = {count:3}                      ", *(f"{x:6.3f}" for x in right))
    print("    ε √(d/ln n)                  ",
          *(f"{x:6.2f}" for x in eps * np.sqrt(dimensions / math.log(count))))

# %% [markdown]
# Below about 16 dimensions the keys blur into each other. Only this way of reading fails then: the bits are still in $V_1$. From 16 dimensions on, ε is about $2\sqrt{\ln n/d}$ (claim T5).
#
# **Four or two?** Theorem 4.2 plays the game with $n^2$ rows and concludes that the two-cache form needs $n^2 d$ bits (claim T7). Its rows must be arbitrary. But the rows of $K_1 \oslash K_2$ and $V_1 \oslash V_2$ are computed from $4nd$ numbers. The theorem is a bound for the *format*, and a reason not to use it.
#
# ## SubGen: an estimate instead
#
# The bounds hold for caches that answer *every* query. If queries are short ($\lVert q\rVert \le r$) and keys form few clusters, an estimate needs less. SubGen keeps $t$ random keys of each cluster of radius δ, for the normaliser τ. For the numerator $z$ it keeps $s$ values with their keys, drawn in proportion to $\lVert v\rVert^2$.
#
# Lemma 5.1 (SubGen4Cache) says that this works if $k_1$ and $k_2$ form few clusters. The paper gives no algorithm for this. In ours (`crossed`) every left sample meets every right one, which adds no byte to the cache. (Lemma 5.2, SubGen2Cache, streams all pairs, but must keep all earlier tokens to form them; it is never smaller than the exact cache.)
#
# The numerator and the normaliser are unbiased; their ratio is not, because $E[1/\tau] > 1/E[\tau]$ (claim T10). What does an estimate cost? The figure has the error, relative to the norm of the output, over the bytes held (in 32 bits). A simple rival holds as many bytes: a random subset of the *tokens*, with all their pairs.

# %%
def draw(n, tight=False, tail=0.0, seed=0, d=3):
    """Keys and values (n, 2d) of random tokens, and a query (1, d) of norm 4."""
    options = dict(generator=seeded(seed), dtype=torch.float64)
    normal = lambda *shape: torch.randn(*shape, **options)

    def ball(m):  # m points, uniform in the unit ball
        return F.normalize(normal(m, d), dim=1) * torch.rand(m, 1, **options) ** (1 / d)

    sides = [ball(n), ball(n)]
    if tight:  # 8 clusters a side
        sides = [.1 * side + .9 * ball(8).repeat(n // 8, 1) for side in sides]
    v = (1 + normal(n, 2 * d)) * (tail * normal(n, 1)).exp()
    return torch.cat(sides, 1), v, 4 * F.normalize(normal(1, d), dim=1)

# %% [markdown]
# `sub_gen` reads a stream token by token, here for 16 independent samples at once (`runs`). `crossed` pairs the samples of both sides, and `estimate` returns $z$ and τ.

# %%
def attention(k, v, q):
    """Tensor attention of one query, factored, (d,)."""
    (k1, k2), (v1, v2) = k.chunk(2, 1), v.chunk(2, 1)
    e = ((k1 * q) @ k2.T).exp()
    return (v1 * (e @ v2)).sum(0) / e.sum()

# %%
def errors(k, v, q, radius, runs=16):
    """KB, and the rms errors of SubGen's estimate and of random tokens, for growing samples."""
    right = attention(k, v, q)
    rms = lambda y: ((y - right).norm(dim=1) / right.norm()).square().mean().sqrt().item()
    for t, s in (1, 10), (2, 30), (4, 100):
        sides = [clustering.sub_gen(k_side, v_side, radius, t, s, seeded(t), runs)
                 for k_side, v_side in zip(k.chunk(2, 1), v.chunk(2, 1))]
        z, tau = clustering.estimate(q, clustering.crossed(*sides))
        clusters = sum(len(side.shares) // t for side in sides)
        numbers = clusters * (3 + 1 + 3 * t) + 2 * (2 * 3 * s + 1)  # a centre and a count each
        tokens = numbers // (4 * 3 + 1)  # two keys, two values, a position
        some = [torch.randperm(len(k), generator=seeded(run))[:tokens] for run in range(runs)]
        rival = torch.stack([attention(k[i], v[i], q) for i in some])
        yield 4 * numbers / 1e3, rms((z / tau)[:, 0]), rms(rival)

# %%
panels = {"1024 tokens": {}, "8 tight clusters": dict(tight=True),
          "values of very different norm": dict(tail=2.0)}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharey=True)
for axis, (title, kind) in zip(axes, panels.items()):
    radius = .2 if kind.get("tight") else .9
    points = [list(errors(*draw(1024, seed=seed, **kind), radius)) for seed in range(8)]
    held, ours, rival = np.exp(np.log(points).mean(0)).T  # geometric means over eight texts
    axis.loglog(held, ours, "o-", label="SubGen, both sides")
    axis.loglog(held, rival, "s--", label="random tokens")
    print(f"{title}: random tokens / SubGen:", *(f"{x:.2f}" for x in rival / ours))
    each = np.array([[b / a for _, a, b in text] for text in points])
    print("    in single texts from", *(f"{x:.2f}" for x in each.min(0)),
          "to", *(f"{x:.2f}" for x in each.max(0)))
    axis.set(title=title, xlabel="held, KB")
    axis.set_xticks((1, 2, 5), (1, 2, 5))
    axis.set_yticks((.2, .5, 1, 2), (.2, .5, 1, 2))
    axis.minorticks_off()
    axis.grid(alpha=.3)
axes[0].set_ylabel("rms error / norm of the output")
axes[0].legend(fontsize=8);

# %% [markdown]
# A printed number above 1 means that SubGen has the smaller error. On average random tokens are better where values are alike, in clusters or not. Where a few values carry most of the norm, SubGen is better on average. But there the texts differ widely, and with the two smaller samples random tokens win in some of them.
#
# Lemma 5.1 leaves its constants open; `sizes` in `methods/theory/clustering.py` computes them. With these sizes the error keeps its promise with room to spare (claim T9).
#
# ## Few dimensions
#
# When do keys form few clusters? The unit ball has room for at most $(1 + 2/\delta)^d$ clusters of radius δ, however many keys come. (The paper's count has a slip: claim T11.) So with fixed $d$ the memory should stop growing (claim T12). Below, keys are uniform in the ball, with $\delta = e/3$.

# %%
lengths = 2 ** np.arange(5, 14, 2)
print("clusters of k₁ at", *(f"{n:5}" for n in lengths), "keys; at most")
for d in 2, 3, 4, 8, 16:
    k1 = draw(int(lengths[-1]), d=d)[0][:, :d]
    clusters = [len(clustering.sub_gen(k1[:n], k1[:n], math.e / 3, 1, 1, seeded(0)).shares)
                for n in lengths]
    most = clustering.most_clusters(d, math.e / 3)
    print(f"          d = {d:2}  ", *(f"{x:5}" for x in clusters), f"{most:12.0f}")

# %% [markdown]
# For $d$ = 2 the number of clusters stops growing at 128 tokens. For $d$ = 8 and 16 it still grows at 8192 tokens, and SmolLM2's heads have $d = 64$. The paper's lower bound of $\Omega(d\,e^d)$ bits holds with other keys than the proof's, but our upper bound on the clusters is $3.21^d$ (claims T11 and T12).
#
# ## A decoder that attends to pairs
#
# `pair_decoder(config)` builds `nanollm`'s decoder with tensor attention in every layer. RoPE rotates queries and keys so that their product depends on the positions only through their distance. A product of *three* rotated vectors depends on more: if the text is shifted, the score changes.

# %%
vectors = torch.randn(3, 1, 1, 16, generator=seeded(0))
for shift in (0, 1, 10, 100):
    two, three = theory.rotated_scores(*vectors, shift)
    print(f"text shifted by {shift:3}: q·k = {two:.3f}   q·(k₁∘k₂) = {three:7.3f}")

# %% [markdown]
# So queries and keys are not rotated here. Causality, or GPT-2's learned positions, tells the order.
#
# **The task.** Match-3 asks at each number $x_i$: is there a pair $a, b \le i$ with $x_a + x_b + x_i \equiv 0 \pmod{13}$? For long texts one layer of ordinary attention needs to be very wide for that (Sanford et al., arXiv 2306.02896). Our texts have 12 numbers. Two decoders of one layer are trained on it. One head of tensor attention has as many parameters as one and a half ordinary heads of the same width.

# %%
p, T = 13, 12
SEEN = torch.ones(T, T, dtype=torch.bool).tril()


def match3(n, generator):
    """n texts (n, T + 1), the first token p, and the answers (n, T): p + 1 is no, p + 2 yes."""
    x = torch.randint(p, (n, T), generator=generator)
    total = x[:, :, None, None] + x[:, None, :, None] + x[:, None, None]  # (n, i, a, b)
    found = ((total % p == 0) & SEEN[:, :, None] & SEEN[:, None]).flatten(2).any(-1)
    return F.pad(x, (1, 0), value=p), p + 1 + found.long()


def share_right(model):
    tokens, answers = match3(1000, seeded(99))
    return (model(tokens)[:, 1:].argmax(-1) == answers).double().mean().item()

# %%
def learn(build, steps=300, **shape):
    """Train a decoder; return it, and the shares of right answers in other texts, by step."""
    torch.manual_seed(0)
    model = build(Config(p + 3, max_len=T + 1, n_layers=1, d_model=64, d_ff=64, **shape))
    for weight in model.parameters():
        weight.mul_(4 if weight.dim() == 2 else 1)  # a product of three small numbers learns slowly
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(.9, .98), weight_decay=0)
    log, texts = [], seeded(1)
    for step in range(steps):
        if step % 50 == 0:
            log.append((step, share_right(model)))
        tokens, answers = match3(64, texts)
        with torch.enable_grad():
            loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), answers.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [*log, (steps, share_right(model))]

# %%
trained = {"tensor attention": learn(pair_decoder, n_heads=1, n_kv_heads=1, head_dim=64),
           "attention": learn(Decoder, n_heads=3, n_kv_heads=3, head_dim=32)}
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (name, (decoder, log)), marker in zip(trained.items(), "os"):
    axis.plot(*zip(*log), marker=marker, label=name)
    parameters = sum(w.numel() for w in decoder.parameters())
    print(f"{name:<17}{parameters:>7,} parameters, {log[-1][1]:.1%} of the answers right")
axis.set(xlabel="step (64 texts of 12 numbers)", ylabel="right answers, held-out texts",
         xlim=(20, None), ylim=(.89, 1.005))
axis.grid(alpha=.3)
axis.legend(fontsize=8);

# %% [markdown]
# Tensor attention finds the pairs (claim T13). In these steps ordinary attention learns little more than hits among *two* numbers ($a = b$ or $b = i$).
#
# ## Three things to remember
#
# 1. Factor before you cache: pairs of tokens never need to be formed.
# 2. A lower bound on memory can be a game. Play it, and you see which assumption it needs.
# 3. An estimate must beat the simplest rival at equal bytes: random tokens.
#
# ## Exercises
#
# 1. SubGen draws its two estimates apart. Use the draws of values for the normaliser too, $\tau = \sum_s \frac{\lVert V\rVert_F^2}{s\lVert v\rVert^2} e^{\langle q,k\rangle}$, without clusters. Where is this better?
#    <details><summary>Hint</summary>Put a few keys with tiny values next to the query.</details>
# 2. `index_game_four` stores its bits in $V_1$ alone. Store $2nd$ bits, in $V_1$ *and* $V_2$.
#    <details><summary>Hint</summary>Which queries read the second half?</details>
# 3. Give `FactoredFourCache` a budget. Try it on the Match-3 decoder.
#    <details><summary>Hint</summary>Which score of a <i>token</i> tells what its pairs are worth?</details>
# 4. Treat the halves of a vector as real and imaginary parts, and take $\mathrm{Re}(\bar q\, k_1 k_2)$ for the score. Rotate $q$ by its angle and each key by *half* of its own. Show that a shift of the text changes nothing.
#    <details><summary>Hint</summary>Then ask which pairs the score cannot tell apart.</details>
# 5. Give ordinary attention a second layer and more time. Does it find pairs?
#    <details><summary>Hint</summary>Pass <code>n_layers</code> to <code>learn</code> in place of the 1.</details>
