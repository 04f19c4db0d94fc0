"""Functions that the tests of `sketch` call. They run in the submission's process and hold no answers."""
import torch

from methods import kv_reviver
from methods.ours import kv_reviver_shrunk
from methods.theory import sketch_error


def made(x, rows, bucket_by=None, sign_by=None, kind=kv_reviver.Sketch):
    """Return a sketch of `rows` rows with the slots x (B, H, r·b, 2D) and hashes of coefficients (4, r)."""
    sketch = kind(x[..., :x.shape[-1] // 2], rows, x.shape[2] // rows, seed=0)
    sketch.x = x
    if bucket_by is not None:
        sketch.bucket_by = bucket_by
    if sign_by is not None:
        sketch.sign_by = sign_by
    return sketch


def kind(signed_keys):
    return kv_reviver_shrunk.SignedSketch if signed_keys else kv_reviver.Sketch


def number(J, coefficients, tokens=0):
    rows = coefficients.shape[1]
    sketch = made(coefficients.new_zeros(*J.shape[:2], rows, 2).float(), rows)
    sketch.tokens = tokens
    return sketch.number(J, coefficients)


def bucket(J, bucket_by, width):
    rows = bucket_by.shape[1]
    return made(bucket_by.new_zeros(*J.shape[:2], rows * width, 2).float(), rows, bucket_by).bucket(J)


def insert(x, rows, bucket_by, sign_by, J, k, v, times=None, signed_keys=False):
    """Return the slots after one insertion into x."""
    sketch = made(x, rows, bucket_by, sign_by, kind(signed_keys))
    sketch.insert(J, k, v) if times is None else sketch.insert(J, k, v, times)
    return sketch.x


def median(x, rows, bucket_by, sign_by, J, signed_keys=False):
    """Read from x while the sketch's own slots differ."""
    sketch = made(x, rows, bucket_by, sign_by, kind(signed_keys))
    sketch.x = x + 1000
    return torch.stack([*sketch.median(x, J)]).view(*J.shape, -1)


def variance(a, width, rows):
    return sketch_error.collision_variance(a, width, rows)


def load(budget, vague):
    return sketch_error.load(budget, vague)


def means(x, rows, bucket_by, J):
    return made(x, rows, bucket_by, kind=kv_reviver_shrunk.MeanSketch).means(J)


def centred(x, rows, sum, bucket, sign):
    sketch = made(x, rows, kind=kv_reviver_shrunk.ShrunkSketch)
    sketch.sum = sum
    return list(sketch.centred(bucket, sign))
