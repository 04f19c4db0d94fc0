"""One contract for the methods of methods/, on their own stores or on plain, packed, rounded slots.

A method decides which entries stay, a store keeps them. Cases are named as on the command line:
snap_kv, ada_kv+critical, and snap_kv@4, which stores the prompt in 4 bits from its end on.

Each layer of a decoder is fed its own q, k and v. `read` shows what a store holds. Outputs are
compared with attention over it by definition, and its entries with the text. Which entries a
method has to keep, its own test file or test_window_methods.py says.
"""

from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common import SLOT, B, D, Fed, G, H, decoder, dense, feed, once
from lab.methods_by_name import known_names, pick
from methods.baselines.compactor import Compactor
from methods.baselines.kvzip import KVzip
from nanollm.cache import (
    NEVER,
    Slots,
    begin_turn,
    bytes_in_16_bits,
    cache_bytes,
    compress,
    make_cache,
)
from nanollm.window import WindowMethod

# ---- cases: a method by its name, on a store ---------------------------------------------------

VARIANTS, ADDITIONS, _ = known_names()
METHODS = pick([*VARIANTS])
SHARED = [name for name in METHODS if METHODS[name].kind.store is None]  # on any store
ROUNDED = pick([f"{name}@{bits}" for name in SHARED for bits in (4, 2)])
COMPOSED = {}
for name in [f"{name}+{addition}" for name in VARIANTS for addition in ADDITIONS]:
    with suppress(ValueError):  # the method takes no additions, or not this one
        found = pick([name, f"{name}@4"])
        found[name].kind(budget=64, **found[name].options)
        COMPOSED |= found
CASES = METHODS | ROUNDED | COMPOSED | pick(["h2o@3", "full@3"])
# sinks move with the next token, which `read` cannot show; StreamingLLM's own test has a loop
SHOWN = [name for name in CASES if name != "streaming_llm"]
BUDGETED = [name for name in CASES if CASES[name].takes("budget")]

# its store shows other entries than the text's: tokens read back from a sketch
ALTERED = "kv_reviver"
EVICTS_WHILE_READING = "scissorhands"  # before a token attends
DRAWN = "random"  # other random numbers for each row of a batch
GATED = "kvzip_fast", "question_gates"
# they refuse to compress another turn
ONCE = "compactor", *GATED
# their choice turns on rounding, or on the bytes of a number
UNLIKE_IN_16_BITS = "semantic", "kv_reviver", "scissorhands"
# they also keep tokens for other reasons than attention or age
GAPS = "random", "compactor", "chunk", "key_diff", *GATED


def has(name, words) -> bool:
    return any(word in name for word in words)


def each(names, *without):
    """Parametrise a test by those names that have none of the words `without`."""
    return pytest.mark.parametrize("name", [x for x in names if not has(x, without)])


def bits_of(name) -> int:
    """Return the bits of a name, or 0 if its store is exact."""
    return int(name.partition("@")[2] or 0)


# ---- a text, and walks through it --------------------------------------------------------------

LAYERS = 2
PROMPT = 30
BUDGET = 18
LATER = (1, 1, 1, 5, 1)
T = PROMPT + sum(LATER)
WHOLE = (PROMPT, *LATER)  # the text's parts; the prompt at once
PIECES = (12, 1, 10, 4, 2, 1, *LATER)


@once
def text() -> list[list[Tensor]]:
    """Return q (B, H·G, 50, D), k and v (B, H, 50, D) of each layer."""
    g = torch.Generator().manual_seed(0)
    shapes = [(B, heads, 50, D) for heads in (H * G, H, H)]
    layers = []
    for _ in range(LAYERS):
        layers.append([torch.randn(shape, generator=g) for shape in shapes])
    return layers


def in_dtype(dtype, layers) -> list[list[Tensor]]:
    return [[x.to(dtype) for x in qkv] for qkv in layers]


@once
def model_of(dtype):
    return decoder(n_layers=LAYERS).to(dtype)


@once
def options_of(dtype) -> dict:
    """Return small budgets, and random numbers for what methods learn from a decoder."""
    g = torch.Generator().manual_seed(3)
    inputs = (H * G + 2 * H) * D
    gates = torch.randn(LAYERS, inputs + 1, H, generator=g)
    ends = torch.rand(50, generator=g) < 0.2
    small = dict(budget=BUDGET, window_size=4, slack=2)
    small["edges"] = torch.randn(2, LAYERS, H, generator=g)
    return small | dict(gates=gates.to(dtype), ends=ends)


class Entries(NamedTuple):
    """What a store shows, in the order of positions. Empty slots have the position NEVER."""

    pos: Tensor  # (B, H, S)
    k: Tensor  # (B, H, S, D)
    v: Tensor

    @property
    def there(self) -> Tensor:
        return self.pos != NEVER


