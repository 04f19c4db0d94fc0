"""The BPE trainer against the textbook's, and the shipped encoding as a lossless code."""
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

from hypothesis import given, settings, strategies as st
import pytest
import regex
import requests
import tiktoken
import torch

from nanollm import tokenizer
from nanollm.tokenizer import BOS, PATTERN, boundaries, check_vocabulary, load, merge, save, train

TINY = Path(tokenizer.__file__).parent / "tiny" / "tokenizer.tiktoken"
ENCODING = load(TINY)
BASE = 356  # 256 bytes and 100 numbers
TEXT = topics["import"][:3000] + " aaaa aaaaa baaaa" * 40 + " nanana banana" * 30 + " née 12 123" * 20


def textbook(texts: list[str], merges: int) -> list[bytes]:
    """Sennrich et al.'s Algorithm 1: count every pair anew, merge the most frequent one everywhere, again and again."""
    words = Counter(tuple(bytes([b]) for b in word.encode()) for text in texts for word in regex.findall(PATTERN, text)
                    if not word[0].isdigit())
    new = []
    while len(new) < merges:
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merged = Counter()
        for word, n in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i:i + 2] == best:
                    out.append(word[i] + word[i + 1])
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            merged[tuple(out)] += n
        words = merged
        token = b"".join(best)
        if token not in new:
            new.append(token)
    return new


def test_incremental_counts_equal_recounting_everything():
    ranks = train([TEXT[:2000], TEXT[2000:]], BASE + 250)
    assert list(ranks.values()) == list(range(BASE + 250))
    assert list(ranks)[BASE:] == textbook([TEXT[:2000], TEXT[2000:]], 250)
    assert b" banana" in ranks and b" aaaa" in ranks


