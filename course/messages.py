"""Messages between the grader and a submission's process: plain data and tensors, never code.

A message is one safetensors file that holds JSON and its tensors. Pickle would be unsafe: unpickling a
message of the submission could run its code in the grader.
"""
import json

import torch
from safetensors.torch import load, save


def packed(x) -> bytes:
    """Return the bytes of x; TypeError if it contains anything but plain data and tensors.

    Allowed are numbers, strings, None, tensors, lists of these, and dicts of these with strings as keys.
    """
    tensors = {}

    def plain(x):
        if isinstance(x, torch.Tensor):
            tensors[str(len(tensors))] = x.detach().clone().contiguous()
            return {"tensor": len(tensors) - 1}
        if isinstance(x, dict):
            return {"dict": {key: plain(value) for key, value in x.items()}}
        return [plain(each) for each in x] if isinstance(x, (list, tuple)) else x

    tensors["json"] = torch.frombuffer(bytearray(json.dumps(plain(x)).encode()), dtype=torch.uint8)
    return save(tensors)


def unpacked(data: bytes):
    """Return what `packed` made the bytes of."""
    tensors = load(data)

    def whole(x):
        if isinstance(x, dict):
            return tensors[str(x["tensor"])] if "tensor" in x else {k: whole(v) for k, v in x["dict"].items()}
        return [whole(each) for each in x] if isinstance(x, list) else x

    return whole(json.loads(tensors["json"].numpy().tobytes()))
