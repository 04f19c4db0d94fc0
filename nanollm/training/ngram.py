"""Bits per byte of n-gram models on the held-out text: the baseline of the training report."""
from collections import Counter
import math

import numpy as np

from nanollm.measure.evaluate import count_bytes, text_windows
from nanollm.measure.tasks import Tasks


DISCOUNT = 0.75  # d


def ngram_bits(training: Tasks, held_out: Tasks, windows: int, T: int = 512) -> dict[str, float]:
    """Return the bits per byte of 2-, 3- and 4-grams, on the decoder's measuring windows.

    They are interpolated by absolute discounting (Ney et al. 1994):
    p_n(t | context) = max(count − d, 0)/total + d · kinds/total · p_{n−1}(t | shorter context)
    """
    stream, rows, V = training.stream, text_windows(held_out, windows, T), training.encoding.n_vocab
    counts, totals, kinds = ([Counter() for _ in range(4)] for _ in range(3))
    for n in range(4):
        # count only contexts that occur in the windows
        needed = np.isin(contexts(stream, n, V), contexts(rows.numpy(), n, V))
        counts[n].update(zip(*(stream[i:len(stream) - n + i][needed].tolist() for i in range(n + 1))))
        for gram, times in counts[n].items():
            totals[n][gram[:-1]] += times
            kinds[n][gram[:-1]] += 1

    def p(n: int, context: list[int], token: int) -> float:
        if n < 0:
            return 1 / V
        key = tuple(context[len(context) - n:])
        if key not in totals[n]:
            return p(n - 1, context, token)
        shorter = DISCOUNT * kinds[n][key] * p(n - 1, context, token)
        return (max(counts[n][*key, token] - DISCOUNT, 0) + shorter) / totals[n][key]

    bits = [0.0, 0.0, 0.0]
    for row in rows.tolist():
        for i in range(1, T):
            for n in (1, 2, 3):
                bits[n - 1] -= math.log2(p(min(n, i), row[max(0, i - n):i], row[i]))
    return {f"{n + 2}-gram": b / count_bytes(held_out, rows) for n, b in enumerate(bits)}


def contexts(tokens: np.ndarray, n: int, V: int) -> np.ndarray:
    """Return the n tokens before each of tokens (..., T) as a number in base V, (..., T − n)."""
    numbers = np.zeros_like(tokens[..., n:])
    for i in range(n):
        numbers += tokens[..., i:tokens.shape[-1] - n + i] * V ** i
    return numbers
