"""The course's one table: assignments, their problems, the points, and the function that each stands for.

A problem's tests are those marked @problem(NAME) in course/ASSIGNMENT/public.py, which students get, and in
hidden.py. What a test may ask of a submission stands in adapter.py beside them.
"""
from typing import NamedTuple


class Problem(NamedTuple):
    name: str
    points: int
    file: str
    function: str  # "Class.method" or "function"


class Assignment(NamedTuple):
    title: str
    hours: str
    problems: list[Problem]
    without: list[str] = []  # files of methods/ that would give answers away


def of(file: str, **problems: tuple[int, str]) -> list[Problem]:
    return [Problem(name, points, file, function) for name, (points, function) in problems.items()]


ASSIGNMENTS = {
    "chunks": Assignment("Chunks", "2 to 3 hours", of(
        "methods/chunk_kv.py",
        cut=(1, "Chunks.cut"),
        scores=(3, "scores"),
        ranking=(2, "ranking"),
        cut_to=(3, "cut_to"),
        fit=(4, "fit"),
        reuse=(2, "ChunkKV.chosen"),
    ), without=["semantic_chunk_kv.py"]),
    "sketch": Assignment("The sketch", "3 to 4 hours", of(
        "methods/count_sketch.py",
        hash=(2, "Sketch.number"),
        slots=(1, "Sketch.bucket"),
        insert=(4, "Sketch.insert"),
        median=(3, "Sketch.median"),
    ) + of(
        "methods/theory/kv_reviver.py",
        variance=(1, "collision_variance"),
        load=(1, "load"),
    ) + of(
        "methods/kv_reviver_mean.py",
        means=(2, "MeanSketch.means"),
    ) + of(
        "methods/kv_reviver_shrunk.py",
        shrink=(4, "ShrunkSketch.centred"),
    )),
}


def chosen(names: list[str] | None) -> dict[str, Assignment]:
    """The assignments named, or of which a problem is named ("chunks.cut"); all for none. ValueError for a
    name that is not there.
    """
    known = {name: {name, *(f"{name}.{problem.name}" for problem in each.problems)}
             for name, each in ASSIGNMENTS.items()}
    for name in names or []:
        if not any(name in each for each in known.values()):
            assignment = name.partition(".")[0]
            raise ValueError(f"{name!r} is not there; known are "
                             f"{', '.join(sorted(known.get(assignment, [])) or ASSIGNMENTS)}")
    return {name: ASSIGNMENTS[name] for name, each in known.items() if not names or each & {*names}}


def asked(file: str) -> list[str]:
    """All functions of a file that some problem asks for."""
    problems = [problem for each in ASSIGNMENTS.values() for problem in each.problems]
    return [problem.function for problem in problems if problem.file == file]
