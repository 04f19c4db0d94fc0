"""python -m nanollm: its rows, its table and figure, and that a mistake costs one line."""

from dataclasses import dataclass
import json
import os
from pathlib import Path

import pytest

from commands import refused
from common import tasks
from lab import comparison, loading, table
from lab.methods_by_name import Variant
from lab.plot import TITLE, comparison as drawn_comparison
from nanollm.__main__ import main
from nanollm.cache import Method

SMALL = ["--lengths", "288", "--documents", "2"]
FIGURE = f"({TITLE})".encode()


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path):
    made = tasks("test")

    def tasks_of(encoding, split, text):
        return made if text is None else type(made)(encoding, split, text)

    def draw(rows, file):
        file.write_bytes(FIGURE)

    monkeypatch.setattr(comparison, "Tasks", tasks_of)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # then no processes are forked
    monkeypatch.setattr("lab.plot.comparison", draw)
    monkeypatch.chdir(tmp_path)  # where compare.png would land


def arguments(checkpoint, options: str) -> list[str]:
    files = ["--model", str(checkpoint), "--json", "rows.json"]
    return [*files, *SMALL, *options.split()]


def compare(checkpoint, options: str) -> list[dict]:
    main(arguments(checkpoint, options))
    return stored()


def stored() -> list[dict]:
    return json.loads(Path("rows.json").read_text())


# ---- rows, table and figure ----


def test_a_row_for_every_length_method_and_budget(checkpoint, capsys):
    methods = "--methods full random streaming_llm --keep 50 12.5"
    rows = compare(checkpoint, f"{methods} --lengths 288 300 --figure new.png")
    expected = [("full", None)]
    for name in "random", "streaming_llm":
        expected += [(name, 0.5), (name, 0.125)]
    found = [(row["tokens"], row["method"], row["keep_ratio"]) for row in rows]
    assert found == [(T, *job) for T in (288, 300) for job in expected]
    for row in rows:
        assert len(row["each"]["needle_aware"]) == 2
    *_, least = rows[:5]
    assert least["slots"] == round(0.125 * least["prompt"])

    out = capsys.readouterr().out
    names = ("full", "random", "streaming_llm")
    lines = [line for line in out.splitlines() if line.startswith(names)]
    assert lines == [table.show(row) for row in rows]
    for first in rows[0], rows[5]:
        assert out.count(table.header(first)) == 1
    assert Path("new.png").read_bytes() == FIGURE


