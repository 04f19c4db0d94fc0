"""Ours: LayerDefensiveKV (methods/baselines/defensive_kv.py) without its first stage.

Stage 1 keeps the entries that gather 90 % of the window's mean attention. They take much of the budget, and
they are what the mean query of the window wants. Without it, the entries before the window (the newest
queries) are ranked in all heads of all layers together: by the highest attention from one of these queries,
times the norm of the value.

On our two decoders of 2.8 M parameters, a quarter of the entries answers nearly all later questions
(`python -m nanollm --methods full worst_query --keep 25`, with a window of 8). A window that takes half of
the budget loses some of them (`--lengths 256 --window 32`).
"""
from functools import partial

from methods.baselines.defensive_kv import DefensiveKV

variants = {"worst_query": partial(DefensiveKV, across=True, mass=0)}
