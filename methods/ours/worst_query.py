"""Ours: LayerDefensiveKV (methods/defensive_kv.py) without its first stage.

Stage 1 keeps the entries that gather 90 % of the window's mean attention. They take much of the budget, and
they are what the mean query of the window wants. Without it, all entries before the window are ranked by the
query that wants them most, in all heads of all layers together.
"""
from functools import partial

from methods.defensive_kv import DefensiveKV

variants = {"worst_query": partial(DefensiveKV, across=True, mass=0)}
