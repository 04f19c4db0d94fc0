from functools import partial
from dataclasses import dataclass
from safetensors.torch import load_file
from lab.registry import pick, calibrated
from methods.baselines.quantized import Quantized
from methods.baselines.kvzip_fast import FastKVzip
from methods.ours.kvzip_4 import Rounded
@dataclass(eq=False)
class RF(Rounded, FastKVzip): pass
def specs(model, encoding):
    m = pick(["full", "kvzip_fast"])
    g = calibrated(m["kvzip_fast"], model, encoding)
    news = load_file("lab/once/news_16.safetensors")
    out = [("full", m["full"], {}, [None])]
    for k, v in (4, 4), (3, 3), (2, 2), (4, 2), (3, 2), (2, 4), (4, 3):
        out.append((f"k{k}v{v}", Quantized, dict(bits=k, value_bits=v, residual_length=16), [None]))
    for gs in 8, 16, 64: out.append((f"k2v2 group {gs}", Quantized, dict(bits=2, group_size=gs, residual_length=16), [None]))
    for gs in 16, 64: out.append((f"k4v4 group {gs}", Quantized, dict(bits=4, group_size=gs, residual_length=16), [None]))
    for k, v in (4, 4), (3, 3), (4, 2), (4, 3): out.append((f"fast k{k}v{v}", RF, dict(bits=k, value_bits=v) | g, [.5, .375, .25, .125]))
    out.append(("fast news k4v4", RF, dict(bits=4) | news, [.5, .375, .25, .125]))
    out.append(("fast", FastKVzip, g, [.5, .375]))
    out.append(("fast news", FastKVzip, news, [.5, .375]))
    return out
