# %% [markdown]
# # Which entries would the output miss?
#
# SnapKV, PyramidKV and AdaKV keep the cache entries that the end of the prompt *looks at*. CriticalKV asks instead how much the attention *output* changes when an entry goes, bounds that change, and keeps what lowers the bound.
# This notebook follows its argument on the shipped model, step by step: the votes, the budgets, the bound and its assumption, the selection, and what becomes of the answers. At the end the premise itself is tested: does a smaller change of the output mean better text?
#
# You should know what a KV cache is (`00_kv_cache.ipynb`). The code to read beside it: `WindowCache` in `nanollm/cache.py`, then `methods/snap_kv.py`, `pyramid_kv.py`, `ada_kv.py`, `critical_kv.py` and `residual_entry.py`.

# %%
import sys; sys.path[:0] = [".", ".."]  # the repository, seen from its root or from notebooks/
from dataclasses import make_dataclass
import matplotlib.pyplot as plt
import numpy as np
import torch

from methods.ada_kv import AdaKV
from methods.critical_kv import (Critical, CriticalCode, LeastTheta, assumption_1, least_theta, part_of, perturbation, theta,
                                 theta_hat, theta_relaxed, two_stage, value_norms)
from methods.pyramid_kv import PyramidKV
from methods.residual_entry import Residual
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from nanollm import TINY, evaluate, plot, tokenizer, weights
from nanollm.cache import cache_bytes, finish_prompt, make_cache, top
from nanollm.data import Tasks
from nanollm.evaluate import TASKS, Benchmark, continuation, maker, paired, retrieve

# %%
torch.set_grad_enabled(False)
model, encoding = weights.from_hf(TINY), tokenizer.load(TINY / "tokenizer.tiktoken")
tasks, c = Tasks(encoding, "test"), model.config
bench = Benchmark.build(model, tasks, 512, documents=16)  # for each of three tasks, and half as many texts
WINDOW = 8  # the papers' 32 would be all of the smallest budget here: prompts are a tenth as long

# %% [markdown]
# ## The last queries vote
#
# When the prompt is over, the last w queries have just been computed. **SnapKV** lets them vote: the score of a token is the attention that these queries gave it, averaged, and then max-pooled over 7 neighbours, so that a token is kept together with those around it. Each head keeps the highest scores, and the window itself.
#
# Below, a needle task: four facts in a text, one of which is asked for at the very end, so that the question is in the window. An eighth of the entries is kept.

# %%
def compress(Method, tokens, share=1 / 8, **knobs):
    """Caches that have read tokens (B, T) and kept a share of them."""
    caches = make_cache(model, Method, budget=round(share * tokens.shape[1]), **dict(window=WINDOW) | knobs)
    evaluate.feed(model, tokens, caches)
    finish_prompt(caches)
    return caches


batch = tasks.batch("needle", seed=0, B=16, T=256)
end = batch.answers[0].start - 1  # the last token of the question is fed after the compression
prompt, facts = torch.from_numpy(batch.tokens[:1, :end]), batch.facts[0, :end]
pieces = [encoding.decode([token]) for token in prompt[0].tolist()]
panels = {f"layer {i}": plot.kept(compress(SnapKV, prompt), end)[i].mean(0) for i in (0, 1, 3, 5)}
plot.text(pieces, panels, facts, columns=2, width=72);

# %% [markdown]
# Facts are underlined. All layers keep the question (it is the window), and layer 1, where this model's retrieval heads live, keeps the fact that it asks for. Pooling makes the kept tokens come in runs.
#
# ## How many, and where
#
# SnapKV gives each head of each layer the same budget. **PyramidKV** gives the lower layers more, the upper layers less. **AdaKV** lets the heads of a layer compete: a head gets what it has among the layer's highest votes. In all three the total is the same.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for axis, Method in zip(axes, (SnapKV, PyramidKV, AdaKV)):
    held = plot.kept(compress(Method, prompt), end).sum(-1)
    plot.heads(axis, held, f"{Method.__name__}: {held.sum()} entries", "{:.0f}", most=60)
    axis.set_xlabel("key/value head")

