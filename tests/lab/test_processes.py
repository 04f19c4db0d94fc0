"""Work is spread over processes of one thread each."""

from time import sleep

import torch

from lab.processes import spread


def test_each_process_has_one_thread_and_results_keep_their_order(monkeypatch):
    def result(seconds):
        sleep(seconds)
        return seconds, torch.get_num_threads()

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)
    try:
        found = [*spread(result, (0.3, 0))]
    finally:
        torch.set_num_threads(1)
    assert found == [(0.3, 1), (0, 1)]
