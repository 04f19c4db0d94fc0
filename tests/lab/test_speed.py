"""The time of each phase: of the right part, the fastest of all rounds, beside the full cache's."""
import json
from time import sleep

import pytest
import torch

from common import ENCODING, checkpoint_of_two_layers, decoder
from lab import speed
from nanollm.cache import LayerCache, make_cache


class Slow(LayerCache):
    """Takes 0.1 s longer to read a prompt, 0.3 s to compress it, and 0.02 s for a step."""

    def attend(self, q, k, v, pos):
        sleep(0.02 if self.prompt_done else 0.1)
        return super().attend(q, k, v, pos)

    @classmethod
    def compress(cls, model, tokens, caches):
        sleep(0.3)


def test_each_phase_has_its_own_time():
    model, tokens = decoder(n_layers=1), torch.zeros(2, 9, dtype=torch.long)
    read, compressed, step = speed.times(model, make_cache(model, Slow), tokens)
    assert 0.02 < step < 0.1 < read < 0.3 < compressed


def test_the_fastest_round_counts():
    class SlowAtFirst(Slow):
        @classmethod
        def compress(cls, model, tokens, caches):
            sleep(0 if done else 0.2)
            done.append(tokens.shape)

    model, done = decoder(n_layers=1, vocab_size=2048), []
    methods = dict(full=LayerCache, slow=SlowAtFirst)
    rows = speed.measured(model, ENCODING, methods, [(3, 7)], 25, rounds=3)
    assert done == 3 * [(3, 7)] and rows[1]["compress"] < 200


def test_the_command_in_a_new_process(typed, tmp_path):
    done = typed("python", "-m", "lab.speed", "--model", checkpoint_of_two_layers(tmp_path),
                 "--methods", "snap_kv", "chunk_kv_semantic", "quantized_2", "--lengths", 140,
                 "--batches", 1, 2, "--rounds", 1, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert done.stdout == speed.show(rows) + "\n"
    names = "full", "snap_kv", "chunk_kv_semantic", "quantized_2"
    assert [(row["tokens"], row["batch"], row["method"]) for row in rows] == [
        (T, B, name) for T in (140,) for B in (1, 2) for name in names]
    for i, row in enumerate(rows):
        full = rows[i // 4 * 4]
        for phase, of in ("prefill", "prefill"), ("compress", "prefill"), ("step", "step"):
            assert row[phase] > 0 and row[f"{phase} ×"] == pytest.approx(row[phase] / full[of])

    for wrong, message in (("--lengths 64", "snap_kv at 25 % of 64 tokens: budget 16 must exceed the window"),
                           ("--lengths 800", "length 800 must be a whole number from 1 to 792"),
                           ("--batches 0", "batch 0 must be"), ("--rounds 0", "rounds 0 must be"),
                           (f"--json {tmp_path}/config.json", f"{tmp_path}/config.json holds something")):
        with pytest.raises(ValueError, match=f"^{message}"):
            speed.main(["--model", str(tmp_path), *wrong.split()])
