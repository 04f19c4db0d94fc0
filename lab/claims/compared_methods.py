"""Methods and measurements for CriticalKV's claims (arXiv 2502.03805)."""

from itertools import pairwise

import pandas as pd
import torch
from torch import Tensor
import torch.nn.functional as F

from methods.baselines.ada_kv import AdaKV
from methods.baselines.pyramid_kv import PyramidKV
from methods.baselines.snap_kv import SnapKV
from methods.baselines.streaming_llm import StreamingLLM
from methods.critical_kv import Critical, CriticalCode, PooledCritical
from nanollm.cache import begin_turn, compress, make_cache

RULES = SnapKV, PyramidKV, AdaKV
WINDOW = dict(window_size=8)  # observation window, as in `python -m nanollm`
SELECTIONS = {"critical": Critical(), "critical_code": CriticalCode()}

METHODS = {}  # name → method, options
for Rule in RULES:
    name = Rule.__name__
    METHODS[name] = Rule, WINDOW
    METHODS[f"{name}, no pool"] = Rule, WINDOW | dict(kernel_size=1)
    for addition, select in SELECTIONS.items():
        METHODS[f"{name}+{addition}"] = Rule, WINDOW | dict(select=select)
METHODS["StreamingLLM"] = StreamingLLM, {}
COMPARED = [*METHODS]  # App. I is tested on these

POOLED = WINDOW | dict(select=PooledCritical())
METHODS["SnapKV+critical, stage 2 pooled"] = SnapKV, POOLED


@torch.no_grad()
def long_answer(model, texts: Tensor, keep: float, *selections) -> Tensor:
    """Return the KL of long answers to short prompts, (selections, texts).

    A sixteenth of each text (B, T) is the prompt, and the rest is the answer; Table 7 is of such
    texts. Whenever the cache holds half of the text, the share `keep` of that stays. A prompt that
    is longer than this budget is cut down to it. In between the cache only appends. ValueError if
    the observation window fills the budget.
    """
    T = texts.shape[1]
    held = T // 2
    budget = round(keep * held)
    window = WINDOW["window_size"]
    if budget <= window:
        raise ValueError(f"the window's {window} entries fill the budget of {budget}")
    full = model(texts[:, :-1])[:, T // 16 :].log_softmax(-1)
    turns = [0, T // 16, *range(held, T - 1, held - budget), T - 1]
    found = []
    for select in selections:
        caches = make_cache(model, SnapKV, budget=budget, select=select, **WINDOW)
        logits = []
        for start, end in pairwise(turns):
            begin_turn(caches)
            logits.append(model(texts[:, start:end], caches))
            compress(model, texts[:, :end], caches)
        log_p = torch.cat(logits[1:], 1).log_softmax(-1)
        kl = F.kl_div(log_p, full, log_target=True, reduction="none")
        found.append(kl.sum(-1).mean(1))
    return torch.stack(found)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation of x and y (n,)."""
    both = pd.DataFrame(dict(x=x, y=y))
    return both.corr("spearman").loc["x", "y"]
