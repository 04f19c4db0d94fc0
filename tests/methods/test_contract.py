"""One contract for every method of methods/ on every store that it can use.

A method decides which entries stay, a store keeps them. Cases are named as on the command line:
snap_kv, ada_kv+critical, and snap_kv@4, whose entries have 4 bits from the prompt's end on.

Each layer of a decoder is fed its own random q, k and v. `read` shows what a store holds. Outputs
are compared with attention over it by definition, and its entries with the text. Which entries a
method has to keep, a loop in the method's own test file says.
"""

from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common import SLOT, TOKENS, B, D, Fed, G, H, decoder, dense, once
from lab.methods_by_name import known_names, pick
from methods.baselines.kvzip import KVzip
from nanollm.cache import (
    NEVER,
    Slots,
    begin_turn,
    bytes_in_16_bits,
    cache_bytes,
    compress,
    crop,
    make_cache,
)
from nanollm.generate import generate
from nanollm.window import WindowMethod

# ---- cases: a method by its name, on a store ---------------------------------------------------

VARIANTS, ADDITIONS, _ = known_names()
METHODS = pick([*VARIANTS])
for variant in VARIANTS:
    for addition in ADDITIONS:
        with suppress(ValueError):  # the method takes no additions, or not this one
            METHODS |= pick([f"{variant}+{addition}"])
SHARED = [name for name in METHODS if METHODS[name].kind.store is None]  # on any store
ROUNDED = pick([f"{name}@{bits}" for name in SHARED for bits in (4, 2)])
CASES = METHODS | ROUNDED | pick(["tova@3"])
BUDGETED = [name for name in CASES if CASES[name].takes("budget")]

# stores that show other entries than the text's: merged values, tokens read back from a sketch, few
# bits, residual entries, sinks with moved keys
ALTERED = "cam", "kv_reviver", "quantized", "+residual", "streaming_llm"
EVICT_WHILE_READING = "scissorhands", "cam"  # before a token attends
DRAWN = "random", "cam"  # other random numbers for each row of a batch
GATED = "kvzip_fast", "question_gates"
ONCE = "+residual", "+theta", *GATED  # they refuse to compress another turn
# their choice turns on rounding, or on the bytes of a number
UNLIKE_IN_16_BITS = "semantic", "kv_reviver", "scissorhands"
# they also keep tokens for other reasons than attention or age
GAPS = "random", "+residual", "chunk", "key_diff", "defensive", "head_budgets", *GATED


def has(name, words) -> bool:
    return any(word in name for word in words)


def each(names, without=()):
    """Parametrise a test by those names that have none of the words `without`."""
    names = [name for name in names if not has(name, without)]
    return pytest.mark.parametrize("name", names)


def bits_of(name) -> int | None:
    return int(name.partition("@")[2]) if "@" in name else None


# ---- a text, and walks through it --------------------------------------------------------------

LAYERS, PROMPT, T, BUDGET = 3, 30, 42, 18
LATER = (1, 1, 1, 1, 1, 1, 5, 1)
WHOLE = (PROMPT, *LATER)  # the text's parts; the prompt at once
PIECES = (12, 1, 10, 4, 2, 1, *LATER)
SINGLY = (1,) * T


@once
def text() -> list[list[Tensor]]:
    """Return q (B, H·G, T, D), k and v (B, H, T, D) of each layer."""
    g = torch.Generator().manual_seed(0)
    shapes = [(B, heads, T + 8, D) for heads in (H * G, H, H)]
    return [[torch.randn(x, generator=g) for x in shapes] for _ in range(LAYERS)]


@once
def model_of(dtype=torch.float32):
    return decoder().to(dtype)


@once
def options_of(dtype) -> dict:
    """Return the budgets, and the options that methods measure on a decoder."""
    g = torch.Generator().manual_seed(3)
    gates = torch.randn(LAYERS, (H * G + 2 * H) * D + 1, H, generator=g).to(dtype)
    ends = torch.rand(TOKENS.max() + 1, generator=g) < 0.2
    small = dict(budget=BUDGET, window_size=4, group_size=8, slack=2)
    return small | dict(gates=gates, ends=ends)


