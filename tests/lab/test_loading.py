"""What a command loads: decoders by their engines, and what methods learn of a decoder."""

from dataclasses import dataclass
from functools import partial
import shutil

import pytest
import torch

from common import ENCODING, decoder, tasks
from lab import loading
from lab.loading import calibrated, load
from lab.methods_by_name import Variant, pick, variant
from methods.baselines.kvzip_fast import FastKVzip
from methods.ours.question_gates import QuestionGates
from nanollm import SHIPPED
from nanollm.cache import Method
from nanollm.checkpoint import from_hf
from nanollm.model import Decoder


@pytest.fixture
def learner(monkeypatch):
    """Return a method that learns two options; `asked` has the decoders of which it learned."""

    @dataclass
    class Learner(Method):
        gates: torch.Tensor | None = None
        shares: torch.Tensor | None = None
        asked = []

        @staticmethod
        def calibrate(model, tasks):
            Learner.asked.append(model)
            assert tasks.split == "train"
            return dict(gates=torch.ones(2, 3), shares=torch.zeros(2))

    monkeypatch.setattr(loading, "TrainingTasks", lambda encoding, split: tasks(split))
    loading.training_tasks.cache_clear()
    yield Learner
    loading.training_tasks.cache_clear()


def test_what_a_method_learns_is_kept_in_a_file_for_its_decoder(
    tmp_path, monkeypatch, learner
):
    model = decoder(vocab_size=2048)
    other = decoder(vocab_size=2048, n_layers=1)
    learns = Variant(learner, {})
    for _ in range(2):
        found = calibrated(learns, model, ENCODING, tmp_path / "new")
        assert found["gates"].equal(torch.ones(2, 3))
        assert found["shares"].eq(0).all()
    assert learner.asked == [model]

    # what ships: here a folder of one decoder
    monkeypatch.setattr(loading, "CALIBRATED", tmp_path)
    assert calibrated(learns, model, ENCODING).keys() == {"gates", "shares"}
    assert learner.asked == [model]
    calibrated(learns, other, ENCODING)
    assert learner.asked == [model, other]

    message = "Learner.safetensors was calibrated on another decoder"
    with pytest.raises(ValueError, match=message):
        calibrated(learns, other, ENCODING, tmp_path / "new")


@pytest.mark.parametrize("folder", SHIPPED.values())
def test_nothing_is_learned_anew_of_a_decoder_that_ships(folder, monkeypatch):
    model = from_hf(folder)
    for kind in FastKVzip, QuestionGates:
        monkeypatch.setattr(kind, "calibrate", None)  # not to be called
    for name in "question_gates", "question_gates@4":
        learned = calibrated(pick([name])[name], model, ENCODING)
        assert learned.keys() == {"gates", "edges"}
    mine = variant(partial(FastKVzip, recent=16))
    gates = calibrated(mine, model, ENCODING)["gates"]
    ships = calibrated(variant(FastKVzip), model, ENCODING)
    assert ships["gates"].equal(gates)


def test_an_id_of_the_hub_is_a_model_that_was_downloaded(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="org/tiny is no folder here, and the Hugging"):
        load("org/tiny")
    place = tmp_path / "models--org--tiny"
    shutil.copytree(checkpoint, place / "snapshots" / "1a")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1a")
    downloaded = load("org/tiny")[0].embed.weight
    assert downloaded.equal(from_hf(checkpoint).embed.weight)


@pytest.mark.parametrize("engine", ["auto", "ours", "transformers"])
def test_an_engine_runs_a_checkpoint(engine, checkpoint):
    model, encoding = load(checkpoint, engine=engine)
    assert isinstance(model, Decoder) == (engine != "transformers")
    tokens = torch.tensor([encoding.encode_ordinary("a text")])
    with torch.no_grad():
        expected = from_hf(checkpoint)(tokens)
        assert torch.allclose(model(tokens), expected, rtol=1e-4, atol=1e-5)