@given(st.lists(st.text("ab ", max_size=12), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_training_ends_when_no_pair_is_left(texts):
    """Few letters make many ties, overlaps and the same token by two ways."""
    assert list(train(texts, BASE + 40))[BASE:] == textbook(texts, 40)


@pytest.mark.parametrize("word, merged", [("aaaa", "aa aa"), ("aaaaa", "aa aa a"), ("baab", "b aa b"), ("aba", "a b a")])
def test_merge_goes_from_the_left(word, merged):
    assert merge([bytes([b]) for b in word.encode()], b"a", b"a") == merged.encode().split()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_every_text_comes_back(text):
    ids = ENCODING.encode_ordinary(text)
    assert ENCODING.decode(ids) == text
    assert all(i < ENCODING.n_vocab - 1 for i in ids)  # the last one is BOS, which no text can produce


def test_every_two_digit_number_is_one_token():
    for n in range(100):
        assert ENCODING.encode_ordinary(f"{n:02d}") == [256 + n]
        assert ENCODING.encode_ordinary(f" {n:02d}{99 - n:02d}.")[1:-1] == [256 + n, 256 + 99 - n]


def test_saved_and_loaded_encoding_is_the_same(tmp_path):
    ranks = train([TEXT], BASE + 100)
    save(ranks, tmp_path / "new.tiktoken")
    encoding = load(tmp_path / "new.tiktoken")
    assert {token: encoding.encode_single_token(token) for token in ranks} == ranks
    assert (encoding.n_vocab, encoding.encode_single_token(BOS)) == (BASE + 101, BASE + 100)
    assert encoding.encode(BOS, allowed_special={BOS}) == [BASE + 100] and BASE + 100 not in encoding.encode_ordinary(BOS)


def test_tiktokens_own_encodings_by_name(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": ENCODING}.get)
    assert load("gpt2") is ENCODING


def test_a_failed_download_says_what_to_do(monkeypatch):
    def offline(name):
        raise requests.exceptions.ConnectionError("no route to host")
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match="downloads 'gpt2' once.*TIKTOKEN_CACHE_DIR"):
        load("gpt2")


LINES = TINY.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("change, message", [
    (lambda lines: [], "no token for the byte 0;"),
    (lambda lines: lines[:200], "no token for the byte 200;"),
    (lambda lines: lines[:7] + lines[8:], r"line 8 of .*x.tiktoken, .*, must be .* its rank 7;"),
    (lambda lines: lines[:300] + [b"eHh4eHg= 299\n"] + lines[300:], "line 301 .* rank 300;"),  # a rank twice
    (lambda lines: lines[:300] + [b"CQ== 300\n"] + lines[301:], "line 301 "),  # a token twice
    (lambda lines: [b"AA== -1\n"] + lines, "line 1 "),
    (lambda lines: lines[:-1] + [lines[-1][:-2]], "line 2047 "),  # cut within the last rank
    (lambda lines: lines[:-1] + [lines[-1].split()[0]], "line 2047 "),  # and before it
    (lambda lines: lines[:5] + [b"\n"] + lines[5:], "line 6 "),
    (lambda lines: lines[:5] + [b"B 5\n"] + lines[6:], "line 6 .* in base64"),
    (lambda lines: lines[:5] + [b"BQ== five\n"] + lines[6:], "line 6 "),
    (lambda lines: lines[:5] + [b"\xff\xfe 5\n"] + lines[6:], "line 6 "),
])
def test_a_broken_file_is_refused_with_its_line(tmp_path, change, message):
    file = tmp_path / "x.tiktoken"
    file.write_bytes(b"".join(change(LINES)))
    with pytest.raises(ValueError, match=message) as error:
        load(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_file_cut_at_a_lines_end_does_not_fit_the_model(tmp_path):
    (tmp_path / "cut.tiktoken").write_bytes(b"".join(LINES[:1000]))
    cut = load(tmp_path / "cut.tiktoken")  # whole by itself
    with pytest.raises(ValueError, match="tokenizer has 1001 token ids and the model 2048"):
        check_vocabulary(cut, 2048)
    check_vocabulary(ENCODING, 2048)
    for vocab_size in (2047, 2049):
        with pytest.raises(ValueError, match=f"2048 token ids and the model {vocab_size}"):
            check_vocabulary(ENCODING, vocab_size)


def test_hugging_faces_tokenizers_may_be_shorter_than_the_padded_model_and_never_longer():
    theirs = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "<added>": 9})
    check_vocabulary(theirs, 10), check_vocabulary(theirs, 64)
    with pytest.raises(ValueError, match="10 token ids and the model 9"):
        check_vocabulary(theirs, 9)
    with pytest.raises(ValueError, match="0 token ids"):
        check_vocabulary(SimpleNamespace(get_vocab=dict), 9)


@pytest.mark.parametrize("name, message", [
    ("gpt5000", "unknown tokenizer 'gpt5000'.*'gpt2'.*'cl100k_base'"),
    ("nowhere/x.tiktoken", "no tokenizer at nowhere/x.tiktoken"),
])
def test_an_unknown_name_or_file_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load(name)


def test_a_vocabulary_without_room_for_the_bytes_and_numbers_is_refused():
    with pytest.raises(ValueError, match="vocab_size 355 must be at least 356"):
        train(["text"], 355)
    assert len(train(["text"], 356)) == 356
    with pytest.raises(ValueError, match="vocab_size nan must be at least 356"):
        train(["text"], float("nan"))
    with pytest.raises(ValueError, match="texts are one string"):
        train("text", 356)


@pytest.mark.parametrize("piece, ends", [
    (".", 1), ("is.", 1), (":", 1), (" else:", 1), (");", 1), ("x!", 1), ("?", 1), ("...", 1), ("\n", 1), ("\n\n    ", 1),
    ("\n    return", 1), (".\n", 1), ("", 0), ("a", 0), (" is", 0), (",", 0), (".py", 0), (": ", 0), (")", 0), ("-", 0),
    ("\t", 0), ("\ufffd", 0)])
def test_a_boundary_is_a_token_with_a_line_break_or_a_mark_at_its_end(piece, ends):
    pieces = ["x", piece, "x", "."]
    table = boundaries(SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids)), 3)  # no further than asked
    assert table.dtype == torch.bool and table.tolist() == [False, bool(ends), False]


def test_boundaries_of_the_shipped_encoding():
    table = boundaries(ENCODING, ENCODING.n_vocab)
    for token in range(ENCODING.n_vocab):
        piece = ENCODING.decode_single_token_bytes(token)
        assert table[token] == (b"\n" in piece or piece[-1:] in (b".", b":", b";", b"!", b"?"))
    ids = ENCODING.encode("The code of apple is 1234.\nQ: Why? A, b")
    assert [ENCODING.decode([i]) for i in ids if table[i]] == [".", "\n", ":", "?"]
    assert boundaries(ENCODING, ENCODING.n_vocab + 3).tolist() == [*table.tolist(), *[False] * 3]  # a padded vocabulary
