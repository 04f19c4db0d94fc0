# %% [markdown]
# # Tensor attention: two caches, four, and a third form that beats both
#
# **Read before:** `00_kv_cache.ipynb`, for what a KV cache is. **Beside it:** `methods/tensor_attention.py` and `methods/sub_gen.py`, the caches, and `methods/theory/index_game.py` and `methods/theory/clustering.py`, which measure them. **Time:** two minutes to run on one core, most of it training three small decoders; 45 minutes to read.
#
# **What you will know:** what attention to pairs of tokens is, and how it is computed without forming a pair. Why the trade-off of time against memory that the paper finds is not there. How a lower bound on memory is played as a game. When a random estimate (SubGen) is worth its memory. And what a decoder of pairs can learn that an ordinary one of its size does not.
#
# In ordinary attention a query looks at tokens, one by one. In **tensor attention** it looks at *pairs* of tokens. Each token has two keys and two values. The pair $(a, b)$ has the key $k_{1,a} \circ k_{2,b}$ and the value $v_{1,a} \circ v_{2,b}$, elementwise products. After $n$ tokens there are $n^2$ pairs. $K_1 \oslash K_2$ is the matrix of all their keys. What should a decoder cache: the four matrices that pairs are made of, or the two matrices of all pairs? And can it hold less than either?
#
# The paper (Chen et al., arXiv 2503.11108) finds a trade-off of time against memory. It proves lower bounds on the memory. And it takes over a streaming estimate, SubGen, for keys that cluster. This notebook runs all three. T1 to T13 are claims in `CLAIMS.md`. The dimension of a head is $d$ here and `D` in the code.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import math
import time
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw, ImageFont
import torch

from methods.sub_gen import SubGen2Cache, SubGen4Cache
from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache, pair_decoder, pairs
from methods.theory import clustering as subgen, index_game as theory
from nanollm.cache import make_cache
from nanollm.commands import plot

torch.set_num_threads(1)
torch.set_grad_enabled(False)


def seeded(seed): return torch.Generator().manual_seed(seed)

# %% [markdown]
# Every cache keeps its colour, marker and dash in all figures. So do three kinds of lines: one for each dimension, or number of rows.

# %%
LOOK = {"FourCache": dict(color="#0072b2", marker="^", linestyle=":"),
        "TwoCache": dict(color="#d55e00", marker="s", linestyle="--"),
        "FactoredFourCache": dict(color="#117733", marker="o", linestyle="-"),
        "SubGen2Cache": dict(color="#e69f00", marker="s", linestyle="--"),
        "SubGen4Cache": dict(color="#882255", marker="o", linestyle="-"),
        "random tokens": plot.style("random")}
DASHES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", (0, (5, 1, 1, 1, 1, 1)))]
LINES = [dict(marker=m, linestyle=dash, color=f"C{i}") for i, (m, dash) in enumerate(DASHES)]


def plain_numbers(*axes):
    """512 and not 5·10²."""
    for axis in axes:
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")

# %% [markdown]
# ## From attention to tensor attention, in one picture
#
# One query over eight tokens. On the left are its weights as in ordinary attention, with the keys $k_1$ alone. In the middle are those of tensor attention: one softmax over 64 pairs. A token has no weight of its own any more; what counts is whom it is paired with. On the right is the decoding step at which a pair comes into being. It is as late as its later token, so that step $i$ adds a shell of $2i - 1$ pairs. That is all that causality means here, and the only rule that the caches need.

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
# Three caches stand behind one interface, that of `LayerCache`, with $k = [k_1 | k_2]$ and $v = [v_1 | v_2]$. `FourCache` keeps $K_1, K_2, V_1, V_2$ and forms the pairs for each query, as the paper describes it. `TwoCache` keeps all pairs. `FactoredFourCache` keeps the four and forms no pair at all. Token by token they are one function:

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
# Remark 3.9 and Theorem 4.3 say that four matrices need $\Omega(n^2 d)$ more time a step than two, since all pairs have to be formed again. But they need not be formed:
#
# $$\text{score}_{ab} = \sum_j k_{1,aj}\, q_j\, k_{2,bj} = \big[(K_1 \circ q) K_2^\top\big]_{ab}, \qquad \text{out}_j = \sum_a V_{1,aj} \big[P V_2\big]_{aj}.$$
#
# That is one matrix product each. It takes as many multiplications as the two matrices of pairs do, which must be multiplied with $q$ and $P$ too. But its $4nd$ numbers stay in the processor's cache, while $2n^2d$ come from memory. Below is one decoding step of each, in one run: one head, $d = 64$, float32, one thread. Operations and bytes are counted while it runs.

