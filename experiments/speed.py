"""How fast decoding is, beside its floor and transformers, what compressing costs, and what a cache of ours
costs a model of transformers.

    python -m experiments.speed
    python -m experiments.speed --compile    # also by torch.compile: a minute more; needs a C++ compiler
    python -m experiments.speed --methods full my_method --lengths 256 --new 8 --repeat 1    # twenty seconds
"""
import argparse
from copy import deepcopy
from pathlib import Path
import shutil
import sys
import tempfile
import time

import torch
from torch import Tensor, nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanollm import TINY
from nanollm.attention import fused as attention
from nanollm.cache import make_cache
from nanollm.check import whole
from nanollm.commands.registry import calibrated, given, load, pick
from nanollm.commands.shell import command
from nanollm.generate import end_prompt, generate, prefill, tell_chunk_ends
from nanollm.hf.checkpoint import hf_model, to_hf
from nanollm.tokenizer import boundaries


DECODED = ["full", "snap_kv", "h2o", "kvzip", "kvzip_4", "quest", "quantized_2", "quantized_3", "quantized_4",
           "kv_reviver", "kv_reviver_mean", "kv_reviver_shrunk"]  # whose steps are timed by default


def best(run, repeat: int, clock=time.perf_counter) -> float:
    """Seconds, the least of `repeat` timings: whatever else the machine does only ever adds."""
    times = []
    for _ in range(repeat):
        began = clock()
        run()
        times.append(clock() - began)
    return min(times)


class Count(TorchDispatchMode):
    """Counts multiplications, and the bytes that operations read and write, of all that runs under it.

    A view moves nothing. In a matrix product of (m, k) and (k, n) every product counts, m·k·n; elsewhere each
    number of what is made by mul, div or exp.
    """

    def __init__(self):
        super().__init__()
        self.multiplications = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, operations made of others arrive whole
            out = op.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out, name = op(*args, **kwargs), op.overloadpacket.__name__
        if op.is_view or name == "_unsafe_view":
            return out
        read, made = ([x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]
                      for tree in ((args, kwargs), out))
        if name == "copy_" or name.startswith("new_"):  # their first argument is not read
            read = read[1:]
        self.bytes += sum(x.numel() * x.element_size() for x in read + made)
        if name in ("mm", "bmm"):
            self.multiplications += made[0].numel() * read[0].shape[-1]
        elif "scaled_dot_product" in name:
            q, k, *_ = read
            self.multiplications += 2 * q.numel() * k.shape[-2]
        elif name.rstrip("_") in ("mul", "div", "exp", "_softmax"):
            self.multiplications += made[0].numel()
        return out


def against_transformers(ours, new: int, prompts=(128, 2048), repeat: int = 7):
    """Greedy decoding of the same tokens with both, in one process, single-threaded and on two threads.

    The time of a run with one new token is taken off, so that reading the prompt does not count.
    """
    with tempfile.TemporaryDirectory() as copy:
        to_hf(ours, copy, torch.float32)
        theirs = hf_model(copy)

    bridge(theirs, new, prompts, repeat)
    print(f"\ngreedy decoding, {new} tokens, batch 1, float32, best of {repeat} in turn")
    print(f"{'threads':>8}{'prompt':>8}{'nanollm':>14}{'transformers':>16}{'ratio':>8}")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for length in prompts:
            tokens = random_tokens(ours, length, seed=0)

            def a(n: int):
                return generate(ours, tokens, n)[0].tolist()

            def b(n: int):
                out = theirs.generate(tokens, max_new_tokens=n, min_new_tokens=n, do_sample=False,
                                      pad_token_id=0, attention_mask=torch.ones_like(tokens))
                return out[0, length:].tolist()

            if a(new + 1) != b(new + 1):
                raise ValueError("the two decode different tokens; their speeds cannot be compared")
            print(f"{threads:>8}{length:>8}{speeds(a, b, new, repeat)}", flush=True)


