"""Perplexity, KL, attention outputs and bytes of compressed caches, against loops."""

import math

import pytest
import torch

from common import decoder
from lab.continuation import continuation, head_outputs, perturbation, reference
from lab.retrieval import maker, reading_within
from methods.baselines.ada_kv import AdaKV
from methods.baselines.h2o import H2O
from methods.critical_kv import Critical
from methods.ours.chunk_kv_semantic import SemanticChunkKV
from nanollm.cache import Method, PackedSlots, compress, crop, make_cache
from nanollm.model import Decoder

V = 2048
L = 2
B = 3
H = 2
G = 2
D = 8
T = 80
NEW = 12
CUT = T - NEW - 1  # the prompt without its last token; read in two chunks
SLOT = 2 * D * 4 + 4
TOKENS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
ENDS = torch.arange(V) % 4 == 0


@pytest.fixture(scope="module")
def model():
    size = dict(vocab_size=V, max_len=512, n_layers=L, n_heads=H * G, n_kv_heads=H)
    return decoder(**size, d_model=32, d_ff=48)


@pytest.fixture(scope="module")
def full(model):
    return reference(model, TOKENS, NEW)


class Spy(PackedSlots):
    """A store that notes what `attend` is given and returns."""

    def __init__(self, *place):
        super().__init__(*place)
        self.calls = []

    def attend(self, q, k, v, pos):
        y = super().attend(q, k, v, pos)
        self.calls.append((q, k, v, y))
        return y


@torch.inference_mode()
def walk(model, cut, kind=Method, **options):
    """Compress the first `cut` tokens, then feed the others one by one.

    Returns q, k, v and y (B, heads, T − 1, D) of each layer, and the log-probabilities (B, NEW, V)
    of the continuation's tokens. The prompt's last token is read, forgotten and fed again.
    """
    caches = make_cache(model, kind, Spy, **options)
    model(TOKENS[:, : cut + 1], caches)
    crop(caches, cut)
    compress(model, TOKENS[:, :cut], caches)
    logits = []
    for t in range(cut, T - 1):
        logits.append(model(TOKENS[:, t : t + 1], caches))
    layers = []
    for layer in caches:
        prompt, *later = layer.calls
        parts = [[x[:, :, :cut] for x in prompt], *later]
        layers.append([torch.cat(x, 2) for x in zip(*parts)])
    log_p = torch.cat(logits, 1)[:, -NEW:].double().log_softmax(-1)
    return layers, log_p


# ---- a compressed cache against the full one ----


def of_head(model, i, h) -> torch.Tensor:
    """Return the columns of W_O that multiply a head's output, (d_model, D)."""
    w_o = model.blocks[i].attention.o.weight
    return w_o[:, h * D : (h + 1) * D]


@torch.inference_mode()
def test_an_evicting_method_is_measured_as_by_loops(model, full):
    layers, log_p = walk(model, 1)
    evicted, log_q = walk(model, CUT, H2O, budget=10)
    row = continuation(model, full, maker(model, H2O, 10 / CUT))
    for i in range(L):
        off = layers[i][3] - evicted[i][3]  # of attention's outputs
        for b in range(B):
            for h in range(H * G):
                w_o = of_head(model, i, h)
                change = 0
                for t in range(CUT, T - 1):
                    change += (w_o @ off[b, h, t]).abs().sum().item() / NEW
                found = row["l1"][b, i, h].item()
                assert found == pytest.approx(change, rel=1e-4)

    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1)
    assert row["kl"].tolist() == pytest.approx(kl.tolist(), rel=1e-4)
    assert kl.min() > 0.01
    nll = 0
    for b in range(B):
        for t in range(NEW):
            true = TOKENS[b, T - NEW + t]
            nll -= log_q[b, t, true].item() / (B * NEW)
    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)
    assert row["nll"].mean().item() == pytest.approx(nll, rel=1e-4)


CHOICES = {
    "critical": (AdaKV, dict(select=Critical())),
    "semantic": (SemanticChunkKV, dict(ends=ENDS)),
}


