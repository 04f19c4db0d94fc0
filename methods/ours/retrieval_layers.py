"""Ours: few layers keep everything, in a small file, after one reading.

Retrieval heads, which fetch facts from far back, lie in few layers. DuoAttention finds them
(methods/duo_gates.py). Here a layer with such a head keeps all tokens, and the others keep their first and
newest. A token stays in all heads of a layer or in none, so keys and values can be coded as in
kvzip_gain_coded. In a file they take 1 to 2 bits a number.

The budget is an upper bound. It limits how many layers keep everything.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.duo_attention import DuoAttention
from methods.ours.karhunen_loeve import Watched
from methods.ours.kvzip_gain_coded import CodedGainKVzip
from methods.ours.kvzip_gain_coded import from_bytes, to_bytes  # noqa: F401  experiments/record calls both

STEP = 0.8  # of rounding: finer than in kvzip_gain_coded, as more tokens might be taken for the right one


@dataclass(eq=False)
class Everything(Watched):
    """Full attention that records keys and values, and the queries after the prompt."""
    reread_size, always = 0, False
    budget: int = 10 ** 6  # keeps all

    def end_prefill(self):
        super().end_prefill()
        self.kept = self.vectors().flatten(0, 1)


@dataclass(eq=False)
class RetrievalLayers(CodedGainKVzip):
    layers: tuple[int, ...] = ()  # those that keep all tokens, the most important first
    sinks: int = 4                # first tokens that the other layers keep
    recent: int = 12              # newest tokens that they keep
    reread_size = 0
    measured_on = Everything

    def link(self, model, layer: int, previous):
        super().link(model, layer, previous)
        if not {*self.layers} <= {*range(len(model.blocks))}:
            raise ValueError(f"layers {self.layers} must be among {len(model.blocks)} layers, counted from 0")

    def scores(self) -> Tensor:
        """Return 1 for the tokens of a layer that keeps them all, else −∞, (B, 1, S)."""
        ends = self.sinks + self.recent  # stay in every layer (KVzip.end_prefill)
        fit = len(self.model.blocks) * (self.budget - ends) // max(self.length - ends, 1)
        stay = self.layer in self.layers[:fit] or self.length <= self.budget
        return torch.full_like(self.pos[:, :1], 1 if stay else -torch.inf, dtype=torch.float32)

    def basis(self) -> tuple[Tensor, ...]:
        into, back, mean, spread = super().basis()
        return into / STEP, back * STEP, mean, spread / STEP

    @classmethod
    def calibrate(cls, model, encoding) -> dict:
        """Return the options that depend on the decoder, as arguments of the constructor."""
        heads = DuoAttention.calibrate(model, encoding)["heads"]
        layers = tuple(dict.fromkeys(layer for layer, _ in heads))
        return super().calibrate(model, encoding) | dict(layers=layers)


variants = {"retrieval_layers": RetrievalLayers}
