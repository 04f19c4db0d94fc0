"""The smallest share of a 16-bit cache: few bits, few entries, both."""
from lab.registry import calibrated, pick
def specs(model, encoding):
    names = {"full": [None], "quantized_4": [None], "quantized_k4v2": [None], "quantized_3": [None], "quantized_2": [None],
             "kvzip_fast": [.5, .25, .125], "kvzip_fast_4": [.5, .375, .25, .125], "kvzip_fast_k4v2": [.5, .375, .25, .125],
             "head_budgets": [.25], "kvzip_4": [.25]}
    return [(name, M, calibrated(M, model, encoding), names[name]) for name, M in pick([*names]).items()]
