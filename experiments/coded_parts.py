"""Count the bits that kvzip_gain_coded needs for the keys and values of a token, with each of its steps.

    python -m experiments.coded_parts    # both shipped decoders: two minutes

The bits are the entropy of the rounded coordinates, if each is normal with its spread. They are the mean over
the tokens that stay. All rows but the first have the same steps of rounding, so the same errors.
"""
import torch
from torch import Tensor

from experiments.script import run
from methods.ours.karhunen_loeve import Watched, basis, metric, watched
from nanollm.cache import NEVER
from nanollm.commands.text_table import text_table
from nanollm.measure.hard_tasks import HardTasks

STEPS = ("in 16 bits", "each key and each value alone", "keys turned back to position 0",
         "all keys and values of a token together")


class Rotated(Watched):
    """Watched that also records the tokens with their keys as they are stored."""

    def end_prefill(self):
        self.rotated = self.as_stored()[0]
        super().end_prefill()

    def pack(self):
        self.rotated = torch.cat((self.rotated, self.as_stored()[self.pos[:, 0] != NEVER]))
        super().pack()

    def as_stored(self) -> Tensor:
        return torch.cat((self.k, self.v), 1).transpose(1, 2).flatten(2)


def entropy(spread: Tensor) -> float:
    """Return the bits of one rounded number for each spread (N,), summed."""
    border, normal = torch.arange(-200, 201).double() + 0.5, torch.distributions.Normal(0.0, 1.0)
    p = normal.cdf(border / spread.double().clamp(min=0.01)[:, None]).diff(dim=1)
    return -torch.special.xlogy(p, p).sum().item() / torch.tensor(2.0).log().item()


def bits(cache) -> tuple[float, ...]:
    """Return the bits of a token in a layer after each step."""
    M, N = metric(cache), cache.kept.shape[1]
    together = lambda x, M: entropy(basis(x, M)[-1])  # the blocks of M are coded together
    alone = [sum(map(together, x.split(M.shape[1], 1), M.split(1))) for x in (cache.rotated, cache.kept)]
    return 16 * N, *alone, together(cache.kept, M)


@torch.no_grad()
def measured(model, encoding) -> list[dict]:
    """Return for each step the bits of a token and of one of its numbers, mean over the tokens that stay."""
    caches = watched(model, HardTasks(encoding, "train"), Rotated)
    kept = torch.tensor([len(cache.kept) - cache.first_pass for cache in caches]).double()
    found = torch.tensor([bits(cache) for cache in caches]).double()
    mean, numbers = (found * kept[:, None]).sum(0) / kept.sum(), caches[0].kept.shape[1]
    return [dict(coded=step, bits=x, number=x / numbers) for step, x in zip(STEPS, mean.tolist())]


def show(rows: list[dict]) -> str:
    """Return a row for each decoder and step."""
    return text_table([["decoder", "coded", "bits a token", "a number"],
                       *([row["decoder"], row["coded"], f"{row['bits']:.0f}", f"{row['number']:.2f}"]
                         for row in rows)])


if __name__ == "__main__":
    run("experiments.coded_parts", __doc__, measured, show)
