"""Text is split without loss, and almost without overlap."""

from collections import Counter

import pytest

from common import ENCODING, decode, tasks
from lab import corpus


def paragraphs(doc: str) -> list[str]:
    """Line by line: a paragraph ends at a blank line before one that is not indented."""
    out = [[]]
    blank = False
    for line in doc.split("\n"):
        if blank and line and not line[0].isspace():
            out.append([])
        blank = not line.strip()
        out[-1].append(line)
    return ["\n".join(lines).rstrip() for lines in out if "".join(lines).strip()]


def counted(docs: list[str]) -> Counter:
    return Counter(paragraph for doc in docs for paragraph in paragraphs(doc))


def test_train_and_test_share_no_paragraph_and_lose_none():
    function = "def f():\n    first\n\n    second"
    rest = [f"line {i}" for i in range(200)]
    assert corpus.documents.__wrapped__() == corpus.documents()  # in one order
    docs = [*corpus.documents()[3::15], "\n\n".join([function, *rest])]
    train_docs = corpus.one_side(docs, test=False)
    test_docs = corpus.one_side(docs, test=True)
    train = counted(train_docs)
    test = counted(test_docs)
    assert train + test == counted(docs)
    # the hash is of a paragraph with its white space, which goes with the split
    assert len(train.keys() & test.keys()) < len(test) / 50
    assert 0.03 < test.total() / (train + test).total() < 0.07
    assert sum(function in doc for doc in train_docs + test_docs) == 1  # whole


def test_what_is_kept_of_the_text_is_what_training_never_reads():
    kept = counted(corpus.text("test")).keys()
    train = counted(corpus.text("train")).keys()
    words = {*corpus.words("test")}
    assert len(kept) > 500
    assert len(kept & train) < len(kept) / 100
    assert len(words) > 500
    assert not words & {*corpus.words("train")}
    # another Python has another text, mostly the same
    docs = corpus.documents()
    for part in "def namedtuple(", "Return a new array of given shape":
        assert any(part in doc for doc in docs)
    assert len(words & {*corpus.words_of(docs, test=True)}) > 500
    again = counted(corpus.one_side(docs, test=True)).keys()
    assert len(again & kept) > len(kept) / 2
    with pytest.raises(ValueError, match="split 'dev' is unknown"):
        corpus.text("dev")


@pytest.mark.parametrize("split", ["train", "test"])
def test_text_and_few_shot_lines_come_from_their_own_side_alone(split):
    docs = corpus.text("test")
    if split == "train":  # common.tasks: every tenth document
        docs = corpus.one_side(corpus.documents()[::10], test=False)
    made = tasks(split)
    bos = ENCODING.decode([made.bos])
    assert decode(made.stream).split(bos)[1:] == docs
    shown = sum(made.lines, [])
    assert {len(line) for line in shown} == {*range(4, 13)}
    shown = {decode(line) for line in shown}
    assert len(shown) > 50
    assert shown <= {line.strip() for doc in docs for line in doc.splitlines()}
