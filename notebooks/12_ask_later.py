# %% [markdown]
# # Ask later: one document, many questions
#
# **Question.** A document is read once, and its cache is compressed and kept. Questions come later, and nobody knows them yet. What works on a real model, and what does it cost to read, to keep and to answer?
#
# **Read before:** notebooks 00 and 10. **Decoder:** SmolLM2-135M-Instruct, unless another is named. **Time:** half an hour to read, under two minutes to run.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, from its root or from notebooks/
from importlib.util import find_spec
assert find_spec("nanollm"), """A lesson needs its repository: clone it, run
pip install -r requirements.txt in its folder, and open the lesson from there."""
import json
from pathlib import Path
import tempfile
import time
import matplotlib.pyplot as plt
import torch

# %%
from lab import plot, question_table
from lab.ask import answer, around
from lab.benchmark import Benchmark
from lab.compare import main as compare
from lab.lessons import of_task
from lab.loading import calibrated, load
from lab.methods_by_name import pick
from lab.one_page import pieces
from lab.render_results import by_method, rows
from lab.replay import Recorder, record
from lab.retrieval import maker
from lab.speed import weight_bytes
from lab.tasks import Tasks

# %%
from methods.baselines.kvzip_fast import fit, lessons
from methods.baselines.rounded import rounded
from methods.ours.question_gates import QuestionGates, taught
from nanollm import LEARNED
from nanollm.block_linear import BlockLinear
from nanollm.cache import bytes_in_16_bits, compress, copied, make_cache
from nanollm.generate import prefill

torch.set_grad_enabled(False)
torch.set_num_threads(1)
model, encoding = load("smollm2")

# %% [markdown]
# ## What works
#
# The question comes after the compression. A point is a method at one keep ratio; those of *few bits* keep every entry, in 2, 3 or 4 bits. To the right are the bytes of its cache after 64 more tokens, in percent of the full 16-bit cache's. Upwards are the answers that it keeps of the full cache's, mean of needles, pairs and labels. White marks read the text twice.
#
# The rows are stored ones of 32 documents a task: of 256 tokens on SmolLM2, of 512 on the small decoders. RESULTS.md has the commands.

# %%
LINES = {"few bits": ("full@2", "full@3", "full@4"),
         "Fast KVzip": ("kvzip_fast",),
         "question gates": ("question_gates",), "question gates, four bits": ("question_gates@4",),
         "KVzip, four bits, read twice": ("kvzip@4",)}
SECTIONS = {"smollm2": "smollm2", "built": "all", "learned": "learned"}  # of RESULTS.md

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained", sharey=True)
for axis, (decoder, section) in zip(axes, SECTIONS.items()):
    stored = by_method(section)
    full = stored["full", None]
    for (label, names), colour in zip(LINES.items(), plt.cm.tab10.colors):
        line = sorted((100 * row["live_16"] / full["live_16"], row["agnostic"] / full["agnostic"])
                      for (method, _), row in stored.items() if method in names)
        axis.plot(*zip(*line), "o-", color=colour, label=label,
                  markerfacecolor="white" if "twice" in label else colour)
    axis.axhline(0.95, color="0.6", linewidth=1)
    axis.set(title=decoder, xscale="log", xlabel="bytes, % of the full cache's", ylim=(0, 1.2),
             xticks=(15, 20, 30, 40, 60), xticklabels=(15, 20, 30, 40, 60))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set(ylabel="answers kept, of the full cache's")
handles = axes[0].get_legend_handles_labels()
figure.legend(*handles, loc="outside lower center", ncols=5, fontsize=8);

