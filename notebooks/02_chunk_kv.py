# %% [markdown]
# # Whole chunks, or the best tokens?
#
# SnapKV and its relatives choose single tokens. **ChunkKV** cuts the prompt into chunks of ten tokens and keeps the best of them whole, for a token means little without its neighbours. It also finds that chunks are chosen alike in neighbouring layers, so that one layer's choice can serve the next, and it argues that whole chunks help in-context learning.
# This notebook tries all three on the shipped model: when chunks win and when they lose, what a cut in the wrong place does, how alike the layers choose, and what the theory says once its constants are written out.
#
# The words: a *vote* is the attention that one of the prompt's last queries gave a token. Three tasks ask the model something: *needle* (one of four facts hidden in real text), *recall* (one of 16 listed pairs) and *few-shot* (the label of a line of code, after 16 labelled lines such as `return self._name =>42`). In the first two the answer has two tokens. C1, C2 and C3 are the rows of the README's table of claims.
#
# All numbers are of one decoder with 2.8 million parameters. Layer 1 retrieves in it because its starting weights were built so (`00_kv_cache.ipynb`); what layers 0 and 1 do here need not hold elsewhere.
#
# You should know what a KV cache is (`00_kv_cache.ipynb`), and how a window of queries votes (the start of `01_critical_kv.ipynb`). The code to read beside it: `WindowCache` in `nanollm/cache.py`, then `methods/chunk_kv.py`.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
import time
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from methods.chunk_kv import (ChunkKV, PlacedChunkKV, SemanticChunkKV, answer_bound, at_the_answer,
                              chunk_noise, distance_bound, divergence, examples, fisher, jaccard, kept_whole, markov,
                              token_divergences, token_noise)
from methods.h2o import H2O
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from nanollm import TINY, evaluate, plot, tokenizer, weights
from nanollm.cache import LayerCache, finish_prompt, held, make_cache
from nanollm.data import Tasks, Unmarked
from nanollm.evaluate import TASKS, Benchmark, maker, paired, retrieve, standard_error, told_or_read

# %%
torch.set_grad_enabled(False)
model, encoding = weights.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config
bench = Benchmark.build(model, tasks, 512, documents=24)  # for each of three tasks, and half as many texts
WINDOW = dict(window=8)  # the papers' 32 would be all of the smallest budget here: prompts are a tenth as long
ENDS = dict(ends=tokenizer.boundaries(encoding, c.vocab_size))

# %% [markdown]
# ## What stays
#
# The last 8 tokens of the prompt vote. SnapKV's authors knew that single tokens are not enough and pool the votes over 7 neighbours; without the pool the choice is truly one of tokens. ChunkKV adds up the votes of ten tokens on a fixed grid. `SemanticChunkKV` is ours: it cuts where a line, a sentence or a clause ends. Where a chunk no longer fits into the budget, the room stays empty.
#
# A fact with a long value (four numbers, eight tokens) in a text, and its question at the end. Layer 1, which retrieves in this model, an eighth of the entries:

# %%
def compress(Method, tokens, share=1 / 8, **knobs):
    """Caches that have read tokens (B, T) and kept a share of them."""
    caches = make_cache(model, Method, budget=round(share * tokens.shape[1]), **WINDOW | knobs)
    evaluate.feed(model, tokens, caches)
    finish_prompt(caches)
    return caches


batch = tasks.batch("needle", seed=5, B=1, T=256, facts=2, numbers=4)
end = batch.answers[0].start - 1
prompt, facts = torch.from_numpy(batch.tokens[:, :end]), batch.facts[0, :end]
pieces = [encoding.decode([token]) for token in prompt[0].tolist()]
rules = {"tokens (SnapKV, no pool)": (SnapKV, dict(kernel=1)), "SnapKV": (SnapKV, {}), "ChunkKV": (ChunkKV, {}),
         "SemanticChunkKV": (SemanticChunkKV, ENDS)}
panels = {name: plot.kept(compress(Method, prompt, **knobs), end)[1].mean(0) for name, (Method, knobs) in rules.items()}
plot.text(pieces, panels, facts, columns=2, width=72);

# %% [markdown]
# Facts are underlined; the darker a token, the more of the three heads keep it. Tokens alone are crumbs. The pool widens each crumb by three tokens to either side, which reaches into the value and not to its end. A chunk of ten could hold the value, but here the grid cuts it. The chunk that ends with the sentence holds it all, and two of three heads keep it.
#
# ## Accuracy over the budget
#
# Three tasks (needle, recall, few-shot; 24 documents of 512 tokens each), *aware* with the question in the prompt and *blind* without, against SnapKV, H2O and StreamingLLM. The bars are standard errors.

