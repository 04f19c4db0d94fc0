"""python -m nanollm explore: write a page in which a decoder runs and forgets.

The page, docs/index.html, is one file and works without network or installation. Its parts are in
lab/explorer/.
"""

import argparse
from base64 import b64encode
from contextlib import suppress
from copy import deepcopy
import json
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from lab import command_line
from lab.loading import calibrated, loaded
from lab.methods_by_name import Variant, pick
from lab.one_page import NEW, PAGE, QUESTION, answer, check_length, pieces, prompt
from lab.retrieval import budget_for
from lab.table import SHOWN
from nanollm.cache import bytes_in_16_bits
from nanollm.model import rope_frequencies

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PARTS = Path(__file__).parent / "explorer"
MARK = b'<meta name="generator" content="python -m nanollm explore">'
KEEPS = 75, 50, 25, 12.5, 6.25, 3.125  # percent of the text's tokens
WINDOW = 8  # queries that SnapKV observes
LIVE = {  # the methods of methods.js
    "full": ("Full cache", "keeps every entry"),
    "random": ("Random", "keeps entries drawn at random"),
    "streaming_llm": ("StreamingLLM", "keeps the first 4 tokens and the newest"),
    "h2o": ("H2O", "keeps the newest, and the entries with the most attention so far"),
    "snap_kv": ("SnapKV", "keeps the entries to which the last 8 tokens attend"),
    "key_diff": ("KeyDiff", "keeps the keys least like the mean key"),
    "kvzip": (
        "KVzip",
        "reads the text twice and keeps the entries used while repeating it",
    ),
}
# Python's result
STORED = {"full@2": ("2 bits", "keeps every entry, with numbers of 2 bits")}


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a matrix to 8 bits. Return codes (n, m) of int8 and scales (n,)."""
    weight = weight.detach().float().cpu()
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


@torch.no_grad()
def rounded_model(model):
    """Return a copy of the decoder in 64 bits whose matrices are rounded as in the page."""
    copy = deepcopy(model)
    for weight in copy.parameters():
        if weight.dim() == 2:
            code, scale = rounded(weight)
            weight.copy_(code * scale[:, None])
    return copy.double()


def packed(model, encoding) -> tuple[dict, bytes]:
    """Return the decoder as lab/explorer/decoder.js reads it: what it is, and its weights.

    All 32-bit numbers come first (norms, and a scale for each row of a matrix), then the matrices
    in 8 bits.
    """
    c = model.config
    parameters = sum(p.numel() for p in model.parameters())
    small = isinstance(encoding, tiktoken.Encoding) and parameters < 4e6
    plain = not (c.qkv_bias or c.o_bias or c.mlp_bias) and c.tie_embeddings
    if not small or not plain or c.family != "llama":
        raise ValueError(
            "this model is too large or of another form than nanollm/tiny; give --text FILE, "
            "and the page shows stored results of this model"
        )
    tensors = []
    floats = []
    codes = []
    for name, weight in model.named_parameters():
        tensors.append([name, list(weight.shape)])
        if weight.dim() == 2:
            code, weight = rounded(weight)
            codes.append(code)
        floats.append(weight.detach().float().cpu())
    data = b"".join(x.numpy().tobytes() for x in floats + codes)
    ranks = [
        b64encode(encoding.decode_single_token_bytes(i)).decode()
        for i in range(encoding.n_vocab - 1)
    ]
    return dict(
        config=vars(c) | dict(freq=rope_frequencies(c).tolist()),
        tensors=tensors,
        ranks=ranks,
    ), data


@torch.no_grad()
def view(
    model,
    encoding,
    variant: Variant,
    keep: float,
    setting: str,
    text: str,
    question: str,
    **learned,
) -> dict:
    """Return what the page shows of one method: entries, bytes after the answer, and the answer.

    keep: percent of the text's tokens. learned: options that the method has learned of the decoder.
    kept: one bit for each head and token, in base64.
    """
    tokens, cuts = prompt(model, encoding, text, question)
    cut = cuts[setting]
    budget = budget_for(keep / 100, cuts["agnostic"])
    caches = variant.caches(model, budget=budget, window_size=WINDOW, **learned)
    kept, written = answer(model, tokens, cut, caches, NEW)
    bits = np.packbits(kept.flatten().cpu().numpy(), bitorder="little")
    return dict(
        kept=b64encode(bits).decode(),
        n=cut,
        bytes=bytes_in_16_bits(caches),
        written=written,
        answer=encoding.decode(written),
    )


def views(model, encoding, methods: dict, text: str, question: str) -> dict[str, dict]:
    """Return the view of each method, keep ratio and setting as {"snap_kv 25 aware": view}.

    A combination that a method refuses, such as a budget below its window, is left out.
    """
    shown = {}
    for name, variant in tqdm(methods.items(), leave=False, disable=None):
        learned = calibrated(variant, model, encoding)
        for setting in "aware", "agnostic":
            for keep in KEEPS:
                with suppress(ValueError):
                    if keep == KEEPS[0] or variant.takes("budget"):
                        last = view(
                            model,
                            encoding,
                            variant,
                            keep,
                            setting,
                            text,
                            question,
                            **learned,
                        )
                    shown[f"{name} {keep:g} {setting}"] = last
    return shown


def curve() -> list[dict]:
    """Return the stored rows of `python -m nanollm --all`: share of the full cache's bytes, and
    accuracy."""
    rows = json.loads((ROOT / "lab/stored/all.json").read_text())["rows"]
    full = rows[0]["live_16"]
    return [
        dict(
            method=row["method"],
            keep=100 * (row["keep_ratio"] or 1),
            share=row["live_16"] / full,
            aware=row["aware"],
            agnostic=row["agnostic"],
        )
        for row in rows
    ]


def stored(model, encoding, name: str, text: str, question: str, methods: dict) -> dict:
    """Return what the page shows of a decoder that does not run in it: the methods' results."""
    tokens, cuts = prompt(model, encoding, text, question)
    c = model.config
    return dict(
        name=name,
        live=False,
        keeps=KEEPS,
        text=text,
        question=question.strip("\n"),
        new=NEW,
        tokens=pieces(encoding, tokens[0].tolist()),
        cut=cuts["agnostic"],
        views=views(model, encoding, methods, text, question),
        heads=[c.n_layers, c.n_kv_heads],
        vocab=c.vocab_size,
        methods=[[key, *(LIVE | STORED).get(key, (key, ""))] for key in methods],
    )


