"""A model on which claims are judged: measurements that several rules share, and verdicts from numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lab.benchmark import Benchmark, cut, replayed_or_read
from lab.claims.change_and_text import METHODS
from lab.evaluate import (
    Reference,
    continuation,
    maker,
    mean_and_error as mean,
    reference,
    retrieve,
    text_windows,
)
from lab.processes import spread
from lab.table import judges
from lab.tasks import Tasks, Unmarked
from methods.theory.perturbation import seen_by_window
from methods.theory.sketch_error import share_out
from nanollm.cache import LayerCache

ASKED = {
    "needle": (Tasks, "needle", {}),
    "pairs": (Tasks, "pairs", {}),
    "few_shot": (Tasks, "few_shot", {}),
    "unmarked pairs": (Unmarked, "pairs", {}),  # no mark tells where a fact ends
    "unmarked long needle": (Unmarked, "needle", dict(facts=1, numbers=4)),
}
PART = 16  # documents or texts that a process measures at once
HOLDS, NOT, OPEN, UNFIT = (
    "holds",
    "does not hold",
    "undecided",
    "this model cannot judge it",
)
UNTESTED, LARGE = "not testable here", 10**9  # parameters
Number = tuple[float, float]  # a mean and its standard error


class Finding(NamedTuple):
    verdict: str
    numbers: dict[str, Number]  # the deciding numbers, and others for comparison
    why: str = ""  # why there is no verdict, or why the claim cannot hold


# ---- verdicts ---


def means(x: dict[str, Tensor]) -> dict[str, Number]:
    """Return the mean and standard error of each row."""
    return {name: mean(each) for name, each in x.items()}


def over_texts(of: Callable, *x: Tensor, draws: int = 200) -> Number:
    """Return of(*x) and its standard error by bootstrap over texts; x are (texts, …)."""
    again = torch.randint(
        len(x[0]), (draws, len(x[0])), generator=torch.Generator().manual_seed(0)
    )
    return float(of(*x)), torch.tensor(
        [float(of(*(y[i] for y in x))) for i in again]
    ).std().item()


def above(x: Number, limit: float = 0.0) -> str:
    """Return "holds" if x lies above the limit, "undecided" within two standard errors of it."""
    off, error = x[0] - limit, 2 * x[1]
    return HOLDS if off > error else NOT if off < -error else OPEN


def below(x: Number, limit: float = 0.0) -> str:
    """Return "holds" if x lies below the limit, "undecided" within two standard errors of it."""
    return above((-x[0], x[1]), -limit)


def within(x: Number, limit: float) -> str:
    """Return "holds" if x lies between −limit and limit."""
    return both(above(x, -limit), below(x, limit))


def both(*verdicts: str) -> str:
    """Return the verdict of conditions that must all hold; untestable ones are left out."""
    return next(
        (verdict for verdict in (NOT, OPEN, HOLDS) if verdict in verdicts), UNTESTED
    )


def of_large(model, verdict: str) -> str:
    """Return the verdict if the model has a billion parameters, else "not testable here"."""
    return verdict if sum(x.numel() for x in model.parameters()) >= LARGE else UNTESTED


# ---- a model, and measurements that several claims share ---


@dataclass(eq=False)
class Subject:
    """A decoder, ours or `Bridged`, with `documents` of each task, of T tokens, and as many texts.

    processes: measure in a process for each core.
    """

    model: object
    tasks: Tasks
    seed: int = 0
    documents: int = 32
    T: int = 256
    processes: bool = False

    def __post_init__(self):  # each is measured once
        for name in ("bench", "row", "of_text", "kl"):
            setattr(self, name, cache(getattr(self, name)))

    def spread(self, function: Callable, items: Iterable) -> list:
        """Return function(item) for each item."""
        return [*spread(function, items, self.processes)]

    @cached_property
    def text(self) -> Reference:
        """Texts of T tokens; the last eighth, at most 64 tokens, is the continuation."""
        tokens = text_windows(self.tasks, self.documents, self.T, self.model)
        return reference(
            self.model, tokens.to(self.model.embed.weight.device), min(64, self.T // 8)
        )

    def bench(self, task: str) -> list[Benchmark]:
        """Return the documents of a task of ASKED, at most PART at once, whose answers align."""
        Kind, name, options = ASKED[task]
        tasks = (
            self.tasks
            if Kind is Tasks
            else Kind(self.tasks.encoding, self.tasks.split, self.tasks.own)
        )
        batches = tasks.batches(name, self.seed, self.documents, self.T, **options)
        return [
            Benchmark.read(self.model, {task: part}, None)
            for batch in batches
            for part in cut(batch, PART)
        ]

    def row(
        self, task: str, Method, keep_ratio: float | None, setting="aware", **options
    ) -> Tensor:
        """Return each document's share of right answers, (documents,)."""
        make = maker(self.model, Method, keep_ratio, **options)
        measure = partial(retrieve, settings=(setting,))
        return torch.cat(
            self.spread(
                lambda bench: replayed_or_read(
                    measure,
                    self.model,
                    bench.batches[task],
                    make,
                    bench.recordings[task],
                )[setting].cpu(),
                self.bench(task),
            )
        )

    def answered(
        self, Method, keep_ratio: float | None, *tasks: str, setting="aware", **options
    ) -> Tensor:
        """Return the mean over the tasks that the full cache solves, (documents,); ValueError if none."""
        full = {
            f"{task}_aware": self.row(task, LayerCache, None).mean().item()
            for task in tasks
        }
        fit = [task for task in tasks if judges(full, task)]
        if not fit:
            raise ValueError(
                "the full cache answers "
                + ", ".join(f"{full[f'{task}_aware']:.2f} of {task}" for task in tasks)
            )
        return torch.stack(
            [self.row(task, Method, keep_ratio, setting, **options) for task in fit]
        ).mean(0)

    def facts(self, name: str, keep_ratio: float | None = None, **more) -> Tensor:
        """Return the needles and pairs that a method of METHODS finds, query-aware; None: at `tight`."""
        Method, options = METHODS[name]
        return self.answered(
            Method, keep_ratio or self.tight, "needle", "pairs", **options | more
        )

    @cached_property
    def tight(self) -> float:
        """Return the least keep ratio, from 1/16 to 1/2, at which SnapKV finds half of the full cache's."""
        half = self.answered(LayerCache, None, "needle", "pairs").mean() / 2
        return next(
            (
                x
                for x in (1 / 16, 1 / 8, 1 / 4)
                if self.facts("SnapKV", x).mean() >= half
            ),
            1 / 2,
        )

    def agnostic(self, Method, keep_ratio: float | None = 0.25, **options) -> Tensor:
        """Return the needles found if the question comes after the compression."""
        return self.answered(
            Method, keep_ratio, "needle", setting="agnostic", **options
        )

    def of_text(self, name: str, keep_ratio: float = 0.25) -> dict[str, Tensor]:
        """Return `continued` for a method of METHODS, with the changes ‖o − ô‖₁ (texts, L, H·G).

        l1_alone: with only one layer compressed. l1: with the layers below compressed too.
        """
        Method, options = METHODS[name]
        return self.continued(Method, keep_ratio, alone=True, **options)

    def kl(self, Method, shares: tuple | None = None, **options) -> Tensor:
        """Return each text's KL, (texts,), at a quarter of the bytes and without slack."""
        return self.continued(Method, 0.25, shares, **dict(slack=0) | options)["kl"]

    def rise(self, Method, keep_ratio: float, **options) -> Tensor:
        """Return by how much −log p of the true tokens rises, in nats a token, (texts,)."""
        true = (
            self.text.log_p.gather(-1, self.text.tokens[:, -self.text.new :, None])[
                ..., 0
            ]
            .mean(-1)
            .cpu()
        )
        return self.continued(Method, keep_ratio, **options)["nll"] + true

    def continued(
        self,
        Method,
        keep_ratio: float,
        shares: tuple | None = None,
        alone: bool = False,
        **options,
    ) -> dict[str, Tensor]:
        """Return `continuation` of each text; `shares` divide the budget by layer."""
        make, measure = (
            maker(self.model, Method, keep_ratio, **options),
            partial(continuation, alone=alone),
        )
        shared = lambda n, *prompt: (
            make(n) if shares is None else share_out(make(n), shares)
        )
        parts = self.spread(
            lambda text: replayed_or_read(
                measure, self.model, text, shared, text.recording
            ),
            self.text.split(PART),
        )
        return {
            key: torch.cat([part[key] for part in parts]).cpu()
            for key in ("kl", "nll", "l1", "l1_alone")
            if key in parts[0]
        }

    def heads(self, measure: Callable) -> Tensor:
        """Return measure(*`seen_by_window`), a number for each needle prompt, (documents,)."""
        batches = [
            batch for bench in self.bench("needle") for batch in bench.batches.values()
        ]
        prompts = [
            prompt
            for batch in batches
            for prompt in torch.from_numpy(
                batch.tokens[:, : batch.answers[0].start]
            ).split(1)
        ]
        where = self.model.embed.weight.device
        return torch.stack(
            self.spread(
                lambda prompt: measure(
                    *seen_by_window(self.model, prompt.to(where), 8)
                ).cpu(),
                prompts,
            )
        )