# %% [markdown]
# The grey line is 95 % of the full cache's answers. On SmolLM2 four bits for every token answer no fewer questions than the full cache, in 49 % of the bytes. Three bits lose a fifth of the needles, and two bits lose 64 % of the answers. Fast KVzip keeps 99 % of the answers with a quarter of the entries, and 74 % with an eighth. Question gates, below, keep 91 % with an eighth of the entries, and 85 % in four bits. On the small decoders two bits lose less, and with an eighth of the entries KVzip in four bits does, too. An accuracy has a standard error of at most 0.09, so a difference of a few percent decides nothing.
#
# ## Let questions teach the gates
#
# Fast KVzip's gates imitate KVzip: they keep what the decoder needs to repeat the text. Most of that no question asks for. `question_gates` starts with such gates. Then a step of the training takes a context, lets the gates keep a quarter of its entries, or an eighth, a sixteenth or a thirty-second, and asks questions. Entries that would have made the right answers likelier get a higher score (the derivative is in `methods/ours/question_gates.py`).
#
# The recipe (`lab/lessons.py`) has 72 passages with natural questions, 48 texts with facts that a rule has made (numbers, words, names and dates; in sentences, lists and tables; one answer or several), the tasks of the figure with other words, needles and pairs once more with words as values, passages to copy, and plain text, whose continuation is the answer. SmolLM2 learns from it once, in ten minutes on two cores. The gates ship; to make them again, name a folder: `--calibration FOLDER`.
#
# Here *learned* is taught one of these kinds alone: needles, whose values are numbers. Its gates begin as imitations of KVzip. What does it find with a sixteenth of the entries: needles, needles whose value is a word, and pairs? And how far do predictions of plain text move from the full cache's?

# %%
small, its = load(LEARNED)
train, test = Tasks(its, "train"), Tasks(its, "test")
KINDS = {"needles, which teach": ("needle", {}),
         "needles that are words": ("needle", dict(numbers=0)), "pairs": ("pairs", {})}
batches = {kind: test.batch(task, 0, 32, 256, **given) for kind, (task, given) in KINDS.items()}
plain = torch.from_numpy(test.batch("plain", 0, 16, 256).tokens)
judge = Benchmark.read(small, batches, plain)
batch = train.batch("needle", 1, 32, 256, questions=4)
asked = [of_task(batch, i) for i in range(32)]

# %%
gates = taught(small, asked, fit(*lessons(small, train, documents=8)), steps=1)
curve, steps = {kind: [] for kind in ("plain", *KINDS)}, (1, 5, 10, 20, 30, 60)
for before, step in zip((1, *steps), steps):
    if step > before:
        gates = taught(small, asked, **gates, steps=step - before, seed=before)
    right, text = judge.measured(small, maker(small, QuestionGates, 1 / 16, **gates))
    for kind in KINDS:
        curve[kind].append(right[f"{kind}_agnostic"].mean())
    curve["plain"].append(text["kl"].mean())

# %%
kl = curve.pop("plain")
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for kind, found in curve.items():
    axes[0].plot(steps, found, "o-", label=kind)
axes[0].set(xlabel="steps", ylabel="found, question later", ylim=(0, 1.05))
axes[0].legend()
axes[1].plot(steps, kl, "o-", color="0.4")
axes[1].set(xlabel="steps", ylabel="KL of plain text, nats a token", ylim=(0, 1.3));

# %% [markdown]
# Between the first step and the sixtieth, on 32 texts, the needles found rise from 0.66 to 1.00. Nobody taught pairs, and they follow. Words follow less far: gates learn what a value looks like, and these have seen numbers alone. So the recipe has words, too, and names and dates. Plain text loses no more than before.
#
# ## What do the gates keep?
#
# One page, on SmolLM2. A token is darker if more heads keep it, up to a third of them. Both methods keep an eighth of the entries.