def live(model, encoding, name: str, text: str, question: str) -> tuple[dict, bytes]:
    """Return what the page shows of a decoder that runs in it, and its weights."""
    model_data, weights = packed(model, encoding)
    data = stored(
        rounded_model(model), encoding, name, text, question, pick([*LIVE, *STORED])
    )
    return data | dict(
        live=True,
        model=model_data | dict(methods=list(LIVE)),
        curve=curve(),
    ), weights


def page(data: dict, weights: bytes = b"") -> str:
    """Return the whole page, which shows `stored` or `live` results."""

    def read(file: str) -> str:
        return (PARTS / file).read_text()

    contents = dict(
        STYLE=read("style.css"),
        DATA=json.dumps(data).replace("</", "<\\/"),
        PAGE=read("page.js"),
        WORKER=read("decoder.js") + read("methods.js"),
        WEIGHTS=b64encode(weights).decode(),
    )
    text = read("index.html")
    for part, content in contents.items():
        before, _, after = text.partition(f"/*{part}*/")
        text = before + content + after
    return text


def main(argv: list[str]):
    args = read_options(argv)
    command_line.check_output(args.out, "page", lambda data: MARK in data)
    text = PAGE
    if args.text is not None:
        text = command_line.read_text(args.text).strip("\n")
    question = "\n" + args.question
    model, encoding = loaded(args)
    check_length(model, text, prompt(model, encoding, text, question)[0])

    some = pick([*LIVE, *STORED])
    name = args.model.name
    weights = b""
    if args.text is None:
        data, weights = live(model, encoding, name, text, question)
    else:
        data = stored(model, encoding, name, text, question, pick(SHOWN))
    if args.beside:
        name = args.beside.name
        other = loaded(args, args.beside)
        data["beside"] = stored(*other, name, text, question, some)
    out = page(data, weights).encode()
    command_line.replace(args.out, out)
    print(f"{args.out}: {len(out) / 1e6:.1f} MB; open it in a browser")


def read_options(argv: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nanollm explore",
        description="Write a web page that shows what some methods keep of a text and what they "
        "answer. The decoder runs in the page. With --text, the page shows stored results "
        "instead. docs/index.html is of: python -m nanollm explore --beside smollm2",
    )
    option = parser.add_argument
    option(
        "--out",
        type=Path,
        default=(DOCS if DOCS.is_dir() else Path()) / "index.html",
        metavar="FILE",
        help="file to write; default docs/index.html, in an installed copy index.html",
    )
    option(
        "--text",
        type=Path,
        metavar="FILE",
        help="store the results of the main methods on this text, for a model of any size",
    )
    option(
        "--beside",
        type=Path,
        metavar="MODEL",
        help="another model, as --model names it, whose stored results the page also shows",
    )
    option("--question", default=QUESTION.strip("\n"), help="default: %(default)r")
    command_line.model_options(parser)
    return parser.parse_args(argv)
