"""The shipped encoding is a lossless code, and what is no tokenizer is refused."""

from types import SimpleNamespace

from hypothesis import given, settings, strategies as st
import pytest
import regex
import torch

from common import ENCODING
from nanollm import TINY
from nanollm.tokenizer import BOS, Foreign, boundaries, check_vocabulary, load


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_every_text_comes_back(text):
    ids = ENCODING.encode_ordinary(text)
    assert ENCODING.decode(ids) == text
    # the last one is BOS, which no text can produce
    assert all(i < ENCODING.n_vocab - 1 for i in ids)


def test_two_digits_are_one_token_and_bos_is_no_text():
    assert ENCODING.encode_ordinary(" 0799.")[1:-1] == [256 + 7, 256 + 99]
    assert ENCODING.encode(BOS, allowed_special={BOS}) == [2047]
    assert 2047 not in ENCODING.encode_ordinary(BOS)


LINES = (TINY / "tokenizer.tiktoken").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:200],
        lambda lines: lines[:300] + [b"eHh4eHg= 299\n"] + lines[300:],  # a rank twice
        lambda lines: lines[:300] + [b"CQ== 300\n"] + lines[301:],  # a token twice
        lambda lines: lines[:-1] + [lines[-1].split()[0]],  # cut before the last rank
        lambda lines: lines[:5] + [b"B 5\n"] + lines[6:],
    ],
)
def test_a_broken_file_is_refused(tmp_path, change):
    file = tmp_path / "x.tiktoken"
    file.write_bytes(b"".join(change(LINES)))
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        load(file)


def test_a_tokenizer_fits_the_model_and_hugging_faces_may_be_shorter():
    theirs = SimpleNamespace(n_vocab=10)
    check_vocabulary(ENCODING, 2048)
    check_vocabulary(theirs, 64)
    for encoding, size in (ENCODING, 2047), (ENCODING, 2049), (theirs, 9):
        with pytest.raises(ValueError, match=f"token ids and the model {size}"):
            check_vocabulary(encoding, size)


def test_nothing_that_stands_before_a_piece_for_a_foreign_tokenizer_stays_in_it():
    pieces = ["\n", "\n\n", "\t", "Q", ":"]  # two line breaks are one token

    def ids_of(text):
        return [pieces.index(piece) for piece in regex.findall("\n\n|.|\n", text)]

    def raw(texts):
        return [ids_of(text) for text in texts]

    def decode(ids):
        return "".join(pieces[i] for i in ids)

    encoding = Foreign(raw, decode, len(pieces), None, None)
    texts = ["\nQ:", "Q:", "\n\nQ", "\t"]
    batch = encoding.encode_ordinary_batch(texts)
    assert [encoding.decode(ids) for ids in batch] == texts


def test_a_boundary_is_a_token_with_a_line_break_or_a_mark_at_its_end():
    ends = [".", "is.", ":", " else:", ");", "x!", "?", "..."]
    ends += ["\n", "\n\n    ", "\n    return", ".\n"]
    pieces = [*ends, "", "a", " is", ",", ".py", ": ", ")", "-", "\t", "\ufffd", "."]
    encoding = SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids))
    table = boundaries(encoding, len(pieces) - 1)  # no further than asked
    assert table.dtype == torch.bool
    assert table.tolist() == [True] * len(ends) + [False] * 10

    table = boundaries(ENCODING, ENCODING.n_vocab + 3)
    ids = ENCODING.encode("The code of apple is 1234.\nQ: Why? A, b")
    assert [ENCODING.decode([i]) for i in ids if table[i]] == [".", "\n", ":", "?"]
    assert len(table) == 2051
    assert not table[-3:].any()  # padded