def entries(k, v, pos) -> Entries:
    pos, i = pos.expand(k.shape[:3]).sort(-1)
    rows = i[..., None].expand(k.shape)
    return Entries(pos, k.gather(2, rows), v.gather(2, rows))


def held(caches) -> list[Entries]:
    """Return what the store of each layer shows."""
    nothing = torch.zeros(B, H, 0, D)
    if not caches[0].seen:
        return [entries(nothing, nothing, torch.zeros(B, H, 0)) for _ in caches]
    return [entries(*layer.read()[:3]) for layer in caches]


class Step(NamedTuple):
    """A part of the text. For each layer: its output, and what was held before and after it."""

    part: slice
    y: list[Tensor]
    before: list[Entries]
    after: list[Entries]
    slots: int  # in use, of all layers
    bytes: list[tuple[int, int]]


def new_caches(
    name,
    dtype=torch.float32,
    store=None,
    **changed,
):
    case = CASES[name]
    free = case._replace(options={})  # what a name sets may be changed, too
    options = case.given(**options_of(dtype)) | free.given(**changed)
    return make_cache(model_of(dtype), case.kind, store or case.store, **options)


def end_turn(caches, layers):
    """Compress the caches; token i of the text is word i."""
    rows = len(layers[0][0])
    tokens = torch.arange(caches[0].seen).expand(rows, -1)
    model = Fed(caches[0].model, layers)
    compress(model, tokens, caches)


def slots_in_use(caches) -> int:
    return sum(int((layer.pos != NEVER).sum()) for layer in caches)


def run(
    name,
    cut,
    layers=None,
    chunk=None,
    prompt=PROMPT,
    **changed,
):
    """Return the caches after a walk through the text in parts, and a Step for each part.

    chunk: the prompt is read so many tokens at a time.
    """
    layers = layers or text()
    caches = new_caches(name, layers[0][0].dtype, **changed)
    steps = []
    shown = held(caches)
    for stop, n in zip(accumulate(cut), cut):
        before = shown
        y = [
            feed(*x, n, chunk if stop <= prompt else None) for x in zip(caches, layers)
        ]
        if stop == prompt:
            end_turn(caches, layers)
        shown = held(caches)
        part = slice(stop - n, stop)
        slots = slots_in_use(caches)
        size = [layer.bytes() for layer in caches]
        steps.append(Step(part, y, before, shown, slots, size))
    return caches, steps


walk = once(run)


def check_output(layer, part, y, shown):
    """Check that y is attention over `shown` and the part's own tokens, by definition."""
    q, k, v = (x[:, :, part] for x in text()[layer])
    pos = torch.arange(part.start, part.stop)
    both = zip(shown, entries(k, v, pos))
    slot_pos, keys, values = (torch.cat(pair, 2) for pair in both)
    visible = slot_pos[:, :, None] <= pos[:, None]
    expected = dense(q, keys, values, visible)
    assert torch.allclose(y, expected, atol=1e-5), (layer, part)


def check_same(steps, others):
    """Check that two walks end with the same entries and the same outputs."""
    one = steps[-1]
    other = others[-1]
    for layer in range(LAYERS):
        assert torch.equal(one.after[layer].pos, other.after[layer].pos)
        assert torch.allclose(one.y[layer], other.y[layer], atol=1e-5)


def outputs(steps) -> list[Tensor]:
    """Return the outputs of each layer, of all steps together."""
    return [torch.cat(parts, 2) for parts in zip(*(step.y for step in steps))]


# ---- 1: room for everything --------------------------------------------------------------------


@each(CASES)
def test_with_room_for_everything_outputs_are_those_of_full_attention(name):
    """On a store in few bits: those of the same store, of which nothing is evicted."""
    caches, steps = run(name, WHOLE, budget=3 * T)
    causal = torch.ones(50, 50).tril().bool()[None, None]
    expected = [dense(*qkv, causal)[:, :, :T] for qkv in text()]
    if bits_of(name):
        expected = outputs(walk(f"full@{bits_of(name)}", WHOLE)[1])
    for layer, y, right in zip(caches, outputs(steps), expected):
        assert torch.allclose(y, right, atol=1e-5)
        assert layer.seen == layer.length == T


# ---- 2: cuts -----------------------------------------------------------------------------------


@each(CASES, "@2")
def test_how_the_prompt_is_cut_does_not_matter(name):
    for chunk in (1, 7):
        check_same(run(name, WHOLE, chunk=chunk)[1], walk(name, WHOLE)[1])


