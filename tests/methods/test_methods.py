"""Hold every method to one contract on random text; compare the simplest methods with loops.

Each method in methods/ is tested under its name on the command line, alone and with every addition.
A loop written from the paper says which tokens it keeps. The loop is in the method's own test file,
or in LOOPS here.
"""

from contextlib import suppress
from itertools import accumulate
import math
from typing import NamedTuple

import pytest
import torch

from common import (
    B,
    D,
    FREQ,
    G,
    H,
    SLOT,
    TOKENS,
    Fed,
    decoder,
    dense,
    end,
    link,
    once,
    turn,
)
from methods.baselines.cam import CaM
from methods.baselines.h2o import H2O
from methods.kv_reviver import KVReviver
from methods.baselines.quantized import Quantized
from methods.baselines.random_eviction import RandomEviction
from methods.scissorhands import Scissorhands
from methods.baselines.streaming_llm import StreamingLLM
from methods.baselines.sub_gen import SubGen4Cache
from methods.tensor_attention import FactoredFourCache
from nanollm.cache import (
    NEVER,
    begin_turn,
    bytes_in_16_bits,
    cache_bytes,
    compress,
    crop,
    make_cache,
)
from lab.registry import given, has_budget, methods, pick
from nanollm.generate import generate, tell_chunk_ends
from nanollm.window import WindowCache

LAYERS, PROMPT, T, BUDGET = 3, 30, 42, 18
METHODS, ADDITIONS, _ = methods()
for name in [f"{name}+{addition}" for name in METHODS for addition in ADDITIONS]:
    # the method takes no additions, or chooses in another way already
    with suppress(ValueError):
        METHODS |= pick([name])
BUDGETED = [name for name in METHODS if has_budget(METHODS[name])]
# True: a chunk ends
ENDS = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.2
GATES = torch.randn(
    LAYERS, (H * G + 2 * H) * D + 1, H, generator=torch.Generator().manual_seed(3)
)
OPTIONS = dict(budget=BUDGET, window_size=4, group_size=8, slack=2, gates=GATES)
CUTS = [(*prompt, *[1] * 6, 5, 1) for prompt in ([PROMPT], [12, 1, 10, 4, 2, 1])]

ROUNDED = "kvzip_4", "question_gates_4"  # kept entries have few bits
# Methods that change what attention sees: merged values, tokens read back from a sketch, few bits,
# residual entries, sinks with moved keys.
ALTERED = ("cam", "kv_reviver", "quantized", "+residual", "streaming_llm", *ROUNDED)
AS_THEY_ARE = [name for name in METHODS if not any(x in name for x in ALTERED)] + [
    "streaming_llm_absolute"
]
APPENDS = "kvzip", "head_budgets", "question_gates"  # and variants
EVICTS_WHILE_READING = "scissorhands", "cam"  # they evict before a token attends
DRAWN = "random", "cam"  # random, and different for each row of a batch
# methods that also keep tokens for other reasons than attention or age
GATED = "kvzip_fast", "question_gates"
GAPS = (
    "random",
    "+residual",
    "semantic",
    "chunk",
    "key_diff",
    "defensive",
    "head_budgets",
    *GATED,
)
ONCE = "+residual", "+theta", "semantic", *GATED  # they refuse to compress another turn


def each(names, cuts=CUTS):
    """Parametrise a test by method and by cut of the prompt.

    A composed method gets only the uncut prompt, because its two parts are tested alone with both
    cuts.
    """
    how = dict(zip(CUTS, ("whole", "pieces")))
    cases = [
        (name, cut) for name in names for cut in (cuts if "+" not in name else cuts[:1])
    ]
    return pytest.mark.parametrize(
        "name, cut", cases, ids=[f"{name}-{how[cut]}" for name, cut in cases]
    )


@once
def unchanged(dtype=torch.float32):
    return decoder().to(dtype)


@once
def text():
    """Return q, k, v of every layer."""
    g = torch.Generator().manual_seed(0)
    return [
        [torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H)]
        for _ in range(LAYERS)
    ]


