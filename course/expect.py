"""Comparisons for the course's tests. A failed one says in words what it expected and what it got."""
import torch


class Wrong(Exception):
    """Raised by a test that fails; the message is for the student."""


def problem(name: str):
    """Mark a test as one of this problem's. The test's docstring says what it expects."""
    def mark(test):
        test.problem = name
        return test
    return mark


def wrong(why: str):
    raise Wrong(why)


def raises(run, call: str, **args):
    """Fail unless the call raises a ValueError."""
    try:
        got = run(call, **args)
    except Wrong as error:
        if str(error).startswith("ValueError"):
            return
        wrong(f"expected a ValueError, got {error}")
    wrong(f"expected a ValueError, got {got!r:.200}")


def same(got, expected, what: str, atol: float | None = None):
    """Fail unless `got` equals the value or tensor expected; with atol, a tensor within it, of any dtype.

    what: the name of the result in the message.
    """
    if not isinstance(expected, torch.Tensor):
        if type(got) is not type(expected) or got != expected:
            wrong(f"{what}: expected {expected!r}, got {got!r:.300}")
        return
    if not isinstance(got, torch.Tensor):
        wrong(f"{what}: expected a tensor of shape {tuple(expected.shape)}, got {got!r:.300}")
    if got.shape != expected.shape:
        wrong(f"{what}: expected the shape {tuple(expected.shape)}, got {tuple(got.shape)}")
    if atol is None and got.dtype != expected.dtype:
        wrong(f"{what}: expected the dtype {expected.dtype}, got {got.dtype}")
    near = got == expected
    if atol is not None:
        near = torch.isclose(got.double(), expected.double(), rtol=0, atol=atol)
    if not near.all():
        first = tuple((~near).nonzero()[0].tolist())
        values = f"expected {shown(expected)}, got {shown(got)}" if expected.numel() <= 40 else \
            f"{int((~near).sum())} of {near.numel()} numbers differ"
        each = expected[first].item(), got[first].item()
        short = [f"{x:.6g}" for x in each]
        wanted, found = map(repr, each) if short[0] == short[1] else short
        wrong(f"{what}: {values}; the first difference is at index {list(first)}: "
              f"expected {wanted}, got {found}")


def shown(x: torch.Tensor) -> str:
    """Return the numbers with up to four decimals; true and false as 1 and 0."""
    def rounded(y):
        return [*map(rounded, y)] if isinstance(y, list) else int(y) if isinstance(y, bool) else round(y, 4)
    return str(rounded(x.tolist()))
