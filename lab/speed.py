"""Time our code on a CPU beside transformers and NVIDIA/kvpress, on the same weights.

    python -m lab.speed                                           # nanollm/tiny: a minute
    python -m lab.speed --model smollm2 --lengths 512 4096 --batches 1 8
    python -m lab.speed --methods my_method --lengths 512 --rounds 1

The peer of the full cache is transformers. The peer of a default method is its press in kvpress,
with the same window if it has one (RESULTS.md says how pools differ), if kvpress is installed;
kvpress 0.5.5 needs transformers below 5.3, so give both an environment of their own. Prompts are
random tokens. Ours and the peer read prompts by turns. Of every time the fastest of some rounds
counts.

Two more kinds of rows: llama.cpp, with the same GGUF file and one prompt, if xllamacpp is installed
(pip install xllamacpp==2026.10.11549); and the floor, the time in which this machine reads a step's
bytes from memory: those of the weights, and of the full cache.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
import json
import os
from pathlib import Path
import sys
from time import perf_counter

# large pages: the system's time for small ones varies
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lab import command_line
from lab.answering import read
from lab.kept import full_cache_bytes
from lab.loading import calibrated, load
from lab.methods_by_name import pick
from lab.replay import Recorder, Recording, record
from lab.retrieval import budget_for
from lab.table import text_table
from nanollm import TINY, gguf
from nanollm.block_linear import BlockLinear
from nanollm.cache import cache_bytes, compress, make_cache
from nanollm.check import whole
from nanollm.checkpoint import as_hf
from nanollm.generate import prefill

METHODS = (
    "snap_kv",
    "pyramid_kv",
    "ada_kv",
    "snap_kv+critical",
    "chunk_kv",
    "streaming_llm_absolute",
    "key_diff",
)
STEPS = 48  # decoding steps after a prompt, of which the fastest counts
SHORT = 0.5  # seconds; an end whose rounds take less gets more of them
TERMS = """Times in ms, {threads} threads, keep ratio {keep:g} %, fastest of {rounds} or more.
prompt    reading the prompts of the batch with the full cache
end       compressing the cache once, at the prompts' end
step      one new token for each prompt
×         the peer's time in units of ours: above 1, ours is faster
MiB       allocated by the caches after the compression
"""


def fastest(run: Callable, rounds: int, least: float = 0) -> float:
    """Return the milliseconds of the fastest of some rounds.

    More rounds follow until they have taken `least` seconds in all.
    """
    times = []
    first = perf_counter()
    while len(times) < rounds or perf_counter() - first < least:
        began = perf_counter()
        run()
        times.append(1000 * (perf_counter() - began))
    return min(times)


# ---- ours ---


def end_and_step(
    model, tokens: Tensor, recording: list[Recording], make: Callable, rounds: int
) -> dict:
    """Return a method's times at a prompt's end and after it, and its bytes."""
    times = []
    first = perf_counter()
    while len(times) < rounds or perf_counter() - first < SHORT:
        caches = read(model, tokens, [recording], lambda T: make())
        times.append(fastest(lambda: compress(model, tokens, caches), 1))
    mib = cache_bytes(caches)[1] / 2**20
    step = fastest(lambda: model(tokens[:, :1], caches), STEPS)
    return dict(end=min(times), step=step, MiB=mib)


# ---- the peers ---


def presses(keep: float, window: int = 32) -> dict:
    """Return kvpress's presses by our names; {} if it is not installed. keep: in percent."""
    try:
        import kvpress
    except ImportError:
        return {}
    ratio = 1 - keep / 100
    snap = lambda Press=kvpress.SnapKVPress: Press(ratio, window, 7)
    return {
        "snap_kv": snap(),
        "pyramid_kv": snap(kvpress.PyramidKVPress),
        "ada_kv": kvpress.AdaKVPress(snap()),
        "snap_kv+critical": kvpress.CriticalKVPress(snap()),
        "chunk_kv": kvpress.ChunkKVPress(snap(), 10),
        "key_diff": kvpress.KeyDiffPress(ratio),
        "streaming_llm_absolute": kvpress.StreamingLLMPress(ratio),
    }


