# %% [markdown]
# # 1. The cache itself
#
# **3 to 5 hours; 16 points by tests, and 3 for the written question.**
#
# H2O deletes three quarters of a prompt's entries, and the small decoder here still labels all 32 few-shot prompts correctly. Deleting as many at random leaves 0.59 of the labels (32 documents: `python -m nanollm --methods full random h2o --keep 25`). Here you write the core of the cache that makes such methods possible, and then the score of H2O.
#
# ## The idea
#
# A decoder keeps a key and a value of every token it has read: the KV cache. Ours consists of **slots**. A slot holds one token's key, value and position. Each head has its own slots, and two heads may hold different tokens.
#
# A **store** keeps the slots of one layer, and a **method** decides which of them stay. The decoder calls the store's `attend` with new tokens. `attend` writes them into slots. Then each query sees the slots whose position is at most its own. This one rule makes attention causal, and it still works when slots were evicted or moved.
#
# H2O adds up the attention that each token receives. It keeps the tokens with the highest sum, and the newest.
#
# **Example.** One head, budget 3, one slot reserved for the newest token. The cache holds tokens 0 to 3, one too many.
#
# | slot | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | position | 0 | 1 | 2 | 3 |
# | accumulated attention | 2.0 | 0.5 | 0.9 | 0.6 |
#
# Position 3 is the newest and stays. Of the others, position 1 has the least attention and leaves. The last slot moves into the hole; nothing else is copied:
#
# | slot | 0 | 1 | 2 |
# |---|---|---|---|
# | position | 0 | 3 | 2 |
# | accumulated attention | 2.0 | 0.6 | 0.9 |
#
# The slots are now out of order. Attention does not care: it is a sum over slots. But from now on, read a token's age from its position, never from its slot.
#
# ## What you write
#
# | check | function | file | points |
# |---|---|---|---|
# | `visible` | `visible` | `nanollm/attention.py` | 1 |
# | `probabilities` | `probabilities` | `nanollm/attention.py` | 2 |
# | `write` | `Slots.write` | `nanollm/slots.py` | 3 |
# | `keep` | `Slots.keep` | `nanollm/slots.py` | 2 |
# | `drop` | `Slots.drop` | `nanollm/slots.py` | 2 |
# | `indices` | `indices` | `nanollm/ranking.py` | 1 |
# | `shrink` | `Slots.shrink` | `nanollm/slots.py` | 3 |
# | `score` | `H2O.score` | `methods/baselines/h2o.py` | 2 |
#
# **Read first:** the docstring of `nanollm/method.py`; `nanollm/slots.py`, above all `attend`, `step` and `allocate`; `attention` in `nanollm/attention.py`; H2O ([arXiv 2306.14048](https://arxiv.org/abs/2306.14048)), sections 1 and 4.
#
# ## How to check it
#
# Write the functions in this order: in your copy, later tests call earlier functions. The cell after each problem runs its public tests. The hidden tests try other sizes, ties and edge cases, and the whole cache. In grading, each problem's function runs with our solutions of the others, so a wrong function costs only its own problem.
#
# Shapes: B batch rows, H key/value heads, G query heads per key/value head, T new tokens, S slots, D numbers per key, w queries. Rows and heads are independent. Do not change a tensor that you are given, unless the problem says so. Keep the signatures. Python loops are fine.
#
# | word | meaning |
# |---|---|
# | per-slot tensor | a tensor (B, H, slots, …): `k`, `v`, `pos`, and others that a method stores with each entry (`entry`), such as the accumulated attention |
# | buffer | the allocated tensor `self.slots[name]`; its first `self.length` slots are in use |
# | slack | the rest of a buffer; it may hold anything |
# | `self.slot(name)` | a view of the slots in use |
# | `self.seen` | how many tokens were ever written, evicted ones included |
# | empty slot | a slot in use whose position is `NEVER` = 2³¹ − 1; no query sees it. It fills up a head that keeps fewer tokens than another |
# | `self.ragged` | whether there may be empty slots |

# %%
from course.command import checker

check = checker("cache")

# %% [markdown]
# ## 1. `visible` in `nanollm/attention.py` (1 point)
#
# A query sees a slot if the slot's position is at most its own.
#
# `slot_pos` is (B, H, S): the slots' positions, in any order. If all heads hold the same tokens it may be (B, 1, S). `pos` is (B, T) or (1, T): the queries' positions; a single row serves the whole batch. Return a mask, (B, H, T, S), or (B, 1, T, S) if neither `slot_pos` nor `bias` has more than one head.
#
# - `bias` is `None`: the mask is `torch.bool`, true where the query sees the slot.
# - `bias` is (B, H, S), a number to add to each slot's score: the mask is (B, H, T, S) and has the dtype of `bias`. It holds the slot's bias where the query sees the slot, and −∞ elsewhere.
# - `sliding` is not graded. A layer that does not attend to all earlier tokens gives it: then a query at `pos` does not see slots before `sliding.first(pos)`.
#
# Example: slots at 0 5 2 7 and a query at 4 give 1 0 1 0.
#
# <details><summary>Hint</summary>Give both sides four dimensions, with <code>unsqueeze</code> or with <code>None</code> as an index. <code>torch.where</code> accepts a number as its third argument.</details>

