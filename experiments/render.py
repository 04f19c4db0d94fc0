"""RESULTS.md and what it shows: each long table is what its command printed.

    python -m experiments.render             # write RESULTS.md from the stored outputs
    python -m experiments.render all speed   # run these sections' commands first, and store what they print
    python -m experiments.render --check     # fail if RESULTS.md is not what the stored outputs make
"""
from datetime import date
import json
import os
from pathlib import Path
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HERE = ROOT / "experiments" / "stored"
TARGET = ROOT / "RESULTS.md"
SHIPPED = {"built": ROOT / "nanollm" / "tiny", "learned": ROOT / "nanollm" / "tiny_learned"}

# name: (title, command, what to see)
SECTIONS = {
    "short": (
        "One row a family", "python -m nanollm --figure {scratch}/short.png",
        "The table that the README shows. Terms stand above it, and the sentences under it are made "
        "from its rows."),
    "all": (
        "Every method", "python -m nanollm --all --figure notebooks/compare.png",
        "![accuracy and KL over the bytes of the cache](notebooks/compare.png)  Every variant of every "
        "file in `methods/`, at four budgets. KiB are of the cache after the text, with numbers of 16 bits. "
        "The window methods (SnapKV, PyramidKV, AdaKV and what is built on them), KVzip and its variants, "
        "Fast KVzip and Expected Attention compress the prompt and then append. So at the smallest budget "
        "most of their bytes are the 64 tokens that came later. H2O, TOVA, KeyDiff, StreamingLLM, KVReviver "
        "and random keep their budget at every step from the prompt's end on, Scissorhands and CaM from the "
        "first token on. DuoAttention's retrieval heads and the low-bit caches append. Quest keeps every "
        "token; its budget is what a query reads. The last lines compare each addition with the method "
        "under it, document by document."),
    "learned": (
        "Every method, on the decoder that learned to retrieve",
        "python -m nanollm --all --model nanollm/tiny_learned --figure {scratch}/learned.png",
        "The table above is of the decoder whose start had the heads that retrieve. This one is of a decoder "
        "of the same shape that learned to retrieve."),
    "claims": (
        "The papers' claims, on both decoders", "python -m nanollm claims --json {scratch}/claims.json",
        "What a rule decides on each decoder, and the numbers that it goes by, ± one standard error. "
        "[CLAIMS.md](CLAIMS.md) has the rules, beside all that the tests say."),
    "inside": (
        "What the two decoders are like inside", "python -m experiments.inside",
        "A column a layer. Accuracies are of 32 needle documents of 256 tokens; the other rows are of 16 "
        "documents or texts. Texts begin with BOS in *learned*. "
        "[Notebook 08](notebooks/08_two_decoders.ipynb) draws it."),
    "readings": (
        "The papers read in other ways", "python -m experiments.readings",
        "The first line of a group is the reading taken first. In brackets stand the changes against it, "
        "document by document and text by text, ± one standard error. Budgets are a quarter of the entries, "
        "but for CriticalKV an eighth. The last group compresses again while it decodes: nearly as in "
        "CriticalKV's Table 7, an eighth of the text stays whenever the cache holds half of it. (There 64 "
        "tokens stay whenever it exceeds 256, of some 567.) Its KiB are of a text, with numbers of 16 bits."),
    "additions": (
        "What each selection changes",
        "python -m nanollm --methods all --documents 128 --figure {scratch}/all.png",
        "The end of what the command prints: each selection on each budget rule, paired document by "
        "document, ± one standard error. Aware and blind are means over the three tasks; nll is the "
        "mean −log p of the true next token; L1 is the change of a head's output, each layer alone. "
        "`critical` is the paper's selection, whose second stage does not pool the votes. "
        "`critical_code` is the authors' code, which pools. `theta`, `residual` and `semantic` are "
        "ours."),
    "kvzip": (
        "Methods that do not bet on the question: KVzip taken apart", "python -m experiments.kvzip_parts",
        "What is asked comes after the compression. A second reading of the text, the largest attention in "
        "place of the sum, and the ranking of all layers' entries together each do their part. "
        "`one_reading` above is the row *first alone, max, all*. Below, what KVzip and SnapKV keep is stored "
        "in fewer bits (`methods/ours/kvzip_4.py`). KiB are of a text after its answer, with numbers of 16 "
        "bits. "
        "The tables of every method have more KiB for the same budget, since 64 tokens follow there."),
    "tensor": (
        "Tensor attention: one decoding step", "python -m methods.theory.index_game",
        "Two cache matrices, four, and four without ever forming a pair."),
    "blind": (
        "Who still answers a question that comes later", "python -m experiments.blind",
        "Each method's bytes when the question comes, as a share of a full cache's, both with numbers of 16 "
        "bits; what it answers; the share of the full cache's answers that it keeps, ± one standard error; "
        "how many documents of a task were asked; the time until the question may come. A row counts as "
        "95 % only if it is so by one standard error; within one it is undecided. At the end: what counts "
        "on both decoders, the fewest bytes first. `quest` holds everything; its budget is what it reads."),
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
        "How cost grows with the text", "python -m experiments.growth --figure notebooks/growth.png",
        "![three costs over the tokens](notebooks/growth.png)  Reading, compressing and one step, for texts "
        "of 512 to 16,384 tokens. An exponent is the slope of a line through all lengths, both axes "
        "logarithmic."),
    "large": (
        "Speed and memory in any model's shape", "python -m experiments.large",
        "Random weights, here in a small shape on a CPU. On a GPU `python -m experiments.large --shape "
        "llama3-8b --lengths 8192 32768 65536 --batch 1 4 16` measures the real sizes, bytes by the GPU's "
        "own allocator beside those that the caches name, and decoding with and without kernels. Nobody has "
        "done that here yet."),
    "resources": (
        "Kernels, compiled", "python -m kernels.resources",
        "Registers and shared memory of each kernel, compiled for an H100. No GPU has timed them yet."),
}


