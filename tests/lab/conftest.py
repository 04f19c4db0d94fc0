"""Fixtures of several files: a small decoder, and the folder of a checkpoint."""

from common import checkpoint_of_two_layers, decoder
import pytest


@pytest.fixture(scope="module")
def model():
    size = dict(vocab_size=2048, max_len=512, n_layers=2, n_heads=4, n_kv_heads=2)
    return decoder(**size, d_model=32, d_ff=48)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of_two_layers(tmp_path_factory.mktemp("checkpoint"))
