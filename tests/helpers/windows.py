"""Run a prompt through a window method, and compare the result with loops written from the papers.

`Case` pairs a method with the loops that say what it keeps. `check_walk(case, prompt)` compares
slots, positions and bytes; test_methods.py compares outputs. Loops work on lists: scores [i] or
[h][i], weights A and norms [g][i] of a head.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common import chunks_of, end, feed, link
from methods.baselines.snap_kv import SnapKV
from nanollm import window
from nanollm.cache import NEVER, begin_turn
from nanollm.generate import tell_chunk_ends
from nanollm.window import Selection, WindowCache

B, D, LAYER, LAYERS = 2, 4, 1, 4


# ---- loops: how many entries a head keeps, and which ---


def highest(score, n, but=()):
    """Return the n highest scores; ties: the newest."""
    return sorted(set(range(len(score))) - set(but), key=lambda i: (-score[i], -i))[:n]


def pool(score, kernel_size):
    half = kernel_size // 2
    return [max(score[max(0, i - half) : i + half + 1]) for i in range(len(score))]


def mean(heads):
    return [sum(column) / len(heads) for column in zip(*heads)]


def fair(exact):
    """Round to whole numbers with the same sum: the largest remainders up, the first of equal ones."""
    counts = [math.floor(x) for x in exact]
    while sum(counts) < sum(exact):
        counts[max(range(len(exact)), key=lambda i: exact[i] - counts[i])] += 1
    return counts


def same_for_all(scores, b, **_):
    return [b] * len(scores)


def by_depth(scores, b, beta=20, layer=LAYER, layers=LAYERS, seen=None, **_):
    """PyramidKV: the layers' mean is b, so the last layer is as far below b as the first is above."""
    top = min(2 * b - Fraction(b, beta), seen or len(scores[0]))
    step = Fraction(2 * (top - b), layers - 1)
    return [fair([top - i * step for i in range(layers)])[layer]] * len(scores)


def by_head(scores, b, floor=0.2, **_):
    """AdaKV: a head gets a floor, and its entries among the layer's highest scores."""
    H, floor = len(scores), Fraction(str(floor))
    everywhere = sorted(
        (-score, -i, -h) for h in range(H) for i, score in enumerate(scores[h])
    )[: H * b]
    return fair(
        [
            floor * b + (1 - floor) * sum(h == -minus for *_, minus in everywhere)
            for h in range(H)
        ]
    )


def by_weight(A, norms, out, b, kernel_size, **_):
    """Algorithm 2 of CriticalKV, line 6."""
    return highest(pool(mean(A)[:out], kernel_size), b)


