"""Test methods with kernels in the place of plain code: same slots, outputs and bytes."""

from functools import partial
from pathlib import Path
import sys

import pytest
import torch

from common import DEVICE, alone, end, interpreter

pytest.importorskip("triton")  # Linux only

from methods.baselines.ada_kv import AdaKV
from methods.baselines.h2o import H2O
from methods.scissorhands import Scissorhands
from methods.baselines.rounded import RoundedSlots
from nanollm import kernel_switch
from nanollm.cache import ALL, Method, PackedSlots
from nanollm.window import window_rows, window_scores

B, H, G, D = 2, 2, 2, 16
T, LATER = 33, 2  # tokens of the prompt, and after it
ROOT = Path(__file__).parents[2]


class BiasedSlots(PackedSlots):
    """Slots whose bias is each key's first number."""

    def read(self):
        return self.k, self.v, self.pos, self.k[..., 0].float()


class Uneven(Method):
    """Watch, and keep empty slots in the midst of some heads, and a bias."""

    watch = ALL
    store = BiasedSlots

    def observe(self, layer, q, p):
        layer.notes["observed"] = p.mean(2)

    def evict(self, layer):
        if layer.length == T:
            kept = torch.tensor([[3, 5, 32], [7, -1, -1]], device=DEVICE)
            layer.keep(kept.expand(B, -1, -1))


class Watched(AdaKV):
    watch = ALL


class InFewBits(AdaKV):
    store = partial(RoundedSlots, bits=8)


ONE, PACKED = "decode_attention.attend_one", "decode_attention.attend_packed"
WINDOW = dict(budget=16, window_size=8)
CASES = {
    "ada": (AdaKV, WINDOW, {"window_scores", PACKED}),
    # packed heads run in plain code if a method watches, or in few bits
    "watched": (Watched, WINDOW, {"window_scores"}),
    "few bits": (InFewBits, WINDOW, {"window_scores"}),
    "h2o": (H2O, dict(budget=16), {ONE}),
    "uneven": (Uneven, {}, {ONE}),
    "scissorhands": (Scissorhands, dict(budget=16, recent=4, history=20), {ONE}),
}


def walk(case: str):
    """Return the output of a prompt and of some later tokens, and the cache."""
    Kind, options, _ = CASES[case]
    g = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(B, H * G, T + LATER, D, generator=g)
    k, v = torch.randn(2, B, H, T + LATER, D, generator=g)
    w_o = torch.randn(24, H * G, D, generator=g)
    q, k, v, w_o = (x.to(DEVICE, torch.float16) for x in (q, k, v, w_o))

    cache = alone(Kind(**options), w_o=w_o)
    outputs = []
    for pos in torch.arange(T + LATER, device=DEVICE).split([T] + LATER * [1]):
        part = (x[:, :, pos] for x in (q, k, v))
        outputs.append(cache.attend(*part, pos[None]))
        if len(pos) == T:
            end(cache)
    return torch.cat(outputs, 2), cache


def close(x, expected):
    torch.testing.assert_close(x, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("case", CASES)
def test_kernels_do_what_the_plain_code_does(case, poisoned, monkeypatch):
    """In 16 bits: no others run in kernels. Each kernel's own test takes 32 bits, too."""
    monkeypatch.setattr(kernel_switch, "use_kernels", False)
    y, cache = walk(case)

    called = set()
    kernel_for = kernel_switch.kernel_for

    def recorded(x, *name):
        called.add(".".join(name))
        return kernel_for(x, *name)

    monkeypatch.setattr(kernel_switch, "on_gpu", lambda x: True)
    for module in [*sys.modules.values()]:
        if getattr(module, "kernel_for", None) is kernel_for:
            monkeypatch.setattr(module, "kernel_for", recorded)
    fast_y, fast = walk(case)
    assert called == CASES[case][2]
    close(fast_y, y)
    assert torch.equal(fast.pos, cache.pos)
    assert fast.bytes() == cache.bytes()

    for name in cache.slots:
        close(fast.slot(name), cache.slot(name))
    if case == "uneven":
        close(fast.notes["observed"], cache.notes["observed"])


def test_a_window_too_wide_for_a_tile_runs_in_plain_code(monkeypatch):
    monkeypatch.setattr(kernel_switch, "on_gpu", lambda x: True)
    q = torch.randn(1, 1, 1, 129, 16)
    k = torch.randn(1, 1, 140, 16)
    expected = window_rows(q, k)[..., :11].mean(3)
    assert torch.equal(window_scores(q, k), expected)


@interpreter
def test_ours_are_found_where_the_hubs_kernels_are_installed(typed, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True\n")
    files = sorted(file.stem for file in (ROOT / "kernels").glob("*.py"))
    (tmp_path / "script.py").write_text(
        f"import sys; sys.path.append('{ROOT}')\n"
        "import kernels, torch; from nanollm import kernel_switch as switch\n"
        "switch.on_gpu = lambda x: True\n"
        "x = torch.ones(1, 1, 2, 16); fast = switch.kernel_for(x, 'window_scores')\n"
        "print(kernels.theirs, fast(x[None, ..., -1:, :], x).tolist())\n"
        f"print([switch.kernel_file(file).__name__ for file in {files}])"
    )
    done = typed("python", tmp_path / "script.py")
    expected = [f"nanollm_kernels.{file}" for file in files]
    assert done.stdout == f"True [[[[0.5]]]]\n{expected}\n", done.stderr
