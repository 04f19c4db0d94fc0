"""The harder tasks: each number is what a method said, and the baselines keep what they promise."""
import json

import pytest
import torch
import torch.nn.functional as F

from common import ENCODING, decode, tasks
from experiments import harder
from experiments.harder import (BATCHES, Evenly, KeepPrefix, PROMPT, WRITTEN, Pieces, judged, main, measured,
                                numbers, show, written)
from methods.h2o import H2O
from methods.random_eviction import RandomEviction
from methods.snap_kv import SnapKV
from methods.streaming_llm import StreamingLLM
from nanollm import LEARNED, TINY, tokenizer
from nanollm.cache import LayerCache, end_prefill, make_cache
from nanollm.generate import generate, prefill
from nanollm.hf.checkpoint import from_hf
from nanollm.measure.evaluate import budget_for, maker

NUMBER = numbers(ENCODING, 2048)


def test_numbers_are_the_tokens_with_a_digit():
    assert NUMBER[256:356].all() and not NUMBER[ENCODING.encode(" code is")].any()


def said(batch, *texts):
    """Return what a method would have said: for each answer of the batch a text, the same in all rows."""
    return [torch.tensor([ENCODING.encode(text)] * len(batch.tokens)) for text in texts]


def test_turns_and_lists_are_judged_answer_by_answer():
    for task, names in (("turns", "turn"), ("list", "value")):
        batch = tasks("test").batch(task, 0, 3, 400)
        right = [torch.from_numpy(batch.tokens)[:, a].clone() for a in batch.answers]
        right[2][1] = 300
        found = judged(task, batch, right, NUMBER)
        assert found[f"{names} 3"].tolist() == [True, False, True] and found[f"{names} 4"].all()
        assert task == "turns" or found["list"].tolist() == [1, 0.75, 1]


def test_latest_tells_an_old_value_from_the_newest():
    batch = tasks("test").batch("latest", 0, 6, 400)
    newest = torch.from_numpy(batch.tokens)[:, batch.answers[0]]
    old = harder.stated(batch, 0)
    for row, key, value in zip(batch.tokens, batch.tokens[:, batch.answers[0].start - 4:], old):
        text = decode(row[:batch.question])
        assert text.index(f" is {decode(value)}.") < text.index(f" is {decode(key[4:6])}.")
        assert text.count(decode(key[:4]) + decode(value)) == 1
    assert judged("latest", batch, [newest], NUMBER)["latest"].all()
    assert judged("latest", batch, [old], NUMBER)["old value"].all()
    assert not judged("latest", batch, [newest], NUMBER)["old value"].any()


def test_a_trace_is_as_long_as_what_was_said_up_to_its_number():
    batch = tasks("test").batch("hops", 0, 2, 400, hops=3)
    right = torch.from_numpy(batch.tokens)[:, batch.answers[0]]
    longer = F.pad(right, (0, 8), value=9)
    assert judged("hops 3", batch, [longer], NUMBER)["trace 3"].tolist() == [1, 1]
    assert judged("hops 3", batch, [longer], NUMBER)["hops 3"].all()
    late = longer.roll(7, 1)
    found = judged("hops 3", batch, [late], NUMBER)
    n = right.shape[1]
    assert not found["hops 3"].any() and found["trace 3"].tolist() == pytest.approx([(n + 6) / (n - 1)] * 2)
    found = judged("hops 3", batch, [torch.full_like(longer, 9)], NUMBER)  # no number at all
    assert found["trace 3"].tolist() == pytest.approx([(n + 8) / (n - 1)] * 2)


@pytest.mark.parametrize("name", [name for name in BATCHES if "," in name])
def test_a_rule_is_obeyed_or_leaked(name):
    task, options = BATCHES[name]
    batch = tasks("test").batch(task, 0, 8, 400, **options)
    right = torch.from_numpy(batch.tokens)[:, batch.answers[0]].clone()
    form = "first" if options["first"] == "form" else "second"
    found = judged(name, batch, [right], NUMBER)
    assert found[f"form {form}"].all()
    if not options["banned"]:
        assert found["answer"].all() and len(found) == 2
        assert judged(name, batch, [right.roll(-1, 1)], NUMBER)["answer"].all()  # the word without the mark
        assert not judged(name, batch, [right * 0 + 9], NUMBER)["answer"].any()
        return
    ban = f"ban {'second' if form == 'first' else 'first'}"
    leak = f"leak, {ban}"
    assert found[ban].all() and not found[leak].any()
    never = torch.stack([torch.tensor(ENCODING.encode(text)) for text in (
        decode(row[:batch.question]).split(" Never say")[1].split(".")[0] for row in batch.tokens)])
    late = F.pad(never, (3, 1), value=9)  # the banned word comes late, and no mark
    found = judged(name, batch, [late], NUMBER)
    assert found[leak].all() and not found[ban].any() and not found[f"form {form}"].any()


@torch.no_grad()
def test_rows_are_what_each_method_says_when_asked():
    """The same text, read and asked by `generate`."""
    model, made = from_hf(TINY), tasks("test")
    pieces = Pieces(model, made, ["turns", "paraphrase"], 3, 400)
    make = maker(model, SnapKV, 0.25, window_size=8)
    row = next(row for row in pieces.rows(make, {"turns"}) if row["setting"] == "aware")
    batch = made.batch("turns", 0, 3, 400)
    tokens, first = torch.from_numpy(batch.tokens), batch.answers[0]
    caches = make(batch.question, tokens[:, :first.start - 1])
    new = generate(model, tokens[:, :first.start], 2, caches)
    assert row["turn 1"][0] == pytest.approx((new == tokens[:, first]).all(1).float().mean().item())
    assert {*row} == {"setting", "turn 1", "turn 2", "turn 3", "turn 4"}


