"""Timing: several runs in turn, of which the fastest counts."""
from itertools import pairwise
import time


def seconds(*parts, clock=time.perf_counter) -> list[float]:
    """Return how long each of these takes, one after the other."""
    times = [clock()]
    for part in parts:
        part()
        times.append(clock())
    return [end - began for began, end in pairwise(times)]


def best(run, repeat: int, clock=time.perf_counter) -> float:
    """Return seconds, the least of `repeat` timings: whatever else the machine does only ever adds."""
    return min(seconds(*[run] * repeat, clock=clock))


def in_turn(runs: dict, repeat: int) -> dict[str, list[float]]:
    """Return by name the least seconds of `repeat` runs. A run returns seconds of its parts; they take turns.
    """
    times = {name: [] for name in runs}
    for name in [*runs] * repeat:
        times[name].append(runs[name]())
    return {name: [min(part) for part in zip(*taken)] for name, taken in times.items()}
