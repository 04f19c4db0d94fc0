"""What tests/test_referee.py does not measure: outputs with the layers below, peaks, parts."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from common import reading_within
from lab.continuation import continuation, head_outputs, reference
from lab.retrieval import maker
from methods.baselines.h2o import H2O
from nanollm.cache import Method
from nanollm.model import Decoder

# as conftest.py's decoder has them
V = 2048
L = 2
B = 3
H = 2
G = 2
D = 8
T = 80
NEW = 12
CUT = T - NEW - 1  # the prompt without its last token; read in two chunks
TOKENS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def full(model):
    return reference(model, TOKENS, NEW)


# ---- a compressed cache against the full one ----


@torch.inference_mode()
def test_no_layer_is_below_the_first(model, full):
    row = continuation(model, full, maker(model, H2O, 10 / CUT), alone=True)
    torch.testing.assert_close(row["l1_alone"][:, 0], row["l1"][:, 0])


@torch.no_grad()
def test_caches_that_evict_while_they_read_are_measured_as_they_read(model, full):
    make = reading_within(maker(model, H2O, 0.25))
    row = continuation(model, full, make, chunk_size=7)
    assert row["slots"] == row["slots_end"] == round(0.25 * CUT)
    caches = make(CUT)
    for part in TOKENS[:, :CUT].split(7, 1):
        model(part, caches)
    parts = TOKENS[:, CUT:-1].split(1, 1)
    logits = torch.cat([model(part, caches) for part in parts], 1)
    nll = cross_entropy(logits.mT, TOKENS[:, -NEW:], reduction="none").mean(-1)
    torch.testing.assert_close(row["nll"], nll, rtol=1e-4, atol=1e-5)


# ---- bytes ----


def test_peaks_are_the_bytes_before_the_compression(model, full):
    """A buffer that grew, by the prompt's second chunk, has a tenth of slack."""
    make = maker(model, Method, None)
    read = CUT + 1  # the last token is read, too
    slot = L * B * H * (2 * D * 4 + 4)
    assert continuation(model, full, make)["peak"] == (read + read // 10) * slot
    assert continuation(model, full, make, chunk_size=read)["peak"] == read * slot
    assert continuation(model, full, make, full.recording)["peak"] == read * slot


# ---- the reference ----


def test_a_reference_is_split_by_texts(model, full):
    make = maker(model, H2O, 0.25)
    whole = continuation(model, full, make, full.recording)
    parts = []
    for part in full.split(2):
        parts.append(continuation(model, part, make, part.recording))
    for name in "kl", "nll", "l1":
        found = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(found, whole[name], rtol=1e-4, atol=1e-5)


def test_hooks_are_taken_out_again(model):
    with pytest.raises(KeyError), head_outputs(model):
        raise KeyError
    assert not any(block.attention.o._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize(
    "tokens, new, message",
    [
        (TOKENS.repeat(1, 7), 8, "560 prompt tokens .* exceed .* length of 512"),
        (TOKENS, 0, "of 0 tokens must be shorter"),
        (TOKENS, T - 1, f"of {T - 1} tokens must be shorter than .* {T} by"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_any_work(
    model, monkeypatch, tokens, new, message
):
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(ValueError, match=message) as error:
        reference(model, tokens, new)
    assert "\n" not in str(error.value)
