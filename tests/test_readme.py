"""The README's claims table and the tests name the same claims, and its commands exist."""
from pathlib import Path
import re

ROOT = Path(__file__).parent.parent


def test_every_claim_in_the_readme_has_a_test_and_every_tested_claim_a_row():
    rows = re.findall(r"^\| ([STPCR]\d+) \|", (ROOT / "README.md").read_text(), re.M)
    marked = {claim for file in (ROOT / "tests").glob("*.py")
              for claim in re.findall(r'mark\.claim\("([STPCR]\d+)"\)', file.read_text())}
    assert rows and len(rows) == len(set(rows))
    assert set(rows) == marked


def test_verdicts_are_of_the_four_kinds_and_carry_a_number():
    table = re.findall(r"^\| [STPCR]\d+ \|.*$", (ROOT / "README.md").read_text(), re.M)
    for row in table:
        verdict = row.split("|")[3].strip()
        assert verdict in ("holds", "holds after a fix", "does not hold", "not testable here"), row
        assert re.search(r"\d", row.split("|")[4]), row


def test_files_that_the_readme_names_exist():
    names = re.findall(r"`((?:nanollm|methods|notebooks|tests)/[\w./]+)`", (ROOT / "README.md").read_text())
    assert len(names) > 5
    for name in names:
        assert (ROOT / name).exists(), name


def test_the_method_in_the_readme_evicts():
    import torch
    from nanollm.cache import finish_prompt, make_cache
    from nanollm.model import Config, Decoder

    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(code, names := {})
    (Method,) = names["variants"].values()
    model = Decoder(Config(vocab_size=50, max_len=64, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=32))
    caches = make_cache(model, Method, budget=5)
    with torch.inference_mode():
        model(torch.arange(20)[None], caches)
        longest = caches[1].k.norm(dim=-1).topk(5).indices.sort().values
        finish_prompt(caches)
    assert (caches[1].pos == longest).all()


def test_the_use_of_a_method_in_the_readme_writes_on(capsys):
    (code,) = re.findall(r"```\n(from nanollm .*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(code, names := {})
    assert all(54 < cache.length - 20 <= 64 for cache in names["caches"])  # a chunk has ten tokens; 20 are new
    assert " import system" in capsys.readouterr().out


def test_the_use_of_a_kernel_in_the_readme_is_attention(capsys):
    import pytest

    pytest.importorskip("triton")  # Linux only
    (code,) = re.findall(r"```\n(from kernels.decode_attention .*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(code, names := {})
    assert (names["y"] - names["F"].scaled_dot_product_attention(*(names[name] for name in "qkv"))).abs().max() < 1e-5
    assert capsys.readouterr().out.count("4.0") == 2


def test_the_use_of_tensor_attention_in_the_readme_writes_on(capsys):
    (code,) = re.findall(r"```\n(from methods.sub_gen .*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(code, {})
    exact, estimate = (int(line.rsplit("(")[-1].split(",")[0]) for line in capsys.readouterr().out.splitlines())
    assert estimate < exact / 2
