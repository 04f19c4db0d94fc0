# %% [markdown]
# # 4. The budget cache and its theorem
#
# **4 to 5 hours; 18 points by tests, and 4 for the written question.**
#
# Scissorhands comes with a theorem: keep the largest weights, and the lost attention is bounded. For a quarter of the entries and weights of a power law with exponent 3 the printed bound is −0.77. A loss cannot be negative: if the law has no cut-off, a quarter of the attention is lost. Here you write the core of the cache, find the lines of the proof that slip, and write a bound that holds.
#
# ## The idea
#
# A KV cache grows with the text. A *budget cache* does not: it never holds more than `budget` entries per key/value head, neither while the prompt is read nor later. When it is full and another token comes, some entries must leave.
#
# Scissorhands assumes that importance persists: the decoder attends again to the tokens it attended to before. An entry is *unimportant* at step s if its weight is below the uniform share 1/s. The entries that were unimportant most often leave.
#
# The theorem assumes that the weights v follow a power law, with exponent k and cut off at u, and that the largest stay. ε is its slack for finitely many weights. Then the lost attention is on average at most a number that the paper prints.
#
# **Example: the cache.** Budget 4; m = 2 entries leave at a time; the newest r = 1 never leaves. Tokens 0 to 5 come one by one. The least important leave first.
#
# | new token | held before | their importance | leave | held after |
# |---|---|---|---|---|
# | 3 | 0 1 2 | – | – | 0 1 2 3 |
# | 4 | 0 1 2 3 | 5 0 2 0 | 1 and 2 | 0 3 4 |
# | 5 | 0 3 4 | – | – | 0 3 4 5 |
#
# After token 3 the cache is full, but nothing leaves until token 4 finds no room. Token 3 has as little importance as token 1, but it is the newest, so token 2 leaves instead.
#
# **Example: the theorem.** Let k = 3 and u = ∞, so P(v > x) = (x + 1)⁻². Draw many weights and keep the largest quarter. The threshold γ has P(v > γ) = ¼, so γ = 1. The mean of v is 1. The weights below γ contribute ∫₀¹ x · 2(x + 1)⁻³ dx = ¼ of it. So a quarter of the mass is lost. For ε = 0 the paper's bound says −0.77.
#
# ## What you write
#
# | check | function | file | points |
# |---|---|---|---|
# | `room` | `BudgetSlots.room` | `methods/scissorhands.py` | 3 |
# | `observe` | `Scissorhands.observe` | `methods/scissorhands.py` | 4 |
# | `share` | `smallest_share` | `methods/theory/persistence.py` | 2 |
# | `draw` | `draw_power_law` | `methods/theory/persistence.py` | 2 |
# | `mass` | `tail_mass` | `methods/theory/persistence.py` | 2 |
# | `slips` | `proof_steps` | `methods/theory/persistence.py` | 3 |
# | `repaired` | `repaired_bound` | `methods/theory/persistence.py` | 2 |
#
# Problems 1 and 2 concern the cache, 3 to 7 the theorem. Begin with either half; problem 3 is the easiest.
#
# **Read first:** Scissorhands ([arXiv 2305.17118](https://arxiv.org/abs/2305.17118)), sections 3 and 4, and Theorem B.3 with its proof. Then the docstring of `methods/scissorhands.py`, and of `nanollm/method.py`, which says in which order everything is called; `attend` and `step` of `Slots` in `nanollm/slots.py`.
#
# ## How to check it
#
# The cell after each problem runs its public tests. If your copy also holds assignment 1, finish it first: tests and experiments call its functions. In grading, each problem's function runs with our solutions of the others, so a wrong function costs only its own problem. No test needs speed.
#
# Shapes: B batch rows, H key/value heads, G query heads per key/value head, T new tokens, S slots in use, D numbers per head. Rows and heads are independent. Do not change a tensor that you are given. Keep the signatures.

# %%
from course.command import checker

check = checker("budget")

