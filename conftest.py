import gc
import math
import os
from pathlib import Path
import shutil
import sys

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are too small to share out
gc.set_threshold(100_000, 50, 100)  # a tenth of the time went into looking for garbage
if not torch.cuda.is_available():  # Triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
import kernels

# where the Hub's package of this name is installed, tests still find ours
kernels.__path__.append(os.path.join(os.path.dirname(__file__), "kernels"))

pytest_plugins = ["claims_plugin"]  # CLAIMS.md from what the tests record


def pytest_xdist_auto_num_workers(config):
    """Return how many processes run the tests: one a core, up to 4; 0 (this one) if not all run."""
    from claims_plugin import is_whole

    return min(os.cpu_count(), 4) if is_whole(config) else 0


# these files begin first, in this order, so that no process runs a long one alone at the end
LONGEST = (
    "test_every_rule",
    "test_course",
    "test_contract",
    "test_nano",
    "test_bridge",
    "test_sketch_error",
    "test_compared_methods",
    "test_claims_command",
    "test_compare",
    "test_persistence",
    "test_foreign",
    "test_chunk_bounds",
    "test_kernels",
)


def pytest_collection_modifyitems(config, items):
    if not config.option.markexpr:  # slow tests run with `-m slow`
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def typed():
    """Return typed("python", ...): it runs a module or file with only PATH and HOME set."""
    from forks import Forks

    with Forks() as forks:
        yield forks.run


@pytest.fixture
def poisoned(monkeypatch):
    """Fill with NaN the floats of every tensor that `new_empty` or `empty_like` allocates."""

    def full_of_nan(make):
        def filled(*args, **options):
            x = make(*args, **options)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return filled

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", full_of_nan(torch.empty_like))


@pytest.fixture
def only_h2o(monkeypatch, tmp_path_factory):
    """Return a folder in the place of methods/ that has baselines/h2o.py alone."""
    folder = tmp_path_factory.mktemp("own") / "methods"
    (folder / "baselines").mkdir(parents=True)
    shutil.copy(
        Path(__file__).parent / "methods" / "baselines" / "h2o.py", folder / "baselines"
    )
    monkeypatch.setattr("lab.methods_by_name.METHODS", folder)
    monkeypatch.syspath_prepend(folder.parent)
    loaded = lambda: [name for name in sys.modules if name.split(".")[0] == "methods"]
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    yield folder
    for name in loaded():
        del sys.modules[name]  # monkeypatch puts the right ones back