class Entries(NamedTuple):
    """What a store shows, in the order of positions. Empty slots have the position NEVER."""

    pos: Tensor  # (B, H, S)
    k: Tensor  # (B, H, S, D)
    v: Tensor
    bias: Tensor  # (B, H, S)

    @property
    def there(self) -> Tensor:
        return self.pos != NEVER


def entries(k, v, pos, bias=None) -> Entries:
    pos, i = pos.expand(k.shape[:3]).sort(-1)
    bias = torch.zeros(pos.shape) if bias is None else bias.gather(2, i)
    rows = i[..., None].expand(k.shape)
    return Entries(pos, k.gather(2, rows), v.gather(2, rows), bias)


def held(layer) -> Entries:
    if layer.seen:
        return entries(*layer.read())
    nothing = torch.zeros(B, H, 0, D)
    return entries(nothing, nothing, torch.zeros(B, H, 0))


class Step(NamedTuple):
    """A part of the text; for each layer its output, and what was held before and after it."""

    part: slice
    y: list[Tensor]
    before: list[Entries]
    after: list[Entries]
    bytes: list[tuple[int, int]]


def new_caches(name, dtype=torch.float32, store=None, **changed):
    case = CASES[name]
    options = case.given(**options_of(dtype) | changed)
    return make_cache(model_of(dtype), case.kind, store or case.store, **options)


def read_part(caches, layers, part) -> tuple:
    """Feed a part of the text to each layer; return the outputs, and what was held before."""
    before = [held(layer) for layer in caches]
    pos = torch.arange(part.start, part.stop)[None]
    outputs = []
    for layer, (q, k, v) in zip(caches, layers):
        outputs.append(layer.attend(q[:, :, part], k[:, :, part], v[:, :, part], pos))
    return outputs, before


def end_turn(caches, layers, n):
    """Compress the caches, which have read n tokens; token i of the text is the i-th word."""
    rows = len(layers[0][0])
    tokens = torch.arange(n).expand(rows, -1)
    compress(Fed(caches[0].model, layers), tokens, caches)


def run(name, cut, layers=None, again=False, **changed) -> tuple[list, list[Step]]:
    """Return the caches after a walk through the text in parts, and a Step for each part.

    again: the prompt's last token is forgotten before the compression, and fed again after it.
    """
    layers = layers or text()
    caches = new_caches(name, layers[0][0].dtype, **changed)
    steps = []
    for stop, n in zip(accumulate(cut), cut):
        part = slice(stop - n, stop)
        y, before = read_part(caches, layers, part)
        if stop == PROMPT:
            crop(caches, PROMPT - again)
            end_turn(caches, layers, PROMPT - again)
            if again:
                part = slice(PROMPT - 1, PROMPT)
                y, before = read_part(caches, layers, part)
        after = [held(layer) for layer in caches]
        steps.append(Step(part, y, before, after, [x.bytes() for x in caches]))
    return caches, steps


walk = once(run)


def check_output(layer, step, shown, layers=None):
    """Check that a step's output is attention over `shown` and its own tokens, by definition."""
    q, k, v = (x[:, :, step.part] for x in (layers or text())[layer])
    pos = torch.arange(step.part.start, step.part.stop)
    new = entries(k, v, pos)
    pos_of_slots, keys, values, bias = (torch.cat(x, 2) for x in zip(shown, new))
    visible = pos_of_slots[:, :, None] <= pos[:, None]
    expected = dense(q, keys, values, visible, bias[:, :, None])
    assert torch.allclose(step.y[layer], expected, atol=1e-5), (layer, step.part)


def check_same(steps, others):
    """Check that two walks end with the same entries and the same outputs."""
    for x, y, kept, other in zip(
        steps[-1].y, others[-1].y, steps[-1].after, others[-1].after
    ):
        assert torch.equal(kept.pos, other.pos)
        assert torch.allclose(x, y, atol=1e-5)


# ---- 1: room for everything --------------------------------------------------------------------


