"""The training loop: a mixture of real text and retrieval documents, short ones first.

    python -m nanollm train --out runs/tiny              # an hour and a half on one CPU core
    torchrun --nproc-per-node 2 -m -- nanollm train ...   # the rows of each batch are divided among the ranks

An interrupted run resumes from its last checkpoint if seed, lr, start, deeper and steps are unchanged (the
schedule depends on them). Files of other runs are never overwritten.

Three things make retrieval work after so little training. The first matters most.
1. Structured initial weights (initial_weights.py). The architecture is ordinary.
2. Position jumps (PoSE, arXiv 2309.10400): training sees positions far beyond its longest document.
3. A curriculum that goes from dense copying to needles in real text.

--start learned starts without retrieval heads. It copies for longer at first, and every document begins with
BOS. For most of the run, heads and layers are left out at random, so that retrieval spreads over them.
--start FOLDER continues such a decoder on the harder tasks (measure/hard_tasks.py). With --deeper N it has N
times the layers; the new ones add nothing at first.
"""
import argparse
from contextlib import nullcontext
import json
import math
import os
from pathlib import Path
import platform
import re
import shutil
import time

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from nanollm import TINY, tokenizer
from nanollm.check import check_seed, whole
from nanollm.commands.shell import set_threads
from nanollm.hf.checkpoint import check_device, from_hf, to_hf
from nanollm.measure.evaluate import bits_per_byte, exact_match
from nanollm.measure.hard_tasks import HARD, HardTasks
from nanollm.measure.tasks import ANSWER, FACT, QUESTION, TEXT, Tasks
from nanollm.model import Config, Decoder
from nanollm.training.initial_weights import deeper, induction_start, learned_start, left_out, without_heads
from nanollm.training.ngram import ngram_bits

CONFIG = dict(vocab_size=2048, max_len=3072, n_layers=6, n_heads=6, n_kv_heads=3, d_model=192, d_ff=512,
              rope_theta=5e5)
# (fraction of the steps, tokens per document, documents per batch, fraction of each task)
STAGES = [
    (0.08, 64, 64, dict(plain=.20, periodic=.45, associative=.25, few_shot=.10)),
    (0.10, 128, 32, dict(plain=.20, periodic=.15, associative=.10, few_shot=.15, needle=.25, pairs=.15)),
    (0.42, 256, 16, dict(plain=.38, periodic=.07, associative=.05, few_shot=.18, needle=.20, pairs=.12)),
    (0.40, 512, 8, dict(plain=.42, periodic=.04, associative=.02, few_shot=.10, needle=.17, pairs=.13,
                        copy=.12)),
]
LEARNED = [  # the same for --start learned
    (0.05, 64, 64, dict(plain=.05, periodic=.80, associative=.15)),
    (0.04, 64, 64, dict(plain=.20, periodic=.40, associative=.25, few_shot=.15)),
    (0.09, *STAGES[1][1:]),
    (0.42, 256, 16, dict(plain=.42, periodic=.06, associative=.04, few_shot=.16, needle=.16, pairs=.10,
                         copy=.06)),
    (0.40, 512, 8, dict(plain=.46, periodic=.03, associative=.02, few_shot=.10, needle=.12, pairs=.11,
                        copy=.16)),
]
HARDER = [  # for --start FOLDER
    (0.05, 128, 32, dict(plain=.14, few_shot=.04, needle=.04, pairs=.08, copy=.04, turns=.01, latest=.24,
                         hops=.08, list=.22, count=.01, rule=.09, paraphrase=.01)),
    (0.45, 256, 16, dict(plain=.24, few_shot=.04, needle=.05, pairs=.09, copy=.05, turns=.02, latest=.17,
                         hops=.06, list=.16, count=.01, rule=.10, paraphrase=.01)),
    (0.50, 512, 8, dict(plain=.29, few_shot=.05, needle=.06, pairs=.10, copy=.06, turns=.02, latest=.15,
                        hops=.06, list=.11, count=.01, rule=.08, paraphrase=.01)),
]
STARTS = "built", "learned"
LEAVE_OUT = 0.06, 0.85  # heads are left out between these fractions of the steps
# loss weight of a token, by its role; in the task "plain" every token has weight 1
WEIGHT = np.zeros(4, dtype=np.float32)
WEIGHT[[TEXT, FACT, QUESTION, ANSWER]] = 0.3, 0.0, 0.1, 4.0
RECIPE = "seed", "lr", "steps", "start", "deeper"  # a run depends only on these; its checkpoint stores them
CHECKPOINT, PART = "checkpoint.safetensors", "checkpoint.part"
REPORT = "train.json"  # written last, so a run that has it is finished


