import os
from lab.registry import pick, calibrated
def specs(model, encoding):
    m = pick(["full", "question_gates", "question_gates_4"])
    q = calibrated(m["question_gates"], model, encoding)
    few = os.environ.get("FEW")
    return [("full", m["full"], {}, [None]), ("question_gates", m["question_gates"], q, [.125] if few else [.25, .125, .0625]),
            ("question_gates_4", m["question_gates_4"], q, [.25, .125] if few else [.25, .125, .0625])]