class Step(NamedTuple):
    """A part of the text, and for each layer: positions before it, its output, positions and bytes
    after it.
    """

    part: range
    before: list[torch.Tensor]  # positions (B, H, S)
    y: list[torch.Tensor]
    after: list[torch.Tensor]
    bytes: list[tuple[int, int]]


def run(
    name,
    cut,
    layers=None,
    rows=slice(None),
    dtype=torch.float32,
    again=False,
    **options,
):
    """Return the caches of a decoder that were fed each layer's q, k and v, and one Step per part.

    again: the prompt's last token is forgotten before the compression, and fed again after it.
    """
    Method, model = METHODS[name], unchanged(dtype)
    caches = make_cache(model, Method, **given(Method, **OPTIONS | options))
    tell_chunk_ends(caches, ENDS[rows])
    layers = [[x[rows] for x in qkv] for qkv in layers or text()]
    steps = []

    def feed(part):
        before, pos = (
            [held(cache) for cache in caches],
            torch.arange(part.start, part.stop)[None],
        )
        y = [
            cache.attend(*(x[:, :, part] for x in qkv), pos)
            for cache, qkv in zip(caches, layers)
        ]
        return before, y

    for stop, n in zip(accumulate(cut), cut):
        part = slice(stop - n, stop)
        before, y = feed(part)
        if stop == PROMPT:
            read = PROMPT - again
            crop(caches, read)
            compress(
                Fed(model, layers),
                torch.arange(read).expand(len(layers[0][0]), -1),
                caches,
            )
            if again:
                part = slice(read, stop)
                before, y = feed(part)
        after, size = (
            [held(cache) for cache in caches],
            [cache.bytes() for cache in caches],
        )
        steps.append(Step(range(part.start, part.stop), before, y, after, size))
    return caches, steps


def held(cache) -> torch.Tensor:
    """Return a cache's positions (B, H, S), sorted."""
    return cache.pos.sort(-1).values if cache.seen else torch.zeros(B, H, 0)


walk = once(run)


@once
def full(layer):
    """Return full causal attention of one layer."""
    return dense(*text()[layer], torch.ones(T, T).tril().bool().expand(B, H, T, T))


@each(METHODS, CUTS[1:])
def test_room_for_everything_is_full_attention(name, cut):
    """With room for every token, outputs equal full attention and nothing is evicted."""
    caches, steps = run(name, cut, budget=3 * T, residual_length=T)
    if not has_budget(METHODS[name]) and caches[0].length < T:
        pytest.skip("it evicts, and has no budget that could be large")
    for layer in range(LAYERS):
        assert torch.allclose(
            torch.cat([step.y[layer] for step in steps], 2), full(layer), atol=1e-5
        )
    assert [(cache.length, cache.seen) for cache in caches] == [(T, T)] * LAYERS


