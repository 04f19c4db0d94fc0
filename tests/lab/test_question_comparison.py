"""python -m nanollm --questions: records, figure, going on, a cluster, and one-line refusals."""

import csv
from functools import partial
import json
import os
from pathlib import Path
import signal
from threading import Timer

import pytest

from commands import refused
from lab import answering, question_comparison
from lab.plot import TITLE
from nanollm.__main__ import main

LINES = [
    dict(context=f"{i}. " + "The code of table is 4810. " * 9, question=question)
    | dict(answers=["4810"], task=f"code_{i}", max_new_tokens=3)
    for i in range(3)
    for question in ("The code of table is", "And")
]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # then no processes are forked
    monkeypatch.chdir(tmp_path)
    write(LINES)


def write(lines):
    Path("q.jsonl").write_text("\n".join(map(json.dumps, lines)))


def arguments(checkpoint, options=""):
    given = f"--questions q.jsonl --json r.json --csv r.csv --model {checkpoint}"
    return [*given.split(), *options.split()]


def test_each_question_has_a_record_and_the_same_command_the_same_ones(
    checkpoint, capsys
):
    options = "--methods h2o kvzip --keep 50 25 --settings agnostic aware"
    main(arguments(checkpoint, options))
    first = json.loads(Path("r.json").read_text())
    assert len(first["records"]) == 5 * 2 * len(LINES)  # the full cache, too
    rows = [*csv.DictReader(Path("r.csv").open())]
    assert len(rows) == len(first["records"])
    assert {row["keep"] for row in rows} == {"100.0", "50.0", "25.0"}
    assert f"Title\0{TITLE}".encode() in Path("compare.png").read_bytes()
    out = capsys.readouterr().out
    assert "6 questions on 3 contexts" in out
    assert "agnostic: " in out and "aware: " in out
    main(arguments(checkpoint, options))
    assert json.loads(Path("r.json").read_text()) == first


def test_a_method_that_evicts_early_has_rows_of_its_own(checkpoint, monkeypatch):
    short = partial(answering.prefill_evicting, piece=16)
    monkeypatch.setattr(answering, "prefill_evicting", short)
    main(arguments(checkpoint, "--methods snap_kv --keep 25 --evict-early"))
    records = json.loads(Path("r.json").read_text())["records"]
    found = {x["method"]: x["surprise"] for x in records}
    assert found["snap_kv_early"] != found["snap_kv"]


def test_a_run_goes_on_with_what_its_file_lacks(checkpoint, capsys, monkeypatch):
    main(arguments(checkpoint, "--methods h2o --keep 50"))
    before = capsys.readouterr().out
    measure = question_comparison.answered
    asked = []

    def note(model, encoder, questions, jobs):
        asked.append((questions[0].line, [job.method for job in jobs["agnostic"]]))
        return measure(model, encoder, questions, jobs)

    monkeypatch.setattr(question_comparison, "answered", note)
    main(arguments(checkpoint, "--methods h2o --keep 50 --resume"))
    table = lambda out: out[out.index("agnostic") : out.index(" rows in")]
    assert table(capsys.readouterr().out) == table(before)
    assert asked == []
    file = json.loads(Path("r.json").read_text())
    file["records"] = [x for x in file["records"] if x["line"] != 4]
    Path("r.json").write_text(json.dumps(file))
    main(arguments(checkpoint, "--methods h2o --keep 50 --resume"))
    assert asked.pop() == (3, ["full", "h2o"])
    main(arguments(checkpoint, "--methods h2o key_diff --keep 50 --resume"))
    assert asked == [(1, ["key_diff"]), (3, ["key_diff"]), (5, ["key_diff"])]
    words = arguments(checkpoint, "--methods h2o --resume")
    refused(capsys, [*words, "--window", "9"], "with window 8, not 9")
    write(LINES[:4])
    refused(capsys, words, "measured with questions q.jsonl, crc32")


@pytest.mark.parametrize(
    "options, message",
    [
        ("--lengths 64", "--lengths is of the tasks"),
        (
            "--methods h2o --against key_diff",
            "--against key_diff is not among the methods",
        ),
        ("--keep 0", "--keep is 0"),
        ("--seed 3", "--seed is of the tasks"),
        ("--keep 0.1 --methods h2o", "h2o at 0.1 % of .* tokens: budget 0"),
        ("--methods h2o --json q.jsonl", "holds something else than the records"),
        ("--methods h2o --csv q.jsonl", "holds something else than the records"),
        ("--scheduler tcp://127.0.0.1:9", "no Dask scheduler|needs Dask"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(checkpoint, capsys, options, message):
    refused(capsys, arguments(checkpoint, options), message)


def test_a_line_that_the_model_cannot_read_is_named(checkpoint, capsys):
    write([LINES[0], LINES[0] | dict(context="long " * 600)])
    message = r"q.jsonl, line 2: .* the model reads 800; shorten it"
    refused(capsys, arguments(checkpoint, "--methods h2o"), message)


def test_options_of_questions_need_a_file(capsys):
    for option in "--csv x.csv", "--against h2o", "--settings aware":
        refused(capsys, option.split(), "need --questions FILE")


@pytest.mark.slow
def test_two_workers_of_a_cluster_give_the_same_table_though_one_is_lost(
    checkpoint, capsys, monkeypatch
):
    distributed = pytest.importorskip("distributed")
    options = "--methods h2o kvzip --keep 50"
    main(arguments(checkpoint, options))
    alone = json.loads(Path("r.json").read_text())
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address="") as two:
        here = Path.cwd()
        monkeypatch.chdir(Path(__file__).parents[2])
        files = [f"{here}/{name}" for name in ("q.jsonl", "r.json", "r.csv", "c.png")]
        given = f"--questions {files[0]} --json {files[1]} --csv {files[2]}"
        given += f" --figure {files[3]} --model {checkpoint} {options}"
        pids = iter([worker.pid for worker in two.workers.values()])
        Timer(3, os.kill, (next(pids), signal.SIGKILL)).start()
        main([*given.split(), "--scheduler", two.scheduler_address])
    monkeypatch.chdir(here)
    assert json.loads(Path("r.json").read_text()) == alone
