"""An entropy coder: numbers that are likely take few bits (rANS, Duda, arXiv 1311.2540).

Huffman's code spends whole bits, so a number that is nearly certain still takes one. rANS spends −log₂ p. All
numbers go into one large integer, the state x. The frequencies of all numbers add up to 2^16. A number of
frequency f, whose part of 0 … 2^16 − 1 begins at c, turns x into

    ⌊x/f⌋·2^16 + c + x mod f,   and back, with r = x mod 2^16:   f·⌊x/2^16⌋ + r − c

Back, r lies in c … c + f − 1 and so names the number. If x would exceed 32 bits, its lower 16 bits go into
the file first. Here many states work side by side, so that numpy codes as many numbers at once (Giesen, arXiv
1402.3392).

A number is a code z, and it comes with a class, the spread of such codes. The frequencies are those of a
logistic distribution: like a normal one, but it allows for more outliers.
"""
from functools import cache

import numpy as np

BITS = 16      # frequencies are parts of 2^BITS
MOST = 127     # codes lie between −MOST and MOST
SPREAD = 2.0 ** (np.arange(40) / 4 - 4)  # of each class: 2^-4 … 2^5.75, in steps of a quarter of an octave


def class_of(spread: np.ndarray) -> np.ndarray:
    """Return the class of codes with a standard deviation of `spread`."""
    octave = np.log2(np.maximum(spread, 2.0 ** -9))
    return np.clip(np.round(4 * (octave + 4)), 0, len(SPREAD) - 1).astype(np.int64)


@cache
def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frequencies and beginnings (classes, codes), and the code at each of the 2^16 parts."""
    scale = SPREAD * (3 ** 0.5 / np.pi)
    border = np.arange(-MOST, MOST) + 0.5
    below = 1 / (1 + np.exp(-np.clip(border / scale[:, None], -40, 40)))
    p = np.diff(below, axis=1, prepend=0, append=1)
    f = 1 + np.floor(p * (2 ** BITS - p.shape[1])).astype(np.int64)
    f[:, MOST] += 2 ** BITS - f.sum(1)
    first = f.cumsum(1) - f
    at = np.stack([np.repeat(np.arange(f.shape[1], dtype=np.uint8), row) for row in f])
    return f.astype(np.uint64), first.astype(np.uint64), at


@cache
def centres() -> np.ndarray:
    """Return the mean of the numbers that are rounded to each code, (classes, codes).

    Small numbers are likelier than large ones, so it lies between the code and 0. It is at most 0.4 away from
    the code, so that it is rounded to the same code again.
    """
    scale = SPREAD[:, None] * (3 ** 0.5 / np.pi)
    t = (np.arange(-MOST, 1) - 0.5) / scale
    below = 1 / (1 + np.exp(-t.clip(-300)))
    mean = scale * np.diff(t * below - np.logaddexp(0, t)) / np.diff(below).clip(1e-300)
    code = np.arange(-MOST, 0)
    mean = np.clip(mean, code, code + 0.4)
    return np.concatenate((mean, np.zeros_like(scale), -mean[:, ::-1]), 1)


def lanes(n: int) -> int:
    """Return how many states write n codes: each adds 2 bytes to a file, and few of them take long."""
    return 16 * (1 + n // 8192)


def laid_out(x: np.ndarray) -> np.ndarray:
    """Return numbers (n,) as rows of `lanes`, filled up with 0: class 0 nearly gives the code 0 away."""
    return np.pad(x, (0, -len(x) % lanes(len(x)))).reshape(-1, lanes(len(x)))


def encode(code: np.ndarray, kind: np.ndarray) -> bytes:
    """Return the bytes of codes (n,), whole numbers between −MOST and MOST, of classes `kind` (n,)."""
    f, first, _ = tables()
    code, kind = laid_out(code) + MOST, laid_out(kind)
    x, words = np.full(code.shape[1], 2 ** 16, np.uint64), []
    for row in range(len(code) - 1, -1, -1):  # backwards, because the last number in is the first out
        f_row, first_row = f[kind[row], code[row]], first[kind[row], code[row]]
        full = x >= f_row << np.uint64(32 - BITS)
        words.append((x[full] & np.uint64(2 ** 16 - 1)).astype("<u2"))
        x[full] >>= np.uint64(16)
        x = (x // f_row << np.uint64(BITS)) + first_row + x % f_row
    return b"".join([x.astype("<u4").tobytes(), *(part.tobytes() for part in reversed(words))])


def decode(data: bytes, kind: np.ndarray) -> np.ndarray:
    """Return the codes (n,) of classes `kind` (n,) from the bytes of `encode`."""
    f, first, at = tables()
    n, kind, taken = len(kind), laid_out(kind), 0
    x = np.frombuffer(data, "<u4", kind.shape[1]).astype(np.uint64)
    words = np.frombuffer(data, "<u2", offset=4 * len(x)).astype(np.uint64)
    code = np.empty(kind.shape, np.int64)
    for row, of in enumerate(kind):
        part = x & np.uint64(2 ** BITS - 1)
        code[row] = z = at[of, part]
        x = f[of, z] * (x >> np.uint64(BITS)) + part - first[of, z]
        small, = np.nonzero(x < 2 ** 16)
        x[small] = x[small] << np.uint64(16) | words[taken:taken + len(small)]
        taken += len(small)
    return code.ravel()[:n] - MOST


variants = {}  # not a method: kvzip_gain_coded writes its files with it
