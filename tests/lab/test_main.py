"""The command line: what it prints and writes, and that a mistake costs one line and exit code 2."""

from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from common import ENCODING, checkpoint_of_two_layers, tasks
from lab import compare as compare_command, table
from lab.generate import MARK
from lab.hard_tasks import HARD
from lab.plot import TITLE, comparison
from nanollm import TINY
from nanollm.__main__ import main
from nanollm.cache import LayerCache
from nanollm.checkpoint import from_hf
from nanollm.generate import generate

ROOT = Path(__file__).parents[2]
SHARES = [
    f"{task}_{setting}"
    for task in ("needle", "pairs", "few_shot")
    for setting in table.SETTINGS
]
SMALL = ["--lengths", "288", "--documents", "4"]
FIGURE = f"({TITLE})".encode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of_two_layers(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path):
    made = tasks("test")
    monkeypatch.setattr(
        "lab.hard_tasks.HardTasks",
        lambda encoding, split, text: (
            made if text is None else type(made)(encoding, split, text)
        ),
    )
    # then a comparison forks no processes
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(
        "lab.plot.comparison", lambda rows, file: file.write_bytes(FIGURE)
    )
    monkeypatch.chdir(tmp_path)  # where compare.png would land


def compare(checkpoint, options: str) -> list[dict]:
    main(["--model", str(checkpoint), "--json", "rows.json", *SMALL, *options.split()])
    return json.loads(Path("rows.json").read_text())


def refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, error = capsys.readouterr()
    error = error.splitlines()[-1]
    assert (
        stop.value.code == 2
        and error.startswith("error: ")
        and re.search(message, error)
    ), error
    return out


# ---- compare: rows, table and figure ---


def test_a_row_for_every_length_method_and_budget(checkpoint, capsys):
    rows = compare(
        checkpoint,
        "--methods full random streaming_llm --keep 50 12.5 --lengths 288 300 "
        "--l1 --figure new.png",
    )
    expected = [("full", None)] + [
        (name, share) for name in ("random", "streaming_llm") for share in (0.5, 0.125)
    ]
    assert [(row["tokens"], row["method"], row["keep_ratio"]) for row in rows] == [
        (T, *job) for T in (288, 300) for job in expected
    ]
    for row in rows:
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))
        assert np.shape(row["l1_alone"]) == (2, 4) and table.KEYS <= row.keys()
        assert {key: len(x) for key, x in row["each"].items()} == (
            dict.fromkeys(SHARES, 4) | dict(kl=2, nll=2, l1_alone=2)
        )
        assert row["perplexity"] == pytest.approx(math.exp(np.mean(row["each"]["nll"])))
        for key in row["each"].keys() - {"nll"}:
            assert np.mean(row[key]) == pytest.approx(
                np.mean(row["each"][key]), abs=1e-6
            ), key

    # layers, heads, k and v of 8 floats, a position
    slot, cut = 2 * 2 * (2 * 8 * 4 + 4), 288 - 64 - 1
    full, *_, most, least = rows[:5]
    assert (full["live"], full["live_16"]) == (
        slot * 287,
        2 * 2 * (2 * 8 * 2 + 4) * 287,
    )
    assert abs(full["kl"]) < 1e-6
    for row in most, least:
        sinks = 2 * 2 * 4 * 8 * 4  # StreamingLLM's, as stored
        assert (
            row["live"] == round(row["keep_ratio"] * cut) * slot + sinks
            and row["kl"] > 0.01
        )

    out, names = capsys.readouterr().out, ("full", "random", "streaming_llm")
    assert [line for line in out.splitlines() if line.startswith(names)] == [
        *map(table.show, rows)
    ]
    assert out.count(table.header(rows[0])) == out.count(table.header(rows[5])) == 1
    # two of them, layers, heads, tokens, numbers, bytes
    keys_and_values = 2 * 2 * 2 * 288 * 8 * 2
    assert f"full cache of 288 tokens {keys_and_values / 2**20:.1f} MiB" in out
    assert Path("new.png").read_bytes() == FIGURE


