"""The hidden tests, which a student's copy does not hold: more sizes, and edge cases."""
from itertools import product
import math

import pytest
import torch
from torch import tensor

from course.expect import problem, same, wrong

PRIME = 2 ** 31 - 1
CASES = [(1, 7, False, torch.float32), (3, 4, False, torch.float64), (3, 5, True, torch.float32),
         (1, 3, True, torch.bfloat16), (3, 2, False, torch.float16)]
each_case = pytest.mark.parametrize("rows, width, signed, dtype", CASES)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def coefficients(seed, rows):
    return torch.randint(PRIME, (4, rows), generator=seeded(seed))


def tokens(seed, B, H, n, most=100_000):
    """Draw token numbers (B, H, n), no number twice in a head."""
    drawn = [torch.randperm(most, generator=seeded(1000 * seed + i))[:n] for i in range(B * H)]
    return torch.stack(drawn).view(B, H, n)


def whole(seed, *shape, dtype=torch.float32):
    """Draw whole numbers: sums do not depend on the order. In float64 they have a part that float32 loses."""
    x = torch.randint(-8, 9, shape, generator=seeded(seed)).to(dtype)
    return x * (1 + 2 ** -40) if dtype == torch.float64 else x


def number(J, by, row):
    c = by[:, row].tolist()
    return (c[0] * J ** 3 + c[1] * J ** 2 + c[2] * J + c[3]) % PRIME


def slot_of(J, by, row, width):
    return row * width + number(J, by, row) % width


def signs(J, by, row, D, signed_keys):
    """Return the signs of a token's key and value in a row, (2D,)."""
    sign = -1 if number(J, by, row) % 2 else 1
    return tensor([sign if signed_keys else 1] * D + [sign] * D, dtype=torch.float64)


def near(got, expected, what, rel=1e-6):
    if not isinstance(got, float) or not abs(got - expected) <= rel * abs(expected):
        wrong(f"{what}: expected {expected:.7g}, got {got!r:.300}")


def close(got, expected, dtype, what, atol):
    if not isinstance(got, torch.Tensor) or got.dtype != dtype:
        wrong(f"{what}: expected a tensor of {dtype}, got {getattr(got, 'dtype', got)!r:.300}")
    same(got, expected, what, atol=atol)


@problem("hash")
@pytest.mark.parametrize("rows, dtype, tokens_seen", [(1, torch.int64, 0), (3, torch.int32, 0),
                                                      (3, torch.int64, 2 ** 20)])
def test_any_token(run, rows, dtype, tokens_seen):
    """Tokens below 2²⁰ and coefficients below p: exact integer arithmetic gives the same."""
    J, by = tokens(1, 2, 3, 5, 2 ** 20), coefficients(2, rows)
    expected = [[[[number(t, by, i) for i in range(rows)] for t in head] for head in text]
                for text in J.tolist()]
    got = run("number", J=J.to(dtype), coefficients=by, tokens=tokens_seen)
    same(got, tensor(expected), "the numbers")


@problem("hash")
def test_the_largest_token_and_coefficients(run):
    """Token 2²⁰ − 1 with all coefficients p − 1."""
    by, J = torch.full((4, 1), PRIME - 1), 2 ** 20 - 1
    got = run("number", J=tensor([[[J]]]), coefficients=by)
    same(got, tensor([[[[number(J, by, 0)]]]]), "the number")


@problem("hash")
def test_no_token(run):
    """No token: J (2, 1, 0) gives (2, 1, 0, 3)."""
    got = run("number", J=torch.zeros(2, 1, 0, dtype=torch.int64), coefficients=coefficients(3, 3))
    same(got, torch.zeros(2, 1, 0, 3, dtype=torch.int64), "the numbers")


@problem("slots")
@pytest.mark.parametrize("rows, width", [(1, 1), (1, 9), (3, 1), (3, 6)])
def test_any_slots(run, rows, width):
    """Row i begins at slot i·b, and each row has its own hash."""
    J, by = tokens(4, 2, 2, 6), coefficients(5, rows)
    expected = [[[[slot_of(t, by, i, width) for i in range(rows)] for t in head] for head in text]
                for text in J.tolist()]
    same(run("bucket", J=J, bucket_by=by, width=width), tensor(expected), "the slots")