class Peer:
    """transformers' model with our weights, and kvpress's presses."""

    def __init__(self, model, keep: float):
        self.model = as_hf(model)
        self.presses = presses(keep)

    def prompt(self, tokens: Tensor):
        """Read tokens (B, T) into a new cache, which is kept for `step`."""
        from transformers import DynamicCache

        self.cache = DynamicCache()
        self.model(tokens, past_key_values=self.cache, logits_to_keep=1)

    def step(self, tokens: Tensor):
        self.model(tokens[:, :1], past_key_values=self.cache)

    def ends(self, tokens: Tensor, rounds: int) -> dict[str, float]:
        """Return each press's milliseconds in all layers; the cache is then SnapKV's."""
        if not self.presses:
            return {}
        from kvpress import BasePress

        # each layer's arguments; timed after the prompt, as ours are: no layer is in a CPU cache
        layers = []

        class KeepsArguments(BasePress):
            def compress(_, *arguments):
                layers.append(arguments)
                return self.presses["snap_kv"].compress(*arguments)

        for press in self.presses.values():
            press.post_init_from_model(self.model)
        with KeepsArguments()(self.model):
            self.prompt(tokens)
        times = {}
        for name, press in self.presses.items():
            run = lambda: [press.compress(*layer) for layer in layers]
            times[name] = fastest(run, rounds, SHORT)
        for module, *_ in layers:
            # AdaKV's, which hide entries in place of evicting them
            module.masked_key_indices = None
        return times


def llama_cpp(file: Path, tokens: Tensor, rounds: int) -> dict:
    """Return llama.cpp's times for a GGUF file and a prompt (1, T); {} if it is not installed.

    Its steps come one after the other, and their mean counts.
    """
    try:
        import xllamacpp
    except ImportError:
        return {}
    options = xllamacpp.CommonParams()
    options.model.path = str(file)
    options.n_ctx = tokens.shape[1] + 2 * STEPS
    options.n_parallel = 1
    options.verbosity = -1
    options.cpuparams.n_threads = torch.get_num_threads()
    options.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(options)
    asked = dict(prompt=tokens[0].tolist(), n_predict=STEPS, temperature=0)
    asked |= dict(cache_prompt=False, ignore_eos=True)
    times = [server.handle_completions(asked)["timings"] for _ in range(rounds + 1)]
    return dict(
        prompt=min(x["prompt_ms"] for x in times),
        step=min(x["predicted_per_token_ms"] for x in times),
    )


def weight_bytes(model) -> int:
    """Return the bytes of weights that a step of few rows reads."""
    total = 0
    for module in model.modules():
        if isinstance(module, BlockLinear):
            total += module.packed.nbytes + module.scales.nbytes
        elif isinstance(module, nn.Linear):
            total += module.weight.nbytes
    return total


def bandwidth() -> float:
    """Return how many bytes this machine reads from memory in a millisecond."""
    numbers = torch.ones(2**26)  # 256 MiB, more than most processors' caches
    return numbers.nbytes / fastest(numbers.sum, 8)


def bounds(model, file: Path | None, sizes: list[tuple[int, int]], rounds: int) -> list:
    """Return the rows of llama.cpp and of the floor. file: GGUF."""
    speed = bandwidth()
    rows = []
    for B, T in sizes:
        own = dict(tokens=T, batch=B)
        if file is not None and B == 1:
            times = llama_cpp(file, random_tokens(model, B, T), rounds)
            rows += [own | dict(method="llama.cpp") | times] if times else []
        cache = full_cache_bytes(model, T, model.embed.weight.itemsize)
        floor = (weight_bytes(model) + B * cache) / speed
        rows.append(own | dict(method="floor", step=floor))
    return rows


# ---- the command ---


