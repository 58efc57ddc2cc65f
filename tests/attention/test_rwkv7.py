"""RWKV-7: the layer around the rule of a diagonal plus low rank."""

import math

import pytest
import torch
from plain_dplr import definition
from torch.nn.functional import layer_norm, normalize, pad

from unrolled.attention.rwkv7 import MIXTURES, RWKV7
from unrolled.contract import UnsupportedError


def random_module(**options) -> RWKV7:
    torch.manual_seed(0)
    module = RWKV7(8, 2, causal=True, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.7)
    return module


def test_the_module_is_its_formulas():
    module = random_module(value_dim=3, bias=False)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    shifted = pad(x, (0, 0, 1, 0))[:, :-1]
    r, k, v, w, a, g = (x + (shifted - x) * module.mix[i] for i, _ in enumerate(MIXTURES))
    W_r, W_k, W_v = module.qkv_proj.weight.split([8, 8, 6])
    r, f, v = ((y @ W.T).unflatten(-1, (2, -1)) for y, W in ((r, W_r), (k, W_k), (v, W_v)))
    w = -math.exp(-0.5) * module.decay_up(module.decay_down(w).tanh()).sigmoid().unflatten(-1, (2, 4))
    a = module.rate_up(module.rate_down(a)).sigmoid().unflatten(-1, (2, 4))
    p = normalize(f * module.erased, dim=-1)
    k = f * (1 + (a - 1) * module.replaced)
    o, _ = definition(r, k, v, p, -a * p, w, torch.zeros(1, 2, 4, 3, dtype=torch.float64))
    weight, bias = (y.view(2, 3) for y in (module.norm_weight, module.norm_bias))
    o = layer_norm(o, (3,), eps=64e-5) * weight + bias
    o = o + (r * k * module.bonus).sum(-1, keepdim=True) * v
    gate = module.gate_up(module.gate_down(g).sigmoid())
    torch.testing.assert_close(module(x), (o.flatten(2) * gate) @ module.out_proj.weight.T)


def test_one_token_with_one_value_in_each_head():
    module, x = random_module(value_dim=1), torch.randn(1, 3, 8, dtype=torch.float64)
    state, whole = module.init_state(1), module(x)
    for t in range(3):
        y, state = module.step(x[:, t], state)
        torch.testing.assert_close(y, whole[:, t])
    torch.testing.assert_close(module(x[:, :1]), whole[:, :1])


def test_the_token_before_is_that_of_the_sequence():
    """Not a padded one, nor the last one of the sequence before it in a pack."""
    module, x = random_module(), torch.randn(1, 9, 8, dtype=torch.float64)
    first, second = module(x[:, :4]), module(x[:, 4:])
    packed = module(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([first, second], 1))
    padding = torch.tensor([[False, True, False, False, True, False, False, False, False]])
    torch.testing.assert_close(module(x, key_padding_mask=padding)[~padding], module(x[~padding][None])[0])


def test_rotary_positions_are_refused():
    with pytest.raises(UnsupportedError, match="features that decay at different rates"):
        RWKV7(8, 2, causal=True, rotary=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate_rank": 0}, "rate_rank is 0, but must be at least 1"),
        ({"eps": 0.0}, "eps is 0.0, but must be above 0"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RWKV7(8, 2, causal=True, **options)


def test_a_state_is_continued_with_a_convolution():
    module = RWKV7(8, 2, causal=True, conv=3).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    first, state = module.prefill(x[:, :3], module.init_state(2))
    second, state = module.prefill(x[:, 3:5], state)
    third, _ = module.step(x[:, 5], state)
    torch.testing.assert_close(torch.cat([first, second, third.unsqueeze(1)], 1), module(x))


def test_channels_of_rwkv7_start_as_in_its_first_layer():
    layer = RWKV7(8, 2, causal=True)
    assert (layer.mix[:, 0] == 1).all()  # the first channel reads the token before
    assert (layer.mix.diff(dim=1) < 0).all()
    torch.testing.assert_close(
        layer.decay_up.bias[[0, 3, 7]], torch.tensor([-6.5, -6.5 + 5 * (3 / 7) ** 0.85, -1.5])
    )
    assert not layer.decay_up.weight.any()
    assert not layer.rate_up.weight.any()
    assert not layer.rate_up.bias.any()
