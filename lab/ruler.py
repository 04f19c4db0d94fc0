"""Write RULER's documents as a file of questions (Hsieh et al., arXiv 2404.06654).

    python -m lab.ruler --model smollm2 --tokens 4096 --tasks niah_single_1 vt --out ruler.jsonl

lm-evaluation-harness makes them (pip install "lm-eval[ruler]", optional). Each line of the file is
a JSON object: context, question, answer_prefix, answers, task, max_new_tokens. The question begins
where NVIDIA/kvpress divides RULER, so that a query-agnostic method compresses the context alone.

RULER hides needles in Paul Graham's essays, which have to be downloaded. Unless --essays is given,
this repository's held-out text replaces them; the names of these tasks then end in *. A document
has a random part of either.
"""

import argparse
from bisect import bisect_right
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
import io
import json
from pathlib import Path
import random
import re
import sys
from tempfile import TemporaryDirectory
from types import SimpleNamespace
import zlib

import numpy as np
from tqdm import tqdm

from lab import command_line, corpus

# options of lm-evaluation-harness's generator
TABLE = """
task            type_haystack type_needle_k type_needle_v num_needle_k num_needle_v num_needle_q
niah_single_1   repeat        words         numbers       1            1            1
niah_single_2   essay         words         numbers       1            1            1
niah_single_3   essay         words         uuids         1            1            1
niah_multikey_1 essay         words         numbers       4            1            1
niah_multikey_2 needle        words         numbers       1            1            1
niah_multikey_3 needle        uuids         uuids         1            1            1
niah_multivalue essay         words         numbers       1            4            1
niah_multiquery essay         words         numbers       1            1            4
"""
NAMES, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
NIAH = {row[0]: row[1:] for row in ROWS}
OFFLINE = [*NIAH, "vt", "cwe", "fwe"]
DOWNLOADED = ["qa_1", "qa_2"]
# a reply's tokens, by the beginning of a task's name
REPLY = dict(niah=128, vt=30, cwe=120, fwe=50, qa=32)
# context and question; of several matches the last
PARTS = r"(.*\n)((?:What |(?<!\n\n)Question: |Answer the question ).*)"
FIELDS = {"context", "question", "answers"}
LEAST = 1024  # with fewer tokens lm-evaluation-harness may never end (vt)
PUNKT = "collocations.tab sent_starters.txt abbrev_types.txt ortho_context.tab"


def document(task: str, seed: str, tokens: int, tokenizer, words: list[str]) -> dict:
    """Return lm-evaluation-harness's document of at most `tokens` tokens, its reply included.

    words: hide the needles of a task with essays in a part of these.
    """
    if "essay" not in NIAH.get(task, ()):
        return sample(task, seed, tokens, tokenizer)
    start = random.Random(seed).randrange(max(1, len(words) - tokens))

    # one part of n words; lm-evaluation-harness would add 500 words at a time
    def of_words(n: int) -> dict:
        text = " ".join(words[start : start + n])
        return sample(task, seed, sys.maxsize, tokenizer, [text])

    n = bisect_right(range(tokens), tokens, key=lambda n: of_words(n)["length"])
    return of_words(n - 1)


