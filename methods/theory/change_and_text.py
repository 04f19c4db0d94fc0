"""Does a smaller change of the attention output mean better text? So says Appendix I of CriticalKV (arXiv 2502.03805).

    python -m methods.theory.change_and_text > methods/theory/change_and_text.jsonl    # 9 minutes of one core

compresses 64 texts with each of METHODS at each of SHARES and prints a row of JSON for each. L, kl and nll are a number
a text: the mean L1 change ‖o − ô‖₁ of a head's output, each layer alone (Definition 1), KL(full ‖ compressed) and
−log p of the true token, over the next 64 tokens. `heads` is L a layer and query head, `layers` the change that has
added up in a layer when those below are compressed too. The texts are those of `python -m nanollm --documents 128`.
"""
from dataclasses import make_dataclass
from functools import cache
import json
from pathlib import Path

import numpy as np
import torch

from methods.ada_kv import AdaKV
from methods.critical_kv import Critical, CriticalCode, LeastTheta, part_of, two_stage, value_norms
from methods.pyramid_kv import PyramidKV
from methods.residual_entry import Residual
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from nanollm import TINY, tokenizer, weights
from nanollm.cache import top
from nanollm.data import Tasks
from nanollm.evaluate import Reference, continuation, maker, perturbation, reference, text_windows, told_or_read

FILE = Path(__file__).with_suffix(".jsonl")
SHARES = 0.5, 0.25, 0.125, 0.0625
CHOICES = {"": (), "+critical": (Critical,), "+critical_code": (CriticalCode,), "+theta": (LeastTheta,), "+residual": (Residual,)}


def on(Rule: type, *choices: type) -> type:
    """A selection on top of a budget rule."""
    return make_dataclass("+".join(cls.__name__ for cls in (Rule, *choices)), [], bases=(*reversed(choices), Rule), eq=False)


WINDOW = dict(window=8)  # of the queries that vote, as in `python -m nanollm`
METHODS = {Rule.__name__ + name: (on(Rule, *choices), WINDOW) for Rule in (SnapKV, PyramidKV, AdaKV) for name, choices in CHOICES.items()}
METHODS |= {f"{Rule.__name__}, no pool": (Rule, WINDOW | dict(kernel=1)) for Rule in (SnapKV, PyramidKV, AdaKV)}
METHODS["StreamingLLM"] = StreamingLLM, {}
VARIANTS = {"SnapKV+critical, stage 2 pooled": (Critical, dict(pool_second=True)), "SnapKV+critical, no pool": (Critical, dict(kernel=1))}
VARIANTS |= {"SnapKV+residual, " + ", ".join(f"{knob} {value}" for knob, value in knobs.items()): (Residual, knobs)
             for knobs in (dict(share=0.5), dict(entries=4), dict(entries=4, rounds=3))}
METHODS |= {name: (Method, WINDOW | knobs) for name, (Method, knobs) in VARIANTS.items()}


class OtherNorms(Critical):
    """A control: stage 2 on pooled votes, weighted with the norms of other tokens, drawn at random."""

    def select(self, votes, budget):
        n, votes = votes.shape[-1], self.pool(votes)
        other = value_norms(self.v[:, :, :n], self.w_o)[..., torch.randperm(n, generator=torch.Generator().manual_seed(0))]
        return two_stage(top(votes.mean(2), part_of(self.alpha, budget)), (votes * other).mean(2), budget)


def texts(model, tasks: Tasks) -> Reference:
    return reference(model, text_windows(tasks, 64, 512), 64)


def measured(model, full: Reference, name: str, share: float) -> dict[str, np.ndarray]:
    """A method's row: L, kl and nll (texts,), heads (L, H·G), layers (L,)."""
    Method, knobs = METHODS[name]
    make = maker(model, Method, share, **knobs)
    text, alone = told_or_read(continuation, model, full, make, full.told), perturbation(full, make)
    row = dict(L=alone.mean((1, 2)), kl=text["kl"], nll=text["nll"], heads=alone.mean(0), layers=text["l1"].mean((0, 2)))
    return {key: x.numpy() for key, x in row.items()}


@cache
def stored() -> dict[tuple[str, float], dict[str, np.ndarray]]:
    """The rows of the file, by method and share."""
    rows = map(json.loads, FILE.read_text().splitlines())
    return {(row.pop("method"), row.pop("share")): {key: np.array(x) for key, x in row.items()} for row in rows}


def ranks(x: np.ndarray) -> np.ndarray:
    """Of the numbers x (n,), from 1; equal ones have their mean rank."""
    _, place, n = np.unique(x, return_inverse=True, return_counts=True)
    return (n.cumsum() - (n - 1) / 2)[place]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's, of x and y (n,)."""
    return np.corrcoef(ranks(x), ranks(y))[0, 1]


def correlation_over_methods(x: np.ndarray, y: np.ndarray, draws: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """Rank correlation of the texts' means of x and y (methods, texts), and the ends of its 95 % when texts are drawn anew."""
    again = np.random.default_rng(seed).integers(0, x.shape[1], (draws, x.shape[1]))
    values = [rank_correlation(x[:, i].mean(1), y[:, i].mean(1)) for i in again]
    return rank_correlation(x.mean(1), y.mean(1)), *np.quantile(values, [0.025, 0.975])


def difference(name: str, base: str, share: float, key: str) -> tuple[float, float]:
    """Mean difference of two rows of the file, text by text, and its standard error."""
    d = stored()[name, share][key] - stored()[base, share][key]
    return d.mean(), d.std(ddof=1) / len(d) ** 0.5


if __name__ == "__main__":
    model, tasks = weights.from_hf(TINY), Tasks(tokenizer.load(TINY / "tokenizer.tiktoken"), "test")
    full = texts(model, tasks)
    for name in METHODS:
        for share in SHARES:
            row = {key: np.vectorize(lambda n: float(f"{n:.4g}"))(x).tolist() for key, x in measured(model, full, name, share).items()}
            print(json.dumps(dict(method=name, share=share) | row, separators=(",", ":")), flush=True)
