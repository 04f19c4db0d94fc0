# %% [markdown]
# # 4. The budget cache and its theorem
#
# **4 to 5 hours; 18 points by tests, and 4 for the written question at the end.** You write two methods of `methods/scissorhands.py` and five functions of `methods/theory/persistence.py`.
#
# **Read before:** Scissorhands ([arXiv 2305.17118](https://arxiv.org/abs/2305.17118)), sections 3 and 4, and Theorem B.3 with its proof in the appendix. Then the docstring of `methods/scissorhands.py`, and `LayerCache` in `nanollm/cache.py`: `attend`, `pieces`, `write`, `observe` and `shrink`.
#
# ## The idea
#
# A KV cache grows with the text. A *budget cache* does not: it holds at most `budget` entries per key/value head, while the prompt is read and after it. When it is full and another token comes, some entries leave.
#
# Which? Scissorhands bets that importance persists: what was attended to will be attended to again. An entry is *unimportant* at a step if its weight is below the even share, 1/s at step s. The entries that were unimportant most often leave.
#
# What does that cost? The paper answers with a theorem. If weights follow a power law, and the largest stay, then the lost part of the attention is at most a number that it prints. You will draw such weights, find cases above that number, find the lines of the proof that slip, and write a bound that holds.
#
# ## On paper
#
# Budget 4, drop m = 2 at a time, the newest r = 1 is never dropped. Tokens 0 to 5 come one by one. A low importance leaves first.
#
# | token that comes | held before | importance of those | leave | held after |
# |---|---|---|---|---|
# | 3 | 0 1 2 | – | – | 0 1 2 3 |
# | 4 | 0 1 2 3 | 5 0 2 0 | 1 and 2 | 0 3 4 |
# | 5 | 0 3 4 | – | – | 0 3 4 5 |
#
# After token 3 the cache is full, and that is no reason to drop. Token 4 finds no room. Token 3 is worth as little as token 1, but it is the newest, and stays.
#
# Now the weights. A law with k = 3 and no end: P(v > x) = (x + 1)⁻². Of many draws keep the largest quarter. The threshold γ has P(v > γ) = 1/4, so γ = 1. The mean of v is 1. What lies below γ adds ∫₀¹ x · 2(x + 1)⁻³ dx = 1/4 to it. So a quarter of the mass is lost. The paper's bound for this case, with ε = 0, is −0.77.
#
# ## How it is graded
#
# Shapes: B rows of a batch, H key/value heads, G query heads to each of them, T new tokens, S slots in use, D numbers a head. Each row and head is on its own. Do not change a tensor that you are given. Signatures stay. No test needs speed.
#
# Problems 1 and 2 are about the cache, 3 to 7 about the theorem. Each is graded by itself with the others right, so you may begin with either half. Problem 3 is the easiest.

# %%
from course.command import checker

check = checker("budget")

# %% [markdown]
# ## 1. `BudgetCache.pieces` (4 points)
#
# Algorithm 1 of the paper. T tokens come at once: `q` is (B, H·G, T, D), `k` and `v` are (B, H, T, D), `pos` is (B or 1, T). `attend`, which is given, takes them from `pieces`, one piece after the other: it writes the piece, lets it see all that is held and itself, observes it, and then asks for the next. So `pieces` is a generator. It makes room, and yields `(q, k, v, pos)` of the tokens that fit in, until all have come. The outputs must be what you would get if the tokens came one by one, up to rounding. Each comes like this:
#
# - **Room.** If `self.length`, the number of slots in use, is `self.budget`, then first drop `self.at_a_time` slots of each head. `self.budget - self.at_a_time` stay. Otherwise drop nothing.
# - **What leaves.** `self.importance()` is (B, H, S), a float for each slot. The lowest leave. Of equals the oldest leaves, and `shrink` does that by itself.
# - **The newest stay.** A slot whose position is at least `self.seen - self.newest()` never leaves. `self.seen` is the number of tokens that have come so far, without the one that finds no room. `self.newest()` is r. Slots are not sorted by position: go by `self.pos`, (B, H, S).
#
# At no moment may more than `self.budget` slots be in use. A text that is shorter than the budget loses nothing.
#
# T may be larger than the budget. To yield each token alone is right, if slow. Better are pieces as long as the room there is.
#
# <details><summary>Hint 1</summary>A loop: <code>start</code> is the first token that has not come. Make room if there is none, then yield <code>self.budget - self.length</code> tokens, or what is left of them. Tokens lie along dimension 2 of <code>q</code>, <code>k</code> and <code>v</code>, and along dimension 1 of <code>pos</code>.</details>
#
# <details><summary>Hint 2</summary><code>masked_fill(newest, math.inf)</code> on the importance keeps the newest, and <code>self.shrink(importance, n)</code> keeps n slots.</details>

