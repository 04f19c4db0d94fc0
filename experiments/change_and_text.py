"""Test whether a smaller change of the attention output means better text (App. I of CriticalKV, 2502.03805).

    python -m experiments.change_and_text > experiments/stored/change_and_text.jsonl  # 9 minutes of a core

Compresses 64 texts with each of METHODS at each of KEEP_RATIOS, and prints a row of JSON for each pair. A row
has means over the next 64 tokens, one number per text:

- L: the L1 change ‖o − ô‖₁ of a head's output, mean over heads, with only its own layer compressed
  (Definition 1);
- kl: KL(full ‖ compressed); nll: −log p of the true token.

It also has means over the texts: `heads`, L of each layer and query head; `layers`, the change of each layer
with the layers below it compressed too. The texts are those of `python -m nanollm --documents 128`.
"""
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from methods.ada_kv import AdaKV
from methods.compress_again import again as compress_again
from methods.critical_kv import Critical, CriticalCode, PooledCritical, part_of, two_stage, value_norms
from methods.ours.residual import Residual
from methods.ours.theta import LeastTheta
from methods.pyramid_kv import PyramidKV
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from nanollm import TINY, tokenizer
from nanollm.cache import LayerCache, bytes_in_16_bits, end_prefill, make_cache
from nanollm.hf import checkpoint
from nanollm.measure.benchmark import Benchmark, replayed_or_read
from nanollm.measure.evaluate import (Make, Reference, answer, continuation, maker, reference, retrieve,
                                      text_windows)
from nanollm.measure.replay import feed
from nanollm.measure.tasks import Batch, Tasks
from nanollm.ranking import top

FILE = Path(__file__).parent / "stored" / "change_and_text.jsonl"
KEEP_RATIOS = 0.5, 0.25, 0.125, 0.0625

RULES = SnapKV, PyramidKV, AdaKV
WINDOW = dict(window_size=8)  # observation window, as in `python -m nanollm`
SELECTIONS = {"critical": Critical(), "critical_code": CriticalCode(), "theta": LeastTheta(),
              "residual": Residual()}
VARIANTS = {
    "critical, stage 2 pooled": dict(select=PooledCritical()),
    "critical, no pool": dict(select=Critical(), kernel_size=1),
    "residual, share 0.5": dict(select=Residual(share=0.5)),
    "residual, entries 4": dict(select=Residual(entries=4)),
    "residual, entries 4, rounds 3": dict(select=Residual(entries=4, rounds=3)),
}
METHODS = {}  # name → method, options
for Rule in RULES:
    METHODS[Rule.__name__] = Rule, WINDOW
    METHODS |= {f"{Rule.__name__}+{name}": (Rule, WINDOW | dict(select=select))
                for name, select in SELECTIONS.items()}
METHODS |= {f"{Rule.__name__}, no pool": (Rule, WINDOW | dict(kernel_size=1)) for Rule in RULES}
METHODS["StreamingLLM"] = StreamingLLM, {}
METHODS |= {f"SnapKV+{name}": (SnapKV, WINDOW | options) for name, options in VARIANTS.items()}


@dataclass(frozen=True)
class OtherNorms(Critical):
    """A control: stage 2 weights pooled window scores by the norms of other tokens, drawn at random."""

    def __call__(self, cache, scores: Tensor, budget: int | Tensor) -> Tensor:
        n, scores = scores.shape[-1], cache.pool(scores)
        other = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        norms = value_norms(cache.v[:, :, :n], cache.w_o)[..., other]
        first = top(scores.mean(2), part_of(self.alpha, budget))
        return two_stage(first, (scores * norms).mean(2), budget)


@dataclass(frozen=True)
class CodeOptions(Critical):
    """The paper's rule; each option is one change that the authors' code or App. G makes to it."""
    pooled: bool = False    # pool the window scores of stage 2
    epsilon: float = 0.0    # added to these scores
    of_means: bool = False  # multiply a group's means, in place of taking the mean of its products
    order: int = 1          # norms: 1 for L1, 2 for L2

    def second(self, cache, scores: Tensor, norms: Tensor) -> Tensor:
        if self.order == 2:
            norms = l2_norms(cache.v[:, :, :scores.shape[-1]], cache.w_o)
        scores = (cache.pool(scores) if self.pooled else scores) + self.epsilon
        return scores.mean(2) * norms.mean(2) if self.of_means else (scores * norms).mean(2)


