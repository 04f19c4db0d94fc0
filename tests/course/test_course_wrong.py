"""The course's tests accept right solutions and catch planted mistakes."""
from importlib import import_module

import pytest

from course.assignments import ASSIGNMENTS
from course.functions import emptied
from course.grader import cases, failure
from planted import ROOT, body, direct, planted


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_right_solutions_pass_and_wrong_ones_are_caught(name):
    """Hidden tests catch every mistake; public tests catch some of each problem, but not all mistakes.

    Every test refuses the function that students get.
    """
    run, wrong, only_hidden = direct(name), import_module(f"wrong.{name}").WRONG, []
    problems = {problem.name: problem for problem in ASSIGNMENTS[name].problems}
    assert {problem for problem, *_ in wrong} == problems.keys()
    for problem, each in problems.items():
        public, hidden = ([*cases(f"{name}.{problem}", file).values()] for file in ("public", "hidden"))
        assert public and hidden
        assert not any(failure(test, run) for test in public + hidden), problem
        source = (ROOT / each.file).read_text()
        right, empty = body(each, source), body(each, emptied(source, [each.function]))
        empty += "\n        super()" * ("super()" in right)  # never run; keeps the code's free variable
        with planted(each, right, empty):
            assert all("NotImplementedError" in str(failure(test, run)) for test in public + hidden), problem
        by_public = []
        for _, mistake, old, new in (x for x in wrong if x[0] == problem):
            with planted(each, old, new):
                by_public.append(any(failure(test, run) for test in public))
                assert any(failure(test, run) for test in hidden), (problem, mistake)
        assert any(by_public) and len(by_public) >= 3, problem
        only_hidden += [caught for caught in by_public if not caught]
    assert only_hidden
