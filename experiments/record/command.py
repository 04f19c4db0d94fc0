"""python -m nanollm record: find the smallest file of a compressed cache that answers questions asked later.

    python -m nanollm record kvzip_4 quantized_2    methods of this repository, at several keep ratios
    python -m nanollm record --file mine.py         a method of yours, in one file
    python -m nanollm record kvzip_4 --keep 6.25 --store    and write what qualifies into RECORDS.md

One process reads a text, and its compressed cache becomes a file. Another process gets this file and the
questions, never the text, and answers with the decoder. Both are locked in (worker.py). The size of a method
is the file's length over that of a full cache in 16 bits: nothing is taken from what a method says of itself.

A size counts if at least 95 % of the full cache's right answers remain, on each task and each shipped
decoder, with p < .01 (one-sided). The texts are drawn from a seed made of the method's files and a random
salt, so no method can know them; --salt repeats a run. The time until the first token may be twice the full
cache's. Without --keep, the keep ratio is halved until the answers no longer suffice.
"""
import argparse
import ast
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import date
from hashlib import sha256
import inspect
import json
import math
from multiprocessing import get_context
from pathlib import Path
import secrets
from statistics import NormalDist, fmean, median, stdev
import time
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.record.worker import FAILED, ROOT, TOKENS, as_bytes, numbers, serve
from experiments.script import grouped
from nanollm import SHIPPED, TINY, tokenizer
from nanollm.check import whole
from nanollm.commands import shell
from nanollm.commands.registry import has_budget, pick
from nanollm.commands.text_table import text_table
from nanollm.hf.checkpoint import read_config
from nanollm.measure.benchmark import cut
from nanollm.measure.evaluate import full_cache_bytes
from nanollm.measure.hard_tasks import HardTasks
from nanollm.measure.tasks import Batch

TASKS = "needle", "pairs", "turns"  # later questions that both shipped decoders answer
ENOUGH, SURE = 0.95, 0.01
SLOWEST = 2.0                       # most of the time to the first token, over the full cache's
RATIOS = 25, 12.5, 6.25, 3.125, 1.5625
LEAST = 256                         # texts of each task that an entry in RECORDS.md needs
FIRST = 32                          # texts of a task, after which a hopeless row stops
STORED, PAGE = ROOT / "experiments" / "stored" / "records.json", ROOT / "RECORDS.md"


class Answered(NamedTuple):
    """What came of one text."""
    right: float = 0.0    # share of the questions answered right
    size: int = 0         # bytes of the file
    readings: int = 0     # how often the decoder read the text
    reading: float = 0.0  # seconds until the file was there
    first: float = 0.0    # seconds from the question to the first token
    step: float = 0.0     # seconds a token after it
    error: str = ""       # why there is no answer


class Pair:
    """A reading and an answering process of one entrant on one decoder.

    name: a method of this repository, or None if `code` is that of a file from elsewhere.
    """

    def __init__(self, folder: Path, name: str | None, keep: float | None, code: bytes = b""):
        context = get_context("spawn")
        self.code, self.pipes, self.processes = code, [], []
        for reads in (True, False):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, reads, folder, name, keep), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            try:
                pipe.recv_bytes()
            except EOFError:
                raise ValueError(f"{name} cannot be made on this decoder; the lines above say "
                                 "why") from None

    def close(self):
        for pipe, process in zip(self.pipes, self.processes):
            pipe.close()
            process.join()

    def job(self, reads: bool, parts: list[bytes]) -> list[tuple[float, bytes]]:
        """Send a job; return its messages and the seconds after which they came. RuntimeError if it fails."""
        pipe, began, found = self.pipes[not reads], time.perf_counter(), []
        pipe.send([self.code, *parts])
        while message := pipe.recv_bytes():
            if message.startswith(FAILED):
                while pipe.recv_bytes():  # until the job's end
                    pass
                raise RuntimeError(message[len(FAILED):].decode(errors="replace"))
            found.append((time.perf_counter() - began, message[1:]))
        return found

    def answered(self, batch: Batch) -> Answered:
        """Let one process read the text of a batch with one row, and the other answer its questions."""
        tokens, fed, asked, sizes = batch.tokens[0], batch.question, [], [batch.question]
        for answer in batch.answers:
            asked.append(tokens[fed:answer.start])
            sizes += [answer.start - fed, answer.stop - answer.start]
            fed = answer.stop
        expected = [tokens[a].tolist() for a in batch.answers]
        try:
            ((reading, file),) = self.job(True, [as_bytes(tokens[:batch.question])])
            (readings,), file = numbers(file[:4]), file[4:]
            said = self.job(False, [as_bytes(sizes), as_bytes(np.concatenate(asked)), file])
        except (RuntimeError, ValueError) as error:
            return Answered(error=str(error))
        words = iter([token for _, message in said for token in numbers(message)])
        right = [[next(words, None) for _ in answer] == answer for answer in expected]
        steps = (said[-1][0] - said[0][0]) / max(len(said) - 1, 1)
        return Answered(fmean(right), len(file), readings, reading, said[0][0], steps)


