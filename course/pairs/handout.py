# %% [markdown]
# # 5. Pairs
#
# **3 to 4 hours; 18 points by tests, and 4 for the written question.**
#
# Tensor attention looks at *pairs* of tokens. For one head of 64 numbers in float32, a cache that stores all pairs of 512 tokens takes 136 MB; a cache that stores the tokens takes 0.53 MB and gives the same outputs. The paper calls this a trade-off: less memory, more work. You will find that no pair ever has to be formed.
#
# ## The idea
#
# In tensor attention each token has two keys and two values. The pair (a, b) has the key k₁ₐ ∘ k₂ᵦ and the value v₁ₐ ∘ v₂ᵦ, where ∘ multiplies number by number. n tokens have n² pairs: (a, b) and (b, a) differ, and (a, a) counts.
#
# The paper offers two caches. One holds four matrices, K₁, K₂, V₁ and V₂, with n·D numbers each: little memory, but every step forms all pairs. The other holds two matrices of pairs, with n²·D numbers each: much memory, less work per step.
#
# Then comes the lower end: how small can a cache be? The paper answers with a game. Alice stores bits in a cache, and Bob may read any of them. So the cache must hold that many bits.
#
# **Example.** Two tokens, one number each: K₁ = (1, 3), K₂ = (5, 7), query q = 2.
#
# | pair | (0, 0) | (0, 1) | (1, 0) | (1, 1) |
# |---|---|---|---|---|
# | key k₁ₐ·k₂ᵦ | 5 | 7 | 15 | 21 |
# | score, times q | 10 | 14 | 30 | 42 |
#
# The same scores without the key of any pair: multiply K₁ by q, which gives (2, 6). The table of (2, 6) times (5, 7) is 10 14 / 30 42. For D numbers it is the n × n matrix product (K₁ ∘ q) K₂ᵀ. The output works likewise: with the n × n weights P, out = Σₐ v₁ₐ ∘ (P V₂)ₐ.
#
# ## What you write
#
# | check | function | file | points |
# |---|---|---|---|
# | `pairs` | `pairs` | `methods/tensor_attention.py` | 1 |
# | `dense` | `tensor_attention` | `methods/tensor_attention.py` | 1 |
# | `attention` | `FourCache.attention` | `methods/tensor_attention.py` | 3 |
# | `new` | `new_pairs` | `methods/tensor_attention.py` | 2 |
# | `factored` | `FactoredFourCache.one_query` | `methods/tensor_attention.py` | 5 |
# | `causal` | `pair_attention` | `methods/tensor_attention.py` | 2 |
# | `alice` | `index_game_four` | `methods/theory/index_game.py` | 1 |
# | `play` | `play` | `methods/theory/index_game.py` | 3 |
#
# **Read first:** Tensor attention ([arXiv 2503.11108](https://arxiv.org/abs/2503.11108)), sections 3 and 4, and Theorem B.1; the docstring of `methods/tensor_attention.py`; `attend`, `step` and `attention` of `Slots` in `nanollm/slots.py`.
#
# ## How to check it
#
# The cell after each problem runs its public tests. If your copy also holds assignment 1, finish it first: tests and experiments call its functions. In grading, each problem's function runs with our solutions of the others, so a wrong function costs only its own problem. No test needs speed.
#
# Shapes: B batch rows, H key/value heads, G query heads per key/value head, T new tokens, n tokens in all, D numbers per head. Query head i reads key/value head ⌊i/G⌋. `(...)` means any leading dimensions, or none. A key (…, 2D) is [k₁ | k₂] side by side, a value [v₁ | v₂]. Return the dtype of `q`. Do not change a tensor that you are given. Keep the signatures.

# %%
from course.command import checker

check = checker("pairs")

# %% [markdown]
# ## 1. `pairs` (1 point)
#
# `x` is (..., n, D), `y` is (..., m, D), with the same leading dimensions. Return (..., n·m, D): row a·m + b is x_a ∘ y_b.
#
# Example: x = 1 10 and y = 1 2 (D = 1) give 1 2 10 20.
#
# <details><summary>Hint</summary>Two <code>unsqueeze</code> give the product (..., n, m, D). <code>flatten</code> merges two dimensions.</details>

# %%
check("pairs")

# %% [markdown]
# ## 2. `tensor_attention` (1 point, check `dense`)
#
# `q` is (..., T, D), the others are (..., n, D). Return (..., T, D). Every query sees all n² pairs: the weights are the softmax of q·(k₁ₐ ∘ k₂ᵦ) over all pairs, and the output is the weighted sum of v₁ₐ ∘ v₂ᵦ. No scale, no mask.
#
# Example: a query of zeros, v₁ = 1 3 and v₂ = 2 4 (D = 1). The pairs have the values 2 4 6 12 and equal weights; return their mean, 6.

