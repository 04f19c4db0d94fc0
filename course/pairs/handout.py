# %% [markdown]
# # 5. Pairs
#
# **3 to 4 hours; 18 points by tests, and 4 for the written question at the end.** You write six functions of `methods/tensor_attention.py` and two of `methods/theory/index_game.py`.
#
# **Read before:** Tensor attention ([arXiv 2503.11108](https://arxiv.org/abs/2503.11108)), sections 3 and 4, and Theorem B.1. Then the docstring of `methods/tensor_attention.py`, and `attend` and `write` of `LayerCache` in `nanollm/cache.py`.
#
# ## The idea
#
# In ordinary attention a query looks at tokens. In tensor attention it looks at *pairs* of tokens. Each token has two keys and two values. The pair (a, b) has the key k₁ₐ ∘ k₂ᵦ and the value v₁ₐ ∘ v₂ᵦ, where ∘ multiplies number by number. Of n tokens there are n² pairs, (a, b) and (b, a) apart, (a, a) too.
#
# What should the cache hold? The paper has two answers. Four matrices of n·D numbers, K₁, K₂, V₁ and V₂: little memory, but all pairs must be formed at each step. Or two matrices of pairs, n²·D numbers each: much memory, less to do. It calls this a trade-off. You will find that pairs need never be formed.
#
# Then the other end: how little can a cache hold? The paper answers with a game. Alice puts bits into a cache, and Bob reads any of them. So the cache must hold that many bits.
#
# ## On paper
#
# Two tokens, one number each: K₁ = (1, 3), K₂ = (5, 7), and a query q = 2.
#
# | pair | (0, 0) | (0, 1) | (1, 0) | (1, 1) |
# |---|---|---|---|---|
# | key k₁ₐ·k₂ᵦ | 5 | 7 | 15 | 21 |
# | score, times q | 10 | 14 | 30 | 42 |
#
# The same scores without any key of a pair: multiply K₁ by q, which gives (2, 6). The table of (2, 6) times (5, 7) is 10 14 / 30 42. For D numbers it is the matrix product (K₁ ∘ q) K₂ᵀ, n × n. The output works likewise: with P the n × n weights, out = Σₐ v₁ₐ ∘ (P V₂)ₐ.
#
# ## How it is graded
#
# Shapes: B rows of a batch, H key/value heads, G query heads to each of them, T new tokens, n tokens in all, D numbers a head. Query head i belongs to key/value head ⌊i/G⌋. `(...)` stands for any leading dimensions, none included. A key of (.., 2D) is [k₁ | k₂] side by side, and a value [v₁ | v₂]. Do not change a tensor that you are given. Signatures stay. Outputs have the dtype of `q`. No test needs speed.

# %%
from course.command import checker

check = checker("pairs")

# %% [markdown]
# ## 1. `pairs` (1 point)
#
# x ⊘ y. `x` is (..., n, D) and `y` is (..., m, D), with the same leading dimensions. Return (..., n·m, D): row a·m + b is x_a ∘ y_b.
#
# <details><summary>Hint</summary>Two <code>unsqueeze</code> make (..., n, m, D) of the product. <code>flatten</code> makes one dimension of two.</details>

# %%
check("pairs")

# %% [markdown]
# ## 2. `tensor_attention` (1 point, check `dense`)
#
# `q` is (..., T, D), the others are (..., n, D). Return (..., T, D). Every query sees all n² pairs: the weights are the softmax of q·(k₁ₐ ∘ k₂ᵦ) over all pairs, and the output is the weighted sum of v₁ₐ ∘ v₂ᵦ. Scores are not scaled, and nothing is masked.

# %%
check("dense")

