"""Train a small decoder on a mixture of real text and retrieval documents, short ones first.

    python -m nanollm train --out runs/built                                   # 1.5 hours on one CPU core
    python -m nanollm train --out runs/learned --start learned --steps 12000   # 6 hours

Give the same command again to resume an interrupted run.

Three things make retrieval work after so little training. The first matters most.
1. Structured initial weights (initial_weights.py). The architecture is ordinary.
2. Position jumps (PoSE, arXiv 2309.10400): training sees positions far beyond its longest document.
3. A curriculum that goes from dense copying to needles in real text.

--start learned starts without retrieval heads. It copies for longer at first, ends with the harder tasks
(hard_tasks.py), and begins every document with BOS. For most of the run, heads and layers are left out at
random, so that retrieval spreads over them.

The shipped weights (nanollm/tiny, nanollm/tiny_learned) came from an earlier version of this file, at commit
a59f5b3, in several runs; each folder's train.json lists them. STAGES follows the mixtures of those runs, but
no run of this version was taken to its end: expect decoders like the shipped ones, not their weights.
"""
import argparse
import io
import json
from pathlib import Path
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanollm import TINY, tokenizer
from nanollm.check import check_seed, whole
from nanollm.checkpoint import check_device, from_hf, to_hf
from nanollm.model import Config, Decoder
from lab.command_line import replace, set_threads
from lab.evaluate import bits_per_byte
from lab.hard_tasks import HardTasks
from lab.tasks import Tasks
from lab.training.initial_weights import induction_start, learned_start, left_out, without_heads

CONFIG = dict(vocab_size=2048, max_len=3072, n_layers=6, n_heads=6, n_kv_heads=3, d_model=192, d_ff=512,
              rope_theta=5e5)
# (end of the stage as a fraction of the steps, tokens per document, fraction of each task)
STAGES = {
    "built": [
        (.08, 64, dict(plain=.20, periodic=.45, associative=.25, few_shot=.10)),
        (.18, 128, dict(plain=.20, periodic=.15, associative=.10, few_shot=.15, needle=.25, pairs=.15)),
        (.60, 256, dict(plain=.38, periodic=.07, associative=.05, few_shot=.18, needle=.20, pairs=.12)),
        (1.0, 512, dict(plain=.42, periodic=.04, associative=.02, few_shot=.10, needle=.17, pairs=.13,
                        copy=.12))],
    "learned": [
        (.06, 64, dict(plain=.12, periodic=.62, associative=.20, few_shot=.06)),
        (.12, 128, dict(plain=.20, periodic=.15, associative=.10, few_shot=.15, needle=.25, pairs=.15)),
        (.60, 256, dict(plain=.32, periodic=.03, associative=.02, few_shot=.10, needle=.11, pairs=.09,
                        copy=.06, latest=.09, hops=.03, list=.08, count=.01, rule=.05, paraphrase=.01)),
        (1.0, 512, dict(plain=.29, few_shot=.05, needle=.08, pairs=.10, copy=.06, latest=.15, hops=.06,
                        list=.11, count=.01, rule=.08, paraphrase=.01))]}
LEAVE_OUT = 0.06, 0.85  # with --start learned, heads are left out between these fractions of the steps
WEIGHT = np.array([0.3, 0.0, 0.1, 4.0])  # of a TEXT, FACT, QUESTION and ANSWER token in the loss
LEARNING_RATE, TOKENS = 2e-3, 4096  # of a step
EVERY = 100  # steps between checkpoints
CHECKPOINT = "checkpoint.pt"  # removed when the run has ended


