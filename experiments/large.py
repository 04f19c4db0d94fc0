"""Speed and memory of decoding in a real model's shape, with random weights.

    python -m experiments.large                                  # on a GPU Llama-3-8B, else a small shape
    python -m experiments.large --shape llama3-8b --lengths 8192 32768 65536 --batch 1 4 16 --json rows.json

Neither needs trained weights, but for what a method lets the numbers decide: how AdaKV shares entries out
over heads, how often KVReviver swaps. What a method would learn from text stays at its default. The first row
of each length and method is measured twice, and the second time counts: the first compiles kernels.
"""
import argparse
from dataclasses import replace
from datetime import date
import gc
import json
from numbers import Real
import os
from pathlib import Path
import re
import sys
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from nanollm import kernel_switch
from nanollm.cache import LayerCache, cache_bytes, make_cache
from nanollm.check import check_row, check_seed, fits, whole
from nanollm.commands import shell
from nanollm.commands.registry import given, pick
from nanollm.generate import check_rereads, end_prompt, tell_chunk_ends
from nanollm.hf.checkpoint import NoDraws, brief, check_device, read_config
from nanollm.measure.evaluate import share
from nanollm.measure.replay import feed
from nanollm.model import Config, Decoder
from nanollm.training.train import hardware

SHAPES = {
    "small": Config(2048, 4096, n_layers=4, n_heads=8, n_kv_heads=2, d_model=256, d_ff=704),
    "qwen2.5-0.5b": Config(151_936, 32_768, n_layers=24, n_heads=14, n_kv_heads=2, d_model=896, d_ff=4864,
                           rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    "llama3-8b": Config(128_256, 8192, n_layers=32, n_heads=32, n_kv_heads=8, d_model=4096, d_ff=14_336,
                        rope_theta=5e5, tie_embeddings=False)}
METHODS = "full snap_kv ada_kv chunk_kv h2o quantized_2 kv_reviver"
ON_CPU = dict(shape="small", dtype="float32", lengths=[256, 1024], batch=[1, 4], new=16)
ON_GPU = dict(shape="llama3-8b", dtype="bfloat16", lengths=[8192, 32768, 65536], batch=[1, 4, 16], new=128)
AT_ONCE = 512  # tokens of all texts: attention may make a number for each, slot and query head


def skeleton(config: Config, dtype: torch.dtype) -> Decoder:
    """The decoder without memory for its weights."""
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


# ---- a row ---


def now(cuda: bool) -> float:
    """Seconds, once the GPU has done all that it was told to."""
    if cuda:
        torch.cuda.synchronize()
    return perf_counter()


def decode(model: Decoder, caches: list[LayerCache], token: Tensor, new: int, cuda: bool):
    """Feed token (B, 1), then decode `new` greedily with the clock on: tokens/s of the batch, and the last.
    """
    for i in range(new + 1):
        if i == 1:
            began = now(cuda)
        token = model(token, caches)[:, -1].argmax(-1, keepdim=True)
    return len(token) * new / (now(cuda) - began), token


@torch.no_grad()
def measure(model: Decoder, Method, knobs: dict, tokens: Tensor, new: int, chunk: int, cuda: bool) -> dict:
    """A row's numbers. The prompt is all but the last of tokens (B, T + 1), read `chunk` at a time.

    Seconds, and tokens/s of the batch. Bytes: `live`, `allocated` and `peak` (until the prompt's end) are the
    caches' word; `device` and `device_peak` the GPU allocator's, less what it had handed out before, None on
    a CPU. On a GPU `plain_per_s` is of the `new` tokens that come next, without kernels; None where none ran.
    """
    (B, T), c, of_before = tokens[:, 1:].shape, model.config, 0
    if cuda:
        gc.collect()  # of a row that did not fit
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        of_before = torch.cuda.memory_allocated()
    ends = torch.arange(T, device=tokens.device)[None] % 16 == 15  # of chunks, for what goes by the text
    caches = make_cache(model, Method, **knobs)
    tell_chunk_ends(caches, ends)

    began = now(cuda)
    row = dict(peak=feed(model, tokens[:, :-1], caches, chunk), device=None, device_peak=None)
    read = now(cuda)
    row["peak"] = max(row["peak"], end_prompt(model, tokens[:, :-1], caches))
    row |= dict(prefill_s=read - began, end_s=now(cuda) - read)
    if cuda:
        row["device"] = torch.cuda.memory_allocated() - of_before
        row["device_peak"] = torch.cuda.max_memory_allocated() - of_before
    row["live"], row["allocated"] = cache_bytes(caches)
    row["tokens_per_s"], token = decode(model, caches, tokens[:, -1:], new, cuda)

    if cuda:
        q = model.embed.weight.new_zeros(B, c.n_heads, 1, c.head_dim)
        fast, row["plain_per_s"] = kernel_switch.on_gpu(q), None
        allowed, kernel_switch.use_kernels = kernel_switch.use_kernels, False
        try:
            if fast:
                row["plain_per_s"], _ = decode(model, caches, token, new, cuda)
        except torch.OutOfMemoryError:
            row["note"] = "without kernels, decoding does not fit"
        finally:
            kernel_switch.use_kernels = allowed
    return row


def attempt(*arguments) -> dict:
    """`measure`, or a note: what does not fit, or why a method cannot work with a prompt so long."""
    try:
        return measure(*arguments)
    except ValueError as error:
        return dict(note=brief(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("alloc|out of memory", str(error), re.I):
            raise
        return dict(note=f"does not fit: {brief(error)}")


# ---- the table ---

COLUMNS = dict(  # title, width, digits, unit
    prefill_s=("reading", 9, 2, 1), end_s=("end", 8, 3, 1), tokens_per_s=("tokens/s", 10, 1, 1),
    plain_per_s=("plain", 9, 1, 1), live=("live", 10, 2, 1e6), allocated=("allocated", 10, 2, 1e6),
    peak=("peak", 10, 2, 1e6), device=("GPU", 10, 2, 1e6), device_peak=("GPU peak", 10, 2, 1e6))
TERMS = """
Seconds to read the prompts and to compress them at their end; tokens/s of decoding, all texts together{}.
MB that the caches say they hold after that end, and at most while reading; GPU: what its allocator handed out
beyond the weights, which a CPU does not count.
"""


def header(cuda: bool) -> str:
    """What stands above the rows."""
    titles = (form for name, form in COLUMNS.items() if cuda or name != "plain_per_s")
    cells = "".join(f"{title:>{width}}" for title, width, *_ in titles)
    return f"{TERMS.format('; plain: without kernels' if cuda else '')}\n tokens batch  {'method':<18}{cells}"


def show(row: dict) -> str:
    """A row as a line; a dash where there is no number."""
    line = f"{row['tokens']:>7}{row['batch']:>6}  {row['method']:<18}"
    for name, (_, width, digits, unit) in COLUMNS.items():
        if name in row:
            cell = "–" if row[name] is None else f"{row[name] / unit:.{digits}f}"
            line += f"{cell:>{width}}"
    return f"{line}  {row.get('note', '')}".rstrip()


# ---- the command line ---


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.large", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    words = {name: [re.sub(r"[\[\],]", "", str(on[name])) for on in (ON_GPU, ON_CPU)] for name in ON_GPU}
    default = {name: f"default {gpu} on a GPU, {cpu} on a CPU" for name, (gpu, cpu) in words.items()}
    parser.add_argument("--shape", choices=SHAPES, help=default["shape"])
    parser.add_argument("--model", type=Path, help="a folder whose config.json gives the shape; no weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="default here %(default)s")
    parser.add_argument("--dtype", choices=shell.DTYPES, help=default["dtype"])
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help=default["lengths"])
    parser.add_argument("--batch", nargs="+", type=int, metavar="TEXTS", help=default["batch"])
    parser.add_argument("--methods", nargs="+", default=METHODS.split(), metavar="NAME",
                        help=f"default {METHODS}")
    parser.add_argument("--budget", type=float, default=25, metavar="PERCENT", help="of a prompt; default 25")
    parser.add_argument("--new", type=int, metavar="TOKENS", help=f"to decode; {default['new']}")
    parser.add_argument("--chunk", type=int, metavar="TOKENS",
                        help=f"of each prompt read at a time; default {AT_ONCE}, shared out over the batch")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--json", type=Path, help="write the rows here, each as it is done")
    parser.add_argument("--resume", action="store_true", help="measure only what the file of --json lacks")
    args = parser.parse_args(argv)

    if args.shape and args.model:
        raise ValueError(f"--shape {args.shape} and --model {args.model} are two shapes; give one")
    if args.resume and not args.json:
        raise ValueError("--resume goes on with the rows of a file; name it by --json FILE")
    args.device = check_device(args.device)
    if args.device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {args.device} cannot be timed here; use cpu or cuda")
    for name, x in (ON_GPU if args.device.type == "cuda" else ON_CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, x)
    chunk = [] if args.chunk is None else [args.chunk]
    for name, numbers in dict(length=args.lengths, batch=args.batch, new=[args.new], chunk=chunk).items():
        for x in numbers:
            whole(name, x, 1, 2 ** 20)
    check_seed(args.seed)
    if not 0 < args.budget <= 100:
        raise ValueError(f"budget {args.budget:g} % must lie above 0 and up to 100 percent of the prompt")
    return args


def stored(file: Path, settings: dict, resume: bool) -> tuple[list[dict], bytes]:
    """Rows of an earlier run, to go on with, and all that the file holds.

    ValueError if it is none of ours, has other settings or a broken row.
    """
    def rows_of(data: bytes):
        held = shell.read_json(data)
        return (isinstance(held, dict) and held.keys() == {"settings", "rows"}
                and fits(held["settings"], dict) and fits(held["rows"], list[dict]) and held)

    before = shell.check_output(file, "rows", rows_of)
    held = rows_of(before) if resume else None
    if not held:
        return [], before
    for name, x in settings.items():
        if (other := held["settings"].get(name)) != x:
            raise ValueError(f"{file} holds rows of {name} {other!r:.60}, and now it is {x!r:.60}; "
                             "go on as they were measured, or name another file")
    for row in held["rows"]:  # one with a note may lack numbers
        numbers = [name for name in COLUMNS if name in row or name != "plain_per_s" and "note" not in row]
        check_row(row, dict(tokens=int, batch=int, method=str) | dict.fromkeys(numbers, Real | None), file)
    return held["rows"], before


def main(argv: list[str]):
    args = options(argv)
    cuda, dtype = args.device.type == "cuda", getattr(torch, args.dtype)
    if cuda:
        torch.cuda.set_device(args.device)
    config, methods = read_config(args.model) if args.model else SHAPES[args.shape], pick(args.methods)
    settings = dict(vars(config), dtype=args.dtype, budget=args.budget, new=args.new, chunk=args.chunk,
                    seed=args.seed, torch=torch.__version__)
    after = 1 + 2 * args.new  # tokens, with and without kernels
    if config.family == "llama":  # no weight goes by positions, so a text may be read twice
        config = replace(config, max_len=2 * max(config.max_len, *args.lengths) + after)
    model, knobs = skeleton(config, dtype), {}
    for T in args.lengths:
        whole("length", T, 1, config.max_len - after)
        for name, Method in methods.items():  # what cannot be measured is found before any work is done
            knobs[T, name] = given(Method, budget=share(args.budget / 100, T))
            try:
                check_rereads(model, make_cache(model, Method, **knobs[T, name]), T)
            except ValueError as error:
                raise ValueError(f"{name} at {args.budget:g} % of {T} tokens: {error}") from error

    parameters = sum(p.numel() for p in model.parameters())
    weights, memory = parameters * dtype.itemsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not cuda and weights > memory:
        raise ValueError(f"weights of {weights / 1e9:.1f} GB exceed the memory of {memory / 1e9:.1f} GB; "
                         "take another --shape or --dtype")
    shell.set_threads(0, parameters)
    settings["hardware"] = hardware(args.device.type)
    rows, before = stored(args.json, settings, args.resume) if args.json else ([], b"")
    print(f"{date.today()}, {settings['hardware']}, torch {torch.__version__}, {args.dtype}, {parameters:,} "
          f"parameters, weights {weights / 1e9:.2f} GB")
    print(header(cuda), flush=True)
    fill(model, args.device, args.seed)

    done, warm = {(row["tokens"], row["batch"], row["method"]): row for row in rows}, set()
    jobs = dict.fromkeys((T, B, name) for T in args.lengths for B in args.batch for name in methods)
    bar = tqdm(jobs, leave=False, unit="row", disable=None)
    for T, B, name in bar:
        bar.set_description(f"{name}, {T} tokens, batch {B}")
        if (T, B, name) not in done:
            generator = torch.Generator().manual_seed(args.seed)
            tokens = torch.randint(config.vocab_size, (B, T + 1), generator=generator).to(args.device)
            chunk = args.chunk or max(1, AT_ONCE // B)
            asked = model, methods[name], knobs[T, name], tokens, args.new, chunk, cuda
            row = attempt(*asked)
            if "live" in row and (T, name) not in warm:
                warm.add((T, name))
                row = attempt(*asked)
            done[T, B, name] = dict(tokens=T, batch=B, method=name) | row
            if args.json:
                held = dict(settings=settings, rows=[*done.values()])
                before = shell.replace(args.json, json.dumps(held, indent=1).encode(), before)
        bar.write(show(done[T, B, name]))


if __name__ == "__main__":
    shell.command(main, sys.argv[1:])
