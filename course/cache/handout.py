# %% [markdown]
# # 1. The cache itself
#
# **3 to 5 hours; 16 points by tests, and 3 for the written question at the end.** You write eight functions: two in `nanollm/attention.py`, four in `nanollm/cache.py`, one in `nanollm/ranking.py`, and the score of a first method in `methods/h2o.py`.
#
# **Read before:** `nanollm/cache.py` from top to bottom, `LayerCache.attend` twice, and `attention` in `nanollm/attention.py`. Then H2O ([arXiv 2306.14048](https://arxiv.org/abs/2306.14048)), sections 1 and 4.
#
# ## The idea
#
# A decoder keeps a key and a value for every token that it has read. This is the KV cache. Here it is made of **slots**. A slot holds the key, the value and the position of one token. Each head has its own slots, and two heads may hold different tokens.
#
# The decoder calls `attend` with new tokens. The tokens are written into slots. Then the queries see slots: a query sees those whose position is at most its own. That is the only rule. It makes attention causal, and it goes on working when slots were evicted or moved.
#
# To compress is to choose slots that stay. The others are removed and their memory is freed. H2O adds up the attention that each token gets. Tokens that got much of it, and the newest tokens, stay.
#
# ## Words
#
# - **per-slot tensor**: a tensor of shape (B, H, slots, ...) with an entry for each slot. `k`, `v` and `pos` are three. Methods add others, for instance the attention that was added up.
# - **buffer**: the tensor `self.slots[name]` as it is allocated. Its first `self.length` slots are in use. The rest is **slack**, which anything may stand in.
# - **`self.slot(name)`**: a view of the slots in use.
# - **`self.seen`**: how many tokens have ever been written, evicted ones too.
# - **empty slot**: a slot whose position is `NEVER`, the largest whole number of 32 bits. No query sees it. It is there because a tensor has the same number of slots for each head, and another head keeps more. It counts as a slot in use.
# - **`self.ragged`**: whether there may be empty slots.
#
# ## On paper
#
# One head, H2O with a budget of three slots of which one is for the newest token. Tokens 0 to 3 are held, one too many.
#
# | slot | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | position | 0 | 1 | 2 | 3 |
# | attention, added up | 2.0 | 0.5 | 0.9 | 0.6 |
#
# The newest, position 3, stays whatever it got. Of the others position 1 got least, so it leaves. The last slot moves into the hole, and nothing else is copied:
#
# | slot | 0 | 1 | 2 |
# |---|---|---|---|
# | position | 0 | 3 | 2 |
# | attention, added up | 2.0 | 0.6 | 0.9 |
#
# The order of slots is now not that of tokens. Does that matter? Attention is a sum over slots, so it has no order. What is *newer* must from now on be read from positions, not from slots.
#
# ## How it is graded
#
# Shapes: B rows of a batch, H key/value heads, G query heads for each of them, T new tokens, S slots, D numbers a key, w queries. Each row and head is on its own: nothing of one may reach another. Do not change a tensor that you are given, unless it says so. Signatures stay. Loops in Python are right, if slow.
#
# The cell after each problem runs its public tests. The hidden tests try the same specification at other sizes, with ties, at its edges, and inside the whole cache. Write the functions in this order: in your copy later tests call earlier functions. When it is graded, each function stands among right ones.

# %%
from course.command import checker

check = checker("cache")

# %% [markdown]
# ## 1. `visible` in `nanollm/attention.py` (1 point)
#
# `slot_pos` is (B, H, S), the positions of slots in any order. `pos` is (B, T) or (1, T), the positions of queries; one row serves the whole batch. Return a mask (B, H, T, S).
#
# A slot is seen if its position is at most the query's. Without `bias` (`None`) the mask is `torch.bool`, true where a slot is seen.
#
# A slot that stands for several tokens has a number that is added to its score. With `bias` (B, H, S) the mask has floats of the dtype of `bias`: the slot's bias where it is seen, −∞ where it is not.
#
# <details><summary>Hint</summary>Give both sides four dimensions, with <code>unsqueeze</code> or <code>None</code> as an index. <code>torch.where</code> takes a number as its third argument.</details>