def repeated(rng, n: int, task: str, tasks: Tasks):
    """Return n tokens that repeat, and weights (n,): 1 where the next token follows from the first round.

    "periodic" repeats a passage. "associative" repeats a list of key-value pairs, each time in another order.
    """
    if task == "periodic":
        key, period = 0, int(rng.integers(4, n // 2 + 1))
        table = rng.integers(0, tasks.bos, period) if rng.random() < 0.6 else tasks.filler(rng, period)
        table = table[None]
    else:
        key, value = rng.integers(1, 3, 2)  # lengths in tokens
        pairs = int(rng.integers(2, n // (2 * (key + value)) + 1))
        table = rng.choice(tasks.bos, (pairs, key + value), replace=False)
    rows = np.concatenate([rng.permutation(len(table)) for _ in range(n // table.size + 1)])
    weights = np.zeros((len(rows), table.shape[1]))
    weights[len(table):, key:] = 1
    return table[rows].ravel()[:n], weights.ravel()[:n]


def document(rng, n: int, task: str, tasks: Tasks, bos: bool = False):
    """Return n tokens of a task with random sizes, and the loss weight of each.

    bos: whether documents without questions begin with BOS, too; those with questions always do.
    """
    if task == "plain":
        tokens, weights = tasks.filler(rng, n), np.ones(n)
    elif task in ("periodic", "associative"):
        tokens, weights = repeated(rng, n, task, tasks)
    else:
        tokens, roles = getattr(tasks, task)(rng, n, **sizes(rng, n, task))
        weights = WEIGHT[roles]
    if bos and tokens[0] != tasks.bos:
        tokens, weights = np.append(tasks.bos, tokens[:-1]), np.append(0, weights[:-1])
    return tokens, weights


def sizes(rng, n: int, task: str) -> dict:
    """Draw the options of a task for a document of n tokens, such that its facts and questions fit."""
    draw = lambda least, most: int(rng.integers(least, most + 1))
    facts, start, length = draw(1, n // 40), draw(3, 8), draw(12, n // 4 - 1)
    asked = dict(facts=facts, questions=draw(1, facts))
    return dict(needle=asked, rule=asked, paraphrase=asked, latest=asked | dict(changed=draw(1, facts)),
                pairs=dict(listed=2 * facts, questions=draw(1, facts)),
                few_shot=dict(classes=draw(2, 6), shots=draw(1, n // 16 - 1), every_label=True),
                copy=dict(length=length, start=start, answer=length - start),
                hops=dict(hops=draw(2, 4), chains=draw(1, 2)),
                list=dict(kinds=draw(1, 2), values=draw(1, 4)),
                count=dict(votes=draw(5, 16), labels=draw(2, 4)))[task]


def batch(seed: int, step: int, B: int, T: int, mixture: dict[str, float], tasks: Tasks, bos: bool = False):
    """Return tokens and loss weights (B, T + 1) of a step; only seed and step determine them."""
    rng = np.random.default_rng((seed, step))
    kinds = rng.choice(list(mixture), B, p=np.array(list(mixture.values())) / sum(mixture.values()))
    tokens, weights = zip(*(document(rng, T + 1, kind, tasks, bos) for kind in kinds))
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(weights)).float()


def position_jumps(rng, B: int, T: int, max_len: int, jumps: int = 3) -> torch.Tensor:
    """Return positions (B, T) that jump ahead at random places and stay below max_len (PoSE)."""
    where = rng.integers(1, T, (B, jumps))
    cuts = np.sort(rng.integers(0, max_len - T + 1, (B, jumps)), 1)
    size = np.diff(cuts, axis=1, prepend=0)
    step = (np.arange(T) >= where[:, :, None]) * size[:, :, None]
    return torch.from_numpy(np.arange(T) + step.sum(1))


def schedule(step: int, steps: int, warmup: int = 50, decay: float = 0.4) -> float:
    """Return the learning rate's fraction of its peak: warm-up, flat, then decay to 2 %."""
    return min((step + 1) / warmup, 1.0, max(0.02, (1 - step / steps) / decay))


def take_step(args, model: Decoder, optimizer, step: int, tasks: Tasks) -> float:
    """Take a step on TOKENS tokens and return its loss.

    Raises RuntimeError, before the weights change, if the gradient is not finite.
    """
    c, done, learned = model.config, step / args.steps, args.start == "learned"
    T, mixture = next(rest for end, *rest in STAGES[args.start] if done < end)
    tokens, weights = batch(args.seed, step, B := TOKENS // T, T, mixture, tasks, bos=learned)
    tokens, weights = tokens.to(args.device), weights[:, 1:].to(args.device)  # the first token is given
    rng = np.random.default_rng((args.seed, step, 1))
    jump = T >= 256 and rng.random() < 0.7
    pos = position_jumps(rng, B, T, c.max_len) if jump else torch.arange(T).expand(B, T)
    share = 0.15 if learned and LEAVE_OUT[0] <= done < LEAVE_OUT[1] else 0.0
    stays = left_out(rng, B, c.n_layers, c.n_heads, share)
    with without_heads(model, stays.to(args.device)):
        logits = model(tokens[:, :-1], pos=pos.to(args.device))
    losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    loss = (losses * weights).sum() / weights.sum()

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * schedule(step, args.steps)
    optimizer.step()
    return loss.item()


def saved(args) -> dict:
    """Return the state of the interrupted run in the folder, or that of a new run.

    Raises ValueError if the folder holds other files, or a run with other options.
    """
    file, decisive = args.out / CHECKPOINT, dict(start=args.start, seed=args.seed, steps=args.steps)
    if not file.exists():
        if files := [file.name for file in args.out.glob("*")]:
            raise ValueError(f"{args.out} holds {min(files)} and no run to resume; name a new folder")
        return dict(options=decisive, step=0, minutes=0.0, losses=[])
    state = torch.load(file, map_location=args.device, weights_only=True)
    if state["options"] != decisive:
        raise ValueError(f"the run in {args.out} has {state['options']}; give these or name a new folder")
    return state


def learn(args, model: Decoder, optimizer, state: dict, tasks: Tasks):
    """Take all steps that `state` lacks. Every EVERY steps, bring it up to date and save it."""
    began, losses = time.time() - 60 * state["minutes"], []
    for step in tqdm(range(state["step"], args.steps), initial=state["step"], total=args.steps, disable=None):
        losses.append(take_step(args, model, optimizer, step, tasks))
        if (step + 1) % EVERY == 0 or step + 1 == args.steps:
            state |= dict(step=step + 1, minutes=(time.time() - began) / 60, model=model.state_dict(),
                          optimizer=optimizer.state_dict(), losses=[*state["losses"], np.mean(losses).item()])
            torch.save(state, data := io.BytesIO())
            replace(args.out / CHECKPOINT, data.getvalue())  # at once, so that it is always whole
            losses = []


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanollm train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default="runs/tiny", help="new folder, or an interrupted run's")
    parser.add_argument("--start", choices=[*STAGES], default="built", help="initial weights; default built")
    parser.add_argument("--steps", type=int, default=3000, help=f"steps of {TOKENS} tokens; default 3000")
    parser.add_argument("--seed", type=int, default=0, help="draws weights and documents; default 0")
    parser.add_argument("--device", default="cpu", help="torch device; default cpu")
    args = parser.parse_args(argv)
    whole("steps", args.steps, 1, 10 ** 9)
    check_seed(args.seed)
    check_device(args.device)
    args.out = args.out.resolve()  # NEW/.. is a folder even if NEW is none
    state = saved(args)
    args.out.mkdir(parents=True, exist_ok=True)

    learned = args.start == "learned"
    model = Decoder(Config(**CONFIG, bos=CONFIG["vocab_size"] - 1 if learned else None))
    (learned_start if learned else induction_start)(model, args.seed)
    model.to(args.device)
    set_threads(0, sum(p.numel() for p in model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    if state["step"]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    encoding = tokenizer.load(TINY / "tokenizer.tiktoken")
    learn(args, model, optimizer, state, HardTasks(encoding, "train"))

    to_hf(model, args.out)  # in 16 bits
    shutil.copy(TINY / "tokenizer.tiktoken", args.out)
    bits = bits_per_byte(from_hf(args.out, device=args.device), HardTasks(encoding, "test"), windows=64)
    report = dict(
        command=f"python -m nanollm train --start {args.start} --steps {args.steps} --seed {args.seed}",
        device=args.device, torch=torch.__version__, minutes=round(state["minutes"], 1),
        training_tokens=TOKENS * args.steps, bits_per_byte=dict(model=round(bits, 3)),
        losses=[round(loss, 4) for loss in state["losses"]])  # means of EVERY steps each
    (args.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / CHECKPOINT).unlink()
    print(f"{json.dumps(report)}\naccuracy: python -m nanollm --methods full --model {args.out}")
