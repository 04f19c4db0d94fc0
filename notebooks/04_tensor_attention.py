# %% [markdown]
# # Tensor attention: must attention to pairs of tokens be slow or large?
#
# **Question.** In ordinary attention a query looks at tokens. In **tensor attention** it looks at *pairs* of tokens. What should a decoder cache for that: four small matrices, or two huge ones?
#
# Each token has two keys and two values. The pair $(a, b)$ has the key $k_{1,a} \circ k_{2,b}$ and the value $v_{1,a} \circ v_{2,b}$ (elementwise products). After $n$ tokens there are $n^2$ pairs. $K_1 \oslash K_2$ is the matrix of all pair keys.
#
# The paper (Chen et al., arXiv 2503.11108) finds a trade-off of time against memory, proves lower bounds on the memory, and uses SubGen, an estimate for keys that form clusters. This notebook runs all three. T1 to T13 are claims in [CLAIMS.md](../CLAIMS.md). The dimension of a head is $d$ in the text and `D` in the code.
#
# **Read before:** `00_kv_cache.ipynb`. **Code beside it:** `methods/tensor_attention.py`, `methods/sub_gen.py`, `methods/theory/index_game.py`, `methods/theory/clustering.py`. **Time:** 45 minutes to read, two minutes to run, mostly to train three small decoders.

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
# Each cache has its own colour, marker and dash in all figures.

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
# Three caches share the interface of `LayerCache`, with $k = [k_1 | k_2]$ and $v = [v_1 | v_2]$:
#
# - `FourCache` keeps $K_1, K_2, V_1, V_2$ and forms all pairs for each query, as the paper describes it.
# - `TwoCache` keeps all pairs.
# - `FactoredFourCache` keeps the four matrices and never forms a pair.
#
# Token by token they compute one function:

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
# Each is one matrix product. The factored form multiplies as often as the two-cache form. But its $4nd$ numbers stay in the processor's cache, while the $2n^2d$ numbers of all pairs come from memory. Below is one decoding step of each: one head, $d = 64$, float32, one thread.

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
# For all three, the time grows with $n^2$ once the pairs no longer fit into the processor's cache. The factored form is the fastest at every length (table above). It needs as little memory as `FourCache`.
#
# Theorem 4.3 compares the two algorithms of the paper's Figure 1, and for these it is true. But the trade-off of Remark 3.9 does not exist: keep $K_1, K_2, V_1, V_2$ (claim T4: *does not hold*).
#
# ## The Index game: how much must a cache hold?
#
# The lower bounds are games. Alice writes $n \times d$ bits into a cache: token $t$ gets a key $k_{1,t}$ of its own, and the bits of row $t$ as its value $v_{1,t}$; $k_2 = v_2 = 1$. Bob gets only the cache. To read row $t$ he asks with the query $C\,k_{1,t}$. If $C = 2 \ln n$, the right key outweighs all others. If Bob can read every row, the cache must hold all $nd$ bits, whatever it looks like inside.
#
# The keys are random. They are orthonormal up to ε, if $d$ is large compared with $\log n$. The bits are a picture of 32 rows and 2048 columns. A coin that Bob knows flips each bit, so that no bit can be guessed from its neighbours.

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
# With the exact cache every bit comes back. The readings lie within the predicted margins, once the prediction counts the $2n+1$ pairs with the zero key that Bob must append. The proof leaves these out (claim T6). If every other token is evicted, half of the bits in those rows are right by luck.
#
# Rounding is different: with one bit a number nothing is lost. This agrees with the bound, which is $nd$ bits, since $V_1$ alone has $nd$ numbers. The next figure compares the bits that Bob learns with the bits kept of $V_1$. A row of which a share $a$ is right tells $d(1 - h(a))$ bits, where $h$ is the binary entropy.

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
# Left: with one bit a number, eviction follows the line that no cache can cross. More bits a number are wasted on this message.
#
# Middle: below about 16 dimensions the keys blur into each other. The printed numbers say that ε is about $2\sqrt{\ln n/d}$ (claim T5). Only this way of reading fails then: the bits are still in $V_1$.
#
# Right: a relative error $1 \pm \eta$ of each reading does no harm up to η = 0.84 with the proof's query, and up to 0.99 with a query half as long again (claim T8: Corollary 4.4 holds if $C$ grows with η).
#
# **Four or two?** Theorem 4.2 plays the game with $n^2$ rows and concludes that the two-cache form needs $n^2 d$ bits (claim T7). Its rows must be arbitrary. But the rows of $K_1 \oslash K_2$ are computed from $4nd$ numbers. The theorem is a bound for the *format*, and a reason not to use it.
#
# ## SubGen: an estimate instead
#
# The bounds hold for caches that answer *every* query. If queries are short ($\lVert q\rVert \le r$) and keys form few clusters, an estimate needs less. SubGen keeps $t$ random keys of each cluster of radius δ, for the normaliser τ. For the numerator $z$ it keeps $s$ values with their keys, drawn in proportion to $\lVert v\rVert^2$.
#
# Lemma 5.2 (`SubGen2Cache`) streams all pairs. Lemma 5.1 (`SubGen4Cache`) samples $(k_1, v_1)$ and $(k_2, v_2)$ apart and pairs the samples. The paper gives no algorithm for this. In ours every left sample meets every right one, which costs no extra byte.
#
# Numerator and normaliser are unbiased. Their ratio is not, because $E[1/\tau] > 1/E[\tau]$. The figure has 48 tokens ($d = 3$, δ = 0.9, $s$ = 32) and bars of three standard errors.

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
# Numerator and normaliser are at 1 within their bars. The ratio is above 1 and falls with $t$ (claims T9, T10). `SubGen4Cache` does better, since its samples make many more pairs.
#
# What does an estimate cost? The next figure has the error over the bytes held, in the lemmas' unit $\lVert\mathrm{softmax}\rVert_2 \lVert V_1 \oslash V_2\rVert_2$. A simple rival holds as many bytes: a random subset of the *tokens*, with all their pairs.

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
# The last line of each panel is the ratio of the two errors, with its standard error as a factor.
#
# `SubGen2Cache` must keep all earlier tokens to form new pairs. It is never smaller than the exact cache (claim T10). `SubGen4Cache` is smaller.
#
# Random tokens have the smaller error where keys spread or values are alike. SubGen wins where a few values carry most of the norm and little memory is allowed. The query matters too: with norm 12 the error of SubGen is about four times that of random tokens.
#
# ### The sizes that the lemmas ask for
#
# The lemmas leave their constants open. `sizes` computes them with Chebyshev's inequality: $t \propto \sinh^2(\delta r)$ and $s \propto \lVert V\rVert_F^2/\lVert V\rVert_2^2 \le d$. Keys lie in four tight clusters a side. The error must be at most ε in 99 of 100 runs.

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
# The promise is kept with room to spare. More than 10 of 1000 runs break it only at a 64th of the sizes for `SubGen2Cache`, and at a 256th for `SubGen4Cache` (claims T10, T9). At full size `SubGen4Cache` is smaller than the exact cache from about 2000 tokens on, `SubGen2Cache` never.
#
# ## Few dimensions
#
# When do keys form few clusters? The unit ball has room for at most $(1 + 2/\delta)^d$ clusters of radius δ, however many keys come. The paper counts $e^d$ parts of *diameter* $\delta = e/3$, from $(3/\delta)^d$; but that is $(9/e)^d = 3.3^d$ balls of *radius* δ (claim T11). With fixed $d$ the memory should stop growing (claim T12). Below, keys are uniform in the ball, with $\delta = e/3$, $t$ = 8, $s$ = 100.

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
# For $d$ = 2 the number of clusters stops at 5. For $d$ = 8 and 16 it still grows at 16,000 tokens. Heads of real models have $d$ of 64 or 128.
#
# The other half of the optimality claim is a lower bound of $\Omega(d\,e^d)$ bits (Corollaries 6.1, 6.2): Alice stores $e^d$ rows in $d$ dimensions. The proof's random projections fail at that. Unit vectors that stay apart, and a longer query, succeed:

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
# So the corollaries hold, with other keys than the proof's. But these queries have norms in proportion to $d$, and the upper bound (Theorems 6.3, 6.4) allows only $O(\log\log n)$. The two bounds do not meet, so "optimal" is not shown (claim T12).
#
# ## A decoder that attends to pairs
#
# `pair_decoder(config)` builds `nanollm`'s decoder with tensor attention in every layer. RoPE rotates queries and keys so that their product depends on the distance alone. A product of *three* rotated vectors does not: if the text is shifted, the score changes.

