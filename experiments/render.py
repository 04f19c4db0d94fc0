"""RESULTS.md: each table is made from the rows that its command measured.

    python -m experiments.render             # write RESULTS.md from the stored rows
    python -m experiments.render all speed   # run these sections' commands first, and store their rows
    python -m experiments.render --check     # fail if RESULTS.md is not what the stored rows make
"""
from datetime import date
from importlib import import_module
from importlib.metadata import version
import json
from math import log
import os
from pathlib import Path
import platform
import shlex
from statistics import fmean
import subprocess
import sys
import tempfile
import time

from nanollm import SHIPPED
from nanollm.commands import table
from nanollm.commands.text_table import text_table
from nanollm.measure.benchmark import paired

ROOT = Path(__file__).parents[1]
HERE = ROOT / "experiments" / "stored"
TARGET = ROOT / "RESULTS.md"

# name: (title, command, what to see)
SECTIONS = {
    "short": (
        "One row a family", "python -m nanollm",
        "The README shows these columns. The sentences under the table are made from its rows."),
    "all": (
        "Every method", "python -m nanollm --all",
        "![accuracy and KL over the bytes of the cache](notebooks/compare.png)  Every variant of every file "
        "in `methods/`, at four budgets. KiB are of the cache after the text, with numbers of 16 bits. The "
        "window methods (SnapKV, PyramidKV, AdaKV and what is built on them), KVzip and its variants, Fast "
        "KVzip and Expected Attention compress the prompt and then append. So at the smallest budget most "
        "of their bytes are the 64 tokens that came later. H2O, TOVA, KeyDiff, StreamingLLM, KVReviver and "
        "random keep their budget from the prompt's end on, Scissorhands and CaM from the first token on. "
        "DuoAttention's retrieval heads and the low-bit caches append. Quest keeps every token; its budget "
        "is what a query reads. The last lines compare each addition with the method under it, document by "
        "document."),
    "learned": (
        "Every method, on the decoder that learned to retrieve",
        "python -m nanollm --all --model nanollm/tiny_learned",
        "The initial weights of the decoder above contained the retrieval heads. This one has the same "
        "shape and learned its own."),
    "claims": (
        "The papers' claims, on both decoders", "python -m nanollm claims",
        "What a rule decides on each decoder, and the numbers that it goes by, ± one standard error. "
        "[CLAIMS.md](CLAIMS.md) has the rules, beside all that the tests say."),
    "inside": (
        "What the two decoders are like inside", "python -m experiments.inside",
        "A column a layer. Accuracies are of 32 needle documents of 256 tokens; the other rows are of 16 "
        "documents or texts. Texts begin with BOS in *learned*. [Notebook "
        "08](notebooks/08_two_decoders.ipynb) draws it."),
    "readings": (
        "The papers read in other ways", "python -m experiments.readings",
        "The first line of a group is the reading taken first. `change` is against it, document by document "
        "and text by text, ± one standard error. Budgets are a quarter of the entries, but for CriticalKV "
        "an eighth. The last group compresses again while it decodes: nearly as in CriticalKV's Table 7, an "
        "eighth of the text stays whenever the cache holds half of it. (There 64 tokens stay whenever it "
        "exceeds 256, of some 567.) Its KiB are of a text, with numbers of 16 bits."),
    "additions": (
        "What each selection changes", "python -m nanollm --methods all --documents 128",
        "Each selection on each budget rule, paired document by document, ± one standard error. Aware and "
        "agnostic are means over the three tasks. nll is the mean −log p of the true next token. L1 is the "
        "change of a head's output, each layer alone. `critical` is the paper's selection, whose second "
        "stage does not pool the scores; `critical_code` is the authors' code, which pools. `theta`, "
        "`residual` and `semantic` are ours."),
    "kvzip": (
        "Methods that do not bet on the question: KVzip taken apart", "python -m experiments.kvzip_parts",
        "The question comes after the compression. Three parts each add answers: the second reading of the "
        "text, the largest attention in place of the sum, and the ranking of all layers' entries together. "
        "`one_reading` above is the row *first alone, max, all*. Then what KVzip and SnapKV keep is stored "
        "in fewer bits (`methods/ours/kvzip_4.py`). KiB are of a text after its answer, with numbers of 16 "
        "bits. The tables of every method have more KiB, since 64 tokens follow there. Last comes "
        "DuoAttention, by the heads of two calibrations; `seconds` is what each took."),
    "sketch": (
        "KVReviver's sketch taken apart", "python -m experiments.sketch_parts",
        "Every cache of a budget fills the same bytes. *sum (printed)* reads a slot as the paper's Algorithm "
        "2 prints it, *slot means* divides by the tokens in the slot, *signed keys* gives keys signs as "
        "values have them, and *shrunk* is ours. *mean only* stores the mean of the tokens that are not "
        "exact and one slot. *no sketch* spends these bytes on exact tokens. `against no sketch` is the "
        "change of the KL, text by text, ± one standard error. Needles are asked for after the "
        "compression."),
    "tensor": (
        "Tensor attention: one decoding step", "python -m methods.theory.index_game",
        "Two cache matrices, four, and four without ever forming a pair."),
    "fewest_bytes": (
        "Who still answers a question that comes later", "python -m experiments.fewest_bytes",
        "`bytes` are those when the question comes, as a share of a full cache's, both with numbers of 16 "
        "bits. `kept` is the share of the full cache's answers, ± one standard error. `asked` counts the "
        "documents of a task. `reading` is the time until the question may come, in units of the full "
        "cache's. A row counts as 95 % only if it is so by one standard error; within one it is undecided. "
        "At the end: what counts on both decoders, the fewest bytes first. `quest` holds everything; its "
        "budget is what it reads."),
    "speed": (
        "Decoding, and what compressing costs", "python -m experiments.speed --compile",
        "The first table sets a decoding step beside its floor, the products with all weight matrices, and "
        "beside attention over the slots: no step can do without these. The second is what the end of "
        "the prompt costs; *reading* is a method's own prefill in units of the full cache's. `kvzip` reads "
        "the prompt a second time at its end. The third is a step of methods that read otherwise than the "
        "full cache, or less; *speed* in units of its speed. The fourth "
        "puts a full cache of ours into a model of `transformers` (`nanollm/hf/bridge.py`). The fifth "
        "compares our decoder with theirs on the same weights, after a check that both write the same "
        "tokens."),
    "growth": (
        "How cost grows with the text", "python -m experiments.speed --what growth",
        "![three costs over the tokens](notebooks/growth.png)  Reading, compressing and one step, for texts "
        "of 512 to 16,384 tokens. An exponent is the slope of a line through all lengths, both axes "
        "logarithmic."),
    "large": (
        "Speed and memory in any model's shape", "python -m experiments.speed --what large",
        "Random weights, here in a small shape on a CPU. On a GPU `python -m experiments.speed "
        "--what large --shape llama3-8b --lengths 8192 32768 65536 --batch 1 4 16` measures the real "
        "sizes, bytes by the GPU's "
        "own allocator beside those that the caches name, and decoding with and without kernels. Nobody has "
        "done that here yet."),
    "resources": (
        "Kernels, compiled", "python -m kernels.bench --resources",
        "Registers and shared memory of each kernel, compiled for an H100. No GPU has timed them yet."),
}
FIGURES = {"all": "notebooks/compare.png", "growth": "notebooks/growth.png"}  # what --figure writes
COMPARED = "short", "all", "learned", "additions"  # sections of python -m nanollm, whose rows are made short


