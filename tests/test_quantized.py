"""KIVI's rounded cache: packing, codes against a plain loop, what is rounded when, attention over the rounded, bytes by hand;
and the same by attention: a head as a loop, token by token."""
from copy import deepcopy
from functools import cache as once
from itertools import pairwise, product
import math
import struct

from hypothesis import given, settings, strategies as st
import pytest
import torch

from methods.quantized import LowBitVague, Quantized, pack, quantise, unpack, variants
from nanollm import TINY
from nanollm.cache import finish_prompt, make_cache
from nanollm.evaluate import continuation, reference, text_windows
from nanollm.generate import generate
from nanollm.weights import from_hf
from test_cache import dense
from test_data import tasks
from test_methods import TOKENS, decoder, reads_and_decodes_as_the_full_cache

F64 = torch.float64
B, H, G, D = 2, 2, 3, 16
every_bits = pytest.mark.parametrize("bits", range(1, 9))


def check(examples, *strategies):
    return lambda test: settings(max_examples=examples, deadline=None)(given(*strategies)(test))


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# ---- packing ---


@check(100, st.integers(0, 2**32 - 1), st.integers(1, 8), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 5))
def test_unpacking_undoes_packing_and_so_many_bits_a_code_are_all_it_takes(seed, bits, shape, eighths):
    code = torch.randint(0, 2**bits, (*shape, 8 * eighths), generator=torch.Generator().manual_seed(seed))
    packed = pack(code, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape, bits, eighths)
    assert packed.nbytes * 8 == bits * code.numel()
    assert unpack(packed).shape == code.shape and torch.equal(unpack(packed).long(), code)


@every_bits
def test_the_lowest_bits_of_eight_codes_are_a_byte(bits):
    code = [(37 * i + 11) % 2**bits for i in range(16)]
    loop = [[sum((code[8 * byte + i] >> bit & 1) << i for i in range(8)) for byte in range(2)] for bit in range(bits)]
    assert pack(torch.tensor(code), bits).tolist() == loop


@every_bits
def test_every_code_comes_back(bits):
    code = torch.arange(2**bits).repeat(8).view(2, -1)
    assert torch.equal(unpack(pack(code, bits)).long(), code)


# ---- rounding ---


def half(x):
    """By way of 32 bits, as in torch."""
    for form in "fe":
        x, = struct.unpack(form, struct.pack(form, x))
    return x


def by_loop(group, bits):
    """A list of numbers that share a range: their codes, zero and scale."""
    zero = half(min(group))
    scale = half((max(group) - zero) / (2**bits - 1))
    return [min(max(round((x - zero) / scale), 0), 2**bits - 1) if scale > 0 else 0 for x in group], zero, max(scale, 0)


def restored(group, bits):
    code, zero, scale = by_loop(group, bits)
    return torch.tensor([zero + scale * c for c in code], dtype=F64)


def read_back(x, bits, dim=-1):
    code, zero, scale = quantise(x, bits, dim)
    assert 0 <= code.min().item() and code.max().item() < 2**bits and zero.dtype == scale.dtype == torch.float16
    return zero.to(F64) + scale.to(F64) * code


@every_bits
@pytest.mark.parametrize("dim", [2, 4])
@pytest.mark.parametrize("far", [0, 30, -30])
def test_codes_zero_and_scale_are_the_loop_s(bits, dim, far):
    x = far + random(2, 1, 7, 3, 5, seed=bits) * 10.0 ** torch.arange(-2, 1).view(-1, 1)
    groups = [part.movedim(dim, -1).flatten(0, -2) for part in quantise(x, bits, dim)]
    assert [part.shape[-1] for part in groups] == [x.shape[dim], 1, 1]
    for group, code, zero, scale in zip(x.movedim(dim, -1).flatten(0, -2).tolist(), *groups):
        expected = by_loop(group, bits)
        assert (zero.item(), max(scale.item(), 0)) == expected[1:] and (code.tolist() == expected[0] or expected[2] == 0)


@check(200, st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 40), st.floats(-9, 4), st.floats(-9, 4),
       st.sampled_from([-1, 0, 1]))
