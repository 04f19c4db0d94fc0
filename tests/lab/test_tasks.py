"""Every question has one answer that the facts determine."""

import re

import numpy as np
import pytest
from tiktoken import Encoding

from common import ENCODING, decode, tasks
from lab.hard_tasks import HARD
from lab.tasks import ANSWER, FACT, LINE_KINDS, QUESTION, TEXT, Tasks, Unmarked
from nanollm.tokenizer import boundaries

TASKS = "needle", "pairs", "few_shot", "copy", *HARD


def rows(task, seed=0, B=6, T=400, split="test", **options):
    """For each row the batch, tokens, roles, facts as text, and questions as (text, answer) pairs."""
    batch = tasks(split).batch(task, seed, B, T, **options)
    spans = [*zip([batch.question] + [a.stop for a in batch.answers], batch.answers)]
    for tokens, roles, facts in zip(batch.tokens, batch.roles, batch.facts):
        asked = [
            (decode(tokens[start : a.start]), decode(tokens[a])) for start, a in spans
        ]
        yield batch, tokens, roles, decode(tokens[facts]), asked


@pytest.mark.parametrize(
    "split, facts, questions, numbers",
    [("test", 1, 1, 1), ("train", 6, 6, 1), ("test", 4, 2, 3)],
)
def test_needle_is_determined_by_its_facts(split, facts, questions, numbers):
    options = dict(facts=facts, questions=questions) | (
        dict(numbers=numbers) if numbers > 1 else {}
    )
    for batch, tokens, _, text, asked in rows("needle", split=split, **options):
        code = dict(re.findall(r"of (\w+) is (\d+)", text))
        assert text == "".join(
            f" The code of {key} is {value}." for key, value in code.items()
        )
        values = [
            int(value[i : i + 4])
            for value in code.values()
            for i in range(0, 4 * numbers, 4)
        ]
        assert {len(value) for value in code.values()} == {4 * numbers}
        assert len({*values}) == len(values) == facts * numbers and {*values} <= {
            *tasks(split).values
        }
        keys = [
            re.fullmatch(r"\.?\nQ: The code of (\w+) is ", question)[1]
            for question, _ in asked
        ]
        assert len({*keys}) == len(batch.answers) == questions
        assert [code[key] for key in keys] == [answer for _, answer in asked]
        assert decode(tokens[batch.answers[-1].stop :]) == "."


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_depth_places_the_fact_that_is_asked_for(depth):
    for _, tokens, roles, _, ((question, _),) in rows("needle", depth=depth, facts=5):
        fact = ENCODING.encode(question.removeprefix("\nQ:"))[:5]  # the code of, key
        at = next(i for i in range(len(tokens)) if tokens[i : i + 5].tolist() == fact)
        before, fill = (roles[:at] == TEXT).sum() - 1, (roles == TEXT).sum() - 1
        assert roles[at] == FACT and before == round(depth * fill)


@pytest.mark.parametrize("pairs, questions", [(16, 1), (2, 2), (30, 4)])
def test_pairs_are_determined_by_its_facts(pairs, questions):
    for batch, _, roles, text, asked in rows(
        "pairs", listed=pairs, questions=questions
    ):
        assert re.fullmatch(r"(\n [a-z]+: \d{4}){%d}\n" % pairs, text)  # noqa: UP031
        # one block
        assert np.ptp(np.flatnonzero(roles == FACT)) + 1 == (roles == FACT).sum()
        table = dict(re.findall(r"(\w+): (\d{4})", text))
        keys = [re.fullmatch(r"\nQ: (\w+): ", question)[1] for question, _ in asked]
        assert len(table) == pairs and len({*keys}) == len(batch.answers) == questions
        assert [table[key] for key in keys] == [answer for _, answer in asked]


def test_words_and_values_of_the_test_split_are_never_keys_or_values_in_training():
    train, test = tasks("train"), tasks("test")
    keys, held = ({decode(ids) for ids in split.words} for split in (train, test))
    assert len(keys) > 200 and len(held) > 100 and not keys & held
    assert all(len(ids) == 2 for ids in train.words + test.words)
    assert sorted(train.values + test.values) == list(range(10_000))


def kind_of(line: str) -> int:
    (kind,) = (i for i, kind in enumerate(LINE_KINDS) if line.startswith(kind))
    return kind


@pytest.mark.parametrize("shots, classes", [(16, 4), (12, 8), (3, 5)])
def test_few_shot_is_determined_by_its_shots(shots, classes):
    for batch, _, _, text, ((question, answer),) in rows(
        "few_shot", B=12, shots=shots, classes=classes
    ):
        shown = re.findall(r"\n(.+) =>(\d\d)", text)
        assert len(shown) == shots and text == "".join(
            f"\n{line} =>{label}" for line, label in shown
        )
        label = {kind_of(line): label for line, label in shown}
        # one label a class
        assert all(label[kind_of(line)] == one for line, one in shown)
        assert len({*label.values()}) == len(label) <= classes  # and one class a label
        # whose class has been shown
        assert label[kind_of(question[1:].removesuffix(" =>"))] == answer
        assert batch.answers == [slice(399, 400)]


