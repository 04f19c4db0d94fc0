# %% [markdown]
# # 3. Chunks
#
# **2 to 3 hours; 15 points by tests, and 3 for the written question at the end.** You write six functions of `methods/chunk_kv.py`.
#
# **Read before:** ChunkKV ([arXiv 2502.00299](https://arxiv.org/abs/2502.00299)), sections 1 and 3. Then the docstring of `methods/chunk_kv.py`, and `nanollm/window.py`, which calls what you write.
#
# ## The idea
#
# A window method lets the last queries of a prompt vote: each earlier token gets the attention that they gave it. SnapKV keeps the tokens with the most window scores. But a token means little without its neighbours. In "the code is 7 4 1 9" the window scores fall on *code*, and the digits go.
#
# ChunkKV cuts the prompt into chunks of `chunk_size` tokens. A chunk's score is the sum of its tokens' window scores. The chunks with the highest scores stay, whole.
#
# ## On paper
#
# Eight tokens, chunks of three, room for four tokens.
#
# | token | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | window score | 1 | 0 | 2 | 0 | 4 | 0 | 3 | 1 |
# | chunk | 1 | 1 | 1 | 2 | 2 | 2 | 3 | 3 |
#
# The scores of the chunks are 3, 4 and 4. Chunks 2 and 3 are equal. Of equals the *newest* comes first, in this repository always. So the ranking is 3, 2, 1.
#
# - **Filled up** (`cut_to`): chunk 3 takes two places, chunk 2 has three tokens and two places are left. Its first two stay: tokens 3, 4, 6 and 7.
# - **Whole chunks only** (`fit`): chunk 3 stays. Chunk 2 does not fit into the two places that are left, nor does chunk 1. So two places stay empty, and only tokens 6 and 7 are kept. (`fit` itself returns the chunks.)
#
# Token 2 has two window scores and goes; token 3 has none and stays. That is what chunks cost.
#
# ## How it is graded
#
# Shapes: B rows of a batch, H key/value heads, n tokens. `(..., n)` stands for any leading dimensions, none included. Each row and head is on its own: nothing of one may reach another. Do not change a tensor that you are given. Signatures stay. Loops over chunks or tokens in Python are right, if slow; no test needs speed.
#
# The cell after each problem runs its public tests. The hidden tests try the same specification at other sizes, with ties, and at its edges.

# %%
from course.command import checker

check = checker("chunks")

# %% [markdown]
# ## 1. `grid` (1 point)
#
# The number of every token's chunk. `place` (..., n) holds each token's place in the text, counted from 0. A cache that was compressed before holds places with gaps, and heads hold different ones. A slot that holds no token has place −1. Return whole numbers (`torch.int64`) of the same shape: place i is in chunk ⌊i / `size`⌋ + 1, and an empty slot, of any negative place, in chunk 0.
#
# <details><summary>Hint</summary><code>//</code> on tensors of whole numbers rounds down. <code>torch.where</code> takes care of the empty slots.</details>

# %%
check("grid")

# %% [markdown]
# ## 2. `chunk_scores` (3 points)
#
# `scores` and `chunk` are (..., n), n at least 1. The window scores are at least 0, and `chunk` holds the number of each token's chunk, 0 or more; rows and heads may be cut differently. M is the largest number in the whole tensor `chunk`, plus one. Return two tensors of shape (..., M):
#
# - the **score** of every chunk: the `"sum"`, `"mean"` or `"max"` of its tokens' window scores, as `how` says, of the dtype of `scores`,
# - its **length** in tokens, `torch.int64`.
#
# A head may have fewer chunks than M. Those that it has not get score 0 and length 0, for every `how`.
#
# <details><summary>Hint</summary><code>zeros.scatter_add(-1, chunk, scores)</code> adds each score to its chunk. For the maximum there is <code>scatter_reduce</code> with <code>"amax"</code>.</details>

# %%
check("chunk_scores")

# %% [markdown]
# ## 3. `ranking` (2 points)
#
# `score` is (..., M). Return the chunks' numbers in the order of their scores, (..., M), the highest first. Of equal scores the newest chunk, that with the larger number, comes first. You may use `rank` of `nanollm/ranking.py`, and need not.
#
# <details><summary>Hint</summary><code>argsort(dim=-1, stable=True)</code>, with <code>dim</code> by name, leaves equals in the order in which they stood. In which order should they stand?</details>

# %%
check("ranking")

