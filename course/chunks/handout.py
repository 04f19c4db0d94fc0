# %% [markdown]
# # 3. Chunks
#
# **2 to 3 hours; 15 points by tests, and 3 for the written question.**
#
# Keep the tokens with the highest attention, and of "the code is 7 4 1 9" you may keep *code* and lose the digits. ChunkKV keeps neighbours together. Here you write it, and measure where that finds more answers and where it loses some.
#
# ## The idea
#
# The observation window, the last tokens of the prompt, gives each earlier token a **window score**: the attention that its queries pay to it. SnapKV keeps the tokens with the highest window scores. ChunkKV cuts the prompt into chunks of `chunk_size` tokens and sums the window scores of each chunk. It keeps the chunks with the highest sums.
#
# **Example.** Eight tokens, chunks of three, budget 4.
#
# | token | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | window score | 1 | 0 | 2 | 0 | 4 | 0 | 3 | 1 |
# | chunk | 1 | 1 | 1 | 2 | 2 | 2 | 3 | 3 |
#
# The chunk scores are 3, 4 and 4. Chunks 2 and 3 are equal. Here the *newest* wins a tie, so the ranking is 3, 2, 1.
#
# - **Filled up** (`cut_to`): chunk 3 takes two places. Two are left for the three tokens of chunk 2, so its first two stay. The cache keeps tokens 3, 4, 6 and 7.
# - **Whole chunks only** (`fit`): chunk 3 stays. Neither chunk 2 nor chunk 1 fits into the two places left. The cache keeps tokens 6 and 7; two places stay empty. (`fit` returns chunks, not tokens.)
#
# Chunks have a price: token 2 has the window score 2 and goes, token 3 has 0 and stays.
#
# ## What you write
#
# All six functions are in `methods/chunk_kv.py`.
#
# | check | function | points |
# |---|---|---|
# | `grid` | `grid` | 1 |
# | `chunk_scores` | `chunk_scores` | 3 |
# | `ranking` | `ranking` | 2 |
# | `cut_to` | `cut_to` | 4 |
# | `fit` | `fit` | 3 |
# | `reuse` | `ChunkKV.compress` | 2 |
#
# **Read first:** ChunkKV ([arXiv 2502.00299](https://arxiv.org/abs/2502.00299)), sections 1 and 3; the docstring of `methods/chunk_kv.py`; `nanollm/window.py` and `SnapKV` in `methods/baselines/snap_kv.py`, on which `ChunkKV` builds.
#
# ## How to check it
#
# The cell after each problem runs its public tests. If your copy also holds assignments 1 and 2, finish them first: tests and experiments call their functions. The hidden tests try other sizes, ties and edge cases. In grading, each problem's function runs with our solutions of the others, so a wrong function costs only its own problem.
#
# Shapes: B batch rows, H key/value heads, n tokens. `(..., n)` means any leading dimensions, or none. Rows and heads are independent. Do not change a tensor that you are given. Keep the signatures. Python loops over chunks or tokens are fine.

# %%
from course.command import checker

check = checker("chunks")

# %% [markdown]
# ## 1. `grid` (1 point)
#
# Number the chunks. `place` is (..., n): each token's place in the text, counted from 0. After an earlier compression the places may have gaps, and heads may differ. An empty slot has a negative place. Return `torch.int64` of the same shape: place i is in chunk ⌊i / `size`⌋ + 1, an empty slot in chunk 0.
#
# Example: places 0 4 8 −1 in chunks of four give 1 2 3 0.
#
# <details><summary>Hint</summary><code>//</code> rounds whole numbers down. <code>torch.where</code> handles the empty slots.</details>

# %%
check("grid")

# %% [markdown]
# ## 2. `chunk_scores` (3 points)
#
# `scores` and `chunk` are (..., n), n at least 1. `scores` holds window scores, at least 0, and scores below 0 for empty slots. `chunk` holds each token's chunk number, at least 0; rows and heads may be cut differently. M is the largest number in the whole tensor `chunk`, plus one. Return two tensors (..., M):
#
# - the **score** of each chunk: the `"sum"`, `"mean"` or `"max"` of its tokens' window scores, as `how` says, of the dtype of `scores`;
# - its **length** in tokens, `torch.int64`.
#
# A head may have fewer than M chunks. Give the chunks that it lacks score 0 and length 0, for every `how`. Empty slots are in chunk 0; treat it like any other.
#
# Example: window scores 1 2 3 4 in chunks 0 0 2 2 have the sums 3 0 7, the means 1.5 0 3.5, the maxima 2 0 4 and the lengths 2 0 2.
#
# <details><summary>Hint</summary><code>zeros.scatter_add(-1, chunk, scores)</code> adds each score to its chunk. For the maximum, use <code>scatter_reduce</code> with <code>"amax"</code> and <code>include_self=False</code>, or the zeros take part.</details>

# %%
check("chunk_scores")

# %% [markdown]
# ## 3. `ranking` (2 points)
#
# `score` is (..., M). Return the chunk numbers, (..., M), highest score first. Of equal scores the newest chunk, the larger number, comes first. Rows and heads are ranked by themselves.
#
# Example: scores 5 1 5 1 give 2 0 3 1.
#
# <details><summary>Hint</summary><code>argsort(dim=-1, stable=True)</code> keeps equal scores in their given order. Name <code>dim</code>. In which order should they stand?</details>

# %%
check("ranking")