@each(METHODS, CUTS[1:])
def test_how_the_prompt_is_cut_does_not_matter(name, cut):
    """A prompt read in pieces gives the same kept tokens and outputs as a prompt read at once."""
    (*_, last), (*_, other) = walk(name, CUTS[0])[1], walk(name, cut)[1]
    for layer in range(LAYERS):
        assert torch.equal(last.after[layer], other.after[layer])
        assert torch.allclose(last.y[layer], other.y[layer], atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_tokens_fed_at_once_act_as_one_by_one_if_a_method_says_that_it_appends(name):
    caches, (_, at_once) = run(name, (PROMPT, T - PROMPT))
    assert caches[0].appends == (
        name == "full" or isinstance(caches[0], WindowCache) or name.startswith(APPENDS)
    )
    if caches[0].appends:
        _, (_, *singly) = run(name, (PROMPT, *[1] * (T - PROMPT)))
        for layer in range(LAYERS):
            y = torch.cat([step.y[layer] for step in singly], 2)
            assert torch.allclose(at_once.y[layer], y, atol=1e-5)
            assert torch.equal(at_once.after[layer], singly[-1].after[layer])


@each(AS_THEY_ARE)
def test_output_is_dense_attention_over_exactly_the_kept_tokens(name, cut):
    """A token's output is dense attention over the tokens kept before it, and itself, unchanged."""
    _, steps = walk(name, cut)
    for step in steps:
        if name.startswith(EVICTS_WHILE_READING) and len(step.part) > 1:
            continue  # the tokens kept in between are unknown
        for layer, (q, k, v) in enumerate(text()):
            kept = (
                step.after[layer]
                if name.startswith(EVICTS_WHILE_READING)
                else step.before[layer]
            )
            kept_mask = (kept[..., None] == torch.arange(T)).any(2)  # (B, H, T)
            kept_mask[..., step.part] = True
            visible = torch.ones(T, T).tril().bool()[step.part] & kept_mask[:, :, None]
            expected = dense(q[:, :, step.part], k, v, visible)
            assert torch.allclose(step.y[layer], expected, atol=1e-5), (
                layer,
                step.part,
            )


@pytest.mark.parametrize(
    "name", [name for name in AS_THEY_ARE if not name.startswith(EVICTS_WHILE_READING)]
)
def test_a_token_that_comes_again_sees_the_compressed_cache(name):
    """If the last token is forgotten and fed again, it attends to the kept tokens and itself."""
    _, steps = run(name, CUTS[0], again=True)
    step = steps[0]
    assert [*step.part] == [PROMPT - 1]
    for layer, (q, k, v) in enumerate(text()):
        kept = (step.before[layer][..., None] == torch.arange(T)).any(2)  # (B, H, T)
        assert not kept[..., PROMPT - 1 :].any()
        kept[..., PROMPT - 1] = True
        expected = dense(q[:, :, step.part], k, v, kept[:, :, None])
        assert torch.allclose(step.y[layer], expected, atol=1e-5), layer


@pytest.mark.parametrize("name", BUDGETED)
def test_a_conversation_is_compressed_after_each_turn(name):
    """After each turn the caches hold at most the budget, and attention is exact on what they hold."""
    caches, _ = run(name, (PROMPT, 2))
    layers, tokens = text(), torch.arange(T).expand(B, -1)
    for start, stop in ((32, 40), (40, 42)):
        begin_turn(caches)
        for cache, qkv in zip(caches, layers):
            cache.attend(
                *(x[:, :, start:stop] for x in qkv), torch.arange(start, stop)[None]
            )
        if any(x in name for x in ONCE):
            with pytest.raises(ValueError, match="compress once|are known for"):
                compress(Fed(unchanged(), layers), tokens[:, :stop] * 0, caches)
            return
        compress(Fed(unchanged(), layers), tokens[:, :stop], caches)
        assert (
            sum((cache.pos != NEVER).sum().item() for cache in caches)
            <= LAYERS * B * H * BUDGET
        )
    if name in AS_THEY_ARE and not name.startswith(EVICTS_WHILE_READING):
        (q, k, v), cache = layers[0], caches[0]
        kept = (cache.pos[..., None] == torch.arange(T)).any(2)
        # token 0 again, as T
        y = cache.attend(*(x[:, :, :1] for x in (q, k, v)), torch.tensor([[T]]))
        keys, values = (torch.cat((x, x[:, :, :1]), 2) for x in (k, v))
        visible = torch.cat((kept, torch.ones_like(kept[..., :1])), 2)[:, :, None]
        assert torch.allclose(y, dense(q[:, :, :1], keys, values, visible), atol=1e-5)


@each(BUDGETED)
def test_slots_never_exceed_the_budget_and_bytes_say_so(name, cut):
    """The slots of all layers and heads together never exceed the budget, and `bytes` counts them.

    Window methods, KVzip and its variants also keep every token after the prompt.
    """
    caches, steps = walk(name, cut)
    appends = isinstance(caches[0], WindowCache) or name.startswith(APPENDS)
    for step in steps:
        slots = [(kept != NEVER).sum().item() for kept in step.after]
        later = max(step.part.stop - PROMPT, 0) if appends else 0
        if step.part.stop >= PROMPT or name.startswith(EVICTS_WHILE_READING):
            assert sum(slots) <= LAYERS * B * H * (BUDGET + later)
        for n, kept, (live, allocated) in zip(slots, step.after, step.bytes):
            # no position twice
            assert ((kept.diff() > 0) | (kept[..., 1:] == NEVER)).all()
            slot = 4 + D if name in ROUNDED else SLOT  # 4 bits: k and v are D bytes
            assert n * slot <= live <= allocated
    for cache in caches:
        assert cache.bytes()[1] == sum(memory(cache).values())


# methods whose kept tokens depend on rounding, or on the bytes of a number
UNLIKE_IN_16_BITS = "semantic", "kv_reviver", "scissorhands"


@pytest.mark.parametrize(
    "name", [name for name in METHODS if not any(x in name for x in UNLIKE_IN_16_BITS)]
)
def test_bytes_in_16_bits_are_those_of_a_cache_in_16_bits(name):
    """`bytes_in_16_bits` of a 32-bit cache equals the live bytes of a 16-bit cache."""
    caches, _ = walk(name, CUTS[0])
    layers, dtype = [[x.bfloat16() for x in qkv] for qkv in text()], torch.bfloat16
    half, _ = run(name, CUTS[0], layers, dtype=dtype, gates=GATES.to(dtype))
    assert (
        bytes_in_16_bits(caches)
        == bytes_in_16_bits(half)
        == cache_bytes(half)[0]
        < cache_bytes(caches)[0]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_16_bits_choose_as_64_bits_do(name, dtype):
    """Queries and keys share a large channel, as Qwen2's do: their product exceeds float16 before
    scaling."""
    layers = [
        [x.index_fill(-1, torch.tensor([3]), 300.0) for x in (q, k)] + [v]
        for q, k, v in text()
    ]
    few, many = (
        [[x.to(dtype).to(wide) for x in qkv] for qkv in layers]
        for wide in (dtype, torch.float64)
    )
    (*_, found), (*_, right) = (
        run(name, CUTS[0], x, dtype=x[0][0].dtype, gates=GATES.to(x[0][0].dtype))[1]
        for x in (few, many)
    )
    kept = lambda step: torch.stack(
        [(pos[..., None] == torch.arange(T)).any(-2) for pos in step.after]
    )
    assert all(y.isfinite().all() for y in found.y)
    # 32 bits may still round two scores to one
    if not any(x in name for x in UNLIKE_IN_16_BITS):
        assert (kept(found) == kept(right)).float().mean() > 0.99


NOT_OURS = (
    "previous",
    "model",
    "select",
    "chunk_ends",
    "gates",
    "flip",
    "bucket_by",
    "sign_by",
)


def memory(x, of=None) -> dict[int, int]:
    """Return the bytes by address of all tensors that a cache refers to, except the decoder's."""
    of = {} if of is None else of
    if isinstance(x, torch.Tensor):
        of[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    elif isinstance(x, dict):
        for name, y in x.items():
            if name not in NOT_OURS:
                memory(y, of)
    elif isinstance(x, (list, tuple)):
        for y in x:
            memory(y, of)
    elif hasattr(x, "__dict__") and not isinstance(x, type):
        memory(vars(x), of)
    return of


@pytest.mark.parametrize(
    "name", [name for name in METHODS if not name.startswith(DRAWN)]
)
def test_a_row_of_a_batch_is_what_it_is_alone(name):
    """A text keeps the same tokens and gets the same outputs in a batch as alone."""
    _, steps = walk(name, CUTS[0])
    for b in range(B):
        _, alone = run(name, CUTS[0], rows=slice(b, b + 1))
        for step, one in zip(steps, alone):
            for y, other, kept, few in zip(step.y, one.y, step.after, one.after):
                assert torch.allclose(y[b], other[0], atol=1e-5)
                assert (
                    kept[b][kept[b] != NEVER].tolist()
                    == few[0][few[0] != NEVER].tolist()
                )


@pytest.mark.parametrize(
    "name", [name for name in BUDGETED if not any(x in name for x in GAPS)]
)
def test_of_tokens_that_nobody_looks_at_the_newest_stay(name):
    """Among tokens without attention the newest stay.

    Every query gives all its weight to token 0, so the evicted tokens must be one stretch in the
    middle.
    """
    q, k, v = (
        torch.zeros(B, H * G, T, D),
        torch.zeros(B, H, T, D),
        torch.zeros(B, H, T, D),
    )
    q[..., 0], k[:, :, 0, 0] = 1, 1000
    _, steps = run(name, CUTS[0], layers=[[q, k, v]] * LAYERS, kernel_size=1)
    for kept in (
        head for step in steps for layer in step.after for head in layer.flatten(0, 1)
    ):
        gaps = kept[kept != NEVER].diff()
        assert (gaps > 1).sum() == (kept[0] == 0 and len(gaps) + 1 <= kept[-1])
        # sinks
        assert kept[0] > 0 or not (gaps > 1).any() or kept[(gaps > 1).nonzero()[0]] < 4


NEW = BUDGET + 2
alone = once(lambda: generate(unchanged(), TOKENS[:, :1], NEW))


@pytest.mark.parametrize("name", [name for name in METHODS if "+" not in name])
def test_a_prompt_of_one_token(name):
    """A prompt of one token works, although nothing is cached yet when it ends."""
    Method, model = METHODS[name], unchanged()
    for budget in (2 * NEW, BUDGET):
        options = given(Method, **OPTIONS | dict(budget=budget, residual_length=NEW))
        caches = make_cache(model, Method, **options)
        tell_chunk_ends(caches, ENDS[:, :1])
        tokens = generate(model, TOKENS[:, :1], NEW, caches)
        assert tokens.shape == (2, NEW) and (
            budget == BUDGET or torch.equal(tokens, alone())
        )


# ---- loops: which tokens stay. Parts evict from the end of the prompt on ---


def streaming(q, k, parts, prompt, budget, sinks=4):
    """Section 3.2: keep the first tokens and the most recent ones."""
    for part in parts:
        n = part.stop
        everything = n < prompt or n <= budget
        yield [
            [
                [*range(n)]
                if everything
                else [*range(sinks), *range(n - budget + sinks, n)]
            ]
            * H
        ] * B


def heavy_hitters(q, k, parts, prompt, budget, recent=0.5):
    """Algorithm 1: F accumulates attention; the token with the least F outside the recent ones is
    evicted."""
    F = [[{} for _ in range(H)] for _ in range(B)]
    for part in parts:
        for b in range(B):
            for h in range(H):
                score = F[b][h]
                score |= dict.fromkeys(part, 0.0)
                for t in part:
                    seen = [i for i in score if i <= t]
                    for g in range(G):
                        p = (k[b, h, seen] @ q[b, h * G + g, t] / math.sqrt(D)).softmax(
                            0
                        )
                        for i, weight in zip(seen, p.tolist()):
                            score[i] += weight
                while part.stop >= prompt and len(score) > budget:
                    old = [
                        i
                        for i in score
                        if i < part.stop - max(1, round(recent * budget))
                    ]
                    del score[min(old, key=lambda i: (score[i], i))]
        yield [[sorted(score) for score in row] for row in F]


def reservoir(q, k, parts, prompt, budget, seed=0):
    """Vitter's reservoir: keep the highest of all priorities drawn so far."""
    generator = torch.Generator().manual_seed(1000 * seed)
    drawn = torch.empty(B, H, 0)
    for part in parts:
        drawn = torch.cat(
            (drawn, *(torch.rand(B, H, 1, generator=generator) for _ in part)), 2
        )
        size = part.stop if part.stop < prompt else budget
        yield [
            [sorted(head.topk(min(size, part.stop)).indices.tolist()) for head in row]
            for row in drawn
        ]


def looked_at_least(q, k, parts, prompt, budget):
    """TOVA, section 3: evict the tokens with the least attention from the newest query, mean over
    all heads.
    """
    kept = [[*range(0)] for _ in range(B)]
    for part in parts:
        for b in range(B):
            kept[b] += part
            weight = dict.fromkeys(kept[b], 0.0)
            for h in range(H * G):
                p = (
                    k[b, h // G, kept[b]] @ q[b, h, part.stop - 1] / math.sqrt(D)
                ).softmax(0)
                for i, x in zip(kept[b], p.tolist()):
                    weight[i] += x
            if part.stop >= prompt:
                kept[b] = sorted(
                    sorted(kept[b], key=lambda i: (weight[i], i))[-budget:]
                )
        yield [[row] * H for row in kept]


def like_the_others(q, k, parts, prompt, budget):
    """KeyDiff, section 3: evict at once the keys with the highest cosine to the mean direction."""
    kept = [[[] for _ in range(H)] for _ in range(B)]
    for part in parts:
        for b in range(B):
            for h in range(H):
                kept[b][h] += part
                unit = {
                    i: (k[b, h, i] / k[b, h, i].norm()).double() for i in kept[b][h]
                }
                mean = sum(unit.values()) / len(unit)
                alike = {i: (x @ mean / mean.norm()).item() for i, x in unit.items()}
                if part.stop >= prompt:
                    kept[b][h] = sorted(
                        sorted(alike, key=lambda i: (-alike[i], i))[-budget:]
                    )
        yield [[*row] for row in kept]


LOOPS = {
    "tova": ("tova", dict(budget=8), looked_at_least, None),
    "tova of one": ("tova", dict(budget=1), looked_at_least, None),
    "key_diff": ("key_diff", dict(budget=7), like_the_others, 0),
    # their keys are held twice
    "sinks": ("streaming_llm", dict(budget=9), streaming, 4),
    "no sink": ("streaming_llm", dict(budget=6, sinks=0), streaming, 0),
    "absolute": ("streaming_llm_absolute", dict(budget=9), streaming, 0),
    "h2o": ("h2o", dict(budget=8), heavy_hitters, None),
    "h2o no recent": ("h2o", dict(budget=6, recent=0.0), heavy_hitters, None),
    "h2o all recent": ("h2o", dict(budget=6, recent=1.0), heavy_hitters, None),
    "random": ("random", dict(budget=8), reservoir, None),
    "random seeded": ("random", dict(budget=1, seed=3), reservoir, None),
}


@pytest.mark.parametrize("case", LOOPS)
@pytest.mark.parametrize("cut", CUTS, ids=["whole", "pieces"])
def test_kept_tokens_equal_the_loop(case, cut):
    """The first layer keeps the loop's tokens, and its bytes are right: a score takes 4 bytes per slot."""
    name, options, loop, sinks = LOOPS[case]
    (q, k, _), (_, steps) = text()[0], run(name, cut, **options)
    for step, kept in zip(
        steps, loop(q, k, [step.part for step in steps], PROMPT, **options)
    ):
        assert step.after[0].tolist() == kept, step.part
        n, moved = len(kept[0][0]), step.before[0].shape[2] < step.part.start
        slot, beside = (SLOT + 4, 0) if sinks is None else (SLOT, sinks * D * 4 * moved)
        live, allocated = step.bytes[0]
        assert live == B * H * (n * slot + beside)
        assert allocated <= B * H * (1.1 * (n + len(step.part)) * slot + beside)


@pytest.mark.parametrize("options", [dict(budget=9), dict(budget=6, sinks=0)])
def test_streaming_counts_positions_in_the_cache(options):
    """StreamingLLM's output is attention with keys and queries rotated by their places in the cache."""
    (q, k, v), cache, cut = text()[0], StreamingLLM(**options), CUTS[1]
    link(cache, freq=FREQ)
    token = torch.arange(T)
    stored_q, stored_k = turn(q, token), turn(k, token)
    for stop, n in zip(accumulate(cut), cut):
        part = slice(stop - n, stop)
        tokens = torch.cat((held(cache)[0, 0], token[part])).long()
        y = cache.attend(
            stored_q[:, :, part], stored_k[:, :, part], v[:, :, part], token[None, part]
        )
        place = torch.arange(len(tokens))
        visible = (place <= place[-n:, None]).expand(B, H, n, len(tokens))
        rotated_q, rotated_k = (
            turn(q[:, :, part], place[-n:]),
            turn(k[:, :, tokens], place),
        )
        expected = dense(rotated_q, rotated_k, v[:, :, tokens], visible)
        assert torch.allclose(y, expected, atol=1e-5), part
        if stop == PROMPT:
            end(cache)


# ---- each method's own ---


@pytest.mark.parametrize("chunk", [300, 1])
@pytest.mark.parametrize(
    "Method, options",
    [(H2O, dict(budget=300)), (CaM, dict(budget=300)), (KVReviver, dict(budget=300))],
)
def test_attention_is_added_up_in_32_bits(Method, options, chunk):
    """Accumulated attention has 32 bits even if the model has 16, where large sums would stop growing."""

    class Notes(Method):
        def observe(self, q, p):
            expected[..., : p.shape[-1]] += p.double().sum((2, 3))
            super().observe(q, p)

    cache, g = Notes(**options), torch.Generator().manual_seed(0)
    expected = torch.zeros(B, H, 300, dtype=torch.float64)
    q, k, v = (
        torch.randn(B, heads, 300, D, generator=g).bfloat16() for heads in (H * G, H, H)
    )
    k[:, :, 0] = 4 * q[:, ::G].mean(2)
    for part in torch.arange(300).split(chunk):
        cache.attend(*(x[:, :, part] for x in (q, k, v)), part[None])
    total = cache.score if Method is KVReviver else cache.slot("accumulated")
    torch.testing.assert_close(total[..., :300].double(), expected, rtol=1e-5, atol=0)
    assert cache.k.dtype == torch.bfloat16


def test_random_differs_by_seed_layer_head_and_row_and_by_nothing_else():
    """Random eviction depends on seed, layer, head and row of the batch, and on nothing else."""

    def kept(seed):
        model = decoder()
        caches = make_cache(model, RandomEviction, budget=8, seed=seed)
        generate(model, TOKENS, 4, caches)
        # (L, B, H, 8)
        return torch.stack([cache.pos.sort(-1).values for cache in caches])

    one, other = kept(0), kept(1)
    assert torch.equal(one, kept(0))
    assert len(torch.cat((one, other)).flatten(0, 2).unique(dim=0)) == 2 * 3 * 2 * 2


@torch.inference_mode()
def test_streaming_on_learned_positions_needs_them_absolute():
    """Without RoPE, relative StreamingLLM is refused and absolute StreamingLLM works."""
    model = decoder(family="gpt2", n_kv_heads=6)
    with pytest.raises(
        ValueError, match="which this model does not have; use streaming_llm_absolute"
    ):
        make_cache(model, StreamingLLM, budget=8)
    caches = make_cache(model, StreamingLLM, budget=40, relative=False)
    assert torch.allclose(model(TOKENS, caches), model(TOKENS), atol=1e-5)


@pytest.mark.parametrize(
    "Method, options, message",
    [
        (H2O, dict(budget=8, recent=1.5), "recent is 1.5"),
        (StreamingLLM, dict(budget=4), "budget 4 must be at least 5: 4 sinks"),
        (RandomEviction, dict(budget=0), "budget 0 must be at least 1"),
        (
            Scissorhands,
            dict(budget=20, recent=-1),
            "recent is -1; it must be at least 0",
        ),
        (
            Scissorhands,
            dict(budget=20, history=2**62),
            "history 4611686018427387904 must be .* to 1048576$",
        ),
        (
            Scissorhands,
            dict(budget=17, recent=10, at_a_time=8),
            "budget 17 must be at least 18: the newest 10",
        ),
        (
            CaM,
            dict(budget=20, recent=1.1),
            "budget 20 must be at least 23: the newest 22 stay",
        ),
        (Quantized, dict(bits=9), "bits 9"),
        (FactoredFourCache, dict(tile=0), "tile is 0; it must be"),
        (SubGen4Cache, dict(radius=math.nan, samples=1, draws=1), "must be"),
    ],
)
def test_bad_options_are_refused_at_construction(Method, options, message):
    """A wrong option raises ValueError when the cache is made."""
    with pytest.raises(ValueError, match=message):
        Method(**options)