# ---- judging ---

def short_by(row: list[Answered], full: list[Answered]) -> tuple[float, float, float]:
    """Return the share of the full cache's right answers kept, its error, and p of "at most ENOUGH kept"."""
    beyond = [x.right - ENOUGH * y.right for x, y in zip(row, full)]
    answered = fmean(x.right for x in full)
    mean, error = fmean(beyond), stdev(beyond) / math.sqrt(len(beyond))
    if error == 0:
        return ENOUGH + mean / answered, 0.0, float(mean <= 0)
    return ENOUGH + mean / answered, error / answered, 1 - NormalDist().cdf(mean / error)


def imported(node: ast.Import | ast.ImportFrom, name: str) -> tuple[str, ...]:
    """Return which modules a statement may import with one of its names."""
    return (name,) if isinstance(node, ast.Import) else (str(node.module), f"{node.module}.{name}")


def sources(content: bytes) -> bytes:
    """Return the content of a method's file, and of every file in methods/ that it imports, in turn."""
    found, new = {}, {Path(): content}
    while new:
        found |= new
        names = [name for content in new.values() for node in ast.walk(ast.parse(content))
                 if isinstance(node, (ast.Import, ast.ImportFrom))
                 for x in node.names for name in imported(node, x.name)]
        files = {ROOT / name.replace(".", "/") for name in names if name.startswith("methods.")}
        files = {file.with_suffix(".py") for file in files} - found.keys()
        new = {file: file.read_bytes() for file in sorted(files) if file.exists()}
    return b"".join(found.values())


def seed_of(content: bytes, salt: str) -> int:
    """Return the seed of the texts for a method's file and a salt."""
    return int.from_bytes(sha256(sources(content) + salt.encode()).digest()[:4], "big")


def texts(encoding, seed: int, documents: int) -> dict[str, list[Batch]]:
    """Return for each task its documents, in batches of one row."""
    made = HardTasks(encoding, "test")
    return {task: cut(made.batch(task, seed, documents, TOKENS), 1) for task in TASKS}


def measured(entrant: tuple, folder: Path, asked: dict[str, list[Batch]], full: dict | None, lanes: int,
             label: str) -> dict[str, list[Answered]]:
    """Return what came of every text of each task.

    With `full`, it stops after FIRST texts of a task that miss ENOUGH by three standard errors, or after an
    error.
    """
    found = {task: [] for task in asked}
    with ExitStack() as stack, ThreadPoolExecutor(lanes) as pool, tqdm(
            total=sum(map(len, asked.values())), desc=label, leave=False, disable=None) as bar:
        pairs = [stack.enter_context(closing(Pair(folder, *entrant))) for _ in range(lanes)]
        for start in range(0, max(map(len, asked.values())), FIRST):
            for task, batches in asked.items():
                part = batches[start:start + FIRST]
                share = lambda i, part=part: [(j, pairs[i].answered(part[j]))
                                              for j in range(i, len(part), lanes)]
                found[task] += [x for _, x in sorted(sum(pool.map(share, range(lanes)), []))]
                bar.update(len(part))
            if full and any(hopeless(row, full[task]) for task, row in found.items()):
                break
    return found


def hopeless(row: list[Answered], full: list[Answered]) -> bool:
    share, error, _ = short_by(row, full)
    return share < ENOUGH - 3 * error or any(x.error for x in row)


