# %% [markdown]
# # 6. The sketch
#
# **3 to 4 hours; 18 points by tests, and 4 for the written question.**
#
# Most methods forget the tokens that they evict. KVReviver adds them up, many tokens into one slot, and reads them back. If a quarter of the entries is the budget, and a tenth of it the sketch, as in the paper, there are 31 tokens for each slot of the sketch. Can any of them still be read? You will compute the answer, then measure it.
#
# ## The idea
#
# A *sketch* has r rows of b slots. A slot is as large as one token's key and value. An evicted token is added into one slot of every row. A *hash*, a function of the token's number, says which slot, so nobody has to store it.
#
# Many tokens share a slot. To separate them a little, each token is added with a sign, +1 or −1, from a second hash. To read a token, take its slot times its sign. The token itself comes out right, because sign · sign = 1. The other tokens in the slot, its *neighbours*, come out with random signs: noise. Three rows give three readings with different neighbours. The token's reading is their *median*, the middle one.
#
# **Example.** One row of two slots. Token J is in slot J mod 2; its sign is −1 if J is odd.
#
# | token | value | slot | sign | adds |
# |---|---|---|---|---|
# | 0 | 1 | 0 | + | 1 |
# | 1 | 2 | 1 | − | −2 |
# | 2 | 4 | 0 | + | 4 |
#
# Slot 0 holds 5, slot 1 holds −2. Token 1 is alone and reads −(−2) = 2: right. Tokens 0 and 2 share slot 0, and both read 5. Token 0 is off by 4, its neighbour's value; token 2 is off by 1.
#
# Now delete token 2: add −1 times what it added. Slot 0 holds 1, and token 0 reads 1. Sums are *linear*, so a sketch can take out what it took in.
#
# The paper signs values only; the key half of a slot is a plain sum. `SignedSketch` signs both.
#
# ## What you write
#
# | check | function | file | points |
# |---|---|---|---|
# | `hash` | `Sketch.number` | `methods/kv_reviver.py` | 2 |
# | `slots` | `Sketch.bucket` | `methods/kv_reviver.py` | 1 |
# | `insert` | `Sketch.insert` | `methods/kv_reviver.py` | 4 |
# | `median` | `Sketch.median` | `methods/kv_reviver.py` | 2 |
# | `variance` | `collision_variance` | `methods/theory/sketch_error.py` | 2 |
# | `load` | `load` | `methods/theory/sketch_error.py` | 1 |
# | `means` | `MeanSketch.means` | `methods/ours/kv_reviver_shrunk.py` | 2 |
# | `shrink` | `ShrunkSketch.centred` | `methods/ours/kv_reviver_shrunk.py` | 4 |
#
# **Read first:** KVReviver (Yuan et al., [arXiv 2512.17917](https://arxiv.org/abs/2512.17917)), the section on the sketch, Algorithms 1 and 2; the docstrings of the three files. Count sketches go back to Charikar, Chen and Farach-Colton (2002).
#
# ## How to check it
#
# The cell after each problem runs its public tests. If your copy also holds assignment 1, finish it first: tests and experiments call its functions. In grading, each problem's function runs with our solutions of the others, so a wrong function costs only its own problem. Python loops over rows are fine. Loops over tokens are slow, but pass (a few thousand tokens in ten seconds).
#
# Shapes: B texts, H key/value heads, n tokens, r rows of b slots (`self.rows` and `self.width`), D numbers per key and per value. The slots `self.x` are (B, H, r·b, 2D): row after row, and in each slot first the key, then the value. Token numbers J are (B, H, n), `torch.int64` or `torch.int32`, from 0 to 2²⁰ − 1, no number twice in a head. Texts and heads are independent. n is at least 1, except in problem 1. r is 1 or 3; in problems 1, 2 and 7 it is any number from 1 on. Floats have 64, 32 or 16 bits (float16, bfloat16). Do not change a tensor that you are given, except `self.x` in `insert`. Keep the signatures.

# %%
from course.command import checker

check = checker("sketch")