# %%
rows = []
for n in (128, 256, 512, 768, 1024, 2048, 4096):
    Caches = (TwoCache, FourCache, FactoredFourCache) if n <= 1024 else (FactoredFourCache,)
    rows += [(n, Cache.__name__, *measured) for Cache, *measured in theory.race(n, 64, Caches)]

fastest = {n: seconds for n, name, seconds, *_ in rows if name == "FactoredFourCache"}
print(f"{'tokens':>6} {'cache':<18}{'time':>10}{'over factored':>15}{'cached':>11}"
      f"{'multiplied':>14}{'moved':>12}")
for n, name, seconds, held, count in rows:
    if n in (128, 256, 512, 1024):
        print(f"{n:>6} {name:<18}{1e3 * seconds:>7.1f} ms{seconds / fastest[n]:>15.1f}"
              f"{held / 1e6:>8.2f} MB{count.multiplications / 1e6:>9.1f} ·10⁶"
              f"{count.bytes / 1e6:>9.1f} MB")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
panels = (axes[0], 2, 1e3, "a decoding step", "time, ms"), (
    axes[1], 3, 1e-6, "what is cached (FourCache under FactoredFourCache)", "MB")
for axis, column, unit, title, label in panels:
    for name in ("FourCache", "TwoCache", "FactoredFourCache"):
        x, y = np.array([(row[0], row[column] * unit) for row in rows if row[1] == name]).T
        slope = np.polyfit(np.log(x[x >= 512]), np.log(y[x >= 512]), 1)[0]
        axis.loglog(x, y, **LOOK[name], label=f"{name}: n^{slope:.2f}")
    axis.set(xlabel="tokens n", ylabel=label, title=title)
    axis.set_xticks(128 * 2 ** np.arange(6)), axis.minorticks_off()
    axis.grid(alpha=.3), axis.legend(title="fitted from 512 tokens on", title_fontsize=8)
plain_numbers(*axes)

# %% [markdown]
# Time goes with $n^2$ for all three, once overheads no longer count and the pairs no longer fit into the processor's cache. The factored form is faster than the two-cache form at every length: twice as fast with 128 tokens, 7 to 12 times from 512 on, and 17 times with 2048 (RESULTS.md; times vary). Its memory, that of `FourCache`, has another slope.
#
# Theorem 4.3 speaks of the two algorithms of the paper's Figure 1, and of these it is true. At every length here two matrices take $2n^2d$ multiplications less than four *as described*, half of them, and less time. The trade-off that Remark 3.9 concludes from it is not there: whoever has $K_1, K_2, V_1, V_2$ should keep them (claim T4: *does not hold*).
#
# ## The Index game: how much must a cache hold?
#
# The lower bounds are games. Alice puts $n \times d$ bits into a cache. Token $t$ gets a key of her own, $k_{1,t}$, and the bits of row $t$ as its value $v_{1,t}$, with $k_2 = v_2 = 1$. Bob gets nothing but the cache. He asks with the query $C\,k_{1,t}$ and reads row $t$. $C = 2 \ln n$ is long enough for its own key to outweigh all others. If he can do so for every row, then all $nd$ bits were in the cache, whatever it looks like inside.
#
# The keys are random (Johnson and Lindenstrauss). They are nearly orthonormal, up to ε, if $d$ is large against $\log n$. The bits here are a picture, repeated, in 32 rows of 2048. Each bit is flipped or not by the toss of a coin that Bob knows, so that none can be guessed from its neighbours.