# %%
check("visible")

# %% [markdown]
# ## 2. `probabilities` in `nanollm/attention.py` (2 points)
#
# `q` is (B, H·G, w, D), `k` is (B, H, S, D); `slot_pos`, `bias` and `pos` are as above. Return softmax(q kᵀ / √D + bias) over the visible slots, (B, H, G, w, S).
#
# - Query head h·G + g reads key/value head h. So the G heads of a group lie side by side in `q`.
# - A slot that is not visible gets exactly 0. At least one slot is visible to each query.
# - The product q kᵀ may be in the dtype of `q`. The softmax is computed in `torch.float32`, whatever the dtype. The result has the dtype of `q`.
#
# <details><summary>Hint</summary><code>view(B, H, G, w, D)</code> puts a group's heads side by side. <code>softmax</code> takes a <code>dtype</code>.</details>

# %%
check("probabilities")

# %% [markdown]
# ## 3. `LayerCache.write` (3 points)
#
# Remember T new tokens. `k` and `v` are (B, H, T, D), `pos` is (B, T) or (1, T), and holds for every head. `state` are more per-slot tensors by name, (B, H, T, ...), of any dtype.
#
# - Afterwards every per-slot tensor has T more slots in use, after those that were in use. `self.length` and `self.seen` grow by T.
# - `pos` is stored as `torch.int32`; each other tensor has the dtype of its first write, or the one that the method declares.
# - A method may declare tensors (B, H, S): `self.per_entry` has their names and dtypes. They are there from the first write on.
# - A tensor that the cache has and that is not given this time is 0 in the new slots, even where the buffer still holds numbers of a slot that was freed.
# - A tensor that the cache has not had so far is 0 in the earlier slots.
# - A new buffer is allocated only if the slots do not fit into the old one. It has `self.capacity(n)` slots, n being the slots needed. What is in use is copied. A tensor that is new gets a buffer that holds at least the slots needed.
# - Nothing that you are given is stored itself. The caller may write to it afterwards.
#
# <details><summary>Hint</summary>Ask <code>self.capacity</code> before you change <code>self.length</code>. <code>self.reserve(n)</code> gives each tensor that is there room for n slots. <code>x.new_zeros(...)</code> allocates a tensor like <code>x</code>, and takes a <code>dtype</code>.</details>
#
# <details><summary>Hint</summary>Begin with one dict of all names: those in <code>self.slots</code> and in <code>self.per_entry</code> with <code>None</code>, and over these what is given. <code>pos[:, None]</code> has a head dimension of 1, which broadcasts when it is assigned.</details>

# %%
check("write")

# %% [markdown]
# ## 4. `LayerCache.keep` (2 points)
#
# `i` is (B, H, n), `torch.int64`: the slots that stay, in the order in which they are to stand. −1 is an empty slot.
#
# - Every per-slot tensor moves, also those with more dimensions. Afterwards each has n slots, all in use and no slack, and its dtype as before.
# - An empty slot has the position `NEVER`. What it holds otherwise does not matter.
# - `self.length` is n. `self.ragged` becomes true if there is an empty slot in `i`, and stays true if it was. `self.seen` does not change.
# - A `ValueError` if `i` has another shape or dtype, or has a number of `self.length` or more. `check_kept(i, self.pos.shape)` raises it.
#
# <details><summary>Hint</summary><code>gather</code> wants an index of the shape of its result, and no −1. See <code>expand_index</code> in <code>nanollm/ranking.py</code>.</details>

# %%
check("keep")

# %% [markdown]
# ## 5. `LayerCache.drop` (2 points)
#
# After each new token of an answer one slot must go. `keep` would copy the whole cache. So `drop` evicts one slot of each head, `i` (B, H, 1), in place: the last slot *in use* moves into the hole, in every per-slot tensor. If the evicted slot is the last one, nothing moves.
#
# `self.length` is one less. `self.seen` does not change. The buffers are the same tensors as before, of the same size.
#
# <details><summary>Hint</summary><code>scatter_</code> writes in place. Is its source a view of what it writes to?</details>