def test_the_short_table_is_what_no_options_ask_for(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(table, "SHOWN", ("full", "snap_kv", "quantized_2"))
    monkeypatch.setattr("lab.plot.comparison", comparison)
    main(["--model", str(checkpoint), "--json", "rows.json", "--lengths", "288"])
    rows, (out, error) = json.loads(Path("rows.json").read_text()), capsys.readouterr()
    assert error == ""  # no progress bar, for this is no terminal
    assert [(row["method"], row["keep_ratio"]) for row in rows] == [
        ("full", None),
        ("snap_kv", 0.25),
        ("quantized_2", None),
    ]
    assert (
        len(rows[0]["each"]["needle_aware"]) == 4
        and Path("compare.png").stat().st_size > 5000
    )
    printed = [
        table.header(rows[0], short=True),
        *(table.show(row, short=True) for row in rows),
    ]
    assert "\n".join(printed) in out and table.findings(rows) in out


def test_processes_measure_the_same_rows_in_the_same_order(checkpoint, monkeypatch):
    options = "--methods full random h2o --keep 50 --lengths 288 300 --documents 2"
    rows = compare(checkpoint, options)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert compare(checkpoint, options) == rows


def test_hard_tasks_have_a_column_each(checkpoint, capsys):
    (row,) = compare(
        checkpoint, "--tasks hard --methods full --documents 2 --lengths 512"
    )
    assert table.tasks_of(row) == [*HARD] and row["tasks"] == "hard"
    assert row["aware"] == pytest.approx(
        np.mean([row[f"{task}_aware"] for task in HARD])
    )
    assert all(len(row["each"][f"{task}_agnostic"]) == 2 for task in HARD)
    assert table.show(row) in capsys.readouterr().out


def test_options_change_the_rows_as_they_say(checkpoint):
    methods = "--methods h2o ada_kv ada_kv+critical --keep 50 --documents 2"
    rows = compare(checkpoint, methods)
    h2o, *others = compare(checkpoint, f"{methods} --window 5")
    assert h2o["each"] == rows[0]["each"] and {row["window"] for row in others} == {5}
    assert all(
        row["each"]["kl"] != before["each"]["kl"]
        for row, before in zip(others, rows[1:])
    )
    (other,) = compare(checkpoint, "--methods h2o --keep 50 --documents 2 --seed 7")
    assert other["seed"] == 7 and len(other["each"]["needle_aware"]) == 2
    assert other["each"]["nll"] == h2o["each"]["nll"]  # texts do not depend on the seed


@dataclass(eq=False)
class Learned(LayerCache):
    """Keeps everything; it finds out an option itself."""

    budget: int
    window_size: int = 4
    made, asked = [], []

    def __post_init__(self):
        super().__post_init__()
        if self.budget < 5:
            raise ValueError(f"budget {self.budget} must be at least 5")
        self.made.append(self.window_size)

    @classmethod
    def calibrate(cls, model, tasks):
        cls.asked.append(tasks.split)
        return dict(window_size=2048)


def test_a_method_is_asked_once_and_what_it_found_wins(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("lab.registry.pick", lambda names: dict(learned=Learned))
    monkeypatch.setattr("lab.registry.Tasks", lambda encoding, split: tasks(split))
    compare(
        checkpoint,
        "--methods learned --keep 50 --documents 2 --window 6 --lengths 288 300",
    )
    assert Learned.asked == ["train"]
    # four: two layers, two lengths
    assert {*Learned.made[:4]} == {6} and {*Learned.made[4:]} == {2048}
    Learned.made.clear()
    main(
        [
            "generate",
            "--model",
            str(checkpoint),
            *"--method learned --budget 7 --tokens 3 x".split(),
        ]
    )
    assert Learned.made == [2048] * 2
    Learned.asked.clear()
    refused(
        capsys,
        ["--model", str(checkpoint), *SMALL, *"--methods learned --keep 50 2".split()],
        "learned at 2 % of 223 tokens: budget 4 must be at least 5",
    )
    assert Learned.asked == []  # a mistake is found before


OWN = """from dataclasses import dataclass
from nanollm.cache import LayerCache

@dataclass(eq=False)
class Own(LayerCache):
    budget: int
    {body}

variants = dict({name}=Own)
"""


def test_a_row_that_fails_or_holds_too_much_is_told_and_leaves_the_others(
    checkpoint, only_h2o, capsys
):
    for name, body in dict(
        hoarder="",
        late="def evict(self): self.keep(self.k)",
        early="def __post_init__(self): 1 / 0",
    ).items():
        (only_h2o / f"{name}.py").write_text(OWN.format(name=name, body=body))
    arguments = [
        "--model",
        str(checkpoint),
        "--json",
        "rows.json",
        *SMALL,
        "--keep",
        "50",
        "--methods",
    ]
    out = refused(
        capsys,
        [*arguments, "hoarder", "early", "late", "h2o"],
        "2 of 4 rows failed: early at 50 %: ZeroDivisionError, line 7 of early.py: .*; "
        "late at 50 %: slots to keep",
    )
    assert [row["method"] for row in json.loads(Path("rows.json").read_text())] == [
        "hoarder",
        "h2o",
    ]
    lines = out[out.index("\nhoarder") :].splitlines()[1:]
    assert "holds 223 slots a head after a prompt, and its budget is 112" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["early", "late", "h2o"]
    assert "!" not in "".join(lines[2:]) and Path("compare.png").exists()


# ---- nothing is lost, nothing that is not ours is overwritten ---


def test_rows_are_written_as_they_come_and_a_later_run_goes_on(
    checkpoint, monkeypatch, capsys
):
    run, measured = compare_command.Comparison.result, []

    def interrupted(self, job):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(1)
        return run(self, job)

    three = "--methods full random h2o --keep 50 --documents 2"
    monkeypatch.setattr(compare_command.Comparison, "result", interrupted)
    with pytest.raises(SystemExit):
        compare(checkpoint, three)
    before = json.loads(Path("rows.json").read_text())
    assert [row["method"] for row in before] == ["full", "random"]

    measured.clear()
    rows = compare(checkpoint, f"{three} --resume")
    assert rows[:2] == before and rows[2]["method"] == "h2o" and len(measured) == 1
    # none is lost
    assert compare(checkpoint, "--methods h2o --keep 50 --documents 2 --resume") == rows
    assert len(measured) == 1
    arguments = [
        "--model",
        str(checkpoint),
        "--json",
        "rows.json",
        *SMALL,
        *three.split(),
        "--resume",
    ]
    refused(
        capsys,
        [*arguments, "--dtype", "bfloat16"],
        "were measured with --dtype float32, not bfloat16",
    )
    broken = {key: x for key, x in rows[1].items() if key != "live_16"}
    Path("rows.json").write_text(json.dumps([rows[0], broken, rows[2]]))
    refused(capsys, arguments, "has no 'live_16'")
    Path("rows.json").write_text(json.dumps(rows))
    measured.clear()
    # without --resume: anew
    (row,) = compare(checkpoint, "--methods full --documents 2 --seed 1")
    assert row["seed"] == 1 and {path.name for path in Path().iterdir()} == {
        "rows.json",
        "compare.png",
    }


def test_rows_that_another_run_wrote_in_between_stay(checkpoint, monkeypatch, capsys):
    run = compare_command.Comparison.result
    monkeypatch.setattr(
        compare_command.Comparison,
        "result",
        lambda *of: Path("rows.json").write_text("[7]") and run(*of),
    )
    refused(
        capsys,
        [
            "--model",
            str(checkpoint),
            *SMALL,
            "--methods",
            "full",
            "--json",
            "rows.json",
        ],
        "rows.json was changed by another program",
    )
    assert Path("rows.json").read_text() == "[7]"


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--json mine.json",
            "mine.json holds something else than the rows of an earlier run; name another file",
        ),
        (
            "--figure photo.png",
            "photo.png holds something else than the figure of an earlier run",
        ),
        ("--text zeros", "it contains zero bytes"),
        ("--json folder", "folder is no file"),
        ("--figure table.txt", "must end in .png"),
        (
            "--json folder/../x.png --figure x.png",
            "rows and figure both go to folder/../x.png",
        ),
        ("--json nowhere/rows.json", "folder nowhere for rows.json does not exist"),
    ],
)
def test_files_are_looked_at_before_any_work(checkpoint, capsys, options, message):
    Path("folder").mkdir()
    kept = {
        "mine.json": b'[{"method": "h2o", "keep_ratio": 0.5, "each": {}}, {"model_type": "llama"}]',
        "photo.png": b"\x89PNG, after Figure of python -m nanollm",
        "zeros": b"a\0b",
    }
    for name, data in kept.items():
        Path(name).write_bytes(data)
    arguments = [
        "--model",
        str(checkpoint),
        *SMALL,
        "--methods",
        "h2o",
        *options.split(),
    ]
    assert refused(capsys, arguments, message) == ""
    assert {path.name for path in Path().iterdir()} == {"folder", *kept}
    assert all(Path(name).read_bytes() == data for name, data in kept.items())


