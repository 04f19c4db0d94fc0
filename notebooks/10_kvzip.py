# %% [markdown]
# # KVzip: which entries will a question need that nobody has asked yet?
#
# **Before this:** notebook 00 (the KV cache, induction heads). **Time:** half an hour to read, under two minutes to run. **Afterwards you know** how KVzip finds the entries that later questions need, which parts of the method matter, what it costs, and when it fails.
#
# The code: `methods/baselines/kvzip.py` (Kim et al., arXiv 2505.23416), `methods/baselines/kvzip_fast.py` and `methods/baselines/rounded.py`. RESULTS.md has the long tables. All numbers here are of *built*, a small decoder, unless another is named.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
import time
import matplotlib.pyplot as plt
import torch

from lab import plot
from lab.benchmark import Benchmark
from lab.kept import held
from lab.render_results import by_method
from lab.replay import Recorder, record
from lab.retrieval import maker
from lab.table import text_table
from lab.tasks import Tasks

# %%
from methods.baselines.kvzip import KVzip
from methods.baselines.kvzip_fast import FastKVzip, fit, lessons
from methods.baselines.snap_kv import SnapKV
from methods.baselines.rounded import RoundedSlots
from nanollm import SHIPPED, TINY, checkpoint, tokenizer
from nanollm.cache import Method, bytes_in_16_bits, compress, make_cache
from nanollm.generate import prefill

# %% [markdown]
# ## Why the question is unknown
#
# A cache is often compressed before anybody asks: a document is read once and kept for many questions. Such a compression is *query-agnostic*. In each of these 32 documents one of four facts is asked for, either inside the prompt that is compressed or after the compression:

# %%
torch.set_grad_enabled(False)
model, encoding = checkpoint.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config
batch = tasks.batch("needle", seed=0, B=32, T=512)
needles = Benchmark.read(model, {"needle": batch}, None)  # read once, and recorded
for Kind, options in (SnapKV, dict(window_size=8)), (KVzip, {}):
    right, _ = needles.measured(model, maker(model, Kind, 0.25, **options))
    print(f"{Kind.__name__:6} keeps 25 %. Facts found if the question is in the prompt: "
          f"{right['needle_aware'].mean():.2f}; "
          f"if it comes later: {right['needle_agnostic'].mean():.2f}")

# %% [markdown]
# SnapKV keeps the entries that the prompt's last queries look at. If these queries are the question, it finds every fact. If the question comes later, SnapKV keeps what the last eight tokens of the document happen to need, and finds 12 %. KVzip finds every fact in both cases.
#
# ## The reread
#
# Nobody knows the question, but everybody knows the document. KVzip's idea: a cache from which the decoder can repeat the whole document has lost nothing that a question could need. So it feeds the document a second time, after the first, and records which entries of the first pass the decoder looks at. An entry's score is the largest attention that any token of the reread gives it. The entries with the highest scores stay, those of all layers and heads in one ranking:
#
# $$S_i = \max_{t \,\in\, \text{reread}} \alpha_{t,i}, \qquad \text{keep the } L \cdot H \cdot b \text{ entries with the highest } S_i.$$
#
# Here $\alpha_{t,i}$ is the attention that token $t$ of the reread gives entry $i$, $b$ is the budget of a head on average, and the decoder has $L$ layers of $H$ key/value heads. The whole method, for one document:

# %%
def reread(model, text):
    """Attention of each token of the reread to each entry of the first pass, (L, H, G, n, n)."""
    n, attention = text.shape[1], []
    recording = record(model, make_cache(model, store=Recorder), torch.cat((text, text), 1))
    for layer in recording:
        q = layer.q[0, :, n:].unflatten(0, (c.n_kv_heads, -1))  # (H, G, n, D): the second time
        logits = q @ layer.k[0, :, None].mT / c.head_dim ** 0.5  # (H, G, n, 2n): both times
        future = layer.pos[0] > layer.pos[0, n:, None]
        attention.append(logits.masked_fill(future, -torch.inf).softmax(-1)[..., :n])
    return torch.stack(attention)