# %% [markdown]
# ## 1. `BudgetSlots.room` (3 points)
#
# Algorithm 1 of the paper. T tokens come at once. The given `attend` calls `room(T)`, which says how many of them to take. It writes so many, lets each query see what the store holds up to its own token, and calls `observe`. Then it calls `room` for the tokens that are left, until all are taken. Up to rounding, the outputs must equal those of tokens that come one by one. A single token comes like this:
#
# - If `self.length`, the slots in use, equals the budget, `self.method.budget`, some entries must leave: call `self.method.evict(self)`, once. It drops at least one entry of each head. Otherwise drop nothing.
# - Then the token takes a free slot.
#
# Who leaves is the method's decision. `Scissorhands.evict`, which is given, drops m entries: those of highest count, of equal counts the oldest, and never one of the newest r.
#
# Return a whole number from 1 to T. Never use more slots than the budget. A text shorter than the budget loses nothing. T may exceed the budget. Always taking one token is correct but slow; better take as many as there is room for.
#
# <details><summary>Hint</summary>After <code>evict</code> fewer slots are in use. Up to the next full store no token needs an eviction.</details>

# %%
check("room")

# %% [markdown]
# ## 2. `Scissorhands.observe` (4 points)
#
# Algorithm 2: count how often each entry was unimportant. Steps count from 1: the token at position i is read at step s = i + 1. `observe` runs after the tokens are written to the store `layer`, so `layer.seen` is the newest step.
#
# `p` is (B, H, G, n, S): the weights that the newest n queries gave to the slots in use, oldest query first. These are the steps `layer.seen` − n + 1 to `layer.seen`. n never exceeds w = `self.history`, even if more tokens came at once.
#
# Entry j is **unimportant at step s** if both hold:
#
# - the mean of its weights over the G query heads is below 1/s, both in float32. Write `mean < 1 / s`; `mean * s < 1` rounds differently;
# - it existed: its position is below s. The token of step s itself existed. Slots are not sorted, so use `layer.pos`, (B, H, S).
#
# Afterwards `layer.slot("count")`, (B, H, S) of `torch.int32`, must say at how many of the newest w steps each entry was unimportant. `layer.put("count", x)` replaces it.
#
# To take an old step off a count, remember what it added: each slot has w bits in `layer.slot("unimportant")`, (B, H, S, ⌈w/8⌉) of `torch.uint8`. Both tensors are 0 for a new token and move with their slot. The class `Bits` in the same file reads and writes these bits. They form a *ring*: step s overwrites step s − w. `bits.replace(step, now)` takes the numbers of n steps, (n,), and their bits, (B, H, S, n) of `torch.uint8`. It returns by how much the sum of each slot's bits grew, (B, H, S). Afterwards `bits.bytes` are the new bytes; put them into the store as well. Only the counts are graded.
#
# Example: weights 1, then 0.3 0.7, then 0.2 0.5 0.3. Below 1/s are 0.3 (s = 2), and 0.2 and the second 0.3 (s = 3). The counts are 2 0 1.
#
# <details><summary>Hint 1</summary><code>torch.arange</code> makes the n steps. With the steps along the last dimension, <code>p.mean(2, …).mT</code>, one comparison serves all of them.</details>
#
# <details><summary>Hint 2</summary>What <code>replace</code> returns is what the count grows by: steps that come minus steps that leave.</details>

# %%
check("observe")

# %% [markdown]
# ## 3. `smallest_share` (2 points, check `share`)
#
# From here on: how much attention does even the best choice lose? The weights of a step are v_j/Σv. The largest `beta` · n of the n entries stay.
#
# `v` is (..., n), at least 0, sorted along the last dimension, smallest first. Return the fraction of each row's sum held by its m smallest numbers, where m = `round((1 - beta) * n)` as Python rounds. The shape is (...), the dtype that of `v`. 0 < β ≤ 1; for m = 0 return 0. No row is all zeros.
#
# Example: 0 1 4 5 and β = ½. The two smallest hold 1 of 10: return 0.1.

