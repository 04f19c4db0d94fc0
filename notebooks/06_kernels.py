# %% [markdown]
# # Kernels: from the loop to the tile
#
# **Question.** A quarter of the cache should take a quarter of the time. Why does it not in PyTorch, and what does a kernel change?
#
# To decode one token, attention reads every cached key and value once. PyTorch loses much of what compression saves: it wants heads of unlike length padded (AdaKV), and writes out weights of which only sums are needed (H2O). A *kernel* is a program that does one job on the GPU without such detours. `kernels/` has kernels for two jobs, in [Triton](https://triton-lang.org). This notebook writes one from the loop up.
#
# Everything runs on a CPU: Triton's interpreter executes kernels with NumPy. It tells right from wrong in 32 bits and in float16, but not fast from slow; section 7 has times of a GPU.
#
# **Read before:** notebook 00; nothing about GPUs. **Code beside it:** `kernels/decode_attention.py`. **Time:** half an hour to read, a minute to run.

# %%
import os; os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported
import sys; sys.path[:0] = [".", ".."]  # the repository, from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
import math
import timeit
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

# %%
from kernels.decode_attention import Segment, decode_attention
import triton
import triton.language as tl
from methods.baselines.ada_kv import AdaKV
from methods.baselines.snap_kv import SnapKV
from methods.ours.kv_reviver_shrunk import SignedSketch
from nanollm import TINY, checkpoint, tokenizer
from nanollm.cache import Method, compress, make_cache
from lab import render_results
from lab.benchmark import text_windows
from lab.replay import feed
from lab.tasks import Tasks

# %%
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # so that times are those of one processor core
torch.manual_seed(0)
n, D = 1000, 64  # slots, head dim
q, k, v = 3 * torch.randn(D), torch.randn(n, D), torch.randn(n, D)
expected = F.scaled_dot_product_attention(q[None], k, v)[0]

# %% [markdown]
# ## Where a step's time goes
#
# The decoder *built* has read eight texts, and each gets one more token: a step. Three parts share its time: products with the weights, attention to the cache, and the rest (norms, positions, Python).

# %%
def clocked(run, seconds):
    """Return a function that does the same, and notes the seconds of each call in a list."""
    def timed(*arguments):
        began = timeit.default_timer()
        result = run(*arguments)
        seconds.append(timeit.default_timer() - began)
        return result
    return timed


def step(model, tokens, caches):
    """Milliseconds of a step: weights, attention to the cache, the rest."""
    weights, cache = [], []
    parts = [(x, "forward", weights) for x in model.modules() if isinstance(x, torch.nn.Linear)]
    for part, name, seconds in parts + [(layer, "attend", cache) for layer in caches]:
        setattr(part, name, clocked(getattr(type(part), name).__get__(part), seconds))
    began = timeit.default_timer()
    model(tokens, caches)
    rest = timeit.default_timer() - began - sum(weights) - sum(cache)
    return torch.tensor([sum(weights), sum(cache), rest]) * 1e3

# %%
model, rows, seeded = checkpoint.from_hf(TINY), {}, torch.Generator().manual_seed(0)
for Kind, T, share in ((Method, 256, 1), (Method, 1024, 1), (Method, 2900, 1),
                       (SnapKV, 2900, 1 / 4), (AdaKV, 2900, 1 / 4)):
    tokens = torch.randint(2000, (8, T), generator=seeded)
    caches = make_cache(model, Kind, **({} if share == 1 else dict(budget=round(share * T))))
    model(tokens, caches)
    compress(model, tokens, caches)
    times = torch.stack([step(model, tokens[:, :1], caches) for _ in range(30)])
    name = "the full cache" if share == 1 else f"{Kind.__name__}, a quarter"
    rows[f"{T:,} tokens, {name}"] = times.median(0).values
figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
left = torch.zeros(len(rows))
colours = {"weights": "#0072b2", "cache": "#d55e00", "rest": "0.7"}
for (part, colour), ms in zip(colours.items(), zip(*rows.values())):
    axis.barh([*rows], torch.stack(ms), left=left, label=part, color=colour)
    left = left + torch.stack(ms)
