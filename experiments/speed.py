"""Measure the time to read a prompt, to compress it and to decode.

    python -m experiments.speed                  # decoding steps, and the cost of compression
    python -m experiments.speed --compile        # also with torch.compile (C++ compiler): a minute more
    python -m experiments.speed --methods full my_method --lengths 256 --new 8 --repeat 1    # twenty seconds
    python -m experiments.speed --what growth    # time by text length, up to 16,384 tokens: minutes
    python -m experiments.speed --what large     # time and memory of any shape; Llama-3-8B on a GPU
    python -m experiments.speed --what large --shape llama3-8b --lengths 8192 32768 65536 --json rows.json

growth and large use random weights, so texts may be longer than a decoder was trained for. Times then differ
only where a method's work depends on the scores: AdaKV's budgets per head, KVReviver's swaps.
"""
import argparse
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import groupby
import gc
import json
import os
from pathlib import Path
import re
import shutil
import sys
import tempfile
import time

import numpy as np
import torch
from torch import Tensor, nn
import torch.nn.functional as F
from tqdm import tqdm

from nanollm import TINY, kernel_switch
from nanollm.attention import fused
from nanollm.cache import LayerCache, cache_bytes, make_cache
from nanollm.check import check_seed, whole
from nanollm.commands import shell
from nanollm.commands.compare import check_files
from nanollm.commands.registry import calibrated, given, load, pick
from nanollm.commands.text_table import text_table
from nanollm.generate import check_rereads, end_prompt, generate, prefill, tell_chunk_ends
from nanollm.hf.checkpoint import NoDraws, brief, check_device, hf_model, read_config, to_hf
from nanollm.measure.evaluate import budget_for
from nanollm.measure.replay import feed
from nanollm.measure.timing import best, in_turn, seconds
from nanollm.model import Config, Decoder
from nanollm.tokenizer import boundaries
from nanollm.training.train import hardware

DECODED = ["full", "snap_kv", "h2o", "kvzip", "kvzip_4", "quest", "quantized_2", "quantized_3", "quantized_4",
           "kv_reviver", "kv_reviver_mean", "kv_reviver_shrunk"]  # their steps are timed by default
SHAPES = {
    "small": Config(2048, 4096, n_layers=4, n_heads=8, n_kv_heads=2, d_model=256, d_ff=704),
    "qwen2.5-0.5b": Config(151_936, 32_768, n_layers=24, n_heads=14, n_kv_heads=2, d_model=896, d_ff=4864,
                           rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    "llama3-8b": Config(128_256, 8192, n_layers=32, n_heads=32, n_kv_heads=8, d_model=4096, d_ff=14_336,
                        rope_theta=5e5, tie_embeddings=False)}
ON_CPU = dict(shape="small", dtype="float32", lengths=[256, 1024], batch=[1, 4], new=16)
ON_GPU = dict(shape="llama3-8b", dtype="bfloat16", lengths=[8192, 32768, 65536], batch=[1, 4, 16], new=128)
METHODS = dict(steps="all", growth="full snap_kv h2o kvzip quantized_2",
               large="full snap_kv ada_kv chunk_kv h2o quantized_2 kv_reviver")
LENGTHS = 512, 1024, 2048, 4096, 8192, 16_384  # of growth
AT_ONCE = 512  # tokens read at once, in all texts; this bounds the attention matrix
PHASES = "reading the prompt", "the prompt's end", "one step"


# ---- helpers ---

def phases(model, tokens: Tensor, caches: list[LayerCache], steps: int = 0) -> list[float]:
    """Return the seconds to read a prompt, to compress it, and of each of `steps` steps after it."""
    return seconds(lambda: prefill(model, tokens, caches), lambda: end_prompt(model, tokens, caches),
                   *[lambda: model(tokens[:, :1], caches)] * steps)


def random_tokens(model, n: int, seed: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, n), generator=generator)


def budgets(model, methods: dict, lengths: list[int], percent: float) -> dict[tuple, dict]:
    """Return each method's options by (length, name). ValueError if a method cannot use its budget."""
    options = {}
    for n in lengths:
        for name, Method in methods.items():
            options[n, name] = given(Method, budget=budget_for(percent / 100, n))
            try:
                check_rereads(model, make_cache(model, Method, **options[n, name]), n)
            except ValueError as error:
                raise ValueError(f"{name} at {percent:g} % of {n} tokens: {error}") from error
    return options


