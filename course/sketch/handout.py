# %% [markdown]
# # 6. The sketch
#
# **3 to 4 hours; 18 points by tests, and 4 for the written question at the end.** You write eight functions: four of `methods/count_sketch.py`, two of `methods/theory/sketch_error.py`, one each of `methods/kv_reviver_mean.py` and `methods/ours/kv_reviver_shrunk.py`.
#
# **Read before:** KVReviver (Yuan et al., preprint), the section on the sketch, Algorithms 1 and 2. Then the docstrings of these four files. If you have met count sketches before (Charikar, Chen and Farach-Colton 2002), you know half of it.
#
# ## The idea
#
# Most methods forget the tokens that they evict. KVReviver adds them up. A *sketch* has r rows of b slots. A slot is as large as one token's key and value. A token that is evicted is added into one slot of every row. Which slot is told by a *hash*, a function of the token's number, so nobody has to store it.
#
# Many tokens share a slot. To tell them apart a little, each token is added with a sign, +1 or −1, which a second hash tells. Whoever reads a token takes its slot times its sign. The token itself then comes out right, since sign · sign = 1. The others in its slot, its *fellows*, come out with random signs: they are noise. Three rows give three readings with different fellows. Their *median*, the middle one, is what is read.
#
# How much noise is that? You will work it out, and then find the answer of the paper's authors and ours.
#
# ## On paper
#
# Three tokens, numbers 0, 1 and 2, with the values 1, 2 and 4. One row of two slots. Let the hash be the token's number itself: token J is in slot J mod 2, and its sign is −1 if J is odd.
#
# | token | value | slot | sign | adds |
# |---|---|---|---|---|
# | 0 | 1 | 0 | + | 1 |
# | 1 | 2 | 1 | − | −2 |
# | 2 | 4 | 0 | + | 4 |
#
# Slot 0 holds 5 and slot 1 holds −2. Token 1 is alone: it reads −(−2) = 2, which is right. Tokens 0 and 2 share slot 0, and both read 5. For 0 that is off by 4, the value of its fellow, and for 2 by 1.
#
# Now delete token 2: add −1 times what it added. Slot 0 holds 1, and token 0 reads 1. Adding is *linear*, so a sketch can take out what was put in.
#
# The paper's sketch signs values only. Keys have no signs: their slots hold plain sums. `SignedSketch` signs both.
#
# ## How it is graded
#
# Shapes: B texts, H key/value heads, n tokens, r rows of b slots (`self.rows` and `self.width`), D numbers in a key and as many in a value. The slots are `self.x`, (B, H, r·b, 2D): row after row, and in each slot first the key, then the value. Token numbers J are (B, H, n), whole numbers of `torch.int64` or `torch.int32`, at least 0 and below 2²⁰. No head has a token twice. Every text and head has tokens of its own: nothing of one may reach another. n is at least 1, but in problem 1.
#
# r is 1 or 3; in problems 1, 2 and 7 any number from 1 on. Numbers are float64, float32, float16 or bfloat16. Do not change a tensor that you are given, but `self.x` in `insert`. Signatures stay. Loops in Python over rows are right; over tokens they are slow, and no test needs speed (a few thousand tokens in ten seconds).
#
# Each problem is graded with all others right: `insert` finds our `bucket` and our `sign`.

# %%
from course.command import checker

check = checker("sketch")

# %% [markdown]
# ## 1. `Sketch.number` (2 points, check `hash`)
#
# The hash. `coefficients` is (4, r), `torch.int64`, each at least 0 and below p = `PRIME` = 2³¹ − 1. Return for every token J and every row the number
#
# $$c_0 J^3 + c_1 J^2 + c_2 J + c_3 \mod p,$$
#
# shape (B, H, n, r), `torch.int64`. $c_0$ of row i is `coefficients[0, i]`. n may be 0.
#
# It must be right for all J below 2²⁰ and all coefficients. A whole number of 64 bits ends at 2⁶³, and what is beyond comes out wrong without an error. What is the largest number on your way? And J may have 32 bits.
#
# <details><summary>Hint</summary>Of the product of two numbers below 2³¹ nothing is lost. (xy + z) mod p = ((x mod p) y + z) mod p.</details>

# %%
check("hash")

# %% [markdown]
# ## 2. `Sketch.bucket` (1 point, check `slots`)
#
# The slots of tokens J, (B, H, n, r), `torch.int64`. In row i, counted from 0, token J is in slot number(J) mod b of that row. Rows lie one after the other in `self.x`, so this is i·b + number(J) mod b. The coefficients are `self.bucket_by`.

# %%
check("slots")

