"""KVzip taken apart: each row is what the method itself finds."""
from itertools import product
import re
from types import SimpleNamespace

import torch

from common import tasks
from experiments import kvzip_parts
from experiments.kvzip_parts import apart, by_heads, fewer_bits
from methods.duo_attention import DuoAttention, DuoByKVzip
from methods.kvzip import KVzip
from methods.ours.one_reading import OneReading
from nanollm import TINY
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.evaluate import full_cache_bytes, maker, retrieve, share


@torch.no_grad()
def test_each_row_is_what_the_method_finds(monkeypatch):
    def takes(seconds, run):
        def timed(*given):
            end = clock[-1] + seconds
            run(*given)
            clock.append(end)  # whatever ran within
        return timed

    clock = [0]
    monkeypatch.setattr(kvzip_parts, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    monkeypatch.setattr(kvzip_parts, "prefill", takes(2, kvzip_parts.prefill))
    monkeypatch.setattr(kvzip_parts, "read_again", takes(6, kvzip_parts.read_again))
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 6, 160)
    found, ratio = apart(model, batch, shares=(1.0, 0.25), steps=list)
    assert len(found) == 2 * 2 * 2 * 2 and ratio == 3
    for reading, Method in (("second", KVzip), ("first alone", OneReading)):
        for score in ("max", "sum"):
            for ranked, across in (("all", True), ("each head", False)):
                make = maker(model, Method, 0.25, score=score, across=across)
                expected = retrieve(model, batch, make)["blind"]
                assert torch.equal(found[reading, score, ranked, 0.25], expected), (reading, score, ranked)
                assert torch.equal(found[reading, score, ranked, 1.0], found["second", "max", "all", 1.0])
    assert found["second", "max", "all", 1.0].mean() > 0.9  # nothing was evicted
    assert found["second", "max", "all", 0.25].mean() > found["first alone", "sum", "each head", 0.25].mean()


@torch.no_grad()
def test_fewer_bits_are_fewer_bytes():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 4, 160)
    found = fewer_bits(model, batch, shares=(0.25,), steps=list)
    make = maker(model, KVzip, 0.25)
    assert torch.equal(found["kvzip", 16, 0.25][0], retrieve(model, batch, make)["blind"])
    for name in ("snap_kv", "kvzip"):
        exact, four, two = (found[name, bits, 0.25][1] for bits in (16, 4, 2))
        assert two < four < exact < found["full", 16, 1.0][1] / 2
    assert found["full", 16, 1.0][0].mean() == 1
    c, n = model.config, batch.answers[-1].stop  # a text's bytes after its answer, with a position a slot
    assert found["full", 16, 1.0][1] == full_cache_bytes(c, n) + 4 * c.n_layers * c.n_kv_heads * n
    left = share(0.25, batch.question) + n - batch.question  # a quarter of the context, and what came later
    assert found["snap_kv", 16, 0.25][1] == full_cache_bytes(c, left) + 4 * c.n_layers * c.n_kv_heads * left
    assert found["quantized_2", 2, 1.0][1] > found["kvzip", 4, 0.25][1]


@torch.no_grad()
def test_duo_attention_by_two_sets_of_heads():
    model, batch = from_hf(TINY), tasks("test").batch("needle", 0, 6, 160)
    heads = {"right": ((1, 0), (1, 1), (1, 2)), "wrong": ((5, 0), (5, 1), (5, 2))}
    found = by_heads(model, batch, heads, shares=(0.3, 0.2), steps=list)  # at 0.2 aware finds more
    for (name, part), right in found.items():
        make = maker(model, DuoAttention, part, heads=heads[name])
        assert torch.equal(right, retrieve(model, batch, make)["blind"])
    assert len(found) == 4 and found["right", 0.3].mean() > found["wrong", 0.3].mean() + 0.3


def test_the_command_prints_a_row_for_each_set_of_heads(monkeypatch, capsys):
    class Known:
        @staticmethod
        def calibrate(model, encoding):
            return dict(heads=((1, 0), (1, 1), (1, 2)))

    assert kvzip_parts.HEADS == {"trained gates": DuoAttention, "KVzip's scores": DuoByKVzip}
    monkeypatch.setattr(kvzip_parts, "HEADS", {"mine": Known})
    rows = [*product(kvzip_parts.READINGS, ("max", "sum"), kvzip_parts.RANKED, kvzip_parts.SHARES)]
    found = {row: torch.full((2,), i / 100) for i, row in enumerate(rows)}
    monkeypatch.setattr(kvzip_parts, "apart", lambda *_, **__: (found, 2.0))
    monkeypatch.setattr(kvzip_parts, "fewer_bits", lambda *_, **k: {("full", 16, 1.0): (torch.ones(2), 2048)})
    monkeypatch.setattr(kvzip_parts, "by_heads", lambda model, batch, heads, steps: {
        (name, part): torch.tensor([0.0, 1.0]) for name in heads for part in kvzip_parts.HEAD_SHARES})
    monkeypatch.setattr(kvzip_parts, "Tasks", lambda encoding, split: tasks(split))
    kvzip_parts.main(["--documents", "2", "--length", "160"])
    out = capsys.readouterr().out
    assert out.count("DuoAttention by   found in       needle 50 %") == 2  # of both decoders
    assert len(re.findall(r"^full +all +–(?: +1.00 ± 0.00 +2){2}$", out, re.M)) == 2  # KiB; no fewer bits
    for i, row in enumerate(rows[::3]):  # three shares a line, of both tasks
        cells = "".join(f"{f'0.{3 * i + j:02} ± 0.00':>18}" for j in (0, 1, 2)) * 2
        assert out.count(f"{row[0]:<12}{row[1]:<8}{row[2]:<16}{cells}\n") == 2, row
    rows = re.findall(r"^mine +0 s((?: +0.50 ± 0.50)+)$", out, re.M)
    assert [row.count("0.50 ±") for row in rows] == [6, 6]
