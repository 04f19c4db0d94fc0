"""The store of a layer that sees the last tokens alone: it keeps those, and no method evicts them.

Gemma 3, Olmo 3 and others have such layers between layers that see everything. What a layer cannot
see need not be stored, so a method compresses the other layers. KVzip's code for Gemma 3 also
scores those alone.

    size 4:              the query at 9 sees 6 7 8 9
    size 4 in chunks:    the query at 9 sees 8 9, because chunks begin at 0 4 8
"""

from torch import Tensor

from nanollm.attention import Mask, Sliding, visible
from nanollm.slots import Slots


class SlidingSlots(Slots):
    """Plain slots of the tokens that the newest token sees, and of `spare` tokens before."""

    def __init__(self, sliding: Sliding, model=None, index: int = 0):
        super().__init__(None, model, index)
        self.sliding = sliding
        self.spare = 0  # how many tokens out of sight stay; drafts may be taken back

    def room(
        self, T: int
    ) -> int:  # so that it holds at most twice what it sees, and `spare`
        return min(T, self.sliding.size)

    def mask(self, slot_pos: Tensor, bias: None, pos: Tensor) -> Mask:
        return visible(slot_pos[:, :1], bias, pos, self.sliding)

    def attention(self, q: Tensor, pos: Tensor) -> tuple[Tensor, None]:
        y, p = super().attention(q, pos)
        self.trim()
        return y, p

    def trim(self):
        """Evict what the newest token does not see, but for `spare` tokens."""
        first = self.sliding.first(self.seen - 1) - self.spare
        first = max(first, 0)
        too_many = self.length - (self.seen - first)
        if too_many == 1:  # as in decoding: no copy of the others
            self.drop(self.pos.argmin(-1, keepdim=True))
        elif too_many > 1:
            self.keep_chosen(self.pos >= first)

    def forget(self, n: int):
        self.crop(n)  # no window of queries is observed here

    def check_crop(self, n: int):
        super().check_crop(n)
        evicted = self.seen - self.length
        if max(self.sliding.first(n), 0) < evicted:
            raise ValueError(
                f"layer {self.index} no longer has what token {n} would see, so the newest "
                f"{self.seen - n} cannot be forgotten; read the text into new caches"
            )


def full_layers(caches: list[Slots]) -> list[Slots]:
    """Return the layers that a method compresses; if all slide, all of them."""
    return [x for x in caches if not isinstance(x, SlidingSlots)] or caches
