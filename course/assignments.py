"""The table of the course: assignments, their problems, and the points and function of each.

The tests of a problem are marked @problem(NAME). Students get those in course/ASSIGNMENT/public.py, not
those in hidden.py. adapter.py holds the functions that a test may call in a submission.
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
    beside: list[str] = []  # more files for a student's copy: methods that the written question compares with


def of(file: str, **problems: tuple[int, str]) -> list[Problem]:
    return [Problem(name, points, file, function) for name, (points, function) in problems.items()]


ASSIGNMENTS = {
    "cache": Assignment("The cache itself", "3 to 5 hours", [
        *of("nanollm/attention.py", visible=(1, "visible"), probabilities=(2, "probabilities")),
        *of("nanollm/slots.py", write=(3, "Slots.write"), keep=(2, "Slots.keep"), drop=(2, "Slots.drop")),
        *of("nanollm/ranking.py", indices=(1, "indices")),
        *of("nanollm/slots.py", shrink=(3, "Slots.shrink")),
        *of("methods/baselines/h2o.py", score=(2, "H2O.score")),
    ], beside=["methods/baselines/random_eviction.py", "methods/baselines/streaming_llm.py"]),
    "tokens": Assignment("Which tokens", "3 to 5 hours", [
        *of("nanollm/window.py", window_scores=(1, "window_scores"), pool=(1, "max_pool")),
        *of("nanollm/ranking.py", top=(2, "top")),
        *of("methods/baselines/ada_kv.py", shares=(4, "shared")),
        *of("methods/critical_kv.py", norms=(2, "value_norms"), two_stage=(1, "two_stage"),
            critical=(3, "Critical.__call__")),
        *of("methods/theory/perturbation.py", theta=(1, "theta")),
    ]),
    "chunks": Assignment("Chunks", "2 to 3 hours", of(
        "methods/chunk_kv.py", grid=(1, "grid"), chunk_scores=(3, "chunk_scores"), ranking=(2, "ranking"),
        cut_to=(4, "cut_to"), fit=(3, "fit"), reuse=(2, "ChunkKV.compress"),
    )),
    "budget": Assignment("The budget cache and its theorem", "4 to 5 hours", [
        *of("methods/scissorhands.py", room=(3, "BudgetSlots.room"), observe=(4, "Scissorhands.observe")),
        *of("methods/theory/persistence.py", share=(2, "smallest_share"), draw=(2, "draw_power_law"),
            mass=(2, "tail_mass"), slips=(3, "proof_steps"), repaired=(2, "repaired_bound")),
    ]),
    "pairs": Assignment("Pairs", "3 to 4 hours", [
        *of("methods/tensor_attention.py", pairs=(1, "pairs"), dense=(1, "tensor_attention"),
            attention=(3, "FourCache.attention"), new=(2, "new_pairs"),
            factored=(5, "FactoredFourCache.one_query"), causal=(2, "pair_attention")),
        *of("methods/theory/index_game.py", alice=(1, "index_game_four"), play=(3, "play")),
    ]),
    "sketch": Assignment("The sketch", "3 to 4 hours", [
        *of("methods/kv_reviver.py", hash=(2, "Sketch.number"), slots=(1, "Sketch.bucket"),
            insert=(4, "Sketch.insert"), median=(2, "Sketch.median")),
        *of("methods/theory/sketch_error.py", variance=(2, "collision_variance"), load=(1, "load")),
        *of("methods/ours/kv_reviver_shrunk.py", means=(2, "MeanSketch.means"),
            shrink=(4, "ShrunkSketch.centred")),
    ]),
}
PROBLEMS = {f"{name}.{problem.name}": problem
            for name, each in ASSIGNMENTS.items() for problem in each.problems}


def assignment_of(problem: str) -> str:
    return problem.partition(".")[0]


def chosen(names: list[str] | None) -> list[str]:
    """Return the problems ("chunks.grid") that these names select, all if there are none.

    A name is an assignment's, or a problem's, alone ("grid") or behind its assignment's. Raise ValueError for any
    other.
    """
    known = {each: {each, *each.split(".")} for each in PROBLEMS}
    for name in names or []:
        if name not in set().union(*known.values()):
            like = [each for each in PROBLEMS if assignment_of(each) == assignment_of(name)] or ASSIGNMENTS
            raise ValueError(f"{name!r} is not an assignment or a problem; choose from {', '.join(like)}")
    return [each for each, its in known.items() if not names or its & {*names}]


def asked(file: str) -> list[str]:
    """Return the functions of a file that students write."""
    return [problem.function for problem in PROBLEMS.values() if problem.file == file]
