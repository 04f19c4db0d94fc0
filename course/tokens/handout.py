# %% [markdown]
# # 2. Which tokens
#
# **3 to 5 hours; 15 points by tests, and 3 for the written question.**
#
# SnapKV throws away fifteen of every sixteen entries, and the small decoder here still answers all 32 prompts that hide facts, if the question is part of the prompt (`python -m nanollm --methods full snap_kv --keep 6.25`). Here you write its core, and that of two methods that try to choose better: AdaKV and CriticalKV.
#
# ## The idea
#
# The prompt has been read, and each head may keep `budget` entries. The last w tokens of the prompt are the **observation window**. Its queries score each earlier token: a token's **window score** is the attention that it receives from them, on average. **SnapKV** keeps the window and the tokens with the highest window scores.
#
# - **AdaKV** asks how much each head may keep. Some heads gather their attention on few tokens, others spread it. So the heads of a layer share one budget.
# - **CriticalKV** asks what is lost. A token may have a high window score and a value that hardly changes the output. So part of the budget goes by window score × size of the value.
#
# **Example.** Two heads, four tokens before the window, two entries per head.
#
# | token | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | window scores, head 0 | 5 | 4 | 3 | 0 |
# | window scores, head 1 | 6 | 1 | 0 | 1 |
#
# - **SnapKV**: two per head. Head 0 keeps 0 and 1. Head 1 keeps 0 and, of the equal tokens 1 and 3, the newest: 3. Here the newest wins a tie.
# - **AdaKV**: four in all. The four highest window scores are 6, 5, 4 and 3: three in head 0, one in head 1. With a **floor** of ½, half of the budget is dealt evenly, one per head. The other half follows the scores: 1.5 and 0.5. The sums 2.5 and 1.5 round down to 2 and 1. One entry is left. Both remainders are ½, so the lower head gets it: 3 and 1.
# - **CriticalKV**, in head 0: half of the budget goes by window scores alone, to token 0. Let the sizes of the values be 1, 1, 2, 9. The products are 5, 4, 6, 0. Token 0 is already in, so the other half goes to token 2. SnapKV would have kept token 1.
#
# ## What you write
#
# | check | function | file | points |
# |---|---|---|---|
# | `window_scores` | `window_scores` | `nanollm/window.py` | 1 |
# | `pool` | `max_pool` | `nanollm/window.py` | 1 |
# | `top` | `top` | `nanollm/ranking.py` | 2 |
# | `shares` | `shared` | `methods/baselines/ada_kv.py` | 4 |
# | `norms` | `value_norms` | `methods/critical_kv.py` | 2 |
# | `two_stage` | `two_stage` | `methods/critical_kv.py` | 1 |
# | `critical` | `Critical.__call__` | `methods/critical_kv.py` | 3 |
# | `theta` | `theta` | `methods/theory/perturbation.py` | 1 |
#
# **Read first:** SnapKV ([arXiv 2404.14469](https://arxiv.org/abs/2404.14469)), section 4; AdaKV ([arXiv 2407.11550](https://arxiv.org/abs/2407.11550)), section 3; CriticalKV ([arXiv 2502.03805](https://arxiv.org/abs/2502.03805)), sections 3 and 4. Then `nanollm/window.py` and the docstrings of `methods/baselines/ada_kv.py` and `methods/critical_kv.py`.
#
# ## How to check it
#
# Write the functions in this order, and those of assignment 1 first if they are empty: in your copy, later tests call earlier functions. The cell after each problem runs its public tests. The hidden tests try other sizes, ties and edge cases, and the whole cache. In grading, each problem's function runs with our solutions of the others, so a wrong function costs only its own problem.
#
# Shapes: B batch rows, H key/value heads, G query heads per key/value head, S tokens, w of them in the window, n = S − w before it, D numbers per head. `(..., n)` means any leading dimensions, or none. Rows and heads are independent unless the problem says otherwise. Do not change a tensor that you are given. Keep the signatures. Python loops are fine; a call may take ten seconds. Skip the GPU kernels (`kernel_for`).

