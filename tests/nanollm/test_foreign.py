"""Checkpoints and tokenizers that are not ours in tasks, chats and commands; both engines."""

from functools import cache as once
import json
from pathlib import Path

import numpy as np
from pytest import approx, fixture, mark, raises

from foreign import foreign_checkpoint
from nanollm import LEARNED
from nanollm.__main__ import main
from nanollm.checkpoint import hf_tokenizer
from lab.tasks import ANSWER, FACT, QUESTION, Tasks

METHODS = ["full", "h2o", "snap_kv+critical", "full@2"]
FEW = ["--documents", "2", "--lengths", "384", "--keep", "25", "--methods", *METHODS]


@fixture(scope="module")
def folders(tmp_path_factory):
    """folders(kind): a checkpoint with such a tokenizer. Not to be changed."""
    return once(lambda kind: foreign_checkpoint(tmp_path_factory.mktemp(kind), kind))


@fixture(scope="module", params=["bytes", "unigram"])
def tasks(request, folders):
    return Tasks(hf_tokenizer(folders(request.param)), "test")


@fixture
def folder(folders):
    return folders("bytes")


@mark.parametrize("task", ["needle", "pairs", "few_shot", "copy"])
def test_documents_read_as_ours_do_whatever_the_tokenizer(tasks, task):
    """Each has one answer, in needle and pairs as a fact says, and as many tokens as asked for."""
    encoding, batch = tasks.encoding, tasks.batch(task, 0, 4, 400)
    assert batch.tokens.shape == (4, 400)
    first = {encoding.decode([token]) for token in batch.tokens[:, 0].tolist()}
    assert (first == {"<s>"}) == (encoding.bos is not None)
    for tokens, roles in zip(batch.tokens, batch.roles):
        fact, question, answer = (
            encoding.decode(tokens[roles == role].tolist())
            for role in (FACT, QUESTION, ANSWER)
        )
        answer = answer.strip()
        if task == "needle":
            key = question.split("code of ")[1].split(" is")[0]
            assert fact.count("The code of") == 4
            assert f"The code of {key} is {answer}." in fact
        if task == "pairs":
            key = question.split("Q:")[1].strip()
            assert f" {key} {answer}" in fact
        if task != "copy":
            assert len(answer) == (2 if task == "few_shot" else 4)
            assert answer.isdecimal()
    assert len(batch.answers) == 1


def test_documents_are_measured_as_drawn_whatever_their_tokens(tasks):
    """No document is left out because another has more tokens in its question or its answer."""
    for task in ("needle", "few_shot"):
        parts = tasks.batches(task, 0, 24, 500)
        assert sum(len(part.tokens) for part in parts) == 24
        shapes = {(part.question, str(part.answers)) for part in parts}
        assert len(shapes) == len(parts) > (task != "few_shot")
        for part in parts:
            for span in part.answers:
                assert (part.roles[:, span] == ANSWER).all()
        rng = np.random.default_rng(0)
        drawn = {getattr(tasks, task)(rng, 500)[0].tobytes() for _ in range(24)}
        assert {row.tobytes() for part in parts for row in part.tokens} == drawn


def test_the_chat_template_tells_what_stands_around_a_user_s_words(folder):
    encoding = hf_tokenizer(folder)
    own = encoding.chat.func.__self__  # transformers' tokenizer
    for template in None, "nothing of it":
        own.chat_template = template
        with raises(ValueError, match="chat template"):
            encoding.turn()
    own.chat_template = (
        "{{ bos_token }}<u>{{ messages[0]['content'] }}</u>"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    before, after = map(encoding.decode, encoding.turn())
    assert (before, after) == ("<s><u>", "</u><a>")  # BOS once: the template's


@mark.slow
def test_compare_and_generate_run_a_foreign_checkpoint(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    main(["--model", str(folder), *FEW, "--json", "rows.json"])
    out = capsys.readouterr().out
    rows = json.loads(Path("rows.json").read_text())
    assert [row["method"] for row in rows] == METHODS
    assert rows[0]["kl"] == approx(0, abs=1e-6)
    assert rows[1]["kl"] > 1e-7
    assert "needle: with this model, the task cannot compare methods" in out
    assert rows[1]["live"] < rows[0]["live"] / 2

    main(["generate", "--model", str(folder)])
    assert "tokens are evicted" in capsys.readouterr().out


def test_both_engines_make_the_same_rows_of_a_decoder_whose_texts_begin_with_bos(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    few = f"--model {LEARNED} --documents 2 --lengths 256 --methods full snap_kv --keep 25"
    made = []
    for engine in ("ours", "transformers"):
        file = Path(f"{engine}.json")
        main(f"--engine {engine} --json {file} {few}".split())
        made.append(json.loads(file.read_text()))
    for ours, theirs in zip(*made, strict=True):
        for key, x in ours.items():
            if isinstance(x, float):
                assert theirs[key] == approx(x, rel=2e-2, abs=2e-3), key
            elif key not in ("engine", "l1", "each"):
                assert theirs[key] == x, key
