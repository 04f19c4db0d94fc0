"""worst_query is LayerDefensiveKV without its first stage: one strong query keeps an entry."""

import torch

from common import B, D, G, H, decoder, end, feed
from methods.ours.worst_query import variants
from nanollm.cache import make_cache


def test_an_entry_that_a_single_query_of_the_window_wants_stays():
    """Entry 3 gets all attention of one query, entries 10 to 19 share that of the others."""
    q = torch.zeros(B, H * G, 40, D)
    k = torch.zeros(B, H, 40, D)
    q[..., 0] = 30
    q[:, ::G, 37] = torch.eye(D)[1] * 30
    k[:, :, 10:20, 0] = 10
    k[:, :, 3, 1] = 10
    method = variants["worst_query"]
    options = dict(budget=8, window_size=4, kernel_size=1, **method.keywords)
    caches = make_cache(decoder(), method.func, **options)
    for layer in caches:
        feed(layer, (q, k, torch.ones_like(k)))
    end(*caches)
    for layer in caches:
        assert (layer.pos == 3).any(-1).all()
