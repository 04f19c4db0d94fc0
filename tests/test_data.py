"""Text is split without loss or overlap, and every question has one answer that the facts determine."""
from collections import Counter
from functools import cache
import re

import numpy as np
import pytest
from tiktoken import Encoding

from nanollm import data
from nanollm.data import ANSWER, FACT, LINE_KINDS, QUESTION, TEXT, Tasks, documents, held_out
from nanollm.tokenizer import boundaries, load
from nanollm.train import TINY

ENCODING = load(TINY / "tokenizer.tiktoken")
TASKS = "needle", "recall", "few_shot", "copy"


@cache
def tasks(split: str) -> Tasks:
    """Those of the library, but for training on every tenth document: to encode all takes 8 s."""
    with pytest.MonkeyPatch.context() as patch:
        if split == "train":
            pool = documents()[::10]
            patch.setattr(data, "documents", lambda: pool)
            patch.setattr(data, "text", data.text.__wrapped__)
            patch.setattr(data, "words", data.words.__wrapped__)
        return Tasks(ENCODING, split)


def decode(tokens) -> str:
    return ENCODING.decode([int(t) for t in tokens])


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


def pool(monkeypatch, docs):
    monkeypatch.setattr(data, "documents", lambda: docs)
    monkeypatch.setattr(data, "text", data.text.__wrapped__)


def test_train_and_test_share_no_paragraph_and_lose_none(monkeypatch):
    pool(monkeypatch, documents()[3::15])
    train, test = (Counter(p for doc in data.text(split) for p in paragraphs(doc)) for split in ("train", "test"))
    assert not train.keys() & test.keys()
    # white space at a paragraph's end goes with the split; nothing else may change
    strip = lambda counts: Counter(p.rstrip() for p in counts.elements() if p.strip())
    assert strip(train + test) == strip(Counter(p for doc in data.documents() for p in paragraphs(doc)))
    assert 0.03 < test.total() / (train + test).total() < 0.07


def test_a_function_stays_whole(monkeypatch):
    function, rest = "def f():\n    first\n\n    second", "\n\n".join(f"line {i}" for i in range(200))
    pool(monkeypatch, [function + "\n\n" + rest])
    assert sum(function in doc for split in ("train", "test") for doc in data.text(split)) == 1


def test_documents_are_the_pool_and_come_in_one_order():
    assert documents.__wrapped__() == documents()
    assert sum(map(len, documents())) > 5e6
    for part in ('The "import" statement', "def namedtuple(", "Return a new array of given shape"):  # topics, source, docstrings
        assert any(part in doc for doc in documents())


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split 'dev' is unknown"):
        data.text("dev")


def test_words_and_values_of_the_test_split_are_never_keys_or_values_in_training():
    train, test = tasks("train"), tasks("test")
    seen_keys, seen_values = set(), set()
    for task in ("needle", "recall"):
        for row in train.batch(task, 1, 150, 512).tokens:
            keys, values = zip(*re.findall(r"(?: The code of|\n) (\w+)(?: is |: )(\d{4})(?=\.|\n)", decode(row)))
            seen_keys |= {*keys}
            seen_values |= {*map(int, values)}
    held_words = {decode(ids).strip() for ids in test.words}
    assert len(seen_keys) > 200 and len(seen_values) > 1000 and len(held_words) > 100
    assert not seen_keys & held_words and not any(held_out(word, 5) for word in seen_keys)
    assert not seen_values & {*test.values} and sorted(train.values + test.values) == list(range(10_000))
    assert all(len(ids) == 2 for ids in train.words + test.words)


@pytest.mark.parametrize("split, other", [("train", "test"), ("test", "train")])
def test_text_and_few_shot_lines_come_from_their_own_side_alone(split, other, monkeypatch):
    pool(monkeypatch, documents()[3::15])
    monkeypatch.setattr(data, "words", data.words.__wrapped__)
    both = {side: data.text(side) for side in (split, other)}
    lines = {side: {line.strip() for doc in text for line in doc.splitlines()} for side, text in both.items()}
    made, bos = Tasks(ENCODING, split), ENCODING.decode([ENCODING.n_vocab - 1])
    assert decode(made.stream).split(bos)[1:] == both[split]
    shown = {decode(line) for kind in made.lines for line in kind}
    assert len(shown) > 50 and shown <= lines[split]
    assert not shown <= lines[other]  # so the two sides can be told apart