# ---- steps ---

def compiled(model):
    """Return a copy of the decoder whose blocks are compiled, except for the calls of the growing cache.

    The compiled parts take one new token. Their sums may round differently.
    """
    @torch.compile(dynamic=False)
    def before(block, x, angles):
        return block.attention.project(block.norm1(x), angles)

    @torch.compile(dynamic=False)
    def after(block, x, y):
        x = x + block.attention.o(y.transpose(1, 2).flatten(2))
        return x + block.mlp(block.norm2(x))

    fast = deepcopy(model)
    for block in fast.blocks:
        block.forward = lambda x, angles, pos, cache, block=block: after(
            block, x, cache.attend(*before(block, x, angles), pos))
    return fast


@torch.no_grad()
def against_floor(model, theirs, lengths: list[int], repeat: int, compiles: bool, steps: int = 16):
    """Yield rows: ms of a decoding step by our decoder, compiled or not, and by transformers.

    Beside them the time that every step needs: products with all weights (floor), attention over the slots.
    """
    from transformers import DynamicCache
    for dtype in (torch.float32, torch.bfloat16):
        model, theirs = deepcopy(model).to(dtype), deepcopy(theirs).to(dtype)
        fast = compiled(model) if compiles else None
        weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
        inputs = {w.shape[1]: torch.randn(1, 1, w.shape[1], dtype=dtype) for w in weights}
        q = torch.randn(1, model.config.n_heads, 1, model.config.head_dim, dtype=dtype)
        for n in lengths:
            tokens = random_tokens(model, n, seed=n)
            caches, memory = make_cache(model), DynamicCache()
            prefill(model, tokens, caches)
            theirs(tokens, past_key_values=memory, logits_to_keep=1)

            def step(decoder):
                decoder(tokens[:, :1], caches)
                for cache in caches:
                    cache.length = cache.seen = n  # forget the step again

            def their_step():
                theirs(tokens[:, :1], past_key_values=memory)
                memory.crop(-1)

            runs = dict(floor=lambda: [F.linear(inputs[w.shape[1]], w) for w in weights],
                        attention=lambda: [fused(q, cache.k, cache.v, None, False) for cache in caches],
                        ours=lambda: step(model), compiled=lambda: step(fast), theirs=their_step)
            runs = {name: lambda run=run: seconds(lambda: [run() for _ in range(steps)])
                    for name, run in runs.items() if name != "compiled" or compiles}
            in_turn(runs, 1)  # warms up, and compiles
            ms = {name: 1e3 * least / steps for name, (least,) in in_turn(runs, repeat).items()}
            yield dict(table="floor", repeat=repeat, numbers=str(dtype).removeprefix("torch."), slots=n, **ms,
                       ratio=ms["ours"] / (ms["floor"] + ms["attention"]))


def compression(model, encoding, methods: dict, options: dict, lengths: list[int], repeat: int):
    """Yield rows: ms of the compression at a prompt's end, in percent of full's prefill, and the prefill.

    The prefill is in units of full's; it is longer for methods that observe every query. The row of full has
    the ms of its prefill.
    """
    ends = boundaries(encoding, model.config.vocab_size)
    learned = {name: calibrated(Method, model, encoding) for name, Method in methods.items()}
    rows = {name: dict(table="end", repeat=repeat, method=name) for name in methods}
    for n in lengths:
        tokens = random_tokens(model, n, seed=n)

        def run(name):
            caches = make_cache(model, methods[name], **learned[name], **options[n, name])
            tell_chunk_ends(caches, ends[tokens])
            return phases(model, tokens, caches)

        times = in_turn({name: partial(run, name) for name in methods}, repeat)
        full = times["full"][0]
        for name, (reading, ending) in times.items():
            taken = full if name == "full" else ending
            rows[name] |= {f"{n} end": 1e3 * taken, f"{n} %": 100 * taken / full,
                           f"{n} reading": reading / full}
    yield from rows.values()