# %%
methods = {"SnapKV": (SnapKV, WINDOW), "ChunkKV": (ChunkKV, WINDOW), "SemanticChunkKV": (SemanticChunkKV, WINDOW | ENDS),
           "H2O": (H2O, {}), "StreamingLLM": (StreamingLLM, {})}
shares = [.5, .25, .125, .0625]

# %%
def run(Method, share, **knobs):
    """Answers and KL, document by document, and the live bytes."""
    make, each = maker(model, Method, share, **knobs), {}
    for task, documents in bench.batches.items():
        right = told_or_read(retrieve, model, documents, make, bench.told[task])
        each |= {f"{task}_{setting}": right[setting].tolist() for setting in right}
    row = told_or_read(evaluate.continuation, model, bench.full, make, bench.full.told)
    return dict(each=each | dict(kl=row["kl"].tolist()), kl=row["kl"].mean().item(), live=row["live"])


def mean_and_error(row, setting):
    """Of the three tasks together."""
    x = torch.tensor([row["each"][f"{task}_{setting}"] for task in TASKS]).flatten()
    return x.mean().item(), standard_error(x)


def live(row):
    return row["live"] / len(bench.full.tokens) / 1024  # KiB per sequence


def change(row, base, *keys):
    """Paired difference, document by document, and its standard error."""
    return "{:+.2f} ±{:.2f}".format(*paired(row, base, list(keys)))


rows = {(name, share): run(Method, share, **knobs) for name, (Method, knobs) in methods.items() for share in shares}

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
styles = dict(zip(methods, ("C0o-", "C1s--", "C2D-", "C3^-.", "C4v:")))
for (name, style), shift in zip(styles.items(), (.96, .98, 1, 1.02, 1.04)):
    for axis, setting in zip(axes, ("aware", "blind")):
        values, errors = zip(*(mean_and_error(rows[name, share], setting) for share in shares))
        axis.errorbar([100 * share * shift for share in shares], values, errors, fmt=style, label=name, markersize=5, capsize=2)
        axis.set(ylim=(0, 1.05), ylabel=f"accuracy, {setting}")
    axes[2].plot([live(rows[name, share]) for share in shares], [rows[name, share]["kl"] for share in shares], style, label=name, markersize=5)
for axis in axes[:2]:
    axis.set(xscale="log", xlabel="budget, % of the prompt", xticks=[100 * x for x in shares], xticklabels=[f"{100 * x:g}" for x in shares])
axes[2].set(xscale="log", xlabel="live cache after the text, KiB", ylabel="KL(full ‖ compressed), nats", xticks=[128, 256, 512, 1024], xticklabels=[128, 256, 512, 1024])
for axis in axes:
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[2].legend(fontsize=8);

# %% [markdown]
# Aware, ChunkKV on its fixed grid loses answers that SnapKV keeps, and chunks that end where the text does lose none that could be seen with 24 documents a task. Why, the next sections take apart, task by task. Blind, without the question, every method loses most answers below half of the entries. (The README has the three tasks apart: with few entries, H2O and StreamingLLM, which favour what is recent, keep the labelled lines at the prompt's end.) In the KL panel the methods that hold their budget while decoding have fewer bytes for the same budget.
#
# ## Short facts and long ones
#
# The same needles with values of one, two and four numbers, so 2, 4 and 8 tokens. (The model was trained on two; the full cache still gets most of the others right.)

# %%
def read(task, source=tasks, **how):
    """A batch, and the record of its two parts: one reading for all methods."""
    documents = source.batch(task, T=512, **how)
    caches = make_cache(model, evaluate.Recorder)
    return documents, [evaluate.record(model, caches, part) for part in evaluate.prompt_and_question(model, documents)[1:]]


def aware(documents, told, Method, share, **knobs):
    """Per document, whether the question is answered that is part of the prompt."""
    caches = maker(model, Method, None if Method is LayerCache else share, **knobs)(documents.question)
    for n in (1, 2):
        evaluate.replay(told[:n], caches)
    tokens, spans = torch.from_numpy(documents.tokens), documents.answers
    return evaluate.answer(model, tokens, spans, spans[0].start - 1, caches)


recorded = {2 * numbers: read("needle", seed=1, B=48, facts=1, numbers=numbers) for numbers in (1, 2, 4)}

