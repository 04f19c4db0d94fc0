"""Write RULER's documents as a file of questions (Hsieh et al., arXiv 2404.06654).

    python -m lab.ruler --model smollm2 --tokens 4096 --tasks niah_single_1 vt --out ruler.jsonl

lm-evaluation-harness makes them (pip install "lm-eval[ruler]", optional). Each line of the file is
a JSON object: context, question, answer_prefix, answers, task, max_new_tokens, and haystack if
other text replaces the essays. The question begins where NVIDIA/kvpress divides RULER, so that a
query-agnostic method compresses the context alone.

Five tasks hide needles in Paul Graham's essays, which must be downloaded. Unless --essays is given,
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
NIAH = {row[0]: row for row in ROWS}
ESSAYS = [task for task in NIAH if "essay" in NIAH[task]]
OFFLINE = [*NIAH, "vt", "cwe", "fwe"]
# functions that download the questions and texts of SQuAD and HotpotQA
DOWNLOADED = dict(qa_1="read_squad", qa_2="read_hotpotqa")
# a reply's tokens, by the beginning of a task's name
REPLY = dict(niah=128, vt=30, cwe=120, fwe=50, qa=32)
# how a question begins; the last match counts
QUESTION = (
    "What (is|are all) the special magic|Answer the question based on"
    "|Question: (Find all variables|What are the 10 most common|Do not provide)"
)
FIELDS = {"context", "question", "answers", "answer_prefix", "task", "max_new_tokens"}
LEAST = 1024  # with fewer tokens lm-evaluation-harness may never end (vt)
PUNKT = "collocations.tab sent_starters.txt abbrev_types.txt ortho_context.tab"


def line_of(task: str, index: int, args, encode, words: list[str]) -> dict:
    """Return a line of the file. It depends on the options, the task and the index alone.

    words: hide the needles of ESSAYS, from a random word on.
    """
    seed = f"{args.seed} {task} {index}"
    if task in ESSAYS:
        first = random.Random(seed).randrange(max(1, len(words) - args.tokens))
        made = longest(task, seed, args.tokens, encode, words[first:])
    else:
        made = document(task, seed, args.tokens, encode)
    answers = made["outputs"]
    if not answers:
        raise ValueError(f"{task} does not fit; raise --tokens, now {args.tokens}")
    text = made["input"]
    *_, match = re.finditer(QUESTION, text)
    start = match.start()
    line = dict(
        context=text[:start],
        question=text[start:],
        answer_prefix=made["gen_prefix"],
        answers=answers,
        task=task,
        max_new_tokens=REPLY[task.split("_")[0]],
    )
    if args.reply:
        line["max_new_tokens"] = args.reply * (len(answers) + 1)
    if task in ESSAYS and not args.essays:
        line |= dict(task=f"{task}*", haystack="held-out text of nanollm/held_out")
    return line


def longest(task: str, seed: str, tokens: int, encode, words: list[str]) -> dict:
    """Return the document with as many words as fit.

    lm-evaluation-harness would add 500 at a time, so it gets them as one.
    """

    def of_words(n: int) -> dict:
        return document(task, seed, sys.maxsize, encode, [" ".join(words[:n])])

    n = bisect_right(range(tokens), tokens, key=lambda n: of_words(n)["length"])
    return of_words(n - 1)


def document(task: str, seed: str, tokens: int, encode, haystack=None) -> dict:
    """Return lm-evaluation-harness's document of at most `tokens` tokens with its reply."""
    random.seed(seed)
    np.random.seed(zlib.crc32(seed.encode()))  # noqa: NPY002
    utilities("cwe").RNG.seed(seed)
    module = utilities(task)
    tokenizer = lambda text: SimpleNamespace(input_ids=encode(text))
    # RULER adds 10 parts at a time, too many for short documents
    step = 1 if tokens < 4096 else 10
    if task == "vt":
        make = module.sys_vartrack_w_noise_random
        example = make(tokenizer, 1, 500, 5)[0]
        made = make(tokenizer, 1, tokens, step, icl_example=example)
    elif task == "cwe":
        made = module.sys_word_pair_random(1, tokens, tokenizer)
    elif task == "fwe":
        room = tokens - REPLY[task]  # RULER does not count the reply
        made = module.sys_kwext(tokenizer, room, 1, tokens // 50)
    elif task in NIAH:
        options = dict(zip(NAMES[1:4], NIAH[task][1:4]))
        options |= zip(NAMES[4:], map(int, NIAH[task][4:]))
        made = module.generate_samples(
            haystack or module.get_haystack(options["type_haystack"]),
            tokenizer,
            max_seq_length=tokens,
            template=module.TEMPLATE,
            num_samples=1,
            **options,
        )
    else:
        questions, texts = getattr(module, DOWNLOADED[task])()
        some = random.sample(questions, 1)
        made = module.generate_samples(
            tokenizer, texts, some, tokens, 1, incremental=step
        )
    return made[0]


def utilities(task: str):
    """Return lm-evaluation-harness's module for a task."""
    return import_module(f"lm_eval.tasks.ruler.{task.split('_')[0]}_utils")


def prepare(folder: str, tasks: list[str], essays: bool) -> list[str]:
    """Import and download what the tasks need; return the words in which needles are hidden.

    folder: is given a Punkt without abbreviations, which nltk reads if it has no punkt_tab.
    """
    english = Path(folder, "tokenizers/punkt_tab/english")
    english.mkdir(parents=True)
    for name in PUNKT.split():
        (english / name).touch()
    try:
        import_module("nltk").data.path.append(folder)
        niah = utilities("niah")
        for task in DOWNLOADED.keys() & tasks:
            getattr(utilities(task), DOWNLOADED[task])()
        if essays:
            return niah.get_haystack("essay")
    except ImportError:
        why = 'lm-evaluation-harness is missing; type pip install "lm-eval[ruler]"'
        raise ValueError(why) from None
    except OSError:
        why = "the network was not reached; leave out --essays, qa_1 and qa_2"
        raise ValueError(why) from None
    return " ".join(corpus.text("test")).split()


def is_ours(data: bytes) -> bool:
    """Return whether each line is a JSON object with a question's fields."""
    lines = map(command_line.read_json, data.splitlines())
    for line in lines:
        if not isinstance(line, dict) or not FIELDS <= line.keys():
            return False
        if str(line["task"]).rstrip("*") not in {*OFFLINE, *DOWNLOADED}:
            return False
    return True


def main(argv: list[str]):
    """Make the documents; write them if all could be made."""
    args = read_options(argv)
    before = command_line.check_output(args.out, "questions", is_ours)

    from lab.loading import load  # loads torch
    from nanollm.check import whole

    whole("--tokens", args.tokens, LEAST)
    whole("--documents", args.documents, 1)
    if args.reply is not None:
        whole("--reply", args.reply, 1)
    encode = load(args.model)[1].encode_ordinary
    jobs = [(task, i) for i in range(args.documents) for task in args.tasks]
    bar = tqdm(jobs, "documents", leave=False, disable=None)
    text = ""
    console = io.StringIO()  # lm-evaluation-harness prints, and has bars of its own
    with (
        TemporaryDirectory() as folder,
        redirect_stdout(console),
        redirect_stderr(console),
    ):
        words = prepare(folder, args.tasks, args.essays)
        for task, i in bar:
            line = line_of(task, i, args, encode, words)
            text += json.dumps(line, ensure_ascii=False) + "\n"
    command_line.replace(args.out, text.encode(), before)
    print(f"{len(jobs)} documents of {len(args.tasks)} tasks are in {args.out}")


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.ruler",
        description="Write RULER's documents as a file of questions.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=command_line.TINY,
        help="its tokenizer counts the tokens: a folder, a GGUF file, or smollm2; default "
        "nanollm/tiny",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="the most tokens of a document with question and reply; default 4096",
    )
    parser.add_argument(
        "--documents", type=int, default=32, help="documents of each task; default 32"
    )
    parser.add_argument(
        "--reply",
        type=int,
        metavar="TOKENS",
        help="limit of a reply, in place of RULER's: so many tokens an answer, and as many more",
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[*OFFLINE, *DOWNLOADED],
        default=OFFLINE,
        metavar="TASK",
        help=f"default: {', '.join(OFFLINE)}; qa_1 (SQuAD) and qa_2 (HotpotQA) are downloaded",
    )
    parser.add_argument(
        "--essays",
        action="store_true",
        help="download Paul Graham's essays; default: held-out text in their place",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file of questions"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
