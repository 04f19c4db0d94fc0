"""Text is split without loss or overlap, and every question has one answer that the facts determine."""
from collections import Counter
import json
import re

import numpy as np
import pytest
from tiktoken import Encoding

from common import ENCODING, decode, tasks
from nanollm.measure import tasks as task_file
from nanollm.measure.tasks import ANSWER, FACT, LINE_KINDS, QUESTION, TEXT, Tasks, documents, held_out
from nanollm.tokenizer import boundaries

TASKS = "needle", "recall", "few_shot", "copy"


# ---- text ---


def paragraphs(doc: str) -> list[str]:
    """Line by line: a paragraph ends at a blank line before one that is not indented."""
    out, blank = [[]], False
    for line in doc.split("\n"):
        if blank and line and not line[0].isspace():
            out.append([])
        blank = not line.strip()
        out[-1].append(line)
    return ["\n".join(lines).strip("\n") for lines in out]


def test_train_and_test_share_no_paragraph_and_lose_none():
    function, rest = "def f():\n    first\n\n    second", "\n\n".join(f"line {i}" for i in range(200))
    docs = [*documents()[3::15], function + "\n\n" + rest]
    count = lambda docs: Counter(p for doc in docs for p in paragraphs(doc))
    sides = [task_file.one_side(docs, side) for side in (False, True)]
    train, test = map(count, sides)
    assert not train.keys() & test.keys()
    # white space at a paragraph's end goes with the split; nothing else may change
    strip = lambda counts: Counter(p.rstrip() for p in counts.elements() if p.strip())
    assert strip(train + test) == strip(count(docs))
    assert 0.03 < test.total() / (train + test).total() < 0.07
    assert sum(function in doc for side in sides for doc in side) == 1  # whole


def test_what_is_kept_of_the_text_is_what_training_never_reads(tmp_path):
    of = lambda docs: {p for doc in docs for p in paragraphs(doc) if p}
    kept = of(task_file.text("test"))
    # with a document's last line break, a paragraph is another text to the hash
    assert len(kept) > 500 and len(kept & of(task_file.text("train"))) < len(kept) / 100
    assert not {*task_file.words("train")} & {*task_file.words("test")} and len(task_file.words("test")) > 500
    task_file.keep_held_out(tmp_path / "text.json")  # another Python has another text, mostly the same
    again = json.loads((tmp_path / "text.json").read_text(encoding="utf8"))
    assert {*again} == {*task_file.kept()} and len({*again["words"]} & {*task_file.words("test")}) > 500
    assert len(of(again["documents"]) & kept) > len(kept) / 2


def test_documents_are_the_pool_and_come_in_one_order():
    assert documents.__wrapped__() == documents()
    assert sum(map(len, documents())) > 5e6
    for part in ('The "import" statement', "def namedtuple(", "Return a new array of given shape"):
        assert any(part in doc for doc in documents())  # topics, source, docstrings
    with pytest.raises(ValueError, match="split 'dev' is unknown"):
        task_file.text("dev")


def test_words_and_values_of_the_test_split_are_never_keys_or_values_in_training():
    train, test = tasks("train"), tasks("test")
    seen_keys, seen_values = set(), set()
    for task in ("needle", "recall"):
        for row in train.batch(task, 1, 150, 512).tokens:
            fact = r"(?: The code of|\n) (\w+)(?: is |: )(\d{4})(?=\.|\n)"
            for key, value in re.findall(fact, decode(row)):
                seen_keys.add(key), seen_values.add(int(value))
    held_words = {decode(ids).strip() for ids in test.words}
    assert len(seen_keys) > 200 and len(seen_values) > 1000 and len(held_words) > 100
    assert not seen_keys & held_words and not any(held_out(word, 5) for word in seen_keys)
    assert not seen_values & {*test.values} and sorted(train.values + test.values) == list(range(10_000))
    assert all(len(ids) == 2 for ids in train.words + test.words)


