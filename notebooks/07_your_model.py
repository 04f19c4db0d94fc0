# %% [markdown]
# # The same question to your model
#
# The other notebooks measure one small decoder of our own. Which entries of a KV cache can go, and what is lost with them, is a question to every model.
# This notebook puts it to a causal language model of `transformers`. It runs on the checkpoint that ships, opened as any other; **one cell names the folder, and there you can put your own**.
#
# **Read before:** what a KV cache is (`00_kv_cache.ipynb`), and beside this notebook `nanollm/cache.py` and `nanollm/hf/bridge.py`.
#
# **How long it takes:** half an hour to read, about a minute to run.
#
# **What you will know:** how to give your model a compressed cache in five lines; which tokens it then keeps, and how many bytes; how to compare methods on it, and when that comparison means nothing; which models are refused; and how to try a method of your own.
#
# Sentences about results are about the shipped model, of 2.8 million parameters. With another model, believe the numbers that your cells print.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from dataclasses import dataclass
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
import numpy as np
import torch
import torch.nn.functional as F
import transformers

# %%
from methods.snap_kv import SnapKV
from nanollm import TINY
from nanollm.cache import LayerCache, bytes_in_16_bits, cache_bytes
from nanollm.commands import plot, table
from nanollm.commands.registry import given, has_budget, load, pick
from nanollm.hf.bridge import Bridged, attach, detach
from nanollm.measure.benchmark import TASKS, Slices, paired
from nanollm.measure.corpus import words
from nanollm.measure.evaluate import maker, retrieve, standard_error
from nanollm.measure.tasks import Tasks

torch.set_grad_enabled(False);  # or whatever is read would be kept for a backward pass

# %% [markdown]
# ## Your model
#
# `FOLDER` is a folder with `config.json`, weights and a tokenizer, as `save_pretrained` writes it. Nothing is downloaded.
# `load` is what the command line uses. It gives a model wrapped for our measurements and its own tokenizer; inside is the model as `AutoModelForCausalLM.from_pretrained` makes it. A large one takes half the bytes with `dtype="bfloat16"`.
# If you have a model and its tokenizer at hand already, these are enough: `bridged = Bridged(model)` and `encoding = Foreign(its_tokenizer)`, from `nanollm.tokenizer`.

# %%
FOLDER, DEVICE = TINY, "cpu"  # ← a pathlib.Path of your own, and "cuda" if you have it

bridged, encoding = load(FOLDER, DEVICE, engine="transformers")
model, c = bridged.model, bridged.config
detach(model)  # its own attention back, as if nothing had happened
size = sum(p.numel() for p in model.parameters()) / 1e6
print(f"{type(model).__name__}: {size:.1f} M parameters, {c.n_layers} layers, "
      f"{c.n_heads} query heads that share {c.n_kv_heads} key/value heads")

# %% [markdown]
# It needs something to remember. `Tasks` hides four facts in real text and asks for one of them at the end, in the model's own tokens.

# %%
tasks = Tasks(encoding, "test")
page = tasks.batch("needle", seed=9, B=1, T=384)  # one document of 384 tokens
tokens, answer = torch.from_numpy(page.tokens).to(DEVICE), page.answers[0]
prompt, right = tokens[:, :answer.start], tokens[0, answer]
print(encoding.decode(prompt[0].tolist()), "⟦", encoding.decode(right.tolist()), "⟧")

# %% [markdown]
# The answer that is wanted stands in brackets. The model does not see it.
#
# ## Five lines
#
# `attach` makes a memory: one cache a layer, of the method that you name, with its options. The model reads the prompt into it. `end_prompt` says that the prompt is over, and the method compresses. `generate` goes on from what is left. `detach` gives the model its own attention back.
# The prompt's last token is read after the compression. Otherwise the full cache would give the first word of the answer.
#
# The method is SnapKV: the last queries of the prompt vote, and each head keeps the 48 tokens with the most window scores, the 8 voting ones among them.

# %%
memory = attach(model, SnapKV, budget=48, window_size=8)
model(prompt[:, :-1], past_key_values=memory)
memory.end_prompt()
written = model.generate(prompt, past_key_values=memory, max_new_tokens=len(right),
                         do_sample=False)
detach(model)

print("answer:", encoding.decode(written[0, answer.start:].tolist()))

# %% [markdown]
# Here the question was a part of the prompt that was compressed, so it could vote. We call this **aware**. In the other setting, **agnostic**, the text is compressed first and the question comes afterwards. Then nobody knows yet what will be asked.
# The function below is the five lines again, with the cut as an argument.