# ---- what is stored ---

def rows(name: str) -> list[dict]:
    """Return the stored rows of a section."""
    return json.loads((HERE / f"{name}.json").read_text())["rows"]


def by_method(name: str) -> dict[tuple[str, float | None], dict]:
    """Return the rows of a section of `python -m nanollm`, by method and share of the entries."""
    return {(row["method"], row["keep_ratio"]): row for row in rows(name)}


def shortened(rows: list[dict]) -> list[dict]:
    """Return rows of `python -m nanollm` without the numbers of each document, which fill megabytes.

    An addition's row has in their place `changes` against the method under it: [mean, standard error].
    """
    for base in rows:
        for row in table.on_top(base, rows):
            row["changes"] = {name: paired(row, base, keys) for name, keys in table.MEASURES.items()}
    dropped = "each", "l1", "model"  # the last is a path
    return [{key: x for key, x in row.items() if key not in dropped} for row in rows]


def run(name: str, scratch: Path):
    """Store the rows of a section's command, with the command, the date and the machine; nothing if the
    command fails.
    """
    _, command, _ = SECTIONS[name]
    file, words = scratch / "rows.json", shlex.split(command)[1:]
    if name in (*FIGURES, *COMPARED):
        words += ["--figure", FIGURES.get(name, str(scratch / "figure.png"))]
    began = time.time()
    subprocess.run([sys.executable, *words, "--json", str(file)], cwd=ROOT, check=True)
    machine = f"{hardware()}, {(time.time() - began) / 60:.1f} minutes"
    measured = json.loads(file.read_text())
    write(name, command, machine, str(date.today()), shortened(measured) if name in COMPARED else measured)


def write(name: str, command: str, machine: str, date: str, rows: list[dict]):
    """Store rows, a line each."""
    head = json.dumps(dict(command=command, machine=machine, date=date), indent=1, ensure_ascii=False)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n')


