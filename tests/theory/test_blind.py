"""Who still answers blind: each row is what the method finds, and the fewest bytes are the fewest."""
import pytest
import torch

from common import tasks
from methods.theory import blind
from methods.theory.blind import Found, enough
from nanollm import TINY
from nanollm.cache import cache_bytes
from nanollm.evaluate import TASKS, maker, prompt_and_question, retrieve
from nanollm.generate import end_prompt, prefill
from nanollm.select import pick
from nanollm.weights import from_hf


@torch.no_grad()
def test_each_row_is_what_the_method_finds(monkeypatch):
    monkeypatch.setattr(blind, "SHARES", (0.5, 0.25))
    model = from_hf(TINY)
    methods = pick(["full", "snap_kv", "quantized_2"])
    rows = blind.found(model, tasks("test"), methods, 4, 160, steps=list)
    assert [*rows] == [("full", None), ("snap_kv", 0.5), ("snap_kv", 0.25), ("quantized_2", None)]
    for (name, part), row in rows.items():
        make, held = maker(model, methods[name], part, **{} if part is None else dict(window_size=8)), 0
        for task, right in row.right.items():
            batch = tasks("test").batch(task, 0, 4, 160, **TASKS[task])
            assert torch.equal(right, retrieve(model, batch, make)["blind"])
            _, context, _ = prompt_and_question(model, batch)
            caches = make(batch.question, context)
            prefill(model, context, caches)
            end_prompt(model, context, caches)
            held += cache_bytes(caches)[0]
        assert row.bytes == held and row.seconds > 0
    assert rows["full", None].right["needle"].mean() == 1


def test_the_fewest_bytes_that_keep_enough():
    def row(right, held):
        answers = torch.zeros(100)
        answers[:right] = 1
        return Found(dict(needle=answers, recall=answers), held, 1.0)

    rows = {("full", None): row(80, 100), ("a", 0.5): row(80, 50), ("a", 0.25): row(76, 25),
            ("a", 0.125): row(75, 12), ("b", 0.5): row(75, 50), ("c", None): row(90, 15)}
    assert enough(rows) == {"c": None, "a": 0.25, "full": None}  # 76 of 80 are 95 %
    assert enough({("full", None): row(0, 100), ("a", 0.5): row(0, 50)}) == {}  # which model could do less?


def test_a_budget_too_small_for_a_method_is_named_before_any_work(monkeypatch):
    monkeypatch.delattr(blind, "measure")
    with pytest.raises(ValueError, match="quest at 6.25 % of 1.. tokens: budget .* a page has 16 tokens"):
        blind.found(from_hf(TINY), tasks("test"), pick(["full", "quest"]), 2, 160)


def test_the_table_names_who_keeps_enough_on_both_decoders(monkeypatch, capsys):
    monkeypatch.setattr(blind, "SHARES", (0.5,))
    blind.main(["--methods", "random", "--documents", "2", "--length", "160"])
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[2:4]] == [["full", "all"], ["random", "50"]]
    below = out[out.index("") + 2:]
    assert below[-1].split() == ["full", "all", "100.0", "%", "all", "100.0", "%"]
    assert out[2].count("100.0 %") == 2
