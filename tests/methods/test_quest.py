"""Compare Quest with loops: the pages that a query reads, and that it reads no others."""
from itertools import product
import math

import pytest
import torch

from common import B, D, G, H, SLOT, dense, feed, link
from methods.quest import Quest

N, T, PAGE = 30, 47, 4
g = torch.Generator().manual_seed(3)
Q, K, V = (torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H))


def after_the_prompt(chunk=None, **options):
    cache = Quest(**dict(budget=14, page=PAGE) | options)
    link(cache, w_o=torch.zeros(4, H * G, D))
    feed(cache, Q[:, :, :N], K[:, :, :N], V[:, :, :N])
    cache.end_prefill()
    return cache, feed(cache, *(x[:, :, N:] for x in (Q, K, V)), chunk, N)


def pages_read(b, h, t, n):
    """Return query t's pages: its own, and the n − 1 others with the highest possible scores."""
    bound = {}
    for page in range(t // PAGE):
        keys = [K[b, h, i].tolist() for i in range(page * PAGE, (page + 1) * PAGE)]
        each = []
        for query in range(h * G, h * G + G):
            q = Q[b, query, t].tolist()
            each.append(sum(max(q[d] * min(k[d] for k in keys), q[d] * max(k[d] for k in keys))
                            for d in range(D)))
        bound[page] = max(each)
    return [t // PAGE, *sorted(bound, key=bound.get, reverse=True)[:n - 1]]


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("budget", [4, 14, 40])
def test_attention_is_that_over_the_pages_of_the_loop(budget, chunk):
    """A query's output is attention over exactly the loop's pages."""
    _, y = after_the_prompt(chunk, budget=budget)
    visible = torch.zeros(B, H, T, T, dtype=torch.bool)
    for b, h, t in product(range(B), range(H), range(N, T)):
        for page in pages_read(b, h, t, budget // PAGE):
            visible[b, h, t, page * PAGE:min((page + 1) * PAGE, t + 1)] = True
    assert visible[:, :, N:].sum(-1).max() <= budget
    assert torch.allclose(y, dense(Q[:, :, N:], K, V, visible[:, :, N:]), atol=1e-5)


def test_no_score_in_a_page_exceeds_its_bound_and_one_of_a_single_key_meets_it():
    """No score exceeds its page's bound; a page with one key meets it."""
    for page in (PAGE, 1):
        cache, _ = after_the_prompt(page=page)
        for t in range(T):
            scores = (K @ Q[:, :, t].unflatten(1, (H, G)).mT).amax(-1)  # (B, H, T)
            u = cache.bounds(Q[:, :, t:t + 1])
            assert (scores <= u.repeat_interleave(page, -1)[..., :T] + 1e-5).all()
            assert page > 1 or torch.allclose(scores, u, atol=1e-5)


def test_what_is_not_chosen_is_not_read():
    """NaN in entries outside the chosen pages changes no output."""
    cache, _ = after_the_prompt(1)
    new = [torch.randn(B, heads, 1, D, generator=g) for heads in (H * G, H, H)]
    other, _ = after_the_prompt(1)
    expected = other.attend(*new, torch.tensor([[T]]))
    u = cache.bounds(new[0])[..., :T // PAGE]  # without the last page, which is always read
    unread = u.argsort(descending=True)[..., 2:]
    for b, h in product(range(B), range(H)):
        for page in unread[b, h].tolist():
            cache.k[b, h, page * PAGE:(page + 1) * PAGE] = math.nan
            cache.v[b, h, page * PAGE:(page + 1) * PAGE] = math.nan
    assert torch.equal(cache.attend(*new, torch.tensor([[T]])), expected)


def test_dense_layers_read_everything():
    """The first `dense` layers read the whole cache."""
    full = dense(Q, K, V, torch.ones(T, T).tril().bool().expand(B, H, T, T))[:, :, N:]
    cache, y = after_the_prompt(dense=1)
    assert torch.allclose(y, full, atol=1e-5) and cache.bytes()[0] == B * H * T * SLOT
    assert not torch.allclose(after_the_prompt()[1], full, atol=1e-2)


@pytest.mark.parametrize("chunk", [1, 5])
def test_bytes_are_those_of_all_entries_and_of_two_vectors_a_page(chunk):
    """`bytes` counts all entries and two vectors per page."""
    cache, _ = after_the_prompt(chunk)
    held = B * H * (T * SLOT + 2 * -(-T // PAGE) * D * 4)
    live, allocated = cache.bytes()
    assert live == held <= allocated and cache.length == T


@pytest.mark.parametrize("options, message", [
    (dict(budget=15), "budget 15 must be at least 16: a page has 16 tokens"),
    (dict(budget=15, page=0), "page 0"), (dict(budget=16, dense=-1), "dense -1")])
def test_bad_options_are_refused(options, message):
    """A wrong option raises ValueError."""
    with pytest.raises(ValueError, match=message):
        Quest(**options)