def test_a_text_may_come_from_a_pipe_and_rows_of_another_text_are_not_gone_on_with(
    checkpoint, capsys
):
    Path("text.txt").write_text("A text of a few words.\r\n" * 99)
    os.mkfifo("pipe")
    writer = threading.Thread(
        target=lambda: Path("pipe").write_bytes(Path("text.txt").read_bytes())
    )
    writer.start()
    (pipe,) = compare(checkpoint, "--methods full --documents 2 --text pipe")
    writer.join()
    command = "--methods full --documents 2 --text text.txt"
    (row,) = rows = compare(checkpoint, command)
    assert (
        row["text"].split()[1:] == pipe["text"].split()[1:]
        and row["each"] == pipe["each"]
    )
    assert compare(checkpoint, f"{command} --resume") == rows
    Path("text.txt").write_text("A text of other words.\n" * 99)
    refused(
        capsys,
        [
            "--model",
            str(checkpoint),
            "--json",
            "rows.json",
            *SMALL,
            *command.split(),
            "--resume",
        ],
        "were measured with --text",
    )
    assert json.loads(Path("rows.json").read_text()) == rows


# ---- a fresh process ---


def in_shell(command: str, *python: str):
    """Run a line of bash, in which "$@" is Python; as Python buffers what it prints by itself."""
    line = [
        "bash",
        "-c",
        f"set -o pipefail; unset PYTHONUNBUFFERED; {command}",
        "-",
        sys.executable,
        *python,
    ]
    return subprocess.run(line, cwd=ROOT, timeout=300, capture_output=True, text=True)