@problem("insert")
@each_case
@pytest.mark.parametrize("times", [None, -1.0, "drawn"])
def test_into_what_is_there(run, rows, width, signed, dtype, times):
    """Adds to slots that already hold something, in every row; `times` is a number, or −1, 0, 1 per token."""
    B, H, n, D = 2, 2, 11, 3
    x, k, v = (whole(seed, B, H, size, d, dtype=dtype)
               for seed, size, d in ((6, rows * width, 2 * D), (7, n, D), (8, n, D)))
    J, by, sign_by = tokens(9, B, H, n), coefficients(10, rows), coefficients(11, rows)
    if times == "drawn":
        times = (torch.randint(3, (B, H, n, 1), generator=seeded(12)) - 1).to(dtype)
    factor = torch.ones(B, H, n, 1) * (1.0 if times is None else times)
    expected = x.double().clone()
    for b, h, j, i in product(range(B), range(H), range(n), range(rows)):
        token = int(J[b, h, j])
        both = torch.cat((k[b, h, j], v[b, h, j])).double() * signs(token, sign_by, i, D, signed)
        expected[b, h, slot_of(token, by, i, width)] += float(factor[b, h, j]) * both
    got = run("insert", ("x",), x=x, rows=rows, bucket_by=by, sign_by=sign_by, J=J, k=k, v=v, times=times,
              signed_keys=signed)
    same(got, expected.to(dtype), "the slots")


@problem("insert")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_into_few_in_16_bits(run, dtype):
    """3000 tokens in two slots: sum in 32 bits, and round once."""
    n, by, sign_by = 3000, coefficients(13, 1), coefficients(14, 1)
    k, v, J = (1 + torch.arange(n) % 2).to(dtype).view(1, 1, n, 1), torch.ones(1, 1, n, 1, dtype=dtype), \
        torch.arange(n)[None, None]
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for j in range(n):
        expected[slot_of(j, by, 0, 2)] += tensor([1.0 + j % 2, 1]) * signs(j, sign_by, 0, 1, False)
    got = run("insert", ("x",), x=torch.zeros(1, 1, 2, 2, dtype=dtype), rows=1, bucket_by=by, sign_by=sign_by,
              J=J, k=k, v=v)
    same(got, expected.to(dtype)[None, None], "the slots")