@torch.no_grad()
def decoding(model, methods: dict, n: int, repeat: int, batches=(1, 8)):
    """Yield rows: ms of a step after n tokens with keep ratio 25 %, and its speed in units of full's."""
    options = budgets(model, methods, [n], 25)
    rows = {name: dict(table="step", repeat=repeat, prompt=n, method=name) for name in methods}
    for B in batches:
        tokens, ready = random_tokens(model, n, seed=n).expand(B, -1), {}
        for name, Method in methods.items():
            ready[name] = make_cache(model, Method, **options[n, name])
            phases(model, tokens, ready[name])
        times = in_turn({name: lambda caches=caches: [best(lambda: model(tokens[:, :1], caches), 2)]
                         for name, caches in ready.items()}, repeat)
        for name, (least,) in times.items():
            rows[name] |= {f"batch {B} ms": 1e3 * least, f"batch {B} speed": times["full"][0] / least}
    yield from rows.values()


@torch.no_grad()
def bridge(theirs, lengths: list[int], new: int, repeat: int):
    """Yield rows: ms of a model of transformers with its own cache, and with our full cache."""
    from transformers import DynamicCache
    from nanollm.hf.bridge import attach, detach
    for n in lengths:
        tokens = random_tokens(theirs, n + new, seed=0)

        def run(memory):
            reading, steps = seconds(
                lambda: theirs(tokens[:, :n], past_key_values=memory, logits_to_keep=1),
                lambda: [theirs(token, past_key_values=memory) for token in tokens[:, n:].split(1, 1)])
            detach(theirs)
            return 1e3 * reading, 1e3 * steps / new

        ms = in_turn(dict(own=lambda: run(DynamicCache()), ours=lambda: run(attach(theirs))), repeat)
        row = dict(table="bridge", repeat=repeat, prompt=n)
        for what, own, ours in zip(("reading", "token"), *ms.values()):
            row |= {what: own, f"{what}, ours": ours, f"{what}, ratio": ours / own}
        yield row


def against_transformers(model, theirs, lengths: list[int], new: int, repeat: int):
    """Yield rows: tokens/s of greedy decoding with both, after a check that they write the same tokens.

    The time of a run with one new token is subtracted, so that reading the prompt does not count.
    """
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for n in lengths:
            tokens = random_tokens(model, n, seed=0)

            def ours(count: int):
                return generate(model, tokens, count)[0].tolist()

            def of_transformers(count: int):
                out = theirs.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                                      pad_token_id=0, attention_mask=torch.ones_like(tokens))
                return out[0, n:].tolist()

            if ours(new + 1) != of_transformers(new + 1):
                raise ValueError("the two decode different tokens; their speeds cannot be compared")
            times = in_turn({(run, count): lambda run=run, count=count: seconds(lambda: run(count))
                             for run in (ours, of_transformers) for count in (new + 1, 1)}, repeat)
            a, b = (times[run, new + 1][0] - times[run, 1][0] for run in (ours, of_transformers))
            row = dict(table="greedy", repeat=repeat, new=new, threads=threads, prompt=n)
            if a > 0 and b > 0:
                yield row | dict(nanollm=new / a, transformers=new / b, ratio=b / a)
            else:  # the machine was busy with other work
                yield row | dict(nanollm=None, transformers=None, ratio=None)


def steps(args):
    """Yield the rows of five tables: decoding steps, the cost of compression, and transformers."""
    whole("new", args.new, 1, 1024)
    if args.repeat is not None:
        whole("repeat", args.repeat, 1)
    model, encoding = load(args.model, "cpu")
    methods = pick(["full", *args.methods])
    for n in args.lengths or []:
        whole("length", n, 1, max(1, model.config.max_len - max(32, args.new + 1)))
    ends, short = args.lengths or [512, 1024, 2048], args.lengths or [128, 2048]
    options = budgets(model, methods, ends, 25)
    if args.compile and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ValueError("--compile needs a C++ compiler, which is missing; install one or leave it out")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as copy:
        to_hf(model, copy, torch.float32)
        theirs = hf_model(copy)
    yield from against_floor(model, theirs, short, args.repeat or 9, args.compile)
    yield from compression(model, encoding, methods, options, ends, args.repeat or 5)
    stepping = pick(DECODED) if args.methods == ["all"] else methods
    yield from decoding(model, stepping, max(ends), args.repeat or 9)
    yield from bridge(theirs, short, args.new, args.repeat or 7)
    yield from against_transformers(model, theirs, short, args.new, args.repeat or 7)