# %%
PAGE = """The harbour of Velm has a lighthouse of red brick. Marta Olsen built it in 1874, after two
ships had been lost on the rocks in one winter. The tower is 31 metres high, and 148 steps lead to
the lamp. For the first forty years the lamp burned whale oil, which a donkey called Pim carried up.

Today nobody lives in the tower. A family of falcons nests under the roof. Visitors pay two coins,
and the money goes to the fishermen's choir. Its oldest member is Hanna Lund, who is ninety-one and
sings bass. She says that the fog horn is the better musician, but never comes to the rehearsals."""
page = torch.tensor([around(encoding, model.config)[0] + encoding.encode_ordinary(PAGE)])
kept = {}
for name in "kvzip", "question_gates":
    kind = pick([name])[name].kind
    options = dict(budget=page.shape[1] // 8) | calibrated(pick([name])[name], model, encoding)
    caches = make_cache(model, kind, **options)
    prefill(model, page, caches)
    compress(model, page, caches)
    kept[name] = plot.kept(caches, page.shape[1])  # (layers, heads, tokens)
panels = {name: (3 * x.mean((0, 1))).clip(0, 1) ** 2 for name, x in kept.items()}
plot.text(pieces(encoding, page[0].tolist()), panels, high="kept by a third of the heads");

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, x in kept.items():
    entries = 100 * x.mean(2)  # (layers, heads)
    axes[0].plot(range(1, len(entries) + 1), entries.mean(1), label=name, **plot.style(name))
    axes[1].plot(sorted(entries.ravel(), reverse=True), label=name, **plot.style(name))
axes[0].set(xlabel="layer", ylabel="entries that stay, %", ylim=(0, None))
axes[1].set(xlabel="heads, the fullest first", ylim=(0, None))
axes[1].legend();

# %% [markdown]
# KVzip keeps the first token, a sink, in two thirds of the heads, and the gates keep it in all. With both, the same eight of 30 layers hold most entries. KVzip nearly fills its fullest heads, and leaves 60 of 90 nearly empty, with 6 of 178 entries at most. The gates leave most heads more, above all the newest tokens.
#
# ## Questions of another kind
#
# RULER (Hsieh et al., arXiv 2404.06654) is the field's own test of long contexts, and none of its texts or questions taught these gates. The table has the mean score of five of its tasks on SmolLM2, in percent of the full cache's, ± one standard error. A document has at most 1,024 tokens. Columns are keep ratios.

# %%
ruler = question_table.frame_of_rows(rows("ruler"))
scores = question_table.wide(ruler[ruler.setting == "agnostic"], "score")
print(question_table.shown(question_table.percentages(scores)))

# %% [markdown]
# With an eighth of the entries, KVzip, its imitation Fast KVzip and the gates keep about the same. With less they part: KVzip keeps what repeats the whole text, and the gates keep what answers. With a thirty-second of the entries, some 27 a head, the gates keep 91 % of the score; stored in four bits (`question_gates@4`), this is 1 % of the full cache's bytes, and keeps 89 %. With so few, the gates lose most where one key has several values (RESULTS.md, `ruler`, multivalue). SnapKV, AdaKV and ChunkKV score the entries by the text's last queries, which do not know what will be asked. Compactor takes keys unlike the others, and those that their neighbours attend to; a quarter of them keeps 36 % of the score.
#
# ## Where they fail
#
# *learned* completes "The code of KEY is" for four facts of a text. Their values are numbers, words or names of people. The table has the share that is right, for the full cache and with an eighth of the entries.

# %%
kinds = question_table.frame_of_rows(rows("kinds_learned"))
some = kinds[kinds.keep.isin([100, 12.5])]
print(some.pivot_table("score", "method", "task", lambda x: f"{x.mean():.2f}", sort=False))

# %% [markdown]
# The gates keep numbers and most words, of which the recipe has many that this decoder answers. Of names they answer 0.09, KVzip 0.31 and the full cache 0.44. What the full cache cannot answer does not teach, and of the recipe's texts with names this decoder answers few. On SmolLM2 the gates keep names, in wordings that taught and in others (RESULTS.md, `kinds_smollm2`): they have learned what values look like, more than how one asks.
#
# ## Why two bits break
#
# A rounded key changes every score $q\cdot k/\sqrt D$. An error of $x$ (in nats) multiplies a weight, before the softmax divides it, by $e^x$. The cell rounds the keys of one text as `RoundedSlots` does, 32 tokens of a channel in one range, and measures the errors of the last 64 queries' scores, by head. Then it asks which of a head's 64 channels make the error.

# %%
text = torch.from_numpy(Tasks(encoding, "test").batch("plain", 0, 1, 512).tokens)
errors, worst = {bits: [] for bits in (2, 3, 4)}, []
for layer in record(model, make_cache(model, store=Recorder), text):
    q, groups = layer.q[0].unflatten(0, (3, -1)), layer.k[0].unflatten(1, (-1, 32))  # 3 heads
    for bits in errors:
        error = rounded(groups, bits, 2).flatten(1, 2) - layer.k[0]  # (H, T, D)
        errors[bits].append((q[:, :, 448:] @ error[:, None, :448].mT / 8).std((1, 2, 3)))
        if bits == 2:
            channels = (error ** 2).mean(1) * (q ** 2).mean((1, 2))
            worst.append(channels.sort(-1, descending=True).values / channels.sum(-1, keepdim=True))
share = torch.cat(worst).cumsum(-1).mean(0)
for bits, found in errors.items():
    found = torch.cat(found)
    print(f"{bits} bits: a score's error is {found.median():.2f} nats in the median head, "
          f"{found.max():.2f} in the worst")
print("share of the error in a head's worst 1, 4 and 16 of 64 channels:",
      *(f"{share[n - 1]:.2f}" for n in (1, 4, 16)))

# %% [markdown]
# With two bits, the error of a score has a standard deviation of 0.7 in the median head: one weight in three is at least doubled or halved by chance. In the worst head it is 2.6. Each further bit cuts the error to less than half. Four of 64 channels make nearly half of its square. Rounding only these finely would divide the error by 1.4, where a third bit for all divides it by 2.3.
#
# ## What it costs
#
# Reading includes the compression; an answer costs a step for each token. All three columns are in units of the full cache's, for one text of 512 tokens on one core.

# %%
def seconds(run, rounds=1):
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


# %%
prefill(model, text, make_cache(model))  # the first run of a size takes longer
unit = None
print("                   reading   bytes    step")
NAMES = "full full@4 kvzip kvzip@4 kvzip_fast question_gates question_gates@4"
for name, variant in pick(NAMES.split()).items():
    options = variant.given(budget=128) | calibrated(variant, model, encoding)
    caches = make_cache(model, variant.kind, variant.store, **options)
    reading = seconds(lambda: (prefill(model, text, caches), compress(model, text, caches)))
    size = bytes_in_16_bits(caches)
    found = reading, size, seconds(lambda: model(text[:, :1], caches), 8)
    unit = unit or found
    print(f"{name:16}", *(f"{x / y:8.2f}" for x, y in zip(found, unit)))

# %% [markdown]
# KVzip's reread is its price. Gates are learned once, in ten minutes on two cores. Then reading takes little longer than with the full cache. On this short text, and one core, a step takes about as long as the full cache's, and in four bits longer: weights and small operators take most of the time, heads of different lengths are read one by one, and few bits must become numbers again. Times differ from run to run.
#
# Where does a step's time go? It reads each weight and each entry once. The decoder's file has 4 bits a weight, and 8 in the embedding. On a CPU with AVX512, `load` keeps the 4 bits as they are for steps (`nanollm/block_linear.py`); on any other CPU both bars below are of 32 bits, and their times differ by chance. The caches below hold random entries, all of 512 or of 4,096 tokens or a quarter of them. Products with the weights and attention are timed alone; the rest of a step are small operators: norms, rotations, sums, and Python.

# %%
def filled(decoder, n):
    """Return caches with n random entries in each head."""
    c = decoder.config
    caches = make_cache(decoder)
    for layer in caches:
        k, v = torch.randn(2, 1, c.n_kv_heads, n, c.head_dim).to(decoder.embed.weight)
        layer.write(k, v, torch.arange(n)[None])
    return caches


def parts(decoder, n):
    """Return the milliseconds of a step: products with weights, attention, and the rest."""
    caches, c = filled(decoder, n), decoder.config
    layers = [x for x in decoder.modules() if isinstance(x, (torch.nn.Linear, BlockLinear))]
    inputs = [torch.randn(1, 1, x.weight.shape[1]).to(x.weight) for x in layers]
    q, pos = torch.randn(1, c.n_heads, 1, c.head_dim).to(decoder.embed.weight), torch.tensor([[n]])
    products = seconds(lambda: [layer(x) for layer, x in zip(layers, inputs)], 25)
    attention = seconds(lambda: [layer.attention(q, pos) for layer in caches], 25)
    step = seconds(lambda: decoder(text[:, :1], caches), 25)
    return [1000 * x for x in (products, attention, step - products - attention)]


# %%
decoders = {"32 bits": load("smollm2", dtype="float32")[0], "4 bits": model}
SIZES = {"512": 512, "512 / 4": 128, "4,096": 4096, "4,096 / 4": 1024}
ms = {name: [parts(decoder, n) for n in SIZES.values()] for name, decoder in decoders.items()}
mb = {name: [(weight_bytes(decoder) / 1e6, sum(x.bytes()[0] for x in filled(decoder, n)) / 1e6)
             for n in SIZES.values()] for name, decoder in decoders.items()}

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
PARTS = {"weights": "#4477aa", "cache": "#ee6677", "small operators": "#bbbbbb"}
for axis, found, unit in zip(axes, (mb, ms), ("MB read in a step", "ms a step")):
    for shift, (name, bars) in enumerate(found.items()):
        for i, bar in enumerate(bars):
            below = 0
            for height, (label, colour) in zip(bar, PARTS.items()):
                axis.bar(i + 0.4 * shift, height, 0.36, below, color=colour,
                         label=label if not i + shift else None)
                below += height
            axis.text(i + 0.4 * shift, below, name, ha="center", va="bottom", fontsize=7)
    axis.set_xticks([i + 0.2 for i in range(4)], [f"{x} entries" for x in SIZES])
    axis.set(ylabel=unit)
    axis.spines[["top", "right"]].set_visible(False)
figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3);