# %%
picture = Image.new("1", (128, 32))
ImageDraw.Draw(picture).text((3, 1), "KV cache", 1, font=ImageFont.load_default(26))
coins = torch.rand(32, 2048, generator=seeded(1)) < .5
bits = torch.from_numpy(np.array(picture)).repeat(1, 16) ^ coins
n, d = bits.shape
keys = theory.projected_basis(n, d, seeded(0))


def play(**how): return theory.index_game_four(bits, keys, **how)


exact = play()
games = {"exact": exact, "one bit a number": play(compress=theory.keep_rows(slice(n), n, 1)),
         "every other token evicted": play(compress=theory.keep_rows(slice(0, n, 2), n))}
zero, one = exact.read[~bits].max(), exact.read[bits].min()
print(f"ε = {theory.distortion(keys):.3f}: "
      f"Bob reads at most {zero:.2f} for a 0 (predicted {exact.zero:.2f}) "
      f"and at least {one:.2f} for a 1 (predicted {exact.one:.2f})")

# %%
figure, axes = plt.subplots(len(games), 1, figsize=(8, 6.6), layout="constrained", sharex=True)
for axis, (name, game) in zip(axes, games.items()):
    axis.imshow((game.guesses() ^ coins)[:, :128], cmap="Greys", vmin=0, vmax=1, aspect="auto",
                interpolation="nearest")
    axis.set(title=f"{name}: {game.right(bits):.1%} of the bits right", ylabel="row")
axes[-1].set_xlabel("component of the value, the first 128 of 2048");

# %% [markdown]
# Every bit comes back. The readings lie within the margins that the theorem predicts, once they count the $2n+1$ pairs with the zero key that Bob has to append, which the proof leaves out (claim T6). Evict every other token, and those rows are gone: half of their bits are right by guessing.
#
# Rounding is another matter: one bit a number, and nothing is lost. It is no contradiction. The bound is $nd$ bits, and $V_1$ alone has $nd$ numbers. How much do Bob's guesses tell him, over the bits that are kept of $V_1$? A row of which a share $a$ is right tells $d(1 - h(a))$ bits, $h$ the binary entropy. ($K_1$, which no bit of Alice's depends on, is not counted.)

# %%
evicted = {bits_each: [] for bits_each in (8, 4, 2, 1)}  # bits a number → (bits kept, bits learned)
for precision, points in evicted.items():
    for kept in (4, 8, 16, 24, 32):
        game = play(compress=theory.keep_rows(slice(kept), n, precision))
        points.append((kept * precision / n, game.learned(bits)))

noisy = {C: [] for C in (2, 3)}  # C / ln n → (η, bits learned)
for C, points in noisy.items():
    for eta in (0, .25, .5, .7, .8, .84, .85, .9, .95, .99):
        game = play(C=C * math.log(n), eta=eta, generator=seeded(1))
        points.append((eta, game.learned(bits)))

# %%
crowded = {count: [] for count in (8, 32, 128)}  # rows n → (d, bits right, ε)
for count, points in crowded.items():
    for d in 2 ** np.arange(1, 10):
        dealt = [(torch.rand(count, d, generator=seeded(i)) < .5,
                  theory.projected_basis(count, d, seeded(100 + i))) for i in range(4)]
        right = np.mean([theory.index_game_four(*x).right(x[0]) for x in dealt])
        points.append((d, right, np.mean([theory.distortion(x[1]) for x in dealt])))
    print(f"n = {count:3}: ε √(d/ln n) =", " ".join(
        f"{eps * math.sqrt(d / math.log(count)):.2f} (d = {d})" for d, _, eps in points if d >= 16))

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
for (precision, points), line in zip(evicted.items(), LINES):
    axes[0].semilogx(*zip(*points), **line, label=f"bits a number: {precision}")