def l2_norms(v: Tensor, w_o: Tensor) -> Tensor:
    """Return ‖v_i W_O‖₂ of every query head, (B, H, G, n), for values v (B, H, n, D).

    Computed as √(v M vᵀ) with M = W_O W_Oᵀ.
    """
    w, v = w_o.unflatten(1, (v.shape[1], -1)), v.unsqueeze(2)
    M = torch.einsum("ohgd,ohge->hgde", w, w)
    return (v @ M * v).sum(-1).clamp(min=0).sqrt()


CODE = {"α = 0.5": dict(alpha=0.5), "stage 2 pooled": dict(pooled=True), "ε = 1e-4": dict(epsilon=1e-4),
        "product of means": dict(of_means=True)}
ALL_OF_CODE = {option: x for one in CODE.values() for option, x in one.items()}
# the paper's rule with one change by the code, and the code without one of its changes
ONE_OPTION = {
    "critical": CodeOptions(),
    **{f"critical, {name}": CodeOptions(**option) for name, option in CODE.items()},
    "critical, L2 norms": CodeOptions(order=2),
    "critical_code": CodeOptions(**ALL_OF_CODE),
    **{f"critical_code, no {name}": CodeOptions(**{k: x for k, x in ALL_OF_CODE.items() if k not in option})
       for name, option in CODE.items()},
    "critical_code, L2 norms": CodeOptions(**ALL_OF_CODE, order=2)}


# ---- measurements ----------------------------------------------------------------------------------------

def by_text(model, full: Reference, Method, keep_ratio: float, **options) -> dict[str, Tensor]:
    """Return the measurements of a method, text by text.

    alone: ‖o − ô‖₁ with only one layer compressed; together: with the layers below compressed too,
    (texts, L, H·G) each; kl and nll (texts,).
    """
    make = maker(model, Method, keep_ratio, **options)
    text = replayed_or_read(partial(continuation, alone=True), model, full, make, full.recording)
    row = dict(alone=text["l1_alone"], together=text["l1"], kl=text["kl"], nll=text["nll"])
    return {key: x.cpu() for key, x in row.items()}


def measured(model, full: Reference, name: str, keep_ratio: float) -> dict[str, np.ndarray]:
    """Return the row of a method of METHODS: L, kl and nll (texts,), heads (L, H·G), layers (L,)."""
    Method, options = METHODS[name]
    text = by_text(model, full, Method, keep_ratio, **options)
    row = dict(L=text["alone"].mean((1, 2)), kl=text["kl"], nll=text["nll"])
    row |= dict(heads=text["alone"].mean(0), layers=text["together"].mean((0, 2)))
    return {key: x.numpy() for key, x in row.items()}


def right_answers(model, bench: Benchmark, make: Make) -> dict[str, Tensor]:
    """Return each document's share of right answers, (tasks, documents), "aware" and "agnostic"."""
    each = [replayed_or_read(retrieve, model, batch, make, bench.recordings[task])
            for task, batch in bench.batches.items()]
    return {setting: torch.stack([x[setting] for x in each]) for setting in ("aware", "agnostic")}


def one_option_at_a_time(model, bench: Benchmark, full: Reference, keep_ratio: float = 1 / 8) -> dict:
    """Return the measurements of SnapKV and of each of ONE_OPTION.

    answers: share of right answers, aware, of every document of all tasks, (n,). L and kl: (texts,).
    """
    rows = {}
    for name, select in {"SnapKV": SnapKV.select, **ONE_OPTION}.items():
        options = dict(select=select, **WINDOW)
        right = right_answers(model, bench, maker(model, SnapKV, keep_ratio, **options))["aware"]
        text = by_text(model, full, SnapKV, keep_ratio, **options)
        rows[name] = dict(answers=right.flatten(), L=text["alone"].mean((1, 2)), kl=text["kl"])
    return rows