@pytest.mark.parametrize(
    "end, flush", [("| true", ""), ("> /dev/full", ", flush=True")]
)
def test_output_that_cannot_be_written_is_one_line(end, flush):
    done = in_shell(
        f'"$@" {end}',
        "-c",
        "import time; from lab import command_line; time.sleep(0.3)\n"
        f"command_line.command(lambda: print('a text'{flush}))",
    )
    assert done.returncode == 2, done.stderr
    assert re.fullmatch("error: (nobody reads|.*No space left).*\n", done.stderr), (
        done.stderr
    )


@pytest.mark.parametrize(
    "argument, code", [("--help", 0), ("nope", 2), ("--keep=0", 2)]
)
def test_help_and_mistakes_are_answered_before_torch_is_loaded(argument, code):
    done = in_shell('"$@"', "-X", "importtime", "-m", "nanollm", argument)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (
        done.returncode == code
        and "lab.command_line" in loaded
        and not loaded & {"torch", "numpy"}
    )


# ---- generate ---


def test_generate_continues_a_text_as_it_is_told(checkpoint, capsys):
    prompt = "The import system é"
    Path("text.txt").write_text(prompt, encoding="utf8")
    sampling = dict(temperature=2.0, top_k=40, seed=3)
    for source, told in (
        (["--file", "text.txt"], {}),
        (["--temperature", "2", prompt], dict(temperature=2.0)),
        ([*"--temperature 2 --top-k 40 --seed 3".split(), prompt], sampling),
    ):
        main(["generate", "--model", str(checkpoint), "--tokens", "12", *source])
        text, tail = capsys.readouterr().out.split("\n\n[")
        new = generate(
            from_hf(checkpoint), torch.tensor([ENCODING.encode(prompt)]), 12, **told
        )
        assert text == f"{prompt}{MARK}" + ENCODING.decode(new[0].tolist())
        assert tail.startswith(f"{len(ENCODING.encode(prompt)) + 11} tokens seen; ")


def test_generate_compresses_and_tells_what_the_cache_holds(checkpoint, capsys):
    def written(options):
        arguments = f"--method {options} --tokens 9".split()
        main(
            ["generate", "--model", str(checkpoint), *arguments, "A longer prompt " * 9]
        )
        return capsys.readouterr().out

    live = 2 * 2 * 6 * (2 * 8 * 4 + 8) / 1024
    assert (
        f"a head of layer 0 keeps at most 6; the cache holds {live:.0f} KiB"
        in written("h2o --budget 6")
    )
    # it hears of chunks
    assert "a head of layer 0 keeps" in written("chunk_kv_semantic --budget 12")
    full = written("full").partition(MARK)[2].partition("\n\n[")[0]
    own, _, tail = written("quantized_2").partition(MARK)[2].partition("\n\n[")
    assert "[the full cache writes the same]" in tail if own == full else full in tail


