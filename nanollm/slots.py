"""The store of one layer: plain slots. Other stores are subclasses.

The decoder calls `y = store.attend(q, k, v, pos)`. The order of what happens then, and what a
subclass may override, stand in method.py.

Keys are stored rotated (GPT-2's have no rotation). A query sees a slot if the slot's position ≤ the
query's. This rule alone covers causality, prompts read in pieces, and heads of different length.
Eviction may change the order of the slots; `pos` says which token a slot holds.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanollm.attention import Mask, attention, visible
from nanollm.check import check_attend, check_kept, check_numbers, check_score
from nanollm.kernel_switch import kernel_for
from nanollm.method import ALL, NEVER, Method
from nanollm.ranking import expand_index, indices, rank, taken, top

VECTORS = "k", "v"  # the per-slot tensors in the model's dtype
TILE = 64  # if every query is observed, prompts are read in pieces of this size


class Stored(NamedTuple):
    """A tensor of a store, and how many of its numbers are live.

    model_dtype: its numbers have the model's dtype. H2O's scores, for example, always have 32 bits.
    """

    tensor: Tensor
    live: int
    model_dtype: bool


def all_live(x: Tensor) -> Stored:
    """Return x with all its numbers live.

    With a fourth axis, D, it holds vectors in the model's dtype.
    """
    vectors = x.dim() > 3
    return Stored(x, x.numel(), model_dtype=vectors)


class Slots:
    """Stores every token of one layer, until its method evicts some."""

    options = {}  # of the store itself, for saved files

    def __init__(
        self,
        method: Method | None = None,
        model=None,
        index: int = 0,
        block: int | None = None,
    ):
        """method: decides what stays; by default everything.

        index: which of the method's layers this is.
        block: which layer of the model this is, by default the same. Where some layers slide
        (sliding.py), the method's layers are fewer.
        """
        self.method = Method() if method is None else method
        self.model = model
        self.index = index
        self.block = index if block is None else block
        # how many layers the method has
        self.of = 1 if model is None else len(model.blocks)
        self.watch = self.method.watch

        # (B, H, capacity, ...): k, v, pos, the method's numbers
        self.slots: dict[str, Tensor] = {}
        self.length = 0  # slots in use
        self.seen = 0  # tokens so far, evicted ones too; positions begin at 0
        # in the first layer, the tokens' ids (B, seen); None: not known
        self.ids: Tensor | None = None
        # some slots are empty or hidden: even one new token needs a mask
        self.ragged = False

        self.prompt_done = False  # the prompt was compressed; what follows is decoding
        self.notes: dict[str, Tensor] = {}  # what the method remembers until then
        self.forgotten = None  # keys (B, H, n, D) that `forget` removed, until then
        # what the method remembers for good
        self.state: dict[str, Tensor | torch.Generator] = {}

    @property
    def w_o(self) -> Tensor:
        """Return this layer's output projection W_O, (d_model, H·G, D)."""
        return self.model.blocks[self.block].attention.w_o

    @property
    def freq(self) -> Tensor:
        """Return this layer's angles per token (RoPE), (D/2,): 0 if it does not rotate.

        Raises ValueError if they are unknown.
        """
        # learned positions are added to the embeddings: nothing rotates
        if getattr(self.model, "positions", None):
            return torch.zeros(self.w_o.shape[2] // 2)
        freq = self.model.freq
        if isinstance(freq, list):  # a model of transformers
            freq = freq[self.block]
        if freq is None:
            raise ValueError(
                "how this model rotates its keys is not known, and this method has to undo it; "
                "use a method that does not, such as kvzip"
            )
        return freq.to(self.w_o.device)

    def slot(self, name: str) -> Tensor:
        """Return the slots in use of one per-slot tensor, (B, H, S, ...). Change them by `put`."""
        return self.slots[name][:, :, : self.length]

    def put(self, name: str, x: Tensor):
        """Replace one per-slot tensor of the slots in use by x (B, H, S, ...)."""
        slots = self.slot(name)
        if x.shape != slots.shape:
            raise ValueError(
                f"{name} {tuple(x.shape)} must be {tuple(slots.shape)}, one for each slot"
            )
        slots.copy_(x)

    k = property(lambda self: self.slot("k"))  # (B, H, S, D), rotated
    v = property(lambda self: self.slot("v"))  # (B, H, S, D)
    pos = property(lambda self: self.slot("pos"))  # (B, H, S), int32

    # ---- write → attention → observe → evict ---------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ) -> Tensor:
        """Store T new tokens and return attention's output (B, H·G, T, D).

        q (B, H·G, T, D), k and v (B, H, T, D), pos (B or 1, T).
        """
        check_attend(self, k)
        outputs = []
        n = self.room(q.shape[2])
        while n < q.shape[2]:
            sizes = [n, q.shape[2] - n]
            now_q, q = q.split(sizes, 2)
            now_k, k = k.split(sizes, 2)
            now_v, v = v.split(sizes, 2)
            now_pos, pos = pos.split(sizes, 1)
            outputs.append(self.step(now_q, now_k, now_v, now_pos))
            n = self.room(q.shape[2])
        outputs.append(self.step(q, k, v, pos))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, 2)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ) -> Tensor:
        """Store a piece of the new tokens, attend, observe and, after the prompt, evict."""
        self.write(k, v, pos)
        y, p = self.attention(q, pos)
        self.method.observe(self, q, p)
        if self.prompt_done:
            self.evict()
        return y

    def room(self, T: int) -> int:
        """Return how many of T new tokens to take at once."""
        if self.watch == ALL and not self.prompt_done:
            return min(T, TILE)
        return T

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output over the slots of `read`, and the last `watch` queries' probabilities.

        Output (B, H·G, T, D), probabilities p (B, H, G, w, S) or None. For one new token a GPU
        kernel may do this. Its p holds the mean over the G queries of a group,
        repeated G times.
        """
        # else PyTorch is used: for one token on an H100 it took at most twice as long (RESULTS.md)
        if (self.watch or self.ragged) and q.shape[2] == 1:
            fast = kernel_for(q, "decode_attention", "attend_one")
            if fast:
                return fast(self, q, pos)
        k, v, slot_pos, bias = self.read()
        mask = self.mask(slot_pos, bias, pos)
        return attention(q, k, v, mask, self.watch)

    def mask(
        self,
        slot_pos: Tensor,
        bias: Tensor | None,
        pos: Tensor,
    ) -> Mask:
        """Return which slots the queries at pos (B or 1, T) see, for `attention`."""
        T = pos.shape[1]
        # slot i of each head is token i
        in_order = self.length == self.seen and not self.ragged
        if bias is None and not self.ragged:
            if T == 1:  # the newest token sees every slot
                return None
            if in_order and T == slot_pos.shape[2]:
                return "causal"
        if in_order:  # the heads share one mask
            slot_pos = slot_pos[:, :1]
        return visible(slot_pos, bias, pos)

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what attention sees: k, v (B, H, S, D), positions (B, H, S), logit bias or None.

        Here there is no bias. A subclass may return one, (B, H, S), to add to the slots' attention
        scores. A store that hides slots by changing their positions sets `ragged`.
        """
        return self.k, self.v, self.pos, None

    # ---- writing -------------------------------------------------------------------------------

    def write(self, k: Tensor, v: Tensor, pos: Tensor):
        """Store T new tokens in the next slots: k, v (B, H, T, D), pos (B or 1, T).

        Numbers that a method stores with each entry start at 0.
        """
        end = self.length + k.shape[2]
        if not self.slots:
            self.allocate(k, v, self.capacity(end))
        elif end > self.slots["k"].shape[2]:
            self.reserve(self.capacity(end))

        new = dict(k=k, v=v, pos=pos[:, None])
        part = slice(self.length, end)
        for name, slots in self.slots.items():
            slots[:, :, part] = new.get(name, 0)
        self.length = end
        self.seen += k.shape[2]
        self.forgotten = None

    def allocate(self, k: Tensor, v: Tensor, n: int):
        """Make buffers of n slots for entries like k and v (B, H, _, D)."""
        B, H, _, D = k.shape
        self.slots["k"] = k.new_zeros(B, H, n, D)
        self.slots["v"] = v.new_zeros(B, H, n, D)
        self.slots["pos"] = k.new_zeros(B, H, n, dtype=torch.int32)
        for name, kind in self.method.entry.items():
            shape = [B, H, n]
            if isinstance(kind, tuple):  # several numbers
                kind, numbers = kind
                shape.append(numbers)
            self.slots[name] = k.new_zeros(shape, dtype=kind)

    def reserve(self, n: int):
        """Grow the buffers to n slots. Writing copies them again only when these are full."""
        for name, x in self.slots.items():
            B, H, S, *shape = x.shape
            more = x.new_zeros(B, H, max(n - S, 0), *shape)
            self.slots[name] = torch.cat((x, more), 2)

    def capacity(self, n: int) -> int:
        """Return how many slots to allocate for n; a tenth more if it grows, to copy rarely."""
        return n + n // 10 if self.length else n

    # ---- eviction ------------------------------------------------------------------------------

    def evict(self):
        """Let the method evict: when the prompt is compressed, and after each later piece."""
        self.method.evict(self)

    def end_prompt(self):
        """The prompt was compressed: drop what was remembered for that alone."""
        self.prompt_done = True
        self.notes = {}
        self.forgotten = None

    def forget(self, n: int):
        """Forget the newest tokens of a prompt, so that n are left; what they looked at counts.

        The queries of an observation window saw their keys, so these are kept aside until the
        prompt is compressed.
        """
        keys = self.k
        first = self.length - (self.seen - n)
        self.crop(n)
        gone = keys[:, :, first:].clone()
        if self.forgotten is not None:
            gone = torch.cat((gone, self.forgotten), 2)
        self.forgotten = gone

    def crop(self, n: int):
        """Remove the newest tokens, so that n are left."""
        self.check_crop(n)
        if self.length == self.seen and not self.ragged:  # slot i holds token i
            self.length = n
        elif n < self.seen:
            pos = self.pos
            there = pos.masked_fill(pos == NEVER, -1)
            newest = there.amax((1, 2), keepdim=True)
            last = newest - (self.seen - n)
            self.keep(indices(pos <= last))
        self.seen = n
        if self.ids is not None:
            self.ids = self.ids[:, :n]

    def check_crop(self, n: int):
        """Raise ValueError unless all but the first n tokens can be removed.

        Between `compress` and `begin_turn` they cannot.
        """
        if not 0 <= n <= self.seen:
            raise ValueError(
                f"{n} tokens cannot be left of {self.seen}; give 0 to {self.seen}"
            )
        if self.prompt_done and n < self.seen:
            raise ValueError(
                "a compressed cache cannot forget tokens; call crop before compress"
            )

    def keep(self, i: Tensor):
        """Keep only slots i (B, H, n) of all per-slot tensors; −1 stands for an empty slot."""
        check_kept(i, self.pos.shape)
        empty = i < 0
        i = i.clamp(min=0)
        in_use = {name: self.slot(name) for name in self.slots}
        self.slots = {name: taken(x, i) for name, x in in_use.items()}
        self.length = i.shape[2]
        if empty.any():
            self.ragged = True
            self.slots["pos"].masked_fill_(empty, NEVER)

    def keep_chosen(self, kept: Tensor):
        """Keep only the slots where kept (B, H, S) is true."""
        there = self.pos != NEVER
        self.keep(indices(kept & there))

    def drop(self, i: Tensor):
        """Evict slot i (B, H, 1) of each head. The last slot moves there."""
        last = slice(self.length - 1, self.length)
        for x in self.slots.values():
            entry = x[:, :, last].clone()
            x.scatter_(2, expand_index(i, x), entry)
        self.length -= 1

    def shrink(self, score: Tensor, budget: int):
        """Keep each head's `budget` slots of highest score (B, H, S); ties: the newest token."""
        check_score(score, self.pos.shape)
        if self.ragged:
            score = score.masked_fill(self.pos == NEVER, -math.inf)
        if self.length == budget + 1 and not self.ragged:
            # one slot too many, as in decoding: no sort needed
            higher = score > score.amin(-1, keepdim=True)
            lowest = self.pos.masked_fill(higher, NEVER)
            self.drop(lowest.argmin(-1, keepdim=True))
        elif self.length > budget:
            check_numbers(
                score
            )  # not in decoding, where it would wait for the GPU at each token
            if self.length == self.seen:  # the slots are in the order of their tokens
                kept = top(score, budget)
            else:
                kept = rank(score, self.pos) < budget
            self.keep(indices(kept))

    # ---- bytes ---------------------------------------------------------------------------------

    def bytes(self) -> tuple[int, int]:
        """Return (live, allocated) bytes. Live bytes leave out unused and empty slots."""
        stored = self.stored()
        live = sum(x.live * x.tensor.element_size() for x in stored)
        allocated = sum(x.tensor.nbytes for x in stored)
        return live, allocated

    def stored(self) -> list[Stored]:
        """Return every tensor that `bytes` counts: the slots, and what the method remembers."""
        stored = self.counted_slots(self.slots)
        return stored + self.remembered()

    def counted_slots(self, slots: dict[str, Tensor]) -> list[Stored]:
        """Return the buffers of slots; those numbers live whose slot holds an entry."""
        stored = []
        for name, x in slots.items():
            live = self.live() * math.prod(x.shape[3:])
            stored.append(Stored(x, live, name in VECTORS))
        return stored

    def live(self) -> int:
        """Return how many of the slots in use hold an entry, in all heads and texts."""
        pos = self.slot("pos")
        if self.ragged:
            return int((pos != NEVER).sum())
        return pos.numel()

    def remembered(self) -> list[Stored]:
        """Return the tensors that the method remembers."""
        tensors = [*self.notes.values(), *self.state.values(), self.forgotten]
        return [all_live(x) for x in tensors if isinstance(x, Tensor)]


def note_ids(layers: list, tokens: Tensor):
    """Note in the first layer that tokens (B, T) come next; `compress` compares them with its own.

    If entries came without ids before, such as replayed ones, none are known.
    """
    first = layers[0]
    if not isinstance(first, Slots):  # another reader stands in for it
        return
    known = first.ids if first.seen else tokens[:, :0]
    first.ids = None
    if known is not None and known.shape[1] == first.seen:
        first.ids = torch.cat((known, tokens), 1)