# %%
length_rules = {"full cache": (LayerCache, {}, "k-"),
                "tokens (SnapKV, no pool)": (SnapKV, WINDOW | dict(kernel=1), "C5v:"),
                "SnapKV": (*methods["SnapKV"], "C0o-"), "ChunkKV": (*methods["ChunkKV"], "C1s--"),
                "ChunkKV, c = 20": (ChunkKV, WINDOW | dict(chunk=20), "C6P-."),
                "SemanticChunkKV": (*methods["SemanticChunkKV"], "C2D-")}
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
for name, (Method, knobs, style) in length_rules.items():
    found = {n: aware(*read_before, Method, 1 / 8, **knobs) for n, read_before in recorded.items()}
    axis.errorbar([*found], [x.mean() for x in found.values()], [standard_error(x) for x in found.values()],
                  fmt=style, label=name, capsize=2, markersize=5)
    print(f"{name:26}", *(f"{n} tokens {x.mean():.2f} ±{standard_error(x):.2f} " for n, x in found.items()))
axis.set(xlabel="tokens of the value", xticks=[2, 4, 8], ylabel="needles found, aware, 12.5 %")
axis.grid(alpha=0.3)
figure.legend(fontsize=8, loc="outside right center");

# %% [markdown]
# This is the paper's case, and it is a strong one: of a value of eight tokens SnapKV keeps the start and never the whole. Chunks of 10 find some, chunks of 20 more, chunks that end with the sentence nearly all (their line hides the full cache's). For a value of two tokens SnapKV finds every needle, and so does, but for a few, the grid: here the text holds one fact. With four, or a list of 16, the grid loses many. Is it the grid?
#
# ## What the grid cuts
#
# To find out, the documents stay and the grid moves: `PlacedChunkKV` shifts it in each document so that the value's first token is the first of its chunk (place 0), the second, and so on to the tenth (place 9). The value has two tokens. So at place 9 the grid cuts it in two, and at place 0 it cuts it off from all that was said before. Needles and pairs apart, 64 documents each. They are `Unmarked`, which the grid does not see and a later section needs.

# %%
unmarked = Unmarked(encoding, "test")
plain = {task: read(task, unmarked, seed=1, B=64) for task in ("needle", "recall")}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for axis, (task, (documents, told)) in zip(axes, plain.items()):
    at = torch.from_numpy(documents.stated)
    for share, style in zip((.25, .0625), ("o-", "s--")):
        found = torch.stack([aware(documents, told, PlacedChunkKV, share, at=at, place=place, **WINDOW)
                             for place in range(10)])
        axis.plot(found.mean(1), style, label=f"{100 * share:g} %", markersize=5)
        lost = aware(documents, told, SnapKV, share, **WINDOW) - found.mean(0)
        means = {"0 and 9 (cut)": found[[0, 9]], "1": found[1], "2": found[2], "3 to 8": found[3:9]}
        print(f"{task:6} {share:6.2%}: places", ", ".join(f"{name} {x.mean():.2f}" for name, x in means.items()),
              f"  over all {lost.mean():.2f} ±{standard_error(lost):.2f} less than SnapKV")
    axis.set(title=task, xlabel="place of the value's first token in its chunk", xticks=range(10))
    axis.grid(alpha=0.3)
axes[0].set_ylabel("answered, aware")
axes[1].legend();

# %% [markdown]
# Only the grid has moved, and all hangs on it: at places 3 to 8 the questions are answered, as with SnapKV; cut, most are not. At places 1 and 2 it depends on the budget. The votes fall on the words before the value, as the question's words look for what comes next; so a chunk that begins just before the value has gathered few of them. Over all ten places the grid costs 13 to 27 points, needles and pairs alike.
#
# ## How long should a chunk be?

# %%
lengths, at = [1, 2, 5, 10, 20, 40], 1 / 8
questions = {"needle and recall: values of 2 tokens": [(bench.batches[task], bench.told[task]) for task in ("needle", "recall")],
             "few-shot: lines of about 12": [(bench.batches["few_shot"], bench.told["few_shot"])],
             "needle: values of 8 tokens": [recorded[8]]}
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
for (name, knobs), style in zip({"sum of votes (paper)": {}, "max of pooled votes": dict(kernel=7, score="max")}.items(), ("s--", "D-")):
    for axis, (title, asked) in zip(axes, questions.items()):
        right = [torch.cat([aware(*x, ChunkKV, at, chunk=n, **WINDOW, **knobs) for x in asked]) for n in lengths]
        axis.errorbar(lengths, [x.mean() for x in right], [standard_error(x) for x in right], fmt=style, label=name, markersize=5, capsize=2)
        axis.set(xscale="log", xticks=lengths, xticklabels=lengths, xlabel="chunk length c", title=title, ylim=(-.02, 1.05))
        axis.minorticks_off()
        print(f"{name:21} {title:37}", "  ".join(f"c={n}: {x.mean():.2f}" for n, x in zip(lengths, right)))
