"""SnapKV: the prompt's last queries vote (Li et al., arXiv 2404.14469).

What the end of a prompt attends to is what the answer will attend to. So the last w queries vote on all
earlier tokens. Each head keeps those with the most votes, read together with their neighbours, and the window
itself.

    c = maxpool( 1/w Σ_{t ≥ S−w} α_t ),   keep Top_{b−w}(c) ∪ {S−w … S−1}

Differs from the paper: window and pool are those of CriticalKV's experiments (arXiv 2502.03805, Algorithm 2).
The window counts inside the budget. The query heads of a group vote together, since they share the entry.
"""
from nanollm.window import WindowCache


class SnapKV(WindowCache):
    """`WindowCache` as it stands. The authors' code has an average pool of 5, and a window of 32 (64 in its
    class, if nothing sets it).
    """


variants = {"snap_kv": SnapKV}