# ---- documents -----------------------------------------------------------------------------------------

def periodic(rng, n: int, tasks: Tasks):
    """Return a segment repeated to n tokens, a dense signal for induction, and roles of answers."""
    length = int(rng.integers(4, n // 2 + 1))
    segment = rng.integers(0, tasks.bos, length) if rng.random() < 0.6 else tasks.filler(rng, length)
    roles = np.full(n, ANSWER, dtype=np.uint8)
    roles[:length] = FACT
    return np.resize(segment, n), roles


def associative(rng, n: int, tasks: Tasks):
    """Return n tokens of random key-value pairs, and roles: repeated values are answers.

    Keys and values have 1 or 2 tokens. The list is repeated in other orders.
    """
    k, v = rng.integers(1, 3, 2)
    pairs = int(rng.integers(2, n // (2 * (k + v)) + 1))
    if k == 1:
        keys = rng.choice(tasks.bos, pairs, replace=False)[:, None]
    else:
        keys = rng.integers(0, tasks.bos, (pairs, 2))
    table = np.concatenate([keys, rng.integers(0, tasks.bos, (pairs, v))], 1)
    rounds = -(-n // table.size)
    order = np.concatenate([np.arange(pairs)] + [rng.permutation(pairs) for _ in range(rounds - 1)])
    roles = np.full((len(order), k + v), FACT, dtype=np.uint8)
    roles[pairs:, k:] = ANSWER
    return table[order].ravel()[:n], roles.ravel()[:n]


def document(rng, n: int, task: str, tasks: Tasks, bos: bool = False):
    """Return n tokens of a task with random sizes, and the loss weight of each.

    bos: whether documents without questions begin with BOS, too; those with questions always do.
    """
    if bos and task in ("plain", "periodic", "associative"):
        tokens, weights = document(rng, n - 1, task, tasks)
        return np.append(tasks.bos, tokens), np.append(np.float32(0), weights)
    if task == "plain":
        return tasks.filler(rng, n), np.ones(n, dtype=np.float32)
    if task in ("periodic", "associative"):
        tokens, roles = (periodic if task == "periodic" else associative)(rng, n, tasks)
        return tokens, (roles == ANSWER).astype(np.float32)
    tokens, roles = getattr(tasks, task)(rng, n, **sizes(rng, n, task))
    return tokens, WEIGHT[roles]


def sizes(rng, n: int, task: str) -> dict:
    """Draw the options of a retrieval task for a document of n tokens."""
    draw = lambda least, most: int(rng.integers(least, most + 1))
    if task == "needle":
        facts = draw(1, min(12, max(2, n // 32)))
        return dict(facts=facts, questions=facts if rng.random() < 0.5 else draw(1, facts))
    if task == "pairs":
        pairs = draw(2, min(24, n // 16))
        return dict(listed=pairs, questions=draw(1, min(pairs, n // 40)))
    if task == "copy":
        length, start = draw(12, n // 4 - 1), draw(3, 8)
        return dict(length=length, start=start, answer=length - start)
    if task == "few_shot":
        return dict(classes=draw(2, 6), shots=draw(1, min(28, n // 16 - 1)), every_label=True)
    if task in ("turns", "paraphrase"):
        facts = draw(1, max(2, n // 42))
        return dict(facts=facts, questions=draw(1, min(facts, 6)))
    if task == "latest":
        facts = draw(1, max(2, min(6, n // 45)))
        return dict(facts=facts, changed=draw(1, min(facts, 3)), questions=draw(1, min(facts, 4)))
    if task == "hops":
        hops, chains = draw(2, 4), draw(1, 2)
        if n < 200:
            hops, chains = min(hops, 3), 1
        return dict(hops=hops, chains=chains, questions=draw(1, chains))
    if task == "list":
        return dict(kinds=draw(1, 2), values=draw(1, 3 if n < 200 else 4))
    if task == "count":
        return dict(votes=draw(5, 7 if n < 200 else 16), labels=draw(2, 4))
    facts = draw(1, max(2, min(6, n // 48)))
    return dict(facts=facts, questions=draw(1, min(facts, 3)))


def batch(seed: int, step: int, B: int, T: int, mixture: dict[str, float], tasks: Tasks, bos: bool = False):
    """Return tokens and loss weights (B, T + 1) of a step; only seed and step determine them."""
    rng = np.random.default_rng((seed, step))
    kinds = rng.choice(list(mixture), B, p=np.array(list(mixture.values())) / sum(mixture.values()))
    tokens, weights = zip(*(document(rng, T + 1, kind, tasks, bos) for kind in kinds))
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(weights))


def position_jumps(rng, B: int, T: int, max_len: int, jumps: int = 3) -> torch.Tensor:
    """Return positions (B, T) that jump ahead at random places and stay below max_len (PoSE)."""
    where = rng.integers(1, T, (B, jumps))
    cuts = np.sort(rng.integers(0, max_len - T + 1, (B, jumps)), 1)
    size = np.diff(cuts, axis=1, prepend=0)
    step = (np.arange(T) >= where[:, :, None]) * size[:, :, None]
    return torch.from_numpy(np.arange(T) + step.sum(1))


# ---- the loop ------------------------------------------------------------------------------------------

def schedule(step: int, steps: int, warmup: int = 50, decay: float = 0.4) -> float:
    """Return the learning rate's fraction of its peak: warm-up, flat, then decay to 2 %."""
    return min((step + 1) / warmup, 1.0, max(0.02, (1 - step / steps) / decay))


def stage(step: int, steps: int, stages: list):
    """Return tokens per document, documents per batch and task mixture at this step."""
    done = 0.0
    for share, *rest in stages:
        done += share
        if step < done * steps:
            return rest
    return rest


def save(args, model: Decoder, optimizer, step: int, minutes: float):
    """Save weights and AdamW's moments in one file, replaced at once: it is always whole."""
    tensors = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]  # empty before the first step
        m, v = (state[key] if key in state else torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq"))
        tensors |= {name: p.data, f"{name}.m": m, f"{name}.v": v}
    known = dict(step=step, minutes=minutes) | {name: getattr(args, name) for name in RECIPE}
    try:
        save_file(tensors, args.out / PART, metadata={name: str(x) for name, x in known.items()})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{args.out / PART} cannot be written: {error}") from None
    os.replace(args.out / PART, args.out / CHECKPOINT)


def find(args) -> tuple[int, float]:
    """Return the steps and minutes done by the run in the folder; 0 if it is new or empty.

    Raises ValueError if the folder holds anything else: other files, another run, or a finished run.
    """
    args.out = Path(os.path.realpath(args.out))  # resolves NEW/.., which exists even if NEW does not
    file = args.out / CHECKPOINT
    files = {file.name for file in args.out.iterdir()} if args.out.exists() else set()
    if files <= {PART}:
        return 0, 0.0
    if CHECKPOINT not in files:
        raise ValueError(f"{args.out} holds {min(files)} and no run to resume; name a new folder")
    try:
        with safe_open(file, "pt") as f:
            known = f.metadata()
        step, minutes, recipe = int(known["step"]), float(known["minutes"]), {x: known[x] for x in RECIPE}
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        raise ValueError(f"{file} is damaged or not from this program; name a new folder") from None
    for name, stored in recipe.items():
        if stored != str(getattr(args, name)):
            raise ValueError(f"the run in {args.out} has --{name} {stored}, not {getattr(args, name)}; "
                             "give that value or name a new folder")
    if REPORT in files:
        raise ValueError(f"the run in {args.out} is finished; name a new folder")
    return step, minutes


def resume(file: Path, model: Decoder, optimizer, step: int):
    """Load the tensors that `save` wrote after `step` steps."""
    tensors = load_file(file, device=str(model.embed.weight.device))
    for name, p in model.named_parameters():
        p.data.copy_(tensors[name])
        done = torch.tensor(float(step), device=p.device)
        optimizer.state[p] = dict(step=done, exp_avg=tensors[f"{name}.m"], exp_avg_sq=tensors[f"{name}.v"])


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nanollm train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"),
                        help="folder of the run: a new one, or that of an interrupted run, to resume it")
    parser.add_argument("--steps", type=int, default=3000, help="steps of 4096 tokens")
    parser.add_argument("--start", default="built", metavar="START",
                        help="initial weights: with retrieval heads (built, default), without (learned), or "
                             "the folder of a decoder trained here, to learn the harder tasks")
    parser.add_argument("--deeper", type=int, default=1, metavar="N",
                        help="with --start FOLDER: copies of each layer (default 1)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: chosen by the model's size")
    parser.add_argument("--every", type=int, default=100, help="steps between measurements and checkpoints")
    parser.add_argument("--documents", type=int, default=256, help="documents per task, measured at the end")
    args = parser.parse_args(argv)
    for name, most in (("steps", 10 ** 9), ("deeper", 100), ("every", 10 ** 9), ("documents", 10 ** 6)):
        whole(name, getattr(args, name), 1, most)
    check_seed(args.seed)
    if not 0 < args.lr <= 1:
        raise ValueError(f"lr {args.lr} must lie above 0 and be at most 1")
    check_device(args.device)
    if args.start not in STARTS and not (Path(args.start) / "config.json").exists():
        raise ValueError(f"start {args.start!r} must be built, learned or the folder of a trained decoder")
    if args.start in STARTS and args.deeper > 1:
        raise ValueError(f"deeper {args.deeper} needs --start FOLDER")
    return args


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) without torchrun."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world:  # it would train on a part of each batch, and write nothing
        raise ValueError(f"RANK is {rank} and WORLD_SIZE {world}; torchrun sets both, so unset both")
    return rank, world


def main(argv=None):
    args = options(argv)
    rank, world = ranks()
    if args.start in STARTS:
        learned = args.start == "learned"
        model = Decoder(Config(**CONFIG, bos=CONFIG["vocab_size"] - 1 if learned else None))
        (learned_start if learned else induction_start)(model, args.seed)
    else:
        model = deeper(from_hf(args.start), args.deeper)
    set_threads(args.threads, sum(p.numel() for p in model.parameters()))
    first, minutes = find(args)
    if world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    args.out.mkdir(parents=True, exist_ok=True)

    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05,
                                  fused=True)
    if first:
        resume(args.out / CHECKPOINT, model, optimizer, first)
    elif rank == 0:
        save(args, model, optimizer, 0, minutes)  # claims the folder, and shows that it is writable

    encoding = tokenizer.load(TINY / "tokenizer.tiktoken")
    training, held_out = HardTasks(encoding, "train"), HardTasks(encoding, "test")
    minutes = learn(args, model, optimizer, first, minutes, training, held_out)
    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        finish(args, model, training, held_out, minutes)


def learn(args, model: Decoder, optimizer, first: int, minutes: float, training: Tasks, held_out: Tasks):
    """Take all steps from `first` on; save and measure every `args.every` steps.

    minutes: time spent before `first`. Returns the minutes of the whole run.
    """
    rank, world = ranks()
    forward = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    began, few = time.time() - 60 * minutes, max(1, args.documents // 8)
    losses, shown = [], {}
    with (args.out / "log.jsonl").open("a") as log, tqdm(
            range(first, args.steps), initial=first, total=args.steps, disable=rank > 0 or None,
            mininterval=2) as bar:
        for step in bar:
            loss, T = take_step(args, model, forward, optimizer, step, training)
            losses.append(loss)
            if rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
                minutes = (time.time() - began) / 60
                save(args, model, optimizer, step + 1, minutes)
                shown = dict(bpb=bits_per_byte(model, held_out, max(1, few // 2)))
                if T >= 128:
                    lengths = dict(needle=2 * T, pairs=256, few_shot=256)
                    lengths |= {} if args.start in STARTS else dict.fromkeys(HARD, 512)
                    shown |= {task: exact_match(model, held_out, task, n, few) for task, n in lengths.items()}
                row = dict(step=step + 1, tokens_per_document=T, loss=float(np.mean(losses)), **shown,
                           minutes=minutes)
                log.write(json.dumps({k: round(v, 4) for k, v in row.items()}) + "\n")
                log.flush()
                losses = []
            bar.set_postfix(loss=f"{loss:.3f}", T=T, **{k: f"{v:.2f}" for k, v in shown.items()})
    return minutes


def take_step(args, model: Decoder, forward, optimizer, step: int, training: Tasks) -> tuple[float, int]:
    """Take one step; return its loss and the tokens per document.

    forward: the model, or a wrapper that averages its gradients over ranks. Raises ValueError, before the
    weights change, if the loss or the gradient is not finite.
    """
    rank, world = ranks()
    learned, mine, c = args.start != "built", slice(rank, None, world), model.config
    stages = {"built": STAGES, "learned": LEARNED}.get(args.start, HARDER)
    T, B, mixture = stage(step, args.steps, stages)
    tokens, weights = batch(args.seed, step, B, T, mixture, training, learned)
    rng = np.random.default_rng((args.seed, step, 1))
    jump = T >= 256 and rng.random() < 0.7
    pos = position_jumps(rng, B, T, c.max_len) if jump else torch.arange(T).expand(B, T)
    total = weights[:, 1:].sum()
    tokens, weights, pos = (x[mine].to(args.device) for x in (tokens, weights, pos))

    some_heads = nullcontext()
    if learned and LEAVE_OUT[0] <= step / args.steps < LEAVE_OUT[1]:
        stays = left_out(np.random.default_rng((args.seed, step, 2)), B, c.n_layers, c.n_heads)
        some_heads = without_heads(model, stays[:, mine].to(args.device))
    with some_heads:
        logits = forward(tokens[:, :-1], pos=pos)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss = (loss * weights[:, 1:].flatten()).sum() / total * world  # the ranks' gradients are averaged

    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    if world > 1:
        loss = loss.detach() / world
        dist.all_reduce(loss)
    if not math.isfinite(loss.item()) or not math.isfinite(norm):
        raise ValueError(f"step {step + 1} has loss {loss.item()} and gradient norm {norm}; the last "
                         f"checkpoint in {args.out} is untouched; start a new run with --lr below {args.lr}")
    for group in optimizer.param_groups:
        group["lr"] = args.lr * schedule(step, args.steps)
    optimizer.step()
    return loss.item(), T


def hardware(device: str) -> str:
    """Return the GPU's name, or the number of threads and the processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{torch.get_num_threads()} thread(s) of {named[1] if named else platform.processor()}"


def finish(args, model: Decoder, training: Tasks, held_out: Tasks, minutes: float):
    """Write the weights in 16 bits, the tokenizer, and a report on the run and its accuracy."""
    to_hf(model, args.out)
    shutil.copy(TINY / "tokenizer.tiktoken", args.out)
    model, documents = from_hf(args.out, device=args.device), args.documents  # measure the weights as written
    asked = {f"needle_{T}": ("needle", T) for T in (256, 512, 1024, 2048)}
    asked |= {"pairs_16_512": ("pairs", 512), "few_shot_16_of_4_classes_512": ("few_shot", 512),
              "copy_512": ("copy", 512)}
    asked |= {f"{task}_512": (task, 512) for task in HARD if args.start not in STARTS}
    figures = {name: exact_match(model, held_out, task, T, documents)
               for name, (task, T) in tqdm(asked.items(), desc="measuring", disable=None)}
    windows = max(1, documents // 4)
    bits = {"model": bits_per_byte(model, held_out, windows)} | ngram_bits(training, held_out, windows)

    options = " ".join(f"--{k} {v}" for k, v in vars(args).items() if k not in ("out", "every"))
    report = dict(
        command="python -m nanollm train " + options,
        hardware=hardware(args.device),
        versions=dict(python=platform.python_version(), torch=torch.__version__),
        parameters=sum(p.numel() for p in model.parameters()),
        training_tokens=4096 * args.steps,
        minutes=round(minutes, 4),
        documents_per_figure=documents,
        exact_match={k: dict(value=round(v, 4), standard_error=round(math.sqrt(v * (1 - v) / documents), 4))
                     for k, v in figures.items()},
        copy_512_by_token=round(exact_match(model, held_out, "copy", 512, documents, by_token=True), 4),
        bits_per_byte={k: round(v, 3) for k, v in bits.items()})
    (args.out / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