for axis in axes:
    axis.grid(alpha=0.3)
axes[0].set_ylabel("accuracy, aware, 12.5 %")
axes[0].legend(fontsize=8);

# %% [markdown]
# Chunks of one token, with the pool, are SnapKV; without it, the choice of tokens. The paper's rule needs length: the longer the chunk, the fewer values are cut, and in few-shot chunks of ten and more, about a line, do better than chunks of five and fewer. (Among 10, 20 and 40, 24 documents tell no difference.) With a pool *and* the maximum, a chunk that begins within three tokens of a vote counts as if it held it, so nearly all values of two tokens are found at any length; values of eight still need long chunks. (Room comes in steps: of some 55 slots beside the window, chunks of 20 and of 40 both fill 40.)
#
# ## The knobs, and real boundaries
#
# What does each choice do? All at 12.5 %, three tasks:

# %%
variants = {"fill the room that is left": (ChunkKV, dict(fill=True)),
            "one choice per layer": (ChunkKV, dict(per_head=False)),
            "kvpress: c=20, mean, pool 5, per layer": (ChunkKV, dict(chunk=20, score="mean", kernel=5, per_head=False)),
            "pool 7": (ChunkKV, dict(kernel=7)), "pool 7, max": (ChunkKV, dict(kernel=7, score="max")),
            "at boundaries, sum": (SemanticChunkKV, ENDS | dict(kernel=1, score="sum")),
            "at boundaries, mean": (SemanticChunkKV, ENDS | dict(kernel=1))}
base = rows["SnapKV", at]
measured = {"SnapKV": base, "ChunkKV (paper)": rows["ChunkKV", at],
            "at boundaries, mean, pool 7": rows["SemanticChunkKV", at]}
measured |= {name: run(Method, at, **WINDOW, **knobs) for name, (Method, knobs) in variants.items()}
for name, r in measured.items():
    cells = (f"{setting} {mean_and_error(r, setting)[0]:.2f} ({change(r, base, *(f'{task}_{setting}' for task in TASKS))})" for setting in ("aware", "blind"))
    print(f"{name:40}", "  ".join(cells), f" KL {r['kl']:.3f} ({change(r, base, 'kl')})  {live(r):.0f} KiB")

# %% [markdown]
# (In brackets the paired difference to SnapKV; 24 documents a task, 12 texts.) On the grid, filling the room that is left with single tokens (8 % more bytes) lowers the KL by 0.03 and moves no answer: more than half of what ChunkKV loses in KL is room left empty. One choice for all heads of a layer answers as much as one per head, within the errors, with a KL 0.03 higher. The pool mends much of the grid's damage to *aware*, and with the maximum all of it. At real boundaries chunks differ in length, and have to be compared by the *mean*, which is what each slot of the budget gathers: with the sum it is 0.90 in place of 0.97. With the pool, real boundaries cost no KL here. *Blind*, hardly a difference exceeds two standard errors. Mean, pool and the longest chunk of 32 tokens were chosen on such documents.
#
# ## Where nothing marks the end of a fact
#
# Real boundaries had it easy. Every fact so far ended with a full stop or a line break, and just there a semantic chunk ends. `Unmarked` makes the same tasks without these marks: no full stop after a value, " is " in place of a pair's colon, commas in place of line breaks. The text around the facts keeps its own. Knobs were chosen on documents of seed 0; these have seed 1.

# %%
plain |= {"needle, values of 8 tokens": read("needle", unmarked, seed=1, B=64, facts=1, numbers=4),
          "few_shot": read("few_shot", unmarked, seed=1, B=64)}
compared = {name: methods[name] for name in ("SnapKV", "ChunkKV", "SemanticChunkKV")}
compared["pool 7, max"] = ChunkKV, WINDOW | dict(kernel=7, score="max")
for task, (documents, told) in plain.items():
    fact = encoding.decode(documents.tokens[0][documents.facts[0]].tolist()[:28])
    print(f"{task}: {fact!r} …; full cache {aware(documents, told, LayerCache, 1).mean():.2f}")
    for share in (.25, .125, .0625):
        right = {name: aware(documents, told, Method, share, **knobs)
                 for name, (Method, knobs) in compared.items()}
        d = {name: right["SemanticChunkKV"] - right[name] for name in ("SnapKV", "ChunkKV")}
        print(f"{share:8.2%}", "  ".join(f"{name} {x.mean():.2f}" for name, x in right.items()),
              "  Semantic less", ", ".join(f"{name} {x.mean():+.2f} ±{standard_error(x):.2f}" for name, x in d.items()))

