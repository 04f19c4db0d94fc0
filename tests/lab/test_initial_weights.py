"""Initial weights: heads that look back, that continue what repeats, and heads that are left out."""
import math

import pytest
import torch

from nanollm.model import Config, Decoder, rope
from lab.initial_weights import CONFIG, induction_start, learned_start, without_heads


@torch.no_grad()
def test_layer_0_starts_by_looking_back_1_2_1_3_1_4_tokens():
    model = Decoder(Config(**CONFIG | dict(n_layers=2)))
    induction_start(model, 0)
    tokens = torch.randint(0, 2047, (8, 100), generator=torch.Generator().manual_seed(0))
    x, block = model.embed(tokens), model.blocks[0]
    q, k, _ = block.attention.project(block.norm1(x), rope(model.freq, torch.arange(100)[None]))
    score = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    p = score.masked_fill(torch.ones(100, 100).triu(1).bool(), -math.inf).softmax(-1)
    for h, back in enumerate([1, 2, 1, 3, 1, 4]):
        weight = torch.stack([p[:, h].diagonal(-d, 1, 2)[:, 10:].mean() for d in range(50)])
        assert weight.argmax() == back and weight[back] > 0.75, h


@torch.no_grad()
@pytest.mark.parametrize("start, copies", [(induction_start, True), (learned_start, False)])
def test_the_built_start_continues_what_repeats_and_the_learned_does_not(start, copies):
    """Induction before any training: chance is 1/2048, and 5 standard errors of that 0.4 %."""
    tokens = torch.randint(0, 2047, (8, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 3)
    for n_layers in (2, 6):
        model = Decoder(Config(**CONFIG | dict(n_layers=n_layers)))
        start(model, 1)
        right = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]
        again = right[:, 40:].float().mean()
        assert again > 0.1 if copies else again < 0.004
        assert right[:, :39].float().mean() < 0.01
    if start is learned_start:  # what is not built is drawn
        drawn = torch.cat([block.attention.o.weight.flatten() for block in model.blocks[1:]])
        assert drawn.std().item() == pytest.approx((192 * 12) ** -0.5, rel=0.02)


@torch.no_grad()
def test_heads_are_left_out_as_if_their_columns_of_w_o_were_0():
    model = Decoder(Config(64, 32, n_layers=3, n_heads=4, n_kv_heads=2, d_model=32, d_ff=32))
    tokens, stays = torch.randint(0, 64, (5, 9)), torch.randint(0, 2, (3, 5, 4)).float()
    with without_heads(model, stays):
        logits = model(tokens)
    for i in range(5):  # as if these heads' columns of W_O were 0
        copied = Decoder(model.config)
        copied.load_state_dict(model.state_dict())
        for block, heads in zip(copied.blocks, stays[:, i]):
            block.attention.o.weight.mul_(heads.repeat_interleave(model.config.head_dim))
        torch.testing.assert_close(logits[i], copied(tokens[i:i + 1])[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(model(tokens[:1]), model(tokens)[:1], atol=1e-5, rtol=0)  # all is back
    assert not torch.allclose(model(tokens), logits, atol=1e-3)
