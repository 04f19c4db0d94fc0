"""The public tests, which students have."""
import torch
from torch import tensor

from course.expect import problem, same, wrong

PRIME = 2 ** 31 - 1
ITSELF = tensor([[0], [0], [1], [0]])  # one row, number(J) = J: slot J mod b, sign −1 for odd tokens
PLUS = tensor([[0], [0], [0], [0]])    # number(J) = 0: slot 0, sign +1


def tokens(*J):
    return tensor(J)[None, None]


def numbers(*x):
    """Return the numbers as (1, 1, n, 1)."""
    return tensor(x, dtype=torch.float32).view(1, 1, -1, 1)


@problem("hash")
def test_two_cubics(run):
    """Tokens 0 1 2 3: J³ + 2J² + 3J + 4 is 4 10 26 58; in a second row 5J + 1 is 1 6 11 16."""
    got = run("number", J=tokens(0, 1, 2, 3), coefficients=tensor([[1, 0], [2, 0], [3, 5], [4, 1]]))
    same(got, tensor([[4, 1], [10, 6], [26, 11], [58, 16]])[None, None], "the numbers")


@problem("hash")
def test_modulo_the_prime(run):
    """(p − 1)J³ mod p is −J³ mod p: tokens 1 and 2 give p − 1 and p − 8."""
    got = run("number", J=tokens(1, 2), coefficients=tensor([[PRIME - 1], [0], [0], [0]]))
    same(got, tensor([PRIME - 1, PRIME - 8]).view(1, 1, 2, 1), "the numbers")


@problem("hash")
def test_a_large_token(run):
    """Token 2000, of torch.int32: (p − 1)J³ mod p = −8 000 000 000 mod p = 589 934 588."""
    got = run("number", J=tokens(2000).int(), coefficients=tensor([[PRIME - 1], [0], [0], [0]]))
    same(got, tensor([589_934_588]).view(1, 1, 1, 1), "the number")


@problem("slots")
def test_slots_of_one_row(run):
    """With number(J) = J and four slots, tokens 0 3 4 9 are in slots 0 3 0 1."""
    got = run("bucket", J=tokens(0, 3, 4, 9), bucket_by=ITSELF, width=4)
    same(got, tensor([0, 3, 0, 1]).view(1, 1, 4, 1), "the slots")


@problem("slots")
def test_slots_of_three_rows(run):
    """Rows of five slots, hashes J, J + 1, 2J: token 4 is in the slots 4, 5 + 0 and 10 + 3."""
    by = tensor([[0, 0, 0], [0, 0, 0], [1, 1, 2], [0, 1, 0]])
    got = run("bucket", J=tokens(4, 1), bucket_by=by, width=5)
    same(got, tensor([[4, 5, 13], [1, 7, 12]])[None, None], "the slots")


@problem("insert")
def test_sums_with_signs(run):
    """Tokens 0 1 2 with k = v = 1 2 4 in two slots: 0 and 2 share slot 0; token 1's value has the sign −."""
    got = run("insert", ("x",), x=torch.zeros(1, 1, 2, 2), rows=1, bucket_by=ITSELF, sign_by=ITSELF,
              J=tokens(0, 1, 2), k=numbers(1, 2, 4), v=numbers(1, 2, 4))
    same(got, tensor([[5., 5], [2, -2]])[None, None], "the slots, key and value")


@problem("insert")
def test_delete(run):
    """Slots 5 and 2: times = −1 takes token 2 out, times = 0 leaves token 1's slot as it is."""
    got = run("insert", ("x",), x=tensor([[5., 5], [2, -2]])[None, None], rows=1, bucket_by=ITSELF,
              sign_by=ITSELF, J=tokens(2, 1), k=numbers(4, 9), v=numbers(4, 9), times=numbers(-1, 0))
    same(got, tensor([[1., 1], [2, -2]])[None, None], "the slots, key and value")


@problem("insert")
def test_a_full_slot_in_16_bits(run):
    """400 ones into one slot of bfloat16, in which 256 + 1 is 256: sum in 32 bits to get 400."""
    one = torch.ones(1, 1, 400, 1, dtype=torch.bfloat16)
    got = run("insert", ("x",), x=torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16), rows=1, bucket_by=ITSELF,
              sign_by=PLUS, J=torch.arange(400)[None, None], k=one, v=one)
    same(got, tensor([[400., 400]], dtype=torch.bfloat16)[None, None], "the slot")


@problem("insert")
def test_heads_hold_other_tokens(run):
    """Head 0 adds tokens 0 and 1, head 1 tokens 1 and 3; odd tokens' values have the sign −."""
    k = tensor([[1., 2], [4, 8]])[None, :, :, None]
    got = run("insert", ("x",), x=torch.zeros(1, 2, 2, 2), rows=1, bucket_by=ITSELF, sign_by=ITSELF,
              J=tensor([[[0, 1], [1, 3]]]), k=k, v=k)
    same(got, tensor([[[1., 1], [2, -2]], [[0, 0], [12, -12]]])[None], "the slots, key and value")


@problem("median")
def test_the_middle_of_three(run):
    """Three rows of one slot hold 7, 1 and 5, for keys and values: each token reads 5."""
    by = PLUS.expand(4, 3)
    x = tensor([[7., 7], [1, 1], [5, 5]])[None, None]
    got = run("median", x=x, rows=3, bucket_by=by, sign_by=by, J=tokens(0, 1))
    same(got, tensor([[5., 5], [5, 5]])[None, None], "what is read, key and value")


