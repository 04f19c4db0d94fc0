"""The record: sizes are those of files, answers come from files alone, and cheating brings nothing."""
from contextlib import closing
import json
from types import SimpleNamespace
import zlib

import numpy as np
import pytest
import torch

from common import ENCODING
from experiments.record import command
from experiments.record.command import (ENOUGH, Answered, Pair, by_size, hopeless, judged, main, page,
                                        seed_of, short_by, sources, texts, verdict)
from experiments.record.worker import ROOT, Entrant, as_bytes
from nanollm import LEARNED, TINY, saved
from nanollm.measure.evaluate import answers

TOKEN = 6 * 3 * 32 * 2 * 2  # bytes in 16 bits: layers, heads, numbers, key and value
FULL_CODE = """
from dataclasses import dataclass
from nanollm.cache import LayerCache
@dataclass(eq=False)
class Mine(LayerCache):
    pass
variants = {"mine": Mine}
"""
# Every cheat answers everything if it is not stopped: it keeps the whole cache or the text somewhere.
CHEATS = {
    "stores the text": ("""
import numpy as np, torch
from nanollm.generate import prefill
def to_bytes(caches):
    return TEXT
def from_bytes(data, caches):
    text = torch.tensor([np.frombuffer(data, "<i4").tolist()])
    prefill(caches[0].model, text, caches)
    for cache in caches:
        cache.end_prefill()
""", "the decoder was fed"),
    "runs the decoder itself": ("""
import numpy as np, torch
from nanollm.model import rope
def to_bytes(caches):
    return TEXT
def from_bytes(data, caches):
    model, text = caches[0].model, torch.tensor([np.frombuffer(data, "<i4").tolist()])
    x, pos = torch.nn.functional.embedding(text, model.embed.weight), torch.arange(text.shape[1])[None]
    angles = rope(model.freq, pos)
    for block, cache in zip(model.blocks, caches):
        x = block(x, angles, pos, cache)
    for cache in caches:
        cache.end_prefill()
""", "the decoder was fed"),
    "writes a side file": ("""
from nanollm import saved
def to_bytes(caches):
    open(SIDE, "wb").write(saved.to_bytes(caches))
    return b"x"
def from_bytes(data, caches):
    saved.from_bytes(open(SIDE, "rb").read(), caches)
""", "PermissionError"),
    "reads the questions": ("""
import gc, sys
from nanollm.measure.tasks import Batch
def to_bytes(caches):
    if not any(isinstance(x, Batch) for x in gc.get_objects()):
        raise ValueError("no question is here")
    return b"x"
""", "no question is here"),
}


@pytest.fixture(scope="module")
def batch():
    return texts(ENCODING, 7, 1)["turns"][0]


@pytest.fixture(scope="module")
def pair():
    with closing(Pair(TINY, None, None)) as made:
        yield made


def of_code(pair, batch, code):
    """What comes of a text if the method is this code."""
    pair.code = code.encode()
    return pair.answered(batch)


@pytest.mark.parametrize("folder, name, keep", [(LEARNED, "kvzip_4", 0.125), (TINY, "full", None)])
@torch.no_grad()
def test_the_processes_read_and_answer_as_one_would(batch, folder, name, keep):
    with closing(Pair(folder, name, keep)) as pair:
        found = pair.answered(batch)
    entrant = Entrant(folder, name, keep)
    tokens = torch.from_numpy(batch.tokens)
    context = tokens[:, :batch.question]
    file = entrant.read(context)
    assert found.size == len(file) and not found.error
    assert found.readings == (2 if name == "kvzip_4" else 1)
    caches = entrant.caches(batch.question)
    saved.from_bytes(zlib.decompress(file), caches)
    said = answers(entrant.model, tokens, batch.answers, batch.question, caches)
    right = [(x == tokens[:, a]).all().item() for x, a in zip(said, batch.answers)]
    assert found.right == np.mean(right) and (name != "full" or found.right == 1)
    assert 0 < found.first and 0 < found.step < found.reading


def code_for(batch, cheat, side):
    text = as_bytes(batch.tokens[0, :batch.question])
    return FULL_CODE + f"TEXT, SIDE = {text!r}, {str(side)!r}\n" + CHEATS[cheat][0]


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_brings_nothing(pair, batch, tmp_path, cheat):
    found = of_code(pair, batch, code_for(batch, cheat, tmp_path / "side"))
    assert found.right == 0 and CHEATS[cheat][1] in found.error
    assert not (tmp_path / "side").exists()


def test_a_lie_about_bytes_does_not_change_the_size(pair, batch):
    lies = FULL_CODE + "Mine.bytes = Mine.stored = lambda self: (0, 0)\n"
    honest, lying = of_code(pair, batch, FULL_CODE), of_code(pair, batch, lies)
    assert lying.right == honest.right == 1
    assert lying.size == pytest.approx(honest.size, rel=0.01) and honest.size > 0.8 * 448 * TOKEN


def test_a_process_that_dies_or_prints_is_one_text_without_answer(pair, batch):
    dies = FULL_CODE + "import os\ndef to_bytes(caches):\n    os._exit(1)\n"
    assert of_code(pair, batch, dies).error
    wrong = FULL_CODE + "def from_bytes(data, caches):\n    raise KeyError('7')\n"
    assert "KeyError" in of_code(pair, batch, wrong).error


