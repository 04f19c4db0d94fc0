"""The course's tests see what is wrong: right solutions pass, and planted wrong ones are caught."""
from importlib import import_module

import pytest

from course.assignments import ASSIGNMENTS
from planted import cases, caught, direct, planted

FOUND = {}  # (assignment, problem, what is wrong): caught by the public tests, by the hidden ones


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_right_solutions_pass(name):
    run = direct(name)
    for tests in (cases(name, "public"), cases(name, "hidden")):
        for problem, of_it in tests.items():
            assert of_it, f"{name}.{problem} has no test"
            for test, arguments in of_it:
                test(run, **arguments)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_wrong_solutions_are_caught(name):
    """At least four a problem; those that the hidden tests miss are named."""
    wrong, run = import_module(f"wrong.{name}").WRONG, direct(name)
    public, hidden = cases(name, "public"), cases(name, "hidden")
    assert wrong.keys() == public.keys()
    for problem in ASSIGNMENTS[name].problems:
        assert len(wrong[problem.name]) >= 4, problem.name
        for what, old, new in wrong[problem.name]:
            with planted(problem, old, new):
                found = [caught(tests[problem.name], run) for tests in (public, hidden)]
            FOUND[name, problem.name, what] = found


def test_the_share_that_is_caught(capsys):
    by_public, by_hidden = (sum(found) / len(found) for found in zip(*FOUND.values()))
    with capsys.disabled():
        print(f"\nof {len(FOUND)} wrong solutions the public tests catch {by_public:.0%}, "
              f"the hidden {by_hidden:.0%}")
    missed = [case for case, (_, hidden) in FOUND.items() if not hidden]
    assert by_hidden >= 0.95 and by_public >= 0.7, missed