@problem("median")
def test_signs_before_the_median(run):
    """The same slots, signs − + + for token 1: its values are −7 1 5, so 1. Keys have no signs, so 5."""
    sign_by = tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    x = tensor([[7., 7], [1, 1], [5, 5]])[None, None]
    got = run("median", x=x, rows=3, bucket_by=PLUS.expand(4, 3), sign_by=sign_by, J=tokens(1))
    same(got, tensor([[5., 1]])[None, None], "what is read, key and value")


@problem("median")
def test_each_token_its_slot(run):
    """One row of three slots: tokens 4 and 3 read the slots 1 and 0. Keys are signed as well."""
    x = tensor([[1., 10], [2, 20], [3, 30]])[None, None]
    got = run("median", x=x, rows=1, bucket_by=ITSELF, sign_by=ITSELF, J=tokens(4, 3), signed_keys=True)
    same(got, tensor([[2., 20], [-1, -10]])[None, None], "what is read, key and value")


@problem("variance")
def test_one_row(run):
    """One row of 4 slots, 9 tokens: on average 8/4 others share the slot, so 2."""
    near(run("variance", a=9, width=4, rows=1), 2.0)


@problem("variance")
def test_three_rows(run):
    """Three rows of 4 slots, 9 tokens: the median has 0.4487 of the variance 2, so 0.8973."""
    near(run("variance", a=9, width=4, rows=3), 0.8973)


@problem("load")
def test_the_paper_budget(run):
    """β = 0.25, v = 0.1: 31 tokens per slot of memory."""
    near(run("load", budget=0.25, vague=0.1), 31.0)


@problem("load")
def test_nothing_is_exact(run):
    """β = 0.25, v = 1: all memory is for the sketch, four tokens per slot."""
    near(run("load", budget=0.25, vague=1.0), 4.0)


@problem("means")
def test_a_slot_of_two(run):
    """Slots 6 and 5: tokens 0 and 2 share the first, token 1 has the second: means 3 and 5."""
    got = run("means", x=tensor([[6., -6], [5, 5]])[None, None], rows=1, bucket_by=ITSELF, J=tokens(0, 1, 2))
    same(got, tensor([[3., -3], [5, 5]])[None, None], "the means")


@problem("means")
def test_an_empty_slot(run):
    """A slot without a token stays 0, not NaN."""
    got = run("means", x=tensor([[8., 2], [0, 0]])[None, None], rows=1, bucket_by=ITSELF, J=tokens(0, 2))
    same(got, tensor([[4., 1], [0, 0]])[None, None], "the means")


@problem("means")
def test_every_row_and_head(run):
    """Two rows of two slots, all 12. Head 0 has tokens 0 1, head 1 has 0 2. Row 1 uses only its slot 0."""
    by = torch.cat((ITSELF, PLUS), 1)
    got = run("means", x=torch.full((1, 2, 4, 2), 12.), rows=2, bucket_by=by, J=tensor([[[0, 1], [0, 2]]]))
    expected = tensor([[12., 12, 6, 12], [6, 12, 6, 12]])[None, :, :, None].expand(1, 2, 4, 2)
    same(got, expected, "the means")


@problem("shrink")
def test_two_tokens_in_a_slot(run):
    """Slots 7 and −1, mean 2, signs + + and −: subtract 4 and −2, so 3 and 1; the factor is 1/2."""
    slots, total = tensor([[7., 4], [-1, -2]])[None, None], tensor([[[6., 6]]])
    x, mean, factor = run("centred", x=slots, rows=1, sum=total,
                          bucket=tensor([0, 0, 1]).view(1, 1, 3, 1), sign=tensor([1, 1, -1]).view(1, 1, 3, 1))
    same(x, tensor([[3., 0], [1, 0]])[None, None], "the slots without the mean")
    same(mean, tensor([[[[2., 2]]]]), "the mean")
    near(factor, 0.5)


@problem("shrink")
def test_a_token_alone(run):
    """A token alone has no noise: the factor is 1, and without the mean its slot is 0."""
    x, mean, factor = run("centred", x=tensor([[-3., -5]])[None, None], rows=1, sum=tensor([[[3., 5]]]),
                          bucket=tensor([[[[0]]]]), sign=tensor([[[[-1]]]]))
    same(x, tensor([[[[0., 0]]]]), "the slot without the mean")
    same(mean, tensor([[[[3., 5]]]]), "the mean")
    near(factor, 1.0)


@problem("shrink")
def test_three_rows_shrink_less(run):
    """Three rows of 4 slots, nine tokens: the factor is 1/(1 + 0.4487 · 8/4)."""
    zero = torch.zeros(1, 1, 9, 3, dtype=torch.int64)
    factor = run("centred", x=torch.zeros(1, 1, 12, 2), rows=3, sum=torch.zeros(1, 1, 2),
                 bucket=zero + tensor([0, 4, 8]), sign=zero + 1)[2]
    near(factor, 0.52706)


def near(got, expected):
    if not isinstance(got, float) or not abs(got - expected) <= 1e-4 * abs(expected):
        wrong(f"expected about {expected:g}, got {got!r:.300}")
