# %% [markdown]
# # 2. Which tokens
#
# **3 to 5 hours; 15 points by tests, and 3 for the written question at the end.** You write eight functions that together are SnapKV, AdaKV and CriticalKV: how tokens are voted for, how heads share a budget, and what a bound on the lost output adds.
#
# **Read before:** SnapKV ([arXiv 2404.14469](https://arxiv.org/abs/2404.14469)), section 4. AdaKV ([arXiv 2407.11550](https://arxiv.org/abs/2407.11550)), section 3. CriticalKV ([arXiv 2502.03805](https://arxiv.org/abs/2502.03805)), sections 3 and 4. Then `nanollm/window.py`, and the docstrings of `methods/ada_kv.py` and `methods/critical_kv.py`.
#
# ## The idea
#
# A prompt was read, and of its tokens only a budget may stay in the cache. Which? The last w tokens of the prompt are the **window**. Their queries **vote**: each earlier token gets the attention that they give it, on average. The window stays, and of the earlier tokens those with the most window scores. This is SnapKV.
#
# - **AdaKV** asks how many tokens each head may keep. Some heads gather their attention on a few tokens, others spread it. So the heads of a layer share one budget.
# - **CriticalKV** asks what is lost. A token may have many window scores and a value that adds nothing to the output. So the second part of a budget goes by window scores × size of the value.
#
# ## On paper
#
# Two heads, four tokens before the window, room for two tokens a head.
#
# | token | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | window scores, head 0 | 5 | 4 | 3 | 0 |
# | window scores, head 1 | 6 | 1 | 0 | 1 |
#
# **SnapKV**: two for each. Head 0 keeps 0 and 1. Head 1 keeps 0, and of the equals 1 and 3 the *newest*, so 3. Of equals the newest stays, in this repository always.
#
# **AdaKV**: four in all. The four highest window scores are 6, 5, 4 and 3. So three fall on head 0 and one on head 1. With a **floor** of ½, half of the budget is dealt out evenly, one for each head, and half of it goes by the window scores: 1.5 and 0.5. That makes 2.5 and 1.5. Rounded down these are 2 and 1, one less than four. Both remainders are ½, and the lower head gets the one that is left: 3 and 1.
#
# **CriticalKV**, in head 0, half of the budget by window scores alone: token 0. For the other half let the sizes of the values be 1, 1, 2, 9. The products are 5, 4, 6, 0. Token 0 is in already, so token 2 follows. SnapKV would have kept token 1.
#
# ## How it is graded
#
# Shapes: B rows of a batch, H key/value heads, G query heads for each of them, S tokens, w of them in the window, n = S − w before it, D numbers a head. `(..., n)` stands for any leading dimensions, none included. Each row and head is on its own, where nothing else is said. Do not change a tensor that you are given. Signatures stay. Loops in Python are right, if slow; one call may take ten seconds. Kernels for a GPU (`kernel_for`) are not asked for.
#
# The cell after each problem runs its public tests. The hidden tests try the same specification at other sizes, with ties, at its edges, and inside the whole cache. Write the functions in this order: in your copy later tests call earlier functions. When it is graded, each function stands among right ones.

# %%
from course.command import checker

check = checker("tokens")

# %% [markdown]
# ## 1. `window_scores` in `nanollm/window.py` (1 point)
#
# `q` is (B, H, G, w, D), the queries of the last w tokens, and `k` is (B, H, S, D), the keys of all tokens. Both are rotated already. Return the window scores (B, H, G, S − w): what each key *before the window* gets from a query, on average over the w queries. G query heads share a key head; their window scores stay apart here.
#
# A query gives each key the probability softmax(q kᵀ / √D) over the keys that it sees: query t of the window, 0 ≤ t < w, sees the keys 0 … S − w + t. `window_rows(q, k, empty)`, above it, returns these probabilities. `empty` (B, H, S) marks slots that hold no token and that nobody sees; it is None where there are none, as in all tests. Hand it on.
#
# The mean is computed, and returned, in `torch.float32` if `q` has 16 bits, and otherwise in the dtype of `q`.
#
# <details><summary>Hint</summary>Which axis of <code>window_rows</code> are the queries of the window? <code>mean</code> takes a <code>dtype</code>, and <code>torch.promote_types</code> returns the larger of two.</details>

# %%
check("window_scores")

# %% [markdown]
# ## 2. `max_pool` in `nanollm/window.py` (1 point)
#
# A digit of a number is no use without the others. So window scores are pooled. `score` is (..., n) with at least one leading dimension, of real numbers of any sign. Return a tensor of the same shape: for each token the largest score among those at most ⌊`width` / 2⌋ tokens away, itself included. `width` is odd. At both ends there are fewer neighbours; nothing takes their place. The width may be larger than the text.
#
# <details><summary>Hint</summary><code>F.max_pool1d</code> wants (rows, n), and its padding counts as −∞.</details>

# %%
check("pool")

# %% [markdown]
# ## 3. `top` in `nanollm/ranking.py` (2 points)
#
# `score` is (..., S), of finite numbers and +∞. Return a mask (..., S) of `torch.bool`, true for the `budget` highest. Of equals the newest, that with the larger number, comes first. `budget` is a number for all heads or a tensor of shape (...), at least 0. If it is larger than S, all stay. So exactly min(budget, S) stay in each head, whatever the ties.
#
# <details><summary>Hint</summary>The score in place <code>budget</code> of the sorted scores is the least that stays. All above it stay. How many of those that equal it do, and which?</details>

# %%
check("top")

