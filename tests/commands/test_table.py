"""The tables: every number stands below its name, and sentences say what the rows say."""
import pytest

from nanollm.commands import table

TASKS = "needle", "recall", "few_shot"
SHARES = dict(zip(table.ACCURACIES, (0.11, 0.22, 0.33, 0.44, 0.55, 0.75)))


def measured(**more) -> dict:
    """What a benchmark of 3 documents may have measured: every number another."""
    return SHARES | {f"{key}_se": 0.9 for key in SHARES} | dict(
        perplexity=12.34, kl=0.567, l1=[[70.0, 80.0]], l1_alone=[[6.0, 7.0], [8.0, 9.5]],
        live=3 * 1024 * 9, live_16=3 * 1024 * 50, allocated=3 * 1024 * 6, peak=3 * 1024 * 7, device=None,
        keeps_all=False, slots=40, prompt=100, tokens_per_s=4321.0,
        each=dict(kl=[0.5, 0.6, 0.7])) | more


def test_a_row_holds_what_was_run_and_the_means():
    row = table.row_of("h2o", 0.125, 300, dict(seed=4), measured(device=3 * 1024 * 8))
    expected = dict(method="h2o", fraction=0.125, tokens=300, seed=4, live=9 * 1024, live_16=50 * 1024,
                    allocated=6 * 1024, peak=7 * 1024, device=8 * 1024)
    assert {key: row[key] for key in expected} == expected
    assert row["aware"] == pytest.approx((0.11 + 0.33 + 0.55) / 3)
    assert row["blind"] == pytest.approx((0.22 + 0.44 + 0.75) / 3)


@pytest.mark.parametrize("short, more", [
    (False, {"perpl.": "12.34", "KL": "0.567", "L1": "7.62", "tokens/s": "4321"}), (True, {"KL": "0.567"})])
def test_every_number_stands_below_its_name(short, more):
    row = table.row_of("h2o", 0.125, 300, dict(seed=4), measured())
    line, (_, first, _, tasks, names) = table.show(row, short), table.header(300, 5, 4, short).split("\n")
    assert first == ("5 documents per task, 300 tokens each; seed 4; "
                     "standard error of an accuracy: at most 0.25")

    # a number ends where its column's name ends; the columns of a task end where the task's name does
    cells = [("budget", "12.5 %"), ("KiB", "50")] + [
        (setting, f"{SHARES[f'{task}_{setting}']:.2f}") for task in TASKS for setting in ("aware", "blind")]
    end = 0
    for name, number in cells + [*more.items()]:
        end = names.index(name, end) + len(name)
        assert line[:end].endswith(f" {number}"), name
    assert line.startswith("h2o ") and len(line) == len(names) == end
    if not short:
        assert " 1.7e+05  " in table.show(row | dict(perplexity=170333.76))  # of a model that cannot read
        on_gpu = table.show(row | dict(device=90 * 1024)), table.header(300, 5, 4, gpu=True).split("\n")[-1]
        assert [*map(len, on_gpu)] == 2 * [end + 11] and on_gpu[0].endswith(" 90")
    for task in TASKS:
        end = tasks.index(task.replace("_", "-")) + len(task)
        assert names[:end].endswith("blind") and line[:end].endswith(f"{SHARES[f'{task}_blind']:.2f}")
    assert tasks.split() == ["16-bit", "needle", "recall", "few-shot", *["batch"] * (not short)]
    assert tasks.index("16-bit") + 6 == names.index("KiB") + 3
    other = table.show(row | dict(fraction=None, kl=-1e-9), short)
    assert other.split()[1:3] == ["(40", "%)"] and "-0.000" not in other  # what it kept, if it has no budget
    for kept in (dict(keeps_all=True), dict(slots=100), dict(slots=None)):
        assert table.budget(row | dict(fraction=None) | kept) == "all"
    terms = dict(line.split(maxsplit=1) for line in table.TERMS.splitlines())
    assert "question is part of the prompt" in terms["aware"] and "question comes after" in terms["blind"]
    assert "from the full cache's, in nats" in terms["KL"]


def rows(**methods):
    """Rows with these: needle aware and blind, mean aware and blind, KL, KiB. The other tasks are alike."""
    made = []
    for name, (*needle, aware, blind, kl, live) in methods.items():
        made.append(dict(method=name, kl=kl, live_16=live))
        for setting, first, mean in zip(("aware", "blind"), needle, (aware, blind)):
            shares = first, *[(len(TASKS) * mean - first) / (len(TASKS) - 1)] * (len(TASKS) - 1)
            made[-1] |= {f"{task}_{setting}": share for task, share in zip(TASKS, shares)}
    return made