# ---- tasks ---


def rows(task, seed=0, B=6, T=400, split="test", **knobs):
    """For each row the batch, its tokens and roles, its facts as text, its questions as (text, answer) pairs."""
    batch = tasks(split).batch(task, seed, B, T, **knobs)
    starts = [batch.question] + [a.stop for a in batch.answers]
    for tokens, roles, facts in zip(batch.tokens, batch.roles, batch.facts):
        asked = [(decode(tokens[start:a.start]), decode(tokens[a])) for start, a in zip(starts, batch.answers)]
        yield batch, tokens, roles, decode(tokens[facts]), asked


@pytest.mark.parametrize("facts, questions", [(4, 1), (1, 1), (8, 5), (6, 6)])
def test_needle_is_determined_by_its_facts(facts, questions):
    for batch, tokens, _, text, asked in rows("needle", facts=facts, questions=questions):
        assert re.fullmatch(r"( The code of [a-z]+ is \d{4}\.){%d}" % facts, text)
        code = dict(re.findall(r"of (\w+) is (\d{4})", text))
        keys = [re.fullmatch(r"\.?\nQ: The code of (\w+) is ", question)[1] for question, _ in asked]
        assert len(code) == facts and len({*keys}) == len(batch.answers) == questions
        assert [code[key] for key in keys] == [answer for _, answer in asked]
        assert decode(tokens[batch.answers[-1].stop:]) == "."


@pytest.mark.parametrize("numbers", [2, 3])
def test_a_value_is_as_many_different_numbers_of_its_side_as_asked_for(numbers):
    for split in ("train", "test"):
        for *_, text, ((question, answer),) in rows("needle", split=split, numbers=numbers):
            code = dict(re.findall(r"of (\w+) is (\d{%d})\." % (4 * numbers), text))
            values = [int(value[i:i + 4]) for value in code.values() for i in range(0, 4 * numbers, 4)]
            assert len(code) == 4 and len({*values}) == len(values) == 4 * numbers and {*values} <= {*tasks(split).values}
            assert code[question.split()[-2]] == answer