# %%
check("share")

# %% [markdown]
# ## 4. `draw_power_law` (2 points, check `draw`)
#
# The theorem's weights have the density c (x + 1)^{−k} on [0, u − 1]. (The paper has a parameter b in place of 1; we measure weights in units of b.) So
#
# P(v > x) = ((x + 1)^{1−k} − u^{1−k}) / (1 − u^{1−k}).
#
# Return draws of this `shape`, `torch.float64`. Draw one uniform number for each by a single `torch.rand(shape, dtype=torch.float64, generator=generator)`. The draw is the x at which **P(v ≤ x)** equals that number. `u` may be `math.inf`. First call `check_law(1, k, u)`, which raises a `ValueError` unless k and u exceed 1, and k exceeds 2 if `u` is infinite.
#
# Example: k = 3, u = ∞. The uniform number ¾ gives (x + 1)⁻² = ¼, so x = 1.
#
# <details><summary>Hint</summary>Set 1 − P(v &gt; x) = U and solve for (x + 1)^{1−k}. In Python <code>math.inf ** -2</code> is 0.0.</details>

# %%
check("draw")

# %% [markdown]
# ## 5. `tail_mass` (2 points, check `mass`)
#
# The same fraction for infinitely many draws. Return, as a `float`,
#
# ∫₀^γ x f(x) dx / ∫₀^{u−1} x f(x) dx, where f(x) = (x + 1)^{−k} and P(v ≤ γ) = 1 − β.
#
# `moment(order, y, k)` in the same file is ∫₀^{y−1} x^order (x + 1)^{−k} dx. `u` may be `math.inf`. First call `check_law(beta, k, u)`. If u is finite, any k above 1 is allowed.
#
# Example: k = 3, u = ∞ gives (1 − √β)², so ¼ for β = ¼.
#
# <details><summary>Hint</summary>γ is the draw of problem 4 for the uniform number 1 − β. Mind that <code>moment</code> takes γ + 1.</details>

# %%
check("mass")

# %% [markdown]
# ## 6. `proof_steps` (3 points, check `slips`)
#
# Theorem B.3 bounds the lost mass by Eq. 11, which `paper_bound` in the file computes. Return four numbers of the proof's end as `ProofSteps(delta, line, factored, printed)`, each a `float`. First call `check_law(beta, k, u, eps)`: ε must be at least 0 and below β. k is never 2, where Δ would be 0.
#
# All but Δ use γ = ((β − ε)/(1 − ε))^{1/(1−k)} − 1, the threshold for u = ∞; u enters through Δ alone.
#
# | field | value |
# |---|---|
# | `delta` | Δ = (k − 2) · E[v], with the mean E[v] of one draw, by `moment` |
# | `line` | ((1 − β) − (k − 1)(β − ε) γ) / (Δ (1 − ε)²) |
# | `factored` | the paper's next line: (1 − β)(1 − (k − 1) γ) / (Δ (1 − ε)²) |
# | `printed` | the paper's last line: `factored` with 0.98 in place of Δ |
#
# E[v] = ∫ x f(x) dx / ∫ f(x) dx, both from 0 to u − 1. With ε = 0, `line` is at least `tail_mass` for any u. The two steps after it may fall below; the written question asks why. For k above 2, `printed` must equal `paper_bound(beta, k, eps)`.
#
# Example: k = 3, β = ¼, u = 5, ε = 0. γ = 1 and Δ = ⅔. `line` is 0.375, `factored` −1.125, `printed` −0.765.

# %%
check("slips")