# %% [markdown]
# What is left of the lead depends on the text around. Needles stand in text with lines and sentences of its own, so a chunk that holds the value still ends soon after it: values of eight tokens are found as before at 25 and 12.5 %, and the grid stays behind. At 6.25 % more than half of them are lost.
#
# The list of pairs has no mark in it at all, and only the longest chunk of 32 tokens cuts it. There are 55 slots beside the window at 12.5 % and 23 at 6.25 %, which then is the longest chunk, too: one chunk, and most pairs are lost, more than by the grid. In few-shot no lead over SnapKV is left below 25 %. (With its line breaks it is 5 to 12 points; README, 256 documents.) Beside both, chunks on the grid with a pool and the maximum lose few pairs and need no marks; but of long values they find less than half. So chunks that end where the text does are as good as the marks in that text, and our tasks had marked every fact.
#
# ## Do neighbouring layers choose alike? (claim C2)
#
# The Jaccard similarity |A ∩ B| / |A ∪ B| of two layers' kept sets, head by head, over 16 texts (no questions) at a tenth of 512 tokens; the window left out.

# %%
texts = evaluate.text_windows(tasks, 16, 512)
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
for axis, (name, knobs) in zip(axes, {"tokens (SnapKV, no pool)": (SnapKV, dict(kernel=1)), "SnapKV": (SnapKV, {}), "ChunkKV": (ChunkKV, {})}.items()):
    Method, knobs = knobs
    sets = held(compress(Method, texts, .1, **knobs), 512 - 8)
    similar = jaccard(sets[:, :, None], sets[:, None]).mean((0, 3))
    neighbours = [similar[i, i + 1].item() for i in range(c.n_layers - 1)]
    share = sets.float().mean().item()
    plot.heads(axis, similar, f"{name}: neighbours {np.mean(neighbours):.2f}", most=1)
    axis.set_xlabel("layer")
    print(f"{name:26} neighbours", " ".join(f"{x:.2f}" for x in neighbours), f"  mean {np.mean(neighbours):.2f}; two sets drawn at random {share / (2 - share):.2f}")

# %% [markdown]
# As the paper says: neighbouring layers agree more on chunks than on tokens. But not all of them: layers 2 to 5 agree with each other and, less, with layer 0. Layer 1 agrees with none, and layer 1 is the one that retrieves, as its start was built to do.
#
# ## Reusing indices
#
# Layers come in groups of N: the lowest selects, the others take its indices (`reuse`). What does that cost, and what does it save? `first` moves the groups up by a layer, so that layers 0 and 1 each select for themselves.

# %%
groups = {"reuse 1": {}, "reuse 2": dict(reuse=2), "reuse 4": dict(reuse=4), "reuse 2 from layer 1": dict(reuse=2, first=1), "reuse 5 from layer 1": dict(reuse=5, first=1),
          "reuse 4 from layer 2": dict(reuse=4, first=2)}
for name, knobs in groups.items():
    r = rows["reuse", name] = run(ChunkKV, 1 / 4, **WINDOW, **knobs) if knobs else rows["ChunkKV", 1 / 4]
    voters = [cache.voters for cache in make_cache(model, ChunkKV, budget=64, **WINDOW, **knobs)]
    base, by_task = rows["reuse", "reuse 1"], " ".join(f"{task} {np.mean(r['each'][f'{task}_aware']):.2f}" for task in TASKS)
    print(f"{name:21} voters {voters}  {by_task}   aware {change(r, base, *(f'{task}_aware' for task in TASKS))}  blind "
          f"{change(r, base, *(f'{task}_blind' for task in TASKS))}  KL {change(r, base, 'kl')}")

# %% [markdown]
# (Aware accuracy by task; then the paired differences to reuse 1.) `voters` is the number of queries by whose probabilities a layer chooses: 0 where it follows. With the groups of the paper, which begin at layer 0, layer 1 has to live on the choice of layer 0, and needles and pairs are gone; few-shot, whose lines lie where layer 0 looks, mostly stays. Let layer 1 select for itself, and five layers can share one choice without a loss of answers that could be seen here. In this model, where a group begins matters more than its size. The similarity did not say so: layer 1 is as unlike the layers that it leads as it is unlike layer 0. It says where reuse changes little, not what a change costs.
#
# The time that selecting takes, beyond writing keys and values, for 1024 tokens at a quarter (window 32, best of 9 in turn):