def random_tokens(model, B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return torch.randint(model.config.vocab_size, (B, T), generator=generator)


@torch.no_grad()
def measured(
    model,
    encoding,
    peer: Peer,
    methods: dict,
    sizes: list[tuple[int, int]],
    keep: float,
    rounds: int,
) -> list[dict]:
    """Return a row for each size (B, T) and method, "full" first. keep: keep ratio in percent.

    ValueError, before any measurement, if a method cannot use its budget.
    """
    learned = {}
    for name, variant in methods.items():
        learned[name] = calibrated(variant, model, encoding)

    def maker(name: str, T: int) -> Callable:
        known = dict(budget=budget_for(keep / 100, T)) | learned[name]
        return partial(methods[name].caches, model, **known)

    for name, (_, T) in product(methods, sizes):
        maker(name, T)()  # raises ValueError if a method cannot use its budget
    rows = []
    for B, T in sizes:
        tokens = random_tokens(model, B, T)
        read = lambda: prefill(model, tokens, make_cache(model))
        peer_reads = lambda: peer.prompt(tokens)
        peer_steps = lambda: peer.step(tokens)
        if not rows:  # the first run of either would take longer
            read()
            peer_reads()
        ours = []
        theirs = []
        for _ in range(rounds):
            ours.append(fastest(read, 1))
            theirs.append(fastest(peer_reads, 1))
        steps = {"full": fastest(peer_steps, STEPS)}
        ends = peer.ends(tokens, rounds)
        if ends:
            steps["snap_kv"] = fastest(peer_steps, STEPS)
        peer.cache = None
        recording = record(model, make_cache(model, store=Recorder), tokens)
        for name in tqdm(methods, f"{T} tokens, batch {B}", leave=False, disable=None):
            row = dict(tokens=T, batch=B, keep=keep, rounds=rounds)
            row |= dict(threads=torch.get_num_threads(), method=name)
            if name == "full":
                row |= {"prompt": min(ours), "peer's prompt": min(theirs)}
            row |= end_and_step(model, tokens, recording, maker(name, T), rounds)
            row |= {"peer's end": ends.get(name), "peer's step": steps.get(name)}
            rows.append(row)
    return rows


def show(rows: list[dict]) -> str:
    """Return the rows as a text table, with its terms."""
    number = lambda x: "" if x is None else f"{x:.4g}"
    phases = "prompt", "end", "step"
    header = ["tokens", "batch", "method"]
    for phase in phases:
        header += [phase, "peer", "×"]
    cells = [[*header, "MiB"]]
    for row in rows:
        line = [str(row["tokens"]), str(row["batch"]), row["method"]]
        for phase in phases:
            ours, peer = row.get(phase), row.get(f"peer's {phase}")
            ratio = f"{peer / ours:.2f}" if peer else ""
            line += [number(ours), number(peer), ratio]
        cells.append([*line, number(row.get("MiB"))])
    return f"{text_table(cells)}\n\n{TERMS.format(**rows[0])}"


def main(argv: list[str]):
    parser = argparse.ArgumentParser(
        prog="python -m lab.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--model",
        type=Path,
        default=TINY,
        help="folder of a checkpoint of Llama's form, a GGUF file, or smollm2; "
        "default nanollm/tiny",
    )
    option(
        "--dtype",
        choices=("auto", "4bit", "float32", "bfloat16"),
        default="auto",
        help="number format, as in python -m nanollm; default auto",
    )
    option(
        "--threads",
        type=int,
        default=0,
        help="CPU threads; default 0: one for small models, PyTorch's own number for large ones",
    )
    option(
        "--methods",
        nargs="+",
        default=METHODS,
        metavar="NAME",
        help=f"methods to time beside full; default {' '.join(METHODS)}",
    )
    option(
        "--lengths",
        nargs="+",
        type=int,
        default=[512, 2048],
        metavar="TOKENS",
        help="lengths of the prompts; default 512 2048",
    )
    option(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 4],
        metavar="PROMPTS",
        help="numbers of prompts that are read at once; default 1 4",
    )
    option(
        "--keep",
        type=float,
        default=25,
        metavar="PERCENT",
        help="keep ratio: a head's mean budget in percent of the prompt; default 25",
    )
    option(
        "--rounds",
        type=int,
        default=2,
        help="rounds, of which the fastest counts; default 2",
    )
    option("--json", type=Path, metavar="FILE", help="file to write the rows to")
    args = parser.parse_args(argv)
    command_line.check_keep(args.keep)
    whole("rounds", args.rounds, 1)
    if args.json:
        command_line.check_output(args.json, "rows", lambda data: b'"prompt' in data)
    model, encoding = load(args.model, "cpu", dtype=args.dtype)
    for B in args.batches:
        whole("batch", B, 1, 1024)
    for T in args.lengths:
        whole("length", T, 1, model.config.max_len - 2 * STEPS)
    command_line.set_threads(args.threads, sum(x.numel() for x in model.parameters()))

    sizes = [(B, T) for T in args.lengths for B in args.batches]
    methods = pick(["full", *args.methods])
    peer = Peer(model, args.keep)
    rows = measured(model, encoding, peer, methods, sizes, args.keep, args.rounds)
    peer.model = None  # frees its weights
    file = args.model if args.model.suffix == ".gguf" else None
    if str(args.model) == gguf.SMOLLM2:
        file = gguf.installed()
    rows += bounds(model, file, sizes, args.rounds)
    print(show(rows))
    if args.json:
        command_line.replace(args.json, json.dumps(rows, indent=1).encode())


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