def test_few_shot_labels_are_drawn_anew_and_cannot_be_guessed():
    last, labels = 0, [set() for _ in LINE_KINDS]
    for seed in range(200):
        ((*_, text, ((question, answer),)),) = rows("few_shot", seed, B=1, T=320)
        last += text.endswith(answer)
        labels[kind_of(question[1:])].add(answer)
    # chance is 1/4
    assert all(len(seen) > 10 for seen in labels) and 0.16 < last / 200 < 0.36


def test_copy_repeats_the_passage():
    for batch, tokens, roles, _, _ in rows(
        "copy", T=200, length=32, start=8, answer=16
    ):
        passage = tokens[roles == FACT]
        assert (
            len(passage) == 32
            and passage.tobytes() in tasks("test").stream.astype(np.int64).tobytes()
        )
        assert (tokens[batch.question :] == passage[:24]).all() and batch.answers == [
            slice(184, 200)
        ]


@pytest.mark.parametrize("task", TASKS)
def test_rows_align_the_rest_is_real_text_and_a_seed_decides_everything(task):
    test, T = tasks("test"), 413
    stream = test.stream.astype(np.int64).tobytes()
    batch, again, other = (test.batch(task, seed, 4, T) for seed in (5, 5, 1))
    assert (
        batch.tokens.shape == batch.roles.shape == (4, T)
        and batch.tokens.dtype == np.int64
    )
    inside = {i for a in batch.answers for i in range(a.start, a.stop)}
    for tokens, roles in zip(batch.tokens, batch.roles):
        assert {*np.flatnonzero(roles == ANSWER)} == inside
        assert (
            roles[batch.question] == QUESTION
            and np.isin(roles[: batch.question], (TEXT, FACT)).all()
        )
        assert np.isin(roles[batch.question :], (QUESTION, ANSWER)).all()
        text = tokens[roles == TEXT]
        # one passage, which facts interrupt
        assert text[0] == test.bos and text[1:].tobytes() in stream
    assert (batch.tokens == again.tokens).all() and (batch.roles == again.roles).all()
    assert (batch.tokens != other.tokens).mean() > 0.5 and len(
        np.unique(batch.tokens, axis=0)
    ) == 4


@pytest.mark.parametrize("task", ["needle", "pairs", "copy"])
def test_too_short_a_document_says_how_many_tokens_are_missing(task):
    make = getattr(tasks("test"), task)
    with pytest.raises(ValueError, match=r"need \d+ tokens more") as error:
        make(np.random.default_rng(0), 20)
    enough = 20 + int(re.search(r"\d+", str(error.value))[0])
    # the BOS alone
    assert (make(np.random.default_rng(0), enough)[1] == TEXT).sum() == 1


@pytest.mark.parametrize(
    "task, call, named",
    [
        ("pairs", dict(listed=5000), "5000"),
        ("pairs", dict(questions=17), "questions 17 .* 16"),
        ("needle", dict(numbers=1000), "1000"),
        ("needle", dict(depth=1.5), "1.5"),
        ("copy", dict(length=20, start=8, answer=13), "13 .* 12"),
        ("few_shot", dict(classes=9), "9 .* 8"),
        ("ids", {}, "needle, pairs"),
        ("plain", dict(seed=-1), "-1"),
        ("plain", dict(B=0), "0"),
        ("plain", dict(T=10**8), "100000000"),
        ("latest", dict(changed=5), "changed 5 .* 4"),
        ("latest", dict(questions=9), "questions 9"),
        ("hops", dict(hops=1), "hops 1"),
        ("hops", dict(questions=3), "questions 3"),
        ("list", dict(kinds=1, questions=2), "questions 2"),
        ("count", dict(labels=1), "labels 1"),
        ("count", dict(votes=3), "votes 3"),
        ("rule", dict(questions=5), "questions 5"),
        ("paraphrase", dict(questions=5), "questions 5"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_its_number(task, call, named):
    with pytest.raises(ValueError, match=named):
        tasks("test").batch(task, **dict(seed=0, B=1, T=400) | call)


def test_a_tokenizer_without_two_digit_numbers_is_refused():
    ranks = {bytes([b]): b for b in range(256)}
    with pytest.raises(ValueError, match="tokens 256 to 355 are 00 to 99"):
        Tasks(
            Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={}),
            "test",
        )


@pytest.mark.parametrize("task", ["needle", "pairs"])
def test_unmarked_facts_say_the_same_without_a_token_that_ends_a_chunk(task):
    ends = boundaries(ENCODING, ENCODING.n_vocab).numpy()
    marked, plain = (
        made.batch(task, 3, 4, 400)
        for made in (tasks("test"), Unmarked(ENCODING, "test"))
    )
    for one, other in zip(marked.tokens, plain.tokens):
        assert one[marked.answers[0]].tolist() == other[plain.answers[0]].tolist()
    assert (
        ends[marked.tokens[marked.facts]].any()
        and not ends[plain.tokens[plain.facts]].any()
    )
    for batch in (marked, plain):
        # the same in the text, before the facts
        batch.tokens[:, 1:3] = batch.tokens[:, batch.answers[0]]
        for row, facts, at in zip(batch.tokens, batch.facts, batch.stated):
            answer = row[batch.answers[0]].tolist()
            there = [
                facts[i : i + 2].all() and row[i : i + 2].tolist() == answer
                for i in range(batch.question)
            ]
            assert at == there.index(True)
