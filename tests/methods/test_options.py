"""Options that make no sense are refused, in words that name them."""

import pytest

from lab.methods_by_name import pick

WRONG = [
    ("snap_kv", dict(budget=8, window_size=8), "budget 8 must exceed the window 8"),
    ("snap_kv", dict(budget=20, window_size=0), "window_size 0"),
    ("snap_kv", dict(budget=20, kernel_size=2), "kernel_size 2"),
    ("ada_kv", dict(budget=64, floor=1.5), "floor is 1.5"),
    ("pyramid_kv", dict(budget=64, beta=0), "beta is 0"),
    ("random", dict(budget=0), "budget 0 must be at least 1"),
    ("h2o", dict(budget=8, recent=1.5), "recent is"),
    ("h2o", dict(budget=1), "budget 1 must"),
    ("key_diff", dict(budget=0), "budget 0 must"),
    ("streaming_llm", dict(budget=4), "budget 4 must be at least 5: 4 sinks"),
    ("streaming_llm", dict(budget=8, sinks=-1), "sinks is -1"),
    ("kvzip", dict(budget=9, piece=0), "piece 0"),
    (
        "kvzip",
        dict(budget=12, recent=8, sinks=4),
        "budget 12 must be at least 13: 4 sinks and the newest 8",
    ),
    ("scissorhands", dict(budget=20, recent=-1), "recent is -1; it must be at least 0"),
    ("scissorhands", dict(budget=20, history=2**62), "history 4611.* to 1048576$"),
    (
        "scissorhands",
        dict(budget=17, recent=10, at_a_time=8),
        "budget 17 must be at least 18: the newest 10",
    ),
    ("kv_reviver", dict(budget=40, rows=2), "rows 2 must be 1 or 3"),
    ("kv_reviver", dict(budget=40, vague=0.5, recent=0.5), "their sum below 1"),
    ("kv_reviver", dict(budget=40, replace_rate=0.9), "replace_rate 0.9"),
]


@pytest.mark.parametrize("name, options, message", WRONG)
def test_bad_options_are_refused(name, options, message):
    kind = pick([name])[name].kind
    with pytest.raises(ValueError, match=message):
        kind(**options)