x = np.geomspace(.1, 8)
axes[0].plot(x, x.clip(max=1), color="black", linewidth=1, label="no more is possible")
axes[0].set(xlabel="bits kept of V₁ / nd", title="4 to 32 of 32 tokens kept, and rounded")
for (count, points), line in zip(crowded.items(), LINES):
    dims, right, _ = zip(*points)
    axes[1].semilogx(dims, right, **line, label=f"n = {count}")
axes[1].set(xlabel="dimension d", title="too few dimensions")
for (C, points), line in zip(noisy.items(), LINES):
    axes[2].plot(*zip(*points), **line, markerfacecolor="none", label=f"C = {C} ln n")
axes[2].set(xlabel="relative noise η of the output", title="approximate answers")
labels = ("bits learned / nd", "bits right (mean of 4 games)", "bits learned / nd")
for axis, label, lowest in zip(axes, labels, (-.03, .45, -.03)):
    axis.set(ylabel=label, ylim=(lowest, 1.05)), axis.grid(alpha=.3), axis.legend(fontsize=8)
plain_numbers(*axes)

# %% [markdown]
# Left: with one bit a number, evicting slides along the line that nobody can cross. For this message more bits a number are wasted.
#
# Middle: below some 16 dimensions the keys blur into each other, for more rows sooner. The printed numbers say that ε is about $2\sqrt{\ln n/d}$ (claim T5). It is this way of reading that fails then. The bits are still in $V_1$, and whoever may ask for all rows and solve $n$ equations gets them.
#
# Right: a factor $1 \pm \eta$ on what is read does no harm up to η = 0.84 with the proof's query. Beyond, the margins cross. Bob cuts midway between them, and misreads the 1s that came out low. A query half as long again lets him read up to 0.99 (claim T8: Corollary 4.4, for every η below 1, holds if $C$ grows with η).
#
# **Four or two?** Theorem 4.2 plays the same game with $n^2$ rows and concludes that the two-cache form needs $n^2 d$ bits (claim T7). For that its rows must be arbitrary. But the theorem is stated for $K_1 \oslash K_2$, and those are computed from $4nd$ numbers, exactly, as we saw. So it is a bound for the *format*, and a reason not to use it. Corollary 4.5, the same with relative noise, falls with it: what is exact is right up to any factor.
#
# ## SubGen: an estimate instead
#
# The bounds are about caches that answer *every* query. If queries are short ($\lVert q\rVert \le r$) and keys form few clusters, an estimate can do with less. SubGen keeps $t$ random keys of each cluster of radius δ, for the normaliser τ. For the numerator $z$ it keeps $s$ values with their keys, drawn in proportion to $\lVert v\rVert^2$.
#
# Lemma 5.2 (`SubGen2Cache`) streams all pairs. Lemma 5.1 (`SubGen4Cache`) treats $(k_1, v_1)$ and $(k_2, v_2)$ apart and makes pairs of what it has kept. The paper gives no algorithm for the latter. Ours lets *every* left sample meet *every* right one. That costs no byte more than taking them two by two, and by the factored form no pair is formed here either.
#
# Numerator and normaliser are unbiased. Their ratio is not: they are sampled apart, so $E[z/\tau] = E[z]\,E[1/\tau]$, and $E[1/\tau] > 1/E[\tau]$. Below are 48 tokens ($d = 3$, δ = 0.9, $s$ = 32), the output's components summed, with bars of three standard errors.

# %%
k, v, q = subgen.text(48, 3)
samples, parts = np.array([1, 2, 4, 8, 16, 32]), ("numerator z", "normaliser τ", "z/τ")
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
for axis, Cache in zip(axes, (SubGen2Cache, SubGen4Cache)):
    found = subgen.biases(Cache, q, k, v, samples.tolist(), 2000, radius=.9, draws=32)
    print(f"{Cache.__name__}: z/τ is too large by", ", ".join(
        f"{mean - 1:.1%} ±{error:.1%} (t = {t})"
        for t, (mean, error) in zip(samples, found[:, 2].tolist())))
    for i, (name, shift) in enumerate(zip(parts, (.94, 1, 1.06))):
        axis.errorbar(shift * samples, found[:, i, 0], 3 * found[:, i, 1], color=f"C{i}",
                      marker="s^o"[i], linestyle="-" if i == 2 else "none", capsize=3, label=name)
    axis.axhline(1, color="black", linewidth=.8)
    axis.set(xscale="log", title=Cache.__name__, xlabel="samples per cluster t", xticks=samples)
    axis.minorticks_off(), axis.grid(alpha=.3)