def test_a_text_begins_with_bos_if_the_checkpoint_s_texts_do(capsys):
    shutil.copytree(TINY, "begun")
    config = json.loads(Path("begun/config.json").read_text()) | dict(bos_token_id=2047)
    Path("begun/config.json").write_text(json.dumps(config))
    main(["generate", "--model", "begun", "--tokens", "5", "The import system"])
    tokens = torch.tensor([[2047, *ENCODING.encode("The import system")]])
    written = ENCODING.decode(generate(from_hf(TINY), tokens, 5)[0].tolist())
    assert capsys.readouterr().out.startswith(f"The import system{MARK}{written}\n\n")


def test_the_page_is_answered_aware_and_not_agnostic(capsys):
    main(["generate", "--figure", "page.png"])
    out = capsys.readouterr().out
    answers = re.findall(
        r"Right answer: (\d+); the full cache answers (\d+), snap_kv answers (\d+)\n",
        out,
    )
    assert len(answers) == 2 and answers[0] == ("2356",) * 3
    assert answers[1][:2] == ("2356",) * 2 and answers[1][2] != "2356"
    texts = re.findall(r"(?:aware|agnostic): .*?\n\n(.*?)\n\n\d+ of", out, re.S)
    left = [re.sub(r"\[.*?\]", "", text, flags=re.S) for text in texts]
    assert "The code of table is 2356" in left[0]
    assert "The code of table is" not in left[1].partition("\nQ:")[0]
    assert Path("page.png").stat().st_size > 5000


# ---- mistakes ---


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--methods nope", "unknown method 'nope'; known are"),
        ("--all --methods h2o", "leave out --all or"),
        ("--keep nan", "--keep is nan %"),
        ("--keep 101", "--keep is 101 %; it must be above 0 and at most 100"),
        (
            "--methods ada_kv+critical --window 28 --keep 50 12.5",
            "critical at 12.5 % .* 28",
        ),
        ("--documents 1", "documents 1 must be a whole number of at least 2"),
        ("--methods full --lengths 30", r"need \d+ tokens more"),
        ("--resume", "name it with --json"),
        ("--lengths 288 801", "801 tokens exceed the model's length of 800"),
        ("--seed -1", "seed -1 must be a whole number from 0"),
        ("generate --seed -1 x", "seed -1 must"),
        ("--threads -1", "threads -1 must be a whole number"),
        ("--device foo", "device 'foo' is not available"),
        ("generate --method nope x", "unknown method 'nope'; known are"),
        (
            "generate --method h2o x",
            "h2o needs --budget: how many entries each key/value head may keep",
        ),
        (
            "generate --method quantized_2 --budget 5 x",
            "quantized_2 has no budget; leave --budget out",
        ),
        ("generate --file text.txt x", "give the text or --file text.txt, not both"),
        ("generate --file text.txt", "No such file"),
        ("generate --device cuda x", "'cuda' is not available"),
        ("generate --figure x.png x", "--figure draws the built-in page"),
        ("generate --figure x.txt", "must end in .png"),
        ("generate --tokens 800 x", "800 new ones exceed"),
        ("nope", "unknown command 'nope'; known are ask, claims, compare"),
    ],
)
def test_a_mistake_is_one_line(checkpoint, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first, *rest = arguments.split()
    front = [first] if first in ("generate", "nope") else ["compare", *SMALL, first]
    out = refused(capsys, [*front, *rest, "--model", str(checkpoint)], message)
    # nor is a text echoed
    assert "documents per task" not in out and not out.startswith("x")


def test_a_checkpoint_that_cannot_be_read_is_one_line(checkpoint, capsys):
    refused(capsys, ["--model", "nowhere"], "nowhere/config.json")
    shutil.copytree(checkpoint, "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(capsys, ["generate", "--model", "copy", "x"], "copy has no tokenizer")
    assert (
        refused(
            capsys, ["generate", "--model", str(checkpoint), ""], "prompt has no tokens"
        )
        == ""
    )
