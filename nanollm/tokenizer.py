"""Byte-level BPE: a trainer worth reading, and the result run as a `tiktoken.Encoding`.

A word is a run of bytes. The most frequent pair of neighbouring tokens becomes one token, again and again
(Sennrich et al., arXiv 1508.07909). Counts are kept up to date instead of recounted: only the words that hold
the merged pair are touched, so 1024 tokens take seconds, not minutes.
"""
import base64
from collections import Counter, defaultdict
from os.path import isfile
from pathlib import Path

import regex
import tiktoken
import torch

# letters, punctuation (each with the space before it), at most two digits, white space
PATTERN = r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+"
BOS = "<|bos|>"


def train(texts: list[str], vocab_size: int) -> dict[bytes, int]:
    """Ranks of vocab_size tokens: 256 bytes, 100 two-digit numbers, merges. Ties: the larger pair."""
    if isinstance(texts, str):
        raise ValueError("texts are one string; give a list of them")
    if not isinstance(vocab_size, int) or vocab_size < 356:
        raise ValueError(f"vocab_size {vocab_size} must be at least 356: 256 bytes and 100 two-digit numbers")
    ranks = {bytes([b]): b for b in range(256)}
    for number in range(100):  # every two-digit number is one token, whatever the text
        ranks[b"%02d" % number] = len(ranks)

    counts = Counter(word for text in texts for word in regex.findall(PATTERN, text))
    words = [[bytes([b]) for b in word.encode()] for word in counts if not word[0].isdigit()]
    count = [c for word, c in counts.items() if not word[0].isdigit()]
    pairs, where = Counter(), defaultdict(set)  # how often a pair occurs, and in which words
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += count[i]
            where[pair].add(i)

    while len(ranks) < vocab_size and pairs:
        a, b = best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if not pairs[best]:  # every word is one token
            break
        ranks.setdefault(a + b, len(ranks))
        for i in where.pop(best):
            for pair in zip(words[i], words[i][1:]):
                pairs[pair] -= count[i]
            words[i] = merge(words[i], a, b)
            for pair in zip(words[i], words[i][1:]):
                pairs[pair] += count[i]
                where[pair].add(i)
        del pairs[best]
    return ranks


def merge(word: list[bytes], a: bytes, b: bytes) -> list[bytes]:
    """The word with every a b, from the left, made one token."""
    out, i = [], 0
    while i < len(word):
        together = word[i] == a and word[i + 1:i + 2] == [b]
        out.append(a + b if together else word[i])
        i += 1 + together
    return out


def save(ranks: dict[bytes, int], path: str | Path):
    """Write tiktoken's file format: base64 of the token, a space, its rank; one a line."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    Path(path).write_text("".join(lines))


def load(file: str | Path) -> tiktoken.Encoding:
    """Return the encoding in a .tiktoken file that `save` wrote.

    Raises ValueError naming a broken file and its line. Only `check_vocabulary` sees one cut at a line's end.
    """
    if not isfile(file):
        raise ValueError(f"no tokenizer at {file}")
    ranks = {}
    for line in Path(file).read_bytes().splitlines():
        try:
            token, rank = line.split()
            token, right = base64.b64decode(token, validate=True), int(rank) == len(ranks)
        except ValueError:
            right = False
        if not right or ranks.setdefault(token, len(ranks)) != int(rank):
            n = len(ranks)
            raise ValueError(f"line {n + 1} of {file}, {line!r:.60}, must be a new token in base64 and "
                             f"its rank {n}; copy the file again")
    if missing := {bytes([b]) for b in range(256)} - ranks.keys():
        raise ValueError(f"{file} has no token for the byte {ord(min(missing))}; copy the file again")
    return tiktoken.Encoding(Path(file).stem, pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens={BOS: len(ranks)})


class Foreign:
    """A tokenizer of transformers, called as a tiktoken.Encoding is.

    A piece is encoded as the middle of a text: some tokenizers put a space before what begins one.
    """

    def __init__(self, tokenizer):
        self.hf, self.bos = tokenizer, tokenizer.bos_token_id
        self.n_vocab = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.decode = tokenizer.decode
        self.line = self.raw(["\n"])[0]  # stands before each piece

    def raw(self, texts: list[str]) -> list[list[int]]:
        return self.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def turn(self) -> tuple[list[int], list[int]]:
        """What the chat template puts before a user's words, and between them and the answer."""
        mark = "the user's words"
        try:
            told = self.hf.apply_chat_template([dict(role="user", content=mark)], tokenize=False,
                                               add_generation_prompt=True)
        except Exception as error:  # the template is a program of the tokenizer's own
            raise ValueError(f"the tokenizer has no chat template that can be used ({error}); leave --chat "
                             "out") from error
        before, found, after = told.partition(mark)
        if not found:
            raise ValueError("the tokenizer's chat template does not show the user's words; leave --chat out")
        return tuple(self.raw([before, after]))

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [ids[len(self.line):] if ids[:len(self.line)] == self.line else self.raw([text])[0]
                for text, ids in zip(texts, self.raw([f"\n{text}" for text in texts]))]

    def encode_ordinary(self, text: str) -> list[int]:
        return self.encode_ordinary_batch([text])[0]

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.decode(ids).encode()


def opening(encoding, config) -> list[int]:
    """What a text begins with: BOS, if the tokenizer has it and the model's config.json names it, or nothing.

    A model that was trained so may give it a large part of its attention (a sink).
    """
    bos = encoding.bos if isinstance(encoding, Foreign) else encoding.n_vocab - 1
    return [bos] if bos is not None and bos == config.bos else []


def check_vocabulary(encoding, vocab_size: int):
    """ValueError unless this tokenizer is that of a model with vocab_size token ids.

    A tiktoken encoding must have as many: a file cut at a line's end looks whole, but its BOS is another.
    Hugging Face's may have fewer, as such models pad their vocabulary, but no id beyond it.
    """
    ids, exact = encoding.n_vocab, isinstance(encoding, tiktoken.Encoding)
    if not ids or ids > vocab_size or exact and ids < vocab_size:
        raise ValueError(f"the tokenizer has {ids} token ids and the model {vocab_size}; they do not belong "
                         "together, so copy both again")


def boundaries(encoding, vocab_size: int) -> torch.Tensor:
    """(vocab_size,) of bool: the tokens with a line break in them, or with . : ; ! ? at their end.

    Any encoding with a `decode` will do, tiktoken's or tokenizers'.
    """
    def ends(token: int) -> bool:
        try:
            piece = encoding.decode([token])
        except KeyError:  # a model's vocabulary may be padded with ids that no text has
            return False
        return "\n" in piece or piece.endswith((".", ":", ";", "!", "?"))
    return torch.tensor([ends(token) for token in range(vocab_size)])