@each([*METHODS, *ROUNDED], "@2")
def test_tokens_fed_at_once_act_as_one_by_one_if_a_method_says_that_it_appends(name):
    caches, at_once = run(name, (PROMPT, T - PROMPT))
    method = caches[0].method
    at_end = (
        WindowMethod | KVzip | Compactor
    )  # they evict at the end of the prompt alone
    appends = name[:4] == "full" or isinstance(method, at_end)
    assert method.appends == appends
    if appends:
        _, (_, *singly) = run(name, (PROMPT, *[1] * (T - PROMPT)))
        check_same(at_once, [singly[-1]._replace(y=outputs(singly))])


# ---- 3: the same choice on every store ---------------------------------------------------------


@each(ROUNDED)
def test_a_store_in_few_bits_changes_no_choice_at_the_prompts_end(name):
    exact = walk(name.partition("@")[0], WHOLE)[1][0]
    for few, many in zip(walk(name, WHOLE)[1][0].after, exact.after):
        assert torch.equal(few.pos, many.pos)


@each(SHARED)
def test_on_plain_slots_a_method_does_the_same(name):
    check_same(run(name, WHOLE, store=Slots)[1], walk(name, WHOLE)[1])


# ---- 4 and 6: attention is exact on what is held, and that is the text's -----------------------


@each(SHOWN)
def test_outputs_are_attention_over_what_the_store_shows(name):
    steps = walk(name, WHOLE)[1]
    if name in METHODS:  # pieces of the prompt, before anything is rounded
        steps = steps + walk(name, PIECES)[1]
    for step in steps:
        for layer, y in enumerate(step.y):
            shown = step.before[layer]
            if EVICTS_WHILE_READING in name:
                if y.shape[2] > 1:
                    continue  # entries leave between its tokens
                shown = Entries(*(x[:, :, :-1] for x in step.after[layer]))
            check_output(layer, step.part, y, shown)


@each(SHOWN, ALTERED)
def test_what_the_store_shows_is_the_texts_at_its_positions(name):
    steps = walk(name, WHOLE)[1]
    for step in steps:
        for layer, (_, k, v) in enumerate(text()):
            compressed = steps[0].after[layer]
            check_entries(step.after[layer], compressed, k, v, bits_of(name))


def check_entries(
    shown,
    compressed,
    k,
    v,
    bits,
):
    """Check that entries are the text's, k and v.

    In few bits, no number of the prompt is farther off than half a level and 0.003. A key's levels
    lie between the extremes of its channel in the compressed head, a value's between its own.
    """
    assert (shown.pos.diff() > 0)[shown.there[..., 1:]].all()  # no position twice
    i = shown.pos.where(shown.there, 0).long()[..., None].expand(shown.v.shape)
    kept = (compressed.pos[..., None] == torch.arange(50)).any(2)[..., None]
    for x, true, dim in ((shown.k, k, 2), (shown.v, v, 3)):
        allowed = torch.zeros_like(true)
        if bits:
            low = true.masked_fill(~kept, 9).amin(dim, keepdim=True)
            high = true.masked_fill(~kept, -9).amax(dim, keepdim=True)
            half = (high - low) / (2**bits - 1) / 2
            allowed = (half + 0.003) * kept.expand(true.shape)  # ranges have 16 bits
        off = (x - true.gather(2, i)).abs()
        assert (off <= allowed.gather(2, i))[shown.there].all()


# ---- 5: budgets and bytes ----------------------------------------------------------------------


@each(BUDGETED)
def test_slots_never_exceed_the_budget_and_bytes_say_so(name):
    """From the prompt's end on, all heads together hold at most the budget and appended tokens."""
    for cut in (WHOLE, PIECES) if name in METHODS else (WHOLE,):
        caches, steps = walk(name, cut)
        for step in steps:
            later = max(step.part.stop - PROMPT, 0) if caches[0].method.appends else 0
            if step.part.stop >= PROMPT or EVICTS_WHILE_READING in name:
                assert step.slots <= LAYERS * B * H * (BUDGET + later)
            total = sum(live for live, _ in step.bytes)
            assert bits_of(name) or total >= step.slots * SLOT
            assert all(live <= allocated for live, allocated in step.bytes)
        for layer in caches:
            assert layer.bytes()[1] == sum(memory(layer).values())


# the decoder, the method, a sketch's hashes and signs, and what a step leaves
NOT_COUNTED = {
    "model",
    "method",
    "angles",
    "flip",
    "bucket_by",
    "sign_by",
    "cached_vague",
}


def memory(x, found=None) -> dict[int, int]:
    """Return the bytes by address of all tensors that a store refers to, but for NOT_COUNTED."""
    found = {} if found is None else found
    if isinstance(x, Tensor):
        storage = x.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(x, dict):
        for name in x.keys() - NOT_COUNTED:
            memory(x[name], found)
    elif isinstance(x, list | tuple):
        for y in x:
            memory(y, found)
    elif hasattr(x, "__dict__") and not isinstance(x, type):
        memory(vars(x), found)
    return found