def test_the_error_is_half_a_step_and_what_sixteen_bits_cost(seed, bits, n, wide, far, sign):
    """Of the smallest half, 2⁻²⁴, half is lost in zero, and in the scale, which counts so often as there are steps."""
    x = sign * 10**far + random(8, n, seed=seed).clamp(-3, 3) * 10**wide
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    cost = (low.abs() * 2**-11).clamp(min=2**-25) + 2**bits * 2**-25
    assert ((read_back(x, bits) - x).abs() <= step / 2 * (1 + 2**-9) + cost * (1 + 1e-6)).all()


@every_bits
def test_a_range_of_whole_steps_is_kept_exactly(bits):
    """Both ends and all between; down to the smallest step that a half can say."""
    for zero, scale in ((0, 1), (-5, 0.25), (100, 2), (-3e4, 64), (0, 2**-24), (-2**-18, 2**-24), (0, 2**-23)):
        x = zero + scale * torch.arange(2**bits, dtype=F64)[None]
        for dtype in (F64, torch.float32):
            assert torch.equal(read_back(x.to(dtype), bits), x), (zero, scale, dtype)


@every_bits
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16, torch.bfloat16])
def test_a_group_of_equal_numbers_is_as_exact_as_its_zero(bits, dtype):
    """The scale of what a half says exactly adds nothing; of what it does not, it is the rest, or none."""
    x = torch.tensor([[c] * 5 for c in (0, -0.0, 1, -7.5, 2**-24, -(2**-20), 65504, -65504)], dtype=dtype)
    x = x[x.to(torch.float16).to(dtype).isfinite().all(-1)]
    assert torch.equal(read_back(x, bits), x.to(F64))
    y = torch.tensor([[c] * 5 for c in (0.1, -0.1, 1 / 3, 1000.3, -1000.3, 1e-9, -1e-9)], dtype=dtype).to(F64)
    assert ((read_back(y.to(dtype), bits) - y).abs() <= (y.abs() * 2**-11).clamp(min=2**-24)).all()


