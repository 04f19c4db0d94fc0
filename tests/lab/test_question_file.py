"""A file of questions: its fields, its mistakes, its scores, and its tokens."""

import json

import pytest

from lab.question_file import Encoder, Question, contexts, read
from nanollm import TINY, tokenizer
from nanollm.model import Config
from nanollm.tokenizer import Foreign

LINE = dict(context="Ann sells lamps.", question="What?", answers=["lamps"])


def written(tmp_path, *lines):
    file = tmp_path / "asked.jsonl"
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(rows))
    return file


def test_lines_become_questions_and_those_of_one_context_a_group(tmp_path, capsys):
    other = LINE | dict(context="Tom.", task="names", score="any", max_new_tokens=5)
    other |= dict(id=7, kind="x", line=9)
    questions = read(written(tmp_path, LINE, "", other, LINE))
    assert [question.line for question in questions] == [1, 3, 4]
    assert questions[0] == Question(**LINE, line=1)
    assert capsys.readouterr().err.endswith("not used: id, kind, line\n")
    assert [[q.line for q in some] for some in contexts(questions)] == [[1, 4], [3]]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("{", "no JSON"),
        (dict(context="a", question="b"), "no 'answers'"),
        (LINE | dict(answers=[]), "answers is"),
        (LINE | dict(answers="lamps"), "answers is"),
        (
            LINE | dict(answers=["lamps", " "]),
            "an answer of",
        ),
        (LINE | dict(question=" "), "question is empty"),
        (LINE | dict(score="some"), "it must be all or any"),
        (LINE | dict(max_new_tokens=0), "must be at least 1"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=f"asked.jsonl, line 3: .*{message}"):
        read(written(tmp_path, LINE, LINE, wrong))


def test_a_file_without_questions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no questions"):
        read(written(tmp_path, "", " "))


def test_a_score_is_the_share_of_the_answers_or_whether_there_is_one():
    asked = Question("c", "q", ["Ann", "12"])
    replies = "", "ANN", "ann has 12", "1 2"
    assert [asked.scored(x) for x in replies] == [0, 0.5, 1, 0]
    asked.score = "any"
    replies = "", "it is 12", "ann 12"
    assert [asked.scored(x) for x in replies] == [0, 1, 1]


def test_a_chat_template_stands_around_context_and_question():
    def raw(texts):
        return [[*text.encode()] for text in texts]

    def chat(messages):
        return f"<user>{messages[0]['content']}</user><reply>"

    foreign = Foreign(raw, lambda ids: bytes(ids).decode(), 256, None, chat)
    encoder = Encoder(foreign, None)
    asked = Question("Ann sells lamps.", "What?", ["la", "mps"], "Lo:")

    def text(tokens):
        return foreign.decode(tokens[0].tolist())

    assert text(encoder.context(asked.context)) == "<user>Ann sells lamps."
    parts = [*map(text, encoder.question(asked))]
    assert parts == ["\n\nWhat?", "</user><reply>Lo:", " la, mps"]
    asked.answer_prefix, asked.score, asked.context = "", "any", "Ann.\n"
    assert [*map(text, encoder.question(asked))] == ["What?", "</user><reply>", "la"]


def test_without_a_template_the_reply_begins_on_a_new_line():
    ours = tokenizer.load(TINY / "tokenizer.tiktoken")
    bos = ours.n_vocab - 1
    shape = dict(vocab_size=2048, max_len=64, n_layers=1, n_heads=2, n_kv_heads=1)
    encoder = Encoder(ours, Config(**shape, d_model=16, d_ff=16, bos=bos))
    context = encoder.context("Ann.")
    assert context[0, 0] == bos
    asked = Question("Ann.", "What?", ["lamps"])
    question, lead, answer = (x[0].tolist() for x in encoder.question(asked))
    said = [ours.decode(x) for x in (question, lead, answer)]
    assert said == ["\n\nWhat?", "\n", "lamps"]
    asked.answer_prefix = "Ann sells"
    said = [ours.decode(x[0].tolist()) for x in encoder.question(asked)]
    assert said == ["\n\nWhat?", "\nAnn sells", " lamps"]