# %%
caches = compress(AdaKV, prompt)
live, allocated = cache_bytes(caches)
per_slot = 2 * c.head_dim * 4 + 4  # key, value, position
padded = sum(cache.length * c.n_kv_heads * per_slot for cache in caches)
print(f"AdaKV: {live / 1024:.1f} KiB live, {allocated / 1024:.1f} allocated; padded to the longest head: {padded / 1024:.1f}")

# %% [markdown]
# Heads of different length are stored one after the other (`LayerCache.pack`). Padding each to the longest would give back a part of what eviction has freed.
#
# ## Why weights alone mislead
#
# What a token adds to a head's output is its weight times its *projected value*: $o = \sum_i A_i\,\mathcal V_i$ with $\mathcal V = V W^O$. A token with a large weight and a tiny value adds next to nothing.
# How much is there to gain? Take the weights and the norms $\lVert\mathcal V_i\rVert_1$ of 16 prompts, and look for the entry that is read much and says least: more than 5 % of a head's weight, and the smallest norm.

# %%
class Look(SnapKV):
    """Keeps what it saw before it evicts: weights and ‖𝒱‖₁, (B, H·G, S) each, and the projected values."""
    def select(self, votes, budget):
        self.seen_weights = self.rows.mean(3).flatten(1, 2)
        self.seen_norms = value_norms(self.v, self.w_o).flatten(1, 2)
        v = self.v.repeat_interleave(self.w_o.shape[1] // self.v.shape[1], 1)
        self.projected = torch.einsum("bhnd,ohd->bhno", v, self.w_o)
        return super().select(votes, budget)


looks = compress(Look, torch.from_numpy(batch.tokens[:, :end]))
A = torch.stack([cache.seen_weights for cache in looks], 1)      # (B, L, heads, S)
norms = torch.stack([cache.seen_norms for cache in looks], 1)
V = torch.stack([cache.projected for cache in looks], 1)          # (B, L, heads, S, d_model)

# %%
relative = (norms / (A * norms).sum(-1, keepdim=True))[..., :-WINDOW]   # 1: the mean norm, as the head weighs it
row, layer, head, token = np.unravel_index(torch.where(A[..., :-WINDOW] > 0.05, relative, 9).argmin().item(), relative.shape)
a, n = A[row, layer, head, :-WINDOW], norms[row, layer, head, :-WINDOW]
word = encoding.decode([batch.tokens[row, token]])
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
axis.semilogx(a, n, ".", color="0.6", label="tokens of the prompt")
axis.semilogx(a[token], n[token], "D", color="#b03a00", label=f"{word!r}, token {token}")
axis.set(xlabel="attention weight A", ylabel="‖projected value‖₁", ylim=(0, None), title=f"layer {layer}, head {head}")
axis.legend(loc="lower left")
print(f"{word!r} of prompt {row}: ‖𝒱‖₁ {n[token]:.1f}, median {n.median():.1f}; {a[token] / a.sum():.1%} of the weight outside the window, "
      f"{(a * n)[token] / (a * n).sum():.1%} of Σ A‖𝒱‖₁; rank {(a > a[token]).sum() + 1} by weight, {(a * n > (a * n)[token]).sum() + 1} by A‖𝒱‖₁")
spread, together = norms.log().std(-1), torch.stack([A.log(), norms.log()]).flatten(1, 3)
r = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(*together)])
print(f"all heads and prompts: the norms vary by a factor of e^{spread.mean():.2f} (one standard deviation); "
      f"correlation of log A and log ‖𝒱‖: {r.mean():+.2f} ± {r.std():.2f} from head to head")