plain_numbers(*axes)
axes[0].set_ylabel("mean of 2000 runs / exact"), axes[1].legend();

# %% [markdown]
# Numerator and normaliser are at 1 within their bars. The ratio is above it and comes down with $t$, until its bars reach 1 as well: at $t = 32$, and for `SubGen4Cache` from $t = 8$ on (claims T9, T10). `SubGen4Cache` does better, as its samples of 5 or 6 clusters a side make many more pairs than those of two clusters of pairs.
#
# What does it cost? Below is the error in the lemmas' unit $\lVert\mathrm{softmax}\rVert_2 \lVert V_1 \oslash V_2\rVert_2$ (spectral norm), over the bytes held. $d$ is 3, and $s$ goes from 10 to 1000 with $t$ from 1 to 16. The error is the root mean square over six texts and 8 runs of each. Beside it is the simplest thing one could do with as many bytes: keep a random subset of the *tokens* and attend to their pairs.

# %%
panels = {"256 tokens": dict(n=256), "4096 tokens": dict(n=4096),
          "4096, 8 tight clusters": dict(n=4096, tight=True, delta=.2),
          "4096, values of very different norm": dict(n=4096, tail=1.5),
          "4096, a query of norm 1": dict(n=4096, norm=1),
          "4096, a query of norm 12": dict(n=4096, norm=12)}
measured = {title: subgen.error_over_bytes(**kind) for title, kind in panels.items()}
for title, (found, whole) in measured.items():
    print(f"{title}; exact: {whole:.1f} KB")
    for name, points in sorted(found.items(), key=lambda item: [*LOOK].index(item[0])):
        held, error = points[..., 0].mean(1), (points[..., 1] ** 2).mean(1) ** .5
        print(f"    {name:<14}", ", ".join(f"{y:.3f} at {x:.1f} KB" for x, y in zip(held, error)))
    random, ours = found["random tokens"][..., 1], found["SubGen4Cache"][..., 1]
    ratio = np.log(random / ours[:len(random)])  # text by text
    spread = ratio.std(1, ddof=1) / ratio.shape[1] ** .5
    print("    random/SubGen4", ", ".join(f"{math.exp(m):.2f} (×/÷ {math.exp(e):.2f})"
                                          for m, e in zip(ratio.mean(1), spread)))

# %%
figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained", sharey=True, sharex=True)
for axis, (title, (found, whole)) in zip(axes.flat, measured.items()):
    for name, points in found.items():
        held, error = points[..., 0].mean(1), (points[..., 1] ** 2).mean(1) ** .5
        axis.loglog(held, error, **LOOK[name], label=name)
    axis.axvline(whole, color="black", linewidth=.8, label="exact")
    axis.set(title=title), axis.grid(alpha=.3)
plain_numbers(*axes.flat)
figure.supxlabel("held, KB"), figure.supylabel("rms error / (‖softmax‖₂ ‖V₁ ⊘ V₂‖₂)")
axes[0, 0].legend(fontsize=8);

