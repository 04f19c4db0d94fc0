"""What `plan` says before anything is loaded is what is allocated afterwards."""
import json

import pytest
import torch
import transformers as hf

from nanollm import TINY
from nanollm.__main__ import main
from nanollm.cache import LayerCache
from nanollm.commands import plan
from nanollm.commands.plan import SHORT, compressed, planned, shape_of
from nanollm.commands.registry import has_budget, pick
from nanollm.commands.table import SHOWN
from nanollm.hf.bridge import Bridged

QWEN = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=4096)


@pytest.mark.parametrize("name", [*SHOWN, "ada_kv", "pyramid_kv"])
def test_a_line_through_two_short_prompts_meets_a_longer_one(name):
    shape, _ = shape_of(TINY, torch.float32)
    Method = pick([name])[name]
    how = shape, Method, 0.25 if has_budget(Method) else None, 2 * SHORT[1], torch.float32, 8
    row, real = planned(*how), compressed(*how)
    rounds = name.startswith("kv_reviver")  # to whole slots of a sketch
    for key in "after", "peak":
        assert row[key] == pytest.approx(real[key], rel=0.03 if rounds else 0.002)


def test_the_full_cache_and_the_weights_are_those_of_the_model(tmp_path):
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**QWEN))
    model.config.save_pretrained(tmp_path)
    shape, weights = shape_of(tmp_path, torch.bfloat16)
    assert weights == 2 * sum(p.numel() for p in model.parameters())
    real = Bridged(model).config
    assert vars(shape.config) == vars(real) and (real.head_dim, real.max_len) == (32, 4096)
    full = planned(shape, LayerCache, None, 2048, torch.bfloat16, window=8)
    assert full["after"] == 3 * 2 * 2048 * (2 * 32 * 2 + 4)  # layers, heads, tokens, k, v and a position


def test_prompts_fit_beside_the_weights_by_the_larger_of_two_sizes(monkeypatch, capsys):
    """In 1 GB, 0.2 of it weights: two of 0.27 GB; without the weights three, by the smaller size eight."""
    (shape, _), row = shape_of(TINY, torch.float32), dict(keep_ratio=None, keeps_all=True)
    sizes = iter([dict(after=10 ** 8, peak=27 * 10 ** 7), dict(after=27 * 10 ** 7, peak=10 ** 8)])
    monkeypatch.setattr(plan, "shape_of", lambda *_: (shape, 2 * 10 ** 8))
    monkeypatch.setattr(plan, "planned", lambda *_: next(sizes) | row)
    plan.main("--methods full snap_kv --lengths 512 --batch 8 --memory 1".split())
    full, snap_kv = (x for x in capsys.readouterr().out.splitlines() if x.startswith(("full", "snap_kv")))
    assert full.split() == "full all 0.8 2.16 2".split() and snap_kv.split()[-3:] == "2.16 0.8 2".split()


def test_the_command_needs_a_config_alone(tmp_path, monkeypatch, capsys):
    half = lambda cache: cache.shrink(cache.pos, cache.seen // 2)
    halves = type("Halves", (LayerCache,), dict(end_prefill=half))
    monkeypatch.setattr(plan, "pick", lambda names: pick(names) | dict(halves=halves))
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="qwen3", **QWEN)))
    command = ["plan", "--model", str(tmp_path), "--memory", "0.5"]
    main([*command, *"--methods full h2o quantized_2 --lengths 512 1024 --batch 8".split()])
    out = capsys.readouterr().out
    assert out.startswith("3 layers, 4 query and 2 key/value heads of 32, bfloat16; weights 0.000336 GB")
    rows = [line.split() for line in out.splitlines() if line.startswith(("full", "h2o", "quant", "halves"))]
    budgets = [["full", "all"], ["h2o", "25"], ["quantized_2", "all"], ["halves", "(50"]]
    assert [row[:2] for row in rows] == budgets * 2
    assert int(rows[0][-1]) > int(rows[4][-1]) > 100  # longer prompts, fewer of them
    for options, message in ("--lengths 9999", "length 9999 must be a whole number from 16 to 4096"), (
            "--keep 0", "--keep is 0 %"), ("--model nowhere", "nowhere/config.json is missing"), (
            "--keep 5 --lengths 64 --methods snap_kv", "snap_kv at 5 % of 64 tokens: budget 3"):
        with pytest.raises(SystemExit) as stop:
            main([*command, *options.split()])
        assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [
    (dict(model_type=["qwen3"]), "config.json is not understood"),
    (dict(rope_theta="x"), "is not understood")])
def test_a_config_that_cannot_be_is_one_line(change, message, tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="qwen3", **QWEN) | change))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path)])
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1
