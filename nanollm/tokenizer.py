"""Our tokenizer, a `tiktoken.Encoding`, and the tokenizers of other models.

Ours is BPE (arXiv 1508.07909) over bytes. In nanollm/tiny/tokenizer.tiktoken, tokens 0 to 255 are
the bytes, and 256 to 355 the two-digit numbers. Each of the others joins two tokens: the most
frequent neighbours in the training text (lab/corpus.py).
"""

import base64
from collections.abc import Callable, Iterable
from pathlib import Path

import tiktoken
import torch

# a word: letters or punctuation (with the space before it), at most two digits, or white space
PATTERN = r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+"
BOS = "<|bos|>"


def load(file: str | Path) -> tiktoken.Encoding:
    """Return the encoding in a .tiktoken file. Each line has a token in base64 and its rank.

    ValueError if a line is broken or a byte is missing. A file that has all bytes and was cut off
    between two lines looks whole here; `check_vocabulary` notices it.
    """
    lines = Path(file).read_bytes().splitlines()
    ranks = {}
    try:
        for line in lines:
            token, rank = line.split()
            token = base64.b64decode(token, validate=True)
            ranks[token] = int(rank)
    except ValueError:
        ranks = {}
    in_order = [*ranks.values()] == [*range(len(lines))]
    all_bytes = {bytes([b]) for b in range(256)}
    if not in_order or not ranks.keys() >= all_bytes:
        raise ValueError(
            f"{file} is damaged: its lines must be tokens in base64, all bytes among them, and "
            "their ranks 0, 1, …; copy the file again"
        )
    return tiktoken.Encoding(
        Path(file).stem,
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={BOS: len(ranks)},
    )


class Foreign:
    """A tokenizer of another model, with the part of tiktoken.Encoding's interface in use here.

    raw: a function from texts to their ids, in which the names of special tokens count as these.
    decode: from ids to text. n_vocab: how many ids. bos: the token that the model's own tokenizer
    puts before a text, or None. chat: a function from messages to the text of a chat. special: the
    ids of special tokens, which are no part of an answer.

    A piece of text is encoded as if a line break stood before it, unless the two
    would merge. Some tokenizers add a space at the start of a text.
    """

    def __init__(
        self,
        raw: Callable,
        decode: Callable,
        n_vocab: int,
        bos: int | None,
        chat: Callable,
        special: Iterable[int] = (),
    ):
        self.raw = raw
        self.decode = decode
        self.n_vocab = n_vocab
        self.bos = bos
        self.chat = chat
        self.special = {*special}
        self.line = self.raw(["\n"])[0]  # put before each piece; its tokens are cut off

    def turn(self) -> tuple[list[int], list[int]]:
        """Return the chat template's tokens before a user's words, and those after them.

        The latter end where the answer begins.
        """
        mark = "the user's words"
        try:
            chat = self.chat([dict(role="user", content=mark)])
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(
                f"the tokenizer has no chat template that works ({error})"
            ) from error
        before, words, after = chat.partition(mark)
        if not words:
            raise ValueError(
                "the tokenizer's chat template does not show the user's words"
            )
        return tuple(self.raw([before, after]))

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        n = len(self.line)
        pieces = []
        for text, ids in zip(texts, self.raw([f"\n{text}" for text in texts])):
            if ids[:n] == self.line:
                pieces.append(ids[n:])
            else:  # the line has grown together with the text
                pieces += self.raw([text])
        return pieces

    def encode_ordinary(self, text: str) -> list[int]:
        return self.encode_ordinary_batch([text])[0]

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.decode(ids).encode()


def opening(encoding, config) -> list[int]:
    """Return the tokens that every text begins with: [BOS] or [].

    Another model's tokenizer tells. With ours, the model's config.json tells. A model trained with
    BOS may give it much of the attention (a sink).
    """
    if isinstance(encoding, Foreign):
        return [] if encoding.bos is None else [encoding.bos]
    return [config.bos] if config.bos == encoding.n_vocab - 1 else []


def special_ids(encoding, config) -> set[int]:
    """Return the tokens that are no part of a text, such as the one that ends a turn."""
    return getattr(encoding, "special", {config.bos})


def check_vocabulary(encoding, vocab_size: int):
    """Raise ValueError unless the tokenizer suits a model with vocab_size token ids.

    A tiktoken encoding must have exactly vocab_size ids. With fewer, BOS would get another id.
    Another model's tokenizer may have fewer, because some models pad their vocabulary.
    """
    ids = encoding.n_vocab
    exact = isinstance(encoding, tiktoken.Encoding)
    if not ids or ids > vocab_size or exact and ids < vocab_size:
        raise ValueError(
            f"the tokenizer has {ids} token ids and the model {vocab_size}; they do not belong "
            "together, so copy both again"
        )


def boundaries(encoding, vocab_size: int) -> torch.Tensor:
    """Return (vocab_size,) of bool: tokens that contain a line break or end with . : ; ! or ?"""

    def ends(token: int) -> bool:
        try:
            piece = encoding.decode([token])
        except KeyError:  # a model's vocabulary may have more ids than the tokenizer
            return False
        return "\n" in piece or piece.endswith((".", ":", ";", "!", "?"))

    return torch.tensor([ends(token) for token in range(vocab_size)])