def test_text_and_few_shot_lines_come_from_their_own_side_alone():
    text = {"train": task_file.one_side(documents()[::10], test=False), "test": task_file.text("test")}
    lines = {side: {line.strip() for doc in docs for line in doc.splitlines()} for side, docs in text.items()}
    for split, other in (("train", "test"), ("test", "train")):
        made, bos = tasks(split), ENCODING.decode([ENCODING.n_vocab - 1])
        assert decode(made.stream).split(bos)[1:] == text[split]
        shown = {decode(line) for kind in made.lines for line in kind}
        assert len(shown) > 50 and shown <= lines[split]
        assert {len(line) for kind in made.lines for line in kind} == {*range(4, 13)}
        assert not shown <= lines[other]  # so the two sides can be told apart


# ---- tasks ---


def rows(task, seed=0, B=6, T=400, split="test", **knobs):
    """For each row the batch, tokens, roles, facts as text, and questions as (text, answer) pairs."""
    batch = tasks(split).batch(task, seed, B, T, **knobs)
    spans = [*zip([batch.question] + [a.stop for a in batch.answers], batch.answers)]
    for tokens, roles, facts in zip(batch.tokens, batch.roles, batch.facts):
        asked = [(decode(tokens[start:a.start]), decode(tokens[a])) for start, a in spans]
        yield batch, tokens, roles, decode(tokens[facts]), asked


@pytest.mark.parametrize("split, facts, questions, numbers", [
    ("test", 1, 1, 1), ("train", 6, 6, 1), ("test", 4, 2, 3)])
def test_needle_is_determined_by_its_facts(split, facts, questions, numbers):
    knobs = dict(facts=facts, questions=questions) | (dict(numbers=numbers) if numbers > 1 else {})
    for batch, tokens, _, text, asked in rows("needle", split=split, **knobs):
        code = dict(re.findall(r"of (\w+) is (\d+)", text))
        assert text == "".join(f" The code of {key} is {value}." for key, value in code.items())
        values = [int(value[i:i + 4]) for value in code.values() for i in range(0, 4 * numbers, 4)]
        assert {len(value) for value in code.values()} == {4 * numbers}
        assert len({*values}) == len(values) == facts * numbers and {*values} <= {*tasks(split).values}
        keys = [re.fullmatch(r"\.?\nQ: The code of (\w+) is ", question)[1] for question, _ in asked]
        assert len({*keys}) == len(batch.answers) == questions
        assert [code[key] for key in keys] == [answer for _, answer in asked]
        assert decode(tokens[batch.answers[-1].stop:]) == "."


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_depth_places_the_fact_that_is_asked_for(depth):
    for _, tokens, roles, _, ((question, _),) in rows("needle", depth=depth, facts=5):
        fact = ENCODING.encode(question.removeprefix("\nQ:"))[:5]  # the code of, key
        at = next(i for i in range(len(tokens)) if tokens[i:i + 5].tolist() == fact)
        before, fill = (roles[:at] == TEXT).sum() - 1, (roles == TEXT).sum() - 1
        assert roles[at] == FACT and before == round(depth * fill)


@pytest.mark.parametrize("pairs, questions", [(16, 1), (2, 2), (30, 4)])
def test_recall_is_determined_by_its_facts(pairs, questions):
    for batch, _, roles, text, asked in rows("recall", pairs=pairs, questions=questions):
        assert re.fullmatch(r"(\n [a-z]+: \d{4}){%d}\n" % pairs, text)  # noqa: UP031
        assert np.ptp(np.flatnonzero(roles == FACT)) + 1 == (roles == FACT).sum()  # one block
        table = dict(re.findall(r"(\w+): (\d{4})", text))
        keys = [re.fullmatch(r"\nQ: (\w+): ", question)[1] for question, _ in asked]
        assert len(table) == pairs and len({*keys}) == len(batch.answers) == questions
        assert [table[key] for key in keys] == [answer for _, answer in asked]