# %%
check("dense")

# %% [markdown]
# ## 3. `FourCache.attention` (3 points)
#
# The cache with four matrices. `attend`, which is given, writes T new tokens and then calls `attention` with their queries: `q` is (B, H·G, T, D), `pos` is (B or 1, T). `self.k` and `self.v`, (B, H, `self.length`, 2D), hold all tokens in order, the new ones last. Return the outputs, (B, H·G, T, D), and `None` in place of the probabilities: no method observes these.
#
# 1. Multiply the queries by `self.scale`, or by 1/√D if that is `None`. D is that of `q`.
# 2. For each of the T queries, in order, call `self.one_query(q, k1, k2, v1, v2)` once: q is (B, H, G, D), scaled; the others are (B, H, n, D), the n tokens up to the query's own. It returns (B, H, G, D). `FactoredFourCache` overrides it.
#
# A pair is as late as its later token, so query t sees the pairs of all tokens up to its own, in order of arrival. Do not compare `pos`. The outputs must not depend on how the tokens are split into pieces.
#
# Example: two tokens, queries of zeros; both values of token 0 are 1, those of token 1 are 2. Token 0 sees one pair, with the value 1. Token 1 sees the four pairs 1 2 2 4: their mean is 2.25.
#
# <details><summary>Hint</summary><code>q.view(B, H, G, T, D)</code> separates the groups. Query t sees <code>self.length - T + t + 1</code> tokens. <code>chunk(2, -1)</code> splits [k₁ | k₂].</details>

# %%
check("attention")

# %% [markdown]
# ## 4. `new_pairs` (2 points, check `new`)
#
# With each token the cache of pairs adds the pairs in which this token is the later one. `x` and `y` are (B, H, n, D), the newest token last. Return (B, H, 2n − 1, D), in this order: the pairs (a, n − 1) for a = 0, …, n − 1, that is x_a ∘ y_{n−1}; then the pairs (n − 1, b) for b = 0, …, n − 2. The pair of the newest token with itself appears once. Keys and values use the same order, so each key stands beside its value.
#
# Example: x = 1 2 3 and y = 10 20 30 give 30 60 90 30 60.

# %%
check("new")

# %% [markdown]
# ## 5. `FactoredFourCache.one_query` (5 points, check `factored`)
#
# Compute the output of `tensor_attention` without forming a pair. `q` is (B, H, G, D), the others are (B, H, n, D). Return (B, H, G, D). Do not scale. Numbers are float32 or float64.
#
# Hold one *tile* of scores at a time: ⌊`self.tile` / n⌋ rows a, at least one, and all n columns b. So `self.tile` counts pairs; the last tile may be shorter. `zip(k1.split(rows, 2), v1.split(rows, 2))` gives the rows of each tile; all of K₂ and V₂ belong to every tile.
#
# **Memory is graded.** No tensor that you make may have more than 2·B·H·G·max(`self.tile`, n·D) numbers. The tests of memory do not admit all n² scores at once, let alone pairs.
#
# The softmax runs over all tiles, but you see one at a time. For each query keep three things: the largest score so far, the sum of exp(score − largest), and the same sum weighted by values. When a tile has a larger score, multiply both sums by exp(old largest − new largest). Scores may be in the thousands, positive or negative; no NaN may result.
#
# Example: two rows, a row per tile; the first row's scores are 0 0, the second's 1000 1000. After row one: largest 0, sum 2. Row two multiplies this by exp(−1000) = 0 and adds 2.
#
# <details><summary>Hint</summary>Begin with one tile of all rows: score = (K₁ ∘ q) K₂ᵀ for each query. Pass the tests that do not measure memory, then split.</details>

# %%
check("factored")

# %% [markdown]
# ## 6. `pair_attention` (2 points, check `causal`)
#
# The whole text at once, as in training. `q` is (B, H·G, T, D), `k` and `v` are (B, H, T, 2D). Return (B, H·G, T, D). Query i sees the pairs (a, b) with a ≤ i **and** b ≤ i. Scale scores by 1/√D, with the D of `q`. The softmax runs over all pairs that a query sees. You may hold T³ scores per head.
#
# Example: the two tokens of problem 3 give 1 and 2.25 again.
#
# <details><summary>Hint</summary><code>torch.einsum</code> with three factors gives scores (B, H·G, T, T, T). <code>repeat_interleave</code> gives each query head its keys.</details>

# %%
check("causal")