class Row(NamedTuple):
    """A row that `python -m nanollm` printed, but for its method and budget."""
    kib: float             # live, of one text
    right: list[float]     # shares of right answers: needle, recall and few-shot, aware and blind of each
    perplexity: float
    kl: float              # nats a token
    l1: float
    tokens_per_s: float    # of the batch


def rows(name: str) -> dict[tuple[str, str], Row]:
    """Of a section that `python -m nanollm` printed, by method and budget as it stands there."""
    row = re.compile(r"(\S+) +(all|[\d.]+ %) +(\d+) +((?:[\d.]+ +){6})([\d.]+) +(\d+\.\d{3}) *([\d.]+) "
                     r"+(\d+)$")  # a large L1 leaves no space after KL
    found = map(row.match, (HERE / f"{name}.txt").read_text().splitlines())
    return {(x[1], x[2]): Row(float(x[3]), [*map(float, x[4].split())], *map(float, x.groups()[4:]))
            for x in found if x}


def accuracies(name: str) -> dict[tuple[str, str], list[float]]:
    """Of each of its rows, the shares of right answers."""
    return {key: row.right for key, row in rows(name).items()}


def lines(name: str, *starts: str) -> list[str]:
    """The lines of a stored table whose first words are those of one of `starts`, in their order."""
    words = [start.split() for start in starts]
    return [line for line in (HERE / f"{name}.txt").read_text().splitlines()
            if any(line.split()[:len(start)] == start for start in words)]


def hardware() -> str:
    """Date and machine, in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    import torch
    return (f"{date.today()}, {os.cpu_count()} cores of an {cpu}, {platform.system()}, "
            f"Python {platform.python_version()}, torch {torch.__version__}")


def run(name: str, scratch: Path):
    """Store what a section's command prints, under the command, the date and the machine; nothing if the
    command fails.
    """
    _, command, _ = SECTIONS[name]
    words = shlex.split(command.format(scratch=scratch))
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          check=True)
    head = f"{shown(command)}\n{hardware()}\n"
    (HERE / f"{name}.txt").write_text(head + done.stdout.replace(str(scratch) + "/", ""))
    for rows in scratch.glob("*.json"):
        shutil.move(rows, HERE / rows.name)


def shown(command: str) -> str:
    """The command as a reader types it: where its figure or its rows go is not part of a result."""
    return re.sub(" --(figure|json) .*", "", command)


def checkpoint() -> str:
    """The shipped decoders' figures, which their training runs wrote, side by side."""
    told = {name: json.loads((folder / "train.json").read_text()) for name, folder in SHIPPED.items()}
    columns = [{
        "command": f"`{run['command']}`", "hardware": run["hardware"], "minutes": f"{run['minutes']:.0f}",
        "training tokens": f"{run['training_tokens'] / 1e6:.1f} M",
        "parameters": f"{run['parameters'] / 1e6:.2f} M",
        "documents a task": run["documents_per_figure"],
    } | {
        name.replace("_", " "): f"{100 * x['value']:.1f} ± {100 * x['standard_error']:.1f} %"
        for name, x in run["exact_match"].items()
    } | {
        f"bits per byte of held-out text, {name}": f"{bits:.2f}"
        for name, bits in run["bits_per_byte"].items()
    } for run in told.values()]
    rows = [f"| {' | '.join(map(str, cells))} |" for cells in (
        ["", *told], ["---"] * (1 + len(told)),
        *([name, *(column.get(name, "") for column in columns)] for name in columns[0]))]
    notes = [f"{name}: {run['note']}" for name, run in told.items() if "note" in run]
    return "\n\n".join((
        "## The shipped decoders",
        "How each was trained, and the share of held-out documents that it answers right, by task and "
        "tokens: greedy decoding with the full cache, ± one standard error.", "\n".join(rows), *notes))


def section(name: str) -> str:
    title, command, words = SECTIONS[name]
    stored, machine, output = (HERE / f"{name}.txt").read_text().split("\n", 2)
    if stored != shown(command):
        raise SystemExit(f"error: {name}.txt is of `{stored}`; run python -m experiments.render {name}")
    return f"## {title}\n\n{words}\n\n`{stored}` ({machine}):\n\n```\n{output.strip(chr(10))}\n```"


def rendered() -> str:
    """RESULTS.md."""
    there = [name for name in SECTIONS if (HERE / f"{name}.txt").exists()]
    head = ("# Results\n\nEach table is what the command above it printed, on the day and the machine that "
            "stand beside it. `python -m experiments.render NAME` runs one again. Accuracies, KL, L1 and "
            "bytes are "
            "fixed by seed 0, but for last digits, which a machine may round otherwise. Times are not, and "
            "only those of one table compare. What the papers claim, and whether it holds here, stands in "
            "[CLAIMS.md](CLAIMS.md).")
    contents = "\n".join(f"- [{SECTIONS[name][0]}](#{anchor(SECTIONS[name][0])}): `{name}`"
                         for name in there)
    return "\n\n".join((head, contents, *map(section, there), checkpoint())) + "\n"


def anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


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