@each(CASES, *UNLIKE_IN_16_BITS)
def test_bytes_in_16_bits_are_those_of_a_cache_in_16_bits(name):
    few = in_dtype(torch.bfloat16, text())
    many = in_dtype(torch.float32, few)
    caches, _ = run(name, (PROMPT, 1), many)
    half, _ = run(name, (PROMPT, 1), few)
    live, _ = cache_bytes(half)
    assert bytes_in_16_bits(caches) == bytes_in_16_bits(half) == live
    assert live < cache_bytes(caches)[0]


# ---- 7: groups and batches; numbers of 16 bits -------------------------------------------------


@each(CASES, DRAWN, "@2")
def test_a_row_of_a_batch_is_what_it_is_alone(name):
    _, steps = walk(name, WHOLE)
    for b in range(B):
        row = [[x[b : b + 1] for x in qkv] for qkv in text()]
        for step, alone in zip(steps, run(name, WHOLE, row)[1]):
            for layer, kept in enumerate(step.after):
                few = alone.after[layer]
                assert torch.equal(kept.pos[b][kept.there[b]], few.pos[few.there])
                assert torch.allclose(step.y[layer][b], alone.y[layer][0], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each(CASES, "@")
def test_16_bits_choose_as_64_bits_do(name, dtype):
    """Queries and keys share a large channel, as Qwen2's do.

    Their product exceeds float16 before scaling. Test 3 has the stores in few bits.
    """
    layers = []
    for q, k, v in text():
        q, k = (x.index_fill(-1, torch.tensor([3]), 300.0) for x in (q, k))
        layers.append([x.to(dtype) for x in (q, k, v)])
    cut = PROMPT, 1, 1
    _, (*_, found) = run(name, cut, layers)
    _, (*_, right) = run(name, cut, in_dtype(torch.float64, layers))
    assert all(y.isfinite().all() for y in found.y)
    if not has(name, UNLIKE_IN_16_BITS):  # 32 bits may still round two scores to one
        same = []
        for kept in zip(found.after, right.after):
            stays = [(x.pos[..., None] == torch.arange(T)).any(2) for x in kept]
            same.append(stays[0] == stays[1])
        assert torch.stack(same)[..., : sum(cut)].float().mean() > 0.99


# ---- 8: ties -----------------------------------------------------------------------------------


@each(BUDGETED, *GAPS)
def test_of_tokens_that_nobody_looks_at_the_newest_stay(name):
    """Every query gives all its weight to token 0: evicted tokens are one stretch in the middle."""
    q = torch.zeros(B, H * G, T, D)
    k = torch.zeros(B, H, T, D)
    q[..., 0] = 1
    k[:, :, 0, 0] = 1000
    _, steps = run(name, WHOLE, [[q, k, torch.zeros_like(k)]] * LAYERS, kernel_size=1)
    for kept in [kept for step in steps for kept in step.after]:
        for pos in kept.pos.flatten(0, 1):
            pos = pos[pos != NEVER].tolist()
            everything = pos == [*range(pos[-1] + 1)]
            gaps = []
            for i in range(1, len(pos)):
                if pos[i] > pos[i - 1] + 1:
                    gaps.append(i)
            assert len(gaps) == (pos[0] == 0 and not everything)
            assert not gaps or gaps[0] <= 4  # sinks


# ---- conversations, short prompts --------------------------------------------------------------


@each(BUDGETED, "@2")
def test_a_conversation_is_compressed_after_each_turn(name):
    """After each turn the budget holds; attention is exact. Some methods refuse a second turn."""
    caches, _ = run(name, (PROMPT, 2))
    for start, stop in ((32, 40), (40, 42), (42, 50)):
        begin_turn(caches)
        before = held(caches)
        y = [feed(*x, stop - start) for x in zip(caches, text())]
        if name in SHOWN and EVICTS_WHILE_READING not in name:
            for layer in range(LAYERS):
                check_output(layer, slice(start, stop), y[layer], before[layer])
        if has(name, ONCE):  # they refuse to compress another turn
            with pytest.raises(ValueError, match="turn|few bits"):
                end_turn(caches, text())
            return
        end_turn(caches, text())
        assert slots_in_use(caches) <= LAYERS * B * H * BUDGET


@each([*METHODS, *ROUNDED], "@2")
def test_a_prompt_of_one_token(name):
    """One token is cached when the prompt ends, and later tokens fill the budget."""
    _, steps = run(name, [1] * (BUDGET + 3), prompt=1)
    for step in steps if name in SHOWN else ():
        for layer, y in enumerate(step.y):
            shown = step.before[layer]
            if EVICTS_WHILE_READING in name:
                shown = Entries(*(x[:, :, :-1] for x in step.after[layer]))
            check_output(layer, step.part, y, shown)
