"""python -m nanollm: run every method over several budgets and print one table.

    python -m nanollm [compare] --methods h2o ada_kv+critical --budgets 50 25 --json rows.json
    python -m nanollm generate --method h2o --budget 64 "The import system"
    python -m nanollm train --help
"""
import argparse
from dataclasses import fields, make_dataclass
from functools import partial
import importlib
import inspect
import json
from os.path import realpath
from pathlib import Path
import sys
import time
import traceback

import nanollm
from nanollm import TINY

METHODS = Path(__file__).parent.parent / "methods"


def methods() -> tuple[dict, dict, dict]:
    """Of all files in methods/: every variant by name, after full attention; what can go on top of a window method; and
    the files that cannot be used, by name, with the reason."""
    from nanollm.cache import LayerCache
    found, additions, broken = {"full": LayerCache}, {}, {}
    for file in sorted(METHODS.glob("*.py")):
        try:
            module = importlib.import_module(f"methods.{file.stem}")
            if not hasattr(module, "variants"):
                raise ValueError("it names no methods; end it with variants = {'name': Class}")
            more = getattr(module, "additions", {})
            for name, Method in (module.variants | more).items():
                if not isinstance(name, str):
                    raise ValueError(f"{name!r} is no name; write variants = {{'name': Class}}")
                of = Method.func if isinstance(Method, partial) else Method
                if not isinstance(of, type) or not issubclass(of, LayerCache):
                    raise ValueError(f"{name!r} stands for {of!r}, which is no LayerCache")
                if name in more and not has_window(Method):
                    raise ValueError(f"the addition {name!r} goes on top of window methods; make it a class on WindowCache")
                if (found | additions).get(name, Method) is not Method:
                    raise ValueError(f"another file has a method {name!r} already; take another name")
        except (Exception, SystemExit) as error:  # whatever a file may do when it is imported
            broken[file.name] = told(error)
            continue
        found |= module.variants
        additions |= more
    return {"full": LayerCache} | dict(sorted(found.items())), dict(sorted(additions.items())), broken


