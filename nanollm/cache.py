"""The KV cache, and the seam through which every method compresses it.

The decoder says one thing to memory: `y = cache.attend(q, k, v, pos)`, which is write → read → attention → observe.
A method overrides what it needs: `write` (what is remembered), `read` (what attention sees), `observe` (what was
attended to), `forget` (what is evicted).

Shapes: B batch, T new tokens, S slots, H key/value heads, G query heads per key/value head, D head dim, w window.
Keys are stored rotated. A slot is visible to a query if its stored position ≤ the query's: this one rule serves
causality, chunked prefill, heads of different length and slots that stand for several tokens.
"""
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
import math
from numbers import Integral, Real
from pathlib import Path
import sys
from types import ModuleType
from typing import ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
import torch.nn.functional as F

NEVER = torch.iinfo(torch.int32).max  # the position of an empty slot: no query ever sees it
ALL = NEVER                           # watch every query
use_kernels = find_spec("triton") is not None  # False: plain code on a GPU, too
shared_memory = {64: 64, 128: 100, 256: 164}  # KiB a processor that kernels want for heads of at most so many numbers


def on_gpu(x: Tensor) -> bool:
    """Whether Triton's kernels are to take x (..., D): those are for 16-bit numbers, which the matrix units multiply, and for heads
    whose tiles fit into the GPU's shared memory."""
    if not (use_kernels and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return False
    there = torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor
    return any(x.shape[-1] <= D and there >= 1024 * wanted for D, wanted in shared_memory.items())


def kernel_file(name: str):
    """The module kernels/NAME.py. Its package has a name of its own here: the Hub has a library called `kernels`, which Python
    prefers to our folder where it is installed."""
    package = sys.modules.setdefault("nanollm_kernels", ModuleType("nanollm_kernels"))
    package.__path__ = [str(Path(__file__).parents[1] / "kernels")]
    return import_module(f"nanollm_kernels.{name}")


def kernel_for(x: Tensor, file: str, name: str | None = None):
    """Where x is on a GPU, in 16 bits, and Triton is installed: the function of kernels/FILE.py that is called as the file is, or
    `name`. Else None, and the plain code after the call computes the same, but for its rounding to 16 bits on the way.
    """
    return getattr(kernel_file(file), name or file) if on_gpu(x) else None


def rank(score: Tensor, pos: Tensor) -> Tensor:
    """Rank of every slot, (..., S): 0 for the highest score; ties go to the newest token (largest pos)."""
    newest_first = pos.argsort(dim=-1, descending=True, stable=True)
    by_score = score.gather(-1, newest_first).argsort(dim=-1, descending=True, stable=True)
    order = newest_first.gather(-1, by_score)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def top(score: Tensor, budget: int | Tensor) -> Tensor:
    """Mask (..., S) of the `budget` highest scores, a number or (...), of slots in the order of their tokens.

    Ties go to the newest token, as in `rank`, at a third of its time.
    """
    budget = torch.as_tensor(budget, device=score.device).expand(score.shape[:-1]).clamp(0, score.shape[-1])[..., None]
    least = score.sort(-1, descending=True).values.gather(-1, (budget - 1).clamp(min=0))
    above, tied = score > least, score == least
    newer = tied.flip(-1).cumsum(-1).flip(-1)  # how many of the tied lie here or later
    return above | tied & (newer <= budget - above.sum(-1, keepdim=True))


def indices(kept: Tensor) -> Tensor:
    """Slots where kept (B, H, S) is true, in order, as (B, H, n); heads that keep fewer are filled up with −1."""
    count = kept.sum(-1)
    n = int(count.max())
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[..., :n]
    return order.masked_fill(torch.arange(n, device=kept.device) >= count[..., None], -1)


def spread(i: Tensor, x: Tensor) -> Tensor:
    """Slots i (B, H, n) as indices (B, H, n, ...) along the slots of x (B, H, S, ...)."""
    return i.view(*i.shape, *[1] * (x.dim() - 3)).expand(*i.shape, *x.shape[3:])


def check_budget(budget: int, least: int, why: str):
    """ValueError unless budget, in slots per key/value head, is at least `least`."""
    if budget < least:
        raise ValueError(f"budget {budget} must be at least {least}: {why}")


def fits(x, kind) -> bool:
    """Whether a knob declared as `kind` may be x. A float is a finite number, whole ones included; a bool is no number."""
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(x, number) and not isinstance(x, bool) and -2 ** 63 <= x < 2 ** 63
    if get_origin(kind) is tuple:
        of, *rest = get_args(kind)
        return isinstance(x, tuple) and (all(fits(y, of) for y in x) if rest == [...] else
                                         len(x) == 1 + len(rest) and all(map(fits, x, (of, *rest))))
    if get_origin(kind) is not None:  # a union, but for generics that no knob is declared with
        return any(fits(x, one) for one in get_args(kind))
    return not isinstance(kind, type) or isinstance(x, kind)


def check_knobs(cache: "LayerCache"):
    """ValueError unless every knob is a dataclass field and holds what it is declared to hold."""
    name, hints = type(cache).__name__, get_type_hints(type(cache))
    knobs = {knob.name: hints[knob.name] for knob in fields(cache)}
    if lost := [knob for knob, kind in hints.items() if knob not in knobs and get_origin(kind) is not ClassVar]:
        raise ValueError(f"{name} declares {', '.join(lost)} but is no dataclass; put @dataclass(eq=False) above the class")
    for knob, kind in knobs.items():
        if not fits(x := getattr(cache, knob), kind):
            words = {int: "a whole number", float: "a finite number"}.get(kind, getattr(kind, "__name__", str(kind)))
            raise ValueError(f"{knob} {' '.join(repr(x).split()):.60} of {name} must be {words}")


@dataclass(eq=False)
class LayerCache:
    """Full attention: remembers every token of one layer. Subclasses add their knobs as dataclass fields.

    State: `length` slots are in use, `seen` tokens have passed; after eviction the two differ, and RoPE counts `seen`.
    `make_cache` links `layer` (of `layers`), `below` (the cache one layer down), `w_o` (d_model, H·G, D) and `freq`
    (RoPE's angles).
    """
    watch = 0    # for how many of the last queries `observe` wants probabilities: 0, a window, or ALL
    vectors = 1  # keys, and values, of a token: 2 in caches for tensor attention, whose k and v are (B, H, T, 2D)

    def __post_init__(self):
        check_knobs(self)
        self.slots: dict[str, Tensor] = {}  # per-slot tensors (B, H, capacity, ...): k, v, pos, and what methods add
        self.length = self.seen = 0
        self.most = NEVER  # buffers never grow beyond so many slots
        self.prompt_done = False
        self.layer, self.layers, self.below, self.w_o, self.freq = 0, 1, None, None, None
        self.ragged = False  # some slots are empty (NEVER) or hidden: even a single new token needs the mask
        self.packed: dict[str, Tensor] = {}  # older slots (N, ...) of heads of different length, one after the other,
        self.counts = None                   # (B, H): so many of each head;
        self.behind = 0                      # the longest head has this many of its `length` slots there

    def link(self, layer: int, layers: int, below: "LayerCache | None", w_o: Tensor, freq: Tensor | None):
        """Called by `make_cache`: where this cache sits in the decoder."""
        if type(self.watch) is not int or self.watch < 0:
            raise ValueError(f"watch {self.watch!r} of {type(self).__name__} must be a number of queries, 0 or more, or ALL")
        self.layer, self.layers, self.below, self.w_o, self.freq = layer, layers, below, w_o, freq

    def slot(self, name: str) -> Tensor:
        """The slots in use of one per-slot tensor, (B, H, S, ...): a view to be changed in place, unless `pack`ed."""
        new = self.slots[name].narrow(2, 0, self.length - self.behind)
        if not self.packed:
            return new
        x, place = self.packed[name], torch.arange(self.behind, device=new.device)
        start = (self.counts.flatten().cumsum(0) - self.counts.flatten())[:, None]
        old = x[(start + place).clamp(max=len(x) - 1).flatten()].view(*new.shape[:2], self.behind, *x.shape[1:])
        if name == "pos":
            old.masked_fill_(place >= self.counts[..., None], NEVER)
        return torch.cat((old, new), 2)

    @property
    def k(self) -> Tensor: return self.slot("k")

    @property
    def v(self) -> Tensor: return self.slot("v")

    @property
    def pos(self) -> Tensor: return self.slot("pos")

    def hear(self, tokens: Tensor):
        """Called before each forward with its tokens (B, T): for methods that go by what the text says."""

    # ---- write → read → attention → observe ---------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q (B, H·G, T, D), k and v (B, H, T, D), pos (B or 1, T) → output (B, H·G, T, D)."""
        self.check(q, k, v, pos)
        T, empty = q.shape[2], self.seen == 0
        self.write(k, v, pos)
        if T == 1 and (done := self.decode(q, pos)):
            y, p = done
            self.observe(q, p)
            return y
        k, v, at, bias = self.read()
        w = min(self.watch, T)
        rest, p, parts = T - w, None, []
        if rest:
            causal = empty and bias is None and k.shape[2] == T  # slot i holds token i
            alone = T == 1 and bias is None and not self.ragged  # the newest token sees every slot
            n = rest if causal else k.shape[2]
            mask = None if causal or alone else visible(at, bias, pos[:, :rest])
            parts.append(attention(q[:, :, :rest], k[:, :, :n], v[:, :, :n], mask, causal))
        if w:  # only the watched rows are made explicit
            p = probabilities(q[:, :, rest:], k, at, bias, pos[:, rest:])
            y = p.flatten(2, 3) @ v  # (B, H, G·w, D): the queries of a group are rows of one product, so that v is read once
            parts.append(y.view(*q.shape[:2], w, -1))
        self.observe(q, p)
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def check(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor):
        """ValueError unless these are new tokens of the texts that are held, before anything is written."""
        if not all(isinstance(x, Tensor) for x in (q, k, v, pos)):
            raise ValueError("q, k, v and pos must be tensors")
        B, H, T, D = k.shape if k.dim() == 4 else (0,) * 4
        if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
            raise ValueError(f"q, k and v are {', '.join(f'{x.dtype} on {x.device}' for x in (q, k, v))}; they must be of "
                             "one floating dtype on one device")
        if not k.numel() or not q.numel() or v.shape != k.shape or q.dim() != 4 or q.shape[::2] != (B, T) or q.shape[1] % H \
                or q.shape[3] * self.vectors != D:
            raise ValueError(f"q, k and v of shapes {', '.join(str(tuple(x.shape)) for x in (q, k, v))} are not "
                             "(B, H·G, T, D), (B, H, T, D) and (B, H, T, D) with T at least 1")
        if pos.shape not in ((1, T), (B, T)) or pos.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"pos of shape {tuple(pos.shape)} must be ({B} or 1, {T}), whole numbers and not {pos.dtype}")
        if "k" in self.slots and (held := self.slots["k"].shape[:2]) != (B, H):
            raise ValueError(f"{B} texts of {H} heads come to a cache that holds {held[0]} of {held[1]}; "
                             "make a new cache for a new batch")

    def decode(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """One new token's output (B, H·G, 1, D) and what `observe` is told, where there is a shorter way than attend's, else None.

        Here: a kernel that reads the slots as they lie. Of the probabilities (B, H, G, 1, S) it tells the mean over G.
        """
        if self.packed:  # sums of heads that differ in length would have no shape, and `read` unpacks
            suits = not self.watch and type(self).read is LayerCache.read
        else:
            suits = self.watch  # else scaled_dot_product_attention reads every slot once, too
        fast = kernel_for(q, "decode_attention", "attend_one") if suits else None
        return fast(self, q, pos) if fast else None

    def write(self, k: Tensor, v: Tensor, pos: Tensor, **state: Tensor):
        """Remember T tokens. `state` adds per-slot tensors (B, H, T, ...) that travel along; one that is not given is 0."""
        B, H, T, _ = k.shape
        used = self.length - self.behind
        end = used + T
        for name, x in (dict.fromkeys(self.slots) | dict(k=k, v=v, pos=pos[:, None], **state)).items():
            slots = self.slots.get(name)
            if slots is None or end > slots.shape[2]:
                # grow by a tenth: eleven slot copies per token on average, at most 10 % of slack
                slack, like = end // 10 if self.length else 0, x if slots is None else slots
                capacity = min(end + slack, max(self.most, end))
                grown = like.new_zeros(B, H, capacity, *like.shape[3:], dtype=torch.int32 if name == "pos" else None)
                if slots is not None:
                    grown.narrow(2, 0, used).copy_(slots.narrow(2, 0, used))
                self.slots[name] = slots = grown
            new = slots.narrow(2, used, T)
            new.zero_() if x is None else new.copy_(x)
        self.length, self.seen = self.length + T, self.seen + T

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What attention sees: k, v (B, H, S, D), positions (B, H, S), and a logit bias (B, H, S) or None.

        A slot that stands for several tokens carries a bias that is added to its score; exact entries have 0.
        A method that hides slots by their positions sets `ragged`.
        """
        return self.k, self.v, self.pos, self.slot("bias") if "bias" in self.slots else None

    def observe(self, q: Tensor, p: Tensor | None):
        """Called after each `attend` with q (B, H·G, T, D) and probabilities p (B, H, G, w, S) of the last w queries.

        A long prompt may come in pieces, and then this is called once for each piece, w at most its length. An override
        ends with `super().observe(q, p)`, which calls `forget` once the prompt is over.
        For w = 1 a kernel tells each of the G their mean (`decode`), in float32: go by sums or means over G, and do not write to p.
        """
        if self.prompt_done:
            self.forget()

    def finish_prompt(self):
        """Called once, when the prompt is over. Never guessed from T > 1: a prompt may come in chunks."""
        self.prompt_done = True
        self.forget()

    def forget(self):
        """Called at the prompt's end (of an empty cache, if the prompt was one token) and after each later `attend`."""

    # ---- forgetting ---------------------------------------------------------------------------------------------

    def keep(self, i: Tensor):
        """Keep the slots i (B, H, n), −1 for an empty one, and free the rest: every per-slot tensor moves together."""
        B, H, S = self.pos.shape
        if not isinstance(i, Tensor):
            raise ValueError(f"slots to keep are a {type(i).__name__}; give an int64 tensor ({B}, {H}, n)")
        if i.shape[:2] != (B, H) or i.dim() != 3 or i.dtype != torch.int64:
            raise ValueError(f"slots to keep of shape {tuple(i.shape)}, {i.dtype}, must be ({B}, {H}, n) of int64")
        if i.numel() and int(i.max()) >= S:
            raise ValueError(f"slot {int(i.max())} is to be kept, but there are {S}, 0 … {S - 1}")
        empty = i < 0
        i = i.clamp(min=0)
        self.slots = {name: x.gather(2, spread(i, x)) for name, x in ((name, self.slot(name)) for name in self.slots)}
        self.slots["pos"].masked_fill_(empty, NEVER)
        self.length, self.ragged = i.shape[2], self.ragged or bool(empty.any())
        self.packed, self.counts, self.behind = {}, None, 0

    def pack(self):
        """Store heads of different length one after the other instead of padded to the longest.

        For a cache that evicts once: what is packed can be read and dropped by `keep`, but not changed in place.
        Attention sees it padded, one layer at a time and only while it runs.
        """
        there = self.pos != NEVER
        self.packed = {name: self.slot(name)[there] for name in self.slots}
        self.slots = {name: x[:, :, :0].clone() for name, x in self.slots.items()}
        self.counts, self.behind = there.sum(-1), self.length

    def drop(self, i: Tensor):
        """Forget one slot per head, i (B, H, 1). The last slot moves into the hole, so that nothing else is copied."""
        for name, x in self.slots.items():
            last = x[:, :, self.length - 1:self.length].clone()
            x.scatter_(2, spread(i, x), last)
        self.length -= 1

    def shrink(self, score: Tensor, budget: int):
        """Keep the `budget` slots with the highest score (B, H, S) per head; ties go to the newest token."""
        if self.ragged:
            score = score.masked_fill(self.pos == NEVER, -math.inf)
        if self.length == budget + 1 and not self.ragged:  # each step of decoding: the oldest of the lowest goes
            lowest = score == score.amin(-1, keepdim=True)
            self.drop(self.pos.masked_fill(~lowest, NEVER).argmin(-1, keepdim=True))
        elif self.length > budget:
            self.keep(indices(rank(score, self.pos) < budget))

    def bytes(self) -> tuple[int, int]:
        """(live, allocated) bytes of this layer's cache: every per-slot tensor; live leaves out slack and empty slots."""
        if not self.slots:
            return 0, 0
        live = int((self.pos != NEVER).sum()) if self.ragged else self.pos.numel()
        each = sum(math.prod(x.shape[3:]) * x.element_size() for x in self.slots.values())
        table = 0 if self.counts is None else self.counts.nbytes
        return live * each + table, sum(x.nbytes for x in (*self.slots.values(), *self.packed.values())) + table


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Output (B, H·G, T, D) without a matrix of probabilities. mask (B, H, T, S), or `causal`, or every slot is seen."""
    B, heads, T, D = q.shape
    if T == 1:  # the G queries of a group are rows of one small product, so that each key is read once
        return F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, D), k, v, mask).view(B, heads, 1, D)
    if mask is not None:
        mask = mask.repeat_interleave(heads // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)


def visible(at: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """Mask (B, H, T, S): slots at positions at (B, H, S) seen from queries at pos (B or 1, T); a float one if biased."""
    seen = at.unsqueeze(2) <= pos[:, None, :, None]
    if bias is None:
        return seen
    return torch.where(seen, bias.unsqueeze(2), -math.inf)


def probabilities(q: Tensor, k: Tensor, at: Tensor, bias: Tensor | None, pos: Tensor) -> Tensor:
    """softmax(q kᵀ/√D + bias) over the visible slots: q (B, H·G, w, D) → (B, H, G, w, S)."""
    B, heads, w, D = q.shape
    H = k.shape[1]
    score = (q.reshape(B, H, -1, D) @ k.mT * D ** -0.5).view(B, H, heads // H, w, -1)
    mask = visible(at, bias, pos).unsqueeze(2)
    score = score.masked_fill(~mask, -math.inf) if bias is None else score + mask
    return score.softmax(-1, dtype=torch.float32).to(q.dtype)


@dataclass(eq=False)
class WindowCache(LayerCache):
    """The observation-window workflow, Algorithm 2 of CriticalKV (arXiv 2502.03805).

    The last `window` queries of the prompt vote on every earlier token; at the prompt's end `budgets` says how many
    entries each head keeps and `select` says which. The window itself is always kept, inside the budget. Decoding
    then appends: only the prompt is compressed. As it stands this is SnapKV; PyramidKV, AdaKV, CriticalKV and ChunkKV
    differ from it in one of the two, or both.
    """
    budget: int       # slots per key/value head, window included
    window: int = 32  # queries that vote, w
    kernel: int = 7   # width of the max-pool over neighbouring tokens; 1 switches it off

    def __post_init__(self):
        super().__post_init__()
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window {self.window} must be at least 1 and kernel {self.kernel} an odd number")
        if self.budget <= self.window:
            raise ValueError(f"budget {self.budget} must exceed the window {self.window}")
        self.voters = self.window  # of the last queries, so many are remembered until the prompt's end
        self.queries = None        # (B, H·G, ≤ voters, D)

    def observe(self, q: Tensor, p: Tensor | None):
        if self.voters:
            q = q if self.queries is None else torch.cat((self.queries, q), 2)
            self.queries = q[:, :, -self.voters:].clone()  # not a view that would hold all of them
        super().observe(q, p)

    def finish_prompt(self):
        if self.length > self.budget:
            self.keep(self.chosen())
            if self.ragged:
                self.pack()
        self.voters, self.queries = 0, None
        super().finish_prompt()

    @property
    def rows(self) -> Tensor:
        """Probabilities (B, H, G, w, S) of the window's queries: for methods that want more of them than votes."""
        return window_rows(self.window_queries(), self.k)

    def window_queries(self) -> Tensor:
        """The last queries, (B, H, G, w, D)."""
        if self.queries is None:
            raise ValueError("the prompt is over and the window's queries are gone; ask before finish_prompt, and call that once")
        return self.queries.unflatten(1, (self.k.shape[1], -1))

    def chosen(self) -> Tensor:
        """Slots that stay, (B, H, n), −1 for none."""
        votes = window_votes(self.window_queries(), self.k)
        kept = self.select(votes, self.budgets(votes))
        return indices(F.pad(kept, (0, self.window), value=True))

    def budgets(self, votes: Tensor) -> int | Tensor:
        """How many entries each head keeps beside the window, from votes (B, H, G, S − w): a number or (B, H)."""
        return self.budget - self.window

    def select(self, votes: Tensor, budget: int | Tensor) -> Tensor:
        """Which entries are kept, a mask (B, H, S − w): here those with the highest pooled vote (SnapKV, 2404.14469)."""
        return top(self.pool(votes.mean(2)), budget)

    def pool(self, score: Tensor) -> Tensor:
        """Max over `kernel` neighbouring tokens, (..., S) → (..., S): a token is read together with its neighbours."""
        return F.max_pool1d(score.flatten(0, -2), self.kernel, stride=1, padding=self.kernel // 2).view_as(score)

    def bytes(self) -> tuple[int, int]:
        live, allocated = super().bytes()
        queries = 0 if self.queries is None else self.queries.nbytes
        return live + queries, allocated + queries


def window_rows(q: Tensor, k: Tensor) -> Tensor:
    """Probabilities (B, H, G, w, S) of the last w queries q (B, H, G, w, D) of a text over all its keys k (B, H, S, D)."""
    token = torch.arange(k.shape[2], device=k.device)
    return probabilities(q.flatten(1, 2), k, token.expand(k.shape[:3]), None, token[None, -q.shape[3]:])


def window_votes(q: Tensor, k: Tensor) -> Tensor:
    """Their mean over the window, of the keys before it, (B, H, G, S − w), in 32 bits at least."""
    if q.shape[3] <= 128 and (fast := kernel_for(k, "window_votes")):
        return fast(q, k)
    return window_rows(q, k)[..., :-q.shape[3]].mean(3, dtype=torch.promote_types(q.dtype, torch.float32))


def make_cache(model, Method: type[LayerCache] = LayerCache, **knobs) -> list[LayerCache]:
    """One cache per layer of the decoder, linked to its layer. Knobs go to the method; a bad one is a ValueError."""
    c, caches = model.config, []
    for layer, block in enumerate(model.blocks):
        try:
            cache = Method(**knobs)
        except TypeError as error:
            raise ValueError(f"{error}; a method's knobs are its dataclass fields") from error
        if not hasattr(cache, "slots"):
            raise ValueError(f"__post_init__ of {type(cache).__name__} must begin with super().__post_init__()")
        if cache.vectors != c.vectors:
            raise ValueError(f"{type(cache).__name__} is for {cache.vectors} key and value vectors a token, the decoder has {c.vectors}; "
                             "caches for 2 are in methods/tensor_attention.py and methods/sub_gen.py, all others are for 1")
        w_o = block.attention.o.weight.detach().unflatten(1, (c.n_heads, c.head_dim))
        cache.link(layer, c.n_layers, caches[-1] if caches else None, w_o, getattr(model, "freq", None))
        caches.append(cache)
    return caches


def check_caches(caches: list[LayerCache], layers: int, B: int):
    """ValueError unless there is one cache a layer, in step with the others, for B texts. Asked before any is written to."""
    if not isinstance(caches, (list, tuple)) or not all(isinstance(cache, LayerCache) for cache in caches):
        raise ValueError(f"{caches!r:.60} is no list of caches; use make_cache")
    if len(caches) != layers or len({*map(id, caches)}) != layers:
        raise ValueError(f"{layers} layers need a cache each, not {len(caches)} of which {len({*map(id, caches)})} differ; "
                         "use make_cache")
    if len(seen := {cache.seen for cache in caches}) > 1:
        raise ValueError(f"the layers' caches have seen {min(seen)} to {max(seen)} tokens and must agree; make new ones")
    for cache in caches:
        if "k" in cache.slots and (held := cache.slots["k"].shape[0]) != B:
            raise ValueError(f"{B} texts come to caches that hold {held}; make new ones for a new batch")


def finish_prompt(caches: list[LayerCache]):
    """Tell every layer, lowest first, that the prompt is over."""
    for cache in caches:
        cache.finish_prompt()


def held(caches: list[LayerCache], tokens: int) -> Tensor:
    """(B, L, H, tokens) of bool: which of the first `tokens` tokens every head still has a slot for."""
    token = torch.arange(tokens, device=caches[0].pos.device)
    return torch.stack([torch.stack([(head[..., None] == token).any(-2) for head in cache.pos.unbind(1)], 1)
                        for cache in caches], 1)


def cache_bytes(caches: list[LayerCache]) -> tuple[int, int]:
    """(live, allocated) bytes of all layers."""
    live, allocated = zip(*(cache.bytes() for cache in caches))
    return sum(live), sum(allocated)


def full_cache_bytes(config, tokens: int, bytes_per_number: int = 2) -> int:
    """2 · layers · key/value heads · tokens · head dim · bytes (KVReviver, Eq. 1): keys and values of a full cache.

    Twice that in tensor attention, whose tokens have two of each.
    """
    return 2 * config.vectors * config.n_layers * config.n_kv_heads * tokens * config.head_dim * bytes_per_number