# %%
for name, (short, few, long, some) in ms.items():
    faster = [sum(x) / sum(y) for x, y in ((short, few), (long, some))]
    print(f"{name}: a quarter of the cache makes a step {faster[0]:.2f} times faster after 512 "
          f"tokens, {faster[1]:.2f} times after 4,096")

# %% [markdown]
# In 32 bits a step reads 538 MB of weights, and 24 MB of cache after 512 tokens or 190 MB after 4,096. In 4 bits the weights are about 100 MB, so the cache takes more of the step, and a quarter of it saves more: SnapKV then makes a step 1.9 times faster after 4,096 tokens, and 1.1 times after 512 (RESULTS.md, `speed`, measured with AVX512). Weights and small operators do not shrink with the cache. RESULTS.md, `cost`, has times in 32 bits, and `speed` also those of eight prompts at once.
#
# ## Ask in your own words
#
#     python -m nanollm compress --model smollm2 --method question_gates@4 --keep 25 --file TEXT --out text.cache
#     python -m nanollm ask text.cache "How many steps lead to the lamp?"
#
# These commands do what the next cell does with one method and one question. `@4` stores the entries that stay in four bits, and works with every method without a store of its own (`snap_kv@4`). With question and answer a text may have 8,192 tokens; KVzip takes texts of up to 7,672. If its whole cache would not fit into memory, `--evict-early` lets `compress` evict after every 512 tokens (RESULTS.md, `early`).

