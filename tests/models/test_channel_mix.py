"""The feed-forward layer of RWKV, which also reads the token before, in a decoder."""

import pytest
import torch
from torch.nn.functional import pad

from unrolled import models
from unrolled.generation import generate
from unrolled.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from unrolled.models.channel_mix import ChannelMix
from unrolled.ops.token_shift import mix_with_token_before
from unrolled.training import TrainConfig
from unrolled.training.optim import build_optimizers

SIZES = {"d_model": 8, "n_layers": 2, "n_heads": 2, "positions": "none", "activation": "channel_mix"}


def decoder(attention="rwkv4", **settings) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(11, attention=attention, **SIZES | settings)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def test_the_layer_is_its_formula():
    torch.manual_seed(0)
    layer, x = ChannelMix(6, 10).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    torch.nn.init.uniform_(layer.mix)
    before = pad(x, (0, 0, 1, 0))[:, :-1]
    k, r = (x + (before - x) * mu for mu in layer.mix)
    expected = torch.sigmoid(r @ layer.gate.weight.T) * (
        (k @ layer.up.weight.T).clamp(min=0) ** 2 @ layer.down.weight.T
    )
    found, last = layer(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(last[:, 0], x[:, -1])


@pytest.mark.parametrize("attention", ["rwkv4", "softmax", ["linear", "window"]], ids=str)
@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_steps_and_prompts_are_the_parallel_form(attention, norm):
    model, tokens = decoder(attention, norm=norm), torch.randint(0, 11, (2, 9))
    expected = model(tokens)
    found, state = model.prefill(tokens[:, :3], model.init_state(2))
    torch.testing.assert_close(found, expected[:, :3])
    for t in range(3, 6):
        found, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(found, expected[:, t])
    found, state = model.prefill(tokens[:, 6:], state)
    torch.testing.assert_close(found, expected[:, 6:])


@torch.no_grad()
def test_padding_is_not_the_token_before():
    model, tokens = decoder(), torch.randint(0, 11, (1, 7))
    padding = torch.tensor([[True, False, False, True, True, False, False]])
    expected = model(tokens[~padding][None])
    torch.testing.assert_close(model(tokens, key_padding_mask=padding)[~padding], expected[0])
    found, state = model.prefill(tokens, model.init_state(1), key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[0])
    token = tokens[:, 0]
    alone = model.prefill(tokens[~padding][None], model.init_state(1))[1]
    torch.testing.assert_close(model.step(token, state), model.step(token, alone))


@torch.no_grad()
def test_packed_sequences_do_not_mix():
    model, tokens = decoder(), torch.randint(0, 11, (1, 7))
    packed = model(tokens, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([model(tokens[:, :3]), model(tokens[:, 3:])], 1))


def test_a_model_is_saved_with_it_and_generates(tmp_path):
    model = decoder().float()
    model.save(tmp_path / "run")
    again = models.load(tmp_path / "run")
    ours, loaded = (generate(each, [[1, 2, 3]], 8, temperature=0)[0] for each in (model, again))
    assert ours.tolist() == loaded.tolist()


def test_a_state_of_another_model_is_refused():
    model, other = decoder(), decoder(activation="gelu")
    token = torch.tensor([1])
    with pytest.raises(ValueError, match="state is a RWKV4State, but must be a MixingState"):
        model.step(token, other.init_state(1))
    with pytest.raises(ValueError, match="state is a MixingState, but must be a RWKV4State"):
        other.step(token, model.init_state(1))


def test_weight_decay_leaves_the_mixtures_alone():
    model = decoder()
    (optimizer,) = build_optimizers(model, TrainConfig(weight_decay=1.0))
    decayed = {id(x) for group in optimizer.param_groups if group["weight_decay"] for x in group["params"]}
    assert id(model.stack.layers[0].ff.up.weight) in decayed
    assert id(model.stack.layers[0].ff.mix) not in decayed


def test_gradients_with_recomputation_are_equal():
    tokens = torch.randint(0, 11, (2, 6))
    found = []
    for recompute in (False, True):
        model = decoder().train()
        model.gradient_checkpointing = recompute
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_wrong_last_token_is_named():
    model, tokens = decoder(), torch.randint(0, 11, (2, 5))
    state = model.init_state(2)
    for wrong, words in ((None, "a NoneType"), (state.layers[0].previous[:1], r".* of shape \[1, 1, 8\]")):
        spoiled = state._replace(layers=tuple(layer._replace(previous=wrong) for layer in state.layers))
        with pytest.raises(ValueError, match=f"state.previous is {words}, but must be"):
            model.prefill(tokens, spoiled)
        with pytest.raises(ValueError, match=f"state.previous is {words}, but must be"):
            model.step(tokens[:, 0], spoiled)


@pytest.mark.parametrize(
    ("x", "mu", "message"),
    [
        ((2, 3, 4), (2, 5), r"mu is torch.float32 of shape \[2, 5\], but must be \[n, 4\], as wide as x"),
        ((2, 3, 4), (4,), r"mu is torch.float32 of shape \[4\]"),
        ((2, 4), (2, 4), "last is None, but must be the token before"),
    ],
)
def test_mixtures_that_do_not_fit_are_named(x, mu, message):
    with pytest.raises(ValueError, match=message):
        mix_with_token_before(torch.zeros(x), torch.zeros(mu))


def test_models_that_cannot_have_it_say_so():
    message = "activation is 'channel_mix', but must be another one in "
    with pytest.raises(ValueError, match=f"{message}a bidirectional model"):
        Encoder(EncoderConfig(vocab_size=11, n_classes=3, attention="linear", **SIZES))
    with pytest.raises(ValueError, match="must be another one here: only a Decoder that is not rev"):
        Decoder(DecoderConfig(11, reversible=True, **SIZES))
    with pytest.raises(ValueError, match="ff_chunk is 8, but must be None with activation 'channel_mix'"):
        DecoderConfig(11, ff_chunk=8, **SIZES)
