import glob, os
from safetensors.torch import load_file
from lab.registry import pick, calibrated
def specs(model, encoding):
    m = pick(["full", "kvzip", "kvzip_fast", "duo_attention"])
    ks = [.25, .125, .0625]
    out = [("full", m["full"], {}, [None]), ("kvzip", m["kvzip"], {}, ks), ("duo", m["duo_attention"], calibrated(m["duo_attention"], model, encoding), ks),
           ("shipped", m["kvzip_fast"], calibrated(m["kvzip_fast"], model, encoding), ks)]
    for f in sorted(glob.glob("lab/once/*.safetensors")):
        out.append((os.path.basename(f)[:-12], m["kvzip_fast"], load_file(f), ks))
    return out
