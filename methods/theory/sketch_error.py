"""KVReviver's budgets by layer, its Figure 2, its appendix, and what a sketch can tell."""
from dataclasses import dataclass
import math

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from methods.count_sketch import Sketch
from methods.ours.kv_reviver_shrunk import MEDIAN
from methods.quantized import quantise
from nanollm.cache import end_prefill
from nanollm.measure.evaluate import answer, prompt_and_question
from nanollm.measure.replay import feed, replay
from nanollm.measure.tasks import Batch, Tasks
from nanollm.model import Decoder

# ---- budgets by layer ---

def fisher_shares(model, tokens: Tensor, even: float = 0.0) -> tuple[float, ...]:
    """Each layer's share of all budgets: the Fisher information of its W_K and W_V on texts (B, T).

    That is the mean of squared gradients of log p(text), over texts and entries; the two matrices' are added.
    `even` of the whole is shared out evenly (ours), so that no layer has too little to hold anything.
    """
    if not 0 <= even <= 1:
        raise ValueError(f"even {even} is a share of all budgets, 0 to 1")

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
    """Of each layer the weights that hold W_K and W_V, each with what takes their parts out of a gradient."""
    if isinstance(model, Decoder):
        layers = (block.attention for block in model.blocks)
        return [[(x.qkv.weight, lambda grad, x=x: x.split(grad)[1:])] for x in layers]
    layers = [[(x.k_proj.weight, lambda grad: [grad]), (x.v_proj.weight, lambda grad: [grad])]
              for x in model.model.modules() if hasattr(x, "k_proj") and hasattr(x, "v_proj")]
    if len(layers) != len(model.blocks):
        raise ValueError(f"{len(layers)} of {len(model.blocks)} layers have weights k_proj and v_proj; "
                         "take another model")
    return layers


def share_out(caches: list, shares: tuple[float, ...]) -> list:
    """The same fresh caches, each with its layer's share of all budgets together."""
    if len(shares) != len(caches):
        raise ValueError(f"{len(shares)} shares for {len(caches)} layers; give one each")
    if min(shares) < 0 or not abs(sum(shares) - 1) < 1e-3:
        raise ValueError(f"shares {shares!r:.60} of all budgets must be at least 0 and add up to 1")
    total = sum(cache.budget for cache in caches)
    for cache, share in zip(caches, shares):
        cache.budget = round(total * share)
    return caches


# ---- Figure 2: contextual amnesia ---

def amnesia(later: Tensor, score: Tensor, ratio: float, least: tuple = (0.005, 0.02)) -> dict:
    """What is activated of the tokens that are not among the `ratio` with the highest score, over layers.

    A later query activates a token by giving it more than `least` of its attention. As in the paper, this is
    the attention as it would be if nothing were dropped. later (L, B, H, G, w, S): attention of later
    queries; score (L, B, H, S). Returns, for each threshold, the share of those tokens that is ever activated
    ("ever") and how many a query activates ("each"); their part of all "attention"; and "counts" (L, B, H,
    S), how often each is activated at the first threshold.
    """
    heavy = score > score.quantile(1 - ratio, -1, keepdim=True)
    dropped = ~heavy
    counts = [(later > x).sum((3, 4)) * dropped for x in least]
    return dict(ever=[((n > 0).sum() / dropped.sum()).item() for n in counts],
                each=[n.sum(-1).float().mean().item() / later.shape[4] for n in counts],
                attention=(later.mean(3) * dropped[:, :, :, None]).sum(-1).mean().item(), counts=counts[0])


# ---- what a sketch can tell ---

def relative_error(found: Tensor, true: Tensor) -> float:
    """Squared error over the variance of true (B, H, n, D) about its mean over tokens, mean over heads.

    The mean alone is at 1.
    """
    variance = (true - true.mean(2, keepdim=True)).square().sum((2, 3))
    return ((found - true).square().sum((2, 3)) / variance).mean().item()


def take_out(sketch: Sketch, J: Tensor, k: Tensor, v: Tensor, n: int, true: bool = False):
    """Delete the first n of the tokens J (B, H, a) in a sketch: their estimates, or the true k and v.

    Swaps delete estimates. Returns the relative error of the values still in after each, and what was
    deleted, k and v (B, H, n, D).
    """
    errors, deleted = [], []
    for i in range(n):
        one = J[:, :, i:i + 1]
        deleted.append((k[:, :, i:i + 1], v[:, :, i:i + 1]) if true else sketch.query(one, J[:, :, i:]))
        sketch.insert(one, *deleted[-1], times=-1.0)
        errors.append(relative_error(sketch.query(J[:, :, i + 1:])[1], v[:, :, i + 1:]))
    return errors, [torch.cat(x, 2) for x in zip(*deleted)]


# ---- the appendix ---