# %% [markdown]
# ## 7. `repaired_bound` (2 points, check `repaired`)
#
# Write a bound that holds for n draws of which the largest βn, a whole number, stay. Two things may go wrong: the sum of all draws may be too small, or too few draws may lie below the threshold of β′ = (β − ε)/(1 − ε). `failure(beta, k, u, eps, n)` in the file bounds the probability that one of them does.
#
# - If both go well, the lost fraction is at most `tail_mass` at β′, divided by 1 − ε.
# - In any case it is at most 1 − β: the smallest (1 − β)n of n numbers never hold more of the sum.
#
# So the mean of the lost fraction is at most the first number plus (1 − β) · `failure`, and at most 1 − β. Return the smaller, as a `float`. Call `failure` first: it raises a `ValueError` unless 0 ≤ ε < β.
#
# Example: β = ½, k = 3, u = 5, ε = ¼, n = 150. The first number is ⅓, `failure` is 0.130. The bound is ⅓ + ½ · 0.130 = 0.398.

# %%
check("repaired")

# %% [markdown]
# ## 8. Predict, then measure (written, 4 points, graded by hand)
#
# **Before you run the cells, write down** what you expect, and why:
#
# 1. The first cell prints six cases. In which of them is the paper's bound below the lost mass? Afterwards find, with `tail_mass` and `proof_steps` for k = 3, u = 50: below which β is the bound negative, and from which β on does it hold?
# 2. Which step of the proof, `line` to `factored` or `factored` to `printed`, makes the number too small at k = 3, u = 50, β = 0.25? Which at k = 2.1, u = 5, β = 0.5? Why?
# 3. A decoder reads 449 tokens under a budget of 128. Of the n entries that it keeps, which fraction is among the newest n tokens? (n is 65 for m = 64, and 128 for the others; a random choice would give n/449.) Answer for Scissorhands with r = 10, w = 400 and m = 64, with m = 1, with m = 1 and w = 16, and for H2O, which reserves half of its budget for the newest.
#
# The column *repaired* is `best_bound` with n = 20 000: your `repaired_bound` with the best of 39 values of ε.
#
# Your prediction:
#
#

# %%
import torch
from methods.theory import persistence as theory

print("   k     u     β    lost in draws   tail_mass    line  factored  printed   repaired")
cases = (3, 50, 0.25), (3, 50, 0.5), (3, 50, 0.8), (2.1, 5, 0.5), (3, 5, 0.5), (5, 50, 0.8)
for k, u, beta in cases:
    v = theory.draw_power_law((50, 20_000), k, u, torch.Generator().manual_seed(0))
    v = v.sort(-1).values
    lost, steps = theory.smallest_share(v, beta).mean(), theory.proof_steps(beta, k, u)
    print(f"{k:4} {u:5} {beta:5} {lost:12.4f} {theory.tail_mass(beta, k, u):13.4f} "
          f"{steps.line:9.4f} {steps.factored:8.4f} {steps.printed:8.4f} {theory.best_bound(beta, k, u, 20_000):9.4f}")

# %%
from methods.baselines.h2o import H2O
from methods.scissorhands import Scissorhands
from nanollm import TINY, tokenizer
from nanollm import checkpoint
from nanollm.cache import evict_while_reading, make_cache
from lab.benchmark import text_windows
from lab.replay import feed
from lab.tasks import Tasks

model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
text = text_windows(Tasks(encoding, "test"), windows=4, T=449)
m_1 = dict(at_a_time=1)
for name, Method, options in (("Scissorhands, m = 64", Scissorhands, {}),
                              ("Scissorhands, m = 1", Scissorhands, m_1),
                              ("Scissorhands, m = 1, w = 16", Scissorhands, m_1 | dict(history=16)),
                              ("H2O", H2O, {})):
    caches = make_cache(model, Method, budget=128, **options)
    evict_while_reading(caches)
    with torch.no_grad():
        feed(model, text, caches)
    n = caches[0].length
    shares = [(cache.pos >= text.shape[1] - n).float().mean() for cache in caches]
    print(f"{name:28} {n:3} kept, of them the newest {n:3}, by layer:",
          *(f"{x:.2f}" for x in shares))

# %% [markdown]
# What you measured, where your prediction was wrong, and why, in at most twelve sentences:
#
#