# %% [markdown]
# This is the strongest case, and it is mild: two thirds of the head's median norm, half of its mean by weight. In this model the norms of a head differ by about a quarter, and weight and norm hardly go together. Large language models have attention sinks, with half of the weight and almost no value; there a norm can matter more. Keep this in mind for everything that follows.
#
# ## The bound
#
# CriticalKV measures the change of the output in L1, $\mathcal L = \lVert o - \hat o\rVert_1$ (Definition 1), and bounds it. With a mask $N$ of kept entries, $S = \sum N_i A_i$ the weight they gather, and $C = \sum A_i \lVert\mathcal V_i\rVert_1$:
#
# $$\mathcal L \;\le\; \theta = C - \Bigl(2 - \tfrac1S\Bigr) \sum_i N_i A_i \lVert\mathcal V_i\rVert_1 \qquad\text{(Theorem 2)}$$
#
# Algorithm 1 takes a first part α of the budget by weight, which gathers σ, and then replaces $S$ by σ: the bound $\hat\theta$ (Theorem 3) is least for the entries with the largest $A_i\lVert\mathcal V_i\rVert_1$. Choosing by weight alone minimises a looser one, $\hat\theta^{relax}$, with the smallest norm in place of all (Theorem 4). Theorems 3 and 4 need **Assumption 1**, σ > 1/2.
#
# All four, for Algorithm 1 on the real weights of all heads, over the budget:

# %%
def algorithm_1(A, norms, budget, alpha=0.25):
    """The sets of both stages, (..., S) of bool."""
    first = top(A, part_of(alpha, budget))
    return first, two_stage(first, A * norms, budget) & ~first


budgets = [8, 16, 32, 64, 128, 192]
curves = {name: [] for name in ("θ̂ relax (Theorem 4)", "θ̂ (Theorem 3)", "θ (Theorem 2)", "L")}
for budget in budgets:
    first, second = algorithm_1(A, norms, budget)
    holds = assumption_1(A, first) > 0.5
    ratio = theta(A, norms, first | second).mean() / perturbation(A, V, first | second).mean()
    print(f"{budget:3} entries: σ > 1/2 in {holds.float().mean():4.0%} of the heads; θ is {ratio:.1f} times L, over all heads")
    for name, value in zip(curves, (theta_relaxed(A, norms, first, second), theta_hat(A, norms, first, second),
                                    theta(A, norms, first | second), perturbation(A, V, first | second))):
        curves[name].append(value[holds].mean())

# %%
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (name, values), style in zip(curves.items(), ("^:", "s-.", "o--", "D-")):
    axis.plot(budgets, values, style, label=name)
axis.set(xscale="log", xticks=budgets, xticklabels=budgets, xlabel=f"entries kept of {end}", ylabel="L1, mean where σ > 1/2")
axis.minorticks_off()
axis.grid(alpha=0.3)
axis.legend();

# %% [markdown]
# The order is as proven: $\mathcal L \le \theta \le \hat\theta \le \hat\theta^{relax}$ (only heads with σ > 1/2 are averaged, so each budget has its own heads). How loose each step is can be read off too: θ is several times $\mathcal L$, since triangle inequalities forget that the changes of many tokens cancel.
#
# ## Does Assumption 1 hold? (Fig. 4)
#
# The weight σ that stage 1 gathers, per layer and head, for three budgets:

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
for axis, percent in zip(axes, (25, 12.5, 6.25)):
    first, second = algorithm_1(A, norms, round(percent / 100 * end))
    sigma, S = assumption_1(A, first), assumption_1(A, first | second)
    plot.heads(axis, sigma.mean(0), f"σ at {percent:g} %; above 1/2 in {(sigma > 0.5).float().mean():.0%}", most=1)
    print(f"{percent:5g} %: σ > 1/2 in {(sigma > 0.5).float().mean():.0%} of heads and prompts, S > 1/2 in {(S > 0.5).float().mean():.0%}")

