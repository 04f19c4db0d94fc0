"""Means, paired errors and shares are those of loops over the questions."""

from statistics import fmean, stdev

import pytest

from lab import question_table
from lab.question_table import frame_of, frame_of_rows, means, rows_of, shares, wide

SCORES = {
    "full": dict(a=[1, 1, 0.5], b=[1, 0], c=[0, 0.2]),
    "h2o": dict(a=[1, 0, 0.5], b=[0.5, 0], c=[1, 1]),
}
LINES = dict(a=[1, 4, 6], b=[2, 5], c=[3, 7])
FIRST = {line: line for lines in LINES.values() for line in lines}


def records(first=FIRST):
    """Return a record of each line; `first`: the first line of its context."""
    made = []
    for name, ratio in ("full", None), ("h2o", 0.25):
        for task, scores in SCORES[name].items():
            for line, score in zip(LINES[task], scores):
                record = dict(
                    setting="agnostic",
                    method=name,
                    keep_ratio=ratio,
                    task=task,
                    context=first[line],
                    line=line,
                    score=score,
                    surprise=2 * line,
                    kib=line,
                )
                made.append(record)
    return sorted(made, key=lambda record: -record["line"])


def over_tasks(values):
    """Return mean and standard error of {task: numbers}; tasks count alike."""
    means = []
    square = 0
    for x in values.values():
        means.append(fmean(x))
        square += stdev(x) ** 2 / len(x)
    return fmean(means), square**0.5 / len(means)


def test_means_are_over_tasks_and_errors_over_contexts():
    table = wide(frame_of(records()), "score")
    mean, error = means(table)
    for name, keep in ("full", 100), ("h2o", 25):
        expected = over_tasks(SCORES[name])
        assert (mean[name, keep], error[name, keep]) == pytest.approx(expected)


def test_questions_of_one_context_count_as_their_mean():
    table = wide(frame_of(records(FIRST | {4: 1})), "score").loc[["a"]]
    for key in table:
        x = SCORES[key[0]]["a"]
        expected = over_tasks(dict(a=[fmean(x[:2]), x[2]]))
        mean, error = means(table)
        assert (mean[key], error[key]) == pytest.approx(expected)
    # if each task has one context, the tasks are the sample
    one = dict(zip(FIRST, [1, 1, 1, 2, 2, 3, 3]))
    mean, error = means(wide(frame_of(records(one)), "score"))
    x = [*map(fmean, SCORES["h2o"].values())]
    assert (mean["h2o", 25], error["h2o", 25]) == pytest.approx(over_tasks({0: x}))
    # of a task with one context no error is known
    _, error = means(wide(frame_of(records(FIRST | {4: 1, 6: 1})), "score"))
    assert error.isna().all()


def test_shares_of_the_full_cache_are_paired_by_context():
    table = wide(frame_of(records()), "score")
    share, error = shares(table)
    full, h2o = SCORES.values()
    mean, _ = over_tasks(full)
    expected = over_tasks(h2o)[0] / mean
    rest = {}
    for task in full:
        pairs = zip(h2o[task], full[task])
        rest[task] = [x - expected * y for x, y in pairs]
    assert share["h2o", 25] == pytest.approx(expected)
    assert error["h2o", 25] == pytest.approx(over_tasks(rest)[1] / mean)
    assert share["full", 100] == 1
    assert error["full", 100] == 0


def test_stored_rows_give_the_frame_again():
    frame = frame_of(records())
    rows = rows_of(frame)
    assert len(rows) == 6
    assert question_table.show(frame_of_rows(rows)) == question_table.show(frame)


def test_a_task_that_the_full_cache_cannot_do_is_not_in_the_mean():
    text = question_table.show(frame_of(records()), "h2o")
    assert "The full cache answers less than half of c: with" in text
    full, h2o = ({task: mine[task] for task in "ab"} for mine in SCORES.values())
    pairs = {}
    for task in "ab":
        pairs[task] = [x - y for x, y in zip(h2o[task], full[task])]
    nats = {task: [2 * line for line in lines] for task, lines in LINES.items()}
    (line,) = [x for x in text.splitlines() if x.startswith("h2o") and "%" in x]
    for values in h2o, pairs, nats:
        assert "{:.2f} ±{:.2f}".format(*over_tasks(values)) in line
    assert line.split()[3] == f"{fmean(range(1, 8)):.0f}"  # KiB is the mean line
    assert f"{100 * over_tasks(h2o)[0] / over_tasks(full)[0]:.0f} ±" in text