def kind_of(line: str) -> int:
    (kind,) = (i for i, kind in enumerate(LINE_KINDS) if line.startswith(kind))
    return kind


@pytest.mark.parametrize("shots, classes", [(16, 4), (12, 8), (3, 5)])
def test_few_shot_is_determined_by_its_shots(shots, classes):
    for batch, _, _, text, ((question, answer),) in rows("few_shot", B=12, shots=shots, classes=classes):
        shown = re.findall(r"\n(.+) =>(\d\d)", text)
        assert len(shown) == shots and text == "".join(f"\n{line} =>{label}" for line, label in shown)
        label = {kind_of(line): label for line, label in shown}
        assert all(label[kind_of(line)] == one for line, one in shown)  # one label a class
        assert len({*label.values()}) == len(label) <= classes  # and one class a label
        assert label[kind_of(question[1:].removesuffix(" =>"))] == answer  # whose class has been shown
        assert batch.answers == [slice(399, 400)]


def test_few_shot_labels_are_drawn_anew_and_cannot_be_guessed():
    last = most = 0
    labels = [set() for _ in LINE_KINDS]
    for seed in range(200):
        ((*_, text, ((question, answer),)),) = rows("few_shot", seed, B=1, T=320)
        shown = re.findall(r" =>(\d\d)\n", text + "\n")
        last += shown[-1] == answer
        most += Counter(shown).most_common(1)[0][0] == answer
        labels[kind_of(question[1:])].add(answer)
    assert all(len(seen) > 10 for seen in labels)
    # chance is 1/4; the query is of one of 16 shots, which favours the most frequent label a little
    assert 0.16 < last / 200 < 0.36 and most / 200 < 0.42


def test_few_shot_in_training_asks_for_every_label_but_a_class_s_first():
    rng, arrow = np.random.default_rng(0), ENCODING.encode(" =>")[-1]
    for _ in range(20):
        tokens, roles = tasks("train").few_shot(rng, 400, shots=12, classes=3, every_label=True)
        ends = np.flatnonzero((tokens[:-1] == arrow) & (roles[:-1] == QUESTION)) + 1
        labels = [(tokens[i], roles[i]) for i in ends if 256 <= tokens[i] < 356]
        seen = [label in [one for one, _ in labels[:i]] for i, (label, _) in enumerate(labels)]
        assert len(labels) == 13 and [role for _, role in labels] == [ANSWER if x else QUESTION for x in seen]


def test_copy_repeats_the_passage():
    for batch, tokens, roles, _, _ in rows("copy", T=200, length=32, start=8, answer=16):
        passage = tokens[roles == FACT]
        assert len(passage) == 32 and passage.tobytes() in tasks("test").stream.astype(np.int64).tobytes()
        assert (tokens[batch.question:] == passage[:24]).all() and batch.answers == [slice(184, 200)]


@pytest.mark.parametrize("task", TASKS)
def test_rows_align_and_the_rest_is_real_text(task):
    test = tasks("test")
    stream = test.stream.astype(np.int64).tobytes()
    for T in (300, 513):
        batch = test.batch(task, 5, 4, T)
        assert batch.tokens.shape == batch.roles.shape == (4, T) and batch.tokens.dtype == np.int64
        inside = {i for a in batch.answers for i in range(a.start, a.stop)}
        for tokens, roles in zip(batch.tokens, batch.roles):
            assert {*np.flatnonzero(roles == ANSWER)} == inside
            assert roles[batch.question] == QUESTION and np.isin(roles[:batch.question], (TEXT, FACT)).all()
            assert np.isin(roles[batch.question:], (QUESTION, ANSWER)).all()
            text = tokens[roles == TEXT]
            assert text[0] == test.bos and text[1:].tobytes() in stream  # one passage, which facts interrupt


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_everything(task):
    one, again, other = (tasks("test").batch(task, seed, 4, 320) for seed in (0, 0, 1))
    assert (one.tokens == again.tokens).all() and (one.roles == again.roles).all()
    assert one.answers == again.answers
    assert (one.tokens != other.tokens).mean() > 0.5
    assert all((one.tokens[i] != one.tokens[j]).any() for i in range(4) for j in range(i))


