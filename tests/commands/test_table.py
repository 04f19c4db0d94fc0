"""The tables: a row's numbers are means of what was measured, and sentences say what the rows say."""
import re

import pytest

from nanollm.commands import table

SHARES = dict(zip(table.ACCURACIES, (0.11, 0.22, 0.33, 0.44, 0.55, 0.75)))


def measured(**more) -> dict:
    """What a benchmark of 3 texts may have measured: every number another."""
    return SHARES | dict(
        perplexity=12.34, kl=0.567, l1_alone=[[6.0, 7.0], [8.0, 9.5]], live=3 * 1024 * 9,
        live_16=3 * 1024 * 50, allocated=3 * 1024 * 6, peak=3 * 1024 * 7, device=None, keeps_all=False,
        slots=40, prompt=100, tokens_per_s=4321.0, each=dict(kl=[0.5, 0.6, 0.7])) | more


def test_a_row_holds_what_was_run_and_the_means_and_is_printed_in_order():
    row = table.row_of("h2o", 0.125, 300, dict(seed=4), measured(device=3 * 1024 * 8))
    expected = dict(method="h2o", keep_ratio=0.125, tokens=300, seed=4, live=9 * 1024, live_16=50 * 1024,
                    allocated=6 * 1024, peak=7 * 1024, device=8 * 1024)
    assert {key: row[key] for key in expected} == expected
    assert row["aware"] == pytest.approx((0.11 + 0.33 + 0.55) / 3)
    assert row["agnostic"] == pytest.approx((0.22 + 0.44 + 0.75) / 3)
    first = ["h2o", "12.5", "%", "50", *map("{:.2f}".format, SHARES.values())]
    assert table.show(row, short=True).split() == [*first, "0.567"]
    assert table.show(row).split() == [*first, "12.34", "0.567", "7.62", "4321", "8"]
    for more, told in ({}, "(40 %)"), (dict(keeps_all=True), "all"), (dict(slots=100), "all"):
        assert table.budget(row | dict(keep_ratio=None) | more) == told  # without a budget: what it kept


def rows(**methods) -> list[dict]:
    """Rows with these shares of needles, aware and agnostic, of the other tasks' answers, KL and bytes."""
    return [dict(method=name, kl=kl, live_16=live, needle_aware=aware, needle_agnostic=agnostic)
            | dict.fromkeys(table.ACCURACIES[2:], others)
            for name, (aware, agnostic, others, kl, live) in methods.items()]


def test_sentences_name_what_survived_and_what_it_cost():
    full, low = (1, 1, 0.9, 0, 1000), (0.9, 0.1, 0.9, 0.2, 100)
    aware, agnostic, cost = re.split(r"(?=Agnostic:|Cost:)", " ".join(table.findings(rows(
        full=full, a=low, b=(0, 0.9, 0.9, 0.1, 300), c=(0, 0.3, 0.8, 0.7, 550))).split()))
    assert "1 of 3 methods stays within 0.1" in aware and aware.endswith(": a. ")
    assert "1 of 3 methods" in agnostic and ": b." in agnostic
    assert "c finds the most needles: 0.30" in agnostic
    for part in "a holds the fewest bytes, 10 %", "b (KL 0.100)", "most with c (KL 0.700)":
        assert part in cost
    assert table.findings(rows(a=low)) == table.findings(rows(full=full)) == table.findings([]) == ""


def test_a_task_that_the_full_cache_fails_judges_nothing():
    low = (1, 0.2, 0.1, 0.2, 100)
    told = rows(full=(0.2, 0.3, 0.8, 0, 1000), a=low)
    assert "0.20 of needle" in table.unfit(told)
    assert "none of 1 methods" in table.findings(told)  # by needles a is better
    told = rows(full=(0.2, 0.2, 0.2, 0, 1000), a=low)
    assert table.unfit(told).count("\n") == 2 and "methods" not in table.findings(told)
    assert table.unfit(rows(full=(1, 1, 1, 0, 1000), a=low)) == table.unfit(told[1:]) == ""


def test_an_addition_is_compared_with_the_row_without_it():
    def row(method, keep_ratio, tokens, shift, text):
        shares = {key: [0.25, 0.25 + shift * key.endswith("aware")] for key in table.ACCURACIES}
        each = shares | dict(kl=[text, 3 * text], nll=[4.0, 2 * text], l1_alone=[9.0, text])
        return dict(method=method, keep_ratio=keep_ratio, tokens=tokens, each=each)

    base = [row("full", None, 288, 0, 0.0), row("ada_kv", 0.25, 288, 0.5, 8.0),
            row("ada_kv", 0.5, 300, 0.5, 8.0), row("snap_kv+critical", 0.5, 288, 0.5, 8.0),
            row("ada_kv", 0.5, 288, 0, 1.0)]
    assert table.additions_table([]) == table.additions_table(base) == ""
    # aware: half of six differences are 0, the others 0.3, so ± 0.3 · √(1/4 / 5)
    lines = table.additions_table([*base, row("ada_kv+critical", 0.5, 288, 0.3, 2.0)]).splitlines()
    assert [line.split() for line in lines[7:]] == [cells.split() for cells in (
        "ada_kv 50 % 0.250 0.250 3.000 2.000 5.000",
        "ada_kv+critical 50 % +0.150 ±0.067 +0.000 ±0.000 +1.000 ±1.000 +2.000 ±1.000 +0.500 ±0.500")]
