"""A cartridge: a cache of n slots a head, fitted to one text by gradient (Eyuboglu et al., arXiv 2506.06266).

Other methods choose among the entries of a text's cache. A cartridge may hold any keys and values. So it
shows what a budget could hold if somebody had minutes for a text:

    min over k, v of  mean KL(p(· | the text's cache, piece) ‖ p(· | k, v, piece))     k, v (L, B, H, n, D)

The pieces are parts of the text that begin at random places, read again after the text. There the model
writes itself conversations about the text; a small decoder cannot.

    python -m methods.theory.cartridge     # 8 lists of pairs, a thirty-second of the entries: two minutes

After 200 steps it answers 0.50 of the questions on `learned`, where KVzip with as many entries in each head
answers 0.12, and none on `built`. KVzip by gain, which may give a head more entries than another, answers
0.75 on both. So 200 steps with equal shares are no ceiling: where the slots are matters more than what they
hold.
"""
import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

from methods.kvzip import KVzip
from methods.ours.kvzip_gain import GainKVzip
from nanollm import SHIPPED
from nanollm.cache import LayerCache, make_cache
from nanollm.commands.registry import load
from nanollm.commands.text_table import text_table
from nanollm.generate import end_prompt, prefill
from nanollm.measure.evaluate import ask
from nanollm.measure.tasks import Tasks


def caches_of(model, k: Tensor, v: Tensor, seen: int) -> list[LayerCache]:
    """Return caches whose slots are k and v (L, B, H, n, D), after `seen` tokens."""
    caches = make_cache(model)
    for cache, keys, values in zip(caches, k, v):
        pos = torch.zeros(keys.shape[:3], dtype=torch.int32, device=k.device)  # every query sees every slot
        cache.slots, cache.length, cache.seen = dict(k=keys, v=values, pos=pos), keys.shape[2], seen
    return caches


def read(model, text: Tensor, Method=LayerCache, **options) -> list[LayerCache]:
    """Return the caches of texts (B, S), compressed by a method."""
    caches = make_cache(model, Method, **options)
    prefill(model, text, caches)
    end_prompt(model, text, caches)
    return caches


def stacked(caches: list[LayerCache]) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of all layers, (L, B, H, S, D) each."""
    return torch.stack([cache.k for cache in caches]), torch.stack([cache.v for cache in caches])


def fit(model, text: Tensor, n: int, steps: int = 200, lr: float = 0.02, piece: int = 64,
        seed: int = 0) -> tuple[Tensor, Tensor, list[float]]:
    """Return k, v (L, B, H, n, D) for texts (B, S), and the loss of each step.

    It begins with the n entries that KVzip keeps in each head.
    """
    (B, S), generator = text.shape, torch.Generator().manual_seed(seed)
    with torch.no_grad():
        whole = stacked(read(model, text))
        start = stacked(read(model, text, KVzip, budget=n, across=False))
    k, v = (x.clone().requires_grad_() for x in start)
    optimizer, losses = torch.optim.Adam((k, v), lr), []
    for step in tqdm(range(steps), leave=False, disable=None):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        first = torch.randint(S - piece + 1, (B, 1), generator=generator)
        part = text.gather(1, first.to(text.device) + torch.arange(piece, device=text.device))
        with torch.no_grad():
            right = model(part, caches_of(model, *whole, S)).log_softmax(-1)
        said = model(part, caches_of(model, k, v, S)).log_softmax(-1)
        loss = F.kl_div(said, right, log_target=True, reduction="sum") / part.numel()
        k.grad, v.grad = (x * B for x in torch.autograd.grad(loss, (k, v)))  # each text has its own loss
        optimizer.step()
        losses.append(loss.item())
    return k.detach(), v.detach(), losses


def main(documents: int = 8, T: int = 512, keep: float = 1 / 32):
    table = [["pairs, question later", "KVzip, each head", "KVzip", "KVzip by gain", "cartridge"]]
    for name, folder in SHIPPED.items():
        model, encoding = load(folder, "cpu")
        batch = Tasks(encoding, "test").batch("pairs", 0, documents, T)
        tokens, S = torch.from_numpy(batch.tokens), batch.question
        text, n = tokens[:, :S], round(keep * batch.question)
        chosen = [read(model, text, KVzip, budget=n, across=False), read(model, text, KVzip, budget=n),
                  read(model, text, GainKVzip, budget=n)]
        k, v, _ = fit(model, text, n)
        row = [ask(model, tokens, batch.answers, S, caches).mean().item()
               for caches in (*chosen, caches_of(model, k, v, S))]
        table.append([name, *(f"{x:.2f}" for x in row)])
    print(text_table(table))


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the comparison does
    main()