@every_bits
def test_one_far_number_spoils_its_own_group_only(bits):
    x = random(4, 9)
    far = x.clone()
    far[1, 3] = 1000
    assert torch.equal(read_back(far, bits)[[0, 2, 3]], read_back(x, bits)[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers, bits", [([1e5, 1e5], 2), ([-1e5, 1.0], 8), ([7e4, 8e4], 2), ([-6e4, 6e4], 1)])
def test_what_no_half_holds_is_refused(numbers, bits, dtype):
    """Zero or scale would be infinite and attention NaN."""
    with pytest.raises(ValueError, match="large"):
        quantise(torch.tensor([numbers], dtype=dtype), bits, 1)


# ---- what is rounded, and when ---


def rounded(k, v, n, bits, group):
    """Keys and values (B, H, T, D), the first n tokens rounded."""
    k, v = k.to(F64).clone(), v.to(F64).clone()
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            for t in range(0, n, group):
                for d in range(k.shape[3]):
                    k[b, h, t:t + group, d] = restored(k[b, h, t:t + group, d].tolist(), bits)
            for t in range(n):
                for d in range(0, k.shape[3], group):
                    v[b, h, t, d:d + group] = restored(v[b, h, t, d:d + group].tolist(), bits)
    return k, v


def old(T, group, exact):
    """How many of T tokens are rounded: a group at a time, as long as so many exact ones remain."""
    n = 0
    while T - n - group >= exact:
        n += group
    return n


CASES = {  # knobs, tokens of the prompt
    "2 bits": (dict(bits=2, group=8, exact=5), 25),
    "1 bit": (dict(bits=1, group=4, exact=0), 12),
    "3 bits": (dict(bits=3, group=16, exact=1), 20),
    "more tokens than channels": (dict(bits=5, group=17, exact=1), 27),
    "8 bits": (dict(bits=8, group=2, exact=7), 9),
    "each alone": (dict(bits=4, group=1, exact=3), 10),
    "later": (dict(bits=2, group=4, exact=9), 5),
    "just enough": (dict(bits=2, group=8, exact=8), 16),
    "one too few": (dict(bits=2, group=8, exact=8), 15),
    "never": (dict(bits=2, group=16, exact=30), 20),
    "prompt of none": (dict(bits=6, group=4, exact=2), 0),
    "nothing exact": (dict(bits=7, group=1, exact=0), 3),
}
T = 36
STARTS = {"at 0": torch.zeros(1, 1), "at 1000": torch.full((1, 1), 1000), "by row": torch.tensor([[1000], [7]])}


@once
def drawn(dtype=F64):
    """q, k, v; as in decoders, some channels of the keys are always large."""
    k = random(B, H, T, D, seed=1)
    k[..., 3] += 20
    k[..., 8] -= 9
    return tuple(x.to(dtype) for x in (random(B, H * G, T, D), k, random(B, H, T, D, seed=2)))


@once
def all_rounded(case):
    knobs, _ = CASES[case]
    return rounded(*drawn()[1:], old(T, knobs["group"], 0), knobs["bits"], knobs["group"])


def expected(case, n, seen):
    """Keys and values of the tokens seen, n of them rounded."""
    return (torch.cat((x[:, :, :n], y[:, :, n:seen]), 2) for x, y in zip(all_rounded(case), drawn()[1:]))


def parts(case, chunk, block):
    prompt = CASES[case][1]
    return pairwise(sorted({*range(0, prompt, chunk), *range(prompt, T, block), T}))


@once
def walk(case, chunk=100, block=1, start="at 0"):
    """Feed the text in parts: (tokens, rounded before, rounded after, output, what is read, bytes, exact slots) of each."""
    knobs, prompt = CASES[case]
    cache, steps = Quantized(**knobs), []
    if not prompt:
        cache.finish_prompt()
    for a, b in parts(case, chunk, block):
        before = cache.seen - cache.length
        y = cache.attend(*(x[:, :, a:b] for x in drawn()), STARTS[start].int() + torch.arange(a, b))
        if b == prompt:
            cache.finish_prompt()
        k, v, at, bias = cache.read()
        assert bias is None
        steps.append((range(a, b), before, cache.seen - cache.length, y, (k, v, at), cache.bytes(), cache.length))
    return steps


each_case = pytest.mark.parametrize("case", CASES)
each_walk = pytest.mark.parametrize("chunk, block", [(100, 1), (7, 1), (1, 1), (4, 5)])


@each_case
@each_walk
def test_whole_groups_are_rounded_the_oldest_first_once_the_prompt_is_over(case, chunk, block):
    knobs, prompt = CASES[case]
    for part, _, after, *_, length in walk(case, chunk, block):
        seen = part.stop
        assert after == (0 if seen < prompt else old(seen, knobs["group"], knobs["exact"])) and length == seen - after
        if seen >= max(prompt, knobs["exact"]):
            assert knobs["exact"] <= length < knobs["exact"] + knobs["group"]


@each_case
@pytest.mark.parametrize("chunk, block, start", [(100, 1, "at 0"), (7, 1, "at 1000"), (1, 1, "by row"), (4, 5, "by row")])
def test_tokens_are_read_in_order_the_rounded_as_the_loop_has_them_and_the_newest_untouched(case, chunk, block, start):
    for part, _, after, _, (k, v, at), *_ in walk(case, chunk, block, start):
        seen = part.stop
        assert k.dtype == v.dtype == F64 and at.dtype == torch.int32
        assert torch.equal(at, (STARTS[start].int() + torch.arange(seen))[:, None].expand(B, H, seen))
        for x, y, z in zip((k, v), expected(case, after, seen), drawn()[1:]):
            assert x.shape == (B, H, seen, D) and torch.allclose(x, y, rtol=1e-12, atol=1e-12), part
            assert torch.equal(x[:, :, after:], z[:, :, after:seen])


@each_case
@each_walk
def test_output_is_dense_attention_over_the_rounded_and_the_exact(case, chunk, block):
    """What a part pushes out is rounded after its attention."""
    for part, before, _, y, *_ in walk(case, chunk, block, "by row"):
        k, v = expected(case, before, part.stop)
        seen = (torch.arange(part.stop) <= torch.tensor(part)[:, None]).expand(B, H, -1, -1)
        assert torch.allclose(y, dense(drawn()[0][:, :, part.start:part.stop], k, v, seen), atol=1e-9), part


@each_case
@each_walk
def test_bytes_are_those_counted_by_hand(case, chunk, block):
    knobs, prompt = CASES[case]
    bits, group = knobs["bits"], knobs["group"]
    channels = D / min(group, D)  # groups of a value's channels
    token, slot, room = 2 * bits * D / 8 + channels * 4, 2 * D * 8 + 4, 0
    for part, before, after, _, _, size, length in walk(case, chunk, block):
        held = part.stop - before
        if held > room:  # a tenth more, but for the first tokens
            room = held + (held // 10 if held > len(part) else 0)
        if after > before:
            room = length
        store = after * token + after // group * D * 4  # of keys: a zero and a scale of 2 bytes a channel
        assert size == (B * H * (length * slot + store), B * H * (room * slot + store)), part


@each_case
def test_copies_go_on_alike_and_leave_each_other_alone(case):
    knobs, prompt = CASES[case]
    q, k, v = drawn()
    for cut in (max(prompt - 3, 0), prompt, prompt + 6):
        cache, others = Quantized(**knobs), Quantized(**knobs)
        outs = []
        for t in range(T):
            if t == prompt:
                cache.finish_prompt()
            if t == cut:
                copy = deepcopy(cache)
                for s in range(t, T):  # another text
                    if s == prompt and cut < prompt:
                        copy.finish_prompt()
                    copy.attend(-q[:, :, s:s + 1], -k[:, :, s:s + 1], -v[:, :, s:s + 1], torch.tensor([[s]]))
                copy = deepcopy(cache)
            now = [x[:, :, t:t + 1] for x in (q, k, v)]
            outs.append(cache.attend(*now, torch.tensor([[t]])))
            if t >= cut:
                if t == prompt and cut < prompt:
                    copy.finish_prompt()
                assert torch.equal(outs[-1], copy.attend(*now, torch.tensor([[t]])))
        assert all(torch.equal(x, y) for x, y in zip(cache.read()[:3], copy.read()[:3])) and cache.bytes() == copy.bytes()
        assert torch.equal(cache.read()[0], walk(case, 1)[-1][4][0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_other_types_of_numbers(dtype):
    cache = Quantized(bits=3, group=8, exact=4)
    q, k, v = drawn(dtype)
    cache.attend(q, k, v, torch.arange(T)[None])
    cache.finish_prompt()
    got = cache.read()
    y = cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], torch.tensor([[T]]))
    assert cache.length == 5 and {x.dtype for x in (*got[:2], y)} == {dtype}
    for x, dim, y in ((k, 2, got[0]), (v, 3, got[1])):
        x, y = (z[:, :, :32].to(F64).unflatten(dim, (-1, 8)) for z in (x, y))
        low, high = x.aminmax(dim=dim + 1, keepdim=True)
        lost = torch.finfo(dtype).eps * torch.maximum(low.abs(), high.abs()) + 2**-11 * low.abs()
        assert ((x - y).abs() <= (high - low) / 7 * 0.52 + lost).all()


# ---- few bits for what has had little attention ---


class Head:
    """LowBitVague for one head. Exact tokens with the attention they have had, and rounded ones in the order in which they left."""

    def __init__(self, bits, group, exact, heavy):
        self.bits, self.group, self.newest, self.heavy = bits, group, exact, heavy
        self.score, self.exact, self.rounded = {}, {}, {}

    def attend(self, q, k, v, part):
        """q (G, T, D), k and v (T, D) of a part's tokens → (G, T, D)."""
        for n, t in enumerate(part):
            self.exact[t], self.score[t] = (k[n], v[n]), 0.0
        y, held = torch.zeros_like(q), self.rounded | self.exact
        keys, values = (torch.stack(x) for x in zip(*held.values()))
        for g, (n, t) in product(range(len(q)), enumerate(part)):
            seen = [i for i, J in enumerate(held) if J <= t]
            p = (keys[seen] @ q[g, n] / math.sqrt(D)).softmax(0)
            y[g, n] = p @ values[seen]
            for J, weight in zip(held, p.tolist()):  # those after t come last
                if J in self.exact:
                    self.score[J] += weight
        return y

    def forget(self):
        n, order = 0, sorted(self.exact)
        while len(order) - n - self.group >= self.newest + self.heavy:
            n += self.group
        others = order[:len(order) - self.newest]
        leave = sorted(sorted(others, key=lambda J: (self.score[J], J))[:n])
        for first in range(0, n, self.group):
            together = leave[first:first + self.group]
            k, v = (torch.stack(x) for x in zip(*(self.exact.pop(J) for J in together)))
            k = torch.stack([restored(column.tolist(), self.bits) for column in k.T], 1)
            v = torch.stack([torch.cat([restored(x.tolist(), self.bits) for x in row.split(self.group)]) for row in v])
            self.rounded |= {J: (k[i], v[i]) for i, J in enumerate(together)}


HEAVY = {  # knobs, tokens of the prompt
    "some": (dict(bits=2, group=4, exact=3, heavy=5), 22),
    "one left over": (dict(bits=3, group=8, exact=4, heavy=3), 24),
    "no newest": (dict(bits=2, group=4, exact=0, heavy=6), 20),
    "no heavy": (dict(bits=4, group=8, exact=5, heavy=0), 18),
    "neither": (dict(bits=1, group=4, exact=0, heavy=0), 14),
    "each alone": (dict(bits=2, group=1, exact=2, heavy=2), 12),
    "more tokens than channels": (dict(bits=5, group=17, exact=1, heavy=2), 22),
    "just enough": (dict(bits=2, group=8, exact=5, heavy=3), 16),
    "one too few": (dict(bits=2, group=8, exact=5, heavy=3), 15),
    "later": (dict(bits=2, group=4, exact=7, heavy=4), 6),
    "never": (dict(bits=2, group=16, exact=10, heavy=20), 20),
    "prompt of none": (dict(bits=6, group=4, exact=2, heavy=3), 0),
}


def parts_of(prompt, chunk, block):
    return pairwise(sorted({*range(0, prompt, chunk), *range(prompt, T, block), T}))


def walk_heavy(case, chunk, block):
    """A cache and its heads as loops, after each part: (cache, heads, tokens, output, the loops' output, bytes)."""
    knobs, prompt = HEAVY[case]
    cache, heads = LowBitVague(**knobs), [[Head(**knobs) for _ in range(H)] for _ in range(B)]
    q, k, v = drawn()
    if not prompt:
        cache.finish_prompt()
    for a, b in parts_of(prompt, chunk, block):
        y = cache.attend(*(x[:, :, a:b] for x in drawn()), torch.arange(a, b)[None])
        expected = torch.stack([torch.cat([heads[i][h].attend(q[i, h * G:(h + 1) * G, a:b], k[i, h, a:b], v[i, h, a:b], range(a, b))
                                           for h in range(H)]) for i in range(B)])
        if b == prompt:
            cache.finish_prompt()
        for head in sum(heads, []) if b >= prompt else []:
            head.forget()
        yield cache, heads, range(a, b), y, expected


each_heavy = pytest.mark.parametrize("case", HEAVY)


@each_heavy
@each_walk
def test_by_attention_what_leaves_how_it_is_rounded_and_what_attention_sees_are_those_of_the_loop(case, chunk, block):
    knobs, prompt = HEAVY[case]
    for cache, heads, part, y, expected in walk_heavy(case, chunk, block):
        assert torch.allclose(y, expected, atol=1e-6), part  # weights have 32 bits
        keys, values, at, bias = cache.read()
        assert bias is None and at.dtype == torch.int32 and keys.dtype == values.dtype == F64
        for b, h in product(range(B), range(H)):
            head, exact = heads[b][h], cache.pos[b, h].tolist()
            assert exact == sorted(head.exact) and at[b, h].tolist() == [*head.rounded, *exact], part
            there = head.rounded | head.exact
            for found, n in ((keys, 0), (values, 1)):
                told = torch.stack([there[J][n] for J in at[b, h].tolist()])
                assert torch.allclose(found[b, h], told, rtol=1e-12, atol=1e-12), part
            score = cache.slot("accumulated")[b, h]
            assert score.dtype == torch.float32 and score.tolist() == pytest.approx([head.score[J] for J in exact], rel=1e-5)
        if part.stop >= prompt:
            least = knobs["exact"] + knobs["heavy"]
            assert min(least, part.stop) <= cache.length < least + knobs["group"]
            assert (at.sort(-1).values == torch.arange(part.stop)).all()  # nothing is dropped


@each_heavy
@each_walk
def test_by_attention_bytes_are_those_counted_by_hand(case, chunk, block):
    knobs, prompt = HEAVY[case]
    token = 2 * knobs["bits"] * D / 8 + D / min(knobs["group"], D) * 4 + 4  # with its position
    slot, room, before = 2 * D * 8 + 4 + 4, 0, 0  # with a position and a score
    for cache, heads, part, *_ in walk_heavy(case, chunk, block):
        held, after = part.stop - before, len(heads[0][0].rounded)
        if held > room:
            room = held + (held // 10 if held > len(part) else 0)
        if after > before:
            room = len(heads[0][0].exact)
        store, before = after * token + after // knobs["group"] * D * 4, after
        assert cache.bytes() == (B * H * ((part.stop - after) * slot + store), B * H * (room * slot + store)), part


@each_heavy
def test_by_attention_a_prompt_in_chunks_is_one_prompt(case):
    one, *others = ([(y, *cache.read()[:3]) for cache, _, part, y, _ in walk_heavy(case, chunk, 1) if part.stop > HEAVY[case][1]]
                    for chunk in (100, 7, 1))
    assert all(torch.allclose(x, y, atol=1e-6) for other in others for a, b in zip(one, other, strict=True) for x, y in zip(a, b))


def looks(looked_at, tokens=None, **knobs):
    """A cache whose queries each give all of their weight to one token; keys are orthogonal. The prompt has `tokens`, or all."""
    cache, eye = LowBitVague(**knobs), torch.eye(64, dtype=F64)[None, None]
    for a, b in pairwise([0, *range(tokens or len(looked_at), len(looked_at) + 1)]):
        q = torch.zeros(1, 1, b - a, 64, dtype=F64)
        for t in range(a, b):
            q[0, 0, t - a, looked_at[t]] = 1e4
        cache.attend(q, eye[:, :, a:b], eye[:, :, a:b], torch.arange(a, b)[None])
        if not cache.prompt_done:
            cache.finish_prompt()
    return cache


def test_of_equal_attention_the_oldest_are_rounded_and_the_newest_need_none():
    for looked_at, knobs, exact in (([0, 0, 1, 1, *[2] * 8], dict(exact=2, heavy=2), {1: 2, 2: 8, 10: 0, 11: 0}),
                                    ([*range(9)], dict(exact=0, heavy=4), {t: 1 for t in range(4, 9)}),
                                    ([*range(6), 0, 1, 3], dict(exact=1, heavy=3), {0: 2, 1: 2, 3: 2, 5: 1, 8: 0})):
        cache = looks(looked_at, bits=8, group=4, **knobs)
        assert dict(zip(cache.pos.flatten().tolist(), cache.slot("accumulated").flatten().tolist())) == exact
        assert cache.rounded["at"].flatten().tolist() == sorted({*range(len(looked_at))} - exact.keys())


def test_attention_to_what_is_rounded_is_no_one_else_s():
    cache = looks([*range(6), 2, 0, 3, 5], 6, bits=8, group=2, exact=1, heavy=3)
    assert cache.rounded["at"].tolist() == [[[0, 1, 3, 6, 7, 8]]]
    assert cache.pos.tolist() == [[[2, 4, 5, 9]]] and cache.slot("accumulated").tolist() == [[[2, 1, 2, 0]]]


def same_set_as_quantized(prompt, group=4, exact=3, bits=2):
    """Two caches fed a prompt and then single tokens, as after each: (tokens seen, what both read, what both have put out)."""
    few, kivi = LowBitVague(bits=bits, group=group, exact=exact, heavy=0), Quantized(bits=bits, group=group, exact=exact)
    for a, b in [(0, prompt), *((t, t + 1) for t in range(prompt, T))]:
        out = [cache.attend(*(x[:, :, a:b] for x in drawn()), torch.arange(a, b)[None]) for cache in (few, kivi)]
        if b == prompt:
            few.finish_prompt(), kivi.finish_prompt()
        yield b, few, kivi, out


@pytest.mark.parametrize("prompt", [1, 3, 7, 15])
def test_without_heavy_tokens_it_is_the_plain_one_if_the_prompt_ends_with_a_group(prompt):
    for seen, few, kivi, out in same_set_as_quantized(prompt):
        assert torch.allclose(*out, atol=1e-6) and all(torch.equal(x, y) for x, y in zip(few.read()[:3], kivi.read()[:3])), seen


@pytest.mark.parametrize("prompt", [17, 18])
def test_without_heavy_tokens_but_with_some_left_over_it_holds_the_same_ones_exactly_from_the_next_group_on(prompt):
    """At the prompt's end, those left over are the heaviest here and the newest there; then these, too, leave, in other groups."""
    differ = set()
    for seen, few, kivi, _ in same_set_as_quantized(prompt):
        assert few.length == kivi.length
        (k, v, at), (k2, v2, at2) = few.read()[:3], kivi.read()[:3]
        order = at.argsort(-1)[..., None].expand_as(k)
        assert torch.equal(at.sort(-1).values, at2)
        alike = torch.equal(few.pos, kivi.pos)
        differ |= {seen} - ({seen} if alike else set())
        if alike:  # a value is rounded alone
            assert torch.equal(v.gather(2, order), v2) and not torch.equal(k.gather(2, order), k2)
    assert differ == {*range(prompt, 19)}


@each_heavy
def test_by_attention_copies_go_on_alike_and_leave_each_other_alone(case):
    knobs, prompt = HEAVY[case]
    q, k, v = drawn()
    for cut in {max(prompt, 1), prompt + 6}:
        cache = LowBitVague(**knobs)

        def feed(cache, a, b, sign=1):
            y = cache.attend(*(sign * x[:, :, a:b] for x in (q, k, v)), torch.arange(a, b)[None])
            if not cache.prompt_done and b >= prompt:
                cache.finish_prompt()
            return y

        for a, b in parts_of(prompt, 100, 1):
            if b <= cut:
                feed(cache, a, b)
        one, two = deepcopy(cache), deepcopy(cache)
        for t in range(cut, T):
            feed(one, t, t + 1, -1)
        for t in range(cut, T):
            assert torch.equal(feed(cache, t, t + 1), feed(two, t, t + 1))
        *_, (expected, *_) = walk_heavy(case, 100, 1)
        assert cache.bytes() == two.bytes()
        for x, y, z in zip(cache.read()[:3], two.read()[:3], expected.read()[:3]):
            assert torch.equal(x, y) and torch.equal(x, z)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_by_attention_keys_and_values_keep_their_type_and_scores_have_32_bits(dtype):
    cache = LowBitVague(bits=2, group=4, exact=3, heavy=5)
    q, k, v = drawn(dtype)
    y = cache.attend(q, k, v, torch.arange(T)[None])
    cache.finish_prompt()
    k, v, *_ = cache.read()
    assert {x.dtype for x in (y, k, v)} == {dtype} and cache.slot("accumulated").dtype == torch.float32
    assert cache.length == 8 and k.shape == v.shape == (B, H, T, D)


# ---- in the decoder ---


@pytest.mark.parametrize("chunk", [30, 7, 1])
@pytest.mark.parametrize("knobs", [dict(bits=1, group=8, exact=33), dict(bits=1, group=41, exact=0), dict(bits=2, group=32)])
@torch.inference_mode()
def test_a_text_too_short_to_be_rounded_is_full_attention(knobs, chunk):
    reads_and_decodes_as_the_full_cache(Quantized, knobs, chunk)
    reads_and_decodes_as_the_full_cache(LowBitVague, knobs | dict(heavy=9), chunk)


@torch.inference_mode()
def test_the_defaults_round_at_64_tokens():
    cache = Quantized()
    assert (cache.bits, cache.group, cache.exact) == (2, 32, 32)
    for t in range(70):
        cache.attend(*[torch.ones(1, 1, 1, 8)] * 3, torch.tensor([[t]]))
        if t == 0:
            cache.finish_prompt()
        assert cache.length == (t + 1 if t < 63 else t - 31)


def after_prompt(model, **knobs):
    """Logits (B, 10, V) after a prompt of 30 tokens."""
    caches = make_cache(model, Quantized, **knobs)
    model(TOKENS[:, :30], caches)
    finish_prompt(caches)
    return torch.cat([model(TOKENS[:, i:i + 1], caches) for i in range(30, 40)], 1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.inference_mode()
def test_many_bits_are_close_to_full_attention_and_few_are_not(family):
    model = decoder(family=family)
    full = model(TOKENS)[:, 30:]
    far = [(after_prompt(model, bits=bits, group=4, exact=2) - full).abs().mean() / full.std() for bits in (8, 6, 4, 2)]
    assert 0 < far[0] < 0.002 and 0.01 < far[-1] and all(2 * a < b for a, b in pairwise(far))


@pytest.mark.parametrize("knobs", [dict(), dict(group=4, exact=0), dict(bits=8, group=8, exact=3), dict(bits=3, group=1, exact=1)])
@pytest.mark.parametrize("prompt", [1, 2, 20])
def test_generation_runs(knobs, prompt):
    model = decoder()
    caches = make_cache(model, Quantized, **knobs)
    out = generate(model, TOKENS[:, :prompt], 16, caches)
    assert out.shape == (2, 16)
    n = old(prompt + 15, caches[0].group, caches[0].exact)
    assert {(cache.seen, cache.length) for cache in caches} == {(prompt + 15, prompt + 15 - n)}
    if not n:
        assert torch.equal(out, generate(model, TOKENS[:, :prompt], 16))


@pytest.mark.parametrize("prompt", [1, 2, 20])
@torch.inference_mode()
def test_generation_keeps_so_many_tokens_as_they_are(prompt):
    model = decoder()
    caches = make_cache(model, LowBitVague, bits=2, group=4, exact=2, heavy=3)
    assert generate(model, TOKENS[:, :prompt], 16, caches).shape == (2, 16)
    assert {(cache.seen, cache.length) for cache in caches} == {(prompt + 15, prompt + 15 - old(prompt + 15, 4, 5))}


def test_the_variants_have_a_few_bits_and_sixteen_exact_tokens():
    made = {name: Method() for name, Method in variants.items()}
    assert {name: (type(cache), cache.bits, cache.group, cache.exact) for name, cache in made.items()} == {
        f"quantized_{bits}": (Quantized, bits, 32, 16) for bits in (2, 3, 4)}
    cache = LowBitVague()
    assert (cache.bits, cache.group, cache.exact, cache.heavy) == (2, 32, 32, 16)


@pytest.fixture(scope="module")
def tiny():
    model = from_hf(TINY).eval()
    return model, reference(model, text_windows(tasks("test"), 4, 128), 32)


def test_fewer_bits_are_further_from_full_attention_on_text(tiny):
    model, full = tiny
    make = lambda **knobs: lambda cut: make_cache(model, Quantized, **knobs)
    rows = [continuation(model, full, make(bits=bits, group=32, exact=16), full.told) for bits in (8, 4, 3, 2, 1)]
    kl = [row["kl"].mean().item() for row in rows]
    assert -1e-6 < kl[0] < 1e-4 and all(2 * a < b for a, b in pairwise(kl)) and kl[-2] < 1 < kl[-1]
    # 127 tokens of 32 channels, 96 of them rounded, in 4 texts, 6 layers and 3 heads
    assert [row["live"] for row in rows] == [72 * (31 * 260 + 96 * (8 * bits + 4) + 3 * 128) for bits in (8, 4, 3, 2, 1)]
    again = continuation(model, full, make(bits=2, group=32, exact=16), chunk=20)  # read, not told
    assert torch.allclose(again["kl"], rows[3]["kl"], rtol=1e-3) and again["live"] == rows[3]["live"]


# ---- what is refused ---


@pytest.mark.parametrize("knobs, message", [(dict(bits=0), "bits 0"), (dict(bits=9), "bits 9"), (dict(bits=-1), "bits -1"),
                                            (dict(group=0), "group 0"), (dict(exact=-1), "exact -1")])
def test_bad_knobs_are_refused_at_construction(knobs, message):
    with pytest.raises(ValueError, match=message):
        Quantized(**knobs)
    with pytest.raises(ValueError, match=message):
        make_cache(decoder(), Quantized, **knobs)


@pytest.mark.parametrize("head_dim, group", [(12, 4), (4, 4), (16, 3), (16, 12), (8, 7), (20, 20)])
def test_head_dims_that_do_not_fit_are_refused_before_any_token(head_dim, group):
    with pytest.raises(ValueError, match=f"head dim {head_dim} must be a multiple of 8 and of the group {group}"):
        make_cache(decoder(head_dim=head_dim), Quantized, group=group)


@pytest.mark.parametrize("head_dim, group", [(8, 1), (8, 8), (8, 9), (8, 32), (24, 12), (24, 3), (40, 20)])
def test_head_dims_that_fit(head_dim, group):
    model = decoder(head_dim=head_dim)
    caches = make_cache(model, Quantized, group=group, exact=0)
    assert generate(model, TOKENS[:, :20], 20, caches).shape == (2, 20) and caches[0].length == 39 % group


def test_by_attention_bad_knobs_are_refused_at_construction():
    for knobs, message in ((dict(heavy=-1), "heavy -1 must be at least 0"), (dict(bits=9), "bits 9"), (dict(exact=-1), "exact -1")):
        with pytest.raises(ValueError, match=message):
            LowBitVague(**knobs)
    LowBitVague(heavy=0, exact=0)