# %% [markdown]
# ## 4. `cut_to` (4 points)
#
# `score` is (..., M), `chunk` is (..., n). Go through the chunks in the order of `ranking`, and through each chunk from its first token to its last. The first `budget` tokens on this way stay. Return a mask (..., n) of `torch.bool`. Exactly min(budget, n) tokens of each head stay.
#
# `budget` is a number, or a tensor (...) with one number per head. It may be 0 or exceed n.
#
# Example: chunks 0 0 1 1 with scores 1 9 and budget 3 give 1 0 1 1.
#
# <details><summary>Hint</summary>Invert the ranking: which <i>rank</i> has each chunk, and so each token? Then sort the tokens by rank, stably.</details>

# %%
check("cut_to")

# %% [markdown]
# ## 5. `fit` (3 points)
#
# `score` and `length` are (..., M). Go through the chunks in the order of `ranking`. A chunk stays if it is at most as long as the remaining room, and then takes up that room. If it is too long, skip it and try the next. Return a mask (..., M) of chunks, `torch.bool`. `budget` is as in `cut_to`.
#
# A chunk of length 0 needs no room; the mask may have either value there.
#
# Example: lengths 3 3 2 1, scores 5 9 1 0, budget 5. Chunk 1 fits, chunk 0 no longer, chunk 2 does, chunk 3 no longer: 0 1 1 0.
#
# <details><summary>Hint</summary>Loop over M, for all rows and heads at once: <code>room</code> is a tensor of shape (...).</details>

# %%
check("fit")

# %% [markdown]
# ## 6. `ChunkKV.compress` (2 points, check `reuse`)
#
# The paper: neighbouring layers like the same chunks. With `reuse=2` the layers form groups of two. The lower layer of a group chooses for both, and the upper one computes no window scores.
#
# `layers` holds the stores of all layers, the lowest first. All have read the prompt, `tokens`. A group is `self.reuse` layers that follow each other, from layer 0 on; the last group may be smaller. For each group:
#
# - If its lowest layer has seen more tokens than `self.budget` (`layer.seen`), let it choose, once, as `SnapKV.compress` does. `self.window(layer, tokens)` is its observation window, and `window.scores()` are the window scores. `self.budgets(window, scores)` says how many entries each head keeps beside the window. `self.select(window, scores, budgets)` returns a mask of these entries, (B, H, n), for the n slots before the window.
# - `window.with_window` adds the window to the mask: (B, H, S), for all S slots. Pass the result to `keep_chosen` of every layer in the group. The layers of a group have the same tokens in the same slots.
# - Otherwise leave the group as it is.
#
# Do not ask for the window of another layer: it has stored no queries. You do not need `model`. The layers of a decoder that is split over several GPUs are not graded.
#
# Example: five layers and `reuse=2`. Layers 0, 2 and 4 choose; 1 keeps what 0 chose, and 3 what 2 chose.

# %%
check("reuse")

# %% [markdown]
# ## 7. Predict, then measure (written, 3 points, graded by hand)
#
# The cells hide one fact in a text of 512 tokens, question and answer included, and ask for it. The fact's value has eight tokens ("long") or two ("short"); no full stop marks its end. SnapKV and ChunkKV keep as many entries as a quarter of the text before the question has; the observation window has 8 tokens. *Aware*: the question is part of the compressed prompt. *Agnostic*: it comes afterwards. SnapKV pools its window scores over 7 tokens.
#
# Each number is the fraction of 64 documents answered. In brackets: the difference to SnapKV ± its standard error, taken document by document. Believe a difference of more than two standard errors. (±0.00: the difference is the same in each document.)
#
# **Before you run the cells, write down** what you expect, and why:
#
# 1. Long values: does ChunkKV with chunks of 10 find more than SnapKV, or fewer? Aware, and agnostic?
# 2. Short values, aware: which of the two finds more?
# 3. What do chunks of 4, 20 and 40 change? Which size would you take if you knew the value's length?
#
# Your prediction:
#
#

# %%
from methods.chunk_kv import ChunkKV, Chunks
from methods.baselines.snap_kv import SnapKV
from nanollm import TINY, tokenizer
from nanollm import checkpoint
from nanollm.cache import Method
from lab.benchmark import Benchmark, standard_error
from lab.retrieval import maker, retrieve
from lab.tasks import Unmarked

model = checkpoint.from_hf(TINY)
tasks = Unmarked(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
batches = {name: tasks.batch("needle", 0, 64, 512, facts=1, numbers=numbers)
           for name, numbers in (("long", 4), ("short", 1))}  # a number has two tokens
bench = Benchmark.read(model, batches)
makes = {"full cache": maker(model, Method, None),
         "SnapKV": maker(model, SnapKV, 0.25, window_size=8)}
for size in 4, 10, 20, 40:
    makes[f"chunks of {size}"] = maker(model, ChunkKV, 0.25, window_size=8, select=Chunks(size))

# %%
answers = {name: {(task, setting): right for task, batch in batches.items()
                  for setting, right
                  in retrieve(model, batch, make, bench.recordings[task]).items()}
           for name, make in makes.items()}
print(" " * 13 + "".join(f"{' '.join(column):>22}" for column in answers["SnapKV"]))
for name, columns in answers.items():
    gains = {column: right - answers["SnapKV"][column] for column, right in columns.items()}
    print(f"{name:13}" + "".join(
        f"{columns[column].mean():8.2f} ({x.mean():+.2f} ±{standard_error(x):.2f})"
        for column, x in gains.items()))

# %% [markdown]
# What you measured, where your prediction was wrong, and why, in at most ten sentences:
#
#
