"""What takes time: each table small, in a new process; weights, bytes and exponents; what is refused."""
from dataclasses import replace
from functools import partial
from itertools import product
import json

import pytest
import torch

from common import checkpoint_of_two_layers, decoder
from experiments import speed
from nanollm.cache import cache_bytes, end_prefill, make_cache
from nanollm.commands import plot
from nanollm.commands.registry import given, pick
from nanollm.generate import tell_chunk_ends
from nanollm.model import Config

SHAPE = Config(60, 80, n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=32, head_dim=16, qkv_bias=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return checkpoint_of_two_layers(tmp_path_factory.mktemp("small"))  # for 800 tokens


@pytest.fixture
def run(typed):
    """The command in a new process that knows only PATH and HOME."""
    return partial(typed, "python", "-m", "experiments.speed")


def rows_of(run, *words, folder):
    """The rows that the command wrote, which are what it shows; and what it printed."""
    done = run(*words, "--json", folder / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "rows.json").read_text())
    assert done.stdout.split() == speed.show(rows).split() and speed.rows_of(json.dumps(rows)) == rows
    return rows


def test_steps(run, small, tmp_path):
    rows = rows_of(run, "--methods", "snap_kv", "h2o", "--lengths", 168, 256, "--new", 9, "--repeat", 2,
                   "--model", small, folder=tmp_path)
    tables = {name: [row for row in rows if row["table"] == name] for name in speed.TITLES}
    assert [(row["numbers"], row["slots"]) for row in tables["floor"]] == [
        (dtype, n) for dtype in ("float32", "bfloat16") for n in (168, 256)]
    for row in tables["floor"]:
        assert min(row[name] for name in ("floor", "attention", "ours", "theirs")) > 0
        assert row["ratio"] == pytest.approx(row["ours"] / (row["floor"] + row["attention"]))
    full, *others = tables["end"]
    assert [row["method"] for row in tables["end"]] == ["full", "snap_kv", "h2o"] == [
        row["method"] for row in tables["step"]]
    for n in 168, 256:
        assert full[f"{n} reading"] == 1 and full[f"{n} %"] == 100
        for row in others:
            assert row[f"{n} %"] == pytest.approx(100 * row[f"{n} end"] / full[f"{n} end"])
            assert row[f"{n} end"] > 0 and row[f"{n} reading"] > 0.1
    full = tables["step"][0]
    for row, B in product(tables["step"], (1, 8)):
        assert row[f"batch {B} speed"] == pytest.approx(full[f"batch {B} ms"] / row[f"batch {B} ms"])
    for row in tables["bridge"]:
        assert min(row["reading"], row["token"]) > 0
        assert row["token, ratio"] == pytest.approx(row["token, ours"] / row["token"])
    assert [(row["threads"], row["prompt"]) for row in tables["greedy"]] == [
        (threads, n) for threads in (1, 2) for n in (168, 256)]


def test_what_is_compiled_is_the_decoder(monkeypatch):
    monkeypatch.setattr(speed.torch, "compile", lambda **how: lambda function: function)
    model = decoder(vocab_size=2048, max_len=64)
    tokens, (ours, theirs) = torch.arange(8)[None], (make_cache(model) for _ in range(2))
    for part in tokens.split((7, 1), 1):
        y, told = model(part, ours), speed.compiled(model)(part, theirs)
    assert torch.equal(y, told)


def test_growth_of_a_text_longer_than_the_model_was_made_for(run, small, tmp_path):
    rows = rows_of(run, "--what", "growth", "--lengths", 900, 64, "--methods", "full", "kvzip", "--model",
                   small, "--figure", tmp_path / "growth.png", folder=tmp_path)
    assert [(row["phase"], row["method"]) for row in rows] == [
        (phase, name) for phase in speed.PHASES for name in ("full", "kvzip")]
    for row in rows:  # of two points the line goes through both
        assert row["900"] / row["64"] == pytest.approx((900 / 64) ** row["exponent"])
    assert rows[0]["900"] > 2 * rows[0]["64"] > 0 and rows[3]["900"] > rows[3]["64"]  # kvzip reads twice
    assert plot.is_ours((tmp_path / "growth.png").read_bytes())