# %%
QUESTIONS = ("How many steps lead to the lamp?", "Who is the oldest member of the choir?",
             "What is the name of the donkey?", "Who built the lighthouse?")

# %%
gates = "question_gates@4"
for name, keep in ("full", 1), (gates, 0.5), (gates, 0.25), ("snap_kv", 0.25):
    variant = pick([name])[name]
    options = variant.given(budget=round(keep * page.numel()))
    options |= calibrated(variant, model, encoding)
    caches = make_cache(model, variant.kind, variant.store, **options)
    prefill(model, page, caches)
    compress(model, page, caches)
    print(f"{name}, {keep:.0%} of the entries")
    for question in QUESTIONS:
        said = "".join(answer(model, encoding, copied(caches), question, 20))
        print(f"    {question} ▸ {said}")

# %% [markdown]
# Read the wrong answers. To count them, write the questions into a file, one JSON object a line, and let `python -m nanollm --questions FILE` ask them. Options choose the model, the methods and the keep ratios, and the questions may be about as many texts as you like. The next cell calls this command.

# %%
RIGHT = "148", "Hanna Lund", "Pim", "Marta Olsen"
folder = Path(tempfile.gettempdir())
lines = [json.dumps(dict(context=PAGE, question=question, answers=[right], max_new_tokens=20))
         for question, right in zip(QUESTIONS, RIGHT)]