# %%
threads = torch.get_num_threads()
torch.set_num_threads(1)
caches = make_cache(model, evaluate.Recorder)
told = [evaluate.record(model, caches, torch.from_numpy(tasks.batch("needle", 0, 1, 1024).tokens))]
timed = {"writing alone": (LayerCache, {})} | {f"reuse {n}": (ChunkKV, dict(budget=256, reuse=n)) for n in (1, 2, 4)}
seconds = {name: [] for name in timed}
for name in [*timed] * 9:
    caches = make_cache(model, timed[name][0], **timed[name][1])
    began = time.perf_counter()
    evaluate.replay(told, caches)
    finish_prompt(caches)
    seconds[name].append(time.perf_counter() - began)
    began = time.perf_counter()
    evaluate.feed(model, told[0][0][0], make_cache(model), chunk=1024)
    seconds.setdefault("reading", []).append(time.perf_counter() - began)
torch.set_num_threads(threads)
written, *selected, reading = (min(x) for x in seconds.values())
for name, x in zip([*timed][1:], selected):
    print(f"{name}: {1e3 * (x - written):5.2f} ms, {(x - written) / (selected[0] - written):.2f} of reuse 1, {(x - written) / reading:.1%} of the time to read the prompt")

# %% [markdown]
# Six layers, of which 6, 3 and 2 select. The shares lie at 3/6 and 2/6 or above, since layers that follow still gather what they keep.
#
# ## In-context learning: are examples kept whole? (claim C3)
#
# The paper's argument: an example $O_i = [x_i, y_i]$ teaches as a whole. A choice of tokens takes a bit from every example and adds noise to all; chunks keep some examples whole. So: prompts with k labelled lines and a question. The share of examples of which a head has *every* token, the share of labels that it has, and the KL to the full cache at the answer. At a quarter of the entries; the examples stand at the end of the context, of which they are about 10, 20, 40 and 80 % for k = 4, 8, 16 and 32.

# %%
icl_rules = {"tokens": (SnapKV, dict(kernel=1)), "SnapKV": (SnapKV, {}), "ChunkKV": (ChunkKV, {}), "c = 20": (ChunkKV, dict(chunk=20)), "semantic": (SemanticChunkKV, ENDS)}
results, line_break = {}, encoding.encode_ordinary("\n")[0]
for k in (4, 8, 16, 32):
    documents, told = read("few_shot", seed=2, B=32, shots=k)
    spans = examples(documents, line_break)
    for blind in (False, True):
        reference, _ = at_the_answer(model, documents, told, maker(model, LayerCache, None), blind)
        for name, (Method, knobs) in icl_rules.items():
            make = maker(model, Method, 1 / 4, **WINDOW, **knobs)
            log_p, sets = at_the_answer(model, documents, told, make, blind)
            labels = [s[..., [x.stop - 1 for x in where]] for s, where in zip(sets, spans)]
            results[k, blind, name] = (torch.stack([kept_whole(s, where).mean() for s, where in zip(sets, spans)]),
                                       torch.stack([x.float().mean() for x in labels]),
                                       F.kl_div(log_p, reference, log_target=True, reduction="none").sum(-1))

# %%
figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
measures = {"examples kept whole, aware": (0, False), "labels kept, aware": (1, False), "KL at the answer, aware": (2, False), "KL at the answer, blind": (2, True)}
for name, style in zip(icl_rules, ("C5v:", "C0o-", "C1s--", "C6P-.", "C2D-")):
    for axis, (i, blind) in zip(axes, measures.values()):
        values = [results[k, blind, name][i] for k in (4, 8, 16, 32)]
        axis.errorbar([4, 8, 16, 32], [x.mean() for x in values], [standard_error(x) for x in values], fmt=style, label=name, capsize=2, markersize=5)
for axis, title in zip(axes, measures):
    axis.set(xscale="log", xticks=[4, 8, 16, 32], xticklabels=[4, 8, 16, 32], xlabel="examples in the prompt", title=title, ylim=(0, None))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].legend(fontsize=8)
for blind in (False, True):
    for name in icl_rules:
        whole, labels, kl = (torch.cat([results[k, blind, name][i] for k in (4, 8, 16, 32)]) for i in range(3))
        d = kl - torch.cat([results[k, blind, "ChunkKV"][2] for k in (4, 8, 16, 32)])
        print(f"{'blind' if blind else 'aware'}  {name:9} whole {whole.mean():.2f}  labels {labels.mean():.2f}  KL {kl.mean():.2f} ±{standard_error(kl):.2f}; to ChunkKV {d.mean():+.2f} ±{standard_error(d):.2f}")

