"""N-grams, held against hand counts."""
import math
from types import SimpleNamespace

import numpy as np
import pytest

from nanollm.training.ngram import contexts, ngram_bits


def symbols(stream, n_vocab=3):
    """Tasks over a tiny alphabet, a byte a symbol."""
    encoding = SimpleNamespace(n_vocab=n_vocab, decode_bytes=lambda ids: b"x" * len(ids))
    return SimpleNamespace(stream=np.array(stream), bos=-1, encoding=encoding)


def test_n_grams_equal_hand_counts():
    training = symbols([0, 1, 0, 1, 0, 2])
    p0 = {0: (3 - .75) / 6 + .75 * 3 / 6 / 3, 1: (2 - .75) / 6 + .75 * 3 / 6 / 3}
    after_0 = (2 - .75) / 3 + .75 * 2 / 3 * p0[1]  # 0 is followed by 1 twice, by 2 once
    after_1 = (2 - .75) / 2 + .75 * 1 / 2 * p0[0]  # 1 is followed by 0 twice
    after_01 = (2 - .75) / 2 + .75 * 1 / 2 * after_1
    bits = ngram_bits(training, symbols([0, 1, 0]), 1, 3)
    assert bits["2-gram"] == pytest.approx(-math.log2(after_0 * after_1) / 2)
    assert bits["3-gram"] == bits["4-gram"] == pytest.approx(-math.log2(after_0 * after_01) / 2)
    after_10 = .25 / 2 + .75 * after_0  # and so is 1, 0 by 1 and by 2, once each; so is 0, 1, 0
    after_010 = .25 / 2 + .75 * after_10
    four = ngram_bits(training, symbols([0, 1, 0, 1]), 1, 4)["4-gram"]
    assert four == pytest.approx(-math.log2(after_0 * after_01 * after_010) / 3)
    unseen = ngram_bits(training, symbols([2, 1]), 1, 2)  # nothing follows 2 in training
    assert unseen == pytest.approx(dict.fromkeys(unseen, -math.log2(p0[1])))


def test_each_context_is_one_number():
    tokens = np.array([[1, 2, 0, 1, 2]])
    assert contexts(tokens, 0, 3).tolist() == [[0] * 5]
    assert contexts(tokens, 2, 3).tolist() == [[1 + 2 * 3, 2 + 0 * 3, 0 + 1 * 3]]
