"""Compare all methods on harder tasks: several turns, changed facts, chains, lists, rules, long writing.

    python -m experiments.harder         # all tasks and methods: an hour and a half
    python -m experiments.harder --tasks turns rule --methods snap_kv kvzip --model FOLDER

The documents come from nanollm/measure/hard_tasks.py. The question comes after the compression (agnostic) or
is part of the prompt (aware). `depth` places a needle at five depths. `writing` reads a prompt of 64 tokens
and then 256 tokens of real text one by one, while the cache stays within its budget. A fact of the prompt is
asked for before and after these tokens.
"""
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
import math
from pathlib import Path
from textwrap import fill

import torch
from torch import Tensor
import torch.nn.functional as F
from tqdm import tqdm

from experiments.script import (arguments, check_budgets, decoders, finish, grouped, keep_label,
                                mean_and_error, parser)
from methods.cam import CaM
from methods.compress_again import again
from methods.critical_kv import two_stage
from methods.h2o import H2O
from methods.key_diff import KeyDiff
from methods.kv_reviver import KVReviver
from methods.kvzip import KVzip
from methods.moment_kv import MomentKV
from methods.r_kv import RKV
from methods.random_eviction import RandomEviction
from methods.scissorhands import Scissorhands
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from methods.tova import TOVA
from nanollm.cache import LayerCache, copied
from nanollm.commands.compare import check_files
from nanollm.commands.registry import calibrated, given, has_budget, pick
from nanollm.commands.shell import check_keep, command, cores
from nanollm.commands.text_table import text_table
from nanollm.generate import end_prompt, prefill
from nanollm.measure.benchmark import Benchmark, cut, in_forks, replayed_or_read
from nanollm.measure.evaluate import Make, answers, check_size, maker, retrieve
from nanollm.measure.hard_tasks import HARD, HardTasks
from nanollm.measure.tasks import Batch
from nanollm.ranking import top
from nanollm.tokenizer import boundaries
from nanollm.window import Selection, WindowCache

DEPTH_RATIOS = 0.125, 0.0625
DEPTHS = 0.0, 0.25, 0.5, 0.75, 1.0
DEEP = ("snap_kv", "pyramid_kv", "chunk_kv", "layer_defensive_kv", "worst_query", "drop_kv",
        "expected_attention", "key_diff", "duo_attention", "kvzip", "kvzip_fast", "one_reading", "h2o",
        "tova", "streaming_llm", "scissorhands", "random_ends", "random", "quest",
        "quantized_2")  # methods of the task `depth`
BATCH = 32                    # documents that the model reads at once
SOLVED = 0.75                 # a batch is measured if the full cache's accuracy is at least this
PROMPT, WRITTEN = 64, 256     # tokens of the task `writing`
# name of a batch: its task and the task's options
BATCHES = {"turns": ("turns", {}), "latest": ("latest", {}), "list": ("list", {}), "count": ("count", {}),
           "paraphrase": ("paraphrase", {})}
BATCHES |= {f"hops {n}": ("hops", dict(hops=n)) for n in (2, 3, 4)}
BATCHES |= {f"{'banned' if banned else 'allowed'}, {first} first": ("rule", dict(first=first, banned=banned))
            for first in ("form", "ban") for banned in (False, True)}
ALL = (*HARD, "depth", "writing")  # the choices of --tasks
# measurement → the one that the full cache has to solve
NEEDS = {f"leak, ban {place}": f"ban {place}" for place in ("first", "second")} | {
    f"trace {n}": f"hops {n}" for n in (2, 3, 4)} | {"old value": "latest"}


# ---- known repairs and baselines ---

@dataclass(frozen=True)
class KeepPrefix(Selection):
    """SnapKV that never evicts the first tokens, where the rules stand."""
    first: int = 24

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        pooled = cache.pool(scores.mean(2))
        pooled[..., :self.first] = math.inf
        return top(pooled, budget)