# %% [markdown]
# ## 1. `Sketch.number` (2 points, check `hash`)
#
# The hash. `coefficients` is (4, r), `torch.int64`, each at least 0 and below p = `PRIME` = 2³¹ − 1. For every token J and every row return
#
# $$c_0 J^3 + c_1 J^2 + c_2 J + c_3 \mod p,$$
#
# shape (B, H, n, r), `torch.int64`. $c_0$ of row i is `coefficients[0, i]`. n may be 0.
#
# The result must be right for all J below 2²⁰ and all coefficients. A 64-bit integer ends at 2⁶³ and overflows without an error. How large can a number on your way become? Mind that J may have 32 bits.
#
# Example: coefficients 1 2 3 4 and tokens 0 1 2 3 give 4 10 26 58.
#
# <details><summary>Hint</summary>The product of two numbers below 2³¹ fits. (xy + z) mod p = ((x mod p) y + z) mod p.</details>

# %%
check("hash")

# %% [markdown]
# ## 2. `Sketch.bucket` (1 point, check `slots`)
#
# Return the slots of tokens J, (B, H, n, r), `torch.int64`. In row i, counted from 0, token J is in slot number(J) mod b of that row. Rows lie one after the other in `self.x`, so return i·b + number(J) mod b. The coefficients are `self.bucket_by`.
#
# Example: number(J) = J in each of two rows, b = 5. Token 7 is in slots 2 and 7.

# %%
check("slots")

# %% [markdown]
# ## 3. `Sketch.insert` (4 points)
#
# Algorithm 1. `k` and `v` are (B, H, n, D), of the dtype of `self.x`. Add each token's key and value to its slot in *every* row, times its sign in that row, times `times`. `self.sign(J)` is given: (B, H, n, r, 2D), 1 or −1 for every number of key and value.
#
# `times` is a number, or a tensor (B, H, n, 1) with one factor per token: 1 adds, −1 deletes, 0 does nothing. No other factors occur. Return nothing. Change `self.x` in place or replace it; keep its shape and dtype.
#
# Sum 16-bit numbers in float32, including what the slot already holds, and round once, after all tokens of the call. In bfloat16 256 + 1 is 256, so a full slot would stop changing. Sum float64 in float64.
#
# Example: the table above. Values 1 2 4 of tokens 0 1 2 make the slots 5 and −2; the keys 1 2 4, unsigned, make 5 and 2.
#
# <details><summary>Hint 1</summary>Two tokens of a call may share a slot. <code>x[slots] += y</code> adds only one of them; <code>scatter_add_</code> adds all.</details>
# <details><summary>Hint 2</summary><code>expand_index(slot, x)</code> turns slots (B, H, n) into the index (B, H, n, 2D) for <code>scatter_add_(2, …)</code> and <code>gather(2, …)</code>. <code>torch.promote_types</code> finds the dtype of the sum.</details>

# %%
check("insert")

# %% [markdown]
# ## 4. `Sketch.median` (2 points)
#
# Algorithm 2. Read tokens J from slots `x`, (B, H, r·b, 2D), which need not be `self.x`. Write a generator: for each head, all heads of the first text first, yield its tokens' estimates, (n, 2D), in the dtype of `x`. Each row reads the token's slot times its sign in that row. With one row, that reading is the estimate. With three, their median is, number by number: the key's first number may come from row 0, its second from row 2.
#
# Example: three rows hold 7 1 5 for a token with the signs − + +. The readings are −7 1 5: yield 1.
#
# <details><summary>Hint</summary>First the signs, then the median. <code>median_of_three</code> stands below this function.</details>

# %%
check("median")

# %% [markdown]
# ## 5. `collision_variance` (2 points, check `variance`)
#
# How wrong is a reading? Take one number of one token. The sketch holds a tokens, with signs. Each neighbour's number has mean 0 and variance 1, independently. Each other token falls into the token's slot of a row with probability 1/b.
#
# With one row the error is the signed sum of the neighbours in the slot. With three, treat the three errors as independent normals, which is close if slots hold many tokens. The median of r normals of variance 1 has variance `MEDIAN[r]` (in the file): 1 for one row, 1 − √3/π ≈ 0.449 for three.
#
# Return the expected squared error, a `float`. a is any number from 1 on; `width` is b. A token alone has no error.
#
# Example: a = 9, b = 4. With one row the error is 2, with three 0.897.
#
# <details><summary>Hint</summary>How many other tokens are there, and how many of them are in the slot on average?</details>

