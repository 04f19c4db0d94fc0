"""Byte-level BPE: a short trainer. The trained tokenizer runs as a `tiktoken.Encoding`.

At first each byte of a word is a token. The trainer makes the most frequent pair of neighbouring tokens one
token, and repeats this (Sennrich et al., arXiv 1508.07909). It updates its counts instead of recounting: only
words with the merged pair are touched, so 1024 tokens take seconds, not minutes.
"""
import base64
from collections import Counter, defaultdict
from os.path import isfile
from pathlib import Path

import regex
import tiktoken
import torch

# a word: letters or punctuation (with the space before it), at most two digits, or white space
PATTERN = r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+"
BOS = "<|bos|>"


def train(texts: list[str], vocab_size: int) -> dict[bytes, int]:
    """Return the ranks of vocab_size tokens: 256 bytes, 100 two-digit numbers, then the merges.

    Of equally frequent pairs the larger one is merged first.
    """
    if isinstance(texts, str):
        raise ValueError("texts are one string; give a list of strings")
    if not isinstance(vocab_size, int) or vocab_size < 356:
        raise ValueError(f"vocab_size {vocab_size} must be at least 356: 256 bytes and 100 two-digit numbers")
    ranks = {bytes([b]): b for b in range(256)}
    for number in range(100):  # two digits are always one token
        ranks[b"%02d" % number] = len(ranks)

    counts = Counter(word for text in texts for word in regex.findall(PATTERN, text))
    words = [[bytes([b]) for b in word.encode()] for word in counts if not word[0].isdigit()]
    times = [n for word, n in counts.items() if not word[0].isdigit()]  # how often each word occurs
    pairs, words_with = Counter(), defaultdict(set)  # how often a pair occurs, and in which words
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += times[i]
            words_with[pair].add(i)

    while len(ranks) < vocab_size and pairs:
        a, b = best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if not pairs[best]:  # every word is one token
            break
        ranks.setdefault(a + b, len(ranks))
        for i in words_with.pop(best):
            for pair in zip(words[i], words[i][1:]):
                pairs[pair] -= times[i]
            words[i] = merge(words[i], a, b)
            for pair in zip(words[i], words[i][1:]):
                pairs[pair] += times[i]
                words_with[pair].add(i)
        del pairs[best]
    return ranks


def merge(word: list[bytes], a: bytes, b: bytes) -> list[bytes]:
    """Return the word with each pair a, b joined to one token, from left to right."""
    out, i = [], 0
    while i < len(word):
        together = word[i] == a and word[i + 1:i + 2] == [b]
        out.append(a + b if together else word[i])
        i += 1 + together
    return out


def save(ranks: dict[bytes, int], path: str | Path):
    """Write tiktoken's file format. A line holds a token in base64, a space and its rank."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    Path(path).write_text("".join(lines))


def load(file: str | Path) -> tiktoken.Encoding:
    """Return the encoding in a .tiktoken file that `save` wrote.

    Raises ValueError with the file and the line if the file is broken. A file that was cut off between two
    lines looks whole here; `check_vocabulary` notices it.
    """
    if not isfile(file):
        raise ValueError(f"no tokenizer at {file}; give the path of a .tiktoken file")
    ranks = {}
    for line in Path(file).read_bytes().splitlines():
        try:
            token, rank = line.split()
            token, in_order = base64.b64decode(token, validate=True), int(rank) == len(ranks)
        except ValueError:
            in_order = False
        if not in_order or ranks.setdefault(token, len(ranks)) != int(rank):
            n = len(ranks)
            raise ValueError(f"line {n + 1} of {file}, {line!r:.60}, must be a new token in base64 and "
                             f"its rank {n}; copy the file again")
    if missing := {bytes([b]) for b in range(256)} - ranks.keys():
        raise ValueError(f"{file} has no token for the byte {ord(min(missing))}; copy the file again")
    return tiktoken.Encoding(Path(file).stem, pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens={BOS: len(ranks)})


class Foreign:
    """A tokenizer of transformers with the interface of tiktoken.Encoding.

    A piece of text is encoded as if a line stood before it, because some tokenizers add a space at the start
    of a text.
    """

    def __init__(self, tokenizer):
        self.hf, self.bos = tokenizer, tokenizer.bos_token_id
        self.n_vocab = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.decode = tokenizer.decode
        self.line = self.raw(["\n"])[0]  # put before each piece, and cut off its tokens

    def raw(self, texts: list[str]) -> list[list[int]]:
        return self.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def turn(self) -> tuple[list[int], list[int]]:
        """Return the chat template's tokens before a user's words, and after them up to the answer."""
        mark = "the user's words"
        try:
            chat = self.hf.apply_chat_template([dict(role="user", content=mark)], tokenize=False,
                                               add_generation_prompt=True)
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"the tokenizer has no chat template that can be used ({error}); leave --chat "
                             "out") from error
        before, words, after = chat.partition(mark)
        if not words:
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
    """Return the tokens that every text begins with: [BOS] or [].

    BOS is used if the tokenizer has it and the model's config.json names it. A model trained with BOS may
    give it much of the attention (a sink).
    """
    bos = encoding.bos if isinstance(encoding, Foreign) else encoding.n_vocab - 1
    return [bos] if bos is not None and bos == config.bos else []


def check_vocabulary(encoding, vocab_size: int):
    """Raise ValueError unless the tokenizer suits a model with vocab_size token ids.

    A tiktoken encoding must have exactly vocab_size ids. With fewer, the file was cut off, and BOS would get
    another id. A Hugging Face tokenizer may have fewer ids, because such models pad their vocabulary.
    """
    ids, exact = encoding.n_vocab, isinstance(encoding, tiktoken.Encoding)
    if not ids or ids > vocab_size or exact and ids < vocab_size:
        raise ValueError(f"the tokenizer has {ids} token ids and the model {vocab_size}; they do not belong "
                         "together, so copy both again")


def boundaries(encoding, vocab_size: int) -> torch.Tensor:
    """Return (vocab_size,) of bool: tokens that contain a line break or end with . : ; ! or ?

    encoding: any object with `decode`, such as tiktoken's or that of the tokenizers library.
    """
    def ends(token: int) -> bool:
        try:
            piece = encoding.decode([token])
        except KeyError:  # a model's vocabulary may be padded with ids that the tokenizer lacks
            return False
        return "\n" in piece or piece.endswith((".", ":", ";", "!", "?"))
    return torch.tensor([ends(token) for token in range(vocab_size)])