def sample(task: str, seed: str, tokens: int, tokenizer, haystack=None) -> dict:
    """Return a document. It depends on the arguments alone: all random states are set."""
    random.seed(seed)
    np.random.seed(zlib.crc32(seed.encode()))  # noqa: NPY002
    utilities("cwe").RNG.seed(seed)
    module = utilities(task)
    # RULER adds 10 parts at a time, too many for short documents
    step = 1 if tokens < 4096 else 10
    if task == "vt":
        make = module.sys_vartrack_w_noise_random
        example = make(tokenizer, 1, 500, 5)[0]
        return make(tokenizer, 1, tokens, step, icl_example=example)[0]
    if task == "cwe":
        return module.sys_word_pair_random(1, tokens, tokenizer)[0]
    if task == "fwe":
        room = tokens - REPLY[task]  # RULER does not count the reply
        return module.sys_kwext(tokenizer, room, 1, tokens // 50)[0]
    if task in DOWNLOADED:
        questions, texts = downloaded(task)
        some = random.sample(questions, 1)
        return module.generate_samples(
            tokenizer, texts, some, tokens, 1, incremental=step
        )[0]
    options = {
        name: int(x) if x.isdigit() else x for name, x in zip(NAMES[1:], NIAH[task])
    }
    return module.generate_samples(
        haystack or module.get_haystack(options["type_haystack"]),
        tokenizer,
        max_seq_length=tokens,
        template=module.TEMPLATE,
        num_samples=1,
        **options,
    )[0]


def family(task: str) -> str:
    return task.split("_")[0]


def utilities(task: str):
    """Return lm-evaluation-harness's module for a task."""
    return import_module(f"lm_eval.tasks.ruler.{family(task)}_utils")


def downloaded(task: str):
    """Return the questions and texts of SQuAD (qa_1) or HotpotQA (qa_2)."""
    module = utilities(task)
    return module.read_squad() if task == "qa_1" else module.read_hotpotqa()


def line_of(task: str, made: dict, essays: bool) -> dict:
    """Return the line of a document of lm-evaluation-harness."""
    if not made["outputs"]:
        raise ValueError(f"{task} has no room for its words; raise --tokens")
    context, question = re.fullmatch(PARTS, made["input"], re.S).groups()
    line = dict(
        context=context,
        question=question,
        answer_prefix=made["gen_prefix"],
        answers=made["outputs"],
        task=task,
        max_new_tokens=REPLY[family(task)],
    )
    if "essay" in NIAH.get(task, ()) and not essays:
        line |= dict(task=f"{task}*", haystack="held-out text of nanollm/held_out")
    return line


def prepare(folder: str, tasks: list[str], essays: bool) -> list[str]:
    """Import and download all that the tasks need; return the words that replace the essays.

    folder: is given a Punkt without abbreviations, which nltk reads if it has no punkt_tab.
    """
    english = Path(folder, "tokenizers/punkt_tab/english")
    english.mkdir(parents=True)
    for name in PUNKT.split():
        (english / name).touch()
    try:
        import_module("nltk").data.path.append(folder)
        utilities("niah")
        for task in {*tasks} & {*DOWNLOADED}:
            downloaded(task)
        if essays:
            return utilities("niah").get_haystack("essay")
    except ImportError:
        raise ValueError(
            'lm-evaluation-harness is missing; type pip install "lm-eval[ruler]"'
        ) from None
    except OSError:
        raise ValueError(
            "the network was not reached; leave out --essays, qa_1 and qa_2"
        ) from None
    return " ".join(corpus.text("test")).split()


def is_ours(data: bytes) -> bool:
    """Return whether each line is a JSON object with a question's fields."""
    lines = map(command_line.read_json, data.splitlines())
    return all(isinstance(line, dict) and FIELDS <= line.keys() for line in lines)


def main(argv: list[str]):
    """Make the documents; write them if all could be made."""
    args = read_options(argv)
    before = command_line.check_output(args.out, "questions", is_ours)

    from lab.loading import load  # loads torch
    from nanollm.check import whole

    whole("--tokens", args.tokens, LEAST)
    whole("--documents", args.documents, 1)
    tasks = [*dict.fromkeys(args.tasks)]
    jobs = [(task, i) for task in tasks for i in range(args.documents)]
    bar = tqdm(jobs, "documents", leave=False, disable=None)
    text = ""
    total = 0
    console = io.StringIO()  # lm-evaluation-harness prints and has bars of its own
    with (
        TemporaryDirectory() as folder,
        redirect_stdout(console),
        redirect_stderr(console),
    ):
        words = prepare(folder, tasks, args.essays)
        encode = load(args.model)[1].encode_ordinary

        def tokenizer(text: str):
            return SimpleNamespace(input_ids=encode(text))

        for task, i in bar:
            made = document(
                task, f"{args.seed} {task} {i}", args.tokens, tokenizer, words
            )
            line = line_of(task, made, args.essays)
            text += json.dumps(line, ensure_ascii=False) + "\n"
            total += len(encode(made["input"])) + line["max_new_tokens"]
    command_line.replace(args.out, text.encode(), before)
    print(
        f"{len(jobs)} documents of {len(tasks)} tasks, on average {total / len(jobs):.0f} tokens "
        f"with the reply, are in {args.out}"
    )


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.ruler",
        description="Write RULER's documents as a file of questions.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=command_line.TINY,
        help="model whose tokenizer counts the tokens: a folder, a GGUF file, or smollm2; "
        "default nanollm/tiny",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="greatest length of a document with its question and its reply; default 4096",
    )
    parser.add_argument(
        "--documents", type=int, default=32, help="documents of each task; default 32"
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=OFFLINE + DOWNLOADED,
        default=OFFLINE,
        metavar="TASK",
        help=f"RULER's tasks: {', '.join(OFFLINE)} (default: all these), and qa_1 (SQuAD) and "
        "qa_2 (HotpotQA), which are downloaded",
    )
    parser.add_argument(
        "--essays",
        action="store_true",
        help="download Paul Graham's essays; default: the held-out text replaces them",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of questions, a JSON object a line",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
