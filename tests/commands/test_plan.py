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
from nanollm.commands.registry import given, has_budget, pick
from nanollm.commands.table import SHOWN
from nanollm.hf.bridge import Bridged

QWEN = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=4096)


@pytest.mark.parametrize("name", [*SHOWN, "ada_kv", "pyramid_kv"])
def test_a_line_through_two_short_prompts_meets_a_longer_one(name):
    shape, _ = shape_of(TINY, torch.float32)
    Method, T = pick([name])[name], 2 * SHORT[1]
    fraction = 0.25 if has_budget(Method) else None
    told = planned(shape, Method, fraction, T, torch.float32, window=8)
    budget = {} if fraction is None else dict(budget=T // 4)
    real = compressed(shape, Method, given(Method, window_size=8) | budget, T, torch.float32)
    rounds = name.startswith("kv_reviver")  # to whole slots of a sketch
    assert told == pytest.approx(real, rel=0.03 if rounds else 0.002)


def test_the_full_cache_and_the_weights_are_those_of_the_model(tmp_path):
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**QWEN))
    model.config.save_pretrained(tmp_path)
    shape, weights = shape_of(tmp_path, torch.bfloat16)
    assert weights == 2 * sum(p.numel() for p in model.parameters())
    real = Bridged(model).config
    assert vars(shape.config) == vars(real) and (real.head_dim, real.max_len) == (32, 4096)
    full, _ = planned(shape, pick(["full"])["full"], None, 2048, torch.bfloat16, window=8)
    least = 3 * 2 * 2048 * (2 * 32 * 2 + 4)  # layers, heads, tokens, keys and values and a position
    assert full == least


def test_prompts_fit_beside_the_weights_by_the_larger_of_two_sizes(monkeypatch, capsys):
    """In 1 GB, 0.2 of it weights: two of 0.27 GB; without the weights three, by the smaller size eight."""
    (shape, _), windows = shape_of(TINY, torch.float32), []
    sizes = iter([(10 ** 8, 27 * 10 ** 7), (27 * 10 ** 7, 10 ** 8)])
    monkeypatch.setattr(plan, "shape_of", lambda *_: (shape, 2 * 10 ** 8))
    monkeypatch.setattr(plan, "planned", lambda *asked: windows.append(asked[-1]) or next(sizes))
    plan.main("--methods full snap_kv --lengths 512 --batch 8 --memory 1 --window 5".split())
    full, snap_kv = (x for x in capsys.readouterr().out.splitlines() if x.startswith(("full", "snap_kv")))
    assert full.split()[1:] == "all 0.8 2.16 2".split() and windows == [5, 5]
    assert snap_kv.split()[1:] == "25 % 2.16 0.8 2".split()


@pytest.mark.parametrize("change, message", [
    *((dict(num_hidden_layers=n), f"num_hidden_layers {n} must be a whole number from 1 to 1000")
      for n in (0, -2, 10 ** 8)), (dict(model_type=["qwen3"]), "config.json is not understood"),
    (dict(rope_theta="x"), "is not understood")])
def test_a_config_that_cannot_be_is_one_line(change, message, tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="qwen3", **QWEN) | change))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path)])
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command_needs_a_config_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="qwen3", **QWEN)))
    command = ["plan", "--model", str(tmp_path), "--methods", "full", "h2o", "--memory", "0.5"]
    main([*command, "--lengths", "512", "1024", "--batch", "8"])
    out = capsys.readouterr().out
    assert out.startswith("3 layers, 4 query and 2 key/value heads of 32, bfloat16; weights 0.000336 GB")
    rows = [line.split() for line in out.splitlines() if line.startswith(("full", "h2o"))]
    assert [row[0] for row in rows] == ["full", "h2o"] * 2 and rows[1][1:3] == ["25", "%"]
    assert int(rows[0][-1]) > int(rows[2][-1]) > 100  # longer prompts, fewer of them
    for options, message in ("--lengths 9999", "length 9999 must be a whole number from 16 to 4096"), (
            "--budget 0", "budget 0 %"), ("--model nowhere", "nowhere/config.json is missing"), (
            "--budget 5 --lengths 64 --methods snap_kv", "snap_kv at 5 % of 64 tokens: budget 3"):
        with pytest.raises(SystemExit) as stop:
            main([*command, *options.split()])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_method_without_a_budget_keeps_all_only_if_it_says_so(monkeypatch, capsys):
    own = pick(["full", "quantized_2", "snap_kv+critical"]) | {"mine": type("Mine", (LayerCache,), {})}
    monkeypatch.setattr(plan, "pick", lambda _: own)
    main(["plan", "--lengths", "64", "--window", "8"])
    rows = map(str.split, capsys.readouterr().out.splitlines())
    told = [row[:2] for row in rows if row and row[0] in own]
    assert told == [["full", "all"], ["quantized_2", "all"], ["snap_kv+critical", "25"], ["mine", "none"]]