# %% [markdown]
# The premise holds: chunks keep about three times as many examples whole as single tokens do when the question is known, and 1.4 times as many as SnapKV. The conclusion does not. Aware, single tokens are far worse than all others, as it predicts; but SnapKV, with fewer whole examples, is on a par with ChunkKV, and among the four that are not single tokens no difference to ChunkKV exceeds two standard errors. Blind, single tokens, with the fewest whole examples, have the lowest KL of all, though by less than two standard errors. So wholeness does not decide. Nor does the share of *labels* kept: aware it is 0.38 for single tokens and 0.53 to 0.55 for the others, which are the same two groups as in the KL and no more than that; blind it is lowest where the KL is lowest.
#
# ## The chain of inequalities, with its constants
#
# The appendix (Eq. 10 to 16, after Fang & Xie 2022) takes an example of k tokens from a model θ\*, and a wrong θ that the prompt cannot tell from it, $\sum_{j\ge2} \mathrm{KL}_j(\theta^*\Vert\theta) \le \epsilon_\theta + \xi_\theta(r)$, where $\xi_\theta(r)$ is the noise of compression. With the Fisher information $I_j$ of each token it concludes
#
# $$\lVert\theta-\theta^*\rVert^2 \le \frac{\epsilon_\theta + \xi_\theta(r)}{\frac12 (k-1) \min_j\lambda_{\min}(I_j)} \;\;(12), \qquad \mathrm{KL}_k \le \frac{(\epsilon_\theta+\xi_\theta(r))\,(\max_j\lambda_{\max}(I_j) + O(1))}{(k-1)\min_j\lambda_{\min}(I_j)} \;\;(15)$$
#
# On the way Eq. 11 drops the Taylor remainder of Eq. 10, which may be negative. Keep it: with $|\mathrm{KL}_j - \frac12\delta^\top I_j\delta| \le R\lVert\delta\rVert^2$ the denominators become $\lambda_{\min} - 2R$, and the $O(1)$ is $2R$.
# Two models in which all of this can be computed exactly: a hidden Markov chain of 5 tokens, θ\* = (0.2, 0.8), each token wrong with probability 0.02; and ten independent tokens that are 1 with probability θ\* = 0.3, the last one with 0.6 − θ. (It says as much about θ as the others, but its remainder has the other sign.) The directions of δ are chosen so that the remainder is negative; along others the printed bounds hold.

# %%
def coins(t, k=10):
    """Table (2,)·k of independent tokens; the last is mirrored."""
    table = torch.ones((), dtype=t.dtype)
    for chance in [t[0]] * (k - 1) + [0.6 - t[0]]:
        table = table[..., None] * torch.stack((1 - chance, chance))
    return table


def bounds(table, theta, delta):
    """Both bounds over what they bound, without and with the remainder, and λ_min, R."""
    information = fisher(table, theta)[1:]
    kl, square = token_divergences(table(theta), table(theta + delta)), delta @ delta
    R = ((kl[1:] - torch.einsum("p,jpq,q->j", delta, information, delta) / 2).abs() / square).max()
    ratios = [f(kl[1:].sum(), information, r) / true for f, true in ((distance_bound, square), (answer_bound, kl[-1])) for r in (0, R)]
    return [x.item() for x in (*ratios, torch.linalg.eigvalsh(information)[:, 0].min(), R)]


vector = lambda *x: torch.tensor(x, dtype=torch.float64)
chain = lambda t: markov(t, 5, noise=.02)
steps, (left, right) = np.linspace(.01, .25, 13), (0, 2)
curves = {"Eq. 12: bound / ‖δ‖²": (left, [bounds(chain, vector(.2, .8), x * vector(1, -1)) for x in steps], 2 ** .5 * steps),
          "Eq. 15: bound / KL of the last token": (right, [bounds(coins, vector(.3), vector(x)) for x in steps], steps)}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for axis, (title, (i, results, x)) in zip(axes, curves.items()):
    axis.plot(x, [r[i] for r in results], "s--", label="as printed" + (", O(1) = 0" if i else ""))
    axis.plot(x, [r[i + 1] for r in results], "o-", label="with the remainder")
    axis.axhline(1, color="black", linewidth=1)
    axis.set(xlabel="‖δ‖ = ‖θ − θ*‖", title=title, ylim=(0, 3))
    axis.grid(alpha=0.3)
    for r, where in ((results[0], x[0]), (results[-1], x[-1])):
        print(f"{title}: at ‖δ‖ = {where:.2f} {r[i]:.2f} as printed, {r[i + 1]:.2f} with the remainder; 2R = {2 * r[-1]:.2f}, λ_min = {r[-2]:.2f}")
