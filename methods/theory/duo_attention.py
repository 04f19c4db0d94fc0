"""Which heads retrieve, for DuoAttention (arXiv 2410.10819): one head streams, and answers tell what is lost.

One head at a time is enough for the shipped decoder: its three retrieval heads were built into its starting
weights (`induction_start` in nanollm/start.py). Heads that can stand in for one another would not be found in
this way.
"""
import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import make_cache
from nanollm.data import Tasks
from nanollm.evaluate import prompt_and_question
from nanollm.ranking import indices
from nanollm.replay import Recorder, record


@torch.no_grad()
def importance(model, tasks: Tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16,
               seed: int = 0, of: tuple[str, ...] = ("needle", "recall")) -> Tensor:
    """Nats per token by which right answers become less likely if this head alone streams, (L, H).

    Mean over the tasks `of`, with `documents` of T tokens each. Of the context the head keeps `window`
    tokens; the question comes after that.
    """
    c = model.config
    lost = torch.zeros(c.n_layers, c.n_kv_heads)
    for task in of:
        batch = tasks.batch(task, seed, documents, T)
        tokens, context, _ = prompt_and_question(model, batch)
        read, answer = record(model, make_cache(model, Recorder), context), batch.answers[0]

        def nll(streaming: tuple[int, int] | None) -> float:
            """Of the answer, after a context of which one (layer, head) keeps `window` tokens."""
            caches = make_cache(model)
            for cache, said in zip(caches, read):
                cache.write(said.k, said.v, said.pos)
            if streaming:
                layer, head = streaming
                stays = torch.ones_like(caches[layer].pos, dtype=torch.bool)
                stays[:, head, sinks:max(stays.shape[2] - window + sinks, 0)] = False
                caches[layer].keep(indices(stays))
            logits = model(tokens[:, batch.question:answer.stop - 1], caches, last=answer.stop - answer.start)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, answer].flatten()).item()

        full = nll(None)
        for layer in range(c.n_layers):
            for head in range(c.n_kv_heads):
                lost[layer, head] += (nll((layer, head)) - full) / len(of)
    return lost


def retrieval_heads(importance: Tensor, least: float = 0.1) -> tuple[tuple[int, int], ...]:
    """(layer, head) of those without which answers lose more than `least` nats per token, the most first."""
    lost, H = importance.flatten(), importance.shape[1]
    order = lost.argsort(descending=True, stable=True).tolist()
    return tuple(divmod(i, H) for i in order if lost[i] > least)