@dataclass(frozen=True)
class Evenly(Selection):
    """SnapKV that first keeps equally many entries of each 16 tokens, then the highest of the others.

    The idea is that of fair eviction (arXiv 2510.00231), which shares the budget between instructions.
    """
    size: int = 16

    def __call__(self, cache: WindowCache, scores: Tensor, budget: int | Tensor) -> Tensor:
        pooled = cache.pool(scores.mean(2))
        n = pooled.shape[-1]
        parts = F.pad(pooled, (0, -n % self.size), value=-1).unflatten(-1, (-1, self.size))
        each = top(parts.flatten(0, 1), budget // parts.shape[2])
        return two_stage(each.view_as(parts).flatten(2)[..., :n], pooled, budget)


REPAIRS = {"snap_kv, prefix kept": partial(SnapKV, select=KeepPrefix()),
           "snap_kv, evenly": partial(SnapKV, select=Evenly()),
           "kvzip, prefix kept": partial(KVzip, sinks=24)}
WRITERS = {"h2o": H2O, "tova": TOVA, "key_diff": KeyDiff, "scissorhands": Scissorhands, "cam": CaM,
           "streaming_llm": StreamingLLM, "kv_reviver": KVReviver,
           "moment_kv": MomentKV, "snap_kv again": partial(again(SnapKV), every=8),
           "r_kv again": partial(again(RKV), every=8), "random": RandomEviction,
           "random_ends": partial(RandomEviction, ends=0.1)}
KEEPERS = {"random, prompt kept": partial(RandomEviction, prompt=True),  # if the budget exceeds the prompt
           "random_ends, prompt kept": partial(RandomEviction, prompt=True, ends=0.1)}


# ---- measurements of one batch ---

def numbers(encoding, vocab_size: int) -> Tensor:
    """Return (vocab_size,) of bool: the tokens that contain a digit."""
    def digit(token: int) -> bool:
        try:
            return any(c.isdigit() for c in encoding.decode([token]))
        except KeyError:  # the vocabulary may be padded with ids that the tokenizer lacks
            return False
    return torch.tensor([digit(token) for token in range(vocab_size)])


def judged(name: str, batch: Batch, said: list[Tensor], number: Tensor) -> dict[str, Tensor]:
    """Return measurements (B,) by name, from the tokens that a method generated for each answer."""
    tokens, said = torch.from_numpy(batch.tokens), [x.cpu() for x in said]
    right = [(x[:, :a.stop - a.start] == tokens[:, a]).all(1) for x, a in zip(said, batch.answers)]
    task, answer = BATCHES.get(name, (name,))[0], tokens[:, batch.answers[0]]
    if task == "turns":
        return {f"turn {i}": x for i, x in enumerate(right, 1)}
    if task == "list":
        each = {f"value {i}": x for i, x in enumerate(right, 1)}
        return each | {"list": torch.stack(right).float().mean(0)}
    if task == "latest":
        return {"latest": right[0], "old value": (said[0] == stated(batch, 0)).all(1)}
    if task == "hops":
        length = lambda x: torch.where(number[x].any(1), number[x].int().argmax(1) + 1, x.shape[1])
        return {name: right[0], f"trace {name[-1]}": length(said[0]) / length(answer)}
    if task == "rule":
        form, ban = ("first", "second") if "form first" in name else ("second", "first")
        obeyed = {f"form {form}": said[0][:, 0] == answer[:, 0]}
        word = says(said[0], answer[:, 1:])
        if name.startswith("allowed"):
            return obeyed | {"answer": word}
        banned = stated(batch, -1)[:, :-1]  # a word is one token shorter than an answer, which has a mark
        return obeyed | {f"ban {ban}": word, f"leak, ban {ban}": says(said[0], banned)}
    return {name: right[0]}


def says(said: Tensor, words: Tensor) -> Tensor:
    """Return (B,): whether the tokens `said` (B, n) contain words (B, m) one after another."""
    return (said.unfold(1, words.shape[1], 1) == words.unsqueeze(1)).all(2).any(1)


def stated(batch: Batch, mention: int) -> Tensor:
    """Return the tokens (B, n) that follow the question's key in the context, as many as an answer has.

    mention: 0 for the key's first mention, −1 for its last.
    """
    answer, found = batch.answers[0], []
    asked = slice(answer.start - 4, answer.start)  # the key and what follows it
    for row in torch.from_numpy(batch.tokens):
        windows = row[:batch.question].unfold(0, 4, 1)
        place = torch.nonzero((windows == row[asked]).all(1)).flatten()[mention] + 4
        found.append(row[place:place + answer.stop - answer.start])
    return torch.stack(found)


@torch.no_grad()
def written(model, batch: Batch, make: Make) -> dict[str, Tensor]:
    """Feed the true text after the first PROMPT tokens one by one; return KL by quarter, and two answers.

    KL(full ‖ compressed) of the next token, (B,): the mean over each quarter of the tokens. The fact is asked
    for right after the prompt, and at the end.
    """
    tokens = torch.from_numpy(batch.tokens).to(model.embed.weight.device)
    full, caches = model(tokens[:, :batch.question]).log_softmax(-1), make(batch.question, tokens[:, :PROMPT])
    prefill(model, tokens[:, :PROMPT], caches)
    end_prompt(model, tokens[:, :PROMPT], caches)
    at_once = answers(model, tokens, batch.answers, batch.question, copied(caches))[0]
    steps = [model(token[:, None], caches) for token in tokens[:, PROMPT:batch.question].unbind(1)]
    log_p, full = torch.cat(steps, 1).log_softmax(-1), full[:, PROMPT:]
    kl = (full.exp() * (full - log_p)).sum(-1).tensor_split(4, 1)
    said = answers(model, tokens, batch.answers, batch.question, caches)[0]
    right = {name: (x == tokens[:, batch.answers[0]]).all(1)
             for name, x in (("fact at once", at_once), ("fact at the end", said))}
    return {f"KL {i}": x.mean(1) for i, x in enumerate(kl, 1)} | right


# ---- all batches of a decoder ---

class Pieces:
    """The recorded batches of one decoder."""

    def __init__(self, model, tasks: HardTasks, chosen: list[str], documents: int, T: int):
        made = {name: (task, options, T) for name, (task, options) in BATCHES.items() if task in chosen}
        if "depth" in chosen:
            made |= {f"depth {depth:g}": ("needle", dict(depth=depth), T) for depth in DEPTHS}
        if "writing" in chosen:
            ask = T - tasks.batches("needle", 0, 1, T, facts=1)[0].question
            made["writing"] = "needle", dict(facts=1, depth=0.1), PROMPT + WRITTEN + ask
        self.model, self.number = model, numbers(tasks.encoding, model.config.vocab_size)
        self.parts = [(name, part) for name, (task, options, length) in made.items()
                      for whole_batch in tasks.batches(task, 0, documents, length, **options)
                      for part in cut(whole_batch, BATCH)]
        self.recorded = [None if name == "writing" else Benchmark.read(model, {name: part}, None)
                         for name, part in self.parts]

    def measured(self, i: int, make: Make) -> dict[str, dict[str, Tensor]]:
        """Return the measurements of one batch by setting."""
        name, batch = self.parts[i]
        if name == "writing":
            return dict(writing=written(self.model, batch, make))
        # a trace may be longer than the right one, and a banned word may come late
        more = dict(hops=8, rule=3).get(BATCHES.get(name, (name,))[0], 0)
        spans = [slice(a.start, a.stop + more) for a in batch.answers]
        asking = lambda model, tokens, _, fed, caches: answers(model, tokens, spans, fed, caches)
        retrieved = replayed_or_read(partial(retrieve, asking=asking), self.model, batch, make,
                                     self.recorded[i].recordings[name])
        return {setting: judged(name, batch, said, self.number) for setting, said in retrieved.items()}

    def solved(self) -> set[str]:
        """Return the batches that say something: the full cache solves one of their measurements."""
        make = maker(self.model, LayerCache, None)
        return {name for name, _ in self.parts if name == "writing" or any(
            x[0] >= SOLVED for row in self.rows(make, {name}) for key, x in row.items()
            if key != "setting" and key not in NEEDS)}

    def rows(self, make: Make, wanted: Container[str]) -> list[dict]:
        """Return a row per setting with [mean, standard error] of each measurement of the wanted batches."""
        mine = [i for i, (name, _) in enumerate(self.parts) if name in wanted]
        found = {}
        for part in in_forks(lambda i: self.measured(mine[i], make), len(mine), min(cores(), len(mine) or 1)):
            for setting, values in part.items():
                for name, x in values.items():
                    found.setdefault(setting, {}).setdefault(name, []).append(x.float())
        return [dict(setting=setting) | {name: mean_and_error(torch.cat(x)) for name, x in values.items()}
                for setting, values in found.items()]


def measured(model, encoding, methods: dict, deep: dict, chosen: list[str], documents: int,
             T: int, keep_ratios: Sequence[float] = (0.25, 0.125)) -> list[dict]:
    """Return the rows of all methods on one decoder. deep: the methods of the task `depth`."""
    check_size(model, documents, 2, T)
    pieces = Pieces(model, HardTasks(encoding, "test"), chosen, documents, T)
    ends = boundaries(encoding, model.config.vocab_size)
    every, solved = {name for name, _ in pieces.parts}, pieces.solved()
    batches = dict(depth={name for name in every if name.startswith("depth")}, writing={"writing"} & every)
    batches["answers"] = every - batches["depth"] - batches["writing"]
    groups = (("answers", methods | REPAIRS, keep_ratios), ("depth", deep, DEPTH_RATIOS),
              ("writing", dict(full=LayerCache) | WRITERS, keep_ratios),
              ("writing", KEEPERS, [x for x in keep_ratios if x * (PROMPT + WRITTEN) > PROMPT]))
    jobs = [(table, name, Method, ratio) for table, group, ratios in groups if batches[table]
            for name, Method in group.items() for ratio in (ratios if has_budget(Method) else [None])]
    check_budgets(model, jobs, min(part.question for _, part in pieces.parts))
    options, rows = {}, []
    for table, name, Method, ratio in (bar := tqdm(jobs, leave=False, disable=None)):
        bar.set_description(name)
        if name not in options:
            options[name] = given(Method, window_size=8) | calibrated(Method, model, encoding)
        make = maker(model, Method, ratio, ends=ends, **options[name])
        wanted = batches[table] & solved if table == "answers" and name != "full" else batches[table]
        rows += [dict(table=table, method=name, keep_ratio=ratio) | row for row in pieces.rows(make, wanted)]
    return rows


# ---- tables ---

TERMS = """\
turn 1 … 4  accuracy of four questions, one after another, on one compressed prompt
latest      accuracy if a fact was changed; old value: share of answers that are the earlier value
hops n      accuracy of a chain of n facts, all steps written out; trace n: tokens up to the number, divided
            by those of the right chain; an answer may have 8 tokens more than the right one
list        accuracy of four numbers of a kind, in order; value i: of the i-th number
count       accuracy: which label has the most votes
form        share of answers with the right mark, if this rule is the text's first or second line
ban         share of answers that say "none" in place of the banned word, if this rule is first or second
leak        share of answers that say the banned word all the same
answer      share of answers that say the right word where no word is banned
paraphrase  accuracy of a needle that is asked for in other words
depth d     accuracy of a needle at depth d: 0 is the text's start, 1 its end
KL 1 … 4    KL divergence per token in each quarter of 256 tokens; fact: accuracy of a fact of the prompt,
            asked for right after the prompt or at the end. "again" compresses every 8 tokens, so it holds up
            to 8 entries more
A measurement in brackets: the full cache's own accuracy is below 0.75. A batch of documents in which it
solves nothing is measured with the full cache alone. A guess between the two marks, or between the two
values of `latest`, is right in half of the cases; the label of a random vote in 0.58."""
OVERVIEW = ("turn 1", "turn 4", "latest", "hops 2", "hops 4", "list", "count", "form first", "form second",
            "ban first", "ban second", "answer", "paraphrase")
DETAILS = ("turn 2", "turn 3", "old value", "hops 3", "trace 2", "trace 3", "trace 4", "value 1", "value 2",
           "value 3", "value 4", "leak, ban first", "leak, ban second")


def too_hard(rows: list[dict], names: Sequence[str]) -> list[str]:
    """Return the measurements at which the full cache's accuracy is below SOLVED."""
    full = next((row for row in rows if row["method"] == "full"), {})
    fails = lambda name: name in full and full[name][0] < SOLVED
    return [name for name in names if not name.startswith("KL") and fails(NEEDS.get(name, name))]


def columns(rows: list[dict], names: Sequence[str]) -> str:
    """Return a table: method, keep ratio, and the named measurements that the rows have."""
    full, *others = rows
    shown = [name for name in names if name in full and (not others or any(name in row for row in others))]
    weak = too_hard(rows, names)
    cells = lambda row: [f"{row[name][0]:.2f}" if name in row else "" for name in shown]
    table = text_table([["method", "keep", *(f"({name})" if name in weak else name for name in shown)],
                        *([row["method"], keep_label(row["keep_ratio"]), *cells(row)] for row in rows)])
    alone = ", ".join(f"{name} {full[name][0]:.2f}" for name in names if name in full and name not in shown)
    return "\n".join([table, *([fill(f"Too hard for the full cache: {alone}", 110)] if alone else [])])


def show(rows: list[dict]) -> str:
    """Return the tables of each decoder."""
    parts = [TERMS]
    for (decoder, table, setting), same in grouped(rows, "decoder", "table", "setting").items():
        title = dict(agnostic="question after the compression", aware="question in the prompt",
                     writing="long writing")[setting]
        measurements = [key for key, x in same[0].items() if isinstance(x, (list, tuple))]
        error = max((x[1] for row in same for key, x in row.items()
                     if key in measurements and key[:2] not in ("KL", "tr")), default=0)
        title = f"{decoder}, {'needles by depth, ' if table == 'depth' else ''}{title}"
        tables = {"": OVERVIEW, ", details": DETAILS} if table == "answers" else {"": measurements}
        parts += [f"{title}{more}; standard errors of accuracies up to {error:.2f}\n{columns(same, names)}"
                  for more, names in tables.items() if {*names} & {*measurements}]
    return "\n\n".join(parts)


def draw(rows: list[dict], file: Path):
    """Draw the overview at the highest keep ratio, question after the compression: a panel per decoder."""
    import matplotlib.pyplot as plt
    from nanollm.commands.plot import save
    rows = [row for row in rows if (row["table"], row["setting"]) == ("answers", "agnostic")]
    most = max((row["keep_ratio"] for row in rows if row["keep_ratio"]), default=None)
    panels = grouped([row for row in rows if row["keep_ratio"] in (None, most)], "decoder")
    named = [[name for name in OVERVIEW if name in same[0] and name not in too_hard(same, OVERVIEW)]
             for same in panels.values()]
    widths = [2.5 + 0.5 * len(names) for names in named]
    height = 1.5 + 0.27 * max(map(len, panels.values()))
    figure, axes = plt.subplots(1, len(panels), figsize=(sum(widths), height), layout="constrained",
                                squeeze=False, width_ratios=[1 + len(names) for names in named])
    for axis, ((decoder,), same), names in zip(axes[0], panels.items(), named):
        if not names:
            axis.set_title(f"{decoder}: the full cache solves none of the tasks")
            continue
        same = sorted(same, key=lambda row: -sum(row[name][0] for name in names))
        axis.imshow([[row[name][0] for name in names] for row in same], cmap="Blues", vmin=0, vmax=1.5,
                    aspect="auto")
        for y, row in enumerate(same):
            for x, name in enumerate(names):
                axis.text(x, y, f"{row[name][0]:.2f}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=9)
        axis.set_yticks(range(len(same)), [row["method"] for row in same], fontsize=9)
        axis.set_title(f"{decoder}, {keep_label(most)}")
    save(figure, file)


def main(argv: list[str] | None = None):
    made = parser("experiments.harder", __doc__, documents=32, length=512)
    made.add_argument("--tasks", nargs="+", default=[*ALL], choices=ALL, metavar="NAME",
                      help=f"tasks to measure; default all: {', '.join(ALL)}")
    made.add_argument("--methods", nargs="+", default=[], metavar="NAME",
                      help="methods to measure beside the full cache; default: all")
    made.add_argument("--figure", type=Path, metavar="FILE", help="file for a figure, .png, .pdf or .svg")
    made.add_argument("--keep", nargs="+", type=float, default=[25, 12.5], metavar="PERCENT",
                      help="keep ratios of all tables but `depth`; default 25 12.5")
    args = arguments(made, argv)
    for percent in args.keep:
        check_keep(percent)
    if args.figure:
        check_files(args.figure, args.json)
    methods = pick(["full", *args.methods] if args.methods else [])
    deep = pick(["full", *(args.methods or DEEP)])
    rows = [dict(decoder=name) | row for name, model, encoding in decoders(args)
            for row in measured(model, encoding, methods, deep, args.tasks, args.documents, args.length,
                                [percent / 100 for percent in dict.fromkeys(args.keep)])]
    finish(args, rows, show)
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    command(main)
