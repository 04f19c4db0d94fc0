"""What a cache costs: accuracy, perplexity, KL, L1 of attention outputs, bytes and speed.

Retrieval is measured in two settings. `aware`: the question is part of the prompt that gets compressed.
`agnostic`: the context is compressed before the question arrives. In both the prompt's last token is fed after
the compression, or else the full cache would answer the first token. After the prompt, tokens come one at a
time, as in decoding.
"""
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
import math
import time

import numpy as np
import torch
from torch import Tensor
import torch.nn.functional as F

from nanollm.cache import NEVER, LayerCache, bytes_in_16_bits, cache_bytes, copied, end_prefill, make_cache
from nanollm.check import check_budget, fits, whole
from nanollm.generate import check_prompt, end_prompt, tell_chunk_ends
from nanollm.measure.replay import Recorder, Recording, feed, record, replay
from nanollm.measure.tasks import Batch, Tasks
from nanollm.tokenizer import opening

# From the number of tokens that a budget is a share of, and the prompt (B, T), to fresh caches. The prompt
# may go on after those tokens: with the question, in the aware setting.
Make = Callable[[int, Tensor], list[LayerCache]]


# ---- caches that are measured ---

def budget_for(keep_ratio: float, tokens: int) -> int:
    """Return the budget, in slots per key/value head, that is a fraction of a prompt."""
    return round(keep_ratio * tokens)


def maker(model, Method, keep_ratio: float | None, ends: Tensor | None = None, **options) -> Make:
    """Return what makes caches whose budget is a fraction of the prompt; None for a method without a budget.

    ends (V,) of bool are the tokens that end a semantic chunk (`tokenizer.boundaries`), for methods that go
    by them.
    """
    if keep_ratio is not None and (not fits(keep_ratio, float) or not 0 < keep_ratio <= 1):
        raise ValueError(f"keep_ratio {keep_ratio} of the prompt must lie above 0 and be at most 1")

    def make(tokens: int, prompt: Tensor | None = None) -> list[LayerCache]:
        budget = {} if keep_ratio is None else dict(budget=budget_for(keep_ratio, tokens))
        if budget:
            check_budget(budget["budget"], 1, "one slot")
        caches = make_cache(model, Method, **budget, **options)
        if ends is not None and prompt is not None:
            tell_chunk_ends(caches, ends.to(prompt.device)[prompt])
        return caches
    return make


def reading_within(make: Make) -> Make:
    """Return what makes caches that evict while they read: their prompt is over before it begins."""
    def ready(tokens: int, prompt: Tensor | None = None) -> list[LayerCache]:
        caches = make(tokens, prompt)
        end_prefill(caches)
        return caches
    return ready


# ---- retrieval ---