@torch.no_grad()
def long_answer(model, texts: Tensor, asked: dict[str, Batch], again: bool = True, **options) -> dict:
    """Measure short prompts with long answers (Table 7): a sixteenth of each text, then token by token.

    As in the table, the cache is compressed to an eighth of the text whenever it holds half of it. Without
    `again` only the prompt would be compressed, but it is shorter than the budget. Returns kl (texts,) over
    the answer; for each task of `asked`, which documents are right (documents,), whose questions come last;
    "most" and "last", the largest and the last KiB of a text's cache, with 16-bit numbers.
    """
    T = texts.shape[1]
    Method, every = (compress_again(SnapKV), dict(every=T // 2 - T // 8)) if again else (SnapKV, {})
    options = dict(budget=T // 8) | every | WINDOW | options

    def prompted(tokens):
        caches = make_cache(model, Method, **options)
        feed(model, tokens[:, :T // 16], caches)
        return caches

    full, caches = model(texts[:, :-1])[:, T // 16:].log_softmax(-1), prompted(texts)
    end_prefill(caches)
    kl, kib = [], []
    for token, true in zip(texts[:, T // 16:-1].unbind(1), full.unbind(1)):
        log_p = model(token[:, None], caches)[:, 0].log_softmax(-1)
        kl.append(F.kl_div(log_p, true, log_target=True, reduction="none").sum(-1))
        kib.append(bytes_in_16_bits(caches) / len(texts) / 1024)
    right = {}
    for task, batch in asked.items():
        tokens = torch.from_numpy(batch.tokens).to(texts.device)
        right[task] = answer(model, tokens, batch.answers, T // 16, prompted(tokens))
    return dict(kl=torch.stack(kl, 1).mean(1), most=max(kib), last=kib[-1]) | right


def compressed(model, Method, tokens: Tensor, keep_ratio: float = 1 / 8, **options) -> list[LayerCache]:
    """Return caches that have read and compressed tokens (B, T)."""
    caches = make_cache(model, Method, budget=round(keep_ratio * tokens.shape[1]), **WINDOW | options)
    feed(model, tokens, caches)
    end_prefill(caches)
    return caches


def needles_found(model, tasks: Tasks, names, depths, lengths, budget: int = 32) -> np.ndarray:
    """Return the accuracy on 4 needles, aware, with `budget` entries, (names, depths, lengths)."""
    found = np.zeros((len(names), len(depths), len(lengths)))
    for (i, depth), (j, T) in product(enumerate(depths), enumerate(lengths)):
        batch = tasks.batch("needle", seed=j, B=4, T=T, depth=depth)
        bench = Benchmark.read(model, {"needle": batch}, None)
        for m, name in enumerate(names):
            Method, options = METHODS[name]
            make = lambda *_: make_cache(model, Method, budget=budget, **options)
            found[m, i, j] = right_answers(model, bench, make)["aware"].mean()
    return found


# ---- numbers of the stored rows ----

@cache
def stored() -> dict[tuple[str, float], dict[str, np.ndarray]]:
    """Return the rows of the file, by method and keep ratio."""
    rows = {}
    for row in map(json.loads, FILE.read_text().splitlines()):
        place = row.pop("method"), row.pop("keep_ratio")
        rows[place] = {key: np.array(x) for key, x in row.items()}
    return rows


def ranks(x: np.ndarray) -> np.ndarray:
    """Return the ranks of x (n,), from 1; equal numbers have their mean rank."""
    _, place, n = np.unique(x, return_inverse=True, return_counts=True)
    return (n.cumsum() - (n - 1) / 2)[place]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation of x and y (n,)."""
    return np.corrcoef(ranks(x), ranks(y))[0, 1]


def correlation_of_change_and_kl(names: list[str], keep_ratios: list[float]) -> tuple:
    """Return the rank correlation of mean L and mean KL over these stored rows, and its 95 % interval.

    The interval comes from drawing the texts anew, the same for L and KL.
    """
    rows = [stored()[name, keep_ratio] for name in names for keep_ratio in keep_ratios]
    L, kl = (np.array([row[key] for row in rows]) for key in ("L", "kl"))  # (rows, texts)
    texts = L.shape[1]
    resampled = np.random.default_rng(0).integers(0, texts, (1000, texts))
    values = [rank_correlation(L[:, i].mean(1), kl[:, i].mean(1)) for i in resampled]
    return rank_correlation(L.mean(1), kl.mean(1)), *np.quantile(values, [0.025, 0.975])


# methods compared at every keep ratio; among them those that only select entries by window scores
COMPARED = [name for name in METHODS if "residual," not in name and "critical," not in name]
WINDOW_METHODS = [name for name in COMPARED if "residual" not in name and name != "StreamingLLM"]


if __name__ == "__main__":
    model, tasks = checkpoint.from_hf(TINY), Tasks(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
    full = reference(model, text_windows(tasks, 64, 512), 64)
    for name, keep_ratio in product(METHODS, KEEP_RATIOS):
        row = {key: np.vectorize(lambda n: float(f"{n:.4g}"))(x).tolist()
               for key, x in measured(model, full, name, keep_ratio).items()}
        row = dict(method=name, keep_ratio=keep_ratio) | row
        print(json.dumps(row, separators=(",", ":")), flush=True)