# %% [markdown]
# (The last line printed of each panel is the ratio of the errors: the geometric mean over the texts, and its standard error as a factor.)
#
# Streaming all pairs takes all earlier tokens to form the new ones. So `SubGen2Cache` is never smaller than the exact cache that it replaces (claim T10); `SubGen4Cache` is.
#
# A random subset of the tokens does better at equal bytes where values are alike. Its error is 0.6 to 0.8 of SubGen's where keys spread. In tight clusters, which is what the lemmas assume, it is 0.64 at 1 KB and 0.78 at 51; between, the two are about even. One reason is that it normalises its own sample, so that errors of numerator and normaliser go together. Where few values carry most of the norm, SubGen has a third of the error at 1 and 2 KB, and no advantage left at 51. It depends on the query, too. Of norm 1, the two are even from 16 KB on. Of norm 12, SubGen's error is some four times as large, and more at 1 KB.
#
# ### The sizes that the lemmas ask for
#
# The lemmas leave their constants open. `sizes` has them, by Chebyshev's inequality. $t \propto \sinh^2(\delta r)$, which is the paper's $e^{2\delta r}$. $s \propto \lVert V\rVert_F^2/\lVert V\rVert_2^2 \le d$ for pairs. (For draws of two sides a similar ratio has no bound: their products may vanish.) Keys lie in four tight clusters a side, and an error of at most ε is asked for in 99 of 100 runs:

# %%
print(f"{'':14}{'ε':>5}{'sizes':>7}{'t':>5}{'s':>6}{'held':>10}{'rms error':>11}{'largest':>9}"
      "   beyond ε")
k, v, q, radius = subgen.clusters_of_text(32, 2)
v1, v2 = v.double().chunk(2, 1)
cases = (SubGen2Cache, .5, (pairs(v1, v2),)), (SubGen4Cache, .75, (v1, v2))
for Cache, eps, values in cases:
    full = subgen.sizes(eps, radius * q.norm().item(), *values)
    for part in (1, 16, 32, 64, 128, 256):
        t, s = (max(1, round(size / part)) for size in full)
        runs, rows = (60, 20) if part == 1 else (1000, 1000)
        error, held = subgen.errors(Cache, q, k, v, runs, rows, radius=radius, samples=t, draws=s)
        print(f"{Cache.__name__:14}{eps:>5}{'1/' + str(part):>7}{t:>5}{s:>6}{held / 1e3:>7.1f} KB"
              f"{error.square().mean() ** .5:>11.3f}{error.max():>9.3f}"
              f"   {(error > eps).sum():>3} of {runs}")
n, slot = len(k), (4 * 2 + 1) * 4
print(f"the exact four matrices: {n * slot / 1e3:.1f} KB, {slot} bytes a token")

# %% [markdown]
# The promise is kept with so much room to spare that no number of runs within ε says anything. The root mean square error of 60 runs is 0.036 where 0.5 is allowed, and 0.020 where 0.75 is. (The tests hold that of 200 runs against the standard error of the draws.) It breaks, with more than 10 of 1000 runs beyond ε, at a 64th of the sizes for `SubGen2Cache` and at a 256th for `SubGen4Cache` (claims T10 and T9, on the same keys). At the full sizes it is expensive: `SubGen4Cache` pays from some 2000 tokens on, `SubGen2Cache` never.
#
# ## Few dimensions
#
# When do keys cluster? In the unit ball there is no room for more than $(1 + 2/\delta)^d$ clusters of radius δ, however many keys come. The paper has $e^d$ parts of *diameter* $\delta = e/3$, from $(3/\delta)^d$. But that is $(9/e)^d = 3.3^d$, and of balls whose *radius* is δ (claim T11). With $d$ fixed the memory should stop growing (Theorems 6.3, 6.4; claim T12). Below, keys are uniform in the ball, $\delta = e/3$, $t$ = 8, $s$ = 100.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
lengths = 2 ** np.arange(4, 15)
for d, line in zip((2, 3, 4, 8, 16), LINES):
    clusters, held = subgen.growth(d, lengths)
    smaller = next(n for n, x in zip(lengths, held) if x < n * (4 * d + 1) * 4 / 1e3)
    print(f"d = {d:2}: {clusters[5]:4} clusters at {lengths[5]} keys, "
          f"{clusters[-1]:4} at {lengths[-1]} (at most {subgen.most_clusters(d, math.e / 3):.0f}); "
          f"smaller than the exact cache from {smaller} tokens")
    axes[0].loglog(lengths, clusters, **line, label=f"d = {d}")
    axes[1].loglog(lengths, held, **line, label=f"d = {d}")