# %%
check("pieces")

# %% [markdown]
# ## 2. `Scissorhands.observe` (4 points)
#
# Algorithm 2: the record of unimportance. The steps are numbered from 1: the token at position i is read at step s = i + 1, when s tokens have come. `observe` is called after the tokens are written. So `self.seen` is the newest step.
#
# `p` is (B, H, G, n, S): the weights that the newest n queries gave to the slots in use, oldest query first. The steps are thus `self.seen` − n + 1 to `self.seen`. If more than w = `self.history` tokens came at once, n is w.
#
# An entry j is **unimportant at step s** if both hold:
#
# - the mean of its weights over the G queries of the group, taken in float32, is below 1/s, both in float32. `mean < 1 / s` does that, `mean * s < 1` does not;
# - it was there: its position is below s. The token of step s itself was there.
#
# After the call `self.count`, (B, H, S) of `torch.int32`, must hold for each entry at how many of the newest w steps it was unimportant. Change it in place. At the end call `super().observe(q, p)`, which calls `evict` when the prompt is over.
#
# To take an old step off a count you must know what it added. For that each slot has `self.slot("unimportant")`, (B, H, S, ⌈w/8⌉) of `torch.uint8`: a bit for each of w steps. Both tensors are 0 for a new token and move with their slot. How you lay out the bits is yours, and is not graded. The counts are.
#
# A natural layout is a *ring*: step s has the place s mod w, which step s − w had before. Place i is bit i mod 8 of byte ⌊i/8⌋. Example with w = 2: step 3 is written where step 1 was.
#
# <details><summary>Hint 1</summary>A loop over the n steps is right. For each: read the bits that stood at its place, subtract them from the count, write the new ones, add those.</details>
#
# <details><summary>Hint 2</summary><code>ring[..., byte] &gt;&gt; bit &amp; 1</code> reads a bit.</details>

# %%
check("observe")

# %% [markdown]
# ## 3. `smallest_share` (2 points, check `share`)
#
# From here on: how much attention does the best choice lose? The weights of a step are v_j/Σv. A share `beta` of the n entries stays, the largest.
#
# `v` is (..., n), at least 0, sorted along the last dimension with the smallest first. Return the share of each row's sum that its m smallest hold, m = `round((1 - beta) * n)` as Python rounds. The shape is (...), the dtype that of `v`. 0 < β ≤ 1, and for m = 0 the share is 0. No row is all zeros.

# %%
check("share")

# %% [markdown]
# ## 4. `draw_power_law` (2 points, check `draw`)
#
# The theorem's weights have the density c (x + 1)^{−k} on [0, u − 1]. (In the paper it is b in place of 1. Here all lengths are in units of b.) So
#
# P(v > x) = ((x + 1)^{1−k} − u^{1−k}) / (1 − u^{1−k}).
#
# Return draws of this `shape`, `torch.float64`. Draw one uniform number for each with `torch.rand(shape, dtype=torch.float64, generator=generator)`, once. The draw is the x at which **P(v ≤ x)** is that number. `u` may be `math.inf`. First call `check_law(1, k, u)`, which raises `ValueError` for a law that has no mean.
#
# <details><summary>Hint</summary>Set 1 − P(v &gt; x) = U and solve for (x + 1)^{1−k}. In Python <code>math.inf ** -2</code> is 0.0.</details>

# %%
check("draw")

# %% [markdown]
# ## 5. `tail_mass` (2 points, check `mass`)
#
# The same share without draws: what it is for very many of them. Return, as a `float`,
#
# ∫₀^γ x f(x) dx / ∫₀^{u−1} x f(x) dx, where f(x) = (x + 1)^{−k} and γ is the threshold with P(v ≤ γ) = 1 − β.
#
# `moment(order, y, k)` in the same file is ∫₀^{y−1} x^order (x + 1)^{−k} dx. `u` may be `math.inf`. First call `check_law(beta, k, u)`. With a finite u any k above 1 is allowed.
#
# <details><summary>Hint</summary>γ comes from problem 4: the uniform number is now 1 − β. Mind that <code>moment</code> takes γ + 1.</details>

# %%
check("mass")