def test_the_short_table_is_what_no_options_ask_for(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(table, "SHOWN", ("full", "snap_kv", "full@2"))
    monkeypatch.setattr("lab.plot.comparison", drawn_comparison)
    options = ["--json", "rows.json", "--lengths", "288"]
    main(["--model", str(checkpoint), *options])
    rows = stored()
    out, error = capsys.readouterr()
    assert error == ""  # no progress bar, for this is no terminal
    found = [(row["method"], row["keep_ratio"]) for row in rows]
    assert found == [("full", None), ("snap_kv", 0.25), ("full@2", None)]
    assert Path("compare.png").stat().st_size > 5000
    assert "\n".join([table.show(row) for row in rows]) in out


def test_processes_measure_the_same_rows_in_the_same_order(checkpoint, monkeypatch):
    options = "--methods full random --keep 50 --lengths 288 300"
    rows = compare(checkpoint, options)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert compare(checkpoint, options) == rows


def test_options_change_the_rows_as_they_say(checkpoint, monkeypatch):
    drawn = []
    build = comparison.build

    def noted(*given):
        parts = build(*given)
        drawn.append(parts[0].batches["needle"].tokens.tolist())
        return parts

    monkeypatch.setattr(comparison, "build", noted)
    few, h2o, wide = compare(checkpoint, "--methods h2o@2 h2o ada_kv --keep 50")
    assert few["live_16"] < h2o["live_16"]
    assert few["each"]["kl"] != h2o["each"]["kl"]
    again, ada_kv = compare(checkpoint, "--methods h2o ada_kv --keep 50 --window 5")
    assert again["each"] == h2o["each"]
    assert ada_kv["window"] == 5
    assert ada_kv["each"]["kl"] != wide["each"]["kl"]
    (other,) = compare(checkpoint, "--methods h2o --keep 50 --seed 7")
    assert other["seed"] == 7
    assert drawn[0] == drawn[1] != drawn[2]
    assert other["each"]["nll"] == h2o["each"]["nll"]  # texts do not depend on the seed


# ---- methods of one's own ----


@dataclass
class Learned(Method):
    """Keeps everything; it finds out an option itself."""

    budget: int
    window_size: int = 4
    made = []
    asked = []

    def __post_init__(self):
        if self.budget < 5:
            raise ValueError(f"budget {self.budget} must be at least 5")
        self.made.append(self.window_size)

    @classmethod
    def calibrate(cls, model, tasks):
        cls.asked.append(tasks.split)
        return dict(window_size=2048)


@pytest.fixture
def learned(monkeypatch):
    """Put the method Learned in the place of all others."""
    own = dict(learned=Variant(Learned, {}))
    for file in "lab.contenders", "lab.methods_by_name":
        monkeypatch.setattr(f"{file}.pick", lambda names: own)
    monkeypatch.setattr(loading, "Tasks", lambda encoding, split: tasks(split))
    loading.training_tasks.cache_clear()
    Learned.made.clear()
    Learned.asked.clear()
    yield
    loading.training_tasks.cache_clear()


def test_a_method_is_asked_once_and_what_it_found_wins(checkpoint, learned):
    options = "--methods learned --keep 50 12.5 --lengths 288 300"
    compare(checkpoint, f"{options} --window 6")
    assert Learned.asked == ["train"]
    assert {*Learned.made} == {2048}
    Learned.made.clear()
    words = "--method learned --budget 7 --tokens 3 x".split()
    main(["generate", "--model", str(checkpoint), *words])
    assert Learned.made == [2048]
    assert Learned.asked == ["train"] * 2


def test_a_budget_that_is_too_small_is_told_before_any_row(checkpoint, learned, capsys):
    message = "learned at 2 % of 223 tokens: budget 4 must be at least 5"
    words = arguments(checkpoint, "--methods learned --keep 50 2")
    refused(capsys, words, message)
    assert not Path("rows.json").exists()
    main(arguments(checkpoint, "--all --keep 50 2"))  # the others go on
    assert [row["keep_ratio"] for row in stored()] == [0.5]
    assert f"left out: {message}" in capsys.readouterr().err


def test_what_cannot_be_learned_is_left_out(checkpoint, learned, monkeypatch, capsys):
    def calibrate(model, tasks):
        raise ValueError("this model has no room for two readings")

    monkeypatch.setattr(Learned, "calibrate", calibrate)
    message = "this model has no room for two readings"
    Path("text").write_text("A text. " * 20)
    model = ["--model", str(checkpoint)]
    for words in (
        ["--methods", "learned"],
        "generate --method learned --budget 7 x".split(),
        "compress --method learned --file text --out page.cache".split(),
    ):
        folder = f"for_{words[0]}"
        refused(capsys, [*words, *model, "--calibration", folder], message)
        assert Path(folder).is_dir()  # where it would be kept
    main(arguments(checkpoint, "--all"))
    assert f"left out: learned: {message}" in capsys.readouterr().err
    assert Learned.made == []


OWN = """from dataclasses import dataclass
from nanollm.cache import Method

@dataclass
class Own(Method):
    budget: int
    {body}

variants = dict({name}=Own)
"""


def test_a_row_that_fails_or_holds_too_much_is_told_and_leaves_the_others(
    checkpoint, only_h2o, capsys
):
    bodies = dict(
        hoarder="",
        late="def evict(self, layer): layer.keep(layer.k)",
        early="def __post_init__(self): 1 / 0",
    )
    for name, body in bodies.items():
        (only_h2o / f"{name}.py").write_text(OWN.format(name=name, body=body))
    methods = "--keep 50 --methods hoarder early late h2o"
    message = (
        "2 of 4 rows failed: early at 50 %: ZeroDivisionError, line 7 of early.py: .*; "
        "late at 50 %: slots to keep"
    )
    out = refused(capsys, arguments(checkpoint, methods), message)
    assert [row["method"] for row in stored()] == ["hoarder", "h2o"]
    lines = out[out.index("\nhoarder") :].splitlines()[1:]
    assert "holds 223 slots a head after a prompt, and its budget is 112" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["early", "late", "h2o"]
    assert "!" not in "".join(lines[2:])
    assert Path("compare.png").exists()


# ---- nothing is lost, nothing that is not ours is overwritten ----


@pytest.fixture
def measured(monkeypatch):
    """Return a list that grows with each measured row."""
    rows = []
    run = comparison.run

    def counted(*given):
        rows.append(1)
        return run(*given)

    monkeypatch.setattr(comparison, "run", counted)
    return rows


THREE = "--methods full random h2o --keep 50"


def test_rows_are_written_as_they_come_and_a_later_run_goes_on(
    checkpoint, monkeypatch, measured
):
    run = comparison.run

    def interrupted(*given):
        if len(measured) == 2:
            raise KeyboardInterrupt
        return run(*given)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(comparison, "run", interrupted)
        compare(checkpoint, THREE)
    before = stored()
    assert [row["method"] for row in before] == ["full", "random"]

    measured.clear()
    rows = compare(checkpoint, f"{THREE} --resume")
    assert rows[:2] == before
    assert rows[2]["method"] == "h2o"
    # none is lost
    one = "--methods h2o --keep 50"
    assert compare(checkpoint, f"{one} --resume") == rows
    assert len(measured) == 1
    # without --resume: anew
    assert len(compare(checkpoint, "--methods full")) == 1
    assert {path.name for path in Path().iterdir()} == {"rows.json", "compare.png"}


def test_rows_of_other_settings_are_not_gone_on_with(checkpoint, capsys, measured):
    compare(checkpoint, THREE)
    again = arguments(checkpoint, f"{THREE} --resume")
    message = "were measured with --dtype float32, not bfloat16"
    refused(capsys, [*again, "--dtype", "bfloat16"], message)
    rows = stored()
    del rows[0]["seed"]
    Path("rows.json").write_text(json.dumps(rows))
    refused(capsys, again, "were measured with --seed None, not 0")
    assert len(measured) == 3


def test_rows_that_another_run_wrote_in_between_stay(checkpoint, monkeypatch, capsys):
    run = comparison.run

    def meanwhile(*given):
        Path("rows.json").write_text("[7]")
        return run(*given)

    monkeypatch.setattr(comparison, "run", meanwhile)
    message = "rows.json was changed by another program"
    refused(capsys, arguments(checkpoint, "--methods full"), message)
    assert stored() == [7]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--json mine.json",
            "mine.json holds something else than the rows of an earlier",
        ),
        ("--figure photo.png", "photo.png holds something else than the figure of an"),
        ("--text zeros", "it contains zero bytes"),
        ("--json folder", "folder is no file"),
        ("--figure table.txt", "must end in .png"),
        ("--json nowhere/rows.json", "folder nowhere for rows.json does not exist"),
    ],
)
def test_files_are_looked_at_before_any_work(checkpoint, capsys, options, message):
    Path("folder").mkdir()
    rows = [dict(method="h2o", keep_ratio=0.5, each={}), dict(model_type="llama")]
    kept = {
        "mine.json": json.dumps(rows).encode(),
        "photo.png": b"\x89PNG, after Figure of python -m nanollm",
        "zeros": b"a\0b",
    }
    for name, data in kept.items():
        Path(name).write_bytes(data)
    words = ["--model", str(checkpoint), *SMALL, "--methods", "h2o", *options.split()]
    assert refused(capsys, words, message) == ""
    assert {path.name for path in Path().iterdir()} == {"folder", *kept}
    assert all(Path(name).read_bytes() == data for name, data in kept.items())