@torch.no_grad()
def test_long_writing_holds_the_budget_and_compares_with_the_full_cache():
    model, made = from_hf(TINY), tasks("test")
    pieces = Pieces(model, made, ["writing"], 2, 512)
    (name, batch), = pieces.parts
    assert name == "writing" and batch.question == PROMPT + WRITTEN
    place = batch.facts.argmax(1)
    assert (place > 0).all() and (batch.facts[:, PROMPT:] == 0).all()  # the fact stands in the prompt
    full = written(model, batch, maker(model, LayerCache, None))
    assert all(full[f"KL {i}"].abs().max() < 1e-5 for i in (1, 2, 3, 4))
    assert full["fact at once"].all() and full["fact at the end"].all()
    window = written(model, batch, maker(model, StreamingLLM, 0.25))  # 80 entries: the fact leaves later
    assert window["fact at once"].all() and not window["fact at the end"].any()

    made_caches = []
    make = maker(model, H2O, 0.125)
    found = written(model, batch, lambda *args: made_caches.append(make(*args)) or made_caches[-1])
    assert made_caches[0][0].length == budget_for(0.125, batch.question) == 40
    tokens = torch.from_numpy(batch.tokens)
    caches = make(batch.question, None)
    prefill(model, tokens[:, :PROMPT], caches)
    end_prefill(caches)
    after = tokens[:, PROMPT:batch.question]
    log_p = torch.cat([model(token[:, None], caches) for token in after.unbind(1)], 1)
    expected = model(tokens[:, :batch.question]).log_softmax(-1)[:, PROMPT:]
    kl = F.kl_div(log_p.log_softmax(-1), expected, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(found["KL 3"], kl[:, 128:192].mean(1), atol=1e-5) and found["KL 4"].min() > 0.01


def compressed(Method, T=200, **options):
    model = from_hf(TINY)
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, 2, T).tokens)
    caches = make_cache(model, Method, **options)
    prefill(model, tokens, caches)
    end_prefill(caches)
    return caches


@torch.no_grad()
def test_the_repairs_keep_the_prefix_or_as_much_of_each_part():
    for cache in compressed(SnapKV, budget=58, window_size=8, select=KeepPrefix(first=20)):
        assert ((cache.pos < 20).sum(-1) == 20).all() and cache.length == 58
    for cache in compressed(SnapKV, budget=8 + 12 * 4 + 2, window_size=8, select=Evenly(size=16)):
        each = F.one_hot(cache.pos[..., :-8].long() // 16, 13).sum(2)  # 192 tokens are twelve parts
        assert (each[..., :12] >= 4).all() and (each.sum(-1) == 50).all()


@torch.no_grad()
def test_random_protects_its_ends_or_the_prompt():
    for cache in compressed(RandomEviction, budget=50, ends=0.1):
        kept = cache.pos.sort().values
        assert (kept[..., :5] == torch.arange(5)).all() and (kept[..., -5:] == torch.arange(195, 200)).all()
        assert len(kept[..., 5:-5].unique()) > 60  # the rest is drawn, by each head
    model = from_hf(TINY)
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, 1, 120).tokens)
    caches = make_cache(model, RandomEviction, budget=50, prompt=True)
    prefill(model, tokens[:, :30], caches)
    end_prefill(caches)
    for token in tokens[:, 30:].unbind(1):
        model(token[:, None], caches)
    for cache in caches:
        assert cache.length == 50 and ((cache.pos < 30).sum(-1) == 30).all()
    caches = make_cache(model, RandomEviction, budget=30, prompt=True)
    prefill(model, tokens[:, :30], caches)
    with pytest.raises(ValueError, match="budget 30 must exceed the prompt's 30 tokens"):
        end_prefill(caches)
    with pytest.raises(ValueError, match="ends is 0.6"):
        RandomEviction(budget=10, ends=0.6)


def test_a_run_prints_stores_and_draws(tmp_path, capsys, monkeypatch):
    file, figure = tmp_path / "rows.json", tmp_path / "harder.png"
    main(["--tasks", "turns", "count", "rule", "--methods", "snap_kv", "--documents", "2", "--length", "384",
          "--json", str(file), "--figure", str(figure)])
    text, rows = capsys.readouterr().out, json.loads(file.read_text())
    assert {row["method"] for row in rows} == {"full", "snap_kv", *harder.REPAIRS}
    assert {row["decoder"] for row in rows} == {"built", "learned"} and figure.stat().st_size > 10_000
    assert text.strip() == show(rows).strip() and "for the full cache: count" in text
    names = harder.too_hard([row for row in rows if row["decoder"] == "built"], harder.OVERVIEW)
    assert "count" in names and "ban first" in names
    assert harder.too_hard(rows, ("leak, ban first",)) == ["leak, ban first"]  # it needs the ban's obedience
    assert all(0 <= x[0] <= 1 for row in rows for key, x in row.items()
               if key in ("count", "form first", "leak, ban first"))
    built = [row for row in rows if row["decoder"] == "built"]
    assert all(("count" in row) == (row["method"] == "full") and "turn 1" in row for row in built)
    with pytest.raises(SystemExit):
        main(["--tasks", "needle"])


def test_depths_and_the_check_of_sizes():
    model, encoding = from_hf(LEARNED), tokenizer.load(TINY / "tokenizer.tiktoken")
    rows = measured(model, encoding, {}, {"full": LayerCache}, ["depth"], 2, 256)
    depths = [row for row in rows if row["table"] == "depth"]
    assert len(depths) == 2 and all(row[f"depth {d:g}"][0] == 1 for row in depths for d in harder.DEPTHS)
    with pytest.raises(ValueError, match="documents 1"):
        measured(model, encoding, {}, {}, ["count"], 1, 256)
