from safetensors.torch import load_file
from lab.registry import pick
def specs(model, encoding):
    m = pick(["full", "kvzip_fast"])["kvzip_fast"]
    return [(n, m, load_file(f"lab/once/{n}.safetensors"), [.25, .125, .0625]) for n in ("self_16", "self_4")]
