"""What gates learn from: tokens, answers, and nothing that a test asks."""

from types import SimpleNamespace

import pytest
import torch

from common import ENCODING, decode, tasks
from lab import corpus, lessons, made_questions
from lab.lessons import continued, of_questions, of_task
from lab.made_questions import Maker
from lab.question_file import Encoder, contexts, read
from nanollm import TINY, checkpoint

CONFIG = checkpoint.from_hf(TINY).config
JUDGE = lessons.NATURAL.with_name("natural_judge.jsonl")


@pytest.fixture(scope="module")
def made():
    maker = Maker(ENCODING, "train", 0)
    return [maker.context(300) for _ in range(60)]


def answers_of(asked):
    return [decode(row[mine]) for row, mine in zip(asked.tokens, asked.right)]


def test_the_values_asked_for_stand_in_the_text(made):
    kinds = set()
    several = False
    for questions in made:
        context = questions[0].context
        assert 200 < len(ENCODING.encode_ordinary(context)) < 500
        for question in questions:
            assert question.context == context
            kinds.add(question.task)
            several |= len(question.answers) > 1
            for answer in question.answers:
                assert answer in context
            assert question.answer_prefix in ("", question.answer_prefix.strip())
    assert kinds == {"number", "word", "phrase", "name", "date"}
    assert several


def test_questions_that_judge_are_of_each_kind_and_value(tmp_path):
    file = tmp_path / "made.jsonl"
    options = f"--out {file} --documents 1 --kinds copied unseen".split()
    made_questions.main(options)
    questions = read(file)
    assert len(questions) == 4 * len({x.task for x in questions}) == 24
    for x in questions:
        told = f"{x.answer_prefix} " if "copied" in x.task else ""
        assert told + x.answers[0] in x.context
        # "The code of KEY is"
        assert not told or told.split()[3] in corpus.words("test")


def test_the_seed_and_the_split_decide():
    def first(split, seed):
        return Maker(ENCODING, split, seed).context(200)

    assert first("train", 1) == first("train", 1) != first("train", 2)
    held_out = corpus.text("test")
    context = first("test", 1)[0].context
    lines = [line for line in context.splitlines() if len(line) > 40]
    assert any(line in text for line in lines for text in held_out)
    assert not {*Maker(ENCODING, "train", 0).words} & {*corpus.words("test")}


def test_draws_keep_their_order_in_every_process():
    """A set of strings has another order in each process."""
    drawn = iter("hdbhagdfce")
    assert Maker(ENCODING, "train", 0).different(lambda: next(drawn), 8) == [
        *"hdbagfce"
    ]


def test_questions_become_rows_whose_answers_are_marked(made):
    encoder = Encoder(ENCODING, CONFIG)
    for questions in made[:8]:
        asked = of_questions(encoder, questions)
        assert decode(asked.context[0]).endswith(questions[0].context)
        assert len(asked.tokens) == len(questions)
        for question, row, answer in zip(questions, asked.tokens, answers_of(asked)):
            assert answer.strip() == ", ".join(question.answers)
            assert f"{question.question}\n{question.answer_prefix}" in decode(row)


def test_a_known_question_is_part_of_the_context(made):
    encoder = Encoder(ENCODING, CONFIG)
    questions = made[0]
    asked = of_questions(encoder, questions, known=True)
    context = decode(asked.context[0])
    assert questions[0].context in context
    assert context.endswith(questions[0].question)
    assert decode(asked.tokens[0]).startswith(f"\n{questions[0].answer_prefix}")
    assert answers_of(asked)[0].strip() == ", ".join(questions[0].answers)


def test_documents_of_a_task_are_cut_where_the_question_starts():
    batch = tasks("test").batch("needle", 0, 2, 200, questions=2)
    whole = torch.from_numpy(batch.tokens)
    for i in range(2):
        for known in False, True:
            asked = of_task(batch, i, known)
            cut = batch.answers[0].start - 1 if known else batch.question
            assert torch.equal(asked.context, whole[i : i + 1, :cut])
            parts = [whole[i, answer] for answer in batch.answers]
            assert torch.equal(asked.tokens[asked.right], torch.cat(parts))
            joined = torch.cat((asked.context, asked.tokens), 1)
            assert torch.equal(joined[0], whole[i, : joined.shape[1]])


def test_the_end_of_plain_text_is_its_answer():
    text = torch.arange(100)[None]
    asked = continued(text)
    assert asked.context.tolist() == [[*range(36)]]
    assert asked.tokens[asked.right].tolist() == [*range(37, 100)]


def test_the_recipe_leaves_out_what_the_decoder_cannot_read_or_a_test_asks(monkeypatch):
    for name in "MADE", "PLAIN":
        monkeypatch.setattr(lessons, name, 3)
    tasks_ = tasks("train")
    found = lessons.lessons(tasks_, CONFIG)
    parts = 72 + 12, 3, 9, 18, 9, 9, 9, 6, 3
    assert len(found) == sum(parts)
    assert len(lessons.lessons(tasks_, CONFIG, "words")) == sum(parts) - 18
    lengths = [x.context.shape[1] + x.tokens.shape[1] for x in found]
    assert max(lengths) <= CONFIG.max_len
    short = SimpleNamespace(**vars(CONFIG) | dict(max_len=max(lengths) - 1))
    assert len(lessons.lessons(tasks_, short)) < len(found)

    passages = [some[0].context for some in contexts(read(lessons.NATURAL))]
    judges = [some[0].context for some in contexts(read(JUDGE))]
    assert len(passages) == 72 and len(judges) == 24
    assert not {*passages} & {*judges}