@pytest.mark.parametrize("name, published", [("llama3-8b", 8_030_261_248), ("qwen2.5-0.5b", 494_032_768)])
def test_the_real_shapes_have_the_published_numbers_of_parameters(name, published):
    model = speed.skeleton(speed.SHAPES[name], torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == published
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_seeded_and_normal_norms_one_and_biases_nought(family):
    a, b, c = models = [speed.skeleton(replace(SHAPE, family=family), torch.bfloat16) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1)):
        speed.fill(model, torch.device("cpu"), seed)
    assert a.head.weight is a.embed.weight
    assert family == "gpt2" or torch.equal(a.freq, speed.Decoder(SHAPE).freq)
    for (name, p), same, other in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(p, same) and torch.equal(p, other) == (p.dim() == 1) and p.dtype == torch.bfloat16
        one = "norm" in name and name.endswith("weight")
        assert 0.018 < p.float().std() < 0.022 if p.dim() == 2 else (p == one).all()


def test_a_large_row_has_the_bytes_of_caches_filled_by_hand():
    model = speed.skeleton(replace(SHAPE, max_len=200), torch.float32)
    speed.fill(model, torch.device("cpu"), 7)
    tokens = speed.random_tokens(model, 101, 7, 3)
    for name, Method in pick("full ada_kv h2o quantized_2 kv_reviver chunk_kv_semantic".split()).items():
        options, most = given(Method, budget=50), 0
        row = speed.measure(model, Method, options, tokens, 5, 40, False)
        assert min(row["reading s"], row["tokens/s"]) > 0 and row["end s"] >= 0, name
        caches = make_cache(model, Method, **options)
        tell_chunk_ends(caches, torch.arange(100)[None] % 16 == 15)
        for part in tokens[:, :-1].split(40, 1):
            model(part, caches)
            most = max(most, cache_bytes(caches)[1])
        end_prefill(caches)
        live, allocated = cache_bytes(caches)
        assert (row["live"], row["allocated"]) == (live / 1e6, allocated / 1e6), name
        assert row["peak"] == most / 1e6, name


def test_large_goes_on_where_it_ended_and_says_what_does_not_fit(tmp_path, monkeypatch):
    words = f"--what large --device cpu --new 1 --json {tmp_path / 'rows.json'} --resume --lengths".split()
    speed.main([*words, "99", "--methods", "full", "h2o"])
    first = speed.rows_of((tmp_path / "rows.json").read_bytes())
    assert [(row["method"], row["batch"]) for row in first] == [
        (name, B) for B in (1, 4) for name in ("full", "h2o")]
    monkeypatch.setattr(speed, "feed", lambda *of: torch.empty(2 ** 60))
    speed.main([*words, "99", "140", "--methods", "full"])
    rows = speed.rows_of((tmp_path / "rows.json").read_bytes())
    assert rows[:4] == first and len(rows) == 6
    assert all(row["live"] is None and "does not fit" in row["note"] for row in rows[4:])
    with pytest.raises(ValueError, match="rows of another run .* 1 new tokens.* and this is .* 2 new tokens"):
        speed.main([*words, "99", "--new", "2", "--methods", "full"])
    (tmp_path / "rows.json").write_text('[{"table": "none"}]')
    with pytest.raises(ValueError, match="holds something else than the rows"):
        speed.main([*words, "99", "--methods", "full"])


@pytest.mark.parametrize("wrong, told", [
    ("--lengths 64", "ada_kv at 25 % of 64 tokens: budget 16 must exceed the window 32"),
    ("--what growth --lengths 512 512", "--lengths has one length, 512; growth needs"),
    ("--what large --device cpu --lengths 2000000", "length 2000000 must be a whole number from 1 to")])
def test_what_cannot_be_measured_is_one_line_before_any_work(wrong, told, run):
    done = run(*wrong.split())
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {told}"), done.stderr
    assert done.stderr.count("\n") == 1
