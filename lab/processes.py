"""Run a function on many items: in forks of this process, or on a Dask cluster."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
import os
import pickle
import sys
from threading import Thread

import torch


def spread(function: Callable, items: Iterable, processes: bool = True) -> Iterator:
    """Yield function(item) for each item, in order; in this process if `processes` is false.

    There are as many processes as cores, or as items if these are fewer. They are forks of one
    thread each: all that this one has read is theirs too. On other systems than Linux, or with one
    core or one item, this process works alone.
    """
    items = [*items]
    n = min(os.cpu_count(), len(items))
    if not processes or n < 2 or sys.platform != "linux":
        yield from map(function, items)
        return
    # A pool pickles what it is given, and a function that holds a decoder is too large for that.
    # Forks inherit a global, so that they need only the number of an item.
    global work
    work = function, items
    pool = ProcessPoolExecutor(n, get_context("fork"), begin)
    try:
        yield from map(pickle.loads, pool.map(done, range(len(items))))
    finally:
        pool.shutdown(cancel_futures=True)


def begin():
    """Begin a process: it has one thread, and ends when the one that forked it has ended."""
    torch.set_num_threads(1)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    parent_process().join()
    os._exit(1)


def done(i: int) -> bytes:
    """Return item i's result as bytes, because tensors in shared memory would need open files."""
    function, items = work
    return pickle.dumps(function(items[i]))


def on_cluster(address: str, function: Callable, items: list) -> Iterator:
    """Yield function(item) for each item, in order, computed by a Dask cluster's workers.

    A lost worker's items go to another one. The workers need this repository and the same files.
    ValueError if Dask is missing or the scheduler is not reached.
    """
    try:
        from dask.distributed import Client
    except ModuleNotFoundError:
        raise ValueError(
            "--scheduler needs Dask; run pip install distributed"
        ) from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler at {address} ({error})") from None
    with client:
        futures = client.map(function, items, pure=False, retries=2)
        for future in futures:
            yield future.result()