# %%
from course.command import checker

check = checker("tokens")

# %% [markdown]
# ## 1. `window_scores` in `nanollm/window.py` (1 point)
#
# `q` is (B, H, G, w, D): the queries of the last w tokens. `k` is (B, H, S, D): the keys of all tokens. Both are already rotated. Return the window scores (B, H, G, S − w): for each key *before the window*, the mean of the attention that the w queries give it. Keep the G query heads apart.
#
# Query t of the window (0 ≤ t < w) sees the keys 0 … S − w + t and gives them softmax(q kᵀ / √D). `window_rows(q, k, empty)`, above this function, returns these probabilities. `empty` marks slots that hold no token; it is `None` in all tests. Pass it on.
#
# Compute and return the mean in `torch.float32` if `q` has 16 bits, otherwise in the dtype of `q`.
#
# Example: four equal keys and w = 2. The first query gives ⅓ to each of three keys, the second ¼ to each of four. The two keys before the window have the window score (⅓ + ¼)/2 = 7/24.
#
# <details><summary>Hint</summary>Which axis of <code>window_rows</code> holds the queries? The probabilities have at least 32 bits already.</details>

# %%
check("window_scores")

# %% [markdown]
# ## 2. `max_pool` in `nanollm/window.py` (1 point, check `pool`)
#
# One digit of a number is useless without the others. So SnapKV pools the window scores: each token takes the highest score in its neighbourhood.
#
# `score` is (..., n) with at least one leading dimension; numbers may be negative. Return the same shape: for each token, the largest score among the tokens at most ⌊`width` / 2⌋ away, itself included. `width` is odd and may exceed the text. At the ends, pool over the neighbours that exist; do not pad with 0.
#
# Example: 1 5 2 0 3 with width 3 gives 5 5 5 3 3.
#
# <details><summary>Hint</summary><code>F.max_pool1d</code> wants (rows, n), and its padding counts as −∞.</details>

# %%
check("pool")

# %% [markdown]
# ## 3. `top` in `nanollm/ranking.py` (2 points)
#
# `score` is (..., S), finite or +∞. Return a mask (..., S) of `torch.bool`, true for the `budget` highest scores. Of equal scores, prefer the newest: the larger index. `budget` is a number, or a tensor (...) with one number per head, at least 0. Exactly min(budget, S) are true in each head, whatever the ties.
#
# Example: scores 2 2 5 2 with budget 3 give 0 1 1 1.
#
# <details><summary>Hint</summary>Sort the scores. The one at place <code>budget</code> is the lowest that stays, and all above it stay. How many equal to it stay, and which?</details>

# %%
check("top")

# %% [markdown]
# ## 4. `shared` in `methods/baselines/ada_kv.py` (4 points, check `shares`)
#
# `score` is (B, H, n): the pooled window scores of a layer's heads. `mean` is a whole number m, 0 ≤ m ≤ n: entries per head on average. `floor` is f, from 0 to 1. Return how many entries each head gets, (B, H), `torch.int64`. Each row of the batch sums to H · m.
#
# 1. In each row, take the H · m highest of all H · n scores. Head h has n_h of them. Of equal scores, prefer the newer token; for the same token, the *larger* head index.
# 2. Head h should get exactly f · m + (1 − f) · n_h. Round down.
# 3. Hand out what is missing to H · m, one each, to the heads with the largest remainders (the parts cut off). Of equal remainders, prefer the *smaller* head index.
#
# Read `floor` as `Fraction(str(floor)).limit_denominator(10**6)`: 0.2 is exactly 1/5, and 0.3333333333333333 is 1/3. In floats, 0.3 · 3 + 0.7 · 3 falls just below 3. Equal remainders must be equal.
#
# Example: f = 0.2, m = 2, three heads with n_h = 4 1 1. Exactly: 3.6 1.2 1.2. Rounded down: 3 1 1. One is missing, and head 0 has the largest remainder: 4 1 1.
#
# <details><summary>Hint 1</summary>Multiply everything by the fraction's denominator: only whole numbers remain.</details>
#
# <details><summary>Hint 2</summary>In <code>score.mT.flatten(1)</code>, a later place is a newer token, and for the same token a larger head. So <code>top</code> does step 1.</details>

