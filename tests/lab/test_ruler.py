"""python -m lab.ruler: RULER's documents are those that lm-evaluation-harness makes."""

import json
import random
import re
from types import SimpleNamespace

import pytest

from common import ENCODING
from lab import ruler

TOKENS = 1300
NEEDLE = "One of the special magic {} for {} is: {}."


@pytest.fixture
def lines(tmp_path, capsys):
    """Return a function that returns the lines which the command writes."""
    pytest.importorskip("lm_eval")  # optional

    def run(tasks: str, seed: int = 0, documents: int = 2):
        out = tmp_path / "ruler.jsonl"
        options = (
            f"--tokens {TOKENS} --documents {documents} --seed {seed} --tasks {tasks}"
        )
        ruler.main([*options.split(), "--out", str(out)])
        assert len(capsys.readouterr().out.splitlines()) == 1
        return [json.loads(line) for line in out.read_text("utf8").splitlines()]

    return run


def length(line: dict) -> int:
    ids = ENCODING.encode_ordinary(line["context"] + line["question"])
    return len(ids) + line["max_new_tokens"]


def test_a_question_begins_behind_the_example_and_a_reply_has_room(monkeypatch):
    asked = "Question: Find all variables"
    made = dict(input=f"{asked} A\nB\n{asked} C", outputs=["1", "2"], gen_prefix="D")
    monkeypatch.setattr(ruler, "document", lambda *_: made)
    args = SimpleNamespace(seed=0, tokens=9, reply=None, essays=False)
    line = ruler.line_of("vt", 0, args, None, [])
    assert line["context"] == f"{asked} A\nB\n"
    assert line["question"] == f"{asked} C"
    assert line["max_new_tokens"] == 30
    args.reply = 12
    assert ruler.line_of("vt", 0, args, None, [])["max_new_tokens"] == 36


def test_the_longest_document_that_fits_is_made(monkeypatch):
    def made(task, seed, tokens, encode, haystack):
        return dict(length=5 + len(haystack[0].split()))

    monkeypatch.setattr(ruler, "document", made)
    assert ruler.longest("vt", "0", 30, None, ["a"] * 99) == dict(length=30)


def test_a_line_has_its_fields_and_its_answers_are_in_its_context(lines):
    found = lines(" ".join(ruler.OFFLINE), documents=1)
    assert [x["task"].strip("*") for x in found] == ruler.OFFLINE
    for x in found:
        assert {*x} - {"haystack"} == ruler.FIELDS
        assert x["context"].endswith("\n") and "\n" not in x["question"]
        assert x["question"].split()[0] in ("What", "Question:")
        assert ("haystack" in x) == x["task"].endswith("*")
        assert all(answer in x["context"] for answer in x["answers"])
        assert length(x) <= TOKENS


def test_needles_are_rulers_and_the_haystack_fills_the_length(lines):
    found = lines("niah_single_2 niah_single_3 niah_multivalue niah_multiquery")
    for x in found:
        assert x["task"].endswith("*")
        assert 0.95 * TOKENS <= length(x)
        kind = "uuids" if "single_3" in x["task"] else "numbers"
        about = re.search(" for (.*) mentioned", x["question"])[1]
        keys = re.split(", and |, ", about)
        keys *= len(x["answers"]) // len(keys)
        for key, value in zip(keys, x["answers"], strict=True):
            assert x["context"].count(NEEDLE.format(kind, key, value)) == 1


def test_the_parts_are_lm_evals_input_and_the_answers_its_outputs(lines):
    x = lines("niah_multikey_2")[1]
    from lm_eval.tasks.ruler import niah_utils

    random.seed("0 niah_multikey_2 1")
    (made,) = niah_utils.generate_samples(
        niah_utils.get_haystack("needle"),
        lambda text: SimpleNamespace(input_ids=ENCODING.encode_ordinary(text)),
        max_seq_length=TOKENS,
        type_haystack="needle",
        type_needle_k="words",
        type_needle_v="numbers",
        template=niah_utils.TEMPLATE,
        num_samples=1,
    )
    assert x["context"] + x["question"] == made["input"]
    assert x["answer_prefix"] == made["gen_prefix"]
    assert x["answers"] == made["outputs"]


def test_a_document_depends_on_seed_task_and_index_alone(lines):
    tasks = "niah_single_2 vt cwe fwe"
    found = lines(tasks)
    again = lines("fwe cwe vt niah_single_2", documents=3)
    assert all(x in again for x in found)
    other = lines(tasks, seed=1)
    answers = [{a for x in part for a in x["answers"]} for part in (found, other)]
    assert not answers[0] & answers[1]


def test_refusals_leave_files_as_they_are(lines, tmp_path):
    file = tmp_path / "ruler.jsonl"
    for content in ('{"context": ""}\n', "a text\n"):
        file.write_text(content)
        with pytest.raises(ValueError, match="something else"):
            lines("niah_single_1")
        assert file.read_text() == content