@pytest.mark.parametrize("kind, options", CHOICES.values(), ids=CHOICES)
@torch.inference_mode()
def test_perturbation_is_definition_1_of_every_layer_alone(model, full, kind, options):
    """Softmax over the kept and the new tokens; the full cache gives queries, keys and values."""
    options = dict(budget=12, window_size=5) | options
    layers, _ = walk(model, 1)
    caches = make_cache(model, kind, **options)

    def feed(i, start, stop):
        qkv = [x[:, :, start:stop] for x in layers[i][:3]]
        caches[i].attend(*qkv, torch.arange(start, stop)[None])

    for i in range(L):
        feed(i, 0, CUT + 1)
    crop(caches, CUT)
    compress(model, TOKENS[:, :CUT], caches)

    total = torch.zeros(B, L, H * G)
    for i, (q, k, v, _) in enumerate(layers):

        def output(b, h, t, seen):
            g = h // G
            score = k[b, g, seen] @ q[b, h, t]
            weight = (score / math.sqrt(D)).softmax(0)
            return of_head(model, i, h) @ (weight @ v[b, g, seen])

        for t in range(CUT, T - 1):
            for b in range(B):
                for h in range(H * G):
                    pos = caches[i].pos[b, h // G].tolist()
                    kept = [j for j in pos if j < t]  # other slots are empty
                    everything = output(b, h, t, [*range(t + 1)])
                    change = everything - output(b, h, t, [*kept, t])
                    total[b, i, h] += change.abs().sum()
            feed(i, t, t + 1)

    def make(_):
        return make_cache(model, kind, **options)

    found = perturbation(model, full, make)
    torch.testing.assert_close(found, total / NEW)
    assert total.min() > 0.01
    row = continuation(model, full, make, full.recording, alone=True)
    torch.testing.assert_close(row["l1_alone"], found, rtol=1e-4, atol=1e-5)


def test_caches_that_evict_while_they_read_are_measured_as_they_read(model, full):
    make = reading_within(maker(model, H2O, 0.25))
    row = continuation(model, full, make, chunk_size=7)
    assert row["slots"] == row["slots_end"] == round(0.25 * CUT)
    caches = make(CUT)
    logits = []
    with torch.no_grad():
        for part in TOKENS[:, :CUT].split(7, 1):
            model(part, caches)
        for t in range(CUT, T - 1):
            logits.append(model(TOKENS[:, t : t + 1], caches))
    log_p = torch.cat(logits, 1).log_softmax(-1)
    true = TOKENS[:, CUT + 1 :, None]
    expected = -log_p.gather(-1, true)[..., 0].mean(-1)
    assert torch.allclose(row["nll"], expected, rtol=1e-5)


def test_the_full_cache_changes_nothing(model, full):
    row = continuation(model, full, maker(model, Method, None), alone=True)
    assert row["kl"].abs().max() < 1e-5
    assert row["l1"].max() < 1e-3
    assert row["l1_alone"].max() < 1e-3
    assert (row["prompt"], row["slots"], row["slots_end"]) == (CUT, CUT, T - 1)


# ---- bytes ----


def test_bytes_are_counted(model, full):
    row = continuation(model, full, lambda _: make_cache(model, H2O, budget=10))
    slot = L * B * H * (SLOT + 4)  # H2O adds a number
    read = CUT + 1  # the last token is read, too
    assert row["live"] == 10 * slot
    assert row["allocated"] == 12 * slot  # 11 and a tenth
    # the second chunk of the prompt made the slots grow
    assert row["peak"] == (read + read // 10) * slot


def test_a_prompt_that_is_read_at_once_leaves_no_slack(model, full):
    make = maker(model, Method, None)
    slot = L * B * H * SLOT
    replayed = continuation(model, full, make, full.recording)
    read = continuation(model, full, make, chunk_size=CUT + 1)
    assert replayed["live"] == read["live"] == (T - 1) * slot
    assert replayed["peak"] == read["peak"] == (CUT + 1) * slot


# ---- the reference ----


def test_a_reference_is_split_by_texts(model, full):
    make = maker(model, H2O, 0.25)
    whole = continuation(model, full, make, full.recording)
    parts = []
    for part in full.split(2):
        parts.append(continuation(model, part, make, part.recording))
    assert [len(part["kl"]) for part in parts] == [2, 1]
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
        (TOKENS, 0, f"continuation of 0 tokens must be shorter than .* {T} by"),
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
