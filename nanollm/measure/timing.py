"""Timing: take several runs in turn and report the fastest."""
from itertools import pairwise
import time


def seconds(*parts, clock=time.perf_counter) -> list[float]:
    """Return the seconds that each of `parts` takes, called one after the other."""
    times = [clock()]
    for part in parts:
        part()
        times.append(clock())
    return [end - began for began, end in pairwise(times)]


def best(run, repeat: int, clock=time.perf_counter) -> float:
    """Return the fewest seconds of `repeat` runs: other work on the machine only adds time."""
    return min(seconds(*[run] * repeat, clock=clock))


def in_turn(runs: dict, repeat: int) -> dict[str, list[float]]:
    """Return, by name of a run, the fewest seconds of each of its parts over `repeat` rounds.

    A run returns a list with the seconds of its parts. The runs take turns.
    """
    times = {name: [] for name in runs}
    for name in [*runs] * repeat:
        times[name].append(runs[name]())
    return {name: [min(part) for part in zip(*taken)] for name, taken in times.items()}