def prompt_and_question(model, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens (B, T), those before the question, and those of the question that are fed before the
    compression.
    """
    tokens = torch.from_numpy(batch.tokens).to(model.embed.weight.device)
    check_prompt(model, tokens)
    if not batch.answers:
        raise ValueError("these documents ask nothing; take a task with questions")
    return tokens, tokens[:, :batch.question], tokens[:, batch.question:batch.answers[0].start - 1]


@torch.no_grad()
def retrieve(model, batch: Batch, make: Make, recordings: list[list[Recording]] | None = None,
             chunk_size: int = 64) -> dict[str, Tensor]:
    """Share of each document's questions answered exactly by greedy decoding, "aware" and "agnostic", (B,) each.

    With several questions, `aware` sees the first; the others come later, each after the answer that was
    given. `recordings` are those of `prompt_and_question`'s two parts, if there are any; without, the decoder
    reads `chunk_size` tokens at a time.
    """
    tokens, *parts = prompt_and_question(model, batch)
    last = batch.answers[0].start - 1  # the prompt's last token is fed after the compression

    def read(part: int, caches: list[LayerCache]):
        if recordings is None:
            feed(model, parts[part], caches, chunk_size)
        else:
            replay(recordings[:part + 1], caches)

    agnostic = make(batch.question, tokens[:, :last])
    read(0, agnostic)
    aware = copied(agnostic)
    if last > batch.question:  # else the question is one token, which is fed after the compression
        read(1, aware)
    return {"aware": answer(model, tokens, batch.answers, last, aware),
            "agnostic": answer(model, tokens, batch.answers, batch.question, agnostic)}


def answer(model, tokens: Tensor, spans: list[slice], fed: int, caches: list[LayerCache]) -> Tensor:
    """End the prompt of `fed` tokens, and `ask`."""
    end_prompt(model, tokens[:, :fed], caches)
    return ask(model, tokens, spans, fed, caches)


def ask(model, tokens: Tensor, spans: list[slice], fed: int, caches: list[LayerCache]) -> Tensor:
    """Feed the tokens (B, T) after the first `fed` one by one, answer each span; share of right ones (B,)."""
    right = []
    for span in spans:
        for token in tokens[:, fed:span.start].unbind(1):
            logits = model(token[:, None], caches)
        guesses = []
        for _ in range(span.start, span.stop):
            guesses.append(logits[:, -1].argmax(-1))
            logits = model(guesses[-1][:, None], caches)
        right.append((torch.stack(guesses, 1) == tokens[:, span]).all(1))
        fed = span.stop
    return torch.stack(right).float().mean(0)


@contextmanager
def head_outputs(model):
    """Record what every layer's heads hand to W_O: yields a list per layer of tensors (B, T, H·G·D)."""
    record = [[] for _ in model.blocks]
    hooks = [block.attention.o.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
             for block, seen in zip(model.blocks, record)]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Reference:
    """The full cache on a text whose last `new` tokens are its continuation."""
    tokens: Tensor                 # (B, T)
    new: int
    log_p: Tensor                  # (B, new, V): of each token of the continuation, before it comes
    recording: list[Recording]     # of the prompt, one a layer
    continuation: list[Recording]  # of what follows the prompt
    answers: list[Tensor]          # the full cache's outputs over it, (B, H·G, new, D)

    @property
    def prompt(self) -> Tensor:
        """(B, T − new − 1): the token before the continuation is fed after the compression."""
        return self.tokens[:, :-self.new - 1]


@torch.no_grad()
def reference(model, tokens: Tensor, new: int) -> Reference:
    """What the full cache says about the last `new` of tokens (B, T)."""
    check_prompt(model, tokens)
    if not fits(new, int) or not 0 < new < tokens.shape[1] - 1:
        raise ValueError(f"a continuation of {new} tokens must be shorter than the text's {tokens.shape[1]} "
                         "by at least 2")
    caches, prompt = make_cache(model, Recorder), tokens[:, :-new - 1]
    recording = record(model, caches, prompt)
    log_p = wide(model(tokens[:, -new - 1:-1], caches)).log_softmax(-1)
    return Reference(tokens, new, log_p, recording, [cache.told[0] for cache in caches],
                     [cache.answers[0] for cache in caches])


@torch.no_grad()
def continuation(model, full: Reference, make: Make, recording: list[Recording] | None = None,
                 chunk_size: int = 64) -> dict:
    """Compress before the continuation, then feed it token by token.

    Returns perplexity; kl, KL(full ‖ compressed) of the next token in nats; l1, ‖o − ô‖₁ per layer and query
    head with o = y W_O (Definition 1 of CriticalKV), accumulated over the layers below; live, allocated and
    peak bytes; live_16, `bytes_in_16_bits`; device, the bytes that a GPU's allocator holds more after the
    compression, None on a CPU; tokens_per_s of decoding, over the whole batch. kl and nll, the mean −log p of
    the true token, are (B,) and l1 (B, L, H·G), means over the continuation. For `excess`: prompt, the tokens
    that are compressed; `slots` held right after that and slots_end after the last token; evicts, whether the
    method has an `evict` of its own; keeps_all, whether it says that every token stays. `recording` is
    `full.recording`, where reading the prompt need not be part of it; without, the decoder reads `chunk_size`
    tokens at a time.
    """
    tokens, new, cut = full.tokens, full.new, full.prompt.shape[1]
    # the prompt
    before = torch.cuda.memory_allocated(tokens.device) if tokens.is_cuda else None
    caches = make(cut, full.prompt)
    peak = feed(model, full.prompt, caches, chunk_size) if recording is None else replay([recording], caches)
    peak = max(peak, end_prompt(model, full.prompt, caches))
    after_prompt = slots(caches)
    device = torch.cuda.memory_allocated(tokens.device) - before if tokens.is_cuda else None

    # what follows, token by token
    with head_outputs(model) as heads:
        began = time.perf_counter()
        steps = [model(token[:, None], caches) for token in tokens[:, cut:-1].unbind(1)]
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began

    # against the full cache
    log_p = wide(torch.cat(steps, 1)).log_softmax(-1)
    live, allocated = cache_bytes(caches)
    answers = [torch.cat(after, 1).unflatten(-1, cache.w_o.shape[1:]).transpose(1, 2)
               for cache, after in zip(caches, heads)]
    nll = -log_p.gather(-1, tokens[:, -new:, None])[..., 0].mean(-1)
    kl = F.kl_div(log_p, full.log_p, log_target=True, reduction="none").sum(-1).mean(-1)
    return dict(perplexity=math.exp(nll.mean().item()), nll=nll, kl=kl,
                l1=changes(full, caches, answers), live=live, allocated=allocated, peak=peak,
                live_16=bytes_in_16_bits(caches),
                tokens_per_s=tokens.shape[0] * new / seconds,
                device=device, prompt=cut, slots=after_prompt, slots_end=slots(caches),
                evicts=any(type(cache).evict is not LayerCache.evict for cache in caches),
                keeps_all=all(cache.keeps_all for cache in caches))


def wide(x: Tensor) -> Tensor:
    """In 32 bits at least: sums of 16-bit numbers lose what is measured."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def slots(caches: list[LayerCache]) -> float | None:
    """Live slots per key/value head: the mean over layers and heads, of the text that has the most.

    So heads and layers may share their budgets out. What a method remembers beside its slots shows in its
    bytes alone; None if there are no slots.
    """
    try:
        live = [cache.pos != NEVER for cache in caches]
    except KeyError:
        return None
    return sum(layer.sum((1, 2)) for layer in live).max().item() / sum(layer.shape[1] for layer in live)


def held(caches: list[LayerCache], tokens: int) -> Tensor:
    """(B, L, H, tokens) of bool: which of the first `tokens` tokens every head still has.

    A token is there if a slot has its position, or if the method says that it keeps all.
    """
    token = torch.arange(tokens, device=caches[0].pos.device)
    return torch.stack([torch.stack([(head[..., None] == token).any(-2) | cache.keeps_all
                                     for head in cache.pos.unbind(1)], 1) for cache in caches], 1)


def changes(full: Reference, caches: list[LayerCache], answers: list[Tensor]) -> Tensor:
    """‖o − ô‖₁ = ‖(y − ŷ) W_O‖₁ per text, layer and query head, (B, L, H·G), from ŷ (B, H·G, new, D)."""
    return torch.stack([
        torch.einsum("bhtd,ohd->bhto", wide(answer - y), wide(cache.w_o)).abs().sum(-1).mean(-1)
        for y, cache, answer in zip(full.answers, caches, answers)], 1)


@torch.no_grad()
def perturbation(model, full: Reference, make: Make) -> Tensor:
    """‖o − ô‖₁ (Definition 1 of CriticalKV) of every layer alone, (B, L, H·G): its queries are the full
    cache's.

    `continuation` has the change that adds up over the layers, for there the queries have changed as well.
    """
    caches = make(full.prompt.shape[1], full.prompt)
    for cache, told in zip(caches, full.recording):
        for part in told.split(64, cache.w_o.device):
            cache.attend(*part)
    end_prompt(model, full.prompt, caches)

    answers = []
    for cache, told in zip(caches, full.continuation):
        answers.append([cache.attend(*token) for token in told.split(1, cache.w_o.device)])
    return changes(full, caches, [torch.cat(answer, 2) for answer in answers])


# ---- the model itself, with the full cache ---------------------------------------------------------------

@torch.no_grad()
def exact_match(model, tasks: Tasks, task: str, T: int, documents: int, seed: int = 1, **options) -> float:
    """Share of documents answered right by greedy decoding with the full cache.

    One pass over the true tokens tells: a greedy answer is right if and only if each of its tokens is the
    most likely one after the true tokens before it.
    """
    check_size(model, documents, 1, T)
    right = []
    batch = tasks.batch(task, seed, documents, T, **options)
    tokens, *_ = prompt_and_question(model, batch)
    for rows in tokens.split(max(1, 16_384 // T)):
        best = model(rows[:, :-1]).argmax(-1)
        for a in batch.answers:
            exact = (best[:, a.start - 1:a.stop - 1] == rows[:, a]).all(1)
            right.append(exact.float().mean().item() * len(rows))
    return sum(right) / documents / len(batch.answers)


def check_size(model, documents: int, least: int, T: int):
    """ValueError, before documents are made, if they are too few or longer than the model reads."""
    whole("documents", documents, least)
    if whole("T", T, 2) > model.config.max_len:
        raise ValueError(f"{T} tokens exceed the model's length of {model.config.max_len}; "
                         "make the documents shorter")


def text_windows(tasks: Tasks, windows: int, T: int, model=None) -> Tensor:
    """(windows, T) tokens of the split's text, evenly spaced; special tokens taken out.

    Each begins with what texts of `model` begin with: BOS, or nothing.
    """
    first = opening(tasks.encoding, model.config) if model else []
    stream, n = tasks.stream[tasks.stream != tasks.bos], T - len(first)
    whole("windows", windows, 1), whole("T", T, 2, len(stream))
    starts = np.linspace(0, len(stream) - n, windows).astype(int)
    return torch.from_numpy(np.stack([np.append(first, stream[s:s + n]) for s in starts]).astype(np.int64))


def count_bytes(tasks: Tasks, rows: Tensor) -> int:
    return sum(len(tasks.encoding.decode_bytes(row)) for row in rows[:, 1:].tolist())


@torch.no_grad()
def bits_per_byte(model, tasks: Tasks, windows: int, T: int = 512) -> float:
    """Mean bits per byte of the split's text, over `windows` windows of T tokens, from the second token on.
    """
    bits, rows = 0.0, text_windows(tasks, windows, T, model)
    for part in rows.to(model.embed.weight.device).split(16):
        logits = model(part[:, :-1]).flatten(0, 1)
        bits += F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item() / math.log(2)
    return bits / count_bytes(tasks, rows)


def standard_error(x: Tensor) -> float:
    """Of the mean of x (n,)."""
    return (x.std() / len(x) ** 0.5).item()


def full_cache_bytes(config, tokens: int, bytes_per_number: int = 2) -> int:
    """2 · layers · key/value heads · tokens · head dim · bytes (KVReviver, Eq. 1): keys and values of a full
    cache.
    """
    return 2 * config.n_layers * config.n_kv_heads * tokens * config.head_dim * bytes_per_number
