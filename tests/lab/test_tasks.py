"""Every question has one answer that the facts determine."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from common import ENCODING, decode, tasks
from lab.tasks import ANSWER, FACT, LINE_KINDS, QUESTION, TEXT, Tasks, Unmarked
from nanollm.tokenizer import boundaries

TASKS = "needle", "pairs", "few_shot", "copy"
ASKED = r"\.?\nQ: The code of (\w+) is"  # the full stop is of an earlier answer


def rows(task, B=6, T=400, split="test", **options):
    """Yield each row of a batch, with its facts, questions and answers as text."""
    batch = tasks(split).batch(task, 0, B, T, **options)
    for tokens, roles in zip(batch.tokens, batch.roles):
        questions = []
        answers = []
        start = batch.question
        for span in batch.answers:
            questions.append(decode(tokens[start : span.start]))
            answers.append(decode(tokens[span]))
            start = span.stop
        yield SimpleNamespace(
            batch=batch,
            tokens=tokens,
            roles=roles,
            facts=decode(tokens[roles == FACT]),
            questions=questions,
            answers=answers,
        )


def keys_of(questions: list[str], pattern: str) -> list[str]:
    """Return the group of a pattern in each question, all of which it must match."""
    keys = [re.fullmatch(pattern, question)[1] for question in questions]
    assert len({*keys}) == len(keys)
    return keys


@pytest.mark.parametrize(
    "split, facts, questions, numbers", [("train", 6, 6, 1), ("test", 4, 2, 3)]
)
def test_needle_is_determined_by_its_facts(split, facts, questions, numbers):
    for row in rows(
        "needle", split=split, facts=facts, questions=questions, numbers=numbers
    ):
        code = dict(re.findall(r"of (\w+) is (\d+)", row.facts))
        stated = [f" The code of {key} is {value}." for key, value in code.items()]
        assert row.facts == "".join(stated)
        values = re.findall(r"\d{4}", " ".join(code.values()))
        assert {len(value) for value in code.values()} == {4 * numbers}
        assert len(values) == len({*values}) == facts * numbers
        assert {*map(int, values)} <= {*tasks(split).values}
        keys = keys_of(row.questions, f"{ASKED} ")
        assert len(keys) == questions
        assert [code[key] for key in keys] == row.answers


@pytest.mark.parametrize("task", ["needle", "pairs"])
def test_a_value_may_be_a_word(task):
    for row in rows(task, questions=2, numbers=0):
        found = dict(re.findall(r"(?:of|\n) ?(\w+)(?: is|:) (\w+)", row.facts))
        asked = keys_of(row.questions, r"\.?\nQ:.*?(\w+)(?: is|:)")
        assert [found[key] for key in asked] == [x.strip() for x in row.answers]


@pytest.mark.parametrize("pairs, questions", [(2, 2), (30, 4)])
def test_pairs_are_determined_by_its_facts(pairs, questions):
    asked = set()
    for row in rows("pairs", listed=pairs, questions=questions):
        assert re.fullmatch(rf"(\n [a-z]+: \d{{4}}){{{pairs}}}\n", row.facts)
        places = np.flatnonzero(row.roles == FACT)
        assert len(places) == places[-1] - places[0] + 1  # one block
        table = dict(re.findall(r"(\w+): (\d{4})", row.facts))
        assert len({*table.values()}) == pairs
        keys = keys_of(row.questions, r"\nQ: (\w+): ")
        asked.add([*table].index(keys[0]))
        assert len(table) == pairs
        assert len(keys) == questions
        assert [table[key] for key in keys] == row.answers
    assert len(asked) > 1


def test_training_shares_no_line_and_no_place_with_the_test():
    train, test = tasks("train"), tasks("test")
    lines = []
    for made in train, test:
        lines.append({decode(ids) for kind in made.lines for ids in kind})
    assert len(lines[0]) > 100 and lines[0].isdisjoint(lines[1])
    for task in "needle", "few_shot":
        drawn = [made.batch(task, 0, 8, 400).roles for made in (train, test)]
        assert not (drawn[0] == drawn[1]).all(1).any()


def test_words_and_values_of_the_test_split_are_never_keys_or_values_in_training():
    train, test = tasks("train"), tasks("test")
    keys, held_out = ({decode(ids) for ids in made.words} for made in (train, test))
    assert len(keys) > 200 and len(held_out) > 100
    assert not keys & held_out
    assert {len(ids) for ids in train.words + test.words} == {2}
    assert sorted(train.values + test.values) == list(range(10_000))


def kind_of(line: str) -> int:
    starts = [line.startswith(start) for start in LINE_KINDS]
    assert sum(starts) == 1
    return starts.index(True)


@pytest.mark.parametrize("shots, classes", [(16, 4), (3, 5)])
def test_few_shot_is_determined_by_its_shots(shots, classes):
    for row in rows("few_shot", B=12, shots=shots, classes=classes):
        shown = re.findall(r"\n(.+) =>(\d\d)", row.facts)
        assert len(shown) == shots
        assert row.facts == "".join(f"\n{line} =>{label}" for line, label in shown)
        labels = {}
        for line, label in shown:
            # one label a class
            assert labels.setdefault(kind_of(line), label) == label
        # one class a label
        assert len({*labels.values()}) == len(labels) <= classes
        # whose class has been shown
        (line,) = keys_of(row.questions, r"\n(.+) =>")
        assert labels[kind_of(line)] == row.answers[0]
        assert row.batch.answers == [slice(399, 400)]
        # the shots are next to the question
        assert row.roles[row.batch.question - 1] == FACT


def test_few_shot_labels_are_drawn_anew_and_cannot_be_guessed():
    last = 0
    labels = [set() for _ in LINE_KINDS]
    for row in rows("few_shot", B=200, T=320):
        (answer,) = row.answers
        last += row.facts.endswith(answer)
        labels[kind_of(row.questions[0].strip())].add(answer)
    assert all(len(seen) > 10 for seen in labels)
    assert 0.16 < last / 200 < 0.36  # chance is 1/4


def test_copy_repeats_the_passage():
    for row in rows("copy", T=200, length=32, start=8, answer=16):
        passage = row.tokens[row.roles == FACT]
        assert len(passage) == 32
        assert passage.tobytes() in tasks("test").stream.tobytes()
        assert row.tokens[-24:].tolist() == passage[:24].tolist()
        assert row.batch.answers == [slice(184, 200)]


# ---- all tasks ----


@pytest.mark.parametrize("task", TASKS)
def test_rows_align_the_rest_is_real_text_and_a_seed_decides_everything(task):
    test = tasks("test")
    stream = test.stream.tobytes()
    batch = test.batch(task, 5, 4, 413)
    assert batch.tokens.shape == batch.roles.shape == (4, 413)
    assert batch.tokens.dtype == np.int64
    kinds = np.full(413, QUESTION)
    for span in batch.answers:
        kinds[span] = ANSWER
    for tokens, roles in zip(batch.tokens, batch.roles):
        before, after = np.split(roles, [batch.question])
        assert np.isin(before, (TEXT, FACT)).all()
        assert (after == kinds[batch.question :]).all()
        assert after[0] == QUESTION
        # one passage, which facts interrupt
        text = tokens[roles == TEXT]
        assert text[0] == test.bos
        assert text[1:].tobytes() in stream
    assert (batch.tokens == test.batch(task, 5, 4, 413).tokens).all()
    assert (batch.tokens != test.batch(task, 1, 4, 413).tokens).mean() > 0.5
    assert len(np.unique(batch.tokens, axis=0)) == 4


@pytest.mark.parametrize("task", ["needle", "pairs", "copy"])
def test_too_short_a_document_says_how_many_tokens_are_missing(task):
    make = getattr(tasks("test"), task)
    with pytest.raises(ValueError, match=r"need \d+ tokens more") as error:
        make(np.random.default_rng(0), 20)
    enough = 20 + int(re.search(r"\d+", str(error.value))[0])
    _, roles = make(np.random.default_rng(0), enough)
    assert (roles == TEXT).sum() == 1  # the BOS alone


@pytest.mark.parametrize(
    "call",
    [
        "pairs listed 5000",
        "pairs questions 17",
        "needle numbers 1000",
        "copy answer 99",
        "few_shot classes 9",
        "plain seed -1",
        "plain B 0",
        "plain T 100000000",
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_its_number(call):
    task, name, number = call.split()
    options = dict(seed=0, B=1, T=400) | {name: json.loads(number)}
    with pytest.raises(ValueError, match=number):
        tasks("test").batch(task, **options)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="needle, pairs"):
        tasks("test").batch("ids", 0, 1, 400)


def test_a_tokenizer_without_two_digit_numbers_is_refused():
    for wrong in SimpleNamespace(encode_ordinary=lambda text: [1, 2]), object():
        with pytest.raises(ValueError, match="tokens 256 to 355 are 00 to 99"):
            Tasks(wrong, "test")


@pytest.mark.parametrize("task", ["needle", "pairs"])
def test_unmarked_facts_say_the_same_without_a_token_that_ends_a_chunk(task):
    ends = boundaries(ENCODING, ENCODING.n_vocab).numpy()
    marked = tasks("test").batch(task, 3, 4, 400)
    plain = Unmarked(ENCODING, "test").batch(task, 3, 4, 400)
    for batch in marked, plain:
        answers = batch.tokens[:, batch.answers[0]]
        assert (answers == marked.tokens[:, marked.answers[0]]).all()
        # the same in the text, before the facts
        batch.tokens[:, 1:3] = answers
        rows = np.arange(4)[:, None]
        places = batch.stated[:, None] + [0, 1]
        assert (batch.tokens[rows, places] == answers).all()
        assert batch.facts[rows, places].all()
    assert ends[marked.tokens[marked.facts]].any()
    assert not ends[plain.tokens[plain.facts]].any()
