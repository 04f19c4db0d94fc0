"""Share decoders, loops and tensors among test files."""

from copy import deepcopy
from functools import cache as once
from itertools import product
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from nanollm import TINY, tokenizer
from nanollm.checkpoint import to_hf
from lab import corpus
from lab.hard_tasks import HardTasks
from nanollm.cache import compress
from nanollm.model import Config, Decoder

# ---- where kernels run: on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1) ---

DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET", "0") == "0" else "cpu"
interpreter = pytest.mark.skipif(
    DEVICE == "cuda", reason="in Triton's interpreter: TRITON_INTERPRET=1"
)
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=2e-6),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
}
if DEVICE == "cuda":  # Triton's interpreter computes it wrong
    TOLERANCE[torch.bfloat16] = dict(rtol=16e-3, atol=16e-3)  # 3 bits less than float16


def amid_nan(x):
    """Return x as a view with NaN before and after it in memory, which no code may read."""
    storage = torch.full((x.numel() + 2**15,), math.nan, dtype=x.dtype, device=DEVICE)
    storage[2**14 : -(2**14)] = x.flatten()
    return storage[2**14 : -(2**14)].view(x.shape)


def segment(counts, D, dtype, seed, bias=False, gap=1):
    """Return a segment of heads in another order, with `gap` rows of NaN around each, which no code
    may read.
    """
    from kernels.decode_attention import Segment  # Triton: Linux only

    g = torch.Generator().manual_seed(seed)
    start, at = torch.zeros(len(counts), dtype=torch.int64), gap
    for i in torch.randperm(len(counts), generator=g).tolist():
        start[i], at = at, at + counts[i] + gap

    k, v = torch.full((2, at, D), math.nan, dtype=dtype)
    b = torch.full((at,), math.nan) if bias else None
    for i, n in enumerate(counts):
        rows = slice(start[i], start[i] + n)
        k[rows], v[rows] = torch.randn(2, n, D, generator=g).to(dtype)
        if bias:
            b[rows] = torch.randn(n, generator=g)

    k, v, start, count = (
        x.to(DEVICE) for x in (k, v, start, torch.tensor(counts, dtype=torch.int32))
    )
    return Segment(k, v, start, count, max(counts), b if b is None else b.to(DEVICE))


def attended(q, segments):
    """Return y (B, H, G, D) and the weight of every slot, one head at a time in float64.

    A slot of no head has weight 0.
    """
    B, H, _, D = q.shape
    segments = [s._replace(k=s.k.double(), v=s.v.double()) for s in segments]
    y, weights = (
        torch.zeros_like(q, dtype=torch.float64),
        [torch.zeros_like(s.k[:, 0]) for s in segments],
    )
    for i, (b, h) in enumerate(product(range(B), range(H))):
        rows = [slice(int(s.start[i]), int(s.start[i] + s.count[i])) for s in segments]
        k, v = (
            torch.cat([x[at] for x, at in zip(of, rows)])
            for of in zip(*(s[:2] for s in segments))
        )
        bias = [
            s.k[at, 0] * 0 if s.bias is None else s.bias[at]
            for s, at in zip(segments, rows)
        ]
        p = (q[b, h].double() @ k.T / math.sqrt(D) + torch.cat(bias)).softmax(-1)
        y[b, h] = p @ v
        for weight, at, part in zip(
            weights, rows, p.sum(0).split([len(x) for x in bias])
        ):
            weight[at] = part
    return y, weights


# ---- one layer: two rows, two key/value heads, three query heads each ---

B, H, G, D = 2, 2, 3, 8
FREQ = 10.0 ** -(torch.arange(D // 2) / 4)
SLOT = 2 * D * 4 + 4  # bytes of k, v and a position


def turn(x, pos):
    """Rotate x (..., D) at positions pos (...): RoPE as complex numbers."""
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    z = z * torch.polar(torch.ones(()), pos.float()[..., None] * FREQ)
    return torch.cat((z.real, z.imag), -1)


def dense(q, k, v, visible):
    """Return attention by definition: q (B, H·G, T, D), k and v (B, H, S, D), visible (B, H, T, S)."""
    k, v, visible = (
        x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, visible)
    )
    score = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~visible, -math.inf)
    return score.softmax(-1) @ v