# %% [markdown]
# ## 4. `shared` in `methods/ada_kv.py` (4 points)
#
# `score` is (B, H, S), the pooled window scores of a layer's heads. `mean` is a whole number m, 0 ≤ m ≤ S, the entries of a head on average. `floor` is f, from 0 to 1. Return how many entries each head gets, (B, H) of `torch.int64`, H · m in every row of the batch:
#
# - In each row, take the H · m highest of all H · S scores. Head h has n_h of them. Of equal scores that of the newer token comes first. Of equal scores of the same token (two heads) that of the head with the *larger* number comes first.
# - Exactly, head h should get f · m + (1 − f) · n_h. These numbers are rounded down.
# - What is then missing to H · m goes, one each, to the heads with the largest remainders (what was cut off). Of equal remainders the head with the *smaller* number comes first.
#
# `floor` is meant as `Fraction(str(floor)).limit_denominator(10**6)`: 0.2 is exactly 1/5, and 0.3333333333333333 is 1/3. With floats 0.2 · 5 + 0.8 · 10 may be a little less than 9. Equal remainders must be equal.
#
# <details><summary>Hint</summary>Multiply everything by the denominator of that fraction, and all that is left are whole numbers.</details>
#
# <details><summary>Hint</summary>In <code>score.mT.flatten(1)</code> a later place is a newer token, and of one token the larger head. So <code>top</code> does the first part.</details>

# %%
check("shares")

# %% [markdown]
# ## 5. `value_norms` in `methods/critical_kv.py` (2 points)
#
# A head's output is multiplied by its part of the matrix W_O. So the size of a value is that of its product. `v` is (B, H, n, D) and `w_o` is (d, H·G, D), of the same dtype, where d is the width of the model. For every query head return ‖v_i W_O‖₁, (B, H, G, n): the sum over o of |Σ_j v[b, h, i, j] · w_o[o, h·G + g, j]|.
#
# Query head h·G + g reads value head h. The products may be in the dtype of `v`. The sum over o is computed, and returned, in `torch.float32` if `v` has 16 bits, and otherwise in the dtype of `v`.
#
# n × d numbers for all heads at once would be the largest tensor of all. Ours goes head by head. You need not.
#
# <details><summary>Hint</summary><code>w_o.unflatten(1, (H, -1))</code> splits the heads. <code>torch.sum</code> takes a <code>dtype</code>.</details>

# %%
check("norms")

# %% [markdown]
# ## 6. `two_stage` in `methods/critical_kv.py` (1 point)
#
# `first` is a mask (..., n) of what stage 1 took, and `score` is (..., n), finite numbers of any size and sign. Return the mask of both stages: all of `first`, and of the others those with the highest scores, of equals the newest, so that `budget` entries stay. `budget`, a number or a tensor (...), is at least as large as stage 1, and at most n.
#
# <details><summary>Hint</summary>Which score would put an entry before all others?</details>

# %%
check("two_stage")

# %% [markdown]
# ## 7. `Critical.__call__` in `methods/critical_kv.py` (3 points)
#
# This is CriticalKV's selection. `scores` is (B, H, G, n), and `budget`, a number or (B, H), at most n, says how many of the n tokens before the window stay. Return the mask (B, H, n).
#
# - The G query heads of a group share their entries. Stage 1 takes the highest of the mean of their window scores, pooled by `cache.pool`: first the mean over the group, then the pool. It takes ⌊α · budget⌋ entries, which `part_of(self.alpha, budget)` computes exactly, for a number or a tensor.
# - Stage 2 takes what is left of the budget from the others, by the score that `self.second(cache, scores, norms)` returns. The norms are those of `value_norms`, with the values `cache.v` and the matrix `cache.w_o`. `cache.v` holds the window's values as well, at its end; they have no window scores.
#
# Subclasses override `second`. So it must be asked.

# %%
check("critical")

# %% [markdown]
# ## 8. `theta` in `methods/ours/theta.py` (1 point)
#
# CriticalKV proves that an eviction changes a head's output by at most θ, in the L1 norm:
#
# θ = C − (2 − 1/S) · W, with C = Σ A_i ‖𝒱_i‖₁ over all entries, S = Σ A_i and W = Σ A_i ‖𝒱_i‖₁ over the entries that stay.
#
# `weights` A and `norms` ‖𝒱‖₁ are (..., n), and `kept` is a mask that broadcasts to this shape: one set may serve all query heads of a group. Return θ, (...), of the dtype of the weights. At least one entry with weight stays. `gathered`, above it, returns S and W.

# %%
check("theta")

# %% [markdown]
# ## 9. Predict, then measure (written, 3 points, not graded by the tests)
#
# The command below compares SnapKV, AdaKV and SnapKV with CriticalKV's selection, at 25 % and 6 % of the prompt's tokens. A **needle** is a fact hidden in text. *Aware*: the question is part of the prompt, so the window window scores with it in mind. *Agnostic*: the question comes after the compression. *L1* is the change of the heads' outputs, which θ bounds. *KiB* at 6 % is more than 6 % of the full cache's, since the window and what came after the prompt stay. **First write down** what you expect, with a reason, before you run the cell:
#
# 1. Aware, at 6 %: does AdaKV find more needles and pairs than SnapKV, fewer, or as many?
# 2. Does CriticalKV's selection lower L1? It chooses by a bound on it.
# 3. Does it find more or fewer answers than SnapKV, aware (the mean over the three tasks in the last rows)? Remember what is pooled in stage 1 and what in stage 2.
#
# Your prediction:
#
#

# %%
import subprocess
import sys

command = "-m nanollm --methods full snap_kv ada_kv snap_kv+critical --keep 25 6 --documents 16"
subprocess.run([sys.executable, *command.split()]);

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most ten sentences). The rows at the end compare SnapKV with and without CriticalKV's selection on the same documents, ± one standard error; a difference counts if it is larger than two. For AdaKV go by the standard error above the table.
#
#
