"""The methods of a run at their keep ratios, and what they have learned of its decoder."""

from argparse import Namespace
import sys

from lab import table
from lab.loading import calibrated, loaded
from lab.methods_by_name import one_line, pick
from lab.retrieval import Make, maker


class Contenders:
    """The decoder of a run and its methods."""

    def __init__(self, args: Namespace, names: list[str]):
        self.args = args
        self.methods = pick(names)
        self.model, self.encoding = loaded(args)
        self.options: dict[str, dict] = {}  # of each method that can be measured

    def each(self) -> list[tuple[str, float | None]]:
        """Return every method with every keep ratio; None if the method has no budget."""
        ratios = [percent / 100 for percent in self.args.keep]
        pairs = []
        for name, variant in self.methods.items():
            given = ratios if variant.takes("budget") else [None]
            pairs += [(name, ratio) for ratio in given]
        return pairs

    def calibrate(self, names: dict[str, None]):
        """Find the options of methods, which may take minutes, before anything is measured."""
        for name in names:
            variant = self.methods[name]
            try:
                learned = calibrated(
                    variant, self.model, self.encoding, self.args.calibration
                )
            except Exception as error:
                self.leave_out(name, error)
            else:
                defaults = dict(window_size=self.args.window) | learned
                self.options[name] = variant.given(**defaults)

    def possible(self, name: str, keep_ratio: float | None, tokens: int) -> bool:
        """Return whether a method can have its budget in a prompt of so many tokens."""
        if name not in self.options:
            return False
        try:
            self.make(name, keep_ratio)(tokens)
        except ValueError as error:
            line = table.label(name, keep_ratio)
            self.leave_out(f"{line} of {tokens} tokens", error)
            return False
        except Exception:  # a bug in the method: it is reported when it is measured
            pass
        return True

    def make(self, name: str, keep_ratio: float | None) -> Make:
        """Return a function that makes a method's caches."""
        variant = self.methods[name]
        options = self.options[name]
        return maker(self.model, variant.kind, keep_ratio, variant.store, **options)

    def leave_out(self, what: str, error: Exception):
        """Print why a method is left out; ValueError if --methods names it."""
        line = f"{what}: {one_line(error)}"
        if self.args.methods:
            raise ValueError(line) from error
        print(f"left out: {line}", file=sys.stderr)