# %%
def ask(Method=LayerCache, cut=answer.start - 1, **options):
    """The answer, with the first `cut` tokens compressed; what each head then kept; the bytes."""
    memory = attach(model, Method, **options)
    model(prompt[:, :cut], past_key_values=memory)
    memory.end_prompt()
    kept = plot.kept(memory.caches, cut)
    bytes_ = *cache_bytes(memory.caches), bytes_in_16_bits(memory.caches)
    written = model.generate(prompt, past_key_values=memory, max_new_tokens=len(right),
                             do_sample=False)
    detach(model)
    return encoding.decode(written[0, answer.start:].tolist()), kept, bytes_


CUTS = {"aware": answer.start - 1, "agnostic": page.question}
print("right     ", encoding.decode(right.tolist()), "\nfull cache", ask()[0])
kept = {}
for setting, cut in CUTS.items():
    told, kept[setting], _ = ask(SnapKV, cut, budget=48, window_size=8)
    print(f"{setting:10} {told}")

# %% [markdown]
# Aware, the answer is that of the full cache, from an eighth of the tokens. Agnostic, the model answers in the same form, but the number is made up.
#
# ## What it keeps
#
# `plot.kept` says which tokens each head of each layer still holds. A row below is a key/value head, a column is a token; what is blue stays. The pale bands are the facts, and the arrow points at the number that is asked for. What is grey at the right end comes after the compression.

# %%
value, H = page.stated[0], c.n_kv_heads  # where the number that is asked for stands
figure, axes = plt.subplots(2, 1, figsize=(11, 6.4), layout="constrained", sharex=True)
for axis, (setting, held) in zip(axes, kept.items()):
    for i in page.facts[0].nonzero()[0]:
        axis.axvspan(i - 0.5, i + 0.5, color="#f3d9c9", linewidth=0, zorder=0)
    axis.axvspan(CUTS[setting] - 0.5, answer.start, color="0.9", zorder=0)
    there = np.ma.masked_equal(held.reshape(-1, held.shape[-1]), False)
    axis.imshow(there, cmap=ListedColormap([plot.style("snap_kv")["color"]]), aspect="auto",
                interpolation="none", zorder=1)
    axis.hlines(H * np.arange(1, c.n_layers) - 0.5, -0.5, answer.start, "0.6", linewidth=0.6)
    axis.annotate("asked for", (value, -0.5), (value, -2), ha="center",
                  arrowprops=dict(arrowstyle="->"))
    axis.set(xlim=(-0.5, answer.start - 0.5), ylim=(H * c.n_layers - 0.5, -0.5),
             yticks=H * np.arange(c.n_layers) + (H - 1) / 2, yticklabels=range(c.n_layers),
             ylabel=f"layer, {H} heads each")
    axis.set_title(f"snap_kv, {setting}", loc="left")
axes[1].set_xlabel("token");

# %%
for setting, held in kept.items():
    both = held[..., value:value + len(right)].all(-1)  # (L, H): heads that hold the whole number
    print(f"{setting}: the number is whole in {both.sum()} of {both.size} heads; "
          f"layer by layer: {both.sum(-1).tolist()}")

# %% [markdown]
# Aware, the three heads of layer 1 keep the whole number. That is the layer that retrieves in this model (`00_kv_cache.ipynb`). Agnostic, no head keeps it. The stretch at the right is the 8 tokens that vote, and what lies just before them.
#
# The bytes are counted on the tensors: *live* is what is kept, *allocated* is what the buffers take. The numbers of this decoder have 32 bits. The share is what it is with 16 bits, which most models in use have.

# %%
METHODS = pick(["full", "snap_kv", "chunk_kv", "h2o", "streaming_llm", "quantized_2"])
print("after the prompt:        live  allocated, KiB")
full = ask()[2][2]
for name, Method in METHODS.items():
    live, allocated, in_16 = ask(Method, **given(Method, budget=96, window_size=8))[2]
    print(f"{name:18}{live / 1024:11.1f}{allocated / 1024:11.1f}{in_16 / full:8.0%} of full")

# %% [markdown]
# `budget=96` is a quarter of the page. `quantized_2` has no budget: it keeps every token and gives each number two bits. H2O takes a little more than the others, because it remembers a score with each token. (StreamingLLM turns keys by RoPE. For a model with learned positions, as GPT-2, put `streaming_llm_absolute` into the list.)
#
# ## Compare
#
# One page proves nothing. `Slices` makes documents of three kinds: **needle** is the task above, **recall** asks for one of 16 listed pairs, **few-shot** for the label of a line of code. It also compresses plain text and measures how far the predictions that follow move from the full cache's: KL, in nats a token.
# `Bridged(model)` is the model with its attention replaced. It reads `BATCH` documents at a time, each once for all methods: the queries, keys and values are recorded, if they fit into `KEEP` bytes.
#
# 16 documents a task are few. They tell methods apart that differ much, and no others; the standard error is printed.