(folder / "velm.jsonl").write_text("\n".join(lines))
compare(f"--questions {folder}/velm.jsonl --figure {folder}/velm.png --model smollm2 "
        "--dtype float32 --keep 50 25 --methods snap_kv question_gates@4".split())

# %% [markdown]
# The full cache answers one question of four. That is less than half, so the command gives no mean. −log p of the right answer still tells something: it may move before an answer turns wrong. Behind the gates it is lower than behind the full cache, and more answers are right: this model has 135 million parameters, and wanders off less if what it reads is what one asks for. The donkey gets the singer's name. Lost entries do not leave a gap. They leave a fluent, wrong sentence, and it looks like the mistakes that the model makes anyway.
#
# ## Three things to remember
#
# 1. One reading is enough. With an eighth of the entries, gates that have learned from questions answer nine tenths or more of what the full cache answers of the first figure's tasks, on three decoders. Four bits on top cost up to 7 percent of these.
# 2. What these gates learned carries over to RULER's questions, and to natural ones about other passages (RESULTS.md, `natural`). It need not carry over to yours: ask them, or teach them (`python -m nanollm teach`).
# 3. Ask your own questions before you trust a keep ratio. What is lost comes back as a fluent mistake.
#
# ## Exercises
#
# 1. Round the values to two bits and the keys to four. Does a task break, needles or pairs? And the other way round?
#    <details><summary>Hint</summary>Change <code>bits</code> in the lines of <code>RoundedSlots</code> that round values (<code>round</code>), pack them (<code>add_codes</code>) and read them (<code>codes</code>).</details>
# 2. Round the four worst channels of each head to eight bits and the others to two. What does it cost, and what does it save?
#    <details><summary>Hint</summary>The cell of "Why two bits break" ranks the channels; <code>rounded</code> takes any part of them.</details>
# 3. Teach the gates a kind of your own. Write eight texts or more with a few questions each into a file, as above, and run `python -m nanollm teach --model smollm2 --questions FILE --calibration FOLDER`. What is won on the half that did not teach? What is lost on questions made by rule, and on plain text?
#    <details><summary>Hint</summary>The command prints all three, before and after. −log p of the right answer tells more than few answers do. With few texts try <code>--steps 60</code>.</details>
# 4. Which part of the recipe teaches what? Train gates of *learned* without one, in a minute, and ask for needles, pairs and labels as above.
#    <details><summary>Hint</summary>After <code>import lab.lessons</code>: <code>taught(small, lab.lessons.lessons(train, small.config, "labels"), fit(…))</code>. Other parts are needle, words, pairs, pairs_of_words, copy, made, natural and plain.</details>