# %%
check("variance")

# %% [markdown]
# ## 6. `load` (1 point)
#
# How many tokens must a slot hold? A text has n entries. There is memory for βn of them (`budget` is β); positions and scores cost nothing here. N = vβn of these are slots of the sketch, in all rows together (`vague` is v). The others hold exact tokens. The sketch takes all tokens that are not exact: a tokens. Return the load a/N, a `float`; it does not depend on n. β and v are above 0 and at most 1.
#
# The load counts tokens per slot of memory. Every token is in every row, so a slot holds r times as many: a/b = r·a/N.
#
# Example: β = ¼, v = 1. No token is exact: all n share n/4 slots, and the load is 4.
#
# Convince yourself: for any v the load is at least 1/β. Compare with the error of problem 5.
#
# <details><summary>Hint</summary>How many tokens are exact? Subtract from n, and divide.</details>

# %%
check("load")

# %% [markdown]
# ## 7. `MeanSketch.means` (2 points)
#
# The paper's keys have no signs. A slot of 300 keys holds their sum, 300 times their mean. Dividing by the count costs no memory, because the reader knows all tokens in the sketch.
#
# `J` (B, H, a) holds all tokens in the sketch. Return `self.x`, (B, H, r·b, 2D), with every slot divided by the number of its tokens in that text and head. Divide values as well, though they are signed sums. Leave a slot without tokens as it is. Return the dtype of `self.x`; do not change `self.x`. Count and divide in float32 at least, because 16 bits cannot count large slots. For 16-bit numbers the last digit does not matter.
#
# Example: slots 6 and 5. Tokens 0 and 2 share the first, token 1 has the second: return 3 and 5.

# %%
check("means")

# %% [markdown]
# ## 8. `ShrunkSketch.centred` (4 points, check `shrink`)
#
# Our repair. Noise grows with the neighbours' size, and part of that is the mean that all tokens share. So store the mean exactly and use the sketch for the rest only. Where the sketch is mostly noise, trust it less. Read
#
# $$\text{mean} + \text{factor} \cdot \text{median of the slots without the mean}, \qquad \text{factor} = \frac{1}{1 + \text{noise}}.$$
#
# The noise is the `collision_variance` of problem 5. Write its formula out here with r = `self.rows`, b = `self.width`, a from the shape of `bucket`, and `MEDIAN`, which stands in this file; importing the function would make a circle. This is a Wiener filter: it minimizes the expected squared error for a signal of variance 1. Here keys are signed like values.
#
# `bucket` and `sign` are (B, H, a, r), `torch.int64`: the slots of all a tokens in the sketch (numbered as by `Sketch.bucket`, row i from i·b on) and their signs, ±1. `self.sum`, (B, H, 2D), is the sum of these tokens' keys and values without signs, in float32 at least. Return three things:
#
# 1. the slots without the mean, (B, H, r·b, 2D). Each token was added with its sign, so it put sign · mean into its slot. Subtract that, for all tokens of a slot, in every row. Do not change `self.x`.
# 2. the mean, (B, H, 1, 2D).
# 3. the factor, a `float`.
#
# Both tensors have the dtype of `self.x`. Divide for the mean in the dtype of `self.sum`. Subtract in either dtype; the tests allow for the rounding of 16 bits.
#
# Example: one row of two slots, 7 and −1; three tokens with the sum 6, so the mean is 2. The first slot has the signs + +, the second −. Return 7 − 4 = 3 and −1 + 2 = 1. a = 3 and b = 2 make the noise 1 and the factor ½.
#
# <details><summary>Hint 1</summary>How often does a slot contain the mean? As often as the sum of its tokens' signs says, which may be 0 or negative.</details>
# <details><summary>Hint 2</summary><code>flatten(2)</code> makes one list of the tokens of all rows.</details>

# %%
check("shrink")