# %% [markdown]
# ## 3. `Sketch.insert` (4 points)
#
# Algorithm 1. `k` and `v` are (B, H, n, D), of the dtype of `self.x`. Add each token's key and value into its slot of *every* row, into what is there already, times the token's sign in that row, and times `times`. `self.sign(J)` is there for you: (B, H, n, r, 2D), 1 or −1 for every number of the key and the value.
#
# `times` is a number, or a tensor (B, H, n, 1) with a factor for every token: 1 adds, −1 deletes, 0 does nothing. No other factors come. `insert` returns nothing. It changes `self.x`, in place or by a new tensor; shape and dtype stay.
#
# Sums of 16-bit numbers are taken in float32, and rounded once, when all tokens of the call are in. The sum includes what was in the slot already. In bfloat16 256 + 1 is 256: a slot that is full would not change any more. Numbers of float64 are added in float64.
#
# <details><summary>Hint 1</summary>Two tokens of one call may share a slot. <code>x[slots] += y</code> then adds one of them. <code>scatter_add_</code> adds all.</details>
# <details><summary>Hint 2</summary><code>expand_index(slot, x)</code> makes of slots (B, H, n) the index (B, H, n, 2D) that <code>scatter_add_(2, …)</code> and <code>gather(2, …)</code> want. <code>torch.promote_types</code> finds the dtype of the sum.</details>

# %%
check("insert")

# %% [markdown]
# ## 4. `Sketch.median` (2 points)
#
# Algorithm 2. What tokens J read from slots `x` (B, H, r·b, 2D), which need not be `self.x`: shape (B, H, n, 2D), the dtype of `x`. Each row reads the token's slot, times its sign in that row. With one row that is it. With three it is the median of the three, number by number: the key's first number may come from row 0, and its second from row 2.
#
# <details><summary>Hint</summary>First the signs, then the median. A median of three is the second of the sorted three.</details>

# %%
check("median")

# %% [markdown]
# ## 5. `collision_variance` (2 points, check `variance`, `methods/theory/sketch_error.py`)
#
# How far off is what is read? Take one number of one token. The sketch holds a tokens. Signs are on. Each fellow's number has mean 0 and variance 1, and they are independent. Each fellow falls into the token's slot of a row with probability 1/b.
#
# With one row, the error is the sum of those fellows in the slot, with signs. With three rows, take the three errors for independent normals, which is close if slots hold many. The median of r normals of variance 1 has variance `MEDIAN[r]`, which stands in the file: 1 for one row and 1 − √3/π ≈ 0.449 for three.
#
# Return the expected squared error, a `float`. a may be any number from 1 on, and `width` is b. A token alone has no error.
#
# <details><summary>Hint</summary>How many fellows does a token have, and how many of them are in its slot on average?</details>

# %%
check("variance")

# %% [markdown]
# ## 6. `load` (1 point, `methods/theory/sketch_error.py`)
#
# How many tokens must a slot hold? A text has n tokens, each an entry. `budget` is a share β of all entries, `vague` a share v of these; positions and scores cost nothing here. So there is memory for βn entries. N = vβn of them are slots of the sketch, in all rows together. Each other one is an exact token. All tokens that are not exact are in the sketch: a tokens. Return a/N, which does not depend on n, as a `float`. β and v are above 0 and at most 1.
#
# The load a/N is tokens per slot of memory. As every token is in every row, a slot holds r times as many, a/b = r·a/N.
#
# Then convince yourself: whatever v is, the load is at least 1/β. At a quarter of the memory every slot stands for four tokens or more. Compare with the error of problem 5.
#
# <details><summary>Hint</summary>How many tokens are exact? Subtract from n, and divide.</details>

# %%
check("load")

# %% [markdown]
# ## 7. `MeanSketch.means` (2 points, `methods/kv_reviver_mean.py`)
#
# Keys have no signs in the paper. A slot of 300 keys holds their sum, 300 times as long as a key. Dividing by how many are in there costs no memory: whoever reads knows all tokens that are in.
#
# `J` (B, H, a) are all tokens that are in. Return `self.x` (B, H, r·b, 2D) with every slot divided by the number of tokens of J in it, in that text and head. Values, though they are signed sums, are divided as well. A slot without tokens stays as it is. The dtype is that of `self.x`, and `self.x` itself does not change. Count and divide in float32 at least: a count in 16 bits is wrong for large slots. For 16-bit numbers a last digit does not matter.

# %%
check("means")