def feed(cache, q, k, v, chunk=None, first=0):
    """Return the output (B, H·G, n, D) of a text fed in chunks, at positions from `first` on."""
    chunk, pos = chunk or q.shape[2], torch.arange(first, first + q.shape[2])[None]
    parts = zip(*(x.split(chunk, 2) for x in (q, k, v)), pos.split(chunk, 1))
    return torch.cat([cache.attend(*part) for part in parts], 2)


def chunks_of(n, longest, tokens=(), ends=()):
    """Cut tokens 0 … n − 1 into chunks of at most `longest`; one also ends at each token in `ends`."""
    chunks = [[]]
    for i in range(n):
        if len(chunks[-1]) == longest or i and len(ends) and ends[tokens[i - 1]]:
            chunks.append([])
        chunks[-1].append(i)
    return chunks


# ---- a decoder ---

TOKENS = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))


def decoder(**changed) -> Decoder:
    """Return a random decoder: three layers, six query heads over two key/value heads."""
    model, state = made(*changed.items())
    torch.set_rng_state(state)
    return deepcopy(model)


@once
def made(*changed) -> tuple[Decoder, torch.Tensor]:
    """Return a decoder of seed 0, and the random state after it was drawn."""
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
    model = Decoder(Config(**size | dict(changed)))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.eval(), torch.get_rng_state()


def checkpoint_of_two_layers(folder):
    """Return the folder of a small random decoder with our tokenizer, as commands take it."""
    size = dict(
        vocab_size=2048, max_len=800, n_layers=2, n_heads=4, d_model=32, d_ff=32
    )
    to_hf(decoder(**size), folder)
    shutil.copy(TINY / "tokenizer.tiktoken", folder)
    return folder


# ---- our tokenizer, and the tasks encoded with it ---

ENCODING = tokenizer.load(TINY / "tokenizer.tiktoken")


def decode(tokens) -> str:
    return ENCODING.decode([int(t) for t in tokens])


@once
def tasks(split: str) -> HardTasks:
    """Return the library's tasks; for training only every tenth document, because encoding all
    takes 8 s."""
    with pytest.MonkeyPatch.context() as patch:
        if split == "train":
            pool = corpus.documents()[::10]
            patch.setattr(corpus, "documents", lambda: pool)
            patch.setattr(corpus, "text", corpus.text.__wrapped__)
            patch.setattr(corpus, "words", corpus.words.__wrapped__)
        return HardTasks(ENCODING, split)


def clusters_of(keys, radius):
    """Return each key's cluster, the oldest near it, and all first keys; keys is a list of rows."""
    of, centres = [], []
    for key in keys:
        may = [
            c for c, centre in enumerate(centres) if math.dist(key, centre) <= radius
        ]
        of.append(may[0] if may else len(centres))
        centres += [] if may else [key]
    return of, centres


def link(cache, layer: int = 0, layers: int = 1, w_o=None, freq=None):
    """Link a cache to a decoder that has only output projections and RoPE's angles."""
    w_o = torch.zeros(1, G * H, D) if w_o is None else w_o
    block = SimpleNamespace(attention=SimpleNamespace(w_o=w_o))
    cache.link(SimpleNamespace(blocks=[block] * layers, freq=freq), layer)


def end(*caches, model=None):
    """Compress the caches of all layers, which have read a prompt."""
    compress(model, torch.zeros(1, caches[0].seen, dtype=torch.long), [*caches])


class Fed:
    """A decoder that gives every layer's cache its own q, k and v: token i of a text is the i-th of
    each."""

    def __init__(self, model, layers):
        self.config = SimpleNamespace(vocab_size=10**6, max_len=10**6)
        self.blocks, self.embed, self.layers = model.blocks, model.embed, layers

    def __call__(self, tokens, caches, last=None):
        pos = torch.arange(caches[0].seen, caches[0].seen + tokens.shape[1])[None]
        for cache, qkv in zip(caches, self.layers):
            cache.attend(*(x[:, :, tokens[0]] for x in qkv), pos)
        return torch.zeros(*tokens.shape, 1)
