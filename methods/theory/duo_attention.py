"""Which heads retrieve, one head at a time: what is lost if it alone streams?

Where heads can stand in for one another, this may find none of them. So DuoAttention (arXiv 2410.10819)
trains a gate for every head, all together: methods/duo_gates.py.
"""
import torch
from torch import Tensor
import torch.nn.functional as F

from methods.duo_gates import ask, predictions
from nanollm.data import Tasks


@torch.no_grad()
def importance(model, tasks: Tasks, documents: int = 32, T: int = 512, sinks: int = 4, window: int = 16,
               seed: int = 0, of: tuple[str, ...] = ("needle", "recall")) -> Tensor:
    """Nats per token by which right answers become less likely if this head alone streams, (L, H).

    Mean over the tasks `of`, with `documents` of T tokens each; sinks and window as in `gates`.
    """
    c = model.config
    asked = ask(model, tasks, of, documents, T, seed, documents)

    def nll(gates: Tensor) -> float:
        each = [predictions(model, part, gates, sinks, window) for part in asked]
        return sum(F.nll_loss(log_p.flatten(0, 1), part.tokens[:, -part.n:].flatten()).item()
                   for log_p, part in zip(each, asked)) / len(asked)

    heads = torch.eye(c.n_layers * c.n_kv_heads).view(-1, c.n_layers, c.n_kv_heads)
    full = nll(torch.ones_like(heads[0]))
    return torch.tensor([nll(1 - head) - full for head in heads]).view_as(heads[0])