# %% [markdown]
# ## 3. `FourCache.attend` (3 points)
#
# The cache with four matrices. `q` is (B, H·G, T, D), `k` and `v` are (B, H, T, 2D), `pos` is (B or 1, T). Return (B, H·G, T, D). In this order:
#
# - Call `self.check(q, k, v, pos)`. It raises `ValueError` if these do not belong together; then nothing may have been written.
# - Write the new tokens: `self.write(k, v, pos)`. Then `self.k` and `self.v` hold all tokens, (B, H, `self.length`, 2D), in the order in which they came, the new ones last. There is nothing to `observe`: these caches keep every token.
# - Multiply the queries by `self.scale`, or by 1/√D if that is `None`. D is that of `q`.
# - A pair is as late as its later token. So query t of the T sees the pairs of all tokens up to its own, in the order in which they came; `pos` is stored but not compared.
# - For each of the T queries call `self.one_query(q, k1, k2, v1, v2)` once, the first first: q (B, H, G, D) after the scale, the others (B, H, n, D) of the n tokens that it sees. It returns (B, H, G, D). Other caches override it.
#
# The tokens may come in pieces, and the outputs are the same.
#
# <details><summary>Hint</summary><code>q.view(B, H, G, T, D)</code> puts the heads of a group side by side. Query t sees <code>self.length - T + t + 1</code> tokens. <code>chunk(2, -1)</code> cuts [k₁ | k₂].</details>

# %%
check("attend")

# %% [markdown]
# ## 4. `new_pairs` (2 points, check `new`)
#
# The cache with two matrices adds, with each token, the pairs that have it as their later one. `x` and `y` are (B, H, n, D), the newest token last. Return (B, H, 2n − 1, D), in this order: first the pairs (a, n − 1) for a = 0, …, n − 1, which are x_a ∘ y_{n−1}. Then the pairs (n − 1, b) for b = 0, …, n − 2.
#
# The pair of the newest token with itself is there once. The order is for the keys as for the values, so each key stands at the place of its value.

# %%
check("new")

# %% [markdown]
# ## 5. `FactoredFourCache.one_query` (5 points, check `factored`)
#
# The same output as `tensor_attention`, but no pair is formed. `q` is (B, H, G, D), the others (B, H, n, D). Return (B, H, G, D). Scores are not scaled here. Numbers are float32 or float64.
#
# Hold a *tile* of scores at a time: some rows a, and all n columns b. A tile has ⌊`self.tile` / n⌋ rows, at least one; the last may be shorter. `self.tile` is thus a number of pairs. `zip(k1.split(rows, 2), v1.split(rows, 2))` are the rows of each tile; all of K₂ and V₂ belong to every tile.
#
# **Memory is graded.** No tensor that you make may have more than 2·B·H·G·max(`self.tile`, n·D) numbers. All n² scores at once are too many in the tests of this, and pairs are more.
#
# The softmax goes over all tiles, but you see them one by one. So keep three things for each query: the largest score so far, the sum of exp(score − largest), and the same sum with the values. When a tile has a larger score, what came before was weighed against a lower one: multiply both sums by exp(old largest − new largest). Scores may be in the thousands, positive or negative, and no NaN may come of it.
#
# The import of `kernel_for` is for a GPU; leave it.
#
# <details><summary>Hint</summary>Begin with one tile of all rows: score = (K₁ ∘ q) K₂ᵀ for each query. Let it pass the tests that do not measure memory, then split.</details>

# %%
check("factored")

# %% [markdown]
# ## 6. `pair_attention` (2 points, check `causal`)
#
# All of a text at once, as in training. `q` is (B, H·G, T, D), `k` and `v` are (B, H, T, 2D). Return (B, H·G, T, D). Query i sees the pairs (a, b) with a ≤ i **and** b ≤ i. Scores are scaled by 1/√D. D is the last dimension of `q`, half that of `k`. The softmax goes over all pairs that a query sees, together. T³ scores a head are allowed.
#
# <details><summary>Hint</summary><code>torch.einsum</code> with three factors gives scores (B, H·G, T, T, T). <code>repeat_interleave</code> gives each query head its keys.</details>

# %%
check("causal")

