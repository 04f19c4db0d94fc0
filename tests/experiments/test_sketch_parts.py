"""KVReviver's sketch taken apart: each row is what the method itself gives, in the same bytes."""
from functools import partial

import pytest

from common import tasks
from experiments.sketch_parts import READINGS, measured, show
from methods.kv_reviver import KVReviver
from nanollm import TINY
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.evaluate import continuation, maker, reference, retrieve, text_windows


def test_each_row_is_what_the_method_gives():
    model, encoding = from_hf(TINY), tasks("test").encoding
    rows = measured(model, encoding, documents=2, length=160, keep_ratios=(0.25,))
    assert [row["reading"] for row in rows] == [*READINGS]
    full = reference(model, text_windows(tasks("test"), 2, 160), 32)
    batch = tasks("test").batch("needle", 0, 2, 160)
    for row, Method in ((rows[0], KVReviver), (rows[-1], partial(KVReviver, vague=0.0))):
        make = maker(model, Method, 0.25, slack=0)
        assert row["kl"][0] == pytest.approx(continuation(model, full, make)["kl"].mean().item(), rel=1e-3)
        assert row["needle"][0] == retrieve(model, batch, make)["agnostic"].mean()
    assert rows[-1]["change"] == (0, 0) and rows[0]["kl"][0] > rows[-1]["kl"][0]
    assert max(row["KiB"] for row in rows) < 1.1 * min(row["KiB"] for row in rows)
    assert show([dict(decoder="built") | row for row in rows]).count("\n") == 1 + len(READINGS)
