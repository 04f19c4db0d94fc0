"""The time of each phase: of the right part, the fastest of all rounds, beside the full cache's."""
import json
from time import sleep

import pytest

from common import ENCODING, checkpoint_of_two_layers, decoder
from lab import speed
from nanollm.cache import LayerCache


class SlowAtFirst(LayerCache):
    """Takes 0.1 s longer to read a prompt, 0.02 s for a step, and to compress 0.5 s, then 0.3 s."""
    compressed = []

    def attend(self, q, k, v, pos):
        sleep(0.02 if self.prompt_done else 0.1)
        return super().attend(q, k, v, pos)

    @classmethod
    def compress(cls, model, tokens, caches):
        sleep(0.3 if cls.compressed else 0.5)
        cls.compressed.append(tokens.shape)


def test_each_phase_has_its_own_time_and_the_fastest_round_counts():
    model, methods = decoder(n_layers=1, vocab_size=2048), dict(full=LayerCache, slow=SlowAtFirst)
    _, row = speed.measured(model, ENCODING, methods, [(3, 7)], 25, rounds=3)
    assert SlowAtFirst.compressed == 3 * [(3, 7)]
    assert 20 < row["step"] < 100 < row["prefill"] < 300 < row["compress"] < 500  # milliseconds


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
                           ("--batches 0", "batch 0 must be"),
                           (f"--json {tmp_path}/config.json", f"{tmp_path}/config.json holds something")):
        with pytest.raises(ValueError, match=f"^{message}"):
            speed.main(["--model", str(tmp_path), *wrong.split()])