# %% [markdown]
# ## 7. `index_game_four` (1 point, check `alice`)
#
# Alice has bits (n, d), true or false. She stores token i with k₁ = the i-th of her keys, v₁ = her i-th row of bits, and k₂ = v₂ = 1 everywhere. Keys (n, d) are vectors that are nearly orthogonal and have about the length 1.
#
# Make k and v, (n, 2d) each, of the dtype of `keys`. Make a cache of the class `Cache` with `scale=1.0`, and return what `play` returns for that cache, k, v, `keys` and `C`. Pass on `how`.

# %%
check("alice")

# %% [markdown]
# ## 8. `play` (3 points)
#
# The game with any cache. `k` and `v` are (n, 2d), or (n, d) for a plain `LayerCache`. `keys` is (n, d).
#
# - Alice writes her n tokens into `cache`, one row, one head, positions 0 to n − 1. She asks nothing, so `cache.write` is enough.
# - If `compress` is given, call `compress(cache)` once.
# - For each i Bob asks: one token at position n, with as many columns as k, all 0 (n is the number of Alice's tokens, also if `compress` dropped some). Where k has d columns the cache is plain: it divides scores by √d, so the query is √d · C · keys[i]. Where k has 2d columns the cache has `scale=1.0`, and the query is C · keys[i]. He asks in a copy of the cache (`copy.deepcopy`), so that no question leaves a token behind. What he gets, (d,), is row i of `read`, (n, d).
# - `C` is 2 ln n if it is `None`.
# - If `eta` is not 0, each number of `read` is multiplied by 1 + η or 1 − η: draw `torch.randint(0, 2, read.shape, generator=generator)` once. 1 means +, 0 means −.
#
# Return `Game(read, zero, one)`. What to expect of a 0 and of a 1 comes from `separation(n, distortion(keys), C, four)`, with `four` true where k has 2d columns. Noise loosens it: `zero` is 1 + η times the first number, `one` is 1 − η times the second.

# %%
check("play")

# %% [markdown]
# ## 9. Predict, then measure (written, 4 points, not graded by the tests)
#
# **First write down** what you expect, with a reason, before you run the cells:
#
# 1. From 128 to 256 to 512 tokens: by which factor do a decoding step's multiplications grow in `TwoCache`, in `FourCache` and in `FactoredFourCache`, and by which the bytes that each holds? Time need not follow the multiplications: where does it not, and what else moves? Which is the fastest?
# 2. Bob's guesses with all of Alice's cache, with one bit a number, and with every other token evicted: which share of 16 · 512 bits is right?
# 3. With fewer dimensions d her 16 keys are less orthogonal. At which d of 128, 32, 8, 4 do guesses fail?
#
# Your prediction:
#
#

# %%
import torch
from methods.tensor_attention import FactoredFourCache, FourCache, TwoCache
from methods.theory import index_game as theory

torch.set_num_threads(1)
for n in 128, 256, 512:
    for Cache, seconds, held, count in theory.race(n, 64, (TwoCache, FourCache, FactoredFourCache)):
        print(f"{n:4} tokens  {Cache.__name__:18} {1e3 * seconds:8.2f} ms {held / 1e6:8.2f} MB held"
              f"{count.multiplications / 1e6:8.2f} M multiplied {count.bytes / 1e6:8.2f} MB read and written")

# %%
n, d = 16, 512
bits, keys = theory.deal(n, d)
for name, how in (("all", {}), ("one bit a number", dict(compress=theory.keep_rows(slice(n), n, 1))),
                  ("every other token", dict(compress=theory.keep_rows(slice(0, n, 2), n)))):
    print(f"{name:20} {theory.index_game_four(bits, keys, **how).right(bits):.3f} of the bits are right")
for d in 128, 32, 8, 4:
    games = [theory.deal(n, d, seed) for seed in range(5)]
    print(f"d = {d:4}", *(f"{theory.index_game_four(*x).right(x[0]):.3f}" for x in games))

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most twelve sentences):
#
#
