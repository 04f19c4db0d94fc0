"""The training loop: a mixture of real text and retrieval documents, short ones first.

    python -m nanollm train --out runs/tiny          # an hour and a half on one CPU core
    torchrun --nproc-per-node 2 -m nanollm train ... # rows of each batch are shared out over the ranks

What makes retrieval work in so little training, in order of weight: a structured start (`induction_start`: only the
starting weights are special, the architecture is not), position jumps (PoSE, arXiv 2309.10400) so that lengths far
beyond the training length are seen as positions, and a curriculum from dense copying to needles in real text.
"""
import argparse
import json
import math
import os
from pathlib import Path
import platform
import re
import shutil
import time

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from nanollm import TINY, tokenizer
from nanollm.data import ANSWER, FACT, QUESTION, TEXT, Tasks
from nanollm.evaluate import bits_per_byte, exact_match, ngram_bits
from nanollm.model import Config, Decoder
from nanollm.weights import check_device, from_hf, to_hf

CONFIG = dict(vocab_size=2048, max_len=3072, n_layers=6, n_heads=6, n_kv_heads=3, d_model=192, d_ff=512, rope_theta=5e5)
# share of the steps, tokens per document, documents per batch, and the mixture of tasks
STAGES = [
    (0.08, 64, 64, dict(plain=.20, periodic=.45, associative=.25, few_shot=.10)),
    (0.10, 128, 32, dict(plain=.20, periodic=.15, associative=.10, few_shot=.15, needle=.25, recall=.15)),
    (0.42, 256, 16, dict(plain=.38, periodic=.07, associative=.05, few_shot=.18, needle=.20, recall=.12)),
    (0.40, 512, 8, dict(plain=.42, periodic=.04, associative=.02, few_shot=.10, needle=.17, recall=.13, copy=.12)),
]
WEIGHT = np.zeros(4, dtype=np.float32)  # loss weight of a token by its role; in plain text every token counts 1
WEIGHT[[TEXT, FACT, QUESTION, ANSWER]] = 0.3, 0.0, 0.1, 4.0


# ---- documents --------------------------------------------------------------------------------------------------

