"""Functions that the tests of `pairs` call. They run in the submission's process and hold no answers."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from methods import tensor_attention as ours
from methods.theory import index_game as theory
from nanollm.cache import Slots


def pairs(x, y):
    return ours.pairs(x, y)


def dense(q, k1, k2, v1, v2):
    return ours.tensor_attention(q, k1, k2, v1, v2)


def new_pairs(x, y):
    return ours.new_pairs(x, y)


def two_caches(k, v):
    """Return keys, values and positions of the pairs in a TwoCache that read the tokens one by one."""
    cache = ours.TwoCache()
    for t in range(k.shape[2]):
        cache.write(k[:, :, t:t + 1], v[:, :, t:t + 1], torch.tensor([[t]]))
    return [cache.k, cache.v, cache.pos]


def attention(q, k, v, pieces, scale=None):
    """Return the outputs of a FourCache fed in pieces, and the shapes of (q, k1) in calls of one_query.

    again: the last piece's outputs, asked for once more.
    """
    shapes = []

    class Counted(ours.FourCache):
        def one_query(self, q, k1, k2, v1, v2):
            shapes.append([list(q.shape), list(k1.shape)])
            return super().one_query(q, k1, k2, v1, v2)

    cache, outputs, start = Counted(scale=scale), [], 0
    for n in pieces:
        one, pos = slice(start, start + n), torch.arange(start, start + n)[None]
        outputs.append(cache.attend(q[:, :, one], k[:, :, one], v[:, :, one], pos))
        start += n
    asked = [*shapes]
    again, probabilities = cache.attention(q[:, :, one], pos)
    return dict(y=torch.cat(outputs, 2), again=again, probabilities=probabilities, shapes=asked,
                seen=cache.seen, k=cache.k, v=cache.v)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor made meanwhile; a view by its size, at most its storage's."""
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                stored = x.untyped_storage().nbytes() // x.element_size()
                self.numbers = max(self.numbers, min(stored, x.numel()))
        return made


def one_query(q, k1, k2, v1, v2, tile):
    with Largest() as largest:
        y = ours.FactoredFourCache(tile=tile).one_query(q, k1, k2, v1, v2)
    return dict(y=y, numbers=largest.numbers)


def causal(q, k, v):
    return ours.pair_attention(q, k, v)


def alice(bits, keys, C):
    """Return what Bob reads, and the contents of Alice's cache."""
    given = {}

    def look(cache):
        given.update(k=cache.k.clone(), v=cache.v.clone(), kind=type(cache).__name__, scale=cache.scale)

    game = theory.index_game_four(bits, keys, C, compress=look)
    return dict(read=game.read, **given)


def play(k, v, keys, C=None, kept=None, eta=0.0, seed=0):
    """Play on four matrices; on a plain cache if k has as many columns as keys."""
    cache = ours.FourCache(scale=1.0) if k.shape[1] == 2 * keys.shape[1] else Slots()
    seen = []

    def compress(cache):
        seen.append(cache.seen)
        cache.keep(kept[None, None])

    how = {} if kept is None else dict(compress=compress)
    game = theory.play(cache, k, v, keys, C, eta=eta, generator=torch.Generator().manual_seed(seed), **how)
    return dict(read=game.read, zero=float(game.zero), one=float(game.one), seen=cache.seen, compressed=seen,
                pos=cache.pos)
