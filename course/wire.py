"""What goes between the grader and a submission's process: plain data and tensors, nothing that can run.

JSON, with tensors beside it in safetensors. Unpickling what a stranger sends would run the stranger's code.
"""
import json
import struct

import torch
from safetensors.torch import load, save


def packed(x) -> bytes:
    """Numbers, strings, None, tensors, lists and string-keyed dicts of these. TypeError for anything else."""
    tensors = {}

    def plain(x):
        if isinstance(x, torch.Tensor):
            tensors[str(len(tensors))] = x.detach().clone().contiguous()
            return {"tensor": len(tensors) - 1}
        if isinstance(x, dict):
            return {"dict": {key: plain(value) for key, value in x.items()}}
        if isinstance(x, (list, tuple)):
            return [plain(each) for each in x]
        return x

    text = json.dumps(plain(x)).encode()
    return struct.pack("<Q", len(text)) + text + save(tensors)


def unpacked(data: bytes):
    size, = struct.unpack("<Q", data[:8])
    tensors = load(data[8 + size:])

    def whole(x):
        if isinstance(x, dict):
            return tensors[str(x["tensor"])] if "tensor" in x else {k: whole(v) for k, v in x["dict"].items()}
        return [whole(each) for each in x] if isinstance(x, list) else x

    return whole(json.loads(data[8:8 + size]))
