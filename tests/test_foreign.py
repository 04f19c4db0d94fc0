"""Checkpoints of families and tokenizers that are not ours, from the command line."""

import json
from pathlib import Path
import shutil

import numpy as np
import pytest

from foreign import foreign_checkpoint
from nanollm import LEARNED
from nanollm.__main__ import main
from nanollm.checkpoint import hf_tokenizer
from lab.tasks import ANSWER, FACT, QUESTION, Tasks

FEW = "--documents 2 --lengths 384 --methods full h2o snap_kv+critical quantized_2 --keep 25".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return foreign_checkpoint(tmp_path_factory.mktemp("bytes"), "bytes")


@pytest.fixture(scope="module", params=["bytes", "unigram"])
def tasks(request, tmp_path_factory):
    folder = foreign_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return Tasks(hf_tokenizer(folder), "test")


@pytest.mark.parametrize("task", ["needle", "pairs", "few_shot", "copy"])
def test_documents_read_as_ours_do_whatever_the_tokenizer(tasks, task):
    """One answer that the facts determine, and as many tokens as were asked for."""
    encoding, batch = tasks.encoding, tasks.batch(task, 0, 4, 400)
    assert batch.tokens.shape == (4, 400)
    first = {encoding.decode([token]) for token in batch.tokens[:, 0].tolist()}
    assert (first == {"<s>"}) == (encoding.bos is not None)
    for tokens, roles in zip(batch.tokens, batch.roles):
        fact, question, answer = (
            encoding.decode(tokens[roles == role].tolist())
            for role in (FACT, QUESTION, ANSWER)
        )
        if task == "needle":
            key = question.split("code of ")[1].split(" is")[0]
            assert (
                fact.count("The code of") == 4
                and f"The code of {key} is {answer.strip()}." in fact
            )
        if task == "pairs":
            assert f" {question.split('Q:')[1].strip()} {answer.strip()}" in fact
        if task != "copy":
            assert (
                len(answer.strip()) == (2 if task == "few_shot" else 4)
                and answer.strip().isdecimal()
            )
    assert len(batch.answers) == 1


def test_documents_are_measured_as_drawn_whatever_their_tokens(tasks):
    """No document is left out because another has more tokens in its question or its answer."""
    for task in ("needle", "few_shot"):
        parts = tasks.batches(task, 0, 24, 500)
        assert sum(len(part.tokens) for part in parts) == 24
        shapes = {(part.question, str(part.answers)) for part in parts}
        assert len(shapes) == len(parts) > (task != "few_shot")
        assert all(
            (part.roles[:, span] == ANSWER).all()
            for part in parts
            for span in part.answers
        )
        rng = np.random.default_rng(0)
        drawn = {getattr(tasks, task)(rng, 500)[0].tobytes() for _ in range(24)}
        assert {row.tobytes() for part in parts for row in part.tokens} == drawn


def test_the_chat_template_tells_what_stands_around_a_user_s_words(folder):
    encoding = hf_tokenizer(folder)
    own = encoding.chat.func.__self__  # transformers' tokenizer
    for template in None, "nothing of it":
        own.chat_template = template
        with pytest.raises(ValueError, match="chat template"):
            encoding.turn()
    own.chat_template = (
        "{{ bos_token }}<u>{{ messages[0]['content'] }}</u>"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    before, after = map(encoding.decode, encoding.turn())
    assert (before, after) == ("<s><u>", "</u><a>")  # BOS once: the template's


def test_pieces_are_encoded_as_the_middle_of_a_text(tasks):
    encoding = tasks.encoding
    text = "\nThe code of star is 6098.\nQ: The code of star is 6098"
    pieces = [
        "\nThe code of",
        " star",
        " is",
        " 6098",
        ".",
        "\nQ:",
        " The code of",
        " star",
        " is",
        " 6098",
    ]
    ids = [t for piece in pieces for t in encoding.encode_ordinary(piece)]
    assert (
        encoding.decode(ids).split()
        == encoding.decode(encoding.raw([text])[0]).split()
        == text.split()
    )


def test_compare_and_generate_run_a_foreign_checkpoint(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    main(["--model", str(folder), *FEW, "--json", "rows.json"])
    out = capsys.readouterr().out
    rows = json.loads(Path("rows.json").read_text())
    assert [row["method"] for row in rows] == [
        "full",
        "h2o",
        "snap_kv+critical",
        "quantized_2",
    ]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-7
    assert "needle: with this model, the task cannot compare methods" in out
    assert rows[1]["live"] < rows[0]["live"] / 2

    main(["generate", "--model", str(folder)])
    assert "tokens are evicted" in capsys.readouterr().out


def test_both_engines_make_the_same_rows_of_a_decoder_whose_texts_begin_with_bos(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made = []
    few = "--documents 2 --lengths 256 --methods full snap_kv --keep 25 --json rows.json".split()
    for engine in ("ours", "transformers"):
        main(["--engine", engine, "--model", str(LEARNED), *few])
        made.append(json.loads(Path("rows.json").read_text()))
        Path("rows.json").unlink()
    for ours, theirs in zip(*made, strict=True):
        for key in ours:
            if key != "engine":
                assert (
                    theirs[key] == pytest.approx(ours[key], rel=2e-2, abs=2e-3)
                    if isinstance(ours[key], float)
                    else key in ("l1", "each") or theirs[key] == ours[key]
                ), key


def short_windows(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(
            config
            | dict(
                use_sliding_window=True,
                sliding_window=64,
                layer_types=2 * ["sliding_attention"],
            )
        )
    )


def cut_weights(folder):
    (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:3000]
    )


@pytest.mark.parametrize(
    "spoil, options, message",
    [
        (short_windows, "", "layer 0 attends to the last 64 tokens alone"),
        (cut_weights, "", "transformers cannot read"),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "",
            "transformers cannot read",
        ),
        (lambda folder: None, "--engine ours", "model_type 'qwen3' is not one of"),
    ],
)
def test_what_is_wrong_is_one_line(
    folder, tmp_path, monkeypatch, capsys, spoil, options, message
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "copy")
    spoil(Path("copy"))
    with pytest.raises(SystemExit) as stop:
        main(["--model", "copy", *FEW, *options.split()])
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("error: ")
    ]
    assert stop.value.code == 2 and len(lines) == 1 and message in lines[0]
