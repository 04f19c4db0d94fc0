"""Write RESULTS.md from the stored rows, or run the commands that measure them.

    python -m experiments.render             # write RESULTS.md from the stored rows
    python -m experiments.render all speed   # run these sections' commands first, and store their rows
    python -m experiments.render --check     # fail if RESULTS.md differs from the stored rows
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

# name: (title, command, one sentence on what to see and how it was measured)
SECTIONS = {
    "short": (
        "One method of each family", "python -m nanollm",
        "See: if the question comes after the compression (agnostic), only `worst_query`, KVzip and KIVI "
        "(`quantized_2`) stay within 0.1 of the full cache's accuracy.\n\n"
        "The keep ratio is 25 %. Each task has 8 documents. The sentences below the table are computed "
        "from its rows."),
    "all": (
        "Every method", "python -m nanollm --all",
        "See: with a quarter of the entries and a later question (agnostic), `worst_query`, KVzip, Fast "
        "KVzip and DuoAttention find every needle; SnapKV finds 0.12 of them. KVzip reads the prompt twice, "
        "Fast KVzip and DuoAttention are calibrated; `worst_query` needs neither.\n\n"
        "![accuracy and KL over the bytes of the cache](notebooks/compare.png)\n\n"
        "Every method with a budget is measured at four keep ratios. For KL, perplexity and KiB, 64 "
        "tokens follow the compressed prompt. The last table lists the changes by additions.\n\n"
        "Window methods (SnapKV, PyramidKV, AdaKV and what is built on them), KVzip and its variants, Fast "
        "KVzip, Expected Attention, DuoAttention's retrieval heads and the low-bit caches append these 64 "
        "tokens. H2O, TOVA, KeyDiff, StreamingLLM, KVReviver and random stay within their budget from the "
        "prompt's end on, Scissorhands and CaM from the first token on. Scissorhands drops half "
        "when it is full, so its KiB depend on the moment. Quest keeps every entry; its budget is the number "
        "of entries that a query reads. `kvzip_gain_coded` and `retrieval_layers` may keep fewer entries "
        "than their budget. Here their entries take as much room as any others; only their files are small."),
    "learned": (
        "Every method, on the decoder that learned to retrieve",
        "python -m nanollm --all --model nanollm/tiny_learned",
        "See: with a quarter of the entries and a later question, `worst_query`, KVzip, Fast KVzip and "
        "DuoAttention find every needle here, too. Expected Attention finds 0.91 of them, and 0.38 on the "
        "decoder above.\n\n"
        "The initial weights of the decoder above (*built*) contained retrieval heads. This decoder "
        "(*learned*) has the same shape and learned its own. The measurement is the same."),
    "claims": (
        "The papers' claims, on both decoders", "python -m nanollm claims",
        "See: 5 of the 22 claims hold on both decoders, and 8 hold on neither.\n\n"
        "A rule on measured numbers decides each claim. Numbers are ± one standard error. "
        "[CLAIMS.md](CLAIMS.md) has the rules and the results of the tests."),
    "inside": (
        "Attention inside the two decoders", "python -m experiments.inside",
        "See: without the attention of layer 0 or of layer 1, *built* finds no needle; *learned* needs "
        "only layer 0.\n\n"
        "Each column is a layer. Accuracies come from 32 needle documents of 256 tokens, the other rows "
        "from 16 documents or texts. Texts of *learned* begin with BOS. [Notebook "
        "08](notebooks/08_two_decoders.ipynb) draws these numbers."),
    "readings": (
        "Other interpretations of the papers", "python -m experiments.readings",
        "See: CriticalKV depends most on pooling the scores of its stage 2; with an eighth of the entries, "
        "pooling raises the accuracy from 0.52 to 0.89 on *built* and from 0.12 to 0.90 on *learned*. "
        "LayerDefensiveKV answers more without its stage 1 (`worst_query`): of the later questions 0.95 in "
        "place of 0.43 on *built*, and 0.75 in place of 0.47 on *learned*.\n\n"
        "Each row is one interpretation of a paper. `change` is its difference from the first row of the "
        "table, paired by document or text, ± one standard error. `answers` is the accuracy over all "
        "tasks, aware; `later` is that for questions after the compression. `L` is the L1 change of a head's "
        "output with only its own layer compressed. The "
        "keep ratio is 25 %, for CriticalKV 12.5 %.\n\n"
        "The last table of each decoder compresses again while it decodes, nearly as in CriticalKV's Table "
        "7: the cache shrinks to an eighth of the text whenever it holds half of it. (In the paper it "
        "shrinks to 64 tokens whenever it exceeds 256, for texts of about 567 tokens.) Its KiB are of one "
        "text, with 16-bit numbers."),
    "additions": (
        "Changes by each selection", "python -m nanollm --methods all --documents 128",
        "See: on SnapKV, PyramidKV and AdaKV, the paper's selection (`critical`) lowers L1 at every keep "
        "ratio but loses answers when the question is known; the authors' code (`critical_code`) loses "
        "none.\n\n"
        "Each selection is put on each window method that accepts it. The first row of a group has means, "
        "the other rows changes against it, paired by document, ± one standard error. aware and agnostic "
        "are mean accuracies over the three tasks; nll is the mean −log p of the true next token. The "
        "second stage of `critical` does not pool the scores, and that of `critical_code` does. `theta`, "
        "`residual` and `semantic` are ours."),
    "kvzip": (
        "KVzip taken apart", "python -m experiments.kvzip_parts",
        "See: with an eighth of the entries KVzip finds every needle; without its reread, its maximum or "
        "its ranking across heads it finds fewer. If the gain of the reread weighs its queries, a "
        "thirty-second is enough.\n\n"
        "The question comes after the compression (agnostic). The first table leaves out each of KVzip's "
        "three parts; the method `one_reading` above is its row *first read, max, all*. The second stores "
        "the kept entries in fewer bits (`methods/ours/kvzip_4.py`). Its KiB count the cache after the "
        "answer; in the tables of every method 64 tokens follow, so KiB are larger there. The third table "
        "compares two calibrations of DuoAttention. The last table has longer texts, which are reread in "
        "three pieces. There the paper's way, in which a piece scores only its own entries, takes two thirds "
        "of the time and finds as much, within two standard errors."),
    "sketch": (
        "KVReviver's sketch taken apart", "python -m experiments.sketch_parts",
        "See: no reading of the sketch has a lower KL than *mean only*, which stores nothing but the mean of "
        "the evicted tokens.\n\n"
        "All rows of a keep ratio hold about the same bytes. *sum (printed)* reads a slot as the paper's "
        "Algorithm 2 prints it. *slot means* divides by the number of tokens in the slot. *signed keys* "
        "gives keys random signs, as values have them. *shrunk* is ours. *no sketch* spends the bytes on "
        "exact tokens. `against no sketch` is the change of the KL, text by text. The question comes after "
        "the compression."),
    "tensor": (
        "Tensor attention: one decoding step", "python -m methods.theory.index_game",
        "See: the cache of four matrices that never forms a pair (`FactoredFourCache`) needs less time and "
        "less memory than the cache of two matrices (`TwoCache`), at every length where both were "
        "measured.\n\n"
        "`TwoCache` stores keys and values of all pairs of tokens. `FourCache` stores four matrices and "
        "forms the pairs at each step. `multiplied` counts multiplications, and `moved` the bytes that a "
        "step reads and writes."),
    "fewest_bytes": (
        "Fewest bytes for a question that comes later", "python -m experiments.fewest_bytes",
        "See: `kvzip_gain_turbo` needs the fewest bytes to keep 95 % of the answers on both decoders: 1.5 % "
        "of the full cache's on *built* and 3.0 % on *learned*. `kvzip_4` needs 4.3 % on both. "
        "([RECORDS.md](RECORDS.md) asks for more: each task alone, and p < .01.)\n\n"
        "Each task has 256 documents of 512 tokens. A row keeps 95 % if its share is at least one standard "
        "error above, and is undecided within one standard error. The last table lists, fewest bytes "
        "first, the methods that keep 95 % on both decoders. `quest` holds every entry; its budget is what "
        "it reads."),
    "harder": (
        "Harder tasks", "python -m experiments.harder",
        "See: on *learned*, with a quarter of the entries and a later question, KVzip is nowhere far below "
        "the full cache. `worst_query` loses some changed facts (0.75 in place of 0.91) and chains of four "
        "(0.53 in place of 0.91). DuoAttention and Fast KVzip find facts, and lose the rule of form. With "
        "the question in the prompt, `worst_query` answers as the full cache does; SnapKV finds the first of "
        "four answers always, and the fourth in 34 % of the documents (*built*: 9 %).\n\n"
        "![all methods on the harder tasks](notebooks/harder.png)\n\n"
        "The documents come from `nanollm/measure/hard_tasks.py`: 32 for each batch, of 512 tokens. Only "
        "*learned* was trained on these tasks. The figure has the question after the compression, and a "
        "quarter of the entries. [Notebook 13](notebooks/13_harder.ipynb) says which verdicts stand."),
    "worth": (
        "The worth of an entry", "python -m experiments.worth --documents 8",
        "See: attention tells how much an entry changes the answer, but not whether it helps or hurts. The "
        "question's own queries rank entries by the size of their effect (ρ |worth|), and no score ranks "
        "them by the worth itself (ρ worth is near 0).\n\n"
        "Each entry of 16 documents per decoder is left out alone, exactly. The worthiest entries cost "
        "little one by one, and the whole answer together. Yet kept by their worth, 1.6 % of the entries "
        "answer every question: the order is right, the sums are not."),
    "speed": (
        "Speed of decoding, and cost of compression", "python -m experiments.speed --compile",
        "See: after 2,048 tokens, a batch of 8 decodes 1.9 times as fast with SnapKV as with the full "
        "cache, and 1.3 times as fast with KVzip. KVzip's compression, which rereads the prompt, takes 2.2 "
        "times as long as the prefill.\n\n"
        "The tables time a decoding step and its floor, the compression, steps with compressed caches, our "
        "full cache inside a model of `transformers` (`nanollm/hf/bridge.py`), and our decoder against "
        "theirs on the same weights. Before the last one, a check makes sure that both write the same "
        "tokens."),
    "growth": (
        "Growth of the cost with the text", "python -m experiments.speed --what growth",
        "See: KVzip's compression takes 2.2 times as long as reading 512 tokens, and 2.7 times as long as "
        "reading 16,384. SnapKV's grows more slowly than the length (exponent 0.93).\n\n"
        "![three costs over the tokens](notebooks/growth.png)\n\n"
        "Texts have 512 to 16,384 tokens. An exponent is the slope of a line through all lengths, with "
        "both axes logarithmic."),
    "large": (
        "Speed and memory in any model's shape", "python -m experiments.speed --what large",
        "See: after 4 prompts of 1,024 tokens, SnapKV holds a quarter of the full cache's memory (2.13 of "
        "8.52 MB), but its peak is higher than the full cache's (9.89 against 9.37 MB), since the whole "
        "prompt is cached first.\n\n"
        "Weights are random, here of a small shape on a CPU. No GPU has run this yet. On a GPU, `python -m "
        "experiments.speed --what large --shape llama3-8b --lengths 8192 32768 65536 --batch 1 4 16` "
        "measures real sizes, the bytes that the GPU's allocator counts, and decoding with and without "
        "kernels."),
    "resources": (
        "Kernels, compiled", "python -m kernels.bench --resources",
        "See: no kernel spills registers to memory (`stack` is 0).\n\n"
        "Each kernel is compiled for an H100, for `bf16` and `fp16` numbers. `registers` are per thread; "
        "`stack` and `shared` are bytes, `shared` of the shared memory of one program. No GPU has timed "
        "the kernels yet."),
}
FIGURES = {"all": "notebooks/compare.png", "growth": "notebooks/growth.png",
           "harder": "notebooks/harder.png"}  # what --figure writes
COMPARED = "short", "all", "learned", "additions"  # sections of python -m nanollm; their rows are shortened


# ---- stored rows ---

def rows(name: str) -> list[dict]:
    """Return the stored rows of a section."""
    return json.loads((HERE / f"{name}.json").read_text())["rows"]


def by_method(name: str) -> dict[tuple[str, float | None], dict]:
    """Return the rows of a section of `python -m nanollm`, by method and keep ratio."""
    return {(row["method"], row["keep_ratio"]): row for row in rows(name)}


def shortened(rows: list[dict]) -> list[dict]:
    """Return rows of `python -m nanollm` without the numbers of each document, which take megabytes.

    The row of an addition gets `changes` against the row without it: [mean, standard error].
    """
    for base in rows:
        for row in table.on_top(base, rows):
            row["changes"] = {name: paired(row, base, keys) for name, keys in table.MEASURES.items()}
    dropped = "each", "l1", "model"  # model is a path
    return [{key: x for key, x in row.items() if key not in dropped} for row in rows]


def run(name: str, scratch: Path):
    """Run a section's command and store its rows, with command, date and machine.

    CalledProcessError, and nothing is stored, if the command fails.
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
    """Store rows as JSON, one per line."""
    head = json.dumps(dict(command=command, machine=machine, date=date), indent=1, ensure_ascii=False)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / f"{name}.json").write_text(f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n')


def hardware() -> str:
    """Return a line on this machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(": ")[1] for line in info.splitlines() if line.startswith("model name")]
    return (f"{os.cpu_count()} cores of an {names[0] if names else platform.processor()}, "
            f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}")


# ---- RESULTS.md ---

def compared(rows: list[dict], short: bool = False) -> str:
    """Return the tables that `python -m nanollm` prints for these rows, without the glossary."""
    first = rows[0]
    lines = [table.header(first["tokens"], first["documents"], first["seed"], short),
             *(table.show(row, short) for row in rows)]
    below = table.findings(rows) if short else f"{table.ADDITIONS_TERMS}\n\n{additions(rows)}"
    return "\n".join([*lines, "", below])


def additions(rows: list[dict]) -> str:
    """Return a table of each method's means and, below them, the changes by its additions."""
    cells = [["method", "keep", *table.MEASURES]]
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
    """Return a section's rows as text, made by `show` of the module that its command runs."""
    if name in COMPARED:
        return additions(rows(name)) if name == "additions" else compared(rows(name), name == "short")
    module = "experiments.claims.claims_renderer" if name == "claims" else SECTIONS[name][1].split()[2]
    return import_module(module).show(rows(name))


def section(name: str) -> str:
    """Return a section of RESULTS.md. SystemExit if its rows come from another command."""
    title, command, words = SECTIONS[name]
    stored = json.loads((HERE / f"{name}.json").read_text())
    if stored["command"] != command:
        raise SystemExit(f"error: stored/{name}.json is of `{stored['command']}`, not of `{command}`; "
                         f"run python -m experiments.render {name}")
    source = f"`{command}` ({stored['date']}, {stored['machine']})"
    return f"## {title}\n\n{words}\n\n{source}:\n\n```\n{text(name).strip(chr(10))}\n```"


def training(runs: dict[str, dict]) -> str:
    """Return a table with a column for each run, from the reports that `python -m nanollm train` writes."""
    names, runs = list(runs), list(runs.values())
    percent = lambda x: f"{100 * x['value']:.1f} ± {100 * x['standard_error']:.1f} %"
    cells = [["", *names], ["---"] * (1 + len(runs)), ["command", *(f"`{run['command']}`" for run in runs)],
             ["hardware", *(run["hardware"] for run in runs)],
             ["minutes", *(f"{run['minutes']:.0f}" for run in runs)],
             ["training tokens", *(f"{run['training_tokens'] / 1e6:.1f} M" for run in runs)],
             ["parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in runs)],
             ["documents a task", *(str(run["documents_per_figure"]) for run in runs)]]
    for name in dict.fromkeys(name for run in runs for name in run["exact_match"]):
        found = [run["exact_match"].get(name) for run in runs]
        cells.append([name.replace("_", " "), *(percent(x) if x else "–" for x in found)])
    cells.append(["copy 512, by token", *(f"{100 * run['copy_512_by_token']:.1f} %" for run in runs)])
    cells += [[f"bits per byte of held-out text, {name}",
               *(f"{run['bits_per_byte'][name]:.2f}" for run in runs)] for name in runs[0]["bits_per_byte"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def shipped() -> str:
    """Return the section on the shipped decoders, and on a larger one."""
    runs = {name: json.loads((folder / "train.json").read_text()) for name, folder in SHIPPED.items()}
    trial = json.loads((ROOT / "experiments" / "stored" / "trial.json").read_text())
    notes = [f"{name}: {run['note']}" for name, run in runs.items() if "note" in run]
    return "\n\n".join((
        "## The shipped decoders",
        "See: with the full cache, both decoders find at least 97 % of the needles at every length up to "
        "2,048 tokens.\n\nThe upper rows describe the training. The lower rows are accuracies on held-out "
        "documents, by task and tokens: greedy decoding with the full cache, ± one standard error. Of `list` "
        "and `turns` each answer counts, and the right answers before it are given.",
        training(runs), *notes,
        "### Is the decoder too small?",
        "See: no. With twice the layers, lists (`list`) and exact copies (`copy`) stay as hard, within one "
        "standard error. Needles improve by 0.4 to 2.3 percentage points.\n\n"
        "Both runs continue *learned* on the same documents. One has the same 6 layers, the other 12: each "
        "layer was copied, and the copies add nothing at first (`--deeper 2`). Other work was done beside "
        "them. Their weights are not in this repository.",
        training(trial)))


def rendered() -> str:
    """Return the text of RESULTS.md."""
    anchor = lambda title: "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")
    head = ("# Results\n\nEach table has the command that measured its rows, with date and machine. "
            "`python -m experiments.render NAME` runs the command again; the names are in the list below. "
            "Seed 0 fixes accuracies, KL, L1 and bytes; other machines may round last digits differently. "
            "Compare times only within a table. [CLAIMS.md](CLAIMS.md) lists the papers' claims and says "
            "whether they hold here.")
    glossary = (f"Columns and terms in many tables:\n\n```\n{table.terms()}\n"
                "built     decoder whose initial weights contained retrieval heads (nanollm/tiny)\n"
                "learned   decoder of the same shape that learned its own (nanollm/tiny_learned)\n```")
    contents = "\n".join(f"- [{title}](#{anchor(title)}): `{name}`"
                         for name, (title, _, _) in SECTIONS.items())
    return "\n\n".join((head, contents, glossary, *map(section, SECTIONS), shipped())) + "\n"


def main(argv: list[str]):
    if argv == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != rendered():
            raise SystemExit("error: RESULTS.md differs from the stored rows; run experiments.render")
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
        raise SystemExit(f"error: {', '.join(failed)} failed; the old rows stay in RESULTS.md")


if __name__ == "__main__":
    main(sys.argv[1:])