def periodic(rng, n: int, tasks: Tasks):
    """A segment repeated to the end, from its second time on an answer: the densest signal for induction."""
    length = int(rng.integers(4, n // 2 + 1))
    segment = rng.integers(0, tasks.bos, length) if rng.random() < 0.6 else tasks.filler(rng, length)
    roles = np.full(n, ANSWER, dtype=np.uint8)
    roles[:length] = FACT
    return np.resize(segment, n), roles


def associative(rng, n: int, tasks: Tasks):
    """Random key → value pairs of 1 or 2 tokens, listed once and then again and again in other orders."""
    k, v = rng.integers(1, 3, 2)
    pairs = int(rng.integers(2, n // (2 * (k + v)) + 1))
    keys = rng.choice(tasks.bos, pairs, replace=False)[:, None] if k == 1 else rng.integers(0, tasks.bos, (pairs, 2))
    table = np.concatenate([keys, rng.integers(0, tasks.bos, (pairs, v))], 1)
    rounds = -(-n // table.size)
    order = np.concatenate([np.arange(pairs)] + [rng.permutation(pairs) for _ in range(rounds - 1)])
    roles = np.full((len(order), k + v), FACT, dtype=np.uint8)
    roles[pairs:, k:] = ANSWER
    return table[order].ravel()[:n], roles.ravel()[:n]


def document(rng, n: int, task: str, tasks: Tasks):
    """n tokens of a task with random knobs, and the loss weight of each."""
    if task == "plain":
        return tasks.filler(rng, n), np.ones(n, dtype=np.float32)
    if task in ("periodic", "associative"):
        tokens, roles = (periodic if task == "periodic" else associative)(rng, n, tasks)
        return tokens, (roles == ANSWER).astype(np.float32)
    if task == "needle":
        facts = int(rng.integers(1, min(12, max(2, n // 32)) + 1))
        questions = facts if rng.random() < 0.5 else int(rng.integers(1, facts + 1))
        tokens, roles = tasks.needle(rng, n, facts=facts, questions=questions)
    elif task == "recall":
        pairs = int(rng.integers(2, min(24, n // 16) + 1))
        tokens, roles = tasks.recall(rng, n, pairs=pairs, questions=int(rng.integers(1, min(pairs, n // 40) + 1)))
    elif task == "copy":
        length = int(rng.integers(12, n // 4))
        start = int(rng.integers(3, 9))
        tokens, roles = tasks.copy(rng, n, length=length, start=start, answer=length - start)
    else:
        classes = int(rng.integers(2, 7))
        shots = int(rng.integers(1, min(28, n // 16 - 1) + 1))
        tokens, roles = tasks.few_shot(rng, n, shots=shots, classes=classes, every_label=True)
    return tokens, WEIGHT[roles]


def batch(seed: int, step: int, B: int, T: int, mixture: dict[str, float], tasks: Tasks):
    """Tokens and loss weights (B, T + 1) of one step: a function of seed and step alone, so that runs can resume."""
    rng = np.random.default_rng((seed, step))
    kinds = rng.choice(list(mixture), B, p=np.array(list(mixture.values())) / sum(mixture.values()))
    tokens, weights = zip(*(document(rng, T + 1, kind, tasks) for kind in kinds))
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(weights))


def position_jumps(rng, B: int, T: int, max_len: int, jumps: int = 3) -> torch.Tensor:
    """Positions (B, T) that skip ahead at a few random places and end below max_len (PoSE)."""
    where = rng.integers(1, T, (B, jumps))
    cuts = np.sort(rng.integers(0, max_len - T + 1, (B, jumps)), 1)
    size = np.diff(cuts, axis=1, prepend=0)
    step = (np.arange(T) >= where[:, :, None]) * size[:, :, None]
    return torch.from_numpy(np.arange(T) + step.sum(1))


# ---- the start --------------------------------------------------------------------------------------------------

@torch.no_grad()
def induction_start(model: Decoder, seed: int):
    """Starting weights under which layers 0 and 1 already form induction heads (arXiv 2209.11895); all are trained.

    Layer 0: embedding dimension 0 is the same for every token. Queries and keys that read only it see nothing but
    RoPE's angle, and a query turned by −Δ peaks at the token Δ back. Such a head copies a random subspace U of that
    token into a free subspace S. Layer 1: query U of the current token against key S meets the token *after* an
    earlier occurrence, and the value head copies that token's embedding to where the output head reads it.
    """
    c = model.config
    generator = torch.Generator().manual_seed(seed)
    std = c.d_model ** -0.5
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            residual = name.endswith(("o.weight", "down.weight"))
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0 if residual else weight.shape[1] ** -0.5))
    model.embed.weight.copy_(torch.randn(model.embed.weight.shape, generator=generator) * std)
    model.embed.weight[:, 0] = 4 * std

    D, H, G = c.head_dim, c.n_kv_heads, c.n_heads // c.n_kv_heads
    U, S = (torch.linalg.qr(torch.randn(c.d_model, c.d_model, generator=generator))[0].split(D) for _ in range(2))
    fast, half = 6, D // 2  # the six fastest of RoPE's D/2 angles tell neighbours apart
    first, second = model.blocks[0].attention, model.blocks[1].attention
    (q0, k0, v0), (q1, k1, v1) = (layer.split(layer.qkv.weight) for layer in (first, second))
    q0.mul_(0.1), k0.mul_(0.1)
    sharpness = math.sqrt(30 * math.sqrt(D) / fast) / 3  # score 30 at the peak; dimension 0 is about 3 after the norm
    back = [1 if h % G == 0 else 2 + h // G for h in range(c.n_heads)]  # 1, 2, 1, 3, 1, 4: how far each head looks
    for h in range(c.n_heads):
        angle = -back[h] * model.freq[:fast]
        q0[h * D:h * D + fast, 0] = sharpness * angle.cos()
        q0[h * D + half:h * D + half + fast, 0] = sharpness * angle.sin()
        first.o.weight[:, h * D:(h + 1) * D] = std * S[h].T
    slow = torch.tensor([i for i in range(D) if i % half >= fast])  # matching content must not depend on distance
    for h in range(H):
        k0[h * D:h * D + fast, 0] = sharpness
        v0[h * D:(h + 1) * D] = U[h]
        q1[h * G * D:(h * G + 1) * D] *= 0.1
        k1[h * D:(h + 1) * D] *= 0.1
        q1[h * G * D + slow] = 3 * U[h][slow]
        k1[h * D + slow] = 3 * S[h * G][slow]
        v1[h * D:(h + 1) * D] = U[H + h]
        second.o.weight[:, h * G * D:(h * G + 1) * D] = 4 * std * U[H + h].T


# ---- the loop ---------------------------------------------------------------------------------------------------

def schedule(step: int, steps: int, warmup: int = 50, decay: float = 0.4) -> float:
    """Share of the peak learning rate: linear warm-up, flat, then linear decay over the last part down to 2 %."""
    return min((step + 1) / warmup, 1.0, max(0.02, (1 - step / steps) / decay))


def stage(step: int, steps: int):
    """T, B and mixture at this step."""
    done = 0.0
    for share, T, B, mixture in STAGES:
        done += share
        if step < done * steps:
            break
    return T, B, mixture


def save(folder: Path, model: Decoder, optimizer, step: int):
    """Weights and AdamW's moments in one safetensors file, replaced at once so that a cut-off run leaves a whole one."""
    tensors = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        tensors |= {name: p.data, f"{name}.m": state["exp_avg"], f"{name}.v": state["exp_avg_sq"]}
    safetensors.torch.save_file(tensors, folder / "new", metadata={"step": str(step)})
    os.replace(folder / "new", folder / "checkpoint.safetensors")


def resume(folder: Path, model: Decoder, optimizer) -> int:
    """Load what `save` wrote; returns the number of steps done, 0 if there is nothing."""
    file = folder / "checkpoint.safetensors"
    if not file.exists():
        return 0
    with safetensors.safe_open(file, "pt", device=str(model.embed.weight.device)) as f:
        step = int(f.metadata()["step"])
        for name, p in model.named_parameters():
            p.data.copy_(f.get_tensor(name))
            optimizer.state[p] = dict(step=torch.tensor(float(step)), exp_avg=f.get_tensor(f"{name}.m"),
                                      exp_avg_sq=f.get_tensor(f"{name}.v"))
    return step


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanollm train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder of the run; an old run there goes on")
    parser.add_argument("--steps", type=int, default=3000, help="steps of 4096 tokens")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    parser.add_argument("--every", type=int, default=100, help="steps between measurements and checkpoints")
    args = parser.parse_args(argv)
    check_device(args.device)
    if args.every < 1 or args.steps < 1:
        raise ValueError(f"steps {args.steps} and every {args.every} must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    args.out.mkdir(parents=True, exist_ok=True)

    encoding = tokenizer.load(TINY / "tokenizer.tiktoken")
    training, held_out = Tasks(encoding, "train"), Tasks(encoding, "test")
    model = Decoder(Config(**CONFIG))
    induction_start(model, args.seed)
    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    first = resume(args.out, model, optimizer)
    forward = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model

    log = (args.out / "log.jsonl").open("a+")
    log.seek(0)
    began = time.time() - 60 * json.loads(([*log] or ['{"minutes": 0}'])[-1])["minutes"]  # a resumed run goes on counting
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, disable=rank > 0, mininterval=2)
    shown, losses = {}, []
    for step in bar:
        T, B, mixture = stage(step, args.steps)
        tokens, weights = batch(args.seed, step, B, T, mixture, training)
        rng = np.random.default_rng((args.seed, step, 1))
        jump = T >= 256 and rng.random() < 0.7
        pos = position_jumps(rng, B, T, model.config.max_len) if jump else torch.arange(T).expand(B, T)
        total = weights[:, 1:].sum()
        mine = slice(rank, None, world)
        tokens, weights, pos = (x[mine].to(args.device) for x in (tokens, weights, pos))

        logits = forward(tokens[:, :-1], pos=pos)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (loss * weights[:, 1:].flatten()).sum() / total * world  # the ranks' gradients are averaged
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(step, args.steps)
        optimizer.step()

        if world > 1:
            loss = loss.detach() / world
            dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            save(args.out, model, optimizer, step + 1)
            shown = dict(bpb=bits_per_byte(model, held_out, 16))
            if T >= 128:
                shown |= {"needle": exact_match(model, held_out, "needle", 2 * T, 32),
                          "recall": exact_match(model, held_out, "recall", 256, 32),
                          "few_shot": exact_match(model, held_out, "few_shot", 256, 32)}
            row = dict(step=step + 1, tokens_per_document=T, loss=float(np.mean(losses)), **shown,
                       minutes=(time.time() - began) / 60)
            log.write(json.dumps({k: round(v, 4) for k, v in row.items()}) + "\n")
            log.flush()
            losses = []
        bar.set_postfix(loss=f"{loss.item():.3f}", T=T, **{k: f"{v:.2f}" for k, v in shown.items()})
    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        finish(args.out, model, training, held_out, args)


def finish(folder: Path, model: Decoder, training: Tasks, held_out: Tasks, args):
    """Write the checkpoint in 16 bits with its tokenizer, and train.json: how it was made and what it can do."""
    to_hf(model, folder)
    shutil.copy(TINY / "tokenizer.tiktoken", folder)
    model = from_hf(folder, device=args.device)  # measure what was written
    documents = 256
    figures = {f"needle_{T}": exact_match(model, held_out, "needle", T, documents, facts=4)
               for T in tqdm((256, 512, 1024, 2048), desc="measuring")}
    figures |= {"recall_16_pairs_512": exact_match(model, held_out, "recall", 512, documents, pairs=16),
                "few_shot_16_of_4_classes_512": exact_match(model, held_out, "few_shot", 512, documents),
                "copy_512": exact_match(model, held_out, "copy", 512, documents)}
    bits = {"model": bits_per_byte(model, held_out, 64)} | ngram_bits(training, held_out, 64)
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    processor = named[1] if named else platform.processor()
    report = dict(
        command="python -m nanollm train " + " ".join(f"--{k} {v}" for k, v in vars(args).items() if k not in ("out", "every")),
        hardware=torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} thread(s) of {processor}",
        versions=dict(python=platform.python_version(), torch=torch.__version__),
        parameters=sum(p.numel() for p in model.parameters()),
        training_tokens=4096 * args.steps,
        minutes=json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["minutes"],
        documents_per_figure=documents,
        exact_match={k: dict(value=round(v, 4), standard_error=round(math.sqrt(v * (1 - v) / documents), 4))
                     for k, v in figures.items()},
        bits_per_byte={k: round(v, 3) for k, v in bits.items()})
    (folder / "train.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