def test_a_text_may_come_from_a_pipe_and_rows_of_another_text_are_not_gone_on_with(
    checkpoint, capsys
):
    text = "A text of a few words.\r\n" * 99
    Path("text.txt").write_text(text)
    end, start = os.pipe()
    os.write(start, text.encode())
    os.close(start)
    (pipe,) = compare(checkpoint, f"--methods full --text /dev/fd/{end}")
    os.close(end)
    command = "--methods full --text text.txt"
    rows = compare(checkpoint, command)
    assert rows[0]["each"] == pipe["each"]
    Path("text.txt").write_text("A text of other words.\n" * 99)
    again = arguments(checkpoint, f"{command} --resume")
    refused(capsys, again, "were measured with --text")
    assert stored() == rows


# ---- mistakes ----


@pytest.mark.parametrize(
    "options, message",
    [
        ("--methods nope", "unknown method 'nope'; known are"),
        ("--methods snap_kv@9", "'9' is no number of bits"),
        ("--all --methods h2o", "leave out --all or"),
        ("--keep 101", "--keep is 101 %; it must be above 0 and at most 100"),
        ("--methods ada_kv --window 28 --keep 50 12.5", "ada_kv at 12.5 % .* 28"),
        ("--methods full --lengths 30", r"need \d+ tokens more"),
        ("--resume", "name it with --json"),
        ("--lengths 288 801", "801 tokens exceed the model's length of 800"),
        ("--seed -1", "seed -1 must be a whole number from 0"),
        ("--device foo", "device 'foo' is not available"),
        ("--model nowhere", "nowhere is no folder here"),
    ],
)
def test_a_mistake_is_one_line(checkpoint, capsys, options, message):
    words = ["--model", str(checkpoint), *SMALL, *options.split()]
    out = refused(capsys, words, message)
    assert "documents per task" not in out
