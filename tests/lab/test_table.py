"""The tables: a row's numbers are means of what was measured, and sentences say what the rows say."""

import re

import pytest

from lab import table

SHARES = dict(
    needle_aware=0.11,
    needle_agnostic=0.22,
    pairs_aware=0.33,
    pairs_agnostic=0.44,
    few_shot_aware=0.55,
    few_shot_agnostic=0.75,
)


def measured(**more) -> dict:
    """What a benchmark of 3 texts may have measured: every number another."""
    return (
        SHARES
        | dict(
            needle_aware_se=0.9,
            perplexity=12.34,
            kl=0.567,
            l1_alone=[[6.0, 7.0], [8.0, 9.5]],
            live=3 * 1024 * 9,
            live_16=3 * 1024 * 50,
            allocated=3 * 1024 * 6,
            keeps_all=False,
            slots=40,
            prompt=100,
            each=dict(kl=[0.5, 0.6, 0.7]),
        )
        | more
    )


def test_a_row_holds_what_was_run_and_the_means_and_is_printed_in_order():
    row = table.row_of("h2o", 0.125, 300, dict(seed=4, documents=5), measured())
    expected = dict(
        method="h2o",
        keep_ratio=0.125,
        tokens=300,
        seed=4,
        live=9 * 1024,
        live_16=50 * 1024,
        allocated=6 * 1024,
    )
    assert {key: row[key] for key in expected} == expected
    assert row["aware"] == pytest.approx((0.11 + 0.33 + 0.55) / 3)
    assert row["agnostic"] == pytest.approx((0.22 + 0.44 + 0.75) / 3)
    first = ["h2o", "12.5", "%", "50", *map("{:.2f}".format, SHARES.values())]
    assert table.show(row, short=True).split() == [*first, "0.567"]
    assert table.show(row).split() == [*first, "12.34", "0.567", "7.62"]
    assert "L1" in table.header(row) and "L1" in table.terms()
    del row["l1_alone"]
    assert table.show(row).split() == [
        *first,
        "12.34",
        "0.567",
    ] and "L1" not in table.header(row)
    for more, told in (
        ({}, "(40 %)"),
        (dict(keeps_all=True), "all"),
        (dict(slots=100), "all"),
    ):
        # without a budget: what it kept
        assert table.budget(row | dict(keep_ratio=None) | more) == told


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(
    "tasks", [["needle", "pairs", "few_shot"], ["hops", "paraphrase"]]
)
def test_the_columns_are_the_tasks_of_the_row_and_stand_under_their_names(tasks, short):
    shares = {f"{task}_{setting}": 0.5 for task in tasks for setting in table.SETTINGS}
    others = {
        key: x
        for key, x in measured().items()
        if key not in SHARES and not key.endswith("_se")
    }
    row = table.row_of("h2o", 0.5, 300, dict(seed=4, documents=5), shares | others)
    assert table.tasks_of(row) == tasks
    head, *_, above, names = table.header(row, short).splitlines()
    assert "300 tokens" in head and "at most 0.25" in head  # ½ / √(5 − 1)
    line = table.show(row, short)
    assert len(names) == len(line)
    for task in tasks:
        end = above.index(task.replace("_", "-")) + len(task)
        assert line[:end].endswith("0.50") and names[:end].endswith("agnostic")


def rows(**methods) -> list[dict]:
    """Rows with these shares of needles, aware and agnostic, of the other tasks' answers, KL and bytes."""
    return [
        dict(
            method=name,
            kl=kl,
            live_16=live,
            needle_aware=aware,
            needle_agnostic=agnostic,
        )
        | dict.fromkeys([*SHARES][2:], others)
        for name, (aware, agnostic, others, kl, live) in methods.items()
    ]


def test_sentences_name_what_survived_and_what_it_cost():
    full, low = (1, 1, 0.9, 0, 1000), (0.9, 0.1, 0.9, 0.2, 100)
    aware, agnostic, cost = re.split(
        r"(?=Agnostic:|Cost:)",
        " ".join(
            table.findings(
                rows(
                    full=full,
                    a=low,
                    b=(0, 0.9, 0.9, 0.1, 300),
                    c=(0, 0.3, 0.8, 0.7, 550),
                )
            ).split()
        ),
    )
    assert "1 of 3 methods stays within 0.1" in aware and aware.endswith(": a. ")
    assert "1 of 3 methods" in agnostic and ": b." in agnostic
    for part in (
        "a holds the fewest bytes, 10 %",
        "b (KL 0.100)",
        "most with c (KL 0.700)",
    ):
        assert part in cost
    assert (
        table.findings(rows(a=low))
        == table.findings(rows(full=full))
        == table.findings([])
        == ""
    )


def test_a_task_that_the_full_cache_fails_judges_nothing():
    low = (1, 0.2, 0.1, 0.2, 100)
    told = rows(full=(0.2, 0.3, 0.8, 0, 1000), a=low)
    assert "0.20 of needle" in table.unfit(told)
    assert "none of 1 methods" in table.findings(told)  # by needles a is better
    told = rows(full=(0.2, 0.2, 0.2, 0, 1000), a=low)
    assert table.unfit(told).count("\n") == 2 and "methods" not in table.findings(told)
    assert (
        table.unfit(rows(full=(1, 1, 1, 0, 1000), a=low)) == table.unfit(told[1:]) == ""
    )