for d, dash in ((2, "-"), (16, "--")):
    axes[1].loglog(lengths, lengths * (4 * d + 1) * 4 / 1e3, color="black", linewidth=1,
                   linestyle=dash, label=f"exact, d = {d}")
axes[0].set(xlabel="tokens n", ylabel="clusters of k₁")
axes[1].set(xlabel="tokens n", ylabel="held, KB")
for axis in axes:
    axis.grid(alpha=.3), axis.legend(fontsize=8)
plain_numbers(*axes)

# %% [markdown]
# For $d$ = 2 the clusters stop at 5. For $d$ = 3 and 4 three more come between 512 and 16,384 keys. For $d$ = 8 and 16 they go on growing at 16,000 tokens. (The bytes look flatter than the clusters, since the 100 draws are a fixed part of them.) Heads of real models have $d$ of 64 or 128. Smaller says nothing about the error, which is the matter of the figure before.
#
# The other half of the optimality claim is a lower bound of $\Omega(d\,e^d)$ bits (Corollaries 6.1, 6.2). Alice would store $e^d$ rows in $d$ dimensions. With the proof's random projections and $C = 2 \ln n$ that fails. With unit vectors that keep apart and a longer query it works:

# %%
for d in (3, 4, 5, 6):
    n = math.ceil(math.e ** d)
    bits = torch.rand(n, d, generator=seeded(0)) < .5
    crowded = theory.projected_basis(n, d, seeded(1))
    code, cosine = theory.spread_out(n, d, .93, seeded(2))
    C = math.log(4 * n) / (1 - cosine)
    one = theory.index_game_four(bits, crowded).right(bits)
    other = theory.index_game_four(bits, code, C).right(bits)
    print(f"d = {d}, {n:3} rows: random projections, ε = {theory.distortion(crowded):.1f}, "
          f"C = 2 ln n: {one:.0%} of the bits right; "
          f"unit vectors with cosines up to {cosine:.2f}, C = {C / math.log(n):.0f} ln n: "
          f"{other:.0%}")

# %% [markdown]
# So the corollaries hold, by other keys than the proof's. But such queries have a norm in proportion to $d$, and the matching upper bound (Theorems 6.3, 6.4) is for norms of $O(\log\log n)$. The two do not meet, and "optimal" is not shown (claim T12).
#
# ## A decoder that attends to pairs
#
# `pair_decoder(config)` is `nanollm`'s decoder with tensor attention in every layer. **Positions.** RoPE rotates queries and keys so that their product depends on the distance alone. A product of *three* rotated vectors does not: shift the whole text, and its score changes.

# %%
vectors = torch.randn(3, 1, 1, 16, generator=seeded(0))
for shift in (0, 1, 10, 100):
    two, three = theory.rotated_scores(*vectors, shift)
    print(f"text shifted by {shift:3}: q·k = {two:.3f}   q·(k₁∘k₂) = {three:7.3f}")

# %% [markdown]
# So the keys of pairs are not rotated here. The order is told by causality, or by GPT-2's learned positions. (Other trilinear forms, such as determinants, are invariant: Roy et al., arXiv 2507.02754.)
#
# **The task.** Match-3 asks at every number $x_i$: is there a pair $a, b \le i$ with $x_a + x_b + x_i \equiv 0 \pmod{31}$? For long texts one layer of ordinary attention cannot do it unless it is very wide (Sanford et al., arXiv 2306.02896). Ours are short; what happens there? One head of tensor attention, with its $q$, two keys, two values and output, has the parameters of one and a half ordinary ones. Three small decoders are trained, three seeds each:

# %%
shapes = {"tensor attention, 1 layer": dict(n_layers=1, n_heads=1, n_kv_heads=1, head_dim=64,
                                            d_ff=64, build=pair_decoder),
          "attention, 1 layer": dict(n_layers=1, n_heads=3, n_kv_heads=3, head_dim=32, d_ff=64),
          "attention, 2 layers": dict(n_layers=2, n_heads=3, n_kv_heads=3, head_dim=16, d_ff=32)}
