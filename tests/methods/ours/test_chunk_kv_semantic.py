"""Semantic chunks against loops: they end with some tokens of the vocabulary."""

import pytest
import torch

from methods.baselines.snap_kv import SnapKV
from methods.ours.chunk_kv_semantic import SemanticChunkKV, SemanticChunks, cut_at
from windows import (
    AGAIN,
    GROUPED,
    PROMPTS,
    TIED,
    TURNS,
    check_walk,
    chunk_case,
    each_walk,
)

CASES = {
    "semantic": chunk_case(SemanticChunks(6), SemanticChunkKV),
    "cut": chunk_case(SemanticChunks(20, "sum", fill=True), SemanticChunkKV),
}


@each_walk(CASES, GROUPED, TIED, AGAIN, *TURNS, *PROMPTS)
def test_slots_outputs_and_bytes_equal_the_loops(case, prompt):
    check_walk(CASES[case], prompt)


def test_a_chunk_ends_where_it_must_or_after_the_longest_length():
    ends = torch.tensor([0, 1, 0, 0, 0, 0]).bool()
    assert cut_at(ends, 3).tolist() == [0, 0, 1, 1, 1, 2]
    assert not SemanticChunks().fill


@pytest.mark.parametrize("Method", [SnapKV, SemanticChunkKV])
def test_a_method_that_does_not_know_where_chunks_end_is_refused(Method):
    with pytest.raises(ValueError, match="semantic chunks need `ends`"):
        Method(budget=64, select=SemanticChunks())