# %% [markdown]
# ## 9. Predict, then measure (written, 4 points, graded by hand)
#
# The first two cells put the keys and values of 512 tokens, from all layers of the small decoder, into three rows of slots. They read them back in four ways and print the squared error in units of the tokens' variance. Forgetting all tokens and remembering only their mean has the error **1.00**. *theory* is your `collision_variance`.
#
# **Before you run the cells, write down** what you expect, and why:
#
# 1. From which load a/N on is the signed sketch worse than the mean alone, by your `collision_variance`? Do keys exceed this theory, and do values?
# 2. The paper gives a tenth of the budget to the sketch. Let the budget be a quarter of the entries. What is the load (problem 6), and which error does the theory predict?
# 3. The load doubles, from 10.67 to 21.33. By how much does the error of unsigned keys (*paper*) grow, and by how much that of signed keys?
# 4. Which of the four is built never to be above 1 on average, for keys and values? (With one row this holds exactly, with three nearly.) Which error do you expect of it at the load of question 2? In the last cell: does it bring the predictions nearer to the full cache's than *forgets* does, which has no sketch, and does it find more labels?
#
# Your prediction:
#
#

# %%
import torch
from methods.kv_reviver import Sketch
from methods.ours.kv_reviver_shrunk import MeanSketch, ShrunkSketch, SignedSketch
from methods.theory.sketch_error import collision_variance, relative_error
from nanollm import TINY, tokenizer
from nanollm import checkpoint
from nanollm.cache import make_cache
from lab.benchmark import text_windows
from lab.replay import Recorder, record
from lab.tasks import Tasks

torch.set_grad_enabled(False)
model, tasks = checkpoint.from_hf(TINY), Tasks(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
recording = record(model, make_cache(model, store=Recorder), text_windows(tasks, 1, 512))
k, v = (torch.cat([getattr(x, name) for x in recording]) for name in "kv")  # (layers, H, 512, D)
J = torch.arange(512).expand(*k.shape[:2], -1)

# %%
kinds = {"paper": Sketch, "mean": MeanSketch, "signed": SignedSketch, "shrunk": ShrunkSketch}
print("  a/N  theory" + "".join(f"{name:>18}" for name in kinds) + "    (keys, values)")
for N in (768, 384, 192, 96, 48, 24, 15):
    row = f"{512 / N:5.2f}{collision_variance(512, N // 3, 3):8.2f}"
    for Kind in kinds.values():
        sketch = Kind(k, 3, N // 3, seed=0)
        sketch.insert(J, k, v)
        row += "{:10.2f}{:8.2f}".format(*(relative_error(*x) for x in zip(sketch.query(J), (k, v))))
    print(row)

# %% [markdown]
# The last cell compares caches that have the bytes of a quarter of the entries. *forgets* is KVReviver without a sketch: its bytes hold exact tokens, and the scores of all. *paper* has three rows, *shrunk* one. *h2o*, for comparison, keeps a quarter of the entries, those with the most attention and the newest; its sums take bytes beside. *KL* measures how far predictions move from the full cache's, in nats, mean over 32 texts: lower is better. *labels* is the fraction of 48 few-shot prompts answered. In brackets: the difference to *forgets* ± its standard error, taken text by text. Believe a difference of more than two standard errors.

# %%
from methods.baselines.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.ours.kv_reviver_shrunk import ShrunkReviver
from lab.benchmark import Benchmark, replayed_or_read, standard_error
from lab.continuation import continuation
from lab.retrieval import maker, retrieve

prompts = tasks.batch("few_shot", 0, 48, 512)
bench = Benchmark.read(model, dict(labels=prompts), text_windows(tasks, 32, 512))
forgets = None
for name, Method, options in (("forgets", KVReviver, dict(vague=0)), ("h2o", H2O, {}),
                            ("paper", KVReviver, {}), ("shrunk", ShrunkReviver, {})):
    make = maker(model, Method, 0.25, **options)
    kl = replayed_or_read(continuation, model, bench.full, make, bench.full.recording)["kl"]
    right = replayed_or_read(retrieve, model, prompts, make, bench.recordings["labels"])["aware"]
    forgets = forgets or (kl, right)
    gains = kl - forgets[0], right - forgets[1]
    print(f"{name:9}", *(
        f"{what:>8} {x.mean():.3f} ({gain.mean():+.3f} ±{standard_error(gain):.3f})"
        for what, x, gain in zip(("KL", "labels"), (kl, right), gains)))

# %% [markdown]
# What you measured, where your prediction was wrong, and why, in at most twelve sentences:
#
#