def test_the_texts_depend_on_the_file_and_the_salt():
    seeds = {seed_of(file, salt) for file in (b"a", b"b") for salt in ("1", "2")}
    assert len(seeds) == 4 and seed_of(b"a", "1") == seed_of(b"a", "1")
    imported = sources(b"import methods.ours.rans\nfrom methods.ours import kvzip_gain\nimport torch")
    for name in "ours/rans", "ours/kvzip_gain", "kvzip", "turbo_quant", "quantized":  # the last three in turn
        assert imported.count((ROOT / "methods" / f"{name}.py").read_bytes()) == 1
    one, two = (texts(ENCODING, seed, 3)["needle"] for seed in sorted(seeds)[:2])
    assert len(one) == 3 and len(one[0].tokens) == 1 and (one[0].tokens != two[0].tokens).any()
    assert (one[0].tokens != one[1].tokens).any()


def many(*shares):
    return [Answered(x, 1000, 1, 2.0, 0.1, 0.01, "") for x in shares]


def test_a_row_counts_if_its_answers_surely_suffice():
    full = many(*[1.0] * 250, *[0.0] * 6)
    share, error, p = short_by(full, full)
    assert share == 1 and p < 0.01 and not hopeless(full, full)
    lost = many(*[1.0] * 238, *[0.0] * 18)  # 95.2 % kept: perhaps, not surely
    share, error, p = short_by(lost, full)
    assert share == pytest.approx(238 / 250) and 0.01 < p < 0.6
    beyond = np.array([a.right - ENOUGH * b.right for a, b in zip(lost, full)])
    assert error == pytest.approx(beyond.std(ddof=1) / 16 / np.mean([x.right for x in full]))
    assert hopeless(many(*[1.0] * 20, *[0.0] * 12), full[:32])

    asked = {task: texts(ENCODING, 1, 2)[task] * 128 for task in ("needle", "pairs")}
    base = dict(needle=full, pairs=full)
    row = judged(TINY, dict(needle=full, pairs=full), base, asked)
    assert verdict(row, 256) == "yes" and row["reading"] == row["first"] == 1
    n = asked["needle"][0].question, asked["pairs"][0].question
    assert row["size"] == pytest.approx(np.mean([1000 / (x * TOKEN) for x in n]))
    assert "no: pairs, p = " in verdict(judged(TINY, dict(needle=full, pairs=lost), base, asked), 256)
    slow = [x._replace(first=0.3) for x in full]
    assert "3.0 times" in verdict(judged(TINY, dict(needle=slow, pairs=slow), base, asked), 256)
    assert verdict(row | dict(texts=32), 256) != "yes"


def test_the_command_prints_stores_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "STORED", tmp_path / "records.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "RECORDS.md")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "TASKS", ("needle",))
    monkeypatch.setattr(command, "SHIPPED", dict(built=TINY))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "experiments" / "record").mkdir(parents=True)
    (tmp_path / "experiments" / "record" / "head.md").write_text("# Records\n")
    monkeypatch.setattr(command.secrets, "token_hex", lambda n: "s")
    argv = ["full", "--store", "--documents"]
    with pytest.raises(ValueError, match="--store needs 256 texts"):
        main([*argv, "3"])
    monkeypatch.setattr(command, "LEAST", 3)
    monkeypatch.setattr(command.shell, "cores", lambda: 1)
    main([*argv, "3"])
    (row,) = json.loads((tmp_path / "records.json").read_text())
    command.store([row], 3)  # the same entry again replaces the first
    (row,) = json.loads((tmp_path / "records.json").read_text())
    assert row["method"] == "full" and row["readings"] == 1 and row["kept"] == {"needle": [1.0, 0.0]}
    assert 0.8 < row["size"] < 1.1 and "yes" in capsys.readouterr().out
    text = (tmp_path / "RECORDS.md").read_text()
    assert text.count("`python -m nanollm record full --salt s`") == 2  # in both classes
    assert (tmp_path / "notebooks" / "records.png").stat().st_size > 5_000
    smaller = row | dict(method="b", size=row["size"] / 2, readings=2)
    assert [same[0]["method"] for same in by_size([row, smaller])] == ["b", "full"]
    assert page([row, smaller]).count("`b`") == 1
    for wrong, message in ((["--keep", "0", "full"], "--keep is 0 %"), ([], "name a method"),
                           (["full", "--store", "--salt", "s"], "leave --salt out")):
        with pytest.raises(ValueError, match=message):
            main(wrong)
    for code, message in (("x = 1\n" * 151, "151 lines"), ("x = 1\nx =\n", "line 2: invalid syntax")):
        (tmp_path / "mine.py").write_text(code)
        with pytest.raises(ValueError, match=message):
            main(["--file", str(tmp_path / "mine.py")])


def test_the_commands_of_the_records_draw_the_same_texts():
    """If this fails, a method's file has changed since its race: take its row out, or race it anew."""
    rows = command.stored()
    files = {name: content for name, content, *_ in command.entrants(
        SimpleNamespace(methods=[row["method"] for row in rows], keep=None, file=None))}
    assert rows and all(seed_of(files[row["method"]], row["salt"]) == row["seed"] for row in rows)
