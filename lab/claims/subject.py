"""A model on which claims are judged: shared measurements, and verdicts from numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lab.benchmark import Benchmark, cut, mean_and_error as mean, text_windows
from lab.claims.compared_methods import METHODS
from lab.continuation import Reference, reference
from lab.retrieval import maker
from lab.table import judges
from lab.tasks import Tasks, Unmarked
from methods.theory.perturbation import seen_by_window
from nanollm.cache import Method

ASKED = {
    "needle": (Tasks, "needle", {}),
    "pairs": (Tasks, "pairs", {}),
    "few_shot": (Tasks, "few_shot", {}),
    "unmarked pairs": (Unmarked, "pairs", {}),  # a comma alone tells where a pair ends
    "unmarked long needle": (Unmarked, "needle", dict(facts=1, numbers=4)),
}
PART = 24  # documents or texts that are measured at once
KEEP = 0.5, 0.25, 0.125, 0.0625  # shares of the entries that stay

# verdicts
HOLDS = "holds"
NOT = "does not hold"
OPEN = "undecided"
UNFIT = "this model cannot judge it"

Number = tuple[float, float]  # a mean and its standard error


class Finding(NamedTuple):
    verdict: str
    numbers: dict[str, Number]  # the deciding numbers, and others for comparison
    why: str = ""  # why there is no verdict


# ---- verdicts ----


def means(x: dict[str, Tensor]) -> dict[str, Number]:
    """Return the mean and standard error of each row."""
    return {name: mean(each) for name, each in x.items()}


def over_texts(of: Callable, *x: Tensor, draws: int = 200) -> Number:
    """Return of(*x) and its standard error by bootstrap over texts; x are (texts, …)."""
    n = len(x[0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(n, (draws, n), generator=generator)
    again = [float(of(*(y[texts] for y in x))) for texts in drawn]
    return float(of(*x)), torch.tensor(again).std().item()


def above(x: Number, limit: float = 0.0) -> str:
    """Return "holds" if x lies above the limit, "undecided" within two standard errors of it."""
    distance = x[0] - limit
    error = 2 * x[1]
    if distance > error:
        return HOLDS
    return NOT if distance < -error else OPEN


def below(x: Number, limit: float = 0.0) -> str:
    """Return "holds" if x lies below the limit, "undecided" within two standard errors of it."""
    return above((-x[0], x[1]), -limit)


def within(x: Number, limit: float) -> str:
    """Return "holds" if x lies between −limit and limit."""
    return both(above(x, -limit), below(x, limit))


def both(*verdicts: str) -> str:
    """Return the verdict of conditions that must all hold."""
    for verdict in NOT, OPEN:
        if verdict in verdicts:
            return verdict
    return HOLDS


# ---- a model, and measurements that several claims share ----


@dataclass(eq=False)
class Subject:
    """A decoder, ours or `Bridged`, and what is measured on it.

    It has `documents` of each task and as many texts, of T tokens.
    """

    model: object
    tasks: Tasks
    seed: int = 0
    documents: int = 24
    T: int = 256

    def __post_init__(self):
        # measured once for the same arguments
        self.recorded = cache(self.recorded)
        self.right = cache(self.right)
        self.continued = cache(self.continued)

    def some(self, part: int) -> int:
        """Return how many texts are a half (2) or a third (3): slow measurements get no more."""
        return max(2, self.documents // part)

    # ---- questions ----

    def recorded(self, task: str) -> list[Benchmark]:
        """Return the documents of a task of ASKED, at most PART at once, whose answers align."""
        kind, name, options = ASKED[task]
        tasks = self.tasks
        if kind is not Tasks:
            tasks = kind(tasks.encoding, tasks.split, tasks.own)
        parts = []
        for batch in tasks.batches(name, self.seed, self.documents, self.T, **options):
            parts += [
                Benchmark.read(self.model, {task: part}) for part in cut(batch, PART)
            ]
        return parts

    def right(
        self,
        task: str,
        kind: type[Method],
        keep_ratio: float | None,
        setting: str = "aware",
        **options,
    ) -> Tensor:
        """Return each document's share of right answers, (documents,)."""
        make = maker(self.model, kind, keep_ratio, **options)

        found = []
        for part in self.recorded(task):
            answers = part.answers(self.model, task, make, (setting,))
            found.append(answers[setting].cpu())
        return torch.cat(found)

    def answered(
        self,
        kind: type[Method],
        keep_ratio: float | None,
        *tasks: str,
        setting: str = "aware",
        **options,
    ) -> Tensor:
        """Return the share right, mean over the tasks that the full cache solves, (documents,).

        ValueError if it solves none.
        """
        full = {}
        for task in tasks:
            full[f"{task}_aware"] = self.right(task, Method, None).mean().item()
        solved = [task for task in tasks if judges(full, task)]
        if not solved:
            shares = [f"{full[f'{task}_aware']:.2f} of {task}" for task in tasks]
            raise ValueError(f"the full cache answers {', '.join(shares)}")
        right = [
            self.right(task, kind, keep_ratio, setting, **options) for task in solved
        ]
        return torch.stack(right).mean(0)

    def facts(self, name: str, keep_ratio: float, **more) -> Tensor:
        """Return the share of needles and pairs that a method of METHODS finds, query-aware."""
        kind, options = METHODS[name]
        return self.answered(kind, keep_ratio, "needle", "pairs", **options | more)

    def agnostic(
        self, kind: type[Method], keep_ratio: float | None, **options
    ) -> Tensor:
        """Return the share of needles found if the question comes after the compression."""
        return self.answered(kind, keep_ratio, "needle", setting="agnostic", **options)

    # ---- texts ----

    @cached_property
    def text(self) -> Reference:
        """Texts of T tokens; the last eighth, at most 64 tokens, is the continuation."""
        tokens = text_windows(self.tasks, self.documents, self.T, self.model)
        tokens = tokens.to(self.model.embed.weight.device)
        return reference(self.model, tokens, min(64, self.T // 8))

    def continued(
        self,
        kind: type[Method],
        keep_ratio: float,
        alone: bool = False,
        part: int = 1,
        **options,
    ) -> dict[str, Tensor]:
        """Return kl, nll, l1 and, if `alone`, l1_alone of each text (`continuation`).

        part: of `some` of the texts.
        """
        make = maker(self.model, kind, keep_ratio, **options)
        texts = self.text.texts(slice(self.some(part)))
        measured = []
        for some in texts.split(PART):
            measured.append(Benchmark({}, {}, some).continued(self.model, make, alone))
        names = ["kl", "nll", "l1"] + ["l1_alone"] * alone
        found = {}
        for name in names:
            found[name] = torch.cat([x[name] for x in measured]).cpu()
        windows = getattr(self.model, "windows", [])
        if any(windows):  # methods do not compress layers that slide
            full = [i for i, sliding in enumerate(windows) if sliding is None]
            for name in names[2:]:
                found[name] = found[name][:, full]
        return found

    def of_text(self, name: str, keep_ratio: float) -> dict[str, Tensor]:
        """Return `continued` for a method of METHODS, with `l1_alone`.

        It is ‖o − ô‖₁ (texts, L, H·G) with only one layer compressed; `l1` is that with the layers
        below compressed, too.
        """
        kind, options = METHODS[name]
        return self.continued(kind, keep_ratio, alone=True, **options)

    def kl(self, kind: type[Method], keep_ratio: float, **options) -> Tensor:
        """Return a KVReviver's KL at this share of the bytes, on a third of the texts; no slack."""
        options = dict(slack=0) | options
        return self.continued(kind, keep_ratio, part=3, **options)["kl"]

    def rise(self, kind: type[Method], keep_ratio: float, **options) -> Tensor:
        """Return by how much −log p of the true tokens rises, in nats a token, (texts,)."""
        true = self.text.tokens[:, -self.text.new :, None]
        log_p = self.text.log_p.gather(-1, true)[..., 0].mean(-1).cpu()
        nll = self.continued(kind, keep_ratio, **options)["nll"]
        return nll + log_p[: len(nll)]

    # ---- heads ----

    @cached_property
    def heads(self) -> list[tuple[Tensor, Tensor]]:
        """Return A and ‖𝒱‖₁ of each needle prompt (`seen_by_window`)."""
        device = self.model.embed.weight.device
        found = []
        for part in self.recorded("needle"):
            batch = part.batches["needle"]
            tokens = torch.from_numpy(batch.tokens[:, : batch.answers[0].start])
            for prompt in tokens.to(device).split(1):
                found.append(seen_by_window(self.model, prompt, 8))
        return found