# ---- growth ---

@torch.no_grad()
def growth(args):
    """Yield rows: ms of each phase by length, and the exponent in time ∝ tokens^exponent (least squares)."""
    lengths = sorted({whole("length", n, 1, 2 ** 17) for n in args.lengths})
    if len(lengths) < 2:
        raise ValueError(f"--lengths has one length, {lengths[0]}; growth needs at least two")
    if args.figure:
        check_files(args.figure, args.json)
    config, methods = read_config(args.model), pick(args.methods)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(replace(config, max_len=2 * lengths[-1] + 8)).eval()  # room for KVzip's reread
    options, ms = budgets(model, methods, lengths, 25), {}
    for n in lengths:
        tokens = random_tokens(model, n, seed=n)

        def run(name):
            return phases(model, tokens, make_cache(model, methods[name], **options[n, name]), steps=8)

        repeat = max(1, min(5, 4096 // n))  # long texts once
        for name, (reading, ending, *each) in in_turn({name: partial(run, name) for name in methods},
                                                      repeat).items():
            for phase, least in zip(PHASES, (reading, ending, min(each))):
                ms.setdefault((phase, name), {})[str(n)] = 1e3 * least
    for phase in PHASES:
        for name in methods:
            slope, _ = np.polyfit(np.log(lengths), np.log([*ms[phase, name].values()]), 1)
            yield dict(table="growth", model=args.model.name, phase=phase, method=name, **ms[phase, name],
                       exponent=float(slope))


def draw(rows: list[dict], file: Path):
    """A panel a phase, both axes logarithmic; the exponents stand beside the methods' names."""
    import matplotlib.pyplot as plt
    from nanollm.commands.plot import save, style
    figure, axes = plt.subplots(1, len(PHASES), figsize=(16, 7), layout="constrained")
    lengths = [key for key in rows[0] if key.isdigit()]
    for axis, phase in zip(axes, PHASES):
        for row in (row for row in rows if row["phase"] == phase):
            axis.plot([*map(int, lengths)], [row[n] for n in lengths], markersize=7, **style(row["method"]),
                      label=f"{row['method']}, exponent {row['exponent']:.2f}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([*map(int, lengths)], [f"{int(n):,}" for n in lengths], rotation=30)
        axis.set(title=phase, xlabel="tokens", ylabel="ms")
        axis.grid(alpha=0.3)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))  # below: no line is hidden
    save(figure, file)


# ---- large ---

def skeleton(config: Config, dtype: torch.dtype) -> Decoder:
    """Return the decoder without memory for its weights."""
    with torch.device("meta"), NoDraws():
        return Decoder(config).to(dtype).requires_grad_(False).eval()


def fill(model: Decoder, device: torch.device, seed: int):
    """Give a skeleton weights, drawn on the device in their dtype: N(0, 0.02²), norms 1, biases 0."""
    model.to_empty(device=device)
    if model.config.tie_embeddings:  # to_empty has untied them
        model.head.weight = model.embed.weight
    generator = torch.Generator(device).manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.normal_(0, 0.02, generator=generator)
        else:
            p.fill_("norm" in name and name.endswith("weight"))


def now(cuda: bool) -> float:
    """Return the time in seconds; on a GPU, after all its work is done."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def decode(model: Decoder, caches: list[LayerCache], token: Tensor, new: int, cuda: bool):
    """Feed token (B, 1), then time greedy decoding of `new`; return tokens/s and the last token."""
    for i in range(new + 1):
        if i == 1:
            began = now(cuda)
        token = model(token, caches)[:, -1].argmax(-1, keepdim=True)
    return len(token) * new / (now(cuda) - began), token


@torch.no_grad()
def measure(model: Decoder, Method, options: dict, tokens: Tensor, new: int, chunk: int, cuda: bool) -> dict:
    """Return a row's numbers. The prompt is tokens (B, T + 1) but the last, read `chunk` at a time.

    Seconds, and tokens/s of the batch. MB: `live`, `allocated` and `peak` (until the prompt's end) as the
    caches count them; on a GPU also as its allocator counts them, without what was allocated before. On a GPU
    `plain` is the speed over the next `new` tokens without kernels, if kernels ran before.
    """
    T, before = tokens.shape[1] - 1, 0
    if cuda:
        gc.collect()  # frees a row that did not fit
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ends = torch.arange(T, device=tokens.device)[None] % 16 == 15  # for methods that keep chunks
    caches, prompt = make_cache(model, Method, **options), tokens[:, :-1]
    tell_chunk_ends(caches, ends)
    peaks = []
    reading, ending = seconds(lambda: peaks.append(feed(model, prompt, caches, chunk)),
                              lambda: peaks.append(end_prompt(model, prompt, caches)),
                              clock=partial(now, cuda))
    gpu_bytes = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()] if cuda else []
    live, allocated = cache_bytes(caches)
    speed, token = decode(model, caches, tokens[:, -1:], new, cuda)
    row = {"reading s": reading, "end s": ending, "tokens/s": speed,
           "live": live / 1e6, "allocated": allocated / 1e6, "peak": max(peaks) / 1e6}
    if cuda:
        row |= {name: (x - before) / 1e6 for name, x in zip(("GPU", "GPU peak"), gpu_bytes)}
        fast = kernel_switch.on_gpu(model.embed.weight.new_zeros(model.config.head_dim))
        allowed, kernel_switch.use_kernels = kernel_switch.use_kernels, False
        try:
            if fast:
                row["plain"], _ = decode(model, caches, token, new, cuda)
        except torch.OutOfMemoryError:
            row["note"] = "without kernels, decoding does not fit"
        finally:
            kernel_switch.use_kernels = allowed
    return row


def attempt(*arguments) -> dict:
    """Return `measure`, or a note: it does not fit in memory, or the method refuses this prompt."""
    try:
        return measure(*arguments)
    except ValueError as error:
        return dict(note=brief(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("alloc|out of memory", str(error), re.I):
            raise
        return dict(note=f"does not fit: {brief(error)}")


def large(args):
    """Yield the rows that --json already holds and the new ones.

    The first row of each length and method is measured twice, and the second run counts: the first compiles
    kernels.
    """
    if args.resume and not args.json:
        raise ValueError("--resume continues the rows of a file; name it with --json FILE")
    if args.shape and args.model:
        raise ValueError(f"--shape {args.shape} and --model {args.model} both name a shape; give one")
    device = check_device(args.device)
    cuda = device.type == "cuda"
    if not cuda and device.type != "cpu":
        raise ValueError(f"device is {device}; only cpu and cuda can be timed")
    for name, default in (ON_GPU if cuda else ON_CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    chunk = [] if args.chunk is None else [args.chunk]
    for name, numbers in dict(length=args.lengths, batch=args.batch, new=[args.new], chunk=chunk).items():
        for x in numbers:
            whole(name, x, 1, 2 ** 20)
    check_seed(args.seed)
    shell.check_keep(args.keep)

    dtype, config = getattr(torch, args.dtype), read_config(args.model) if args.model else SHAPES[args.shape]
    after = 1 + 2 * args.new  # tokens, with and without kernels
    if config.family == "llama":  # no weight goes by positions, so a text may be read twice
        config = replace(config, max_len=2 * max(config.max_len, *args.lengths) + after)
    for n in args.lengths:
        whole("length", n, 1, config.max_len - after)
    model, methods = skeleton(config, dtype), pick(args.methods)
    options = budgets(model, methods, args.lengths, args.keep)
    parameters = sum(p.numel() for p in model.parameters())
    weights, memory = parameters * dtype.itemsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not cuda and weights > memory:
        raise ValueError(f"weights of {weights / 1e9:.1f} GB exceed the memory of {memory / 1e9:.1f} GB; "
                         "take another --shape or --dtype")
    shell.set_threads(0, parameters)
    settings = (f"{args.model or args.shape}: {parameters:,} parameters, weights {weights / 1e9:.2f} GB, "
                f"{args.dtype}; keep {args.keep:g} %, {args.new} new tokens, chunks of "
                f"{args.chunk or f'{AT_ONCE}/batch'}, seed {args.seed}; {hardware(device.type)}, "
                f"torch {torch.__version__}")
    done = {(row["tokens"], row["batch"], row["method"]): row for row in args.earlier}
    if other := {row["settings"] for row in args.earlier} - {settings}:
        raise ValueError(f"{args.json} holds rows of another run ({other.pop()}), and this is "
                         f"{settings}; give the same options, or name another file")

    if cuda:
        torch.cuda.set_device(device)
    fill(model, device, args.seed)
    numbers = ["reading s", "end s", "tokens/s", "live", "allocated", "peak"]
    numbers += ["plain", "GPU", "GPU peak"] if cuda else []
    warm, jobs = set(), [(n, B, name) for n in args.lengths for B in args.batch for name in methods]
    for n, B, name in tqdm(jobs, leave=False, unit="row", disable=None):
        if (n, B, name) not in done:
            tokens = random_tokens(model, n + 1, args.seed, B).to(device)
            arguments = (model, methods[name], options[n, name], tokens, args.new,
                     args.chunk or max(1, AT_ONCE // B), cuda)
            row = attempt(*arguments)
            if "live" in row and (n, name) not in warm:
                warm.add((n, name))
                row = attempt(*arguments)
            done[n, B, name] = dict(table="large", settings=settings, method=name, tokens=n, batch=B,
                                    **dict.fromkeys(numbers)) | row
        yield done[n, B, name]


# ---- as text ---

TITLES = dict(
    floor="One decoding step: ms, batch 1, one thread, best of {repeat}.\n"
          "floor: products with all weight matrices; attention: over the slots. Every step needs both.\n"
          "ours, compiled (torch.compile), theirs (transformers): a whole step\n"
          "ratio: ours / (floor + attention)",
    end="The compression at the prompt's end, by length: batch 1, one thread, keep 25 %, window 32, "
        "best of {repeat}.\nend: ms of the compression (row full: ms of the prefill); %: of full's prefill\n"
        "reading: the method's own prefill in units of full's",
    step="One decoding step after {prompt} tokens: one thread, keep 25 %, best of {repeat}.\n"
         "ms: time of a step of the batch; speed: in units of full's",
    bridge="A model of transformers with its own cache, and with our full cache (ours): ms, one thread, "
           "best of {repeat}.\nreading: the prompt; token: one decoding step; ratio: ours / own",
    greedy="Greedy decoding by our decoder and by transformers: tokens/s over {new} tokens, batch 1, "
           "float32, best of {repeat}.\nratio: nanollm / transformers",
    growth="{phase}: ms by number of tokens. Shape of {model}, random weights, batch 1, float32, one "
           "thread, keep 25 %.\nexponent: time grows as tokens^exponent",
    large="""{settings}

reading s, end s  seconds to read the prompts, and to compress them at their end
tokens/s          decoding speed, all texts together; on a GPU also plain, without our kernels
live, allocated   MB in use and MB allocated by the caches after the compression
peak              most MB allocated by the caches until then
GPU, GPU peak     the same two sizes as the GPU's allocator counts them, without the weights
""")
DIGITS = {"end": 1, "%": 1, "nanollm": 0, "transformers": 0, "end s": 3, "tokens/s": 1, "plain": 1}  # else 2


def cell(key: str, x) -> str:
    """Return a number as text; a dash for None, a time that could not be measured."""
    digits = DIGITS.get(key, DIGITS.get(key.split()[-1], 2))
    return "–" if x is None else f"{x:.{digits}f}" if isinstance(x, float) else str(x)


def show(rows: list[dict]) -> str:
    """Return all tables of the rows as text. A key that a title names gets no column."""
    tables = []
    for (table, _), group in groupby(rows, lambda row: (row["table"], row.get("phase"))):
        part, title = [*group], TITLES[table]
        named = {"table"} | {key for key in part[0] if f"{{{key}}}" in title}
        keys = [key for key in dict.fromkeys(key for row in part for key in row) if key not in named]
        cells = [[cell(key, row.get(key, "")) for key in keys] for row in part]
        widths = [18] + [9] * len(keys) if table == "large" else []  # its lines are printed as they come
        tables.append(f"{title.format(**part[0])}\n{text_table([[*keys], *cells], widths)}")
    return "\n\n".join(tables)


# ---- the command line ---

def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the command line. The options depend on --what."""
    parser = argparse.ArgumentParser(prog="python -m experiments.speed", description=__doc__, add_help=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--what", choices=METHODS, default="steps",
           help="steps: decoding steps and the cost of compression (default); growth: time by text length; "
                "large: time and memory at any size. Each has its own options: add --help after it")
    what = parser.parse_known_args(argv)[0].what
    option("-h", "--help", action="help", help="show this text")
    option("--model", type=Path, default=None if what == "large" else TINY,
           help="folder of a checkpoint with its tokenizer; growth and large read only its config.json; "
                + ("default: see --shape" if what == "large" else "default nanollm/tiny"))
    option("--methods", nargs="+", default=METHODS[what].split(), metavar="NAME",
           help=f"methods to time; default: {METHODS[what]}")
    option("--lengths", nargs="+", type=int, metavar="TOKENS", default=LENGTHS if what == "growth" else None,
           help="lengths of the texts; " + dict(
               steps="default: 512 1024 2048 for compression, 128 2048 for decoding",
               growth=f"at least two; default {' '.join(map(str, LENGTHS))}",
               large=f"default {ON_GPU['lengths']} on a GPU, {ON_CPU['lengths']} on a CPU")[what])
    option("--json", type=Path, metavar="FILE", help="file to write the rows to, after each row")
    if what == "steps":
        option("--new", type=int, metavar="TOKENS", default=128, help="tokens to decode; default 128")
        option("--repeat", type=int, metavar="TIMES",
               help="runs of each measurement, of which the fastest counts; default 5 to 9, by table")
        option("--compile", action="store_true", help="also time decoding steps with torch.compile")
    if what == "growth":
        option("--figure", type=Path, metavar="FILE", help="file for a figure, .png, .pdf or .svg")
    if what == "large":
        default = {name: f"default {ON_GPU[name]} on a GPU, {ON_CPU[name]} on a CPU" for name in ON_CPU}
        option("--shape", choices=SHAPES, help=f"size of the model; {default['shape']}")
        option("--device", default="cuda" if torch.cuda.is_available() else "cpu",
               help="torch device; default %(default)s")
        option("--dtype", choices=shell.DTYPES, help=f"number format; {default['dtype']}")
        option("--batch", nargs="+", type=int, metavar="TEXTS",
               help=f"numbers of texts at once; {default['batch']}")
        option("--keep", type=float, default=25, metavar="PERCENT",
               help="keep ratio: the budget of each head as a percentage of the prompt's tokens; default 25")
        option("--new", type=int, metavar="TOKENS", help=f"tokens to decode; {default['new']}")
        option("--chunk", type=int, metavar="TOKENS",
               help=f"tokens of each prompt that are read at once; default {AT_ONCE} divided by the batch")
        option("--seed", type=int, default=0, help="seed of weights and tokens; default 0")
        option("--resume", action="store_true",
               help="keep the rows that --json already holds and measure the missing ones")
    return parser.parse_args(argv)


def rows_of(data: bytes) -> list[dict]:
    """Return the rows of a file that --json wrote; [] for any other file."""
    rows = shell.read_json(data)
    try:
        return rows if show(rows) else []
    except (AttributeError, KeyError, TypeError):
        return []


def main(argv: list[str]):
    args = parsed(argv)
    before = shell.check_output(args.json, "rows", rows_of) if args.json else b""
    args.earlier = rows_of(before) if getattr(args, "resume", False) else []
    rows, measured = [*args.earlier], dict(steps=steps, growth=growth, large=large)[args.what](args)
    for table, part in groupby(measured, lambda row: row["table"]):
        shown = []
        for row in part:
            shown.append(row)
            if row not in args.earlier:
                rows.append(row)
                if args.json:
                    before = shell.replace(args.json, json.dumps(rows, indent=1).encode(), before)
            if table == "large":  # takes long, so each row is printed at once
                text = show([row])
                tqdm.write(text if len(shown) == 1 else text.splitlines()[-1])
        if table != "large":
            print(f"{show(shown)}\n", flush=True)
    if getattr(args, "figure", None):
        draw(rows, args.figure)


if __name__ == "__main__":
    shell.command(main, sys.argv[1:])
