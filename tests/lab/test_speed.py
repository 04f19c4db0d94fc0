"""The time of each phase: of the right part, the fastest of all rounds, beside the peer's."""

import json
from time import sleep

import pytest

from common import ENCODING, checkpoint_of_two_layers, decoder
from lab import speed
from nanollm.cache import LayerCache, cache_bytes


class SlowAtFirst(LayerCache):
    """Takes 0.02 s for a step, and to compress 0.5 s, then 0.3 s."""

    compressed = []

    def attend(self, q, k, v, pos):
        sleep(0.02)
        return super().attend(q, k, v, pos)

    @classmethod
    def compress(cls, model, tokens, caches):
        sleep(0.3 if cls.compressed else 0.5)
        cls.compressed.append(tokens.shape)


def test_each_phase_has_its_own_time_and_the_fastest_round_counts():
    model, methods = (
        decoder(n_layers=1, vocab_size=2048),
        dict(full=LayerCache, slow=SlowAtFirst),
    )
    peer = speed.Peer(model, 25)
    peer.prompt = lambda tokens: sleep(0.2)
    peer.step = lambda tokens: sleep(0.1)
    full, slow = speed.measured(model, ENCODING, peer, methods, [(3, 7)], 25, rounds=3)
    assert SlowAtFirst.compressed == 4 * [(3, 7)]  # the last for the memory
    # milliseconds
    assert 20 < slow["step"] < 100 < full["peer's step"] < 200 < full["peer's prompt"]
    assert full["prompt"] < 200 and 300 < slow["end"] < 500


def test_the_process_grows_by_what_the_caches_hold():
    model, before = decoder(n_layers=1), speed.resident()
    cache = LayerCache()
    cache.link(model, 0)
    x = speed.torch.ones(1, 2, 2**19, 8)
    grown = speed.resident() - before
    # the process may give back a few pages of its own
    assert 0.99 * x.nbytes < grown < 1.04 * x.nbytes
    cache.write(x, x, speed.torch.arange(2**19)[None])
    held = cache_bytes([cache])[1]
    assert 0.99 * held < speed.resident() - before - grown < 1.04 * held


def test_the_command_in_a_new_process(typed, tmp_path):
    done = typed(
        "python",
        "-m",
        "lab.speed",
        "--model",
        checkpoint_of_two_layers(tmp_path),
        "--methods",
        "snap_kv",
        "chunk_kv",
        "quantized_2",
        "--lengths",
        140,
        "--batches",
        1,
        2,
        "--rounds",
        1,
        "--json",
        tmp_path / "rows.json",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert done.stdout == speed.show(rows) + "\n"
    names = "full", "snap_kv", "chunk_kv", "quantized_2"
    assert [(row["tokens"], row["batch"], row["method"]) for row in rows] == [
        (T, B, name) for T in (140,) for B in (1, 2) for name in names
    ]
    for row in rows:
        assert row["end"] > 0 and row["step"] > 0 and row["MiB"] > 0
        assert (
            ("prompt" in row)
            == (row["method"] == "full")
            == (row["peer's step"] is not None)
        )

    for wrong, message in (
        ("--lengths 64", "budget 16 must exceed the window"),
        ("--lengths 800", "length 800 must be a whole number from 1 to 792"),
        ("--batches 0", "batch 0 must be"),
        (f"--json {tmp_path}/config.json", f"{tmp_path}/config.json holds something"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            speed.main(["--model", str(tmp_path), *wrong.split()])
