"""The decoder against transformers: tiny random models of every kind that it reads."""

from pytest import approx, fixture, mark, raises
import torch

from nanollm.cache import make_cache
from nanollm.checkpoint import from_hf
from nanollm.model import Decoder
from oracle import CASES, TOKENS, oracle, same, tiny


@fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """transformers' model and ours, read from the folder it saved."""
    theirs = oracle(request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs, from_hf(folder)


@torch.no_grad()
def test_logits_equal_transformers_with_a_cache_and_without(pair):
    theirs, ours = pair
    want = theirs(TOKENS).logits
    assert want.std() > 0.3  # else the tolerance would hide everything
    same(ours(TOKENS), want)
    same(ours(TOKENS, last=3), want[:, -3:])

    # a second chunk attends to the first
    for sizes in ([1, 9] + 30 * [1], [7, 9] + 24 * [1]):
        cache = make_cache(ours)
        chunks = [ours(chunk, cache) for chunk in TOKENS.split(sizes, 1)]
        same(torch.cat(chunks, 1), want)
        assert cache[0].seen == cache[1].seen == 40


@torch.no_grad()
def test_given_positions_equal_transformers(pair):
    theirs, ours = pair
    pos = torch.stack((torch.arange(20), torch.arange(20) + 30))
    pos[:, 8:] += 11  # a jump in the middle
    tokens = TOKENS[:, :20]
    every = torch.ones(2, 20)
    want = theirs(tokens, position_ids=pos, attention_mask=every).logits
    same(ours(tokens, pos=pos), want)
    assert (ours(tokens) - want).abs().max() > 1e-2  # the positions matter


def test_sixteen_bits_do_not_round_the_angles():
    model = Decoder(tiny())
    freq = model.freq.clone()
    assert model.half().embed.weight.dtype == torch.float16
    assert model.freq.equal(freq)


def test_sequences_end_at_max_len():
    model = Decoder(tiny(family="gpt2"))
    assert model(TOKENS[:, :16]).shape == (2, 16, 61)
    cache = make_cache(model)
    model(TOKENS[:, :15], cache)
    for call in (TOKENS[:, :17],), (TOKENS[:, :2], cache):
        with raises(ValueError, match="17 tokens exceed .* 16"):
            model(*call)
    model(TOKENS[:, :1], cache)  # the refused call left no trace


FIVE = TOKENS[:, :5]
NO_TOKENS = "must be an int64 tensor"


@mark.parametrize(
    "call, message",
    [
        (dict(last=0), "last 0 must be a whole number from 1 to 5"),
        (dict(last=6), "last 6 .* to 5"),
        (dict(tokens=FIVE.float()), NO_TOKENS),
        (dict(tokens=TOKENS[0]), NO_TOKENS),
        (dict(tokens=TOKENS[:, :0]), NO_TOKENS),
        (dict(tokens=FIVE + 57), "token id 116 lies outside the vocabulary 0 … 60"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_before_a_cache_is_touched(call, message):
    model = Decoder(tiny(family="gpt2"))
    cache = make_cache(model)
    call = dict(tokens=FIVE, cache=cache) | call
    with raises(ValueError, match=message) as error:
        model(**call)
    assert "\n" not in str(error.value)
    assert [memory.seen for memory in cache] == [0, 0]


@mark.parametrize(
    "changed, message",
    [
        (dict(family="bert"), "family 'bert' is unknown"),
        (dict(d_model=30), "d_model 30 is not a multiple of n_heads 4"),
        (dict(d_model=28), "head_dim 7 is odd"),
        (dict(n_kv_heads=3), "n_heads 4 is not a multiple of n_kv_heads 3"),
    ],
)
def test_a_bad_config_is_refused(changed, message):
    with raises(ValueError, match=message):
        tiny(**changed)


def test_gradients_reach_every_parameter():
    more = dict(tie_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True)
    for family in "llama", "gpt2":
        model = Decoder(tiny(family=family, **more))
        std = model.blocks[0].mlp.down.weight.std().item()
        assert std == approx(0.02 / 4**0.5, rel=0.15)
        logits = model(TOKENS[:, :16])
        logits.square().mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all(), name