axis.set(xlabel="ms a step, eight texts, one core")
axis.invert_yaxis()
axis.legend();

# %% [markdown]
# The weights and the rest do the same work for every cache; their bars differ by the machine's noise. The cache's part grows with its length, and after 2,900 tokens it is most of the step. A quarter of the entries (SnapKV) takes a quarter to a third of that part. AdaKV keeps as many entries, but its heads differ in length, and plain PyTorch reads them one by one: part of what eviction saves is lost. A kernel can read all heads at once.
#
# ## 1. The loop
#
# One query attends to $n$ slots: $y = \sum_n p_n v_n$ with $p = \mathrm{softmax}(q\cdot k_n/\sqrt D)$. As written, softmax needs all scores before it can weigh the first value: two passes over the cache. *Online softmax* ([Milakov and Gimelshein](https://arxiv.org/abs/1805.02867)) needs one pass. It carries the largest score so far $m$, the total $\ell=\sum e^{s-m}$ and the sum $\sum e^{s-m}v$. When a larger score appears, it scales both sums down by $e^{m_{old}-m_{new}}$.

# %%
m, total, y = -math.inf, 0.0, torch.zeros(D)
for i in range(n):
    s = (q @ k[i]).item() / math.sqrt(D)
    new = max(m, s)
    p, old = math.exp(s - new), math.exp(m - new)
    total, y = total * old + p, y * old + p * v[i]
    m = new
print(f"one slot at a time: off by {(y / total - expected).abs().max():.1e} at most")

# %% [markdown]
# ## 2. The tile
#
# A GPU works on blocks of numbers; our products on its tensor cores take at least 16 × 16. So take 64 slots in one step, with a maximum and a sum over the block. The last tile is shorter. In the kernel of section 4 its surplus slots get the score $-\infty$, and so the weight 0.

# %%
def tiles(q, k, v, first, end, block=64):
    """The slots first … end − 1, a block at a time: m, Σ exp(s − m), Σ exp(s − m) v."""
    m, total, y = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(D)
    for start in range(first, end, block):
        part = slice(start, min(start + block, end))
        s = k[part] @ q / math.sqrt(D)
        new = torch.maximum(m, s.max())
        p, old = (s - new).exp(), (m - new).exp()
        total, y = total * old + p.sum(), y * old + p @ v[part]
        m = new
    return m, total, y


m, total, y = tiles(q, k, v, 0, n)
print(f"64 slots at a time: off by {(y / total - expected).abs().max():.1e}")

# %% [markdown]
# ## 3. The split
#
# With one sequence and 8 key/value heads, one program a head would use 8 of an H100's 132 processors (SMs). But a stretch of slots is fully described by $(m, \ell, y)$. Two stretches can be added in any order: scale both to the larger $m$. So the slots are split among many programs, and a second kernel adds their results ([flash-decoding](https://pytorch.org/blog/flash-decoding/)). A head may therefore have any number of slots, and they may lie in two places.

# %%
parts = [tiles(q, k, v, first, min(first + 300, n)) for first in range(0, n, 300)]
m, total, y = (torch.stack(x) for x in zip(*parts))
weight = (m - m.max()).exp()
print(f"{len(parts)} parts: off by {((weight @ y) / (weight @ total) - expected).abs().max():.1e}")

# %% [markdown]
# ## 4. The kernel
#
# The same in Triton. A *program* is one iteration of the outer loop; `tl.program_id` is its number. All programs run at once or in any order. A block of addresses loads a block of numbers. `mask` says which addresses exist, and `other` replaces the missing numbers. Everything between `load` and `store` stays in the registers and the shared memory of the SM. Names: `p_` is a pointer, `b_` a block of numbers, `o_` a block of offsets.

