"""Window methods keep what loops written from papers and definitions keep, in many prompts."""

from functools import partial

from methods.baselines.ada_kv import AdaKV
from methods.baselines.pyramid_kv import PyramidKV
from methods.chunk_kv import Chunks
from methods.critical_kv import Critical, CriticalCode, PooledCritical
from methods.ours.chunk_kv_semantic import SemanticChunkKV, SemanticChunks
from windows import (
    AGAIN,
    GROUPED,
    OTHER_TURNS,
    PROMPTS,
    TIED,
    TURNS,
    Case,
    by_depth,
    by_head,
    check_walk,
    chunk_case,
    each_walk,
    in_two_stages,
)

pooled = partial(in_two_stages, pooled=True)
as_the_code = partial(pooled, epsilon=1e-4, of_means=True)
LOW_FLOOR = dict(floor=0.1)
ON_ADA = AdaKV, LOW_FLOOR, by_head
CASES = {
    "snap": Case(),
    "pyramid": Case(PyramidKV, dict(beta=20), deal=by_depth),
    "ada": Case(AdaKV, deal=by_head),
    "ada, floor 0": Case(AdaKV, dict(floor=0.0), deal=by_head),
    "critical": Case(select=Critical(), choose=in_two_stages),
    "critical, pooled": Case(select=PooledCritical(0.5), choose=pooled),
    "critical, code": Case(select=CriticalCode(), choose=as_the_code),
    "critical on pyramid": Case(PyramidKV, {}, Critical(), by_depth, in_two_stages),
    "critical on ada": Case(AdaKV, {}, Critical(), by_head, in_two_stages),
    "critical on low ada": Case(AdaKV, LOW_FLOOR, Critical(), by_head, in_two_stages),
    "code on ada": Case(AdaKV, dict(floor=0.0), CriticalCode(), by_head, as_the_code),
    "chunk": chunk_case(Chunks(5)),
    "chunk longer than the room": chunk_case(Chunks(30)),
    "chunk, whole": chunk_case(Chunks(5, fill=False)),
    "chunk, mean": chunk_case(Chunks(4, "mean")),
    "chunk, max": chunk_case(Chunks(2, "max")),
    "chunk on ada": chunk_case(Chunks(3), *ON_ADA),
    "chunk, whole on ada": chunk_case(Chunks(3, fill=False), *ON_ADA),
    "semantic": chunk_case(SemanticChunks(6), SemanticChunkKV),
    "semantic, cut": chunk_case(SemanticChunks(20, "sum", fill=True), SemanticChunkKV),
}
IN_ALL_SHAPES = (
    "snap",
    "critical on ada",
    "chunk",
    "chunk, whole",
    "semantic",
    "semantic, cut",
)


@each_walk(CASES, GROUPED, TIED, AGAIN, *TURNS)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


@each_walk(IN_ALL_SHAPES, *PROMPTS)
def test_slots_equal_the_loops_in_every_shape_of_prompt(case, prompt):
    check_walk(CASES[case], prompt)


@each_walk(IN_ALL_SHAPES[:2], *OTHER_TURNS)
def test_slots_equal_the_loops_over_turns_in_other_groups(case, prompt):
    check_walk(CASES[case], prompt)