def test_documents_of_one_number_are_those_drawn_without_the_knob():
    (rng, default, one), test = (np.random.default_rng(5) for _ in range(3)), tasks("test")
    keys = rng.choice(len(test.words), 7, replace=False)
    expected = [(test.words[k], [256 + n // 100, 256 + n % 100])
                for k, n in zip(keys, rng.choice(test.values, 7, replace=False))]
    assert test.pairs(default, 7) == test.pairs(one, 7, 1) == expected
    assert rng.random() == default.random() == one.random()


@pytest.mark.parametrize("pairs, questions", [(16, 1), (2, 2), (30, 4)])
def test_recall_is_determined_by_its_facts(pairs, questions):
    for batch, _, roles, text, asked in rows("recall", pairs=pairs, questions=questions):
        assert re.fullmatch(r"(\n [a-z]+: \d{4}){%d}\n" % pairs, text)
        assert np.ptp(np.flatnonzero(roles == FACT)) + 1 == (roles == FACT).sum()  # one block
        table = dict(re.findall(r"(\w+): (\d{4})", text))
        keys = [re.fullmatch(r"\nQ: (\w+): ", question)[1] for question, _ in asked]
        assert len(table) == pairs and len({*keys}) == len(batch.answers) == questions
        assert [table[key] for key in keys] == [answer for _, answer in asked]


def kind_of(line: str) -> int:
    (kind,) = (i for i, kind in enumerate(LINE_KINDS) if line.startswith(kind))
    return kind


@pytest.mark.parametrize("shots, classes", [(16, 4), (10, 2), (12, 8), (3, 5)])
def test_few_shot_is_determined_by_its_shots(shots, classes):
    for batch, _, _, text, ((question, answer),) in rows("few_shot", B=12, shots=shots, classes=classes):
        shown = re.findall(r"\n(.+) =>(\d\d)", text)
        assert len(shown) == shots and text == "".join(f"\n{line} =>{label}" for line, label in shown)
        label = {kind_of(line): label for line, label in shown}
        assert all(label[kind_of(line)] == one for line, one in shown)  # one label a class
        assert len({*label.values()}) == len(label) <= classes  # and one class a label
        assert label[kind_of(question[1:].removesuffix(" =>"))] == answer  # so the query's class has been shown
        assert batch.answers == [slice(399, 400)]


def test_few_shot_labels_are_drawn_anew_and_cannot_be_guessed():
    last = most = 0
    labels = [set() for _ in LINE_KINDS]
    for seed in range(300):
        ((*_, text, ((question, answer),)),) = rows("few_shot", seed, B=1, T=320)
        shown = re.findall(r" =>(\d\d)\n", text + "\n")
        last += shown[-1] == answer
        most += Counter(shown).most_common(1)[0][0] == answer
        labels[kind_of(question[1:])].add(answer)
    assert all(len(seen) > 15 for seen in labels)
    # chance is 1/4; the query is one of 16 shots of 4 or 5 a class, which favours the most frequent one a little
    assert 0.18 < last / 300 < 0.34 and most / 300 < 0.4


def test_few_shot_in_training_asks_for_every_label_but_a_class_s_first():
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens, roles = tasks("train").few_shot(rng, 400, shots=12, classes=3, every_label=True)
        ends = np.flatnonzero((tokens[:-1] == ENCODING.encode(" =>")[-1]) & (roles[:-1] == QUESTION)) + 1
        labels = [(tokens[i], roles[i]) for i in ends if 256 <= tokens[i] < 356]
        assert len(labels) == 13
        assert [role for _, role in labels] == [
            ANSWER if label in [one for one, _ in labels[:i]] else QUESTION for i, (label, _) in enumerate(labels)]


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
        batch = test.batch(task, 5, 6, T)
        assert batch.tokens.shape == batch.roles.shape == (6, T) and batch.tokens.dtype == np.int64
        inside = np.zeros(T, dtype=bool)
        for a in batch.answers:
            inside[a] = True
        for tokens, roles in zip(batch.tokens, batch.roles):
            assert ((roles == ANSWER) == inside).all()
            assert roles[batch.question] == QUESTION and np.isin(roles[:batch.question], (TEXT, FACT)).all()
            assert np.isin(roles[batch.question:], (QUESTION, ANSWER)).all()
            text = tokens[roles == TEXT]
            assert text[0] == test.bos and text[1:].tobytes() in stream  # one passage, which the facts interrupt


def test_documents_have_the_length_asked_for():
    rng = np.random.default_rng(0)
    for task in (*TASKS, "plain"):
        for T in range(290, 330):
            tokens, roles = getattr(tasks("test"), task)(rng, T)
            assert tokens.shape == roles.shape == (T,)


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_depth_places_the_fact_that_is_asked_for(depth):
    for _, tokens, roles, _, ((question, _),) in rows("needle", depth=depth, facts=5):
        fact = ENCODING.encode(question.removeprefix("\nQ:"))[:5]  # the code of, key
        at = next(i for i in range(len(tokens)) if tokens[i:i + 5].tolist() == fact)
        before, fill = (roles[:at] == TEXT).sum() - 1, (roles == TEXT).sum() - 1
        assert roles[at] == FACT and before == round(depth * fill)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_everything(task):
    one, again, other = (tasks("test").batch(task, seed, 4, 320) for seed in (0, 0, 1))
    assert (one.tokens == again.tokens).all() and (one.roles == again.roles).all() and one.answers == again.answers
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


@pytest.mark.parametrize("task, knobs, message", [
    ("recall", dict(pairs=5000), r"5000 keys asked for, but there are \d+ words"),
    ("needle", dict(numbers=0), "numbers 0 must be a whole number of at least 1"), ("needle", dict(numbers=-1), "numbers -1"),
    ("copy", dict(length=20, start=8, answer=13), "start 8 and answer 13 .* passage of 20"),
    ("copy", dict(start=-1), "start -1 must be"), ("recall", dict(questions=17), "questions 17 must be at most .* 16"),
    ("needle", dict(depth=1.5), "depth 1.5 must lie between 0"), ("needle", dict(facts=2.0), "facts 2.0 must be a whole"),
    ("needle", dict(numbers=1000), "4 values of 1000 numbers asked for, but there are"),
    ("few_shot", dict(shots=0), "shots 0 must be a whole number from 1 to 400"),
    ("few_shot", dict(classes=1), "classes 1 must be a whole number from 2 to 8"),
    ("few_shot", dict(classes=9), "classes 9 must be a whole number from 2 to 8"),
])
def test_bad_knobs_are_refused(task, knobs, message):
    with pytest.raises(ValueError, match=message):
        tasks("test").batch(task, 0, 1, 400, **knobs)


@pytest.mark.parametrize("call, message", [
    (("nedle", 0, 1, 400), "task 'nedle' is unknown; known are needle, recall"), (("ids", 0, 1, 400), "task 'ids'"),
    (("plain", -1, 1, 400), "seed -1 must be a whole number from 0 to"), (("plain", 2 ** 63, 1, 400), "seed 9223372036854775808"),
    (("plain", 0, 10 ** 30, 400), r"1e\+30 documents of 400 tokens are more than memory holds; ask for at most 5368709"),
    (("plain", 0, 0, 400), "B 0"), (("plain", 0, 1, 0), "T 0"), (("plain", 0, 1, 40.0), "T 40.0 must be a whole number"),
    (("plain", 0, 1, 10 ** 8), "100000000 tokens asked for, but the test text has"),
])
def test_bad_batches_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        tasks("test").batch(*call)


def test_documents_that_never_align_are_an_error():
    with pytest.raises(ValueError, match="1000 documents of few_shot in a row do not align with the first; B 2 must be 1"):
        tasks("test").batch("few_shot", 0, 2, 400, every_label=True)
    assert tasks("test").batch("few_shot", 0, 1, 400, every_label=True).tokens.shape == (1, 400)


def test_a_tokenizer_without_two_digit_numbers_is_refused():
    bytes_alone = Encoding("bytes", pat_str=".", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={})
    for other in (bytes_alone, "gpt2"):
        with pytest.raises(ValueError, match="tokens 256 to 355 are 00 to 99"):
            Tasks(other, "test")


@cache
def unmarked() -> data.Unmarked:
    return data.Unmarked(ENCODING, "test")


@pytest.mark.parametrize("task", ["needle", "recall"])
def test_stated_is_where_the_facts_first_have_the_answer(task):
    for source in (tasks("test"), unmarked()):
        batch = source.batch(task, 3, 4, 400)
        batch.tokens[:, 1:3] = batch.tokens[:, batch.answers[0]]  # the same in the text, before the facts
        for row, facts, at in zip(batch.tokens, batch.facts, batch.stated):
            answer = row[batch.answers[0]].tolist()
            places = [i for i in range(batch.question) if row[i:i + 2].tolist() == answer and facts[i:i + 2].all()]
            assert at == places[0]


@pytest.mark.parametrize("task", ["needle", "recall"])
def test_unmarked_facts_hold_no_token_that_ends_a_chunk_and_are_otherwise_the_same(task):
    ends = boundaries(ENCODING, ENCODING.n_vocab).numpy()
    marked, plain = (source.batch(task, 3, 4, 400) for source in (tasks("test"), unmarked()))
    for one, other in zip(marked.tokens, plain.tokens):
        assert one[marked.answers[0]].tolist() == other[plain.answers[0]].tolist()
    assert ends[marked.tokens[marked.facts]].any() and not ends[plain.tokens[plain.facts]].any()
