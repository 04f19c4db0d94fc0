"""Chunks that end with some tokens of the vocabulary."""

import pytest
import torch

from methods.baselines.snap_kv import SnapKV
from methods.ours.chunk_kv_semantic import SemanticChunkKV, SemanticChunks, cut_at


def test_a_chunk_ends_where_it_must_or_after_the_longest_length():
    ends = torch.tensor([0, 1, 0, 0, 0, 0]).bool()
    assert cut_at(ends, 3).tolist() == [0, 0, 1, 1, 1, 2]
    assert not SemanticChunks().fill


@pytest.mark.parametrize("Method", [SnapKV, SemanticChunkKV])
def test_a_method_that_does_not_know_where_chunks_end_is_refused(Method):
    with pytest.raises(ValueError, match="semantic chunks need `ends`"):
        Method(budget=64, select=SemanticChunks())