def collision_variance(a: float, width: int, rows: int) -> float:
    """Expected squared error of a revived number in a signed sketch of r rows of b slots that hold many.

    Its a − 1 fellows have mean 0 and variance 1. Above 1, the 0 that is read off an empty sketch is nearer.
    """
    return MEDIAN[rows] * (a - 1) / width


def printed_bound(a: float, slots: int) -> tuple[float, float]:
    """πa/N, which a revived number's variance (in one number's) exceeds with probability below e^(−a/N)."""
    return math.pi * a / slots, math.exp(-a / slots)


# ---- what no reading of the sketch can help ---

def load(budget: float, vague: float) -> float:
    """a/N, tokens per slot of memory, if `vague` of a `budget` of all tokens' entries goes to the sketch.

    It is at least 1/budget, however the budget is split. Where positions and scores of tokens take bytes as
    well, fewer tokens are exact, and a/N is larger.
    """
    # Of Bn entries N = vBn are slots and Bn − N are exact tokens. The sketch has the others, so
    #     a = n − Bn + N,   a/N = 1 + (1 − B) n/N = 1 + (1 − B)/(vB) ≥ 1 + (1 − B)/B = 1/B   since v ≤ 1,
    # with equality where nothing is exact.
    return 1 + (1 - budget) / (vague * budget)


def score_share(budget: float, head_dim: int, bytes_per_number: int) -> float:
    """The part of the bytes of a budget that the scores of all n tokens take: 4n of Bn (2·D·bytes + 4)."""
    return 4 / (budget * (2 * head_dim * bytes_per_number + 4))


def of_a_head(Method, budget: float, tokens: int, head_dim: int, dtype: torch.dtype, **options):
    """A fresh cache of one head after a prompt of so many tokens. How much it holds depends on no number."""
    cache, x = Method(round(budget * tokens), **options), torch.zeros(1, 1, tokens, head_dim, dtype=dtype)
    cache.write(x, x, torch.arange(tokens)[None])
    cache.end_prefill()
    return cache


def shifted(Method, offset: float):
    """Method in a model whose attention logits are all larger by `offset`. Full attention cannot see that.

    Each key has one number more, 1, and each query one that makes it `offset`. Sums of keys have their
    number there. What the value has there is 0. A budget is one of these longer entries.
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
    """x (B, H, n, D) in so many bits a number, with one range for a `group` of tokens, or of channels."""
    sizes = (2, (-1, group)) if over_tokens else (3, (-1, group))
    code, zero, scale = quantise(x.unflatten(*sizes), bits, 3 if over_tokens else 4)
    return (code * scale.float() + zero.float()).flatten(sizes[0], sizes[0] + 1)


def revived_logits(model, full, make, steps: int = 16) -> list[tuple[float, ...]]:
    """What attention makes of the vague tokens after a prompt, by layer, under the full cache's queries.

    By how much their logits are off, and by how much they vary, revived and true; their part of the
    attention, with revived keys and with true ones.
    """
    caches, c, table = make(full.prompt.shape[1]), model.config, []
    replay([full.recording], caches)
    end_prefill(caches)
    for cache, prompt, later in zip(caches, full.recording, full.continuation):
        cache.attend(later.q[:, :, :1], later.k[:, :, :1], later.v[:, :, :1], later.pos[:, :1])
        keys, _, pos, _ = cache.read()
        true = torch.cat((prompt.k.to(keys.device), later.k[:, :, :1]), 2)
        true = true.gather(2, pos.long()[..., None].expand(-1, -1, -1, c.head_dim))

        asked = later.q[:, :, 1:1 + steps].unflatten(1, (c.n_kv_heads, -1))
        logits = [asked @ k.unsqueeze(2).mT * c.head_dim ** -0.5 for k in (keys, true)]
        vague = torch.arange(pos.shape[2], device=pos.device) >= cache.length
        off = (logits[0] - logits[1])[..., vague].std()
        vary = [x[..., vague].std(-1).mean() for x in logits]
        part = [x.softmax(-1)[..., vague].sum(-1).mean() for x in logits]
        table.append(tuple(x.item() for x in (off, *vary, *part)))
    return table


def at_depths(tasks: Tasks, depths: tuple[float, ...], each: int, T: int, seed: int = 7) -> Batch:
    """Needle documents of T tokens, `each` with what is asked for at every depth, one depth after the other.
    """
    parts = [tasks.batch("needle", seed, each, T, depth=depth) for depth in depths]  # one seed: they align
    tokens, roles = (np.concatenate([getattr(part, x) for part in parts]) for x in ("tokens", "roles"))
    return Batch(tokens, roles, parts[0].question, parts[0].answers)


def found_agnostic(model, batch, make, recording=None) -> Tensor:
    """Which needles of a batch are found, (B,), if the question comes after the compression."""
    tokens, context, _ = prompt_and_question(model, batch)
    caches = make(batch.question)
    feed(model, context, caches) if recording is None else replay([recording], caches)
    return answer(model, tokens, batch.answers, batch.question, caches)
