"""Show which tokens of a page a method keeps, and its answer: python -m nanollm generate."""

from codecs import getincrementaldecoder
import os
import sys

import torch
from torch import Tensor

from nanollm.cache import compress, crop, make_cache
from nanollm.generate import tell_chunk_ends
from lab.evaluate import answers, feed, held
from nano import ANSWER, PAGE, QUESTION
from nanollm.tokenizer import boundaries, opening

FACT = f" The code of table is {ANSWER}."
METHOD, BUDGET = "snap_kv", 32  # finds the fact aware, loses it agnostic
NEW = 4  # tokens of an answer in `explore`

SETTINGS = {
    "aware": "the question is part of the prompt that is compressed",
    "agnostic": "the question comes after the page is compressed",
}


def prompt(model, encoding, page: str, question: str) -> tuple[Tensor, dict[str, int]]:
    """Return the tokens (1, T) of page and question, and for each setting how many of them are compressed.

    In both settings the last token is fed after the compression.
    """
    context = opening(encoding, model.config) + encoding.encode_ordinary(page)
    tokens = context + encoding.encode_ordinary(question)
    cuts = dict(aware=len(tokens) - 1, agnostic=len(context))
    return torch.tensor([tokens], device=model.embed.weight.device), cuts


@torch.no_grad()
def answer(
    model, tokens: Tensor, cut: int, caches: list, new: int
) -> tuple[Tensor, list[int]]:
    """Compress the first `cut` of tokens (1, T), feed the others, then decode `new` tokens.

    The others are fed one by one, and decoding is greedy. Returns whether each head holds each of
    the first `cut` tokens right after the compression, (L, H, cut) of bool, and the new tokens.
    """
    # the last token is read, too, and fed again after the compression
    aware = cut == tokens.shape[1] - 1
    feed(model, tokens[:, : cut + aware], caches)
    crop(caches, cut)
    compress(model, tokens[:, :cut], caches)
    kept, T = held(caches, cut)[0], tokens.shape[1]
    (written,) = answers(model, tokens, [slice(T, T + new)], cut, caches)
    return kept, written[0].tolist()


def compressed(
    model, encoding, Method, options: dict, tokens: Tensor, cut: int, new: int = NEW
) -> tuple[list, Tensor, list[int]]:
    """Return a method's caches, and what `answer` returns."""
    caches = make_cache(model, Method, **options)
    tell_chunk_ends(
        caches, boundaries(encoding, model.config.vocab_size)[tokens.cpu()][:, :cut]
    )
    return caches, *answer(model, tokens, cut, caches, new)


def check_length(model, text: str, tokens: Tensor):
    """Raise ValueError if there is no text, or if tokens (1, T) and an answer are too long."""
    n, longest = len(tokens[0]) + NEW, model.config.max_len
    if not text.strip() or n > longest:
        raise ValueError(
            f"text, question and answer have {n} tokens; the text must have at least 1 token, "
            f"and all together at most {longest}"
        )


def pieces(encoding, tokens: list[int]) -> list[str]:
    """Return one string per token. A character that several tokens share stands at its last token."""
    decoder = getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(encoding.decode_bytes([token])) for token in tokens]


def marked(encoding, tokens: list[int], gone: list[bool], dim: bool) -> str:
    """Return the text of tokens, with evicted ones dimmed or, if `dim` is False, in [brackets]."""
    before, after = ("\033[2m", "\033[0m") if dim else ("[", "]")
    text, start = "", 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or gone[end] != gone[start]:
            run = encoding.decode(tokens[start:end])
            text += f"{before}{run}{after}" if gone[start] else run
            start = end
    return text


def demonstrate(model, encoding, name: str, Method, options: dict, figure=None):
    """Print the page and mark its evicted tokens, aware and agnostic; print the answers and the
    full cache's.

    figure: file for a picture of the page; a token is darker if more heads keep it.
    """
    (tokens, cuts), new = (
        prompt(model, encoding, PAGE, QUESTION),
        len(encoding.encode_ordinary(ANSWER)),
    )
    full = encoding.decode(
        answer(model, tokens, cuts["aware"], make_cache(model), new)[1]
    )
    dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    panels = {}
    for setting, cut in cuts.items():
        _, kept, written = compressed(
            model, encoding, Method, options, tokens, cut, new
        )
        shares = kept.float().mean((0, 1)).tolist() + [1.0] * (tokens.shape[1] - cut)
        gone, own = [share == 0 for share in shares], encoding.decode(written)
        panels[
            f"{setting}: {SETTINGS[setting]}; {name} answers {own}, the full cache {full}"
        ] = shares
        print(
            f"{setting}: {SETTINGS[setting]}\n\n{marked(encoding, tokens[0].tolist(), gone, dim)}\n\n"
            f"{sum(gone)} of {cut} tokens are evicted from all heads; they are "
            f"{'dimmed' if dim else 'in [brackets]'}. "
            f"On average a head keeps {100 * kept.float().mean():.0f} % of the tokens.\n"
            f"Right answer: {ANSWER}; the full cache answers {full}, {name} answers {own}\n",
            flush=True,
        )

    # the page, once per setting; the fact that answers the question is underlined
    if figure:
        from lab import plot  # matplotlib takes a second to import

        words, end = pieces(encoding, tokens[0].tolist()), cuts["agnostic"]
        end -= len(encoding.encode_ordinary(PAGE.partition(FACT)[2]))
        start = end - len(encoding.encode_ordinary(FACT))
        fact = [start <= i < end for i in range(tokens.shape[1])]
        picture = plot.text(
            words,
            panels,
            fact,
            low="kept by no head",
            mark="the fact asked for",
            width=120,
        )
        plot.save(picture, figure)
