"""Share decoders, loops and tensors among test files."""

from functools import cache as once
from itertools import accumulate, product
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nanollm import TINY, tokenizer
from nanollm.checkpoint import to_hf
from lab import corpus
from lab.tasks import Tasks
from nanollm.cache import (
    NEVER,
    Method,
    PackedSlots,
    compress,
    evict_while_reading,
)
from nanollm.model import Config, Decoder

# ---- where kernels run: on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1) ---

DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET", "0") == "0" else "cpu"
interpreter = pytest.mark.skipif(
    DEVICE == "cuda",
    reason="in Triton's interpreter: TRITON_INTERPRET=1",
)
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=2e-6),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
}
if DEVICE == "cuda":  # Triton's interpreter computes it wrong
    TOLERANCE[torch.bfloat16] = dict(rtol=16e-3, atol=16e-3)  # 3 bits less than float16


def amid_nan(x):
    """Return x as a view with NaN before and after it in memory, which no code may read."""
    n = 2**14
    storage = F.pad(x.to(DEVICE).flatten(), (n, n), value=math.nan)
    return storage[n:-n].view(x.shape)


def segment(counts, D, dtype, seed, bias=False):
    """Return a segment of heads in another order.

    Around each are rows of NaN, which no code may read.
    """
    from kernels.decode_attention import Segment  # Triton: Linux only

    g = torch.Generator().manual_seed(seed)
    count = torch.tensor(counts, dtype=torch.int32)
    order = torch.randperm(len(counts), generator=g)
    end = (count[order] + 1).cumsum(0)
    start = torch.empty_like(end)
    start[order] = end - count[order]

    k, v = torch.full((2, end[-1] + 1, D), math.nan, dtype=dtype)
    b = torch.full((len(k),), math.nan)
    for first, n in zip(start, counts):
        rows = slice(first, first + n)
        k[rows], v[rows] = torch.randn(2, n, D, generator=g).to(dtype)
        b[rows] = torch.randn(n, generator=g)

    k, v, b, start, count = (x.to(DEVICE) for x in (k, v, b, start, count))
    return Segment(k, v, start, count, max(counts), b if bias else None)


def attended(q, segments):
    """Return y (B, H, G, D) and the weight of every slot, one head at a time in float64.

    A slot of no head has weight 0.
    """
    B, H, _, D = q.shape
    y = torch.zeros_like(q, dtype=torch.float64)
    sizes = [len(s.k) for s in segments]
    k = torch.cat([s.k for s in segments]).double()
    v = torch.cat([s.v for s in segments]).double()
    bias = [y.new_zeros(len(s.k)) if s.bias is None else s.bias for s in segments]
    bias = torch.cat(bias)
    weight = y.new_zeros(len(k))
    for i, (b, h) in enumerate(product(range(B), range(H))):
        rows = []
        for s, before in zip(segments, accumulate(sizes, initial=0)):
            first = before + int(s.start[i])
            rows += range(first, first + int(s.count[i]))
        score = q[b, h].double() @ k[rows].T / math.sqrt(D) + bias[rows]
        p = score.softmax(-1)
        y[b, h] = p @ v[rows]
        weight[rows] = p.sum(0)
    return y, weight.split(sizes)


# ---- one layer: two rows, two key/value heads, three query heads each ---

