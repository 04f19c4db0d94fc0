"""Work is spread over processes of one thread each."""

import torch

from lab.processes import spread


def test_each_process_has_one_thread(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)
    try:
        threads = [*spread(lambda _: torch.get_num_threads(), "ab")]
    finally:
        torch.set_num_threads(1)
    assert threads == [1, 1]