@problem("median")
@each_case
def test_between_rows(run, rows, width, signed, dtype):
    """The median of a token's slots times their signs, number by number, of the given x."""
    B, H, n, D = 2, 3, 9, 2
    x = (4 * torch.randn(B, H, rows * width, 2 * D, generator=seeded(15), dtype=torch.float64)).to(dtype)
    J, by, sign_by = tokens(16, B, H, n), coefficients(17, rows), coefficients(18, rows)
    expected = torch.zeros(B, H, n, 2 * D, dtype=dtype)
    for b, h, j, d in product(range(B), range(H), range(n), range(2 * D)):
        token = int(J[b, h, j])
        readings = [float(x[b, h, slot_of(token, by, i, width), d] * signs(token, sign_by, i, D, signed)[d])
                    for i in range(rows)]
        expected[b, h, j, d] = sorted(readings)[rows // 2]
    got = run("median", x=x, rows=rows, bucket_by=by, sign_by=sign_by, J=J, signed_keys=signed)
    same(got, expected, "what is read")


@problem("median")
def test_of_equals(run):
    """Two equal readings are the median, whatever the third."""
    zero = torch.zeros(4, 3, dtype=torch.int64)
    for x in ([2., 2, 9], [2., 9, 2], [-9., 2, 2], [2., 2, 2]):
        got = run("median", x=tensor(x).view(1, 1, 3, 1).expand(1, 1, 3, 2), rows=3, bucket_by=zero,
                  sign_by=zero, J=tensor([[[5]]]))
        same(got, torch.full((1, 1, 1, 2), 2.), f"the median of {x}")


@problem("variance")
@pytest.mark.parametrize("a, width, rows", [(1, 6, 3), (2, 1, 1), (1024, 64, 3), (1800, 18, 1),
                                            (100.5, 7, 3)])
def test_fellows_in_a_slot(run, a, width, rows):
    """MEDIAN[r] · (a − 1)/b. A token alone has no error."""
    share = {1: 1.0, 3: 1 - math.sqrt(3) / math.pi}[rows]
    got = run("variance", a=a, width=width, rows=rows)
    near(got, share * (a - 1) / width, f"a {a}, b {width}, r {rows}")


@problem("load")
@pytest.mark.parametrize("budget, vague", [(0.5, 0.5), (0.1, 0.1), (0.05, 0.9), (1.0, 0.3), (0.25, 1.0)])
def test_count_the_tokens(run, budget, vague):
    """10 000 tokens: those in the sketch, divided by the number of slots."""
    n = 10_000
    slots = vague * budget * n
    got = run("load", budget=budget, vague=vague)
    near(got, (n - (budget * n - slots)) / slots, f"B {budget}, v {vague}")


@problem("means")
@each_case
def test_divided_by_who_is_there(run, rows, width, signed, dtype):
    """Each slot divided by its number of tokens; rows and heads differ; a slot without tokens stays."""
    B, H, n, D = 2, 2, 8, 2
    x, J, by = whole(19, B, H, rows * width, 2 * D, dtype=dtype), tokens(20, B, H, n), coefficients(21, rows)
    expected = x.double().clone()
    for b, h, s in product(range(B), range(H), range(rows * width)):
        there = sum(slot_of(t, by, s // width, width) == s for t in J[b, h].tolist())
        expected[b, h, s] /= max(there, 1)
    close(run("means", x=x, rows=rows, bucket_by=by, J=J), expected, dtype, "the means",
          1e-6 if dtype.itemsize > 2 else 0.03)


@problem("means")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_count_beyond_16_bits(run, dtype):
    """A slot with the sum 10 000 of 5000 tokens: the mean is 2."""
    by = torch.zeros(4, 1, dtype=torch.int64)
    x = torch.full((1, 1, 1, 2), 10_000., dtype=dtype)
    got = run("means", x=x, rows=1, bucket_by=by, J=torch.arange(5000)[None, None])
    close(got, torch.full((1, 1, 1, 2), 2.), dtype, "the mean", 0.01)


@problem("shrink")
@each_case
def test_the_mean_taken_off(run, rows, width, signed, dtype):
    """The slots minus the mean times the sum of their signs; the mean; the factor. Rows and heads differ."""
    B, H, n, D = 2, 2, 9, 2
    x = whole(22, B, H, rows * width, 2 * D, dtype=dtype)
    bucket = torch.zeros(B, H, n, rows, dtype=torch.int64)
    total = whole(23, B, H, 2 * D, dtype=torch.promote_types(dtype, torch.float32))
    for i in range(rows):
        bucket[..., i] = i * width + torch.randint(width, (B, H, n), generator=seeded(24 + i))
    sign = 2 * torch.randint(2, (B, H, n, rows), generator=seeded(27)) - 1
    expected = x.double().clone()
    for b, h, j, i in product(range(B), range(H), range(n), range(rows)):
        expected[b, h, bucket[b, h, j, i]] -= sign[b, h, j, i] * total[b, h].double() / n
    left, mean, factor = run("centred", x=x, rows=rows, sum=total, bucket=bucket, sign=sign)
    atol = 1e-5 if dtype.itemsize > 2 else 0.15
    close(left, expected, dtype, "the slots without the mean", atol)
    close(mean, (total.double() / n).unsqueeze(2), dtype, "the mean", atol)
    share = {1: 1.0, 3: 1 - math.sqrt(3) / math.pi}[rows]
    near(factor, 1 / (1 + share * (n - 1) / width), "the factor")