def told(error: BaseException) -> str:
    """An error in one line. One that no check foresaw also says its kind and where in methods/ it arose."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if Path(frame.filename).parent == METHODS), None)
    where = f", line {place.lineno} of {Path(place.filename).name}" if place else ""
    return f"{type(error).__name__}{where}: {error}"


def has_window(Method) -> bool:
    from nanollm.cache import WindowCache
    return isinstance(Method, type) and issubclass(Method, WindowCache)


def chooses(Method) -> bool:
    """Whether this window method has a selection of its own, which another on top of it would undo."""
    from nanollm.cache import WindowCache
    return Method.select is not WindowCache.select


def given(Method, **known) -> dict:
    """Those of the known values for which the method has a knob."""
    return {name: value for name, value in known.items() if name in inspect.signature(Method).parameters}


def has_budget(Method) -> bool:
    return "budget" in inspect.signature(Method).parameters


def calibrated(Method, model, encoding) -> dict:
    """What a method finds out about the decoder: knobs, or none."""
    return Method.calibrate(model, encoding) if hasattr(Method, "calibrate") else {}


def on_top(name: str, *bases: type) -> type:
    """One method of several, the uppermost first. The uppermost that names a knob itself says what its default is;
    a dataclass alone would take an inherited one for its own."""
    Plain = make_dataclass(name, [], bases=bases, eq=False)
    knobs = [(knob.name, knob.type, getattr(Plain, knob.name)) for knob in fields(Plain) if hasattr(Plain, knob.name)]
    return make_dataclass(name, knobs, bases=bases, eq=False)


def pick(names: list[str]) -> dict[str, type]:
    """Methods by name, all variants for no name. "ada_kv+critical" is a window method with an addition on top.

    "all" is every variant, and every window method with each addition.
    """
    found, additions, broken = methods()
    for file, why in broken.items():
        print(f"methods/{file} is left out: {why}", file=sys.stderr)
    asks_below = {name for name, Method in additions.items() if getattr(Method, "asks_below", False)}
    composed = {f"{name}+{addition}" for name, Method in found.items() if has_window(Method) and "+" not in name
                for addition in (asks_below if chooses(Method) else additions)} - found.keys()
    if "all" in names:
        names = dict.fromkeys(["full", *sorted(found.keys() - {"full"} | composed), *names])
        del names["all"]
    chosen = {}
    for name in names or found:
        base, *more = name.split("+")
        if name in found:
            chosen[name] = found[name]
        elif has_window(found.get(base)) and additions.keys() >= {*more}:
            for addition in more if chooses(found[base]) else more[1:]:
                if addition not in asks_below:
                    raise ValueError(f"{name}: {addition} chooses the entries itself and would undo "
                                     + (f"{base}; put it on another method" if chooses(found[base]) else f"{more[0]}; put it first"))
            if len({*more}) < len(more):
                raise ValueError(f"{name} names an addition twice")
            chosen[name] = on_top(name, *(additions[addition] for addition in reversed(more)), found[base])
        else:
            raise ValueError(f"unknown method {name!r}; known are {', '.join([*found, *sorted(composed)])}, all")
    return chosen


def load(folder: Path, device: str):
    """Decoder and tokenizer of a folder."""
    from nanollm import tokenizer, weights
    model = weights.from_hf(folder, device=device)
    own = folder / "tokenizer.tiktoken"
    encoding = tokenizer.load(own) if own.exists() else weights.hf_tokenizer(folder)
    tokenizer.check_vocabulary(encoding, model.config.vocab_size)
    return model, encoding


COLUMNS = (("method", "{:<27}"), ("budget", "{:>7}"), ("KiB", "{:>7}"), ("aware", "{:>6}"), ("blind", "{:>6}"),
           ("aware", "{:>8}"), ("blind", "{:>6}"), ("aware", "{:>8}"), ("blind", "{:>6}"),
           ("perpl.", "{:>8}"), ("KL", "{:>7}"), ("L1", "{:>6}"), ("tokens/s", "{:>9}"))


def line(*cells) -> str:
    return "".join(form.format(cell) for (_, form), cell in zip(COLUMNS, cells))


def header(T: int, documents: int, seed: int) -> str:
    from nanollm.evaluate import TASKS
    return "\n".join((
        f"\n{documents} documents per task, {T} tokens each; seed {seed}; "
        f"standard error of an accuracy: at most {0.5 / (documents - 1) ** 0.5:.2f}\n",
        line("", "", "live", *(cell for task in TASKS for cell in ("", task)), "", "", "", "batch"),
        line(*(name for name, _ in COLUMNS))))


def show(row: dict) -> str:
    from nanollm.evaluate import TASKS
    accuracy = (f"{row[f'{task}_{setting}']:.2f}" for task in TASKS for setting in ("aware", "blind"))
    budget = "all" if row["fraction"] is None else f"{100 * row['fraction']:g} %"
    return line(row["method"], budget, f"{row['live'] / 1024:.0f}", *accuracy, f"{row['perplexity']:.2f}",
                f"{max(row['kl'], 0):.3f}", f"{mean_l1(row):.2f}", f"{row['tokens_per_s']:.0f}")


def mean_l1(row: dict) -> float:
    """Over layers and heads, each layer alone."""
    return sum(map(sum, row["l1_alone"])) / sum(map(len, row["l1_alone"]))


def row_of(name: str, fraction: float | None, T: int, documents: int, seed: int, measured: dict, texts: int) -> dict:
    """A row: what was run, what `Benchmark.run` measured on `texts` texts, bytes now of one of them, means over the tasks."""
    from nanollm.evaluate import TASKS
    row = dict(method=name, fraction=fraction, tokens=T, documents=documents, seed=seed) | measured
    for key in ("live", "allocated", "peak"):
        row[key] //= texts
    for setting in ("aware", "blind"):
        row[setting] = sum(row[f"{task}_{setting}"] for task in TASKS) / len(TASKS)
    return row


def additions_table(rows: list[dict]) -> str:
    """What each addition changes, paired by document, under the means of the method without it; "" if there is none."""
    from nanollm.evaluate import TASKS, paired
    measures = {setting: [f"{task}_{setting}" for task in TASKS] for setting in ("aware", "blind")}
    measures |= {"nll": ["nll"], "KL": ["kl"], "L1": ["l1_alone"]}

    def line(row: dict, cells) -> str:
        return f"{row['method']:<27}{100 * row['fraction']:>5g} %" + "".join(f"{cell:<16}" for cell in cells).rstrip()

    lines = []
    for base in rows:
        more = [row for row in rows if row["method"].rpartition("+")[0] == base["method"]
                and (row["fraction"], row["tokens"]) == (base["fraction"], base["tokens"])]
        if more:
            each = ([x for key in keys for x in base["each"][key]] for keys in measures.values())
            lines += ["", line(base, (f"{sum(x) / len(x):9.3f}" for x in each))]
            lines += [line(row, ("   {:+.3f} ±{:.3f}".format(*paired(row, base, keys)) for keys in measures.values())) for row in more]
    head = f"\n{'changes by additions':<27}{'budget':>7}" + "".join(f"{name:>9}{'':7}" for name in measures).rstrip()
    return "\n".join((head, *lines)) if lines else ""


def compare(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME",
                        help="default: full and every file's in methods/; all: also with every addition, as in ada_kv+critical")
    parser.add_argument("--budgets", nargs="+", type=float, default=[50, 25, 12.5, 6.25], metavar="PERCENT")
    parser.add_argument("--window", type=int, default=8, metavar="QUERIES",
                        help="that vote, in methods with a window; default 8, as the prompts are a tenth of the papers'")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="of the documents; default 512")
    parser.add_argument("--documents", type=int, help="documents per task; default 32")
    parser.add_argument("--full", action="store_true", help="256 documents per task, 512 and 1024 tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the documents")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a checkpoint with its tokenizer.tiktoken")
    parser.add_argument("--json", type=Path, help="write the rows here, each as it is done")
    parser.add_argument("--figure", type=Path, default=Path("compare.png"), help="of the first length")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as suits the model's size")
    args = parser.parse_args(argv)
    rank, world = nanollm.ranks()
    nanollm.check_seed(args.seed)
    for percent in args.budgets:
        if not 0 < percent <= 100:
            raise ValueError(f"budget {percent:g} % must lie above 0 and up to 100 percent of the prompt")
    if args.figure.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure {args.figure} must end in .png, .pdf or .svg")
    if args.json and realpath(args.json) == realpath(args.figure):
        raise ValueError(f"rows and figure cannot both go to {args.json}; name two files")
    from nanollm import plot
    if rank == 0:
        nanollm.check_output(args.figure, "figure", lambda held: plot.TITLE.encode() in held)
        if args.json:
            nanollm.check_output(args.json, "rows", holds_rows)

    import torch
    import torch.distributed as dist
    from tqdm import tqdm
    from nanollm.data import Tasks
    from nanollm.evaluate import Benchmark, excess, maker
    from nanollm.tokenizer import boundaries
    chosen = pick(args.methods)
    model, encoding = load(args.model, args.device)
    nanollm.set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    lengths = list(dict.fromkeys(args.lengths or ([512, 1024] if args.full else [512])))
    for T in lengths:
        nanollm.whole("length", T, 16, model.config.max_len)
    documents = args.documents if args.documents is not None else 256 if args.full else 32
    fractions = [percent / 100 for percent in dict.fromkeys(args.budgets)]
    jobs = [(T, name, fraction) for T in lengths for name in chosen
            for fraction in (fractions if has_budget(chosen[name]) else [None])]
    ends = boundaries(encoding, model.config.vocab_size)
    knobs = {name: given(Method, window=args.window, ends=ends) for name, Method in chosen.items()}
    for T, name, fraction in jobs:  # a budget that a method cannot work with is found before any work is done
        shortest = T - Benchmark.continuation_length(T) - 1
        try:
            maker(model, chosen[name], fraction, **knobs[name])(shortest)
        except ValueError as error:
            raise ValueError(f"{label(name, fraction)}{'' if fraction is None else f' of {shortest} tokens'}: {error}") from error
        except Exception:  # a bug: its row will name it, and the others go on
            pass
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    tasks, built, learned = Tasks(encoding, "test"), {}, {}

    def measure(T: int, name: str, fraction: float | None) -> dict | str:
        """A row, or why there is none: one method's mistake costs only its own rows."""
        nonlocal built
        if T not in built:
            built = {T: Benchmark.build(model, tasks, T, documents, seed=args.seed)}
        try:
            if name not in learned:
                learned[name] = calibrated(chosen[name], model, encoding)
            row = built[T].run(model, maker(model, chosen[name], fraction, **knobs[name] | learned[name]))
        except Exception as error:
            return f"{label(name, fraction)}: {told(error)}"
        return row_of(name, fraction, T, documents, args.seed, row, built[T].full.tokens.shape[0])

    if rank == 0:
        print("Each method compresses the KV cache of a small trained decoder at the end of a prompt of real text, or while\n"
              "reading it (scissorhands). aware: the question was in that prompt; blind: it came afterwards.", flush=True)
    rows, failed, began = [], [], time.time()
    bar = tqdm(range(0, len(jobs), world), disable=rank > 0, leave=False, unit="row" if world == 1 else "rows")
    for first in bar:  # `world` rows at a time, one on each rank
        T, name, _ = jobs[first]
        bar.set_description(f"{name}, {T} tokens")
        mine = measure(*jobs[first + rank]) if first + rank < len(jobs) else None
        results = [mine] * world
        if world > 1:
            dist.all_gather_object(results, mine)
        for row in results if rank == 0 else ():
            if isinstance(row, str):
                failed.append(row)
                bar.write(row)
            elif row is not None:
                if not rows or rows[-1]["tokens"] != row["tokens"]:
                    bar.write(header(row["tokens"], documents, args.seed))
                rows.append(row)
                bar.write(show(row) + (f"\n  ! {why}" if (why := excess(row)) else ""))
                if args.json:
                    nanollm.replace(args.json, json.dumps(rows, indent=1).encode())
    if world > 1:
        dist.destroy_process_group()
        if rank > 0:
            return
    for T in lengths:
        print(additions_table([row for row in rows if row["tokens"] == T]))
    if drawn := [row for row in rows if row["tokens"] == lengths[0]]:
        plot.comparison(drawn, args.figure)
        print(f"\n{len(rows)} rows in {time.time() - began:.0f} s; figure in {args.figure}"
              + (f", rows in {args.json}" if args.json else ""))
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} rows failed: {'; '.join(failed)}")


