"""Ours: LayerDefensiveKV without its first stage. It does not hold on SmolLM2.

There a quarter of the entries keeps a third of the needles that the full cache finds if the
question comes later. On our two decoders of 2.8 M parameters it keeps nearly all. The commands:
`python -m nanollm --methods full worst_query --keep 25`, and the same with `--model
nanollm/tiny_learned`, or `--model smollm2 --lengths 256`. Notebook 08 compares the decoders.

Stage 1 keeps the entries that gather 90 % of the window's mean attention. They take much of the
budget, and they are what the mean query of the window wants. Without it, the entries before the
window (the newest queries) are ranked in all heads of all layers together: by the highest attention
from one of these queries, times the norm of the value (methods/baselines/defensive_kv.py has both
stages).
"""

from functools import partial

from methods.baselines.defensive_kv import LayerDefensiveKV

variants = {"worst_query": partial(LayerDefensiveKV, mass=0)}