def judged(folder: Path, found: dict[str, list[Answered]], full: dict[str, list[Answered]],
           asked: dict[str, list[Batch]]) -> dict:
    """Return the row of one entrant on one decoder."""
    every, base = sum(found.values(), []), sum(full.values(), [])
    size = fmean(x.size / full_cache_bytes(read_config(folder), batch.question)
                 for task, row in found.items() for x, batch in zip(row, asked[task]))
    over = lambda name: median(getattr(x, name) for x in every) / median(getattr(x, name) for x in base)
    kept = {task: short_by(row, full[task]) for task, row in found.items()}
    return dict(size=size, readings=max(x.readings for x in every), reading=over("reading"),
                first=over("first"), step=over("step"),
                texts=min(map(len, found.values())), errors=[x.error for x in every if x.error][:1],
                kept={task: x[:2] for task, x in kept.items()}, p={task: x[2] for task, x in kept.items()})


def verdict(row: dict, texts: int) -> str:
    """Return "yes", or why a row does not count."""
    if row["errors"]:
        return row["errors"][0]
    if row["first"] > SLOWEST:
        return f"the first token takes {row['first']:.1f} times as long as the full cache's"
    worst = max(row["p"], key=row["p"].get)
    if row["p"][worst] >= SURE or row["texts"] < texts:
        return f"no: {worst}, p = {row['p'][worst]:.2g} with {row['texts']} texts of each task"
    return "yes"


def keep_words(keep: float | None) -> str:
    return "all" if keep is None else f"{keep:g} %"


# ---- the command ---

def show(rows: list[dict], texts: int) -> str:
    """Return a table, with a row for each entrant, keep ratio and decoder."""
    table = [["method", "keep", "decoder", "size", *TASKS, "reading", "first token", "step", "counts"]]
    for row in rows:
        cells = [f"{100 * row['kept'][task][0]:.1f} %" for task in TASKS]
        table.append([row["method"], keep_words(row["keep"]), row["decoder"],
                      f"{100 * row['size']:.2f} %", *cells,
                      *(f"{row[name]:.2f}" for name in ("reading", "first", "step")), verdict(row, texts)])
    return text_table(table)


def entrants(args) -> list[tuple[str, bytes, bool, list]]:
    """Return for each method to measure: name, its file, whether it is ours, and keep ratios."""
    ratios = [args.keep] if args.keep is not None else RATIOS
    found = []
    for name in args.methods:
        ((_, Method),) = pick([name]).items()
        file = Path(inspect.getsourcefile(getattr(Method, "func", Method)))
        found.append((name, file.read_bytes(), True, ratios if has_budget(Method) else [None]))
    if args.file:
        code = shell.read_text(args.file)
        if (n := len(code.splitlines())) > 150:
            raise ValueError(f"{args.file} has {n} lines; a method may have at most 150")
        try:
            ast.parse(code)
        except SyntaxError as error:
            raise ValueError(f"{args.file}, line {error.lineno}: {error.msg}") from None
        if "variants" not in code:
            raise ValueError(f"{args.file} needs a line variants = {{name: Class}}")
        found.append((args.file.name, code.encode(), False, ratios))
    return found


def race(args) -> list[dict]:
    """Measure all entrants; return a row for each keep ratio and decoder."""
    lanes, rows = shell.cores(), []
    encoding = tokenizer.load(TINY / "tokenizer.tiktoken")
    for name, content, ours, ratios in entrants(args):
        seed = seed_of(content, args.salt)
        asked = texts(encoding, seed, args.documents)
        full = {decoder: measured(("full", None), folder, asked, None, lanes, f"full cache, {decoder}")
                for decoder, folder in SHIPPED.items()}
        for keep in ratios:
            share, same = None if keep is None else keep / 100, []
            option = "" if keep is None else f" --keep {keep:g}"
            entrant = (name, share) if ours else (None, share, content)
            for decoder, folder in SHIPPED.items():
                found = measured(entrant, folder, asked, full[decoder], lanes, f"{name}{option}, {decoder}")
                same.append(dict(method=name, keep=keep, decoder=decoder, seed=seed, salt=args.salt,
                                 date=str(date.today()),
                                 command=f"python -m nanollm record {name} --salt {args.salt}{option}")
                            | judged(folder, found, full[decoder], asked))
                if verdict(same[-1], args.documents) != "yes":
                    break
            rows += same
            tqdm.write(show(same, args.documents))
            if any(verdict(row, args.documents) != "yes" for row in same):
                break
    return rows


def stored() -> list[dict]:
    return json.loads(STORED.read_text()) if STORED.exists() else []