# %% [markdown]
# The paper's figure shows Σ N_i A_i, read as the weight S of the *whole* budget; it exceeds 1/2 nearly everywhere but in the first layer. What the assumption needs is σ, the weight of a *quarter* of it. Here, in a model with 36 heads, few sinks and prompts of 250 tokens, S > 1/2 holds in most heads too, while σ > 1/2 fails in many, in all layers as soon as the budget is small: stage 1 gets just 3 tokens at 6.25 %. In such heads 2 − 1/σ is negative, and θ̂ then says that an entry of stage 2 *raises* the bound.
#
# ## Per head: is the change smaller? (Fig. 2)
#
# Now for real: the prompt of a text is compressed, its continuation is read token by token, and $\mathcal L$ is measured for each head at those later queries. Each layer hears the queries of the full cache, so that heads can be compared one by one.

# %%
def with_selection(Base, *more):
    return make_dataclass("+".join(cls.__name__ for cls in (Base, *more)), [], bases=(*reversed(more), Base), eq=False)


def change(Method, share, **knobs):
    return evaluate.perturbation(bench.full, maker(model, Method, share, window=WINDOW, **knobs))  # (texts, L, heads)


figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
improved = []
for axis, (Base, share) in zip(axes, ((SnapKV, .25), (SnapKV, .0625), (AdaKV, .25), (AdaKV, .0625))):
    before, after = (change(Method, share).mean(0) for Method in (Base, with_selection(Base, Critical)))
    improved.append((after < before).float().mean().item())
    plot.heads(axis, 100 * (after / before - 1), f"{Base.__name__}, {100 * share:g} %: lower in {improved[-1]:.0%}", "{:+.0f}", diverging=True, most=30)
print(f"heads with a lower L: {np.mean(improved):.1%} on average; the paper: 74.3 %")

# %% [markdown]
# Change of $\mathcal L$ in percent, purple where CriticalKV's selection lowers it: in most heads. The paper's 74.3 % has the right size.
#
# But is it the norm that does it? The selection changes *two* things: its stage 2 weighs with $\lVert\mathcal V\rVert_1$, and it ranks the votes *without pooling* (Algorithm 2, line 9). Take the two apart:

# %%
plain, unpooled = (SnapKV, {}), (SnapKV, dict(kernel=1))
pairs = {"CriticalKV / SnapKV: norms, and stage 2 unpooled": ((Critical, {}), plain),
         "no norms, only unpooled": (unpooled, plain),
         "norms, pooled on both sides": ((Critical, dict(pool_second=True)), plain),
         "norms, unpooled on both sides": ((Critical, dict(kernel=1)), unpooled)}
for share in (.25, .0625):
    print(f"{share:.2%} of the entries")
    for name, both in pairs.items():
        after, before = (change(Method, share, **knobs) for Method, knobs in both)
        print(f"   {name:50} L {100 * (after.mean() / before.mean() - 1):+5.1f} %, lower in {(after.mean(0) < before.mean(0)).float().mean():4.0%} of the heads")

# %% [markdown]
# Without any norms, leaving out the pool lowers $\mathcal L$ as much. With the pool on both sides or on neither, the norms lower it in fewer than half of the heads. So here the reduction in "74.3 % of the heads" compares a selection that pools with one that mostly does not.
# And pooling is there for a reason, as the next table shows: it raises $\mathcal L$ and saves the answers.
#
# ## Everything in one table
#
# Three budget rules, each plain and with three selections: **critical** (Algorithm 1), **theta** and **residual** (both below). Accuracies are means over three tasks (needle, recall, few-shot; 16 documents each), *aware* with the question in the prompt, *blind* without; KL is that of the next token on real text, L as above.

# %%
selections = {"": (), "+critical": (Critical,), "+theta": (LeastTheta,), "+residual": (Residual,)}
methods = {Base.__name__ + name: with_selection(Base, *more) for Base in (SnapKV, PyramidKV, AdaKV) for name, more in selections.items()}
shares = [.5, .25, .125, .0625]


def run(Method, budget, **knobs):
    row = bench.run(model, maker(model, Method, budget, **knobs))
    return row | {setting: np.mean([row[f"{task}_{setting}"] for task in TASKS]) for setting in ("aware", "blind")}


rows = {(name, share): run(Method, share, window=WINDOW) for share in shares for name, Method in methods.items()}