@each(CASES)
def test_with_room_for_everything_outputs_are_those_of_full_attention(name):
    """On a store in few bits: those of the same store, of which nothing is evicted."""
    caches, steps = run(name, PIECES, budget=3 * T, residual_length=T)
    unevicted = walk(f"full@{bits_of(name)}", PIECES)[1] if bits_of(name) else None
    for layer, (q, k, v) in enumerate(text()):
        y = torch.cat([step.y[layer] for step in steps], 2)
        if unevicted:
            expected = torch.cat([step.y[layer] for step in unevicted], 2)
        else:
            expected = dense(
                q, k, v, torch.ones(T + 8, T + 8).tril().bool()[None, None]
            )
        assert torch.allclose(y, expected[:, :, :T], atol=1e-5)
        assert caches[layer].seen == caches[layer].length == T


# ---- 2: cuts -----------------------------------------------------------------------------------


@each(CASES)
def test_how_the_prompt_is_cut_does_not_matter(name):
    for cut in (PIECES,) if "+" in name else (PIECES, SINGLY):
        check_same(run(name, cut)[1], walk(name, WHOLE)[1])


@each(CASES)
def test_tokens_fed_at_once_act_as_one_by_one_if_a_method_says_that_it_appends(name):
    caches, at_once = run(name, (PROMPT, T - PROMPT))
    method = caches[0].method
    assert method.appends == (
        name[:4] == "full" or isinstance(method, WindowMethod | KVzip)
    )
    if method.appends:
        _, (_, *singly) = run(name, (PROMPT, *[1] * (T - PROMPT)))
        whole = [torch.cat([step.y[i] for step in singly], 2) for i in range(LAYERS)]
        check_same(at_once, [singly[-1]._replace(y=whole)])


# ---- 3: a method keeps the same entries on every store -------------------------------------


@each(ROUNDED)
def test_a_store_in_few_bits_changes_no_choice_at_the_prompts_end(name):
    exact = walk(name.partition("@")[0], WHOLE)[1][0]
    for few, many in zip(walk(name, WHOLE)[1][0].after, exact.after):
        assert torch.equal(few.pos, many.pos)


@each(SHARED)
def test_on_plain_slots_a_method_does_the_same(name):
    check_same(run(name, WHOLE, store=Slots)[1], walk(name, WHOLE)[1])


# ---- 4 and 6: attention is exact on what is held, and that is the text's -----------------------


@pytest.mark.parametrize("cut", [WHOLE, PIECES], ids=["whole", "pieces"])
@each(CASES)
def test_output_is_attention_over_what_the_store_shows(name, cut):
    for step in walk(name, cut)[1]:
        for layer in range(LAYERS):
            if not has(name, EVICT_WHILE_READING):
                check_output(layer, step, step.before[layer])
            elif step.part.stop - step.part.start == 1:
                kept = Entries(*(x[:, :, :-1] for x in step.after[layer]))
                check_output(layer, step, kept)


@each([*CASES], without=ALTERED[:-1])
def test_what_the_store_shows_is_the_texts_at_its_positions(name):
    """In few bits: no number is farther than half a level from the text's.

    The levels of a key's channel lie between its extremes in the head, those of a value between its
    own extremes.
    """
    for step in walk(name, WHOLE)[1]:
        for shown, (_, k, v) in zip(step.after, text()):
            if name == "streaming_llm":  # its sinks' keys move
                k = shown.k
            check_entries(shown, k, v, bits_of(name))


def check_entries(shown, k, v, bits):
    assert (shown.pos.diff() > 0)[shown.there[..., 1:]].all()  # no position twice
    old = shown.there & (shown.pos < PROMPT)
    i = shown.pos.where(shown.there, 0).long()[..., None].expand(shown.k.shape)
    for x, of_text, dim in ((shown.k, k, 2), (shown.v, v, 3)):
        right = of_text if of_text is x else of_text.gather(2, i)
        off = (x - right).abs()
        assert (off[shown.there & ~old] == 0).all()
        if bits is None:
            assert (off[old] == 0).all()
        else:
            some = old[..., None]
            high = right.masked_fill(~some, -9).amax(dim, keepdim=True)
            low = right.masked_fill(~some, 9).amin(dim, keepdim=True)
            level = (high - low) / (2**bits - 1)
            assert (off <= 0.5 * level + 0.003)[old].all()


@each([*METHODS, *ROUNDED], without=EVICT_WHILE_READING)
def test_a_token_that_comes_again_sees_the_compressed_cache(name):
    """If the last token is forgotten and fed again, it attends to the kept tokens and itself."""
    step = run(name, WHOLE[:1], again=True)[1][0]
    for layer, shown in enumerate(step.before):
        assert (shown.pos[shown.there] < PROMPT - 1).all()
        check_output(layer, step, shown)