def label(name: str, fraction: float | None) -> str:
    return name if fraction is None else f"{name} at {100 * fraction:g} %"


def holds_rows(data: bytes) -> bool:
    """Whether a file holds what --json wrote."""
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(rows, list) and rows != [] and all(isinstance(row, dict) and {"method", "fraction", "each"} <= row.keys() for row in rows)


def generate(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m nanollm generate", description="Continue a text, as a stream.")
    parser.add_argument("prompt")
    parser.add_argument("--method", default="full")
    parser.add_argument("--budget", type=int, help="slots per key/value head, for every method that has one")
    parser.add_argument("--tokens", type=int, default=100, help="how many new ones")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a checkpoint in Hugging Face layout")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as suits the model's size")
    args = parser.parse_args(argv)
    nanollm.check_seed(args.seed)
    if args.method == "all":
        raise ValueError("one method writes one text; name one")
    Method = pick([args.method])[args.method]
    if (args.budget is None) == has_budget(Method):
        raise ValueError(f"{args.method} needs --budget, in slots per key/value head" if args.budget is None
                         else f"{args.method} has no budget; leave --budget out")

    import torch
    from nanollm.cache import cache_bytes, make_cache
    from nanollm.generate import stream
    from nanollm.tokenizer import boundaries
    model, encoding = load(args.model, args.device)
    nanollm.set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    known = {} if args.budget is None else dict(budget=args.budget)
    knobs = given(Method, ends=boundaries(encoding, model.config.vocab_size), **known) | calibrated(Method, model, encoding)
    encode = getattr(encoding, "encode_ordinary", encoding.encode)
    prompt = torch.tensor([encode(args.prompt)], dtype=torch.long, device=args.device)
    caches = make_cache(model, Method, **knobs)
    new = stream(model, prompt, args.tokens, caches, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
                 seed=args.seed)
    tokens = []
    written = ""
    print(args.prompt, end="", flush=True)
    try:
        for token in new:
            tokens.append(token.item())
            text = encoding.decode(tokens)
            if not text.endswith("\ufffd"):  # a character may span tokens
                print(text[len(written):], end="", flush=True)
                written = text
    except ValueError:  # the text so far stays a line of its own
        print()
        raise
    print(text[len(written):], end="")
    live, allocated = cache_bytes(caches)
    print(f"\n\n[{caches[0].seen} tokens seen, at most {caches[0].length} slots kept per head in layer 0, "
          f"{live / 1024:.0f} KiB live, {allocated / 1024:.0f} KiB allocated]")


def main(argv: list[str]):
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("compare", argv)
    if name == "train":
        from nanollm.train import main as run
    elif name in ("compare", "generate"):
        run = dict(compare=compare, generate=generate)[name]
    else:
        nanollm.fail(f"unknown command {name!r}; known are compare, generate, train")
    nanollm.command(run, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