# %%
@triton.jit
def attend(p_q, p_k, p_v, p_m, p_total, p_y, scale, n, share, D: tl.constexpr, BLOCK: tl.constexpr):
    part, o_n, o_d = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, D)
    b_q = tl.load(p_q + o_d)
    m, total, b_acc = -3e38, 0.0, tl.zeros((D,), tl.float32)  # −3e38: see exercise 1
    end = tl.minimum(n, (part + 1) * share)
    for first in range(part * share, end, BLOCK):
        here = first + o_n < end
        at = (first + o_n)[:, None] * D + o_d  # (slots, D): row after row
        b_k = tl.load(p_k + at, mask=here[:, None], other=0.0)
        b_s = tl.where(here, tl.sum(b_k * b_q, 1) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(b_s, 0))
        b_p, old = tl.exp(b_s - new), tl.exp(m - new)
        b_v = tl.load(p_v + at, mask=here[:, None], other=0.0)
        total, m = total * old + tl.sum(b_p, 0), new
        b_acc = b_acc * old + tl.sum(b_p[:, None] * b_v, 0)
    tl.store(p_m + part, m)
    tl.store(p_total + part, total)
    tl.store(p_y + part * D + o_d, b_acc)


# %%
def run(k, v, n, share=256):
    parts = -(-n // share)
    m, total = torch.full((2, parts), math.nan)  # poisoned
    y = torch.full((parts, D), math.nan)
    attend[parts,](q, k, v, m, total, y, D ** -0.5, n, share, D, 64)
    weight = (m - m.max()).exp()
    return (weight @ y) / (weight @ total)


print(f"Triton, {-(-n // 256)} programs: off by {(run(k, v, n) - expected).abs().max():.1e}")

# %% [markdown]
# The kernel in `kernels/decode_attention.py` does more. All query heads of a group are rows of one tile, so a key is read once for the group and the tensor cores multiply (`tl.dot`). Each head has its own start and length. A bias may be added to a slot's score, and −∞ hides the slot. The sums of the weights can be kept.
#
# How do you know that the kernel is right? Its output is full of NaN before it runs, so anything left out shows. The memory around the slots is NaN as well, so a mask that is off by one shows too. `tests/kernels` does both, at lengths such as 1, 17 and 33.

# %%
storage = torch.full((2, n + 24, D), math.nan)  # the slots that are there, and room to spare
storage[:, :n] = torch.stack((k, v))
print(f"{n} slots in a buffer of {n + 24}: off by {(run(*storage, n) - expected).abs().max():.1e}")
print("the same with n one too large:", run(*storage, n + 1)[:3])

# %% [markdown]
# ## 5. Heads of unlike length
#
# AdaKV divides a layer's budget among its heads, so their lengths differ. A layer's store, `PackedSlots`, keeps the heads one after the other. PyTorch's attention wants a rectangle. Without a kernel, the store takes two small products for each head. The alternative is to copy a layer into a rectangle as long as the longest head of all texts. How many slots are that, for four real texts?

# %%
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
text = text_windows(Tasks(encoding, "test"), 4, 512)
caches = make_cache(model, AdaKV, budget=128)
feed(model, text, caches)
compress(model, text, caches)
counts = torch.stack([cache.counts for cache in caches], 1)  # (B, layers, heads)
padded = counts.amax((0, 2))  # a layer of the whole batch is one rectangle

# %%
figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
first, heads = counts[0].flatten(), counts.shape[2]
axis.bar(range(len(first)), first, color="0.4", label="slots of a head, first text")
axis.step([i * heads - 0.5 for i in range(len(padded) + 1)], [*padded, padded[-1]], "k--",
          where="post", label="the longest head of four texts")
axis.set_xticks([heads * (i + 0.5) - 0.5 for i in range(len(padded))],
                [f"heads of\nlayer {i}" for i in range(len(padded))])
axis.set(ylabel="slots", ylim=(0, 1.4 * padded.max()))
axis.legend(fontsize=8)
padding = padded.sum() * counts[:, 0].numel(), counts.amax(2).sum() * heads
print(f"slots held: {counts.sum()}; padded {padding[0]}, {padding[0] / counts.sum():.2f} times "
      f"as many; each text by itself {padding[1] / counts.sum():.2f}")

# %% [markdown]
# Attention over a padded copy reads that many slots, after it has read and written them once. The kernel reads what is there:

# %%
cache = caches[1]
B, H = cache.counts.shape
G, d = model.config.n_heads // H, cache.k.shape[-1]
start = cache.counts.flatten().cumsum(0) - cache.counts.flatten()
packed = Segment(cache.packed["k"], cache.packed["v"], start, cache.counts.flatten().int(),
                 cache.longest)
queries = torch.randn(B, H, G, d)
y, (sums,) = decode_attention(queries, [packed], sums=True)
seen = (cache.pos < 512).unsqueeze(2)
by_pytorch = F.scaled_dot_product_attention(queries, cache.k, cache.v, seen.expand(-1, -1, G, -1))
print(f"off by {(y - by_pytorch).abs().max():.1e}; the weights of each head's slots "
      f"add up to its {G} queries: {sums.sum() / (B * H):.4f}")

# %% [markdown]
# `sums` has a number for each slot: the sum of its weights over the queries of the group. H2O and Scissorhands need these numbers. On a GPU, with a model in 16 bits, stores and methods choose between the kernels and plain code (`nanollm/kernel_switch.py`). Elsewhere the plain code runs.
#
# ## 6. The fastest kernel is the one that you do not need
#
# KVReviver reads *every* evicted token back before each attention. It gathers three slots of its sketch, takes the median of each number, and attends to the result. Each token costs $3 \cdot 2D$ numbers.
#
# With one row there is no median, and reading back is linear. All tokens of a slot have the same score up to their signs, $\hat s_J = \pm\, q\cdot S_{h(J)}$. The values add up as $\sum_J \pm p_J S_{h(J)} = \sum_{slots} (\sum_{J \in slot} \pm p_J)\, S$. So attend to the *slots*, give each token its score, and add up the weights of each slot. That takes two numbers a token in place of $2D$, and nothing is approximated.

# %%
milliseconds = lambda run: 1e3 * min(timeit.repeat(run, number=1, repeat=5))
print("tokens in the sketch   by reading back      by slots   ratio    difference")
for tokens in (1024, 4096, 16384):
    sketch = SignedSketch(torch.zeros(1, 2, 1, 64), 1, tokens // 100, 0)
    J = torch.arange(tokens).expand(1, 2, -1)
    sketch.insert(J, *torch.randn(2, 1, 2, tokens, 64))
    sketch.tokens, few, one = tokens, torch.randn(2, 1, 2, 64, 64), torch.randn(1, 2, 4, 64)

    def read_back():
        keys, values = (torch.cat(x, 2) for x in zip(few, sketch.query(J)))
        p = (one @ keys.mT / 8).softmax(-1)  # with probabilities, which the method wants
        return p @ values

    slow = milliseconds(read_back)
    fast = milliseconds(lambda: sketch.attend(one, *few, J))
    off = (read_back() - sketch.attend(one, *few, J)[0]).norm() / read_back().norm()
    print(f"{tokens:20} {slow:14.2f} ms {fast:10.2f} ms {slow / fast:7.1f} {off:13.1e}")

# %% [markdown]
# This needs no kernel. `kv_reviver_shrunk`, which has one row, attends to slots for each decoded token, on every machine. KVReviver as printed has three rows.

# %% [markdown]
# ## 7. The best that a GPU can do
#
# A kernel must move its inputs and outputs through memory once, and do its multiplications. An H100 moves 3.35 TB a second, and its tensor cores do 989 · 10¹² operations in 16 bits. The slower of the two decides. The cell counts both for one token in one key/value head of an 8-billion Llama: 4 query heads a group, head dim 128, 16 bits, 32 queries in the observation window.

# %%
G, d, w, n = 4, 128, 32, 16_384  # group, head dim, window, tokens
jobs = {"decode_attention": (4 * G * d, 4 * d),  # operations; bytes of a key and a value
        "window_scores": (4 * G * w * d, 4 * d + 4 * G)}  # two kernels read keys; a score a head
moves, works = 3.35e12, 989e12  # bytes and operations a second, from the data sheet
print(f"memory and tensor cores are equally slow at {works / moves:.0f} operations a byte")
for name, (operations, size) in jobs.items():
    slower = "memory" if size / moves > operations / works else "tensor cores"
    print(f"{name:17} {operations / size:6.0f} operations a byte: bound by {slower}")

# %%
took = {row["case"]: row["kernel"] for row in render_results.rows("kernels")  # µs, of an H100
        if (row["batch"], row["tokens"]) == (8, n)}

figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
roof = lambda x: min(moves * x, works) / 1e12  # TFLOP/s at x operations a byte
ends = 1, works / moves, 1e5
axis.plot(ends, [roof(x) for x in ends], "k-", linewidth=1)
for (name, (operations, size)), marker in zip(jobs.items(), "os"):
    x, reached = operations / size, 8 * 8 * n * operations / took[name] / 1e6  # 8 prompts, 8 heads
    axis.plot(x, roof(x), marker, color="C0", markersize=9, markerfacecolor="none")
    share = f"{name}: {reached / roof(x):.0%} of the bound"
    axis.plot(x, reached, marker, color="C0", markersize=9, label=share)
axis.set(xscale="log", yscale="log", xlabel="operations per byte that must be moved",
         ylabel="TFLOP/s", ylim=(3, 3000))
axis.grid(alpha=0.3)
axis.legend(fontsize=8, loc="lower right");

# %% [markdown]
# The line and the hollow marks are the bound; the filled marks are what the kernels reached on an H100, with 8 prompts of 16,384 tokens (`python -m lab.kernel_bench`).
#
# Both jobs are on the slope: only fewer bytes lower their bound. A large matrix product is under the flat roof: only fewer multiplications lower its bound.
#
# A fast kernel does not make a fast decoder. On that H100 a step over all of 32,768 tokens takes 14 ms (RESULTS.md, "Decoding on a GPU"). Over a quarter of them a step of AdaKV's takes 52 ms with plain code and 50 ms with kernels. Python launches some twenty small kernels a layer, one after the other, and that takes longer than reading the cache. There AdaKV saves bytes and costs time.
#
# ## Three things to remember
#
# 1. Online softmax makes attention a sum of stretches, in any order. Tiles, splits and packed heads follow from that.
# 2. In decoding, attention to a cache is bound by memory. Compression makes it faster only if the kernel reads fewer bytes.
# 3. Look for algebra before you write a kernel.
#
# ## Exercises
#
# 1. In the kernel of section 4, start `m` at `float("-inf")`, give slots a bias, and hide the whole first tile with −∞. Why is −3e38 safe?
#    <details><summary>Hint</summary>What is $-\infty - (-\infty)$?</details>
# 2. `share` is 256 slots. What do 64 programs a head cost the kernel that adds them up (`add_up`)?
#    <details><summary>Hint</summary>Look at <code>split</code> in <code>kernels/launch.py</code>.</details>
# 3. Let the kernel of section 4 do a group of four query heads, with `tl.dot`.
#    <details><summary>Hint</summary>Blocks are at least 16 × 16: what is in the other 12 rows?</details>
# 4. Section 6 needs the sum of the weights by slot, a `scatter_add`. Write it as a kernel with `tl.atomic_add`, and check it against `SignedSketch.attend`. Then add in float16.
#    <details><summary>Hint</summary>Find the number of tokens a slot from which the output is off by more than 1 %.</details>
# 5. `value_norms` in `methods/critical_kv.py` computes $\lVert vW\rVert_1$ for every head. How much less work is the bound $\sqrt{d_{model}}\,\lVert vW\rVert_2$, and how often does CriticalKV then choose other entries?
#    <details><summary>Hint</summary>$\lVert vW\rVert_2^2 = v (WW^\top) v^\top$ needs only a D × D matrix.</details>