# ---- 5: budgets and bytes ----------------------------------------------------------------------


@each(BUDGETED)
def test_slots_never_exceed_the_budget_and_bytes_say_so(name):
    """All layers and heads together never hold more than the budget, but for appended tokens."""
    for cut in (WHOLE, PIECES):
        caches, steps = walk(name, cut)
        for step in steps:
            slots = [int(kept.there.sum()) for kept in step.after]
            later = max(step.part.stop - PROMPT, 0) if caches[0].method.appends else 0
            if step.part.stop >= PROMPT or has(name, EVICT_WHILE_READING):
                assert sum(slots) <= LAYERS * B * H * (BUDGET + later)
            for live, allocated in step.bytes:
                assert live <= allocated
        for layer, kept in zip(caches, steps[-1].after):
            live, allocated = layer.bytes()
            assert allocated == sum(memory(layer).values())
            if name.partition("@")[0] in SHARED:
                assert live == bytes_of(layer, kept, bits_of(name))
            elif "kv_reviver" not in name:  # most of its entries are in the sketch
                assert live >= int(kept.there.sum()) * SLOT


def bytes_of(layer, kept, bits) -> int:
    """Return the bytes of an entry's key, value, position and numbers, times the entries.

    In few bits an entry's k and v take `bits` a number, and its value's range takes 4 bytes. Each
    channel of a head's keys has a range, too. Packed heads have a table of their lengths.
    """
    old = kept.there & (kept.pos < PROMPT)
    n = int(kept.there.sum())
    own = 4 * len(layer.method.entry) + 4 * ("bias" in layer.slots)
    table = 8 * B * H if layer.packed else 0
    if bits is None:
        return n * (SLOT + own) + table
    exact = n - int(old.sum())
    few = (2 * D * bits // 8 + 4 + 4 + own) * int(old.sum())
    ranges = 4 * D * int(old.any(-1).sum())
    return exact * (SLOT + own) + few + ranges + table


NOT_THE_STORES = "model", "method", "angles", "flip", "bucket_by", "sign_by"


def memory(x, of=None) -> dict[int, int]:
    """Return the bytes by address of all tensors that a store refers to, but for its decoder's."""
    of = {} if of is None else of
    if isinstance(x, Tensor):
        of[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    elif isinstance(x, dict):
        for name, y in x.items():
            if name not in NOT_THE_STORES:
                memory(y, of)
    elif isinstance(x, list | tuple):
        for y in x:
            memory(y, of)
    elif hasattr(x, "__dict__") and not isinstance(x, type):
        memory(vars(x), of)
    return of


def in_dtype(dtype, layers=None):
    return [[x.to(dtype) for x in qkv] for qkv in layers or text()]


@each(CASES, without=UNLIKE_IN_16_BITS)
def test_bytes_in_16_bits_are_those_of_a_cache_in_16_bits(name):
    caches = walk(name, WHOLE)[0]
    half = run(name, WHOLE, in_dtype(torch.bfloat16))[0]
    live = cache_bytes(half)[0]
    assert bytes_in_16_bits(caches) == bytes_in_16_bits(half) == live
    assert live < cache_bytes(caches)[0]


# ---- 7: groups and batches; numbers of 16 bits -------------------------------------------------


@each(CASES, without=DRAWN)
def test_a_row_of_a_batch_is_what_it_is_alone(name):
    _, steps = walk(name, WHOLE)
    for b in range(B):
        row = [[x[b : b + 1] for x in qkv] for qkv in text()]
        for step, one in zip(steps, run(name, WHOLE, row)[1]):
            for y, other, kept, few in zip(step.y, one.y, step.after, one.after):
                assert torch.allclose(y[b], other[0], atol=1e-5)
                assert (
                    kept.pos[b][kept.there[b]].tolist() == few.pos[few.there].tolist()
                )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each(CASES)
def test_16_bits_choose_as_64_bits_do(name, dtype):
    """Queries and keys share a large channel, as Qwen2's do.

    Their product exceeds float16 before scaling.
    """
    layers = []
    for q, k, v in text():
        q, k = (x.index_fill(-1, torch.tensor([3]), 300.0) for x in (q, k))
        layers.append([x.to(dtype) for x in (q, k, v)])
    found = run(name, WHOLE, layers)[1][-1]
    right = run(name, WHOLE, in_dtype(torch.float64, layers))[1][-1]
    for y, kept, expected in zip(found.y, found.after, right.after):
        assert y.isfinite().all()
        if not has(
            name, UNLIKE_IN_16_BITS
        ):  # 32 bits may still round two scores to one
            both = [
                (x.pos[..., None] == torch.arange(T)).any(2) for x in (kept, expected)
            ]
            assert (both[0] == both[1]).float().mean() > 0.99


# ---- 8: ties -----------------------------------------------------------------------------------


@each(BUDGETED, without=GAPS)
def test_of_tokens_that_nobody_looks_at_the_newest_stay(name):
    """Every query gives all its weight to token 0: evicted tokens are one stretch in the middle."""
    q = torch.zeros(B, H * G, T, D)
    k = torch.zeros(B, H, T, D)
    q[..., 0] = 1
    k[:, :, 0, 0] = 1000
    _, steps = run(name, WHOLE, [[q, k, torch.zeros_like(k)]] * LAYERS, kernel_size=1)
    for kept in [kept for step in steps for kept in step.after]:
        for pos, there in zip(kept.pos.flatten(0, 1), kept.there.flatten(0, 1)):
            pos = pos[there].tolist()
            gaps = [i for i, (a, b) in enumerate(zip(pos, pos[1:])) if b > a + 1]
            everything = pos == [*range(pos[-1] + 1)]
            assert len(gaps) == (pos[0] == 0 and not everything)
            assert not gaps or pos[gaps[0]] < 4  # sinks


# ---- decoding, conversations, short prompts ----------------------------------------------------


@each(
    ["h2o@4", "h2o@2", "tova@3", "key_diff@4", "random@4", "streaming_llm_absolute@4"]
)
def test_in_few_bits_survivors_of_decoding_are_not_rounded_again(name):
    """Each of 20 new tokens evicts one entry. What stays is bit for bit what it was."""
    _, (first, *steps) = run(name, (PROMPT, *[1] * 20))
    for step in steps:
        for layer, (_, k, v) in enumerate(text()):
            before = first.after[layer]
            kept = step.after[layer]
            assert (kept.there.sum(-1) == BUDGET).all()
            check_output(layer, step, step.before[layer])
            check_entries(kept, k, v, bits_of(name))
            same = kept.pos[..., :, None] == before.pos[..., None, :]
            b, h, i, j = same.nonzero(as_tuple=True)
            assert torch.equal(kept.k[b, h, i], before.k[b, h, j])
            assert torch.equal(kept.v[b, h, i], before.v[b, h, j])


@each(BUDGETED)
def test_a_conversation_is_compressed_after_each_turn(name):
    """After each turn the budget holds, and attention is exact on what is held."""
    caches = run(name, (PROMPT, 2))[0]
    for start, stop in ((32, 40), (40, 42), (42, 50)):
        begin_turn(caches)
        part = slice(start, stop)
        step = Step(part, *read_part(caches, text(), part), None, None)
        if not has(name, EVICT_WHILE_READING):
            for layer in range(LAYERS):
                check_output(layer, step, step.before[layer])
        if has(name, ONCE):
            with pytest.raises(ValueError, match="compress once"):
                end_turn(caches, text(), stop)
            return
        end_turn(caches, text(), stop)
        slots = sum(int(held(layer).there.sum()) for layer in caches)
        assert slots <= LAYERS * B * H * BUDGET


NEW = BUDGET + 2
unevicted = once(lambda: generate(model_of(), TOKENS[:, :1], NEW))


@each(CASES, without="+")
def test_a_prompt_of_one_token(name):
    """It works, although nothing is cached yet when the prompt ends."""
    for budget in (2 * NEW, BUDGET):
        caches = new_caches(name, budget=budget, residual_length=NEW)
        tokens = generate(model_of(), TOKENS[:, :1], NEW, caches)
        assert tokens.shape == (2, NEW)
        if budget > BUDGET and not bits_of(name):
            assert torch.equal(tokens, unevicted())
