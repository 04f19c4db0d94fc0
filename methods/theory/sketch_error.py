"""Measure KVReviver's sketch (arXiv 2512.17917): its errors, its load, and the paper's budgets by layer.

The sketch returns estimates of keys and values; their errors belong to claims R2, R6 and R7. The load is the
number of tokens that share a slot (R4). Other functions compute the paper's budgets by layer (R5) and its
Figure 2 (R9). Notebook 05 shows the errors. `python -m nanollm claims` prints the verdicts on these claims,
except R2 and R7.
"""
from dataclasses import dataclass
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.count_sketch import Sketch
from methods.ours.kv_reviver_shrunk import MEDIAN
from methods.quantized import quantise
from nanollm.cache import end_prefill
from nanollm.measure.evaluate import answer, prompt_and_question
from nanollm.measure.replay import feed, replay
from nanollm.model import Decoder

# ---- budgets by layer ---

def fisher_shares(model, tokens: Tensor, even: float = 0.0) -> tuple[float, ...]:
    """Return each layer's share of the total budget, by the Fisher information of W_K and W_V.

    This is the squared gradient of log p(text), averaged over texts (B, T) and over a matrix's elements. The
    averages of W_K and W_V are added. The fraction `even` of the total is divided equally among the layers
    (ours), so that no layer has too little room.
    """
    weights = keys_and_values(model)
    fisher = torch.zeros(len(weights))
    for text in tokens.split(1):
        with torch.enable_grad():
            logits = model(text[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum")
        grads = iter(torch.autograd.grad(loss, [w for layer in weights for w, _ in layer]))
        for i, layer in enumerate(weights):
            fisher[i] += sum(part.square().mean().cpu() for _, parts in layer for part in parts(next(grads)))
    return tuple((even / len(weights) + (1 - even) * fisher / fisher.sum()).tolist())


def keys_and_values(model) -> list[list[tuple]]:
    """Return each layer's weights that contain W_K and W_V, each with a function.

    The function takes the weight's gradient and returns a list of the gradients of W_K and W_V in it.
    ValueError if a layer has no such weights.
    """
    if isinstance(model, Decoder):
        layers = (block.attention for block in model.blocks)
        return [[(x.qkv.weight, lambda grad, x=x: x.split(grad)[1:])] for x in layers]
    layers = [[(x.k_proj.weight, lambda grad: [grad]), (x.v_proj.weight, lambda grad: [grad])]
              for x in model.model.modules() if hasattr(x, "k_proj") and hasattr(x, "v_proj")]
    if len(layers) != len(model.blocks):
        raise ValueError(f"only {len(layers)} of {len(model.blocks)} layers have weights k_proj and v_proj; "
                         "take a model in which all have them")
    return layers


def share_out(caches: list, shares: tuple[float, ...]) -> list:
    """Divide the total budget of fresh caches by `shares`, one per layer; return these caches."""
    if min(shares) < 0 or not abs(sum(shares) - 1) < 1e-3:
        raise ValueError(f"shares are {shares!r:.60}; each must be at least 0, and they must add up to 1")
    total = sum(cache.budget for cache in caches)
    for cache, share in zip(caches, shares, strict=True):
        cache.budget = round(total * share)
    return caches


# ---- Figure 2: contextual amnesia ---

def amnesia(later: Tensor, score: Tensor, ratio: float, least: tuple = (0.005, 0.02)) -> dict:
    """Measure later attention to tokens outside the fraction `ratio` with the highest scores.

    A later query activates a token if its weight exceeds a threshold in `least`. As in the paper, no token is
    evicted: the weights are those of full attention.

    later (L, B, H, G, w, S): weights of w later queries. score (L, B, H, S): the tokens' scores. Returns:

    ever       for each threshold, the fraction of the outside tokens that is ever activated
    each       for each threshold, the outside tokens activated per query, added over a group's G query heads
    attention  the fraction of all attention that the outside tokens get
    counts     how often each outside token is activated at the first threshold, (L, B, H, S)
    """
    heavy = score > score.quantile(1 - ratio, -1, keepdim=True)
    outside = ~heavy
    counts = [(later > threshold).sum((3, 4)) * outside for threshold in least]
    return dict(ever=[((n > 0).sum() / outside.sum()).item() for n in counts],
                each=[n.sum(-1).float().mean().item() / later.shape[4] for n in counts],
                attention=(later.mean(3) * outside[:, :, :, None]).sum(-1).mean().item(), counts=counts[0])


# ---- errors of estimates ---

def relative_error(estimate: Tensor, true: Tensor) -> float:
    """Return the squared error of estimates (B, H, n, D) over the variance, mean over heads.

    The variance is that of `true` about its mean over tokens. This mean as an estimate has the error 1.
    """
    variance = (true - true.mean(2, keepdim=True)).square().sum((2, 3))
    return ((estimate - true).square().sum((2, 3)) / variance).mean().item()


def take_out(sketch: Sketch, J: Tensor, k: Tensor, v: Tensor, n: int, true: bool = False):
    """Delete the first n tokens of J (B, H, a) from a sketch; measure the others' errors.

    It deletes the true k and v (B, H, a, D) if `true`, else their estimates, as KVReviver's swaps do. Returns
    the relative error of the remaining values after each deletion, and the deleted k and v (B, H, n, D).
    """
    errors, deleted = [], []
    for i in range(n):
        token = J[:, :, i:i + 1]
        deleted.append((k[:, :, i:i + 1], v[:, :, i:i + 1]) if true else sketch.query(token, J[:, :, i:]))
        sketch.insert(token, *deleted[-1], times=-1.0)
        errors.append(relative_error(sketch.query(J[:, :, i + 1:])[1], v[:, :, i + 1:]))
    return errors, [torch.cat(x, 2) for x in zip(*deleted)]


# ---- the appendix ---

def collision_variance(a: float, width: int, rows: int) -> float:
    """Return the expected squared error of an estimated number in a signed sketch of `a` tokens.

    The sketch has `rows` rows of `width` slots. The tokens' numbers have mean 0 and variance 1. If the result
    is above 1, the estimate 0 has a smaller error. With three rows the formula is accurate only if slots hold
    many tokens.
    """
    return MEDIAN[rows] * (a - 1) / width


def printed_bound(a: float, slots: int) -> tuple[float, float]:
    """Return the paper's bound πa/N on an estimate's variance for `a` tokens, and e^(−a/N).

    The unit is the variance of one token's number; N is the number of slots in all rows. The paper says that
    the variance exceeds the bound with a probability below e^(−a/N).
    """
    return math.pi * a / slots, math.exp(-a / slots)


# ---- limits of any way to read the sketch ---

def load(budget: float, vague: float) -> float:
    """Return a/N, the tokens per slot, if the fraction `vague` of the budget is the sketch.

    budget: a fraction of all n entries. The result is at least 1/budget for any `vague`. If positions and
    scores take bytes too, fewer tokens are exact and a/N is larger.
    """
    # The Bn entries of the budget are N = vBn slots and Bn − N exact tokens. The sketch has the other tokens:
    #     a = n − Bn + N,   a/N = 1 + (1 − B) n/N = 1 + (1 − B)/(vB) ≥ 1 + (1 − B)/B = 1/B   since v ≤ 1,
    # with equality if no token is exact.
    return 1 + (1 - budget) / (vague * budget)


def shifted(Method, offset: float):
    """Return a subclass of Method whose attention logits are all larger by `offset`.

    Full attention does not change, because softmax ignores a constant. Each key gets one more number, a 1,
    and each query one that adds `offset` to the logits; values get a 0. In a sum of m keys the 1 becomes m,
    so the offset is added m times. The budget counts these longer entries.
    """
    @dataclass(eq=False)
    class Shifted(Method):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
            D = q.shape[-1]
            q = F.pad(q * math.sqrt((D + 1) / D), (0, 1), value=offset * math.sqrt(D + 1))
            return super().attend(q, F.pad(k, (0, 1), value=1.0), F.pad(v, (0, 1)), pos)[..., :D]
    return Shifted


# ---- in a decoder ---

def rounded(x: Tensor, bits: int, over_tokens: bool, group: int = 32) -> Tensor:
    """Return x (B, H, n, D) rounded to `bits` bits per number.

    `group` tokens share a channel's range if `over_tokens`; otherwise `group` channels share a token's range.
    """
    dim = 2 if over_tokens else 3
    code, zero, scale = quantise(x.unflatten(dim, (-1, group)), bits, dim + 1)
    return (code * scale.float() + zero.float()).flatten(dim, dim + 1)


def revived_logits(model, full, make, steps: int = 16) -> list[tuple[float, ...]]:
    """Compare the vague tokens' logits with revived and with true keys after a prompt, by layer.

    Vague tokens are those that only the sketch contains. The queries are the full cache's at `steps` tokens
    after the prompt. Returns five numbers per layer: the standard deviation of the logits' error; that of the
    logits over the vague tokens, revived and true; and the fraction of attention that these tokens get, with
    revived keys and with true keys.
    """
    caches, c, table = make(full.prompt.shape[1]), model.config, []
    replay([full.recording], caches)
    end_prefill(caches)
    for cache, prompt, later in zip(caches, full.recording, full.continuation):
        cache.attend(later.q[:, :, :1], later.k[:, :, :1], later.v[:, :, :1], later.pos[:, :1])
        keys, _, pos, _ = cache.read()
        true = torch.cat((prompt.k.to(keys.device), later.k[:, :, :1]), 2)
        true = true.gather(2, pos.long()[..., None].expand(-1, -1, -1, c.head_dim))

        queries = later.q[:, :, 1:1 + steps].unflatten(1, (c.n_kv_heads, -1))
        logits = [queries @ k.unsqueeze(2).mT * c.head_dim ** -0.5 for k in (keys, true)]
        vague = torch.arange(pos.shape[2], device=pos.device) >= cache.length
        error = (logits[0] - logits[1])[..., vague].std()
        spread = [x[..., vague].std(-1).mean() for x in logits]
        attention = [x.softmax(-1)[..., vague].sum(-1).mean() for x in logits]
        table.append(tuple(x.item() for x in (error, *spread, *attention)))
    return table


def found_agnostic(model, batch, make, recording=None) -> Tensor:
    """Return each document's fraction of right answers, (B,), query-agnostic.

    The question comes after the compression. A `recording` of the context is replayed in place of reading it.
    """
    tokens, context, _ = prompt_and_question(model, batch)
    caches = make(batch.question)
    feed(model, context, caches) if recording is None else replay([recording], caches)
    return answer(model, tokens, batch.answers, batch.question, caches)