# %%
check("visible")

# %% [markdown]
# ## 2. `probabilities` in `nanollm/attention.py` (2 points)
#
# `q` is (B, H·G, w, D), `k` is (B, H, S, D). `mask` is what `visible` returns, (B, H, w, S), or (B, 1, w, S) if the heads share it. Return the softmax of q kᵀ / √D over the slots that a query sees, (B, H, G, w, S).
#
# - Query head h·G + g reads key/value head h: the G heads of a group lie side by side in `q`.
# - A boolean mask is true where the query sees the slot. A mask of numbers is added to q kᵀ / √D. With `None` every query sees every slot.
# - A slot that is not visible gets exactly 0. Each query sees at least one slot.
# - Multiply and return in at least 32 bits: `wide(q)`. In 16 bits q kᵀ may overflow, or round two scores to one.
#
# Example: a query of zeros with the mask 1 1 0 0 gives ½ ½ 0 0.
#
# <details><summary>Hint</summary><code>view(B, H, G, w, D)</code> separates the groups; <code>mask.unsqueeze(2)</code> serves all heads of a group. <code>wide</code> stands in the same file.</details>

# %%
check("probabilities")

# %% [markdown]
# ## 3. `Slots.write` (3 points)
#
# Append T new tokens. `k` and `v` are (B, H, T, D). `pos` is (B, T) or (1, T) and holds for every head.
#
# - Every per-slot tensor gets T more slots in use, at its end. `self.length` and `self.seen` grow by T.
# - `k`, `v` and `pos` go into the tensors of these names. Each keeps its dtype; that of `pos` is `torch.int32`.
# - Every other tensor in `self.slots` belongs to the method. Its new slots are 0, even where the buffer still holds numbers of a freed slot.
# - Before the first write `self.slots` is empty. `self.allocate(k, v, n)` then makes all buffers, of n slots each.
# - Later, `self.reserve(n)` gives every buffer n slots and copies those in use. Call it only if the slots no longer fit.
# - In both cases n is `self.capacity(m)`, where m is the number of slots needed.
# - Copy what you are given: the caller may overwrite it afterwards.
#
# Example: the method stores a `score` with each entry. Two tokens are written, and the method gives both the score 5. After a third token `score` is 5 5 0.
#
# <details><summary>Hint 1</summary>Call <code>self.capacity</code> before you change <code>self.length</code>: it makes room for more only if the store already holds something. <code>self.slots["k"].shape[2]</code> slots are allocated.</details>
#
# <details><summary>Hint 2</summary><code>pos[:, None]</code> broadcasts over heads when you assign it. So one loop over <code>self.slots</code> fills all tensors.</details>

# %%
check("write")

# %% [markdown]
# ## 4. `Slots.keep` (2 points)
#
# `i` is (B, H, n), `torch.int64`: the slots to keep, in their new order. −1 makes an empty slot.
#
# - Move every per-slot tensor, also those with more dimensions. Each then has n slots, all in use, no slack, and its old dtype.
# - Give an empty slot the position `NEVER`. Its other contents do not matter.
# - Set `self.length` to n. Set `self.ragged` to true if `i` has an empty slot; otherwise leave it. Leave `self.seen`.
# - Raise a `ValueError` if `i` has a wrong shape, or names a slot that is not in use. `check_kept(i, self.pos.shape)` raises it. Numbers below −1 are not tested.
#
# Example: positions 0 3 6 9 and `i` = 2 0 −1 give the positions 6 0 `NEVER`.
#
# <details><summary>Hint</summary><code>gather</code> wants an index of the result's shape, without −1. See <code>expand_index</code> in <code>nanollm/ranking.py</code>.</details>

# %%
check("keep")

# %% [markdown]
# ## 5. `Slots.drop` (2 points)
#
# At its budget, H2O evicts one slot of each head after each generated token. `keep` would copy the whole cache. `drop` evicts one slot of each head in place.
#
# `i` is (B, H, 1): the slot to evict. Move the last slot *in use* into the hole, in every per-slot tensor. If the evicted slot is the last one, nothing moves. `self.length` falls by one, `self.seen` stays, and the buffers remain the same tensors.
#
# Example: positions 0 1 2 3 and `i` = 1 give 0 3 2.
#
# <details><summary>Hint</summary><code>scatter_</code> writes in place. Is its source a view of its target?</details>