# %%
print(" " * 20, *(f"{f'{share:.2%}':^26}" for share in shares))
print(" " * 20, *(f"{'aware':>6}{'blind':>6}{'KL':>7}{'L':>6} " for _ in shares))
mean_l1 = lambda row: np.mean(row["l1_alone"])
for name in methods:
    print(f"{name:20}", *(f"{r['aware']:6.2f}{r['blind']:6.2f}{r['kl']:7.3f}{mean_l1(r):6.2f} " for r in (rows[name, share] for share in shares)))

# %% [markdown]
# The same as differences to the plain rule, document by document, with their standard errors (the mean over the three budget rules):

# %%
KEYS = {"aware": [f"{task}_aware" for task in TASKS], "blind": [f"{task}_blind" for task in TASKS], "KL": ["kl"], "L": ["l1_alone"]}


def joined(name, share, keys):
    """The three budget rules' results, averaged document by document."""
    each = [rows[Base.__name__ + name, share]["each"] for Base in (SnapKV, PyramidKV, AdaKV)]
    return dict(each={key: np.mean([x[key] for x in each], 0).tolist() for key in keys})


for name in list(selections)[1:]:
    for share in shares:
        cells = (paired(joined(name, share, keys), joined("", share, keys), keys) for keys in KEYS.values())
        print(f"{name:10} {share:7.2%} ", *(f"{key} {d:+.3f} ± {se:.3f}  " for key, (d, se) in zip(KEYS, cells)))

# %% [markdown]
# *critical* has the lower $\mathcal L$ and loses answers when the question is in the prompt, the more the smaller the budget. (Its KL moves both ways; 8 texts do not settle that, the README has 64.) Why it loses them, one can see in layer 1, which retrieves, with a sixteenth of the entries:

# %%
panels = {f"{Method.__name__}, layer 1": plot.kept(compress(Method, prompt, 1 / 16), end)[1].mean(0) for Method in (SnapKV, Critical)}
plot.text(pieces, panels, facts, columns=2, width=72);

# %% [markdown]
# A value is two tokens long. At the end of the question only the first is attended to; the second will be needed one step later, and only the pool keeps it.
#
# ## Layer after layer (Fig. 5), and the last one over budgets (Fig. 3)
#
# Now the changes add up: each layer hears what the compressed layers below have made of the text.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
layers = lambda name, share: np.mean(rows["SnapKV" + name, share]["l1"], 1)  # L per layer
for name, style in zip(("+critical", "+theta", "+residual"), ("s--", "^-.", "D:")):
    last = [100 * (layers(name, share)[-1] / layers("", share)[-1] - 1) for share in shares]
    axes[0].plot(100 * (layers(name, .125) / layers("", .125) - 1), style, label="SnapKV" + name)
    axes[1].semilogx(shares, last, style, base=2)
    print(f"last layer, {name:10}", *(f"{share:.2%}: {x:+.1f} %  " for share, x in zip(shares, last)))
axes[0].set(xlabel="layer", ylabel="L against SnapKV, %", title="12.5 % of the entries, all layers compressed")
axes[1].set(xlabel="budget, % of the prompt", title="the last layer", xticks=shares, xticklabels=[f"{100 * x:g}" for x in shares])
axes[1].legend(*axes[0].get_legend_handles_labels(), loc="upper center")
for axis in axes:
    axis.axhline(0, color="black", linewidth=1)
    axis.grid(alpha=0.3)

# %% [markdown]
# Unlike in the paper the advantage of *critical* does not accumulate: after the first layer it is gone or a few percent, in the last layer about zero unless half of the entries are kept. The residual entry stays ahead, but by much less than in each layer alone.
#
# ## How much by weight alone? (α, App. D)