@torch.no_grad()
def bridge(theirs, new: int, prompts, repeat: int):
    """A model of transformers with its own cache, and with ours as its memory: prefill and decoding."""
    from transformers import DynamicCache
    from nanollm.hf.bridge import attach, detach
    torch.set_num_threads(1)
    print(f"\ntransformers with its own cache, and with a full one of ours; one thread, best of {repeat}")
    print(f"{'prompt':>16}{'reading':>13}{'ours':>10}{'ratio':>8}{'a token':>13}{'ours':>10}{'ratio':>8}")
    for length in prompts:
        tokens = random_tokens(theirs, length + new, seed=0)
        times = {"own": [], "ours": []}
        for _ in range(repeat):
            for whose, taken in times.items():
                memory = attach(theirs) if whose == "ours" else DynamicCache()
                began = time.perf_counter()
                theirs(tokens[:, :length], past_key_values=memory, logits_to_keep=1)
                read = time.perf_counter()
                for token in tokens[:, length:].split(1, 1):
                    theirs(token, past_key_values=memory)
                taken.append((read - began, (time.perf_counter() - read) / new))
                detach(theirs)
        own, ours = (tuple(1e3 * min(x) for x in zip(*taken)) for taken in times.values())
        cells = (f"{a:>10.2f} ms{b:>7.2f} ms{b / a:>8.2f}" for a, b in zip(own, ours))
        print(f"{length:>16}" + "".join(cells), flush=True)


def speeds(a, b, new: int, repeat: int) -> str:
    """Tokens per second of both, and their ratio; what is timed takes turns."""
    times = {(f, n): [] for f in (a, b) for n in (new + 1, 1)}
    for _ in range(repeat):
        for f, n in times:
            times[f, n].append(best(lambda: f(n), 1))

    seconds_a, seconds_b = (min(times[f, new + 1]) - min(times[f, 1]) for f in (a, b))
    if seconds_a <= 0 or seconds_b <= 0:  # the machine did something else
        return f"{'too few tokens or repeats to tell':>38}"
    return f"{new / seconds_a:>10.0f} t/s{new / seconds_b:>12.0f} t/s{seconds_b / seconds_a:>8.2f}"


def random_tokens(model, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (1, n), generator=generator)