# %% [markdown]
# ## 8. `ShrunkSketch.centred` (4 points, check `shrink`, `methods/ours/kv_reviver_shrunk.py`)
#
# Our repair. Noise is the fellows' size, and most of that size is the mean that all tokens share. So keep the mean exactly, and let the sketch speak of the rest only. And where it is mostly noise, believe it less: read
#
# $$\text{mean} + \text{factor} \cdot \text{median of the slots without the mean}, \qquad \text{factor} = \frac{1}{1 + \text{noise}},$$
#
# where noise is the `collision_variance` of problem 5 with r = `self.rows` (`MEDIAN` stands in this file). Write the formula out here, with b = `self.width`, a from the shape of `bucket`, and `MEDIAN`; importing `collision_variance` would go round in a circle. This is a Wiener filter: the signal has variance 1, the noise has that of the fellows, and this factor makes the expected squared error least.
#
# `bucket` and `sign` are (B, H, a, r), `torch.int64`: the slots of all a tokens that are in (as `Sketch.bucket` numbers them, row i from i·b on) and their signs, ±1. `self.sum` (B, H, 2D) is the sum of all these tokens' keys and values, without signs, in float32 at least. Return three things:
#
# 1. the slots without the mean, (B, H, r·b, 2D). Every token was added with its sign, so it put sign · mean into its slot. Take that off, for all tokens of the slot, in every row. `self.x` itself does not change.
# 2. the mean, (B, H, 1, 2D).
# 3. the factor, a `float`.
#
# Both tensors have the dtype of `self.x`. Divide for the mean in the dtype of `self.sum`. Take it off in that dtype or in that of `self.x`: for 16-bit numbers a last digit does not matter. Here keys are signed as values are.
#
# <details><summary>Hint 1</summary>How often is the mean in a slot? The sum of the signs of its tokens; it may be 0 or negative.</details>
# <details><summary>Hint 2</summary><code>flatten(2)</code> makes one list of the tokens of all rows.</details>

# %%
check("shrink")

# %% [markdown]
# ## 9. Predict, then measure (written, 4 points, not graded by the tests)
#
# The cell below puts 512 tokens of a text, keys and values of all layers of the small decoder, into three rows of slots, and reads them back in four ways. It prints the squared error in units of the tokens' variance. Whoever forgets all tokens and remembers only their mean has the error **1.00**. *theory* is your `collision_variance`.
#
# **First write down** what you expect, with a reason, before you run it:
#
# 1. From which load a/N on is the signed sketch worse than the mean alone, by your `collision_variance`? Do you expect keys or values to be worse than this theory?
# 2. With a quarter of the entries and a tenth of them for the sketch, as in the paper: what is the load (problem 6), and what does the theory say of the error?
# 3. How does the error of unsigned keys (*paper*) grow with the load, compared with that of signed ones? Twice the load: how much more error?
# 4. Which of the four is never above 1 on average, by its construction? What is it worth at the load of question 2? And in the decoder: do its predictions come nearer to the full cache's than with all bytes spent on exact tokens, and does it find more labels? (The last cell tells.)
#
# Your prediction:
#
#

# %%
import torch
from methods.count_sketch import Sketch
from methods.kv_reviver_mean import MeanSketch
from methods.ours.kv_reviver_shrunk import ShrunkSketch, SignedSketch
from methods.theory.sketch_error import collision_variance, relative_error
from nanollm import TINY, tokenizer
from nanollm.hf import checkpoint
from nanollm.measure import evaluate
from nanollm.cache import make_cache
from nanollm.measure.tasks import Tasks
from nanollm.measure.replay import Recorder, record

torch.set_grad_enabled(False)
model, tasks = checkpoint.from_hf(TINY), Tasks(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
recording = record(model, make_cache(model, Recorder), evaluate.text_windows(tasks, 1, 512))
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
# The same as caches, in under a minute: all have the bytes of a quarter of the entries. *forgets* is KVReviver without a sketch: all bytes are for exact tokens. *KL* is how far predictions move from the full cache's, in nats, mean over 32 texts: lower is better. *labels* is the share of 48 few-shot prompts that are answered. Behind both stands the difference to *forgets* with its standard error, taken text by text. Believe a difference of more than two standard errors.

# %%
from methods.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.ours.kv_reviver_shrunk import ShrunkReviver
from nanollm.measure.benchmark import Benchmark, replayed_or_read
from nanollm.measure.evaluate import continuation, maker, retrieve, standard_error

prompts = tasks.batch("few_shot", 0, 48, 512)
bench = Benchmark.read(model, dict(labels=prompts), evaluate.text_windows(tasks, 32, 512))
forgets = None
for name, Method, options in (("forgets", KVReviver, dict(vague=0)), ("h2o", H2O, {}),
                            ("paper", KVReviver, {}), ("shrunk", ShrunkReviver, {})):
    make = maker(model, Method, 0.25, **options)
    kl = replayed_or_read(continuation, model, bench.full, make, bench.full.recording)["kl"]
    right = replayed_or_read(retrieve, model, prompts, make, bench.recordings["labels"])["aware"]
    forgets = forgets or (kl, right)
    gains = kl - forgets[0], right - forgets[1]
    print(f"{name:9}", *(f"{what:>8} {x.mean():.3f} ({gain.mean():+.3f} ±{standard_error(gain):.3f})"
                         for what, x, gain in zip(("KL", "labels"), (kl, right), gains)))

# %% [markdown]
# What you measured, and where your prediction was wrong, and why (at most twelve sentences):
#
#