# %%
T, N, BUDGET = 384, 16, 0.25  # tokens of a document, documents a task, share of the prompt
BATCH, KEEP = 16, 4e9  # fewer at a time for a large model
bench = Slices(Bridged(model), tasks, T, N, seed=0, batch=BATCH, keep=KEEP)
print(bench)


def measure(name, Method):
    """A row: what the method keeps of the answers, what it changes, and its bytes. Printed, too."""
    bridged, keep_ratio = Bridged(model), BUDGET if has_budget(Method) else None
    make = maker(bridged, Method, keep_ratio, **given(Method, window_size=8))
    row = table.row_of(name, keep_ratio, T, {}, bench.run(bridged, make))
    print(table.show(row, short=True))
    return row


print(table.header(T, N, seed=0, short=True))
rows = [measure(name, Method) for name, Method in METHODS.items()]

# %% [markdown]
# KiB are those of one text after its continuation, with numbers of 16 bits; `full` and `quantized_2` keep every token, so their budget is "all". The figure shows the mean over the three tasks and KL over bytes. A bar is one standard error.

# %%
def draw(rows):
    """Mean accuracy, aware and agnostic; KL over bytes. In the colours of every figure here."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    points, full = {row["method"]: [row] for row in rows if row["method"] != "full"}, rows[0]
    plot.slopes(axes[0], points, full)
    plot.over_bytes(axes[1], points, full, "kl", "KL(full ‖ compressed) per token, nats")
    axes[1].autoscale(False)
    for row in rows[1:]:
        bar = dict(fmt="none", ecolor=plot.style(row["method"])["color"], capsize=3, linewidth=1)
        for x, setting in enumerate(table.SETTINGS):
            error = sum(row[f"{task}_{setting}_se"] ** 2 for task in TASKS) ** 0.5
            axes[0].errorbar(x, row[setting], error / len(TASKS), **bar)
        axes[1].errorbar(row["live_16"] / 1024, row["kl"],
                         standard_error(torch.tensor(row["each"]["kl"])), **bar)


draw(rows)

# %% [markdown]
# SnapKV and ChunkKV, in which the last queries vote, answer most questions if they know them, and lose needles and recall if they do not. H2O and StreamingLLM do not gain from the question. They lose needles and recall in both settings, and keep few-shot, whose examples stand at the end of the text.
# Two bits for every token take fewer bytes than SnapKV's and ChunkKV's quarter (220 KiB against 334; H2O and StreamingLLM, which keep their budget while decoding, have 190). They answer what the full cache answers, and move the predictions least. Whether that holds for your model is what the cell is for.
#
# ## When the comparison means nothing
#
# A task at which the full cache fails cannot judge the methods: all of them fail, and the worst looks as good as the best. `table.unfit` names such tasks. It says nothing about the rows above. Here is a model of the same shape with random weights:

# %%
print("above:", table.unfit(rows) or "the full cache does every task")
torch.manual_seed(0)
untrained = Bridged(type(model)(model.config).to(DEVICE).eval())
random = Slices(untrained, tasks, T, 4, seed=0, batch=BATCH, keep=KEEP)
row = table.row_of("full", None, T, {}, random.run(untrained, maker(untrained, LayerCache, None)))
print(f"\nrandom weights:\n{table.unfit([row])}")

# %% [markdown]
# What then? Shorter documents are easier. A chat model may need its template: `Tasks(encoding, "test", chat=True)`. If a task stays out of reach, leave it out, or go by KL alone: it needs no answers.
#
# ## Is it still your model?
#
# With a method that forgets nothing the model must say what it says without us. Here are its logits with its own attention and with a full memory, the text read at once, in pieces, and token by token.

# %%
detach(model)
expected = model(tokens).logits
for size in (T, 64, 1):
    memory = attach(model)
    parts = [model(part, past_key_values=memory).logits for part in tokens.split(size, 1)]
    logits = torch.cat(parts, 1)
    same = (logits.argmax(-1) == expected.argmax(-1)).all().item()
    print(f"{size:3} tokens at a time: a logit differs by at most "
          f"{(logits - expected).abs().max():.1g}; the likeliest tokens are the same: {same}")
print(f"logits lie between {expected.min():.1f} and {expected.max():.1f}")
detach(model)

# %% [markdown]
# What is left is rounding in 32 bits. In bfloat16 it is larger, and between two nearly equal tokens it may decide.
#
# ## What is refused
#
# A cache here does plain attention over what it keeps. A model that does something else would be answered wrongly, so it is refused, with a reason. Each of the small models below has random weights, and the last line is your own model with a padded batch.

# %%
small = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
             num_attention_heads=4, num_key_value_heads=2)
shapes = {"Gemma2ForCausalLM": small,
          "MistralForCausalLM": small | dict(sliding_window=16),
          "GptOssForCausalLM": small | dict(num_local_experts=4),
          "BloomForCausalLM": dict(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
          "T5ForConditionalGeneration": dict(vocab_size=97, d_model=32, num_layers=2)}
models = {name: (Model := getattr(transformers, name))(Model.config_class(**shape)).eval()
          for name, shape in shapes.items()}
text = torch.arange(3, 43)[None]  # 40 tokens
padding = dict(attention_mask=(text > 6).to(DEVICE))  # as if the first four were padding
for name, one in (models | {"yours": model}).items():
    try:
        memory = attach(one)
        one(text.to(one.device), past_key_values=memory, **(padding if one is model else {}))
    except ValueError as error:
        print(f"{name}:\n    {error}")
detach(model)

# %% [markdown]
# In order: scores that are capped, a sliding window that is shorter than the text (a shorter text is read), logits of a sink, attention that does not go through the interface of `transformers`, an encoder with cross attention, a padded batch.
#
# ## Your own method
#
# A method is a subclass of `LayerCache` that overrides what it needs. This one keeps the keys that are least like the average key of their head, and the 8 newest tokens. It asks no query, so it cannot know the question. KeyDiff ([2504.15364](https://arxiv.org/abs/2504.15364)) is built on this idea.

# %%
@dataclass(eq=False)
class UnlikeKeys(LayerCache):
    budget: int  # slots per key/value head

    def evict(self):
        direction = F.normalize(self.k, dim=-1)  # (B, H, S, D)
        like = (direction * direction.mean(2, keepdim=True)).sum(-1)
        newest = self.pos >= self.seen - 8
        self.shrink(-like.masked_fill(newest, -2), self.budget)


rows.append(measure("unlike_keys", UnlikeKeys))

# %%
draw(rows)
snap_kv = next(row for row in rows if row["method"] == "snap_kv")
for setting in table.SETTINGS:
    more, error = paired(rows[-1], snap_kv, [f"{task}_{setting}" for task in TASKS])
    print(f"{setting}: unlike_keys against snap_kv, answers: {more:+.2f} ±{error:.2f}, by document")

# %% [markdown]
# Agnostic, it finds needles that nobody has asked for yet. It pays with answers in few-shot, and its predictions move most.
#
# Before you believe in it: a number within ordinary text *is* unlike its surroundings, so the task may suit the rule. The last cell takes that away. The facts are of the same kind, but they stand among other words and numbers.

# %%
rng = np.random.default_rng(0)
drawn = zip(rng.choice(words("test"), (4000, 3)), rng.integers(10_000, size=4000))
filler = " ".join(f"{' '.join(three)} {number:04d}." for three, number in drawn)
alike = Tasks(encoding, "test", filler=filler).batch("needle", seed=0, B=N, T=T)
print(encoding.decode(alike.tokens[0, :60].tolist()), "…\n\nneedles    aware        agnostic")
bridged = Bridged(model)
for name, Method in {"full": LayerCache, "snap_kv": SnapKV, "unlike_keys": UnlikeKeys}.items():
    keep_ratio = BUDGET if has_budget(Method) else None
    make = maker(bridged, Method, keep_ratio, **given(Method, window_size=8))
    found = retrieve(bridged, alike, make)
    print(f"{name:11}", *(f"{x.mean():.2f} ±{standard_error(x):.2f}  " for x in found.values()))

# %% [markdown]
# The full cache and SnapKV, aware, still find every needle. `unlike_keys` loses most of what it had found: what it had found was what stands out, and not what is a fact. A table tells how a method does on its tasks; what made it do so is a second question, and it needs a second experiment.
#
# ## Where to go
#
# - `python -m nanollm --model FOLDER` is this comparison with more methods, from the command line. It takes our own decoder where it knows the family; `--engine transformers` takes yours. A file in `methods/` that ends in `variants = {"unlike_keys": UnlikeKeys}` adds your method to every table.
# - `--chat` puts documents into the tokenizer's chat template, `--text FILE` takes your text as what the facts are hidden in.
# - `--dtype bfloat16`, `--batch 4`, `--memory 8` make large models fit: numbers of 16 bits, four documents at a time, at most 8 GB of recorded prompts. `--json rows.json --resume` goes on after an interruption.
# - `python -m nanollm plan --model FOLDER --lengths 32768` tells from `config.json` alone what weights and caches will take.
# - `python -m nanollm generate --model FOLDER --method h2o --budget 64 --file TEXT` continues a text of yours.
#
# ## Exercises
#
# 1. At which budget does SnapKV lose the answer on the page, aware? And does it hang on the seed? *Hint: `ask`, and `seed` of `tasks.batch`.*
# 2. Let `UnlikeKeys` look at values instead of keys. Predict first which task gains. *Hint: one letter.*
# 3. Does SnapKV depend on a question that comes last? Put 32 tokens of other text behind the question, before `end_prompt`, and look at the map again. *Hint: `tasks.filler`, and `torch.cat`.*