def compiled(model):
    """The decoder, whose blocks go through torch.compile but for what they say to the cache, which grows.

    All that is compiled has the shape of one new token. Its sums may round otherwise.
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
def against_floor(model, slots=(128, 2048), steps: int = 16, repeat: int = 9, compiles: bool = False):
    """Time of one decoding step with so many slots, beside what no step can do without: products with all
    weights, and attention over the slots. Ours, compiled, and that of transformers.
    """
    from transformers import DynamicCache
    torch.set_num_threads(1)
    if compiles and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        print("no C++ compiler is here, so nothing is compiled")
        compiles = False
    print(f"one decoding step, batch 1, one thread, ms, best of {repeat} in turn")
    columns = ["floor", "attention", "ours", *["compiled"] * compiles, "theirs", "ours/(floor+attention)"]
    print(f"{'numbers':<10}{'slots':>6}" + "".join(f"{name:>{max(11, 2 + len(name))}}" for name in columns))
    with tempfile.TemporaryDirectory() as copy:
        to_hf(model, copy, torch.float32)
        theirs = hf_model(copy)

    for dtype in (torch.float32, torch.bfloat16):
        model, theirs = deepcopy(model).to(dtype), theirs.to(dtype)
        fast = compiled(model) if compiles else None
        weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
        inputs = {w.shape[1]: torch.randn(1, 1, w.shape[1], dtype=dtype) for w in weights}
        for n in slots:
            tokens = random_tokens(model, n, seed=n)
            caches, memory = make_cache(model), DynamicCache()
            prefill(model, tokens, caches)
            theirs(tokens, past_key_values=memory, logits_to_keep=1)
            q = torch.randn(1, model.config.n_heads, 1, model.config.head_dim, dtype=dtype)

            def floor():
                for w in weights:
                    F.linear(inputs[w.shape[1]], w)

            def attend():
                for cache in caches:
                    attention(q, cache.k, cache.v, None, False)

            def step(decoder):
                decoder(tokens[:, :1], caches)
                for cache in caches:
                    cache.length = cache.seen = n  # forget the step again

            def their_step():
                theirs(tokens[:, :1], past_key_values=memory)
                memory.crop(-1)

            runs = [floor, attend, lambda: step(model), *[lambda: step(fast)] * compiles, their_step]
            times = [[] for _ in runs]
            for _ in range(repeat + 1):  # the first warms up, and compiles
                for run, taken in zip(runs, times):
                    taken.append(best(lambda: [run() for _ in range(steps)], 1) / steps * 1e3)
            least = [min(taken[1:]) for taken in times]
            cells = "".join(f"{x:>11.2f}" for x in least)
            ratio = least[2] / (least[0] + least[1])
            print(f"{str(dtype).removeprefix('torch.'):<10}{n:>6}{cells}{ratio:>24.2f}", flush=True)


def compression(model, encoding, methods, lengths=(512, 1024, 2048), repeat: int = 5):
    """Time of each method's `end_prefill` at a budget of a quarter, as a share of the full cache's prefill.

    Reading: its own prefill in units of the full cache's; a method that counts attention works there already.
    """
    torch.set_num_threads(1)
    ends = boundaries(encoding, model.config.vocab_size)
    knobs = {name: calibrated(Method, model, encoding) for name, Method in methods.items()}
    print(f"\nthe end of the prompt, batch 1, one thread, budget 25 %, window 32, best of {repeat} in turn")
    print(f"{'tokens':<27}" + "".join(f"{n:>17}{'':>9}" for n in lengths))
    print(f"{'':<27}" + f"{'end_prefill':>17}{'reading':>9}" * len(lengths))
    table = {name: "" for name in methods}
    for n in lengths:
        tokens = random_tokens(model, n, seed=n)
        times = {name: [] for name in methods}
        for name in [*methods] * repeat:
            caches = make_cache(model, methods[name], **knobs[name],
                                **given(methods[name], budget=n // 4))
            tell_chunk_ends(caches, ends[tokens])
            began = time.perf_counter()
            prefill(model, tokens, caches)
            read = time.perf_counter()
            end_prompt(model, tokens, caches)
            times[name].append((read - began, time.perf_counter() - read))

        least = {name: tuple(map(min, zip(*runs))) for name, runs in times.items()}
        full = least["full"][0]
        for name, (reading, ending) in least.items():
            if name == "full":
                table[name] += f"{1e3 * full:>14.0f} ms{1:>9.2f}"
            else:
                table[name] += f"{1e3 * ending:>7.1f} ms {100 * ending / full:>4.1f} %{reading / full:>9.2f}"

    for name, cells in table.items():
        print(f"{'full: the prefill' if name == 'full' else name:<27}{cells}")


@torch.no_grad()
def decoding(model, methods, batches=(1, 8), n: int = 2048, repeat: int = 9):
    """Time of one step after a prompt of n tokens, compressed to a quarter, in units of the full cache's."""
    torch.set_num_threads(1)
    print(f"\none decoding step after {n} tokens, one thread, budget 25 %, best of {repeat} in turn")
    print(f"{'batch':<27}" + "".join(f"{B:>14}{'speed':>9}" for B in batches))
    table = {name: "" for name in methods}
    for B in batches:
        tokens, ready = random_tokens(model, n, seed=n).expand(B, -1), {}
        for name, Method in methods.items():
            ready[name] = make_cache(model, Method, **given(Method, budget=n // 4))
            prefill(model, tokens, ready[name])
            end_prompt(model, tokens, ready[name])
        times = {name: [] for name in methods}
        for name in [*methods] * repeat:
            times[name].append(best(lambda: model(tokens[:, :1], ready[name]), 2))
        for name, taken in times.items():
            table[name] += f"{1e3 * min(taken):>11.2f} ms{min(times['full']) / min(taken):>9.2f}"
    for name, cells in table.items():
        print(f"{name:<27}{cells}")


def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m experiments.speed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a checkpoint with its tokenizer")
    parser.add_argument("--methods", nargs="+", default=["all"], metavar="NAME",
                        help="whose end of the prompt is timed, beside the full cache; default all")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS",
                        help="of texts; default: each table's")
    parser.add_argument("--new", type=int, metavar="TOKENS", default=128, help="to decode; default 128")
    parser.add_argument("--repeat", type=int, metavar="TIMES", help="the best counts; default 5 to 9")
    parser.add_argument("--compile", action="store_true", help="time a step through torch.compile as well")
    args = parser.parse_args(argv)
    whole("new", args.new, 1, 1024)
    repeat = {} if args.repeat is None else dict(repeat=whole("repeat", args.repeat, 1))
    model, encoding = load(args.model, "cpu")
    methods = pick(["full", *args.methods])
    longest = max(1, model.config.max_len - max(32, args.new + 1))
    for n in args.lengths or [2048]:  # what cannot be measured is found before any work is done
        whole("length", n, 1, longest)
        for name, Method in methods.items():
            try:
                make_cache(model, Method, **given(Method, budget=n // 4))
            except ValueError as error:
                raise ValueError(f"{name} at a quarter of {n} tokens: {error}") from None
    lengths = [args.lengths] if args.lengths else []
    against_floor(model, *lengths, **repeat, compiles=args.compile)
    compression(model, encoding, methods, *lengths, **repeat)
    stepping = pick(DECODED) if args.methods == ["all"] else methods
    decoding(model, stepping, n=max(args.lengths or [2048]), **repeat)
    against_transformers(model, args.new, *lengths, **repeat)


if __name__ == "__main__":
    command(main, sys.argv[1:])