# %% [markdown]
# ## 4. `cut_to` (4 points)
#
# `score` is (..., M) and `chunk` (..., n). Return a mask (..., n) of `torch.bool`. Go through the chunks in the order of `ranking`, and through each from its first token to its last. The first `budget` tokens on this way stay. So exactly min(budget, n) tokens of each head stay.
#
# `budget` is a number for all heads, or a tensor of shape (...), one for each. It may be 0, and it may be larger than n.
#
# <details><summary>Hint</summary>Turn the ranking round: what is the <i>rank</i> of each chunk, and so of each token? A stable sort of the tokens by that is the way.</details>

# %%
check("cut_to")

# %% [markdown]
# ## 5. `fit` (3 points)
#
# `score` and `length` are (..., M). Return a mask (..., M) of chunks, `torch.bool`. Go through them in the order of `ranking`. Each stays if it is at most as long as the room that is left, and then takes that room. One that is too long is passed over, and the next is tried. `budget` is as in `cut_to`.
#
# A chunk of length 0 needs no room. Whether its place is true does not matter.
#
# <details><summary>Hint</summary>A loop over M, for all rows and heads at once: <code>room</code> is a tensor of shape (...).</details>

# %%
check("fit")

# %% [markdown]
# ## 6. `ChunkKV.chosen` (2 points, check `reuse`)
#
# Layers like the same chunks. With `reuse=2` every second layer takes the choice of the layer below, and needs no window scores. `self.follows` says whether this is such a layer; if it is not, return `super().chosen()`.
#
# If it is: `self.previous` is the cache of the layer below. When its prompt is over, its `pos`, (B, H, k) of `torch.int32`, holds the positions of the tokens that it kept, and `NEVER` where a slot is empty. Return the *slots* of the same tokens in this layer, (B, H, k), `torch.int64`, with −1 for an empty one. They stand in the order of the slots below. The prompt is still whole here: slot 0 holds the first position, `self.pos[:, :, 0]`, and the others follow one by one. The first position need not be 0.
#
# If the prompt of the layer below is not over, `self.previous.prompt_done` is false. Then raise a `ValueError` that says what to do: end the prompt from the lowest layer up, as `end_prefill(caches)` does. The wording is not graded.

# %%
check("reuse")

# %% [markdown]
# ## 7. Predict, then measure (written, 3 points, not graded by the tests)
#
# The cell hides one fact in a text of 512 tokens and asks for it. The value of the fact has eight tokens ("long") or two ("short"). No full stop tells where the fact ends. Each method keeps a quarter of the prompt; the last 8 tokens vote. *aware*: the question is part of the prompt that is compressed. *agnostic*: it comes afterwards. SnapKV pools its window scores over 7 tokens.
#
# Each number is the share of 64 documents that is answered. Behind it stands the difference to SnapKV with its standard error, taken document by document. Believe a difference of more than two standard errors. (±0.00 means that no two documents differ: the difference is the same in each.)
#
# **First write down** what you expect, with a reason, before you run the cell:
#
# 1. Long values, *aware*: does ChunkKV with chunks of 10 find more than SnapKV, or fewer? And *agnostic*?
# 2. Short values, *aware*: which of the two finds more?
# 3. What do chunks of 4, 20 and 40 do to either? Which chunk would you take if you knew the length of the value?
#
# Your prediction:
#
#

# %%
from methods.chunk_kv import ChunkKV, Chunks
from methods.snap_kv import SnapKV
from nanollm import TINY, tokenizer
from nanollm.hf import checkpoint
from nanollm.cache import LayerCache
from nanollm.measure.tasks import Unmarked
from nanollm.measure.benchmark import Benchmark
from nanollm.measure.evaluate import maker, retrieve, standard_error

model, tasks = checkpoint.from_hf(TINY), Unmarked(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
batches = {name: tasks.batch("needle", 0, 64, 512, facts=1, numbers=numbers)
           for name, numbers in (("long", 4), ("short", 1))}  # a number has two tokens
bench = Benchmark.read(model, batches, None)
makes = {"full cache": maker(model, LayerCache, None), "SnapKV": maker(model, SnapKV, 0.25, window_size=8)}
for size in 4, 10, 20, 40:
    makes[f"chunks of {size}"] = maker(model, ChunkKV, 0.25, window_size=8, select=Chunks(size))

found = {name: {(task, setting): right for task, batch in batches.items()
                for setting, right in retrieve(model, batch, make, bench.recordings[task]).items()}
         for name, make in makes.items()}
print(" " * 13 + "".join(f"{' '.join(column):>22}" for column in found["SnapKV"]))
for name, columns in found.items():
    gains = {column: right - found["SnapKV"][column] for column, right in columns.items()}
    print(f"{name:13}" + "".join(f"{columns[column].mean():8.2f} ({x.mean():+.2f} ±{standard_error(x):.2f})"
                                 for column, x in gains.items()))

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most ten sentences):
#
#
