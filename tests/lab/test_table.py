"""A row's numbers are means of what was measured, and sentences say what the rows say."""

from lab import table

SHARES = dict(
    needle_aware=0.11,
    needle_agnostic=0.22,
    pairs_aware=0.33,
    pairs_agnostic=0.44,
    few_shot_aware=0.55,
    few_shot_agnostic=0.75,
)


def measured() -> dict:
    """What a benchmark of 3 texts may have measured: every number another."""
    return dict(
        **SHARES,
        **{f"{name}_se": x / 10 for name, x in SHARES.items()},
        kl=0.567,
        live=3 * 1024 * 9,
        live_16=3 * 1024 * 50,
        allocated=3 * 1024 * 6,
        slots=40,
        prompt=100,
        each=dict(kl=[0.5, 0.6, 0.7]),
    )


def test_a_row_holds_what_was_run_and_the_means_and_is_printed_in_order():
    row = table.row_of("h2o", 0.125, 300, dict(seed=4, documents=5), measured())
    expected = dict(method="h2o", keep_ratio=0.125, tokens=300, seed=4)
    assert row | expected == row
    assert row["live_16"] == 50 * 1024  # of one text
    cells = ["0.11±.01", "0.22±.02", "0.33±.03", "0.44±.04", "0.55±.06", "0.75±.07"]
    assert table.show(row).split() == ["h2o", "12.5", "%", "50", *cells, "0.567"]
    # without a budget: what it kept
    row["keep_ratio"] = None
    assert table.budget(row) == "(40 %)"
    assert table.budget(row | dict(slots=100)) == "all"


def rows(**methods) -> list[dict]:
    """Rows with these accuracies (needles aware and agnostic, other tasks), KL and bytes."""
    others = [*SHARES][2:]
    made = []
    for name, (aware, agnostic, other, kl, live) in methods.items():
        row = dict(method=name, kl=kl, live_16=live) | dict.fromkeys(others, other)
        made.append(row | dict(needle_aware=aware, needle_agnostic=agnostic))
    return made


def test_a_task_that_the_full_cache_fails_judges_nothing():
    low = (1, 0.2, 0.1, 0.2, 100)
    judged = rows(full=(0.2, 0.3, 0.8, 0, 1000), a=low)
    assert "0.20 of needle" in table.unfit(judged)
    judged = rows(full=(0.2, 0.2, 0.2, 0, 1000), a=low)
    assert table.unfit(judged).count("\n") == 2
    assert table.unfit(judged[1:]) == ""
    assert table.unfit(rows(full=(1, 1, 1, 0, 1000), a=low)) == ""