# %% [markdown]
# ## 7. `index_game_four` (1 point, check `alice`)
#
# Alice has bits (n, d), true or false, and keys (n, d): nearly orthogonal vectors of length about 1. For token i she stores k₁ = her i-th key, v₁ = her i-th row of bits, and k₂ = v₂ = 1 everywhere.
#
# Make k and v, (n, 2d) each, of the dtype of `keys`. Make a cache of the class `Cache` with `scale=1.0`. Return what `play` returns for this cache, k, v, `keys` and `C`. `how` holds further arguments of `play`: pass them on. The check needs your `play` (problem 8), which also explains `C`.
#
# Example: the keys (1, 0), (0, 1) and the bits 1 0 / 0 1 make k = 1 0 1 1 / 0 1 1 1, and v the same.

# %%
check("alice")

# %% [markdown]
# ## 8. `play` (3 points)
#
# The game, with any cache. `k` and `v` are (n, 2d), or (n, d) for a plain store, `Slots`. `keys` is (n, d).
#
# 1. Alice writes her n tokens into `cache`: one row, one head, positions 0 to n − 1. She asks nothing, so call `cache.write`.
# 2. If `compress` is given, call `compress(cache)` once.
# 3. For each i Bob asks with one token at position n (the number of Alice's tokens, even if `compress` dropped some). His key and value have as many columns as k, all 0. If k has d columns, the cache divides scores by √d, so his query is √d · C · keys[i]. If k has 2d columns, the cache has `scale=1.0`, and his query is C · keys[i]. He asks a copy of the cache (`copy.deepcopy`), so that no question leaves a token behind. His answer, (d,), is row i of `read`, (n, d).
# 4. `C` is 2 ln n if it is `None`.
# 5. If `eta` is not 0, multiply each number of `read` by 1 + η or 1 − η. Draw `torch.randint(0, 2, read.shape, generator=generator)` once: 1 means +, 0 means −.
#
# Return `Game(read, zero, one)`. `separation(n, distortion(keys), C, four)` bounds what Bob reads for a 0 and for a 1; `four` is true if k has 2d columns. Noise loosens the bounds: `zero` is 1 + η times the first number, `one` is 1 − η times the second.
#
# Example: n = 2, the keys (1, 0), (0, 1), bits 1 0 / 0 1 in four matrices, C = 2 ln 2. With Bob's own token there are nine pairs. The token he asks for is first in two pairs with Alice's tokens; these weigh 4, the other seven 1. So he reads 8/15 for the 1 and 2/15 for the 0.

# %%
check("play")

# %% [markdown]
# ## 9. Predict, then measure (written, 4 points, graded by hand)
#
# **Before you run the cells, write down** what you expect, and why:
#
# 1. A decoding step multiplies about 2n²D numbers in `TwoCache` and in `FactoredFourCache`, and 4n²D in `FourCache`. Where do these come from? From 128 to 256 to 512 tokens: by which factor do the bytes grow that each cache holds? Will time follow the multiplications? Estimate how many bytes of pairs each step reads or writes at 512 tokens. Do they explain the times? Which cache is the fastest?
# 2. Bob guesses 16 · 512 bits: from all of Alice's cache, from one bit per number, and with every other token evicted. Which fraction is right?
# 3. With fewer dimensions d, Alice's 16 keys are less orthogonal. At which of d = 128, 32, 8, 4 is a guess wrong?
#
# Your prediction:
#
#

# %%
from copy import deepcopy
from time import perf_counter
import torch
from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache
from methods.theory import index_game as theory

torch.set_num_threads(1)
D = 64
for n in 128, 256, 512:
    k, v, q = (torch.randn(1, 1, n, size) for size in (2 * D, 2 * D, D))
    for Cache, products in (TwoCache, 2), (FourCache, 4), (FactoredFourCache, 2):
        full, seconds = Cache(), []
        for t in range(n - 1):
            full.write(k[:, :, t:t + 1], v[:, :, t:t + 1], torch.tensor([[t]]))
        for _ in range(5):
            cache, start = deepcopy(full), perf_counter()
            cache.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], torch.tensor([[n - 1]]))
            seconds.append(perf_counter() - start)
        print(f"{n:4} tokens  {Cache.__name__:18} {1e3 * min(seconds):8.2f} ms "
              f"{cache.bytes()[0] / 1e6:8.2f} MB held {products * n * n * D / 1e6:8.2f} M multiplied")

# %%
n, d = 16, 512
bits, keys = theory.deal(n, d)
for name, how in (("all", {}),
                  ("one bit a number", dict(compress=theory.keep_rows(slice(n), n, 1))),
                  ("every other token", dict(compress=theory.keep_rows(slice(0, n, 2), n)))):
    right = theory.index_game_four(bits, keys, **how).right(bits)
    print(f"{name:20} {right:.3f} of the bits are right")
for d in 128, 32, 8, 4:
    games = [theory.deal(n, d, seed) for seed in range(5)]
    print(f"d = {d:4}", *(f"{theory.index_game_four(*x).right(x[0]):.3f}" for x in games))

# %% [markdown]
# What you measured, where your prediction was wrong, and why, in at most twelve sentences:
#
#
