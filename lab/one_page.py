"""Show which tokens of a page a method keeps, and its answer: python -m nanollm generate."""

from codecs import getincrementaldecoder
from collections.abc import Callable
import os
from pathlib import Path
import sys

import torch
from torch import Tensor

from lab.kept import held
from lab.replay import feed
from lab.retrieval import answers
from nanollm.cache import Slots, compress, crop, make_cache
from nanollm.tokenizer import opening

# four facts among other sentences, and a question about one of them
PAGE = (Path(__file__).parents[1] / "nanollm" / "page.txt").read_text("utf8")
QUESTION = "\nQ: The code of table is "
ANSWER = "2356"
FACT = f" The code of table is {ANSWER}."
# finds the fact aware, loses it agnostic
METHOD = "snap_kv"
BUDGET = 32
NEW = 12  # tokens of an answer in `explore`

SETTINGS = {
    "aware": "Question known",
    "agnostic": "Question later",
}


# ---- read, compress, answer ----


def prompt(model, encoding, page: str, question: str) -> tuple[Tensor, dict[str, int]]:
    """Return the tokens (1, T) of page and question, and how many each setting compresses.

    In both settings the last token is fed after the compression.
    """
    context = opening(encoding, model.config) + encoding.encode_ordinary(page)
    tokens = context + encoding.encode_ordinary(question)
    cuts = dict(aware=len(tokens) - 1, agnostic=len(context))
    return torch.tensor([tokens], device=model.embed.weight.device), cuts


@torch.no_grad()
def answer(
    model, tokens: Tensor, cut: int, caches: list[Slots], new: int
) -> tuple[Tensor, list[int]]:
    """Compress the first `cut` of tokens (1, T), feed the others, then decode `new` tokens.

    The others are fed as in `as_decoded`, and decoding is greedy. Returns whether each head holds
    each of the first `cut` tokens right after the compression, (L, H, cut) of bool, and the new
    tokens.
    """
    T = tokens.shape[1]
    aware = cut == T - 1  # then the last token is read, too, and fed again
    feed(model, tokens if aware else tokens[:, :cut], caches)
    crop(caches, cut)
    compress(model, tokens[:, :cut], caches)
    kept = held(caches, cut)[0]
    (written,) = answers(model, tokens, [slice(T, T + new)], cut, caches)
    return kept, written[0].tolist()


def check_length(model, text: str, tokens: Tensor):
    """Raise ValueError if there is no text, or if tokens (1, T) and an answer are too long."""
    n = len(tokens[0]) + NEW
    longest = model.config.max_len
    if not text.strip() or n > longest:
        raise ValueError(
            f"text, question and answer have {n} tokens; the text must have at least 1 token, "
            f"and all together at most {longest}"
        )


# ---- the page as text, and as a figure ----


def pieces(encoding, tokens: list[int]) -> list[str]:
    """Return one string per token. A character of several tokens stands at its last token."""
    decoder = getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(encoding.decode_bytes([token])) for token in tokens]


def marked(encoding, tokens: list[int], gone: list[bool], dim: bool) -> str:
    """Return the text of tokens; evicted ones are dimmed or, if `dim` is False, in [brackets]."""
    before, after = ("\033[2m", "\033[0m") if dim else ("[", "]")
    text = ""
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or gone[end] != gone[start]:
            run = encoding.decode(tokens[start:end])
            text += f"{before}{run}{after}" if gone[start] else run
            start = end
    return text


def demonstrate(model, encoding, name: str, make: Callable, figure=None):
    """Print the page with the tokens marked that no head keeps, and the answers in both settings.

    make: returns new caches of the method `name`. figure: file for a picture of the page; a token
    is darker if more heads keep it.
    """
    tokens, cuts = prompt(model, encoding, PAGE, QUESTION)
    new = len(encoding.encode_ordinary(ANSWER))
    _, written = answer(model, tokens, cuts["aware"], make_cache(model), new)
    full = encoding.decode(written)
    dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    panels = {}
    for setting, cut in cuts.items():
        kept, written = answer(model, tokens, cut, make(), new)
        own = encoding.decode(written)
        shares = kept.float().mean((0, 1)).tolist() + [1e-9] * (tokens.shape[1] - cut)
        gone = [share == 0 for share in shares]
        said = f"{name} answers {own}, the full cache {full}"
        panels[f"{SETTINGS[setting]}: {said}"] = shares
        print(
            f"{SETTINGS[setting]}\n\n{marked(encoding, tokens[0].tolist(), gone, dim)}\n\n"
            f"{sum(gone)} of {cut} tokens are evicted from all heads; they are "
            f"{'dimmed' if dim else 'in [brackets]'}. "
            f"On average a head keeps {100 * kept.float().mean():.0f} % of the tokens.\n"
            f"Right answer: {ANSWER}; {said}\n",
            flush=True,
        )
    if figure:
        page = cuts["agnostic"]
        end = page - len(encoding.encode_ordinary(PAGE.partition(FACT)[2]))
        start = end - len(encoding.encode_ordinary(FACT))
        fact = [start <= i < end for i in range(tokens.shape[1])]
        picture(encoding, tokens[0].tolist(), panels, figure, fact)


def shares(caches: list[Slots], tokens: int) -> list[float]:
    """Return which share of the heads holds each of the first `tokens` tokens of text 0."""
    return held(caches, tokens)[0].float().mean((0, 1)).tolist()


def picture(
    encoding, tokens: list[int], panels: dict[str, list[float]], file: Path, marked=None
):
    """Draw a text once per panel, side by side: title → the share of heads that keep each token."""
    from lab import plot  # matplotlib takes a second to import

    figure = plot.text(
        pieces(encoding, tokens),
        panels,
        marked,
        low="kept by no head",
        mark="the fact asked for",
        columns=len(panels),
        width=112 // len(panels),
    )
    plot.save(figure, file)