# %% [markdown]
# ## 6. `proof_steps` (2 points, check `slips`)
#
# Theorem B.3 says that the lost mass is at most Eq. 11. `paper_bound` in the file is that number. Its proof ends with four numbers, which you return as `ProofSteps(delta, line, factored, printed)`, each a `float`. First call `check_law(beta, k, u, eps)`: ε must be at least 0 and below β. k is not 2: there Δ is 0.
#
# All use γ = ((β − ε)/(1 − ε))^{1/(1−k)} − 1, the threshold of the law with u = ∞; u enters by Δ alone.
#
# | field | what it is |
# |---|---|
# | `delta` | Δ = (k − 2) · E[v], the mean of one draw, by `moment` |
# | `line` | ((1 − β) − (k − 1)(β − ε) γ) / (Δ (1 − ε)²) |
# | `factored` | the paper's next line: (1 − β)(1 − (k − 1) γ) / (Δ (1 − ε)²) |
# | `printed` | the paper's last line: as `factored`, with 0.98 in place of Δ |
#
# E[v] = ∫ x f(x) dx / ∫ f(x) dx, both from 0 to u − 1. With ε = 0, `line` is at least `tail_mass`, for any u. The two steps after it may go below, and the written part asks why. Test yourself: for k above 2, `printed` is `paper_bound(beta, k, eps)`.

# %%
check("slips")

# %% [markdown]
# ## 7. `repaired_bound` (2 points, check `repaired`)
#
# A bound that holds for n draws. The largest βn of them stay. Two things may go wrong: the sum of all draws is much too small, or too few draws lie below the threshold. `failure(beta, k, u, eps, n)` in the file bounds the probability that either does.
#
# - If neither does, the lost share is at most `tail_mass` at β′ = (β − ε)/(1 − ε) in place of β, divided by 1 − ε.
# - If one does, the lost share is at most 1 − β: the smallest (1 − β)n of n numbers never hold more than that share of the sum.
#
# So the mean of the lost share is at most the first, plus 1 − β times the probability of failure. And it is at most 1 − β in any case. Return the smaller of the two, as a `float`. Call `failure` first: it raises a `ValueError` where ε is not at least 0 and below β.

# %%
check("repaired")

# %% [markdown]
# ## 8. Predict, then measure (written, 4 points, not graded by the tests)
#
# **First write down** what you expect, with a reason, before you run the cells:
#
# 1. Six cases below. In which is the paper's bound under the mass that is lost? Take k = 3, u = 50. Below which β is it negative, and at which β does it become a bound? Find it with `tail_mass` and `proof_steps`.
# 2. Which of the two steps of the proof, `line` to `factored` and `factored` to `printed`, makes the number too small at β = 0.25, and which at k = 2.1, u = 5, β = 0.5? And why?
# 3. A decoder reads 449 tokens under a budget of 128. After it, which share of the n kept entries are simply the newest n? With m = 64 a head has 65 entries then, in the other three cases 128. Even chance would give n/449. Say a number for Scissorhands with m = 64, with m = 1, with m = 1 and w = 16, and for H2O, which keeps half of its budget for the newest.
#
# The column *repaired* is `best_bound` with n = 20 000: your `repaired_bound` with the best of 39 values of ε.
#
# Your prediction:
#
#

# %%
import torch
from methods.theory import persistence as theory

print("   k     u     β    lost in draws   tail_mass    line   printed   repaired")
for k, u, beta in (3, 50, 0.25), (3, 50, 0.5), (3, 50, 0.8), (2.1, 5, 0.5), (3, 5, 0.5), (5, 50, 0.8):
    v = theory.draw_power_law((50, 20_000), k, u, torch.Generator().manual_seed(0)).sort(-1).values
    lost, steps = theory.smallest_share(v, beta).mean(), theory.proof_steps(beta, k, u)
    print(f"{k:4} {u:5} {beta:5} {lost:12.4f} {theory.tail_mass(beta, k, u):13.4f} {steps.line:9.4f} "
          f"{steps.printed:8.4f} {theory.best_bound(beta, k, u, 20_000):9.4f}")

# %%
from methods.h2o import H2O
from methods.scissorhands import Scissorhands
from methods.theory.persistence_measured import newest_share
from nanollm import TINY, tokenizer
from nanollm.hf import checkpoint
from nanollm.measure import evaluate
from nanollm.measure.tasks import Tasks

model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
text = evaluate.text_windows(Tasks(encoding, "test"), windows=4, T=449)
for name, Method, options in (("Scissorhands, m = 64", Scissorhands, {}),
                            ("Scissorhands, m = 1", Scissorhands, dict(at_a_time=1)),
                            ("Scissorhands, m = 1, w = 16", Scissorhands, dict(at_a_time=1, history=16)),
                            ("H2O", H2O, {})):
    shares, n = newest_share(model, text, Method, budget=128, **options)
    print(f"{name:28} {n:3} kept, of them the newest {n:3}, by layer:", *(f"{x:.2f}" for x in shares))

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most twelve sentences):
#
#