def test_three_sentences_say_what_survived_and_what_it_cost():
    full, low = (1, 1, 0.98, 0.98, 0, 1000), (0.9, 0.1, 0.9, 0.4, 0.2, 100)
    def findings(**methods):
        return " ".join(table.findings(rows(**methods)).split())

    told = findings(full=full, a=low, b=(0, 0.8, 0.5, 0.88, 0.1, 300), c=(0, 0.3, 0.87, 0.8, 0.7, 550))
    assert told == (
        "Aware, 1 of 3 methods loses at most 0.1 of the full cache's accuracy, mean over the tasks: a. "
        "Blind, 1 of 3 methods loses no more: b; of the others c finds most needles, 0.30. "
        "Cost: a holds least, 10 % of a full 16-bit cache; "
        "predictions move least with b (KL 0.100) and most "
        "with c (0.700).")
    told = findings(full=full, a=low, b=(1, 0.2, 0.95, 0.5, 0.1, 300))
    assert "Aware, 2 of 2 methods lose at most" in told and ": a, b." in told
    assert "Blind, none of 2 methods loses no more; of the others b finds most needles, 0.20." in told
    told = findings(full=full, a=(*full[:4], -1e-9, 1000))
    assert " Blind, 1 of 1 methods loses no more: a. Cost" in told and "(KL 0.000)" in told
    assert findings(a=low) == findings(full=full) == findings() == ""


def test_a_task_that_the_full_cache_fails_judges_nothing():
    full, low = (0.2, 0.3, 0.8, 0.8, 0, 1000), (1, 0.2, 0.8, 0.1, 0.2, 100)
    told = rows(full=full, a=low)
    assert table.unfit(told) == "The full cache answers 0.20 of needle: this task cannot judge this model."
    assert table.findings(told).startswith("Aware, none of 1 methods loses at most 0.1")  # 0.70 against 1.10
    told = rows(full=(0.2, 0.2, 0.2, 0.2, 0, 1000), a=low)
    assert table.unfit(told).count("\n") == 2 and table.findings(told).startswith("Cost: a holds least")
    assert table.unfit(rows(full=(1, 1, 1, 1, 0, 1000), a=low)) == table.unfit(told[1:]) == ""


def test_an_addition_is_compared_with_the_row_without_it():
    def row(method, fraction, tokens, shift, text):
        shares = {f"{task}_{setting}": [0.25, 0.25 + shift * (setting == "aware")]
                  for task in TASKS for setting in ("aware", "blind")}
        each = shares | dict(kl=[text, 3 * text], nll=[4.0, 2 * text], l1_alone=[9.0, text])
        return dict(method=method, fraction=fraction, tokens=tokens, each=each)

    base = [row("full", None, 288, 0, 0.0), row("h2o", 0.5, 288, 0, 0.0), row("ada_kv", 0.25, 288, 0.5, 8.0),
            row("ada_kv", 0.5, 300, 0.5, 8.0), row("snap_kv+critical", 0.5, 288, 0.5, 8.0),
            row("ada_kv", 0.5, 288, 0, 1.0)]
    assert table.additions_table([]) == table.additions_table(base) == ""
    assert table.changes(row("h2o", 0.125, 288, 0, 0.0), []).split() == ["h2o", "12.5", "%"]

    # aware: half of six differences are 0, the others 0.3, so ± 0.3 · √(1/4 / 5)
    more = row("ada_kv+critical", 0.5, 288, 0.3, 2.0), row("ada_kv+critical+residual", 0.5, 288, 0.3, 1.0)
    lines = table.additions_table([*base, *more]).splitlines()
    assert lines[1].split() == ["changes", "by", "additions", "budget", "aware", "blind", "nll", "KL", "L1"]
    assert [line.split() for line in lines[2:]] == [cells.split() for cells in (
        "", "ada_kv 50 % 0.250 0.250 3.000 2.000 5.000",
        "ada_kv+critical 50 % +0.150 ±0.067 +0.000 ±0.000 +1.000 ±1.000 +2.000 ±1.000 +0.500 ±0.500",
        "", "ada_kv+critical 50 % 0.400 0.250 4.000 4.000 5.500",
        "ada_kv+critical+residual 50 % +0.000 ±0.000 +0.000 ±0.000 -1.000 ±1.000 -2.000 ±1.000 "
        "-0.500 ±0.500")]
