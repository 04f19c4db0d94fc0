"""A cache from a file answers to the last bit as the saved one, and is refused where it does not fit."""
import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch

from common import ENCODING, tasks
from nanollm import LEARNED, TINY
from nanollm.__main__ import main
from nanollm.cache import make_cache
from nanollm.commands.demo import PAGE
from nanollm.commands.registry import given, pick
from nanollm.generate import end_prompt, prefill, tell_chunk_ends
from nanollm.hf.checkpoint import from_hf
from nanollm.saved import header, load, save
from nanollm.tokenizer import boundaries

CALIBRATED = "duo_attention", "duo_attention_kvzip", "kvzip_fast"  # their options take seconds
METHODS = {name: Method for name, Method in pick([]).items() if name not in CALIBRATED}
REFUSED = {"cam": "generator", "random": "generator", "random_ends": "generator", "kv_reviver": "sketch",
           "kv_reviver_mean": "sketch", "kv_reviver_shrunk": "sketch"}


@pytest.fixture(scope="module")
def model():
    return from_hf(TINY)


@torch.no_grad()
def read(model, Method, B=2, T=150, **options):
    """Return caches after a prompt, and the tokens that follow it."""
    tokens = torch.from_numpy(tasks("test").batch("plain", 0, B, T + 30).tokens)
    caches = make_cache(model, Method, **given(Method, budget=40, window_size=8) | options)
    tell_chunk_ends(caches, boundaries(ENCODING, 2048)[tokens[:, :T]])
    prefill(model, tokens[:, :T], caches, 64)
    end_prompt(model, tokens[:, :T], caches)
    return caches, tokens[:, T:]


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_a_loaded_cache_answers_to_the_last_bit_as_the_saved_one(model, name, tmp_path):
    caches, after = read(model, METHODS[name])
    file = tmp_path / "page.cache"
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"cannot be saved: its {REFUSED[name]} is a .* only appends"):
            save(caches, file)
        assert not file.exists()
        return
    save(caches, file, method=name)
    fresh = make_cache(model, METHODS[name], **header(file)["options"])
    load(file, fresh)
    assert header(file)["method"] == name
    for part in (*after[:, :12].split(1, 1), after[:, 12:20], *after[:, 20:].split(1, 1)):
        assert torch.equal(model(part, caches), model(part, fresh))
    assert [cache.bytes() for cache in fresh] == [cache.bytes() for cache in caches]


@torch.no_grad()
def test_a_file_is_refused_that_is_damaged_or_of_another_decoder(model, tmp_path):
    caches, _ = read(model, METHODS["snap_kv"])
    file = tmp_path / "page.cache"
    save(caches, file)
    other = make_cache(from_hf(LEARNED), METHODS["snap_kv"], **header(file)["options"])
    with pytest.raises(ValueError, match="was written by another decoder"):
        load(file, other)

    with safe_open(file, "pt") as opened:
        head = json.loads(opened.metadata()["cache"])
    tensors = load_file(file)
    save_file(tensors, tmp_path / "later", metadata=dict(cache=json.dumps(head | dict(version=2))))
    save_file(tensors, tmp_path / "weights")
    (tmp_path / "cut").write_bytes(file.read_bytes()[:500])
    for name, message in (("later", "has version 2; this program reads version 1"),
                          ("weights", "is not a cache"), ("cut", "is not a cache")):
        with pytest.raises(ValueError, match=message):
            header(tmp_path / name)


def test_a_prompt_that_has_not_ended_is_not_saved(model, tmp_path):
    caches = make_cache(model)
    prefill(model, torch.arange(20)[None], caches)
    with pytest.raises(ValueError, match="the prompt has not ended"):
        save(caches, tmp_path / "page.cache")


@pytest.mark.parametrize("folder", [TINY, LEARNED])
def test_a_page_is_compressed_once_and_asked_later(folder, tmp_path, capsys):
    page, file = tmp_path / "page.txt", tmp_path / "page.cache"
    page.write_text(PAGE)
    main(["compress", "--file", str(page), "--out", str(file), "--model", str(folder), "--keep", "25"])
    said = capsys.readouterr().out
    assert f"{file.stat().st_size:,} bytes" in said and "tokens read and compressed" in said
    page.unlink()
    main(["ask", str(file), "The code of table is", " The code of star is ", "--model", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   [")[0] for line in lines] == ["The code of table is ▸ 2356.",
                                                         "The code of star is ▸ 6098."]


@pytest.mark.parametrize("words, message", [
    ("compress --file PAGE --out page.cache --keep 0", "--keep is 0 %"),
    ("compress --file PAGE --out page.cache --method all", "name one method"),
    ("compress --file PAGE --out page.cache --method quantized_2 --keep 25", "quantized_2 has no budget"),
    ("compress --file PAGE --out PAGE", "holds something else than the cache"),
    ("compress --file PAGE --out page.cache --method random", "random|RandomEviction cannot be saved"),
    ("ask PAGE question", "is not a cache that was saved here"),
    ("ask nowhere question", "nowhere")])
def test_bad_input_is_one_line_and_nothing_is_written(words, message, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.txt"
    page.write_text(PAGE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([str(page) if word == "PAGE" else word for word in words.split()])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message.split("|")[0] in error or message.split("|")[-1] in error
    assert [*tmp_path.iterdir()] == [page] and page.read_text() == PAGE