def by_chunk(
    A,
    norms,
    out,
    b,
    kernel_size,
    chunk_size,
    score,
    fill,
    heads=(),
    at=None,
    ends=(),
    semantic=False,
    together=False,
    **_,
):
    """ChunkKV: take chunks of the text by their scores: those that fit whole, or with `fill` cut to
    b tokens.

    at: each entry's place in the text, if part of the text is left.
    """
    scores = mean(
        [pool(mean(a)[:out], kernel_size) for a in (heads if together else [A])]
    )
    of = {"sum": math.fsum, "mean": lambda x: math.fsum(x) / len(x), "max": max}[score]
    chunks = {}
    for i in range(out):
        chunks.setdefault((at or range(out))[i] // chunk_size, []).append(i)
    chunks = (
        chunks_of(out, chunk_size, range(out), ends) if semantic else chunks.values()
    )
    kept = []
    for part in sorted(
        chunks, key=lambda part: (-of([scores[i] for i in part]), -part[0])
    ):
        if fill or len(kept) + len(part) <= b:
            kept += part
    return kept[:b]


def residual(gone, q, k, v, rows, entries, rounds=0, share=1.0):
    """Return slots for the evicted tokens `gone` of one head: q (G, w, D), k, v (T, D), rows (G, w, T)."""
    groups = [[] for _ in range(entries)]
    for j, i in enumerate(gone):
        groups[j * entries // len(gone)].append(i)

    scores, (G, w, T) = rows.mean((0, 1)), rows.shape
    for _ in range(rounds):
        centres = [
            (scores[group, None] * k[group]).sum(0) / scores[group].sum()
            for group in groups
        ]
        groups = [[] for _ in range(entries)]
        for i in gone:
            groups[
                min(range(entries), key=lambda e: (k[i] - centres[e]).norm())
            ].append(i)

    for group in sorted(groups, key=max):
        key, value = [
            (scores[group, None] * x[group]).sum(0) / scores[group].sum()
            for x in (k, v)
        ]
        reach = 0
        for g, t in product(range(G), range(w)):
            Z = (k[: T - w + t + 1] @ q[g, t] / math.sqrt(D)).exp().sum()
            reach += (q[g, t] @ key / math.sqrt(D)).exp() / Z
        yield group[-1], key, value, math.log(share * rows[..., group].sum() / reach)


# ---- cases and prompts ---


class Case(NamedTuple):
    Method: type = SnapKV
    options: dict = {}  # options of the cache
    # or a function of a prompt; None: the Method's own
    select: Selection | Callable | None = None
    deal: Callable = same_for_all  # entries per head, from [h][i] pooled window scores
    choose: Callable = by_weight  # entries of a head


class Prompt(NamedTuple):
    T: int
    chunk_size: int  # tokens per part
    H: int
    G: int
    window_size: int
    budget: int
    kernel_size: int = 7
    # the window's probabilities are a few exact numbers, and so are the norms
    tied: bool = False
    # newest tokens that are forgotten before the compression, and come again after it
    cropped: int = 0


GROUPED, TIED = Prompt(53, 53, 2, 2, 8, 20), Prompt(37, 36, 2, 4, 4, 17, 3, True)
# as in the measurements where the prompt has the question
AGAIN = Prompt(53, 53, 2, 2, 8, 20, cropped=1)
PROMPTS = [
    Prompt(53, 1, 2, 2, 8, 20),
    Prompt(53, 5, 2, 2, 8, 20),
    Prompt(37, 37, 3, 1, 4, 13, 1),
    Prompt(37, 34, 2, 4, 4, 9, 3),
    Prompt(37, 9, 2, 4, 5, 6),
    Prompt(38, 38, 4, 1, 7, 37),
    Prompt(9, 2, 3, 2, 1, 4),
    Prompt(53, 53, 2, 2, 8, 20, 7, True),
    Prompt(37, 37, 4, 1, 4, 13, 1, True),
    # everything fits
    Prompt(13, 13, 2, 2, 4, 14),
    Prompt(13, 4, 2, 1, 8, 13),
    Prompt(5, 3, 2, 2, 8, 9),
    Prompt(37, 9, 2, 2, 4, 9, 3, cropped=3),
    Prompt(21, 21, 2, 1, 1, 6, 1, cropped=1),
    Prompt(37, 37, 2, 2, 4, 12, 3, True, cropped=1),
    Prompt(21, 21, 2, 2, 4, 20, cropped=1),
    Prompt(21, 21, 2, 2, 4, 15, cropped=1),
]


def name_of(x) -> str:
    """Return a test's name for a case's name or a prompt."""
    return x if isinstance(x, str) else "-".join(str(int(number)) for number in x)


def options_of(select) -> dict:
    """Return the options of a selection and of the one inside it."""
    own = dict(vars(select))
    return options_of(own.pop("inner")) | own if "inner" in own else own


# ---- the walk ---


class Slots(NamedTuple):
    pos: Tensor  # (n,)
    k: Tensor  # (n, D)
    v: Tensor
    bias: Tensor  # (n,)


class Walk(NamedTuple):
    cache: WindowCache
    raw: tuple[Tensor, Tensor, Tensor]  # q, k, v
    rows: Tensor  # (B, H, G, w, T): the window's probabilities
    w_o: Tensor
    slots: list[list[Slots]]  # [b][h], when the prompt is compressed
    # positions and bytes after the compression, and after each later part
    steps: list[tuple]


def live(cache, b, h) -> Slots:
    """Return the slots of one head that hold an entry."""
    bias = cache.slot("bias") if "bias" in cache.slots else torch.zeros(cache.pos.shape)
    there = cache.pos[b, h] != NEVER
    return Slots(*(x[b, h, there] for x in (cache.pos, cache.k, cache.v, bias)))


def walk(case: Case, prompt: Prompt) -> Walk:
    """Feed the prompt in parts, forget its newest tokens, compress the others, and feed six more."""
    T, chunk_size, H, G, w, budget, kernel_size, tied, cropped = prompt
    g = torch.Generator().manual_seed(T)
    q, k, v = [torch.randn(B, heads, T + 6, D, generator=g) for heads in (H * G, H, H)]
    w_o, q, ends = (
        torch.randn(6, H * G, D, generator=g),
        2 * q,
        torch.rand(B, T, generator=g) < 1 / 6,
    )

    rows = torch.zeros(B, H, G, min(w, T), T)
    for b, h, j, t in product(*map(range, rows.shape[:4])):
        n = T - rows.shape[3] + t + 1
        rows[b, h, j, t, :n] = (
            k[b, h, :n] @ q[b, h * G + j, n - 1] / math.sqrt(D)
        ).softmax(0)
    if tied:
        v, w_o, rows = (
            v.round(),
            w_o.round(),
            torch.randint(0, 4, rows.shape, generator=g) / 16,
        )

    select = case.Method.select if case.select is None else case.select
    if not isinstance(select, Selection):
        select = select(prompt)
    cache = case.Method(
        budget=budget,
        window_size=w,
        kernel_size=kernel_size,
        select=select,
        **case.options,
    )
    link(cache, LAYER, LAYERS, w_o=w_o)
    tell_chunk_ends([cache], ends)

    feed(cache, *(x[:, :, :T] for x in (q, k, v)), chunk_size)
    if cropped:
        cache.crop(T - cropped // 2)
        cache.crop(T - cropped)
    assert tied or torch.allclose(
        window.window_rows(*cache.observed()), rows, atol=1e-6
    )
    with pytest.MonkeyPatch.context() as patch:  # rounding must not break ties
        for module in ("nanollm.window", "methods.ours.theta"):
            patch.setattr(f"{module}.window_rows", lambda q, k, empty=None: rows)
        end(cache)
    slots = [[live(cache, b, h) for h in range(H)] for b in range(B)]
    steps = [(cache.pos.clone(), cache.bytes())]
    for a, z in pairwise([T - cropped + new for new in (0, 1, 2, 5, 6)]):
        feed(cache, *(x[:, :, a:z] for x in (q, k, v)), first=a)
        steps.append((cache.pos.clone(), cache.bytes()))
    return Walk(cache, (q, k, v), rows, w_o, slots, steps)


def slots_by_loop(case: Case, prompt: Prompt, got: Walk) -> list[list[Slots]]:
    """Return the slots that Algorithm 2 of CriticalKV leaves of the prompt, [b][h]."""
    (T, _, H, G, w, budget, kernel_size, _, cropped), (q, k, v) = prompt, got.raw
    n = T - cropped
    if n <= budget:
        at, bias = torch.arange(n), torch.zeros(n)
        return [
            [Slots(at, k[b, h, :n], v[b, h, :n], bias) for h in range(H)]
            for b in range(B)
        ]

    out, options, heads = T - w, case.options | options_of(got.cache.select), []
    for b in range(B):
        A = got.rows[b, ..., :n].mean(2).tolist()
        budgets = case.deal(
            [pool(mean(a)[:out], kernel_size) for a in A],
            budget - (w - cropped),
            **options,
        )
        for h, room in enumerate(budgets):
            norms = [
                (v[b, h, :n] @ got.w_o[:, h * G + g].T).abs().sum(-1).tolist()
                for g in range(G)
            ]
            entries = (
                options.get("entries", 0)
                if options.get("entries", 0) <= room < out
                else 0
            )
            kept = case.choose(
                A[h],
                norms,
                out,
                room - entries,
                kernel_size,
                heads=A,
                ends=got.cache.chunk_ends[b],
                **options,
            )
            slots = [(i, k[b, h, i], v[b, h, i], 0) for i in [*kept, *range(out, n)]]
            if entries:
                gone, group = (
                    sorted(set(range(out)) - set(kept)),
                    slice(h * G, h * G + G),
                )
                how = {name: options[name] for name in ("entries", "rounds", "share")}
                slots += residual(
                    gone,
                    q[b, group, out:T],
                    k[b, h, :T],
                    v[b, h, :T],
                    got.rows[b, h],
                    **how,
                )
            pos, *vectors, bias = zip(*sorted(slots, key=lambda slot: slot[0]))
            heads.append(
                Slots(
                    torch.tensor(pos),
                    *map(torch.stack, vectors),
                    torch.tensor(bias).float(),
                )
            )
    return [heads[b * H : (b + 1) * H] for b in range(B)]


def check_walk(case: Case, prompt: Prompt):
    """Check that slots are the loops', that decoding only appends, and that `bytes` counts the slots."""
    n, H, got = prompt.T - prompt.cropped, prompt.H, walk(case, prompt)
    slots = slots_by_loop(case, prompt, got)
    for b, h in product(range(B), range(H)):
        assert got.slots[b][h].pos.tolist() == slots[b][h].pos.tolist()
        for x, expected in zip(got.slots[b][h][1:], slots[b][h][1:]):
            assert torch.allclose(x, expected, atol=1e-5)

    counts = [len(head.pos) for row in slots for head in row]
    slot, table = (
        2 * 4 * D + 4 + 4 * ("bias" in got.cache.slots),
        8 * B * H * (len({*counts}) > 1),
    )
    for new, (pos, (live, allocated)) in zip((0, 1, 2, 5, 6), got.steps, strict=True):
        total = sum(counts) + B * H * new
        assert (pos != NEVER).sum() == total and pos.shape[2] == max(counts) + new
        assert (
            pos[:, :, max(counts) :] == torch.arange(n, n + new)
        ).all() and live == slot * total + table
        assert live <= allocated <= 1.1 * live + table
    assert got.cache.seen == n + 6


# ---- a conversation, compressed after each turn ---


def check_turns(case: Case, turns, H=2, G=2, w=4, budget=12, kernel_size=3):
    """Check the outputs, entries and bytes of each turn against loops; turns: their lengths in tokens."""
    total, select = sum(turns), case.select or case.Method.select
    g = torch.Generator().manual_seed(total)
    q, k, v = [torch.randn(B, heads, total, D, generator=g) for heads in (H * G, H, H)]
    q, w_o, options = (
        2 * q,
        torch.randn(6, H * G, D, generator=g),
        case.options | options_of(select),
    )
    cache = case.Method(budget, w, kernel_size, select, **case.options)
    link(cache, LAYER, LAYERS, w_o=w_o)

    def attention(b, h, g, t, at):
        """Return the weights that query t of head g of a group gives to the tokens `at`; later ones
        get 0."""
        score = (k[b, h, at] @ q[b, h * G + g, t] / math.sqrt(D)).masked_fill(
            torch.tensor(at) > t, -math.inf
        )
        return score.softmax(0)

    def compressed(held, n, w):  # [b][h]: the kept ones of n tokens
        for b, heads in enumerate(held):
            A = [
                [
                    (
                        sum(attention(b, h, g, t, at) for t in range(n - w, n)) / w
                    ).tolist()
                    for g in range(G)
                ]
                for h, at in enumerate(heads)
            ]
            pooled = [pool(mean(a)[:-w], kernel_size) for a in A]
            for h, room in enumerate(
                case.deal(pooled, budget - w, seen=n - w, **options)
            ):
                at, out = heads[h], len(heads[h]) - w
                norms = [
                    (v[b, h, at] @ w_o[:, h * G + g].T).abs().sum(-1).tolist()
                    for g in range(G)
                ]
                kept = case.choose(
                    A[h], norms, out, min(room, out), kernel_size, at=at, **options
                )
                heads[h] = [at[i] for i in sorted(kept)] + at[out:]

    held, n = [[[] for _ in range(H)] for _ in range(B)], 0
    for turn in turns:
        begin_turn([cache])
        y = feed(cache, *(x[:, :, n : n + turn] for x in (q, k, v)), first=n)
        for t in range(n, n + turn):
            for b, h in product(range(B), range(H)):
                held[b][h].append(t)
                expected = [
                    attention(b, h, g, t, held[b][h]) @ v[b, h, held[b][h]]
                    for g in range(G)
                ]
                assert torch.allclose(
                    y[b, h * G : h * G + G, t - n], torch.stack(expected), atol=1e-5
                )
        n += turn
        end(cache)
        if n > budget:
            compressed(held, n, min(w, turn))
        assert [
            [live(cache, b, h).pos.tolist() for h in range(H)] for b in range(B)
        ] == held
        slots, table = (
            sum(len(at) for heads in held for at in heads),
            8 * B * H * bool(cache.packed),
        )
        assert cache.seen == n and cache.bytes()[0] == slots * (2 * 4 * D + 4) + table


# ---- caches after a prompt ---


def compressed(cache, q, k, v, w_o=None, layer=0, layers=1):
    """Return the cache after a prompt fed at once."""
    link(cache, layer, layers, w_o=w_o)
    feed(cache, q, k, v)
    end(cache)
    return cache


def uneven(cache, T, H=4, G=2, d=2):
    """Feed a prompt in which head 0 attends to all tokens alike, and the other heads only to token 5."""
    q, k, v = (
        torch.zeros(B, H * G, T, d),
        torch.zeros(B, H, T, d),
        torch.randn(B, H, T, d),
    )
    q[..., 0], k[:, 1:, 5, 0] = 1, 1000
    return compressed(cache, q, k, v, torch.randn(3, H * G, d))