# %%
check("shares")

# %% [markdown]
# ## 5. `value_norms` in `methods/critical_kv.py` (2 points, check `norms`)
#
# A head's output is multiplied by the head's part of W_O. So measure a value by its product with W_O.
#
# `v` is (B, H, n, D). `w_o` is (d, H·G, D), of the same dtype; d is the model width. Return ‖v_i W_O‖₁ for every query head, (B, H, G, n): the sum over o of |Σ_j v[b, h, i, j] · w_o[o, h·G + g, j]|.
#
# Query head h·G + g reads value head h. You may compute the products in the dtype of `v`. Compute and return the sum over o in `torch.float32` if `v` has 16 bits, otherwise in the dtype of `v`.
#
# Example: the value (1, 2) and rows (1, 0), (0, −1), (1, 1) of W_O give 1, −2, 3. The norm is 6.
#
# The products of all heads at once, n × d each, take much memory. Our solution goes head by head; yours need not.
#
# <details><summary>Hint</summary><code>w_o.unflatten(1, (H, -1))</code> separates the heads. <code>torch.sum</code> accepts a <code>dtype</code>.</details>

# %%
check("norms")

# %% [markdown]
# ## 6. `two_stage` in `methods/critical_kv.py` (1 point)
#
# `first` is a mask (..., n): the choice of stage 1. `score` is (..., n): finite numbers of any size and sign. Return the mask of both stages: all of `first`, then the highest scores of the others, of equal scores the newest, until `budget` entries are true. `budget`, a number or a tensor (...), is at least the size of stage 1 and at most n.
#
# Example: first 1 0 0 0 0, scores 0 3 1 2 5, budget 3 give 1 1 0 0 1.
#
# <details><summary>Hint</summary>Which score would put an entry before all others?</details>

# %%
check("two_stage")

# %% [markdown]
# ## 7. `Critical.__call__` in `methods/critical_kv.py` (3 points, check `critical`)
#
# The selection of CriticalKV. `window` is what one layer's observation window sees (the class `Window`), and `scores`, (B, H, G, n), are its window scores. `budget`, a number or (B, H), is at most n: how many of the n tokens before the window stay. Return the mask (B, H, n). The G query heads of a group share their entries.
#
# - **Stage 1** takes the ⌊α · budget⌋ highest window scores: first average over the group, then pool with `window.pool`. `part_of(self.alpha, budget)` computes the number exactly, for a number or a tensor.
# - **Stage 2** fills up the budget from the other tokens, by the score (B, H, n) that `self.second(window, scores, norms)` returns. Subclasses override `second`, so call it. `norms` are the `value_norms` of `layer.v` and `layer.w_o`, where `layer` is `window.layer`. `layer.v` ends with the window's values; leave them out, for they have no window scores. The first `window.n` values are those before the window.
#
# Example: one head, window scores 4 3 2 1, norms 0 1 1 9, α = ½, budget 2. Stage 1 takes token 0, stage 2 token 3.

# %%
check("critical")

# %% [markdown]
# ## 8. `theta` in `methods/theory/perturbation.py` (1 point)
#
# CriticalKV proves that an eviction changes a head's output by at most θ, in the L1 norm:
#
# θ = C − (2 − 1/S) · M. A_i is an entry's attention weight, and 𝒱_i = v_i W_O its projected value. C = Σ A_i ‖𝒱_i‖₁ over all entries. S = Σ A_i and M = Σ A_i ‖𝒱_i‖₁ over the entries that stay (S is no length here).
#
# `weights` A and `norms` ‖𝒱‖₁ are (..., n). `kept` is a mask that broadcasts to this shape: one set may serve all query heads of a group. Return θ, (...), of the dtype of `weights`. At least one kept entry has weight.
#
# Example: weights ½ ¼ ¼, norms 2 4 8, only the first stays. C = 4, M = 1, S = ½, so θ = 4 − (2 − 2) · 1 = 4.