def hardware() -> str:
    """Return this machine, in a line."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(": ")[1] for line in info.splitlines() if line.startswith("model name")]
    return (f"{os.cpu_count()} cores of an {names[0] if names else platform.processor()}, "
            f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}")


# ---- RESULTS.md ---

def compared(rows: list[dict], short: bool = False) -> str:
    """Return what `python -m nanollm` prints of such rows."""
    first = rows[0]
    lines = [table.TERMS, table.header(first["tokens"], first["documents"], first["seed"], short),
             *(table.show(row, short) for row in rows)]
    return "\n".join([*lines, "", table.findings(rows) if short else additions(rows)])


def additions(rows: list[dict]) -> str:
    """Return a table of what each addition changes, under the means of the method without it."""
    cells = [["changes by additions", "keep", *table.MEASURES]]
    for base in rows:
        if more := table.on_top(base, rows):
            l1 = fmean(x for layer in base["l1_alone"] for x in layer)
            means = base["aware"], base["agnostic"], log(base["perplexity"]), base["kl"], l1
            cells += [[""] * 7, [base["method"], table.budget(base), *(f"{x:.3f}" for x in means)]]
        for row in more:
            changes = (f"{mean:+.3f} ±{error:.3f}" for mean, error in row["changes"].values())
            cells.append([row["method"], table.budget(row), *changes])
    return text_table(cells)


def text(name: str) -> str:
    """Return the text of a section's rows, as the `show` of the module that its command runs makes it."""
    if name in COMPARED:
        return additions(rows(name)) if name == "additions" else compared(rows(name), name == "short")
    module = "experiments.claims.claims_renderer" if name == "claims" else SECTIONS[name][1].split()[2]
    return import_module(module).show(rows(name))


def section(name: str) -> str:
    title, command, words = SECTIONS[name]
    stored = json.loads((HERE / f"{name}.json").read_text())
    if stored["command"] != command:
        raise SystemExit(f"error: stored/{name}.json is of `{stored['command']}`; "
                         f"run python -m experiments.render {name}")
    made = f"`{command}` ({stored['date']}, {stored['machine']})"
    return f"## {title}\n\n{words}\n\n{made}:\n\n```\n{text(name).strip(chr(10))}\n```"


def shipped() -> str:
    """Return how the shipped decoders were trained and what they answer, as their training runs wrote it."""
    runs = [json.loads((folder / "train.json").read_text()) for folder in SHIPPED.values()]
    percent = lambda x: f"{100 * x['value']:.1f} ± {100 * x['standard_error']:.1f} %"
    cells = [["", *SHIPPED], ["---"] * (1 + len(runs)), ["command", *(f"`{run['command']}`" for run in runs)],
             ["hardware", *(run["hardware"] for run in runs)],
             ["minutes", *(f"{run['minutes']:.0f}" for run in runs)],
             ["training tokens", *(f"{run['training_tokens'] / 1e6:.1f} M" for run in runs)],
             ["parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in runs)],
             ["documents a task", *(str(run["documents_per_figure"]) for run in runs)]]
    cells += [[name.replace("_", " "), *(percent(run["exact_match"][name]) for run in runs)]
              for name in runs[0]["exact_match"]]
    cells += [[f"bits per byte of held-out text, {name}",
               *(f"{run['bits_per_byte'][name]:.2f}" for run in runs)] for name in runs[0]["bits_per_byte"]]
    notes = [f"{name}: {run['note']}" for name, run in zip(SHIPPED, runs) if "note" in run]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return "\n\n".join((
        "## The shipped decoders",
        "How each was trained, and the share of held-out documents that it answers right, by task and "
        "tokens: greedy decoding with the full cache, ± one standard error.", lines, *notes))


def rendered() -> str:
    """Return the text of RESULTS.md."""
    anchor = lambda title: "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")
    head = ("# Results\n\nThe command above a table measured its rows, on the day and the machine that stand "
            "beside it. `python -m experiments.render NAME` runs the command again. Accuracies, KL, L1 and "
            "bytes are fixed by seed 0, but for last digits, which a machine may round otherwise. Times are "
            "not; compare only those of one table. What the papers claim, and whether it holds here, stands "
            "in [CLAIMS.md](CLAIMS.md).")
    contents = "\n".join(f"- [{title}](#{anchor(title)}): `{name}`"
                         for name, (title, _, _) in SECTIONS.items())
    return "\n\n".join((head, contents, *map(section, SECTIONS), shipped())) + "\n"


def main(argv: list[str]):
    if argv == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != rendered():
            raise SystemExit("error: RESULTS.md is not what is stored; run python -m experiments.render")
        return
    if unknown := [name for name in argv if name not in SECTIONS]:
        raise SystemExit(f"error: unknown section {unknown[0]!r}; known are {', '.join(SECTIONS)}")
    failed = []
    for name in argv:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                run(name, Path(scratch))
            except subprocess.CalledProcessError:
                failed.append(name)
    TARGET.write_text(rendered())
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed and stays as it was; RESULTS.md has the others")


if __name__ == "__main__":
    main(sys.argv[1:])