# %%
check("drop")

# %% [markdown]
# ## 6. `indices` in `nanollm/ranking.py` (1 point)
#
# `kept` is a mask (B, H, S). Return the slots where it is true, in ascending order: (B, H, n), `torch.int64`. n is the count of the head that keeps most; fill the other heads up with −1 at the end. A mask without a true gives (B, H, 0).
#
# Example: two heads with the masks 1 0 1 1 and 0 1 0 0 give 0 2 3 and 1 −1 −1.
#
# <details><summary>Hint</summary>A stable sort of "is not kept" puts the kept slots first, in their order: <code>argsort(dim=-1, stable=True)</code>. Name <code>dim</code>.</details>

# %%
check("indices")

# %% [markdown]
# ## 7. `Slots.shrink` (3 points)
#
# `score` is (B, H, S): a finite or +∞ number for each slot in use. (You need not refuse others.) In each head, keep the `budget` slots with the highest score.
#
# - Of equal scores, keep the newest token: the one with the largest position, wherever it lies.
# - Keep an empty slot only if the head has fewer tokens than the budget, whatever the empty slot's score. It stays empty; you may pass `keep` its index or −1. If `self.ragged` is false, no slot is empty.
# - Do nothing if at most `budget` slots are in use. Otherwise `budget` slots are in use afterwards, in any order.
# - If exactly one slot is too many and the store is not ragged, call `self.drop`, which makes no new buffers. Otherwise call `self.keep`.
# - Before anything else, raise a `ValueError` if `score` has a wrong shape. `check_score(score, self.pos.shape)` raises it.
#
# Example: scores 5 1 9 1 at positions 0 3 2 1, budget 3. One of the two slots with score 1 leaves: the older, at position 1.
#
# `rank(score, pos)` in `nanollm/ranking.py` ranks each slot: 0 for the highest, of equal scores the newest first.
#
# <details><summary>Hint</summary><code>drop</code> needs one slot per head: among those with the lowest score, the one with the smallest position.</details>

# %%
check("shrink")

# %% [markdown]
# ## 8. `H2O.score` (2 points)
#
# `evict` of `Scored` is given. It runs at the prompt's end and then after each `attend`. If more than `self.budget` slots of the store `layer` are in use, it calls `layer.shrink(self.score(layer), self.budget)`. Write `score`: return floats (B, H, S).
#
# - `layer.slot("accumulated")`, (B, H, S), holds the attention that each token received from all queries. `observe`, which is given, adds it up.
# - Keep the newest r = `round(self.recent * self.budget)` tokens seen, with Python's `round`, but at least one. Positions, `layer.pos`, count from 0: a slot is among the newest if its position is at least `layer.seen` − r.
# - Give the remaining places to the slots with the most accumulated attention.
# - Leave the accumulated attention unchanged: a token that is no longer among the newest competes with its own sum.
#
# Example: positions 0 1 2 3 with sums 1 9 5 0, budget 2, `recent` = 0. Position 3 stays as the newest, position 1 by its sum.

# %%
check("score")

# %% [markdown]
# ## 9. Predict, then measure (written, 3 points, graded by hand)
#
# The cell compares four caches of a small decoder. Three methods keep a quarter of the prompt's entries; `full` keeps all. `random` keeps random tokens; `streaming_llm` keeps the first four and the newest. **Before you run it, write down** what you expect, and why:
#
# 1. *KiB* is the cache's size at the end of a text of 511 tokens, of which 64 came after the prompt. The three methods also evict after each of these. Keys and values have 16 bits a number. Which fraction of the full cache's bytes does `h2o` take: a quarter, more or less? (A key and a value have 32 numbers each. A position and an accumulated sum take 4 bytes each. The budget is a quarter of the 447 prompt tokens, rounded.)
# 2. A needle is a fact hidden in the text. Does `h2o` find more needles than `streaming_llm`, fewer, or can you not tell? Does H2O gain if the question is part of the compressed prompt (*aware*)?
# 3. *KL* measures how far predictions move from the full cache's; 0 means not at all. In which order do the three methods come?
#
# Your prediction:
#
#

# %%
import subprocess
import sys

command = """
python -m nanollm --methods full random streaming_llm h2o --keep 25 --documents 16
"""
subprocess.run([sys.executable, *command.split()[1:]], check=True);

# %% [markdown]
# Write what you measured, where your prediction was wrong, and why, in at most ten sentences. The table has each accuracy ± its standard error. Count two as different only if they differ by more than twice the root of the sum of both errors' squares; for KL take 0.05 as the error. The command also writes the figure `compare.png`.
#
#
