"""Measure how a compressed cache continues a text: −log p, KL, outputs and bytes.

The full cache's predictions and attention outputs, the `Reference`, are computed once for all
methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from lab.kept import slots_per_head
from lab.replay import Recorder, Recording, record
from lab.retrieval import Make, as_decoded, read_all_but_last
from nanollm.attention import wide
from nanollm.cache import (
    Slots,
    bytes_in_16_bits,
    cache_bytes,
    compress,
    copied,
    crop,
    make_cache,
)
from nanollm.check import fits
from nanollm.generate import check_prompt

# ---- the full cache's results ----


@dataclass
class Reference:
    """The full cache's results on texts whose last `new` tokens are the continuation."""

    tokens: Tensor  # (B, T)
    new: int
    log_p: Tensor  # (B, new, V): predictions of the continuation's tokens
    recording: list[Recording]  # of the prompt, one per layer, in CPU memory
    continuation: list[Recording]  # of what is fed after the compression, one per layer
    outputs: list[Tensor]  # attention's at these tokens, (B, H·G, new, D) per layer

    @property
    def prompt(self) -> Tensor:
        """Return (B, T − new). Its last token is fed again after the compression."""
        return self.tokens[:, : -self.new]

    def split(self, n: int) -> Iterator["Reference"]:
        """Yield references of at most n texts each."""
        for start in range(0, len(self.tokens), n):
            yield self.texts(slice(start, start + n))

    def texts(self, which: slice) -> "Reference":
        """Return the reference of some of the texts."""

        def some(x: Tensor) -> Tensor:
            return x[which] if len(x) > 1 else x  # one row of pos serves all texts

        return Reference(
            some(self.tokens),
            self.new,
            some(self.log_p),
            [Recording(*map(some, layer)) for layer in self.recording],
            [Recording(*map(some, layer)) for layer in self.continuation],
            [some(layer) for layer in self.outputs],
        )


@torch.no_grad()
def reference(model, tokens: Tensor, new: int) -> Reference:
    """Return the full cache's results on tokens (B, T); the last `new` are the continuation."""
    check_prompt(model, tokens)
    T = tokens.shape[1]
    if not fits(new, int) or not 0 < new < T - 1:
        raise ValueError(
            f"a continuation of {new} tokens must be shorter than the text's {T} by at least 2"
        )
    caches = make_cache(model, store=Recorder)
    recording = record(model, caches, tokens[:, :-new])
    crop(caches, T - new - 1)
    log_p = wide(model(tokens[:, -new - 1 : -1], caches)).log_softmax(-1)
    after, outputs = zip(*(layer.take() for layer in caches))
    return Reference(tokens, new, log_p, recording, [*after], [*outputs])


# ---- a compressed cache's ----


@torch.no_grad()
def continuation(
    model,
    full: Reference,
    make: Make,
    recording: list[Recording] | None = None,
    chunk_size: int = 64,
    alone: bool = False,
) -> dict:
    """Compress the prompt, feed the continuation (`as_decoded`), and return measurements.

    kl         KL(full ‖ compressed) of the next token in nats, mean over the continuation, (B,)
    nll        −log p of the true token, mean over the continuation, (B,)
    l1         ‖o − ô‖₁ with o = y W_O (Definition 1 of CriticalKV), mean over the continuation,
               (B, L, H·G); the changes of lower layers are included
    l1_alone   if `alone`: `perturbation`
    live, allocated, live_16
               bytes after the continuation, and `bytes_in_16_bits`
    peak       most bytes allocated while the prompt was read
    prompt     number of tokens compressed
    slots, slots_end
               `slots_per_head` after the compression and after the last token

    With `recording` (`full.recording`) the prompt is replayed. Without it the decoder reads
    the prompt `chunk_size` tokens at a time.
    """
    tokens = full.tokens
    new = full.new
    cut = full.prompt.shape[1] - 1
    caches = make(cut)
    recordings = None if recording is None else [recording]
    peak = read_all_but_last(model, full.prompt, caches, recordings, chunk_size)
    compress(model, full.prompt[:, :-1], caches)
    row = dict(prompt=cut, slots=slots_per_head(caches), peak=peak)
    if alone:
        # a replayed prompt is the one that `perturbation` would read
        ready = None if recording is None else copied(caches)
        row["l1_alone"] = perturbation(model, full, make, ready)

    with head_outputs(model) as heads:
        steps = [model(part, caches) for part in as_decoded(tokens[:, cut:-1], caches)]
    outputs = []
    for layer, parts in zip(caches, heads):
        y = torch.cat(parts, 1).unflatten(-1, layer.w_o.shape[1:])
        outputs.append(y.transpose(1, 2))

    log_p = wide(torch.cat(steps, 1)).log_softmax(-1)
    nll = -log_p.gather(-1, tokens[:, -new:, None])[..., 0].mean(-1)
    kl = F.kl_div(log_p, full.log_p, log_target=True, reduction="none").sum(-1).mean(-1)
    live, allocated = cache_bytes(caches)
    return row | dict(
        nll=nll,
        kl=kl,
        l1=changes(full, caches, outputs),
        live=live,
        allocated=allocated,
        live_16=bytes_in_16_bits(caches),
        slots_end=slots_per_head(caches),
    )


@contextmanager
def head_outputs(model):
    """Record the inputs of every layer's W_O: yields a list per layer of tensors (B, T, H·G·D)."""
    recorded = [[] for _ in model.blocks]
    hooks = []
    for block, inputs in zip(model.blocks, recorded):

        def note(module, args, inputs=inputs):
            inputs.append(args[0])

        hooks.append(block.attention.o.register_forward_pre_hook(note))
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def changes(full: Reference, caches: list[Slots], outputs: list[Tensor]) -> Tensor:
    """Return ‖o − ô‖₁ = ‖(y − ŷ) W_O‖₁, (B, L, H·G), from ŷ (B, H·G, new, D); mean over tokens."""
    layers = []
    for y, layer, y_hat in zip(full.outputs, caches, outputs):
        o = torch.einsum("bhtd,ohd->bhto", wide(y_hat - y), wide(layer.w_o))
        layers.append(o.abs().sum(-1).mean(-1))
    return torch.stack(layers, 1)


@torch.no_grad()
def perturbation(
    model, full: Reference, make: Make, caches: list[Slots] | None = None
) -> Tensor:
    """Return ‖o − ô‖₁ (Definition 1 of CriticalKV) of each layer alone, (B, L, H·G).

    Each layer gets the queries of the full cache. In `continuation` they are those that the
    compressed layers below give. caches: compressed ones to which the prompt has been
    replayed, if there are any.
    """
    if caches is None:
        cut = full.prompt.shape[1] - 1
        caches = make(cut)
        for layer, recording in zip(caches, full.recording):
            for part in recording.split(64, layer.w_o.device):
                layer.attend(*part)
        crop(caches, cut)
        compress(model, full.prompt[:, :-1], caches)

    outputs = []
    for layer, recording in zip(caches, full.continuation):
        at_once = full.new if layer.method.appends else 1
        parts = recording.split(at_once, layer.w_o.device)
        outputs.append(torch.cat([layer.attend(*part) for part in parts], 2))
    return changes(full, caches, outputs)
