"""Long texts: one method of each kind."""
from lab.registry import calibrated, pick


def specs(model, encoding):
    names = dict.fromkeys(("snap_kv", "worst_query", "duo_attention", "head_budgets", "kvzip_fast"), [.25, .125])
    names = {"full": [None], "quantized_4": [None], "quantized_k4v2": [None], "quantized_2": [None]} | names
    names |= {"kvzip_fast_4": [.5, .25, .125], "kvzip": [.25]}
    return [(name, M, calibrated(M, model, encoding), names[name]) for name, M in pick([*names]).items()]