def by_size(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each method, keep ratio and salt, one for each decoder, the smallest size first.

    The size of a method is its larger one.
    """
    return sorted(grouped(rows, "method", "keep", "salt").values(),
                  key=lambda same: max(row["size"] for row in same))


def page(rows: list[dict]) -> str:
    """Return the text of RECORDS.md."""
    parts = [(ROOT / "experiments" / "record" / "head.md").read_text().strip()]
    for title, mine in (("One reading of the text", lambda row: row["readings"] == 1),
                        ("Any number of readings", lambda row: True)):
        table = [["", "method", "keep", *(f"{name}, {what}" for name in SHIPPED for what in ("size", "kept")),
                  "readings", "reading", "first token", "step", "date", "command"]]
        table.append(["---"] * len(table[0]))
        for rank, same in enumerate((x for x in by_size(rows) if all(map(mine, x))), 1):
            cells = [cell for row in same for cell in (
                f"{100 * row['size']:.2f} %", f"{100 * min(x for x, _ in row['kept'].values()):.1f} %")]
            times = [str(max(row["readings"] for row in same))]
            times += [f"{max(row[name] for row in same):.1f}" for name in ("reading", "first", "step")]
            first = same[0]
            table.append([str(rank), f"`{first['method']}`", keep_words(first["keep"]), *cells, *times,
                          first["date"], f"`{first['command']}`"])
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in table))
    return "\n\n".join(parts) + "\n"


def store(rows: list[dict], documents: int):
    """Add the rows that count on every decoder to the stored ones, and write RECORDS.md and its figure."""
    good = [same for same in by_size(rows)
            if len(same) == len(SHIPPED) and all(verdict(row, documents) == "yes" for row in same)]
    new = [row for same in good for row in same]
    entry = lambda row: (row["method"], row["keep"], row["salt"])
    rows = [row for row in stored() if entry(row) not in map(entry, new)] + new
    STORED.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows))
    if rows:
        draw(rows, ROOT / "notebooks" / "records.png")


def draw(rows: list[dict], file: Path):
    """Draw the size of each entry and the record: by date, and those of one day from the largest down."""
    import matplotlib.pyplot as plt
    from nanollm.commands import plot
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    entries = sorted(by_size(rows)[::-1], key=lambda same: same[0]["date"])
    sizes = [100 * max(row["size"] for row in same) for same in entries]
    place = [*range(len(sizes))]
    best = [min(sizes[:i + 1]) for i in place]
    axis.step([*place, len(place) - 0.4], [*best, best[-1]], where="post", color="black")
    for i, size, (row, *_) in zip(place, sizes, entries):
        axis.plot(i, size, markersize=8, **plot.style(row["method"]) | dict(linestyle=""))
        label = f"{row['method']}, {size:.2g} %" + (", one reading" if row["readings"] == 1 else "")
        axis.annotate(label, (i, size), (8, 6), textcoords="offset points", fontsize=8)
    axis.set_xticks(place, [same[0]["date"] for same in entries])
    axis.set(ylabel="size, of a full 16-bit cache", yscale="log", xlim=(-0.3, len(place)), ylim=(0.4, 60),
             title="The fewest bytes for needles, pairs and four turns, asked later")
    ticks = 0.5, 1, 2, 5, 10, 20, 50
    axis.set_yticks(ticks, [f"{x:g} %" for x in ticks])
    axis.minorticks_off()
    plot.save(figure, file)


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm record", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="methods of this repository")
    parser.add_argument("--file", type=Path,
                        help="a Python file with a method: variants = {name: Class}, and perhaps "
                             "to_bytes(caches) and from_bytes(data, caches)")
    parser.add_argument("--keep", type=float, metavar="PERCENT", help="only this keep ratio")
    parser.add_argument("--documents", type=int, default=LEAST,
                        help="texts of each task; default %(default)s")
    parser.add_argument("--salt", help="draw the texts of an earlier run again; default: a new salt")
    parser.add_argument("--store", action="store_true", help="add what counts to RECORDS.md")
    args = parser.parse_args(argv)
    whole("documents", args.documents, 2)
    if not args.methods and not args.file:
        raise ValueError("name a method, or a file with --file")
    if args.keep is not None:
        shell.check_keep(args.keep)
    if args.store and args.documents < LEAST:
        raise ValueError(f"--store needs {LEAST} texts of each task, not {args.documents}; "
                         "leave --documents out")
    if args.store and args.salt:
        raise ValueError("--store draws its own salt, so that nobody can choose the texts; leave --salt out")
    args.salt = args.salt or secrets.token_hex(4)
    print(f"salt {args.salt}", flush=True)
    rows = race(args)
    if args.store:
        store(rows, args.documents)
