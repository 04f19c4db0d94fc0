"""Compute KVReviver's budgets by layer and the error of its sketch (arXiv 2512.17917).

The sketch returns estimates of keys and values. `collision_variance` is their squared error,
`printed_bound` the paper's bound on it (claims R6, R7). The load is the number of tokens for each
slot (R4). `fisher_shares` are the paper's budgets by layer (R5).
"""

import math

import torch
from torch import Tensor
import torch.nn.functional as F

from methods.ours.kv_reviver_shrunk import MEDIAN
from nanollm.model import Decoder

# ---- budgets by layer ---


def fisher_shares(model, tokens: Tensor, even: float = 0.0) -> tuple[float, ...]:
    """Return each layer's share of the total budget, by the Fisher information of W_K and W_V.

    This is the squared gradient of log p(text), averaged over texts (B, T) and over a matrix's
    elements. The averages of W_K and W_V are added. The fraction `even` of the total is divided
    equally among the layers (ours), so that no layer has too little room.
    """
    weights = keys_and_values(model)
    every = [w for layer in weights for w, _ in layer]
    fisher = torch.zeros(len(weights))
    for text in tokens.split(1):
        with torch.enable_grad():
            logits = model(text[:, :-1]).flatten(0, 1)
            following = text[:, 1:].flatten()
            loss = F.cross_entropy(logits, following, reduction="sum")
        grads = iter(torch.autograd.grad(loss, every))
        for i, layer in enumerate(weights):
            squares = []
            for _, parts in layer:
                for part in parts(next(grads)):
                    squares.append(part.square().mean().cpu())
            fisher[i] += sum(squares)
    by_fisher = (1 - even) * fisher / fisher.sum()
    return tuple((even / len(weights) + by_fisher).tolist())


def keys_and_values(model) -> list[list[tuple]]:
    """Return each layer's weights that contain W_K and W_V, each with a function.

    The function takes the weight's gradient and returns a list of the gradients of W_K and W_V in
    it. ValueError if a layer has no such weights.
    """
    layers = []
    if isinstance(model, Decoder):
        for block in model.blocks:
            # a default, because the loop gives `block` another value
            parts = lambda grad, attention=block.attention: attention.split(grad)[1:]
            layers.append([(block.attention.qkv.weight, parts)])
        return layers

    alone = lambda grad: [grad]
    for x in model.model.modules():
        if hasattr(x, "k_proj") and hasattr(x, "v_proj"):
            w_k = x.k_proj.weight
            w_v = x.v_proj.weight
            layers.append([(w_k, alone), (w_v, alone)])
    if len(layers) != len(model.blocks):
        raise ValueError(
            f"only {len(layers)} of {len(model.blocks)} layers have weights k_proj and v_proj; "
            "take a model in which all have them"
        )
    return layers


# ---- errors of estimates ---


def relative_error(estimate: Tensor, true: Tensor) -> float:
    """Return the squared error of estimates (B, H, n, D) over the variance, mean over heads.

    The variance is that of `true` about its mean over tokens. This mean as an estimate has the
    error 1.
    """
    mean = true.mean(2, keepdim=True)
    variance = (true - mean).square().sum((2, 3))
    error = (estimate - true).square().sum((2, 3))
    return (error / variance).mean().item()


# ---- the appendix ---


def collision_variance(a: float, width: int, rows: int) -> float:
    """Return the expected squared error of an estimated number in a signed sketch of `a` tokens.

    The sketch has `rows` rows of `width` slots. The tokens' numbers have mean 0 and variance 1. If
    the result is above 1, the estimate 0 has a smaller error. With three rows the formula needs
    many tokens a slot.
    """
    return MEDIAN[rows] * (a - 1) / width


def printed_bound(a: float, slots: int) -> tuple[float, float]:
    """Return the paper's bound πa/N on an estimate's variance for `a` tokens, and e^(−a/N).

    The unit is the variance of one token's number; N is the number of slots in all rows. The paper
    says that the variance exceeds the bound with a probability below e^(−a/N).
    """
    bound = math.pi * a / slots
    exceeded = math.exp(-a / slots)
    return bound, exceeded


# ---- limits of any way to read the sketch ---


def load(budget: float, vague: float) -> float:
    """Return a/N, the tokens for each slot, if the fraction `vague` of the budget is the sketch.

    budget: a fraction of all n entries. The result is at least 1/budget for any `vague`. If
    positions and scores take bytes too, fewer tokens are exact and a/N is larger.
    """
    # The Bn entries of the budget are N = vBn slots and Bn − N exact tokens. The sketch has the
    # other tokens: a = n − Bn + N.
    #     a/N = 1 + (1 − B) n/N = 1 + (1 − B)/(vB) ≥ 1 + (1 − B)/B = 1/B
    # since v ≤ 1, with equality if no token is exact.
    return 1 + (1 - budget) / (vague * budget)
