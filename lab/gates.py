"""Ask how well Fast KVzip's gates serve, by the text that they have learned from.

    python -m lab.gates                                        # nanollm/tiny
    python -m lab.gates --model smollm2 --files news.txt       # half an hour

Gates learn from the training text (train), from texts that the decoder writes itself, token by token at
temperature 1 (own), and from each file. Then other documents are compressed, and the question comes later.

    texts    texts of 512 tokens to learn from; 0: KVzip's own scores, which need a second reading
    rank     Spearman's rank correlation with KVzip's scores in a head, mean over all heads, on held-out texts
    needle, pairs, few_shot    fraction of right answers, ± one standard error
"""
import argparse
from itertools import product
import json
from pathlib import Path
import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from lab.benchmark import BATCH, TASKS, cut
from lab.command_line import check_output, command, model_options, read_text, replace
from lab.evaluate import maker, mean_and_error, prompt_and_question, retrieve
from lab.processes import spread
from lab.registry import loaded
from lab.replay import Recorder, record
from lab.tasks import Tasks
from lab.text_table import text_table
from methods.baselines.kvzip import KVzip
from methods.baselines.kvzip_fast import FastKVzip, fit, lessons
from nanollm.cache import LayerCache, make_cache
from nanollm.check import whole
from nanollm.generate import generate

T = 512                         # tokens of a text and of a document
COUNTS = dict(train=(1, 4, 16, 64))  # texts to learn from
OTHER = 4, 16                   # the same for other kinds of text


def own_texts(model, bos: int) -> SimpleNamespace:
    """Return texts that the decoder writes, begun with one token, in the place of `Tasks`."""
    start = torch.full((max(OTHER), 1), bos)
    texts = torch.cat((start, generate(model, start, T - 1, temperature=1.0)), 1).numpy()
    return SimpleNamespace(batch=lambda *_: SimpleNamespace(tokens=texts))


def rank_correlation(gates: Tensor, x: Tensor, y: Tensor) -> list[float]:
    """Return each layer's mean over heads of Spearman's correlation; x and y are those of `lessons`."""
    rank = lambda z: z.argsort(1).argsort(1).double()
    a, b = (rank(z) - (z.shape[1] - 1) / 2 for z in (x @ gates[:, :-1] + gates[:, -1:], y))
    return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean(1).tolist()


@torch.no_grad()
def rows(model, encoding, files: dict[str, str], keeps: list[float], documents: int) -> list[dict]:
    """Return a row for each gates and keep ratio. files: texts by name."""
    bos = Tasks(encoding, "test").bos
    kinds = dict(train=lambda: Tasks(encoding, "train"), own=lambda: own_texts(model, bos))
    kinds |= {name: lambda text=text: Tasks(encoding, "train", text) for name, text in files.items()}

    def learned(kind: str) -> dict[tuple[str, int], Tensor]:
        counts = COUNTS.get(kind, OTHER)
        x, y = lessons(model, kinds[kind](), max(counts), T)
        return {(kind, n): fit(*(z[:, :n * z.shape[1] // max(counts)] for z in (x, y))) for n in counts}

    def asked(task: str) -> list[Tensor]:
        parts = [part for batch in Tasks(encoding, "test").batches(task, 0, documents, T)
                 for part in cut(batch, BATCH)]
        right = []
        for part in parts:
            caches = make_cache(model, Recorder)
            prompt = [record(model, caches, tokens) for tokens in prompt_and_question(model, part)[1:]]
            makes = [maker(model, Method, keep, **options) for _, Method, options, keep in tried]
            right.append([retrieve(model, part, make, prompt, settings=("agnostic",))["agnostic"]
                          for make in makes])
        return [*map(torch.cat, zip(*right))]

    gates = {name: found for group in spread(learned, kinds) for name, found in group.items()}
    held_out = lessons(model, Tasks(encoding, "test"), 8, T, seed=5)
    tried = [("full", LayerCache, {}, None)] + [("KVzip", KVzip, {}, keep) for keep in keeps]
    tried += [(name, FastKVzip, dict(gates=x), keep) for (name, x), keep in product(gates.items(), keeps)]
    answers = dict(zip(TASKS, spread(asked, TASKS)))
    found = []
    for i, (name, _, options, keep) in enumerate(tried):
        kind, texts = name if options else (name, 0)
        row = dict(kind=kind, texts=texts, keep_ratio=keep,
                   ranks=rank_correlation(options["gates"], *held_out) if options else None)
        for task, right in answers.items():
            row[task], row[f"{task}_se"] = mean_and_error(right[i])
        found.append(row)
    return found


def show(rows: list[dict]) -> str:
    """Return the rows as a text table."""
    cells = [["learned from", "texts", "keep", "rank", *TASKS]]
    for row in rows:
        keep, ranks = row["keep_ratio"], row["ranks"]
        right = (f"{row[task]:.2f} ± {row[f'{task}_se']:.2f}" for task in TASKS)
        cells.append([row["kind"], str(row["texts"]), f"{100 * keep:g} %" if keep else "",
                      f"{sum(ranks) / len(ranks):.2f}" if ranks else "", *right])
    return text_table(cells)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m lab.gates", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model_options(parser)
    parser.add_argument("--files", nargs="+", type=Path, default=[], metavar="TEXT", help="text files")
    parser.add_argument("--keep", nargs="+", type=float, default=[25, 12.5, 6.25], metavar="PERCENT",
                        help="keep ratios in percent; default 25 12.5 6.25")
    parser.add_argument("--documents", type=int, default=64, help="documents of each task; default 64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the rows to")
    args = parser.parse_args(argv)
    whole("documents", args.documents, 2)
    if args.json:
        check_output(args.json, "rows", lambda data: b'"ranks"' in data)
    files = {file.stem: read_text(file) for file in args.files}
    model, encoding = loaded(args)
    measured = rows(model, encoding, files, [keep / 100 for keep in args.keep], args.documents)
    print(show(measured))
    if args.json:
        replace(args.json, json.dumps(measured, indent=1).encode())


if __name__ == "__main__":
    command(main, sys.argv[1:])