text = torch.from_numpy(batch.tokens)[:1, :batch.question]  # one document, without its question
n = text.shape[1]
attention = reread(model, text)
score = attention.amax((2, 3))  # (L, H, n)
stay = c.n_layers * c.n_kv_heads * (n // 8)  # entries, in all heads together: an eighth
kept = score >= score.flatten().topk(stay).values[-1]

# %% [markdown]
# The library does the same for a batch, in pieces of up to 512 tokens. Here it keeps the same entries:

# %%
caches = make_cache(model, KVzip, budget=n // 8)
prefill(model, text, caches)
compress(model, text, caches)  # rereads, ranks and evicts
assert torch.equal(torch.from_numpy(plot.kept(caches, n)), kept)
print(f"{kept.sum()} of {kept.numel()} entries stay, the same as in methods/baselines/kvzip.py")

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
for axis, (layer, head) in zip(axes, ((0, 0), (1, 0), (4, 1))):
    axis.imshow(attention[layer, head, 0, :120, :120].sqrt(), cmap="Greys", vmax=1)
    axis.set(title=f"layer {layer}, head {head}",
             xlabel="entry of the first pass", ylabel="token of the reread")

# %% [markdown]
# The head in the middle is an induction head. While a token is reread, the head finds the same token in the first copy and looks at the one after it, so its attention runs along the diagonal. The other two heads give each entry of the first copy little attention: for repeating they are hardly needed. The same induction heads answer a question such as *The code of mainly is*, and look at the same entries. For this reason the reread finds the entries of a question that nobody has asked.
#
# Below are the entries that stay in layer 1, where these heads are. The facts are underlined.

# %%
pieces = [encoding.decode([token]) for token in text[0].tolist()]
caches = make_cache(model, SnapKV, budget=n // 8, window_size=8)
prefill(model, text, caches)
compress(model, text, caches)
panels = {"SnapKV, layer 1": plot.kept(caches, n)[1].mean(0),
          "KVzip, layer 1": kept[1].float().mean(0)}
plot.text(pieces, panels, batch.facts[0, :n], columns=2, width=72);

# %% [markdown]
# Both caches hold an eighth of all entries. In layer 1 SnapKV has dropped the facts. KVzip keeps most of layer 1, and hardly anything in the other layers.
#
# ## The largest attention, not the sum
#
# H2O sums the attention that an entry gets. KVzip takes the largest. Each point below is an entry of one head. The lines are the two thresholds: right of the solid line are the entries that stay by the largest attention, above the dashed line those that would stay by the sum.

# %%
total, facts = attention.sum((2, 3)), torch.from_numpy(batch.facts[0, :n])
least, least_sum = (x.flatten().topk(stay).values[-1] for x in (score, total))
figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
axis.loglog(score.flatten(), total.flatten(), ".", color="0.8", markersize=2, label="all entries")
axis.loglog(score[1][:, facts].flatten(), total[1][:, facts].flatten(), ".",
            color=plot.style("kvzip")["color"], label="entries of the facts, layer 1")
axis.axvline(least, color="black", linewidth=1)
axis.axhline(least_sum, color="black", linewidth=1, linestyle="--")
axis.set(xlabel="largest attention", ylabel="sum of the attention", xlim=(1e-3, 1.2))
axis.legend()
for name, mask in {"largest attention": score >= least, "sum": total >= least_sum}.items():
    print(f"By the {name}, {mask[1][:, facts].float().mean():.0%} of the facts' entries "
          "in layer 1 stay.")

# %% [markdown]
# A fact is needed once: one token of the reread looks at it, often with most of its attention. Other entries get a little from everybody, and their sum is as large. The largest attention tells the two apart, the sum does not: in layer 1 it keeps 18 % of the facts' entries, the largest attention 91 %.
#
# ## One ranking for all layers
#
# The same eighth, as the percentage that stays in each head, on both small decoders. *built* started training with induction heads in layer 1. *learned* had to learn them.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7, 3.8), layout="constrained")
for axis, (name, folder) in zip(axes, SHIPPED.items()):
    largest = reread(checkpoint.from_hf(folder), text).amax((2, 3))
    stays = largest >= largest.flatten().topk(stay).values[-1]
    plot.heads(axis, 100 * stays.float().mean(-1), f"{name}: % that stay", "{:.0f}")
    axis.set_aspect("auto")

# %% [markdown]
# The heads that repeat the text get most of the entries. They are in layer 1 of *built*, and in layers 1 and 2 of *learned*. In all other layers a head keeps 2 % at most. With a budget per head, each of these heads would have to drop seven eighths of its entries, and the other heads would keep entries that repeating does not need.
#
# ## Gates that learn the scores
#
# The reread takes longer than the first pass. Fast KVzip (arXiv 2601.17668) avoids it with a *gate* in each head. Ours is simpler than the paper's: a logistic regression predicts the score of an entry from $x_i$, the queries, keys and values of its token in all heads of the layer:
#
# $$\hat S_i = \sigma(x_i W + b).$$
#
# The gates learn once for a decoder, from KVzip's scores of plain text without facts or questions. From then on no prompt is reread.

# %%
x, y = lessons(model, Tasks(encoding, "train"), documents=32)  # queries, keys, values; scores
gates = fit(x, y)  # 600 steps of Adam on the cross-entropy
for keep_ratio in (0.25, 0.125):
    right, _ = needles.measured(model, maker(model, FastKVzip, keep_ratio, gates=gates))
    print(f"{x.shape[1]} tokens seen; keeps {keep_ratio:.1%}, question later: "
          f"{right['needle_agnostic'].mean():.2f} of the facts found")
stored = {"built": by_method("all"), "learned": by_method("learned")}
shown = [["facts found, question later", "25 %", "12.5 %", "6.25 %"]]
for name, method in ((name, method) for name in SHIPPED for method in ("kvzip", "kvzip_fast")):
    found = [stored[name][method, share]["needle_agnostic"] for share in (0.25, 0.125, 0.0625)]
    shown.append([f"{method}, {name}", *(f"{share:.2f}" for share in found)])
print(text_table(shown))

# %% [markdown]
# The first lines are of the gates trained here, on *built*. They read half as many tokens as `FastKVzip.calibrate` does, whose gates the table has. With a quarter of the entries the gates lose no needle on either small decoder. With fewer entries they lose more than the reread does: with 6.25 % they find 38 % of the needles on *built* and 34 % on *learned*, where the reread finds all.
#
# ## Few bits on top
#
# The entries that stay can also be stored in fewer bits. Which entries stay is the method's decision; how they are stored is the store's. So another store is all that it takes: `RoundedSlots` has four bits. In tables the pair is called `kvzip@4`, and every method without a store of its own can have it (`snap_kv@4`). `full@4` is KIVI, which keeps every token of the prompt in four bits. Bytes are those of one document right after the compression, if the model's numbers have 16 bits:

# %%
head = [f"{task}, {name}" for name in SHIPPED for task in ("needle", "pairs")]
shown, full = [["question later", "bytes", *head]], None
cases = {("full", None): (Method, {}),
         ("full@4", None): (Method, dict(store=RoundedSlots)),
         ("kvzip", 0.125): (KVzip, dict(budget=n // 8)),
         ("kvzip@4", 0.125): (KVzip, dict(budget=n // 8, store=RoundedSlots))}
for (method, ratio), (Kind, options) in cases.items():
    caches = make_cache(model, Kind, **options)
    prefill(model, text, caches)
    compress(model, text, caches)
    full = full or bytes_in_16_bits(caches)
    cells = [f"{stored[name][method, ratio][f'{task}_agnostic']:.2f}"
             for name in SHIPPED for task in ("needle", "pairs")]
    shown.append([method, f"{bytes_in_16_bits(caches) / full:.1%}", *cells])
print(text_table(shown))

# %% [markdown]
# An eighth of the entries in four bits takes a twenty-third of the full cache's bytes, and answers as many of these questions as the eighth that is not rounded.
#
# ## What the reread costs

# %%
shown = [["milliseconds", "reading", "KVzip's compression"]]
for tokens in (512, 1024, 2048):
    long = torch.from_numpy(tasks.stream[None, :tokens].astype("int64"))
    caches = make_cache(model, KVzip, budget=tokens // 8)
    start = time.perf_counter()
    prefill(model, long, caches, 512)
    middle = time.perf_counter()
    compress(model, long, caches)
    seconds = middle - start, time.perf_counter() - middle
    shown.append([f"{tokens} tokens", *(f"{1000 * x:.0f}" for x in seconds)])
print(text_table(shown))

# %% [markdown]
# The reread takes longer than the first pass: each of its tokens sees the whole prompt, while a token of the first pass sees only those before it, and the reread also computes scores. (Your times will differ.) The cost is paid once for a document, and pays off if many questions follow.
#
# ## When it loses
#
# So far the question mostly came later. Now it stands at the prompt's end, inside the text that is compressed, and an eighth of the entries stays. 16 *few-shot* documents list labelled lines and ask for the label of a last one.

# %%
labels = tasks.batch("few_shot", seed=0, B=16, T=512)
METHODS = {"snap_kv": (SnapKV, dict(window_size=8)), "kvzip": (KVzip, {}),
           "kvzip_recent": (KVzip, dict(recent=8))}
for name, folder in SHIPPED.items():
    decoder = checkpoint.from_hf(folder)
    benchmark = Benchmark.read(decoder, {"few_shot": labels}, None)
    for method, (Kind, options) in METHODS.items():
        right, _ = benchmark.measured(decoder, maker(decoder, Kind, 0.125, **options))
        print(f"{name:8} {method:13} labels right if the question is in the prompt: "
              f"{right['few_shot_aware'].mean():.2f}; "
              f"if it comes later: {right['few_shot_agnostic'].mean():.2f}")

# %%
end = labels.answers[0].start  # the prompt ends with the question
prompts = torch.from_numpy(labels.tokens)[:8, :end]
caches = make_cache(model, KVzip, budget=end // 8)
prefill(model, prompts, caches, 64)
compress(model, prompts, caches)
stays = held(caches, end)[..., labels.question:].float().mean((0, 2, 3))
print("KVzip on built, few-shot. The question's entries that stay, layers 0 to 5:",
      *(f"{share:.0%}" for share in stays))

# %% [markdown]
# With the question at the prompt's end, KVzip loses labels: on *built* 0.31 of them are right, on *learned* 0.75. SnapKV has them all. The question's own entries compete with all others, and lose: outside layer 1, at most 20 % of them stay in a layer. `kvzip_recent` also keeps the 8 newest entries of each head, within the same budget. Then all labels are right on *built*, and 0.88 on *learned*. (16 documents: a standard error of up to 0.13.)
#
# So the choice depends on the setting, and on the decoder. If the question is known, SnapKV is much cheaper, and on the small decoders it answers as well or better; on SmolLM2 KVzip finds more (RESULTS.md). If it is not known, the reread is worth its cost.
#
# ## Three things to remember
#
# 1. **The entries that answer a question about a text also serve to repeat it.** The reread finds them without a question.
# 2. **The largest attention and one ranking for all layers.** A fact is looked at once, so a sum may overlook it. Few heads retrieve, so equal budgets waste most entries.
# 3. **The price is the reread,** paid once for a document. These gates avoid it at some loss, and few bits on top make the cache smaller still.
#
# ## Exercises
#
# 1. Compute the scores from the first pass alone: the largest attention that an entry gets from tokens at least 8 later. How many of the facts' entries in layer 1 stay?
#    <details><summary>Hint</summary>In <code>reread</code>, feed <code>text</code> once and mask the pairs of tokens that are less than 8 apart. </details>
# 2. Find the head and the token with the largest *sum* of attention. Why do so many tokens look at it?
#    <details><summary>Hint</summary><code>total.flatten().argmax()</code>, then <code>pieces[…]</code>. Heavy hitters and sinks are in notebook 00.</details>
# 3. How long must the reread be? Let only every second token of the reread count, then every fourth. Which entries are lost first?
#    <details><summary>Hint</summary><code>attention[..., ::2, :].amax((2, 3))</code>, and compare with <code>kept</code>.</details>
# 4. How much do two documents differ in the heads that keep most? If hardly, the budgets could be fixed once for a decoder, without any reread.
#    <details><summary>Hint</summary>Compute the percentages of each head for several rows of <code>batch.tokens</code>.</details>
# 5. Train the gates on needle documents in place of plain text. What happens at 6.25 %, on needles and on pairs?
#    <details><summary>Hint</summary>In <code>lessons</code> of kvzip_fast.py the task is <code>"plain"</code>. Copy the function with that file's imports and replace it; then call <code>fit</code>, and <code>retrieve</code> of lab/retrieval.py.</details>