# %%
check("theta")

# %% [markdown]
# ## 9. Predict, then measure (written, 3 points, graded by hand)
#
# The cell compares SnapKV, AdaKV, and SnapKV with CriticalKV's selection, at 25 % and 6 % of the prompt's entries. A **needle** is a fact hidden in the text; **pairs** asks for one of 16 listed pairs; **few-shot** asks for the label of a new line. *Aware*: the question is part of the compressed prompt. *Agnostic*: it comes afterwards. The window has 8 tokens here. *L1* is the change of the heads' outputs, which θ bounds. Answers are of 16 documents a task, *KL* and *L1* of 8 texts. (*KiB* at 6 % exceeds 6 % of the full cache, because the 64 tokens after the prompt stay.) **Before you run it, write down** what you expect, and why:
#
# 1. Aware, at 6 %: does AdaKV find more needles and pairs than SnapKV, fewer, or as many?
# 2. CriticalKV's selection chooses by a bound on L1. Does it lower L1?
# 3. Does it find more or fewer answers than SnapKV, if the question is known (aware)? The last cell prints the differences, as means over the documents of the three tasks. Remember which stage pools.
#
# Your prediction:
#
#

# %%
import subprocess
import sys

command = """
python -m nanollm --methods full snap_kv ada_kv snap_kv+critical --keep 25 6 --documents 16 --json rows.json
"""
subprocess.run([sys.executable, *command.split()[1:]], check=True);

# %%
from lab.benchmark import Benchmark, text_windows
from lab.continuation import reference
from lab.retrieval import maker
from lab.tasks import Tasks
from methods.baselines.ada_kv import AdaKV
from methods.baselines.snap_kv import SnapKV
from methods.critical_kv import Critical
from nanollm import TINY, checkpoint, tokenizer

model = checkpoint.from_hf(TINY)
tasks = Tasks(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
texts = Benchmark({}, {}, reference(model, text_windows(tasks, 8, 512), 64))


def l1(Method, keep, **options):
    """Return L1 of each text: of a layer whose cache alone is compressed, mean over layers and heads."""
    make = maker(model, Method, keep, window_size=8, **options)
    return texts.continued(model, make, alone=True)["l1_alone"].mean((1, 2)).tolist()

# %%
import json
from statistics import fmean, stdev

rows = {(row["method"], row["keep_ratio"]): row["each"] for row in json.load(open("rows.json"))}
for keep in 0.25, 0.06:
    rows["snap_kv", keep]["l1"] = l1(SnapKV, keep)
    rows["ada_kv", keep]["l1"] = l1(AdaKV, keep)
    rows["snap_kv+critical", keep]["l1"] = l1(SnapKV, keep, select=Critical())
kinds = {"aware": ["needle_aware", "pairs_aware", "few_shot_aware"],
         "agnostic": ["needle_agnostic", "pairs_agnostic", "few_shot_agnostic"],
         "KL": ["kl"], "L1": ["l1"]}
for method, keep in [(method, keep) for method in ("ada_kv", "snap_kv+critical") for keep in (0.25, 0.06)]:
    print(f"{method:18}{keep:4.0%}", end="")
    for kind, columns in kinds.items():
        gains = [x - y for column in columns
                 for x, y in zip(rows[method, keep][column], rows["snap_kv", keep][column])]
        print(f"   {kind} {fmean(gains):+.3f} ±{stdev(gains) / len(gains) ** 0.5:.3f}", end="")
    print()

# %% [markdown]
# What you measured, where your prediction was wrong, and why, in at most ten sentences. The last cell compares each method with SnapKV on the same documents and texts, ± one standard error. A difference counts if it exceeds two of them.
#
#