@pytest.mark.parametrize("task", ["needle", "recall", "copy"])
def test_too_short_a_document_says_how_many_tokens_are_missing(task):
    make = getattr(tasks("test"), task)
    with pytest.raises(ValueError, match=r"need \d+ tokens more") as error:
        make(np.random.default_rng(0), 20)
    enough = 20 + int(re.search(r"\d+", str(error.value))[0])
    assert (make(np.random.default_rng(0), enough)[1] == TEXT).sum() == 1  # the BOS alone
    with pytest.raises(ValueError, match="need 1 tokens more"):
        make(np.random.default_rng(0), enough - 1)


@pytest.mark.parametrize("task, call, message", [
    ("recall", dict(pairs=5000), r"5000 keys asked for, but there are \d+ words"),
    ("recall", dict(questions=17), "questions 17 must be at most .* 16"),
    ("needle", dict(numbers=1000), "4 values of 1000 numbers asked for, but there are"),
    ("needle", dict(depth=1.5), "depth 1.5 must lie between 0"), ("needle", dict(facts=2.0), "facts 2.0 mu"),
    ("copy", dict(length=20, start=8, answer=13), "start 8 and answer 13 .* passage of 20"),
    ("few_shot", dict(shots=0), "shots 0 must be a whole number from 1 to 400"),
    ("few_shot", dict(classes=9), "classes 9 must be a whole number from 2 to 8"),
    ("few_shot", dict(B=2, every_label=True, shots=6, T=200), "1000 documents .* align .*; B 2 must be 1"),
    ("ids", {}, "task 'ids' is unknown; known are needle, recall"),
    ("plain", dict(seed=-1), "seed -1 must be a whole number from 0 to"),
    ("plain", dict(B=10 ** 30), r"1e\+30 documents of 400 tokens are more than memory .* at most 5368709"),
    ("plain", dict(B=0), "B 0"), ("plain", dict(T=0), "T 0"),
    ("plain", dict(T=10 ** 8), "100000000 tokens asked for, but the test text has")])
def test_what_cannot_be_asked_for_is_refused(task, call, message):
    with pytest.raises(ValueError, match=message):
        tasks("test").batch(task, **dict(seed=0, B=1, T=400) | call)


def test_a_tokenizer_without_two_digit_numbers_is_refused():
    ranks = {bytes([b]): b for b in range(256)}
    with pytest.raises(ValueError, match="tokens 256 to 355 are 00 to 99"):
        Tasks(Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={}), "test")


@pytest.mark.parametrize("task", ["needle", "recall"])
def test_unmarked_facts_say_the_same_without_a_token_that_ends_a_chunk(task):
    ends = boundaries(ENCODING, ENCODING.n_vocab).numpy()
    marked, plain = (made.batch(task, 3, 4, 400)
                     for made in (tasks("test"), task_file.Unmarked(ENCODING, "test")))
    for one, other in zip(marked.tokens, plain.tokens):
        assert one[marked.answers[0]].tolist() == other[plain.answers[0]].tolist()
    assert ends[marked.tokens[marked.facts]].any() and not ends[plain.tokens[plain.facts]].any()
    for batch in (marked, plain):
        batch.tokens[:, 1:3] = batch.tokens[:, batch.answers[0]]  # the same in the text, before the facts
        for row, facts, at in zip(batch.tokens, batch.facts, batch.stated):
            answer = row[batch.answers[0]].tolist()
            there = [facts[i:i + 2].all() and row[i:i + 2].tolist() == answer for i in range(batch.question)]
            assert at == there.index(True)