# %%
vectors = torch.randn(3, 1, 1, 16, generator=seeded(0))
for shift in (0, 1, 10, 100):
    two, three = theory.rotated_scores(*vectors, shift)
    print(f"text shifted by {shift:3}: q·k = {two:.3f}   q·(k₁∘k₂) = {three:7.3f}")

# %% [markdown]
# So the keys of pairs are not rotated here. Causality, or GPT-2's learned positions, tells the order.
#
# **The task.** Match-3 asks at each number $x_i$: is there a pair $a, b \le i$ with $x_a + x_b + x_i \equiv 0 \pmod{31}$? For long texts one layer of ordinary attention needs to be very wide for that (Sanford et al., arXiv 2306.02896). Our texts are short. Three small decoders are trained, with three seeds each. One head of tensor attention has the parameters of one and a half ordinary heads.

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
# Tensor attention finds the pairs with every seed. In these 800 steps the ordinary decoders learn little more than hits among *two* numbers ($a = b$ or $b = i$). A step of tensor attention takes about twice as long.
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
# ## Three things to remember
#
# 1. Factor before you cache: pairs of tokens never need to be formed.
# 2. A lower bound on memory is a game. Play it, and you see which assumption it needs.
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
# 5. Give the two-layer decoder of ordinary attention more time. Does it find pairs?
#    <details><summary>Hint</summary><code>theory.learn(5000, lr=2.5e-3, d_model=64, **shapes["attention, 2 layers"])</code></details>