p, T, trained = 31, 12, {}
for name, shape in shapes.items():
    began = time.process_time()
    trained[name] = [theory.learn(800, T=T, p=p, d_model=64, seed=seed, every=100, **shape)
                     for seed in range(3)]
    parameters = sum(w.numel() for w in trained[name][0][0].parameters())
    print(f"{name:<26}{parameters:>7,} parameters, {time.process_time() - began:3.0f} s:",
          ", ".join(f"{log[-1][1]:.1%}" for _, log in trained[name]), "of the answers right")

# %%
figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
for (name, runs), line in zip(trained.items(), LINES):
    for seed, (_, log) in enumerate(runs):
        axis.plot(*zip(*log), **line, markersize=4, label=None if seed else name)
rules = theory.simple_rules(*theory.match3(20_000, T, p, seeded(1)), p)
for (name, share), dash in zip(rules.items(), ("-", "-.")):
    print(f"{name:<47}: {share:.1%}")
    axis.axhline(share, color="black", linewidth=.8, linestyle=dash, label=name)
axis.set(xlabel="step (64 texts of 12 numbers)", ylim=(.74, 1.01),
         ylabel="right answers, 1000 held-out texts (from 74 %)")
axis.grid(alpha=.3), figure.legend(loc="outside right upper", fontsize=8);

# %% [markdown]
# Tensor attention finds the pairs, with every seed. Both ordinary decoders come to where one gets by looking for hits among *two* numbers, $a = b$ or $b = i$, and knowing the place, and hardly beyond. (A step of tensor attention takes about twice as long, since it makes $T^3$ scores.) In 800 steps, that is: what more steps do is exercise 6.
#
# Decoded token by token on 200 other texts, with each cache:

# %%
model = trained["tensor attention, 1 layer"][0][0]
tokens, answers = theory.match3(200, T, p, seeded(99))
whole = model(tokens)[:, 1:].argmax(-1)
for Cache in (FourCache, TwoCache, FactoredFourCache):
    caches = make_cache(model, Cache)
    logits = torch.cat([model(token, caches) for token in tokens.split(1, 1)], 1)
    answered = logits[:, 1:].argmax(-1)
    right, same = ((answered == x).double().mean() for x in (answers, whole))
    print(f"{Cache.__name__:<18} {right:.1%} right, "
          f"{same:.0%} the same answers as without a cache, "
          f"{caches[0].bytes()[0] / 200e3:.0f} KB a text")

# %% [markdown]
# ## Exercises
#
# 1. SubGen's two estimates are drawn apart. Use the draws of values for the normaliser too, $\tau = \sum_s \frac{\lVert V\rVert_F^2}{s\lVert v\rVert^2} e^{\langle q,k\rangle}$, and no clusters at all. Where is this better than the clusters, and where must it be worse? (Put a few keys with tiny values next to the query.)
# 2. `index_game_four` stores its bits in $V_1$ alone. Store $2nd$ bits, in $V_1$ *and* $V_2$. Which queries read the second half?
# 3. Give `FactoredFourCache` a budget: which score of a *token* tells what its pairs are worth? Try it on the Match-3 decoder.
# 4. Take halves of vectors for real and imaginary parts, and $\mathrm{Re}(\bar q\, k_1 k_2)$ for the score. Rotate $q$ by its position's angle and each key by *half* of its own. Show that shifting the text changes nothing now. Which pairs can the score not tell apart any more? What changes in the caches?
# 5. Attention to triples: which of the three caches would you extend, and what does a step cost in the factored form?
# 6. Give the two-layer decoder of ordinary attention more time: `theory.learn(5000, lr=2.5e-3, d_model=64, **shapes["attention, 2 layers"])`. Does it find pairs, or only look longer for hits among two numbers? And with twice the width?
