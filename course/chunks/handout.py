# %% [markdown]
# # 3. Chunks
#
# **2 to 3 hours; 15 points by tests, and 3 for the written question at the end.** You write six functions of `methods/chunk_kv.py`.
#
# **Read before:** ChunkKV ([arXiv 2502.00299](https://arxiv.org/abs/2502.00299)), sections 1 and 3. Then the docstring of `methods/chunk_kv.py`, and `nanollm/window.py`, which calls what you write.
#
# ## The idea
#
# A window method lets the last queries of a prompt vote: each earlier token gets the attention that they gave it. SnapKV keeps the tokens with the most votes. But a token means little without its neighbours. In "the code is 7 4 1 9" the votes fall on *code*, and the digits go.
#
# ChunkKV cuts the prompt into chunks of `chunk_size` tokens. A chunk's score is the sum of its tokens' votes. The chunks with the highest scores stay, whole.
#
# ## On paper
#
# Eight tokens, chunks of three, room for four tokens.
#
# | token | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | vote | 1 | 0 | 2 | 0 | 4 | 0 | 3 | 1 |
# | chunk | 1 | 1 | 1 | 2 | 2 | 2 | 3 | 3 |
#
# The scores of the chunks are 3, 4 and 4. Chunks 2 and 3 are equal. Of equals the *newest* comes first, in this repository always. So the ranking is 3, 2, 1.
#
# - **Filled up** (`cut_to`): chunk 3 takes two places, chunk 2 has three tokens and two places are left. Its first two stay: tokens 3, 4, 6 and 7.
# - **Whole chunks only** (`fit`): chunk 3 stays. Chunk 2 does not fit into the two places that are left, nor does chunk 1. So two places stay empty: tokens 6 and 7.
#
# Where is the vote of token 0 in this? Nowhere: its chunk lost. That is what chunks cost.
#
# ## How it is graded
#
# Shapes: B rows of a batch, H key/value heads, n tokens. `(..., n)` stands for any leading dimensions, none included. Each row and head is on its own: nothing of one may reach another. Do not change a tensor that you are given. Signatures stay. Loops over chunks or tokens in Python are right, if slow; no test needs speed.
#
# The cell after each problem runs its public tests. The hidden tests try the same specification at other sizes, with ties, and at its edges.

# %%
import subprocess
import sys


def check(problem):
    subprocess.run([sys.executable, "-m", "nanollm", "course", "check", "--only", f"chunks.{problem}"])


# %% [markdown]
# ## 1. `grid` (1 point)
#
# The number of every token's chunk. `place` (..., n) holds each token's place in the text, counted from 0. A cache that was compressed before holds places with gaps, and heads hold different ones. A slot that holds no token has place −1. Return whole numbers (`torch.int64`) of the same shape: place i is in chunk ⌊i / `size`⌋ + 1, and an empty slot, of any negative place, in chunk 0.
#
# <details><summary>Hint</summary><code>//</code> on tensors of whole numbers rounds down. <code>torch.where</code> takes care of the empty slots.</details>

# %%
check("grid")

# %% [markdown]
# ## 2. `scores` (3 points)
#
# `votes` and `chunk` are (..., n): the votes are at least 0, and `chunk` holds the number of each token's chunk, 0 or more; rows and heads may be cut differently. Return two tensors of shape (..., M), M the largest chunk number anywhere plus one:
#
# - the **score** of every chunk: the `"sum"`, `"mean"` or `"max"` of its tokens' votes, as `how` says, of the dtype of `votes`,
# - its **length** in tokens, `torch.int64`.
#
# A head may have fewer chunks than M. Those that it has not get score 0 and length 0, for every `how`.
#
# <details><summary>Hint</summary><code>zeros.scatter_add(-1, chunk, votes)</code> adds each vote to its chunk. For the maximum there is <code>scatter_reduce</code> with <code>"amax"</code>.</details>

# %%
check("scores")

# %% [markdown]
# ## 3. `ranking` (2 points)
#
# `score` is (..., M). Return the chunks' numbers in the order of their scores, (..., M), the highest first. Of equal scores the newest chunk, that with the larger number, comes first.
#
# <details><summary>Hint</summary><code>argsort(dim=-1, stable=True)</code>, with <code>dim</code> by name, leaves equals in the order in which they stood. In which order should they stand?</details>

# %%
check("ranking")

# %% [markdown]
# ## 4. `cut_to` (3 points)
#
# `score` is (..., M) and `chunk` (..., n). Return a mask (..., n) of `torch.bool`. Go through the chunks in the order of `ranking`, and through each from its first token to its last. The first `budget` tokens on this way stay. So exactly min(budget, n) tokens of each head stay.
#
# `budget` is a number for all heads, or a tensor of shape (...), one for each. It may be 0, and it may be larger than n.
#
# <details><summary>Hint</summary>Turn the ranking round: what is the <i>rank</i> of each chunk, and so of each token? A stable sort of the tokens by that is the way.</details>

# %%
check("cut_to")

# %% [markdown]
# ## 5. `fit` (4 points)
#
# `score` and `length` are (..., M). Return a mask (..., M) of chunks, `torch.bool`. Go through them in the order of `ranking`. Each stays if it is at most as long as the room that is left, and then takes that room. One that is too long is passed over, and the next is tried. `budget` is as in `cut_to`.
#
# A chunk of length 0 needs no room. Whether its place is true does not matter.
#
# <details><summary>Hint</summary>A loop over M, for all rows and heads at once: <code>room</code> is a tensor of shape (...).</details>

# %%
check("fit")

# %% [markdown]
# ## 6. `ChunkKV.chosen` (2 points)
#
# Layers like the same chunks. With `reuse=2` every second layer takes the choice of the layer below, and needs no votes. `self.follows` says whether this is such a layer; if it is not, return `super().chosen()`.
#
# If it is: `self.below` is the cache of the layer below. When its prompt is over, its `pos`, (B, H, k), holds the positions of the tokens that it kept, and `NEVER` where a slot is empty. Return the *slots* of the same tokens in this layer, (B, H, k), `torch.int64`, with −1 for an empty one. The prompt is still whole here: slot 0 holds the first position, `self.pos[:, :, 0]`, and the others follow one by one. The first position need not be 0.
#
# If the prompt of the layer below is not over, `self.below.prompt_done` is false. Then raise a `ValueError` that says what to do.

# %%
check("reuse")

# %% [markdown]
# ## 7. Predict, then measure (written, 3 points, not graded by the tests)
#
# **First write down** what you expect, with a reason, before you run the cell:
#
# 1. Asked *after* the prompt was compressed (the "blind" columns): does ChunkKV keep more needles than SnapKV at the same budget, or fewer?
# 2. In few-shot prompts each line is an example and its label. Does `chunk_kv` lose more or less than `snap_kv`?
# 3. What should a smaller chunk do to either?
#
# Your prediction:
#
#

# %%
command = "-m nanollm --methods full snap_kv chunk_kv --budgets 25 --documents 16"
subprocess.run([sys.executable, *command.split()]);

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most ten sentences; a difference counts if it is larger than the standard errors below the table):
#
#
