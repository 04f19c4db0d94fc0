"""python -m nanollm teach: the gates learn, the other half judges, and nothing is overwritten."""

import json

import pytest

from common import ENCODING
from lab import lessons, teach
from lab.loading import calibrated
from lab.made_questions import Maker
from lab.methods_by_name import pick
from lab.question_file import contexts, read
from methods.ours import question_gates
from nanollm import TINY, checkpoint


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "MADE", "PLAIN":
        monkeypatch.setattr(lessons, name, 1)
    monkeypatch.setattr(lessons, "TASKS", dict(needle=("needle", 2, {})))
    monkeypatch.setattr(teach, "JUDGES", 2)
    maker = Maker(ENCODING, "test", 5)
    lines = []
    for _ in range(5):
        for x in maker.context(150):
            made = dict(context=x.context, question=x.question, answers=x.answers)
            lines.append(json.dumps(made | dict(max_new_tokens=4)))
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_gates_are_taught_and_judged(file, capsys, monkeypatch):
    options = f"--questions {file} --calibration new --steps 3 --seed 4".split()
    with pytest.raises(ValueError, match="answers none of the questions"):
        teach.main(options)
    monkeypatch.setattr(question_gates, "HARD", 99)
    learn = question_gates.taught
    given = []

    def noted(*args, **more):
        given.append((more["steps"], more["seed"]))
        return learn(*args, **more)

    monkeypatch.setattr(question_gates, "taught", noted)
    teach.main(options)
    assert given == [(3, 4)]
    text = capsys.readouterr().out
    assert "3 contexts of" in text and text.count("taught") >= 5
    judges = sum(contexts(read(file))[1::2], [])
    title, counted, *_ = text[text.index("Questions held out") :].splitlines()
    assert counted.endswith(f"; {len(judges)} questions")
    model = checkpoint.from_hf(TINY)
    variant = pick(["question_gates"])["question_gates"]
    before = calibrated(variant, model, ENCODING)
    after = calibrated(variant, model, ENCODING, file.parent / "new")
    moved = {name: after[name] - x for name, x in before.items()}
    assert 0 < moved["edges"].abs().max()
    assert 0 < moved["gates"].abs().max()
    with pytest.raises(
        ValueError, match="new/QuestionGates.safetensors is there already"
    ):
        teach.main(options)


def test_half_of_the_contexts_must_judge(file):
    first = file.read_text().splitlines()[0]
    file.write_text(first)
    with pytest.raises(ValueError, match="q.jsonl has 1 contexts, .* give 4 or more"):
        teach.main(["--questions", str(file), "--calibration", "new"])
    with pytest.raises(ValueError, match="needs --calibration FOLDER"):
        teach.main(["--questions", str(file)])
