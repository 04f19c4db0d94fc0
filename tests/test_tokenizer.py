"""The BPE trainer against the textbook's, and the shipped encoding as a lossless code."""
from collections import Counter
from pydoc_data.topics import topics
from types import SimpleNamespace

from hypothesis import given, settings, strategies as st
import pytest
import regex
import torch

from common import ENCODING
from nanollm import TINY
from nanollm.tokenizer import BOS, PATTERN, Foreign, boundaries, check_vocabulary, load, save, train

BASE = 356  # 256 bytes and 100 numbers
TEXT = topics["import"][:3000] + " aaaa aaaaa baaaa" * 40 + " nanana banana" * 30 + " née 12 123" * 20


def textbook(texts: list[str], merges: int) -> list[bytes]:
    """Sennrich et al.'s Algorithm 1: count every pair anew, merge the most frequent one everywhere, again."""
    found = [word for text in texts for word in regex.findall(PATTERN, text) if not word[0].isdigit()]
    words, new = [[bytes([b]) for b in word.encode()] for word in found], []
    while len(new) < merges:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not pairs:
            break
        a, b = max(pairs, key=lambda pair: (pairs[pair], pair))
        for word in words:
            for i in range(len(word)):
                if word[i:i + 2] == [a, b]:
                    word[i:i + 2] = [a + b]
        if a + b not in new:
            new.append(a + b)
    return new


def test_incremental_counts_equal_recounting_everything():
    ranks = train([TEXT[:2000], TEXT[2000:]], BASE + 250)
    assert list(ranks.values()) == list(range(BASE + 250))
    assert list(ranks)[BASE:] == textbook([TEXT[:2000], TEXT[2000:]], 250)


@given(st.lists(st.text("ab ", max_size=12), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_training_ends_when_no_pair_is_left(texts):
    """Few letters make many ties, overlaps and the same token by two ways."""
    assert list(train(texts, BASE + 40))[BASE:] == textbook(texts, 40)


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_every_text_comes_back(text):
    ids = ENCODING.encode_ordinary(text)
    assert ENCODING.decode(ids) == text
    assert all(i < ENCODING.n_vocab - 1 for i in ids)  # the last one is BOS, which no text can produce
    assert ENCODING.encode_ordinary(" 0799.")[1:-1] == [256 + 7, 256 + 99]  # two digits are one token


def test_saved_and_loaded_encoding_is_the_same(tmp_path):
    ranks = train([TEXT], BASE + 100)
    save(ranks, tmp_path / "new.tiktoken")
    encoding = load(tmp_path / "new.tiktoken")
    assert {token: encoding.encode_single_token(token) for token in ranks} == ranks
    assert (encoding.n_vocab, encoding.encode_single_token(BOS)) == (BASE + 101, BASE + 100)
    assert encoding.encode(BOS, allowed_special={BOS}) == [BASE + 100]
    assert BASE + 100 not in encoding.encode_ordinary(BOS)


LINES = (TINY / "tokenizer.tiktoken").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("change, message", [
    (lambda lines: lines[:200], "no token for the byte 200;"),
    (lambda lines: lines[:7] + lines[8:], r"line 8 of .*x.tiktoken, .*, must be .* its rank 7;"),
    (lambda lines: lines[:300] + [b"eHh4eHg= 299\n"] + lines[300:], "line 301 .* rank 300;"),  # a rank twice
    (lambda lines: lines[:300] + [b"CQ== 300\n"] + lines[301:], "line 301 "),  # a token twice
    (lambda lines: lines[:-1] + [lines[-1].split()[0]], "line 2047 "),  # cut before the last rank
    *((lambda lines, x=x: lines[:5] + [x] + lines[6:], "line 6 ") for x in (b"B 5\n", b"BQ== five\n"))])
def test_a_broken_file_is_refused_with_its_line(tmp_path, change, message):
    file = tmp_path / "x.tiktoken"
    file.write_bytes(b"".join(change(LINES)))
    with pytest.raises(ValueError, match=message) as error:
        load(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_fits_the_model_and_hugging_faces_may_be_shorter():
    check_vocabulary(ENCODING, 2048)
    for size in 2047, 2049:
        with pytest.raises(ValueError, match=f"tokenizer has 2048 token ids and the model {size}"):
            check_vocabulary(ENCODING, size)
    theirs = SimpleNamespace(n_vocab=10)
    check_vocabulary(theirs, 10), check_vocabulary(theirs, 64)
    with pytest.raises(ValueError, match="10 token ids and the model 9"):
        check_vocabulary(theirs, 9)
    with pytest.raises(ValueError, match="0 token ids"):
        check_vocabulary(SimpleNamespace(n_vocab=0), 9)


@pytest.mark.parametrize("call, message", [
    (lambda: load("nowhere/x.tiktoken"), "no tokenizer at nowhere/x.tiktoken"),
    (lambda: train(["text"], 355), "vocab_size 355 must be at least 356"),
    (lambda: train("text", 356), "texts are one string")])
def test_what_is_no_tokenizer_and_no_text_for_one_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert len(train(["text"], 356)) == 356


def test_nothing_that_stands_before_a_piece_for_a_foreign_tokenizer_stays_in_it():
    pieces = ["\n", "\n\n", "\t", "Q", ":"]  # two line breaks are one token

    class Merging:
        bos_token_id = None
        get_vocab = lambda self: {piece: i for i, piece in enumerate(pieces)}
        decode = lambda self, ids: "".join(pieces[i] for i in ids)

        def __call__(self, texts, **_):
            return dict(input_ids=[[*map(pieces.index, regex.findall("\n\n|.|\n", text))] for text in texts])

    encoding, texts = Foreign(Merging()), ["\nQ:", "Q:", "\n\nQ", "\t"]
    assert [encoding.decode(ids) for ids in encoding.encode_ordinary_batch(texts)] == texts


def test_a_boundary_is_a_token_with_a_line_break_or_a_mark_at_its_end():
    ends = [".", "is.", ":", " else:", ");", "x!", "?", "...", "\n", "\n\n    ", "\n    return", ".\n"]
    pieces = [*ends, "", "a", " is", ",", ".py", ": ", ")", "-", "\t", "\ufffd", "."]
    encoding = SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids))
    table = boundaries(encoding, len(pieces) - 1)  # no further than asked
    assert table.dtype == torch.bool and table.tolist() == [True] * len(ends) + [False] * 10

    table = boundaries(ENCODING, ENCODING.n_vocab + 3)
    ids = ENCODING.encode("The code of apple is 1234.\nQ: Why? A, b")
    assert [ENCODING.decode([i]) for i in ids if table[i]] == [".", "\n", ":", "?"]
    assert len(table) == 2051 and not table[-3:].any()  # padded