B, H, G, D = 2, 2, 3, 8
FREQ = 10.0 ** -(torch.arange(D // 2) / 4)
SLOT = 2 * D * 4 + 4  # bytes of k, v and a position


def turn(x, pos):
    """Rotate x (..., D) at positions pos (...): RoPE as complex numbers."""
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    z = z * torch.polar(torch.ones(()), pos.float()[..., None] * FREQ)
    return torch.cat((z.real, z.imag), -1)


def dense(q, k, v, visible, bias=0.0):
    """Return attention by definition: q (B, H·G, T, D), k and v (B, H, S, D).

    visible and bias are of a shape like (B, H, T, S).
    """
    score = q.unflatten(1, (k.shape[1], -1)) @ k.mT.unsqueeze(2)  # (B, H, G, T, S)
    score = score / math.sqrt(q.shape[3])
    if torch.is_tensor(bias):
        score = score + bias.unsqueeze(2)
    p = score.masked_fill(~visible.unsqueeze(2), -math.inf).softmax(-1)
    return (p @ v.unsqueeze(2)).flatten(1, 2)


def alone(
    method=None,
    index=0,
    layers=1,
    w_o=None,
    freq=None,
    store=None,
):
    """Return a method's store of one layer.

    Its decoder has only output projections and RoPE's angles.
    """
    w_o = torch.zeros(1, G * H, D) if w_o is None else w_o
    block = SimpleNamespace(attention=SimpleNamespace(w_o=w_o))
    model = SimpleNamespace(blocks=[block] * layers, freq=freq)
    method = method or Method()
    make = store or method.store or PackedSlots
    return make(method, model, index)


def feed(layer, text, n=None, chunk=None):
    """Feed the next n tokens of a text, in chunks; return their output (B, H·G, n, D).

    text: q (B, H·G, T, D), k and v (B, H, T, D). Without n all that are left are fed.
    """
    stop = layer.seen + n if n else text[0].shape[2]
    tokens = torch.arange(layer.seen, stop)
    outputs = []
    for pos in tokens.split(chunk or len(tokens)):
        q, k, v = (x[:, :, pos] for x in text)
        outputs.append(layer.attend(q, k, v, pos[None]))
    return torch.cat(outputs, 2)


def end(*layers, tokens=None):
    """Compress the stores of all layers, which have read a prompt."""
    if tokens is None:
        tokens = torch.zeros(1, layers[0].seen, dtype=torch.long)
    compress(layers[0].model, tokens, [*layers])


class Fed:
    """A decoder that gives every layer its own q, k and v: token i of a text is their i-th."""

    def __init__(self, model, qkv):
        self.config = SimpleNamespace(vocab_size=10**6, max_len=10**6)
        self.blocks = model.blocks
        self.embed = model.embed
        self.qkv = qkv

    def __call__(self, tokens, layers, last=None):
        pos = torch.arange(layers[0].seen, layers[0].seen + tokens.shape[1])[None]
        for layer, qkv in zip(layers, self.qkv):
            layer.attend(*(x[:, :, tokens[0]] for x in qkv), pos)
        return torch.zeros(*tokens.shape, 1)


# ---- a decoder ---

TOKENS = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))


def decoder(**changed) -> Decoder:
    """Return a random decoder, by default of three layers, six query and two key/value heads."""
    torch.manual_seed(0)
    size = dict(
        vocab_size=50,
        max_len=64,
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        d_model=48,
        d_ff=64,
    )
    model = Decoder(Config(**size | changed))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def checkpoint_of_two_layers(folder):
    """Return the folder of a small random decoder with our tokenizer, as commands take it."""
    size = dict(vocab_size=2048, max_len=800, n_layers=2)
    to_hf(decoder(**size, n_heads=4, d_model=32, d_ff=32), folder)
    shutil.copy(TINY / "tokenizer.tiktoken", folder)
    return folder


# ---- our tokenizer, and the tasks encoded with it ---

ENCODING = tokenizer.load(TINY / "tokenizer.tiktoken")


def caches_of(model, variant, **options):
    """Return fresh caches of a variant, with random gates and edges in place of learned ones."""
    c = model.config
    width = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim + 1
    g = torch.Generator().manual_seed(0)
    gates = torch.randn(c.n_layers, width, c.n_kv_heads, generator=g)
    learned = dict(
        gates=gates,
        edges=torch.randn(2, c.n_layers, c.n_kv_heads, generator=g),
        ends=tokenizer.boundaries(ENCODING, c.vocab_size),
    )
    return variant.caches(model, **learned, **options)


def reading_within(make):
    """Return a function that makes caches which evict while they read."""

    def ready(tokens):
        caches = make(tokens)
        evict_while_reading(caches)
        return caches

    return ready


def kept(caches):
    """Return the kept positions {(row, layer, head): [...]}."""
    found = {}
    for i, layer in enumerate(caches):
        for b, row in enumerate(layer.pos.tolist()):
            for h, pos in enumerate(row):
                found[b, i, h] = sorted(x for x in pos if x != NEVER)
    return found


def highest(score, budget, sinks, newest):
    """Return the positions that stay: the highest scores of a row over all layers and heads.

    score: {(row, layer, head): {position: score}}. Positions below `sinks` and from `newest` on
    come first.
    """
    stays = {key: [] for key in score}
    for b in range(B):
        own = [key for key in score if key[0] == b]
        every = []
        for key in own:
            for i, x in score[key].items():
                protected = i < sinks or i >= newest
                every.append((math.inf if protected else x, key, i))
        every.sort(reverse=True)
        for _, key, i in every[: budget * len(own)]:
            stays[key].append(i)
    return {key: sorted(pos) for key, pos in stays.items()}


def decode(tokens) -> str:
    return ENCODING.decode([int(t) for t in tokens])


@once
def tasks(split: str) -> Tasks:
    """Return the library's tasks; for training of every tenth document only, to save seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if split == "train":
            pool = corpus.documents()[::10]
            patch.setattr(corpus, "documents", lambda: pool)
            patch.setattr(corpus, "text", corpus.text.__wrapped__)
            patch.setattr(corpus, "words", corpus.words.__wrapped__)
        return Tasks(ENCODING, split)
