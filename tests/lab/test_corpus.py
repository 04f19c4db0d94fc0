"""Text is split without loss or overlap."""

from collections import Counter

import pytest

from common import ENCODING, decode, tasks
from lab import corpus


def paragraphs(doc: str) -> list[str]:
    """Line by line: a paragraph ends at a blank line before one that is not indented."""
    out, blank = [[]], False
    for line in doc.split("\n"):
        if blank and line and not line[0].isspace():
            out.append([])
        blank = not line.strip()
        out[-1].append(line)
    return ["\n".join(lines).rstrip() for lines in out if "".join(lines).strip()]


def test_train_and_test_share_no_paragraph_and_lose_none():
    function, rest = (
        "def f():\n    first\n\n    second",
        "\n\n".join(f"line {i}" for i in range(200)),
    )
    docs = [*corpus.documents()[3::15], function + "\n\n" + rest]
    sides = [corpus.one_side(docs, side) for side in (False, True)]
    train, test, both = (
        Counter(p for doc in some for p in paragraphs(doc)) for some in (*sides, docs)
    )
    # the hash is of a paragraph with its white space, which goes with the split
    assert len(train.keys() & test.keys()) < len(test) / 50 and train + test == both
    assert 0.03 < test.total() / both.total() < 0.07
    assert sum(function in doc for side in sides for doc in side) == 1  # whole


def test_what_is_kept_of_the_text_is_what_training_never_reads():
    kept, train = (
        {p for doc in corpus.text(side) for p in paragraphs(doc)}
        for side in ("test", "train")
    )
    words = {*corpus.words("test")}
    assert len(kept) > 500 and len(kept & train) < len(kept) / 100
    assert len(words) > 500 and not words & {*corpus.words("train")}
    # another Python has another text, mostly the same
    assert len({*corpus.words_of(corpus.documents(), test=True)} & words) > 500
    again = {
        p
        for doc in corpus.one_side(corpus.documents(), test=True)
        for p in paragraphs(doc)
    }
    assert len(again & kept) > len(kept) / 2
    with pytest.raises(ValueError, match="split 'dev' is unknown"):
        corpus.text("dev")


def test_documents_are_topics_source_and_docstrings_in_one_order():
    docs = corpus.documents()
    assert corpus.documents.__wrapped__() == docs and sum(map(len, docs)) > 5e6
    for part in (
        'The "import" statement',
        "def namedtuple(",
        "Return a new array of given shape",
    ):
        assert any(part in doc for doc in docs)


@pytest.mark.parametrize("split", ["train", "test"])
def test_text_and_few_shot_lines_come_from_their_own_side_alone(split):
    some = split == "train"  # common.tasks: every tenth document
    docs = (
        corpus.one_side(corpus.documents()[::10], test=False)
        if some
        else corpus.text("test")
    )
    made, bos = tasks(split), ENCODING.decode([ENCODING.n_vocab - 1])
    assert decode(made.stream).split(bos)[1:] == docs
    shown = {decode(line) for kind in made.lines for line in kind}
    assert len(shown) > 50 and shown <= {
        line.strip() for doc in docs for line in doc.splitlines()
    }
    assert {len(line) for kind in made.lines for line in kind} == {*range(4, 13)}