# %%
alphas = [0, .25, .5, .75, 1]
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
for share, style in zip((.25, .0625), ("o-", "s--")):
    results = [run(Critical, share, window=WINDOW, alpha=alpha) for alpha in alphas]
    for axis, values in zip(axes, zip(*((r["aware"], r["kl"], mean_l1(r)) for r in results))):
        axis.plot(alphas, values, style, label=f"{share:.2%}")
    print(f"{share:.2%}: accuracy, aware", *(f"α={alpha}: {r['aware']:.2f} " for alpha, r in zip(alphas, results)))
for axis, label in zip(axes, ("accuracy, aware", "KL, nats", "L")):
    axis.set(xlabel="α, share of stage 1", ylabel=label, xticks=alphas)
    axis.grid(alpha=0.3)
axes[0].legend();

# %% [markdown]
# α = 1 is SnapKV. The paper loses a little quality at α = 0, which still beats SnapKV, and blames Assumption 1; here α = 0 loses most of the answers, because stage 1 is the only one that pools.
#
# ## A selection that minimises the bound
#
# Stage 2 maximises $\sum N_i A_i\lVert\mathcal V_i\rVert$ and forgets that an entry also raises $S$, which lowers θ as well. With $W = \sum N_i A_i \lVert\mathcal V_i\rVert$, one more entry gains
#
# $$-\frac{\partial\theta}{\partial N_i} = A_i\Bigl[\bigl(2 - \tfrac1S\bigr)\lVert\mathcal V_i\rVert_1 + \tfrac{W}{S^2}\Bigr]$$
#
# `least_theta` starts from the better of top-A and Algorithm 1, ranks by this gain, and repeats: two or four times are enough. Where S < 1/2 the norm even counts *against* an entry. How often is each bound, and each true change, lower? On the 16 prompts' weights (all heads, unpooled), and on weights and values drawn independently:

# %%
def drawn(heads=300, n=512, d=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = (2 * torch.randn(heads, n, generator=g)).softmax(-1)
    V = torch.randn(heads, n, d, generator=g) * torch.rand(heads, n, 1, generator=g)
    return A, V.abs().sum(-1), V


share_lower = lambda x, y: f"{(x < y * (1 - 1e-6)).float().mean():5.0%}"
print(" " * 17 + "lower θ: two-stage  ours<top-A  ours<two-stage | lower L: two-stage  ours<top-A  ours<two-stage")
for where, (a, n, v) in {"16 prompts": (A, norms, V), "independent": drawn()}.items():
    for budget in (32, 64, 128):
        first, second = algorithm_1(a, n, budget)
        sets = top(a, budget), first | second, least_theta(a.unsqueeze(-2), n.unsqueeze(-2), budget, window=0)
        cells = [(share_lower(two, plain), share_lower(ours, plain), share_lower(ours, two)) for plain, two, ours in
                 ([f(a, x, kept) for kept in sets] for f, x in ((theta, n), (perturbation, v)))]
        print(f"{where:12}{budget:4}" + " |         ".join("{:>19}{:>12}{:>16}".format(*cell) for cell in cells))

# %% [markdown]
# Ours never has the higher bound, as it starts from the better of the two (`tests/test_critical_kv.py`); it is strictly lower in most heads. The change itself follows only in part: against two-stage ours has the lower $\mathcal L$ in most heads, against plain top-A in less than half. Where θ is a loose bound, lowering it further buys little.
# In the table above, *theta* minimises θ for the *pooled* votes, taken for the attention to come. It keeps the answers; the differences to the plain rule are small, with a few points gained *blind* at 25 and 12.5 %.
#
# ## Does a smaller change mean better text? (App. I)
#
# The argument for minimising $\mathcal L$ is Lipschitz continuity: less change at the attention output, less change at the end. A sharp test is something that lowers $\mathcal L$ a lot. `methods/residual_entry.py` gives one slot per head to everything evicted: the vote-weighted mean of the keys and values, and a logit bias that lets it take their weight. In the table it lowers $\mathcal L$ by a fifth at 50 % and by nearly a third at 6.25 %, much more than any selection. Below, also with half of the weight, and with several such entries, for runs of neighbours or clustered by key. Beside them, votes that are not pooled, and CriticalKV as its authors' code has it, pooled throughout:

# %%
cases = {"SnapKV": (SnapKV, {}), "SnapKV, no pool": (SnapKV, dict(kernel=1)), "SnapKV+critical_code": (CriticalCode, {}), "SnapKV+residual": (Residual, {})}
cases |= {"+residual " + ", ".join(f"{k}={v}" for k, v in knobs.items()): (Residual, knobs) for knobs in
          (dict(share=.5), dict(entries=4), dict(entries=4, rounds=3))}
print(" " * 32 + "".join(f"{f'{share:.2%}':^39}" for share in (.25, .0625)))
for name, (Method, knobs) in cases.items():
    rows |= {(name, share): run(Method, share, window=WINDOW, **knobs) for share in (.25, .0625)}
    print(f"{name:32}" + "".join(f"  L {mean_l1(r):4.2f} KL {r['kl']:.3f} ppl {r['perplexity']:5.2f} aware {r['aware']:.2f}"
                                 for r in (rows[name, share] for share in (.25, .0625))))

# %%
def ranks(x):
    """From 1, the mean rank for equal numbers (Spearman)."""
    _, place, n = np.unique(x, return_inverse=True, return_counts=True)
    return (n.cumsum() - (n - 1) / 2)[place]


def rank_correlation(key, share=None):
    mine = [r for (_, x), r in rows.items() if share in (None, x)]
    return np.corrcoef(ranks([mean_l1(r) for r in mine]), ranks([r[key] for r in mine]))[0, 1]


rows |= {("StreamingLLM", share): run(StreamingLLM, share) for share in shares}
kinds = {"residual": "D", "no pool": "X", "Streaming": "*", "critical": "P", "": "o"}  # the first that the name contains
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for share, colour in zip(shares, plt.cm.viridis(np.linspace(0, 0.85, 4))):
    for axis, key in zip(axes, ("kl", "aware")):
        for name, r in ((name, r) for (name, x), r in rows.items() if x == share):
            marker = next(marker for kind, marker in kinds.items() if kind in name)
            axis.plot(mean_l1(r), r[key], marker, color=colour, markersize=8, markeredgecolor="white")
    axes[0].plot([], [], "s", color=colour, label=f"{100 * share:g} %")
for name, marker in zip(("residual", "no pool", "StreamingLLM", "critical", "plain or theta"), kinds.values()):
    axes[1].plot([], [], marker, color="0.4", label=name)
for axis, label in zip(axes, ("KL, nats", "accuracy, aware")):
    axis.set(xlabel="L", ylabel=label)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
for key in ("kl", "aware"):
    print(f"rank correlation of L and {key:5}: all {rank_correlation(key):+.2f}; within", "  ".join(f"{x:.2%} {rank_correlation(key, x):+.2f}" for x in shares))

# %% [markdown]
# One point per method and budget. *Over* budgets the argument holds: fewer entries, larger change, larger KL, fewer answers. *Within* a budget, where a method has to be chosen, it does not decide: for the KL the rank correlation is high at 6.25 % only, where StreamingLLM is far off and the residual entries do help; at 25 % it is negative. And for the answers: a residual entry takes a quarter off $\mathcal L$ and changes nothing, leaving out the pool takes a few percent off, lowers KL and perplexity as well, and loses nearly all answers at 6.25 %. Text and answers are different things, and $\mathcal L$ speaks of neither.
#
# Why? Lipschitz continuity bounds the worst case, and directions differ. A residual entry repairs what all queries have in common; that is a large part of the length of the change, and the later layers seem to do well without it. What answers a question is one entry that one later query needs: a small part of $\mathcal L$, as it is a mean over all queries, and everything for the answer.

# %% [markdown]
# ## Needle in a haystack (App. E)
#
# 32 entries per head, whatever the length: which needles are found, at which depth? *Aware*, 4 documents a cell.

# %%
depths, lengths, budget = [0, .25, .5, .75, 1], [256, 512, 1024, 2048], 32
names = {"StreamingLLM": StreamingLLM, "SnapKV": SnapKV, "SnapKV+critical": Critical, "AdaKV+critical": methods["AdaKV+critical"], "SnapKV+theta": LeastTheta}
found = np.zeros((len(names), len(depths), len(lengths)))
for (i, depth), (j, T) in ((x, y) for x in enumerate(depths) for y in enumerate(lengths)):
    documents = tasks.batch("needle", seed=j, B=4, T=T, depth=depth)
    recorded = make_cache(model, evaluate.Recorder)
    told = [evaluate.record(model, recorded, part) for part in evaluate.prompt_and_question(model, documents)[1:]]
    for m, (name, Method) in enumerate(names.items()):
        knobs = {} if Method is StreamingLLM else dict(window=WINDOW)
        found[m, i, j] = retrieve(model, documents, lambda n: make_cache(model, Method, budget=budget, **knobs), told)["aware"].mean()

# %%
figure, axes = plt.subplots(1, len(names), figsize=(13, 3), layout="constrained", sharey=True)
for axis, name, values in zip(axes, names, found):
    plot.heads(axis, values, f"{name}: {values.mean():.0%}", "{:.2f}", most=1)
    axis.set(xlabel="tokens", xticks=range(4), xticklabels=lengths, yticks=range(5), yticklabels=[f"{d:.0%}" for d in depths])
    axis.set_ylabel("depth" if axis is axes[0] else "")

# %% [markdown]
# StreamingLLM finds what lies in its few recent tokens. SnapKV finds nearly everything with 32 of up to 1024 entries, and three quarters at 2048. The unpooled stage 2 loses what the few pooled entries do not cover; at 2048 tokens that is everything.
#
# ## StreamingLLM beside them (App. H)

# %%
for task in ("needle", "recall", "few_shot"):
    for setting in ("aware", "blind"):
        print(f"{task:9}{setting:6}", "   ".join(f"{share:6.2%}: " + " ".join(f"{rows[name, share][f'{task}_{setting}']:.2f}" for name in
              ("StreamingLLM", "SnapKV", "SnapKV+critical")) for share in shares))
print(f"{'text KL':15}", "   ".join(f"{share:6.2%}: " + " ".join(f"{rows[name, share]['kl']:.2f}" for name in
      ("StreamingLLM", "SnapKV", "SnapKV+critical")) for share in shares), "  (StreamingLLM, SnapKV, SnapKV+critical)")

# %% [markdown]
# With the question in the prompt, selection finds the needles and pairs that StreamingLLM has dropped, as the paper says. Few-shot labelling is another matter: the labelled examples are the newest part of the prompt, so StreamingLLM is on a par with SnapKV *aware* and ahead of it *blind*. *Blind*, nobody finds needles at small budgets.
#
# ## Exercises
#
# 1. `LeastTheta(pooled=False)` minimises θ for the weights as they are. Predict its L and its accuracy beside *theta* and *SnapKV, no pool*, then measure both. *Hint: `run`.*
# 2. Two tokens make a value. Which is the smallest `kernel` with which SnapKV still finds the needles at 6.25 %? And for values of four tokens, what would you expect? *Hint: which neighbour is lost?*
# 3. CriticalKV's published code multiplies *mean* votes by *mean* norms over a group of query heads (`product_of_means`). Write Theorem 3's bound summed over the group: by what would each head's product have to be weighted, and when is that weight negative? How different are the three kept sets here?
# 4. Give a head a sink: add to the first key of each head a vector that draws half of the weight, and set its value to zero. Does CriticalKV now win? *Hint: subclass `Critical`, change `self.k` and `self.v` at the start of `finish_prompt`, and do the same for SnapKV.*
# 5. A residual entry with the mean key answers queries that no real token would answer. Try one whose key is the key of the evicted token with the most votes, and compare KL and L. *Hint: `Residual.select`.*
# 6. AdaKV's votes decide how many entries a head gets. Let $A\lVert\mathcal V\rVert_1$ decide instead: override `budgets`. Does it lower L, KL, or both?