# %%
check("drop")

# %% [markdown]
# ## 6. `indices` in `nanollm/ranking.py` (1 point)
#
# `kept` is a mask (B, H, S). Return the slots where it is true, (B, H, n), `torch.int64`, in ascending order, n being the count of the head that keeps most. Heads that keep fewer are filled up with −1 at the end. A mask that is true nowhere gives (B, H, 0).
#
# <details><summary>Hint</summary>A stable sort of "is not kept" puts the kept slots first and leaves their order: <code>argsort(dim=-1, stable=True)</code>, where <code>dim</code> must be named.</details>

# %%
check("indices")

# %% [markdown]
# ## 7. `LayerCache.shrink` (3 points)
#
# `score` is (B, H, S), a finite or +∞ number for each slot in use. Keep the `budget` slots with the highest score of each head.
#
# - Of equal scores the newest token stays: that with the largest position. It need not be in the last slot.
# - An empty slot is kept only if the head has fewer tokens than the budget, whatever its score. It then stays empty; whether `keep` is told its number or −1 does not matter. Where `self.ragged` is false there is none.
# - Afterwards `budget` slots are in use. With at most `budget` slots in use, nothing is done.
# - If exactly one slot is too many and the cache is not ragged, call `self.drop`, so that no buffer is new. Else call `self.keep`. The order of the slots is up to you.
# - A `ValueError` if `score` has another shape. `check_score(score, self.pos.shape)` raises it. The shape is checked first, even if nothing is to be done.
#
# `rank(score, pos)` in `nanollm/ranking.py` gives each slot its rank, 0 for the highest, of equals the newest first.
#
# <details><summary>Hint</summary>For <code>drop</code> you need one slot a head: among those with the lowest score that with the smallest position.</details>

# %%
check("shrink")

# %% [markdown]
# ## 8. `H2O.score` (2 points)
#
# `evict` of `ScoredCache` is given. It is called at the end of the prompt, and then after each `attend`. If more than `self.budget` slots are in use, it calls `self.shrink(self.score(), self.budget)`. Return this score, (B, H, S) of floats. The slots with the highest score stay; of equals the newest.
#
# `self.accumulated`, (B, H, S), holds the attention that each token has had from all queries. `observe`, which is given, adds it up.
#
# - The newest tokens stay: `round(self.recent * self.budget)` of those seen so far, with Python's `round`, but at least one. Positions count from 0. So with r newest tokens, a slot is among them if its position is at least `self.seen` − r. Slots may have any order.
# - The other places go to those with the most accumulated attention.
# - `self.accumulated` itself does not change: a token that is no longer among the newest must stand by what it had.

# %%
check("score")

# %% [markdown]
# ## 9. Predict, then measure (written, 3 points, not graded by the tests)
#
# The command below compares four caches of a small decoder at a quarter of the prompt's tokens. `random` keeps random tokens, `streaming_llm` the first four and the newest. **First write down** what you expect, with a reason, before you run the cell:
#
# 1. The column *KiB*, counted with numbers of 16 bits, is measured at the end of a text of 512 tokens, the last 64 of which came after the prompt. What share of the full cache's bytes should `h2o` have? A quarter, more or less? (Keys and values have 32 numbers of 2 bytes each; a position and an accumulated weight take 4 bytes each. The budget is a quarter of the 448 tokens of the prompt.)
# 2. A needle is a fact hidden in the text. Does `h2o` find more needles than `streaming_llm`, fewer, or is there no difference that can be told? Does it help H2O if it knows the question when it compresses (*aware*)?
# 3. *KL* says how far predictions move from those of the full cache, 0 being not at all. In which order are the three methods?
#
# Your prediction:
#
#

# %%
import subprocess
import sys

command = "-m nanollm --methods full random streaming_llm h2o --keep 25 --documents 16"
subprocess.run([sys.executable, *command.split()]);

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most ten sentences; accuracies differ if they differ by more than two standard errors, which stand above the table; for KL let 0.05 count; the command also writes the figure `compare.png`):
#
#
