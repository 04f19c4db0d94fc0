"""Decoding in a real model's shape: parameters, rows, what does not fit, going on, and a GPU's calls."""
from dataclasses import replace
from itertools import accumulate, count, cycle
import json
from pathlib import Path
import subprocess
import sys

import pytest
import torch

from common import interpreter
from experiments import large
from nanollm import kernel_switch
from nanollm.cache import cache_bytes, end_prefill, make_cache
from nanollm.commands.registry import given, pick
from nanollm.generate import tell_chunk_ends
from nanollm.model import Config

METHODS = "full", "ada_kv", "h2o", "quantized_2", "kv_reviver", "chunk_kv_semantic"
SHAPE = Config(60, 80, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=32, head_dim=16, qkv_bias=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setitem(large.SHAPES, "small", SHAPE)
    file = tmp_path / "rows.json"
    known = f"--device cpu --budget 50 --json {file} --methods {' '.join(METHODS)} "
    return lambda more: large.main((known + more).split()) or json.loads(file.read_text())["rows"]


@pytest.mark.parametrize("name, published", [("llama3-8b", 8_030_261_248), ("qwen2.5-0.5b", 494_032_768)])
def test_the_real_shapes_have_the_published_numbers_of_parameters(name, published):
    model = large.skeleton(large.SHAPES[name], torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == published
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_weights_are_seeded_and_normal_norms_one_and_biases_nought():
    a, b, c = models = [large.skeleton(SHAPE, torch.bfloat16) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1)):
        large.fill(model, torch.device("cpu"), seed)
    assert a.head.weight is a.embed.weight and torch.equal(a.freq, large.Decoder(SHAPE).freq)
    for (name, p), same, other in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(p, same) and torch.equal(p, other) == (p.dim() == 1) and p.dtype == torch.bfloat16
        assert 0.018 < p.float().std() < 0.022 if p.dim() == 2 else (p == ("norm" in name)).all()


def test_a_row_has_every_number_and_the_bytes_of_caches_filled_by_hand(run, monkeypatch, capsys):
    # of the five looks of a row: 2 s to read, 1 s for the end, 4 s to decode
    monkeypatch.setattr(large, "perf_counter", accumulate(cycle((8, 2, 1, 1, 4))).__next__)
    seeds, fill = [], large.fill
    monkeypatch.setattr(large, "fill", lambda *of: seeds.append(of[-1]) or fill(*of))
    rows = run("--lengths 100 70 --batch 1 3 --new 5 --chunk 40 --seed 7")
    model = large.skeleton(replace(SHAPE, max_len=100), torch.float32)
    large.fill(model, torch.device("cpu"), 7)
    assert seeds == [7, 7]
    sizes = [(T, B, name) for T in (100, 70) for B in (1, 3) for name in METHODS]
    for (T, B, name), row, line in zip(sizes, rows, capsys.readouterr().out.splitlines()[-24:], strict=True):
        live, allocated, peak = held = [row.pop(name) for name in ("live", "allocated", "peak")]
        assert row == dict(tokens=T, batch=B, method=name, prefill_s=2, end_s=1, tokens_per_s=5 * B / 4,
                           device=None, device_peak=None)
        shown = " ".join(f"{x / 1e6:.2f}" for x in held)
        assert line.split() == f"{T} {B} {name} 2.00 1.000 {5 * B / 4:.1f} {shown} – –".split()
        Method, most = pick([name])[name], 0
        caches = make_cache(model, Method, **given(Method, budget=T // 2))
        tell_chunk_ends(caches, torch.arange(T)[None] % 16 == 15)
        tokens = torch.randint(60, (B, T + 1), generator=torch.Generator().manual_seed(7))
        for part in tokens[:, :-1].split(40, 1):
            model(part, caches)
            most = max(most, cache_bytes(caches)[1])
        end_prefill(caches)
        assert (live, allocated, peak) == (*cache_bytes(caches), most)


def test_what_does_not_fit_is_told_and_a_run_goes_on_where_it_ended(run, monkeypatch, tmp_path, capsys):
    def measure(model, Method, knobs, tokens, new, chunk, cuda):
        asked.append((tokens.shape, chunk))
        if errors:
            raise errors.pop()
        return dict(live=len(asked))

    asked, errors = [], [RuntimeError("DefaultCPUAllocator: can't allocate memory"), ValueError("too long"),
                         MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]
    monkeypatch.setattr(large, "measure", measure)
    monkeypatch.setattr(large, "COLUMNS", {})
    first = run("--lengths 99 --batch 3")
    notes = "fit: CUDA out", "fit: MemoryError", "too long", "fit: DefaultCPU"
    assert all(note in row["note"] for note, row in zip(notes, first)) and first[4]["live"] == 6
    assert asked == [((3, 100), 170)] * 8 and capsys.readouterr().out.count("fit: ") == 3  # two of six twice
    later = run("--lengths 99 --batch 3 1 5 --resume")
    assert later[:6] == first and len(later) == 18
    assert asked[8:] == [((1, 100), 512)] * 12 + [((5, 100), 102)] * 6  # a length's first is read twice
    for more, told in (("--new 3", "rows of new 16, and now it is 3"), ("--seed 1", "rows of seed 0, and"),
                       ("--budget 40", "rows of budget 50.0, and now it is 40.0")):
        with pytest.raises(ValueError, match=told):
            run(f"--resume --lengths 99 {more}")
    for wrong, told in ({"batch": "3"}, "'batch' of a row in .* is '3'"), ({"method": []}, "'method' of"):
        stored = json.loads((tmp_path / "rows.json").read_text())
        (tmp_path / "wrong.json").write_text(json.dumps(stored | dict(rows=[later[4] | wrong])))
        with pytest.raises(ValueError, match=told):
            run(f"--lengths 99 --batch 3 --resume --json {tmp_path}/wrong.json")
    errors += [RuntimeError("a bug")]
    with pytest.raises(RuntimeError, match="a bug"):
        run("--lengths 99 --batch 3 1")  # anew
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(ValueError, match="holds something else than the rows"):
        run("--lengths 99")


@interpreter
def test_a_gpu_is_waited_for_and_its_allocator_asked(monkeypatch):
    called, ticks, decode, answer = [], count(), large.decode, torch.zeros(1, 1, 9)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", count(100, 7).__next__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    monkeypatch.setattr(large, "perf_counter", lambda: called.append("clock") or next(ticks))
    monkeypatch.setattr(kernel_switch, "on_gpu", lambda x: kernel_switch.use_kernels)
    large.decode(lambda *of: called.append("step") or answer, [], None, 2, True)
    assert called == ["step", "synchronize", "clock", "step", "step", "synchronize", "clock"]
    called.clear()
    model, tokens = large.skeleton(SHAPE, torch.float32), torch.arange(40).view(2, 20)
    large.fill(model, torch.device("cpu"), 0)

    full, h2o = (large.measure(model, Method, given(Method, budget=9), tokens, 2, 16, True)
                 for Method in pick(["full", "h2o"]).values())
    assert (full["device_peak"], full["device"], h2o["device_peak"], h2o["device"]) == (900, 7, 886, 7)
    assert (full["plain_per_s"], h2o["plain_per_s"], kernel_switch.use_kernels) == (None, 4, True)
    assert called[:2] == ["empty_cache", "reset_peak_memory_stats"] and called.count("clock") == 5 + 7
    assert all(before == "synchronize" for before, after in zip(called, called[1:]) if after == "clock")

    def too_much(*of):
        if not kernel_switch.use_kernels:
            raise torch.OutOfMemoryError
        return decode(*of)

    monkeypatch.setattr(large, "decode", too_much)
    row = large.measure(model, pick(["h2o"])["h2o"], dict(budget=9), tokens, 2, 16, True)
    assert (row["plain_per_s"], row["tokens_per_s"], kernel_switch.use_kernels) == (None, 4, True)
    assert large.show(dict(tokens=1, batch=2, method="h2o", **row)).split()[6] == "–" and "fit" in row["note"]


@pytest.mark.parametrize("wrong, message", [
    ("--lengths 0", "length 0 must"), ("--new 0", "new 0"), ("--seed -1", "seed"), ("--chunk 0", "chunk 0"),
    ("--budget 0", "budget 0 %"), ("--device none", "device 'none'"), ("--methods none", "unknown method"),
    ("--methods snap_kv --lengths 64", "snap_kv at 25 % of 64 tokens: budget 16 must exceed the window"),
    ("--resume", "--json FILE"), ("--model none", "missing"), ("--model none --shape small", "two shapes"),
    ("--json nowhere/rows.json", "folder nowhere"), ("--shape llama3-8b --dtype float32", "32.1 GB exceed"),
    ("--shape llama3-8b --dtype bfloat16", "16.1 GB exceed"),
    ("--model {} --methods full --lengths 9 30", "length 30 must be a whole number from 1 to 29")])
def test_what_cannot_be_measured_is_refused_before_any_work(wrong, message, tmp_path, monkeypatch):
    gpt2 = dict(vocab_size=60, n_positions=62, n_layer=1, n_head=2, n_embd=8, layer_norm_epsilon=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gpt2", **gpt2)))
    monkeypatch.delattr(large, "fill")
    monkeypatch.setattr(large.os, "sysconf", lambda name: 2 ** 16)
    with pytest.raises(ValueError, match=message):
        large.main(["--device", "cpu", *wrong.format(tmp_path).split()])


def test_a_refusal_is_one_line_and_exit_code_2_in_a_clean_shell():
    done = subprocess.run([sys.executable, "-m", "experiments.large", "--batch", "0"], env={}, text=True,
                          capture_output=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "error: batch 0 must be a whole number from 1 to 1048576\n")