axes[0].legend(fontsize=8);

# %% [markdown]
# A bound must lie above 1. As printed, both fall below, the further the larger δ: Eq. 12 because the remainder is dropped, Eq. 15 unless its O(1) grows with δ. With the remainder in both places they hold (`tests/test_chunk_kv.py` checks it on random models, and that above the line alone it may not be enough). But where 2R comes near λ_min the repaired bound says little, and beyond it nothing.
#
# And where some direction of θ leaves a token unchanged, λ_min = 0 and there is no bound at all. The appendix does not say what θ consists of. If it were a decoder's weights, there would be such a direction for every token: let a layer's value matrix grow and its output matrix shrink by the same factor. Here the factor is 2, in layer 0:

# %%
other = weights.from_hf(TINY)
_, _, values = other.blocks[0].attention.split(other.blocks[0].attention.qkv.weight)
values *= 2
other.blocks[0].attention.o.weight /= 2
print(f"largest change of a logit: {(other(texts[:1]) - model(texts[:1])).abs().max():.1g}")

# %% [markdown]
# No logit changes, so no token tells these weights apart. (Counting alone would not have shown it: a token that takes V values after one of V others can tell at most V(V − 1) directions apart, which is 4.2 million here, and this decoder has 2.8 million weights.)
#
# ## When do whole examples carry less noise?
#
# The paper gives $\xi_\theta(r)$ no formula. Take it for the divergence that the lost tokens would have added: a choice of the same tokens from all n examples loses $n\,(\mathrm{KL}(O) - \mathrm{KL}(O_{kept}))$, whole examples lose $(n - m)\,\mathrm{KL}(O)$. At equal budgets whole examples lose less exactly if the kept tokens say less *per token* than a whole example does: if what is lost and what is kept mean more together.

# %%
def together(t):   # x fair, y = x with probability θ: neither says anything alone
    return torch.stack((torch.stack((t, 1 - t)), torch.stack((1 - t, t)))).squeeze(-1) / 2


def copies(t):     # y = x: each says everything
    return torch.diag(torch.cat((t, 1 - t)))


one, other = vector(.8), vector(.6)
hidden, wrong = (markov(t, 4, .1) for t in (vector(.3, .8), vector(.5, .6)))
cases = {"x and y only together": (together(one), together(other), [1]), "y a copy of x": (copies(one), copies(other), [1])}
cases |= {f"hidden Markov, tokens {a + 1}, {b + 1} of 4": (hidden, wrong, [a, b]) for a, b in ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3))}
print("10 examples, half of all tokens kept; nats of divergence lost")
for name, (p, q, kept) in cases.items():
    print(f"{name:33} of {10 * divergence(p, q):5.2f}: tokens {token_noise(p, q, kept, 10):5.2f}   whole examples {chunk_noise(p, q, 5, 10):5.2f}")

# %% [markdown]
# So the argument is right for examples whose parts mean something only together, and wrong for examples that repeat themselves. In between it matters *which* tokens are kept: in this chain neighbours say more than the same number scattered.
#
# ## Exercises
#
# 1. `ChunkKV(kernel=7, score="max")` needs only one vote for a chunk. What does a chunk length of 50 do to *recall* at 12.5 %, where there is room for one? Predict, then measure.
# 2. `PlacedChunkKV` moves the grid. Where must it lie for a value of eight tokens? Predict the ten places for *recorded[8]*, then measure; and with chunks of 20?
# 3. `SemanticChunkKV` cuts at six marks. Try line breaks alone, and blank lines alone. Which task gains, which loses? *Hint: build your own `ends`.*
# 4. Write a rule that chooses `first` and `reuse` from the Jaccard matrix alone. Does it find out that layer 1 must select for itself? What else could a rule look at that does? *Hint: the weight that layer 1's own choice gathers, and that of layer 0's.*
# 5. Put AdaKV's budgets under the chunks: `pick(["ada_kv+chunk"])` from `nanollm.__main__`. Why is a head whose share is below ten tokens worse off than under SnapKV? What does `fill=True` do about it?
# 6. Let examples be three tokens, x₁, x₂ and y = x₁ xor x₂ with noise. For which kept pairs is `token_noise` everything? Check with `divergence`.
