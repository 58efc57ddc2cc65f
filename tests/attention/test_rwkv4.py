"""RWKV-4: the layer around the averages of `unrolled.ops.wkv`."""

import pytest
import torch
from torch.nn.functional import pad

from unrolled.attention.rwkv4 import MIXTURES, RWKV4
from unrolled.contract import UnsupportedError


def random_module(**options) -> RWKV4:
    torch.manual_seed(0)
    module = RWKV4(8, 2, causal=True, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.7)
    return module


def mixtures(module, x):
    before = pad(x, (0, 0, 1, 0))[:, :-1]
    return (x + (before - x) * module.mix[i] for i, _ in enumerate(MIXTURES))


@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_the_module_is_its_formulas(n_kv_heads):
    module = random_module(head_dim=5, n_kv_heads=n_kv_heads, bias=False)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    W_r, W_k, W_v = module.qkv_proj.weight.split(module.widths)
    r, k, v = (y @ W.T for y, W in zip(mixtures(module, x), (W_r, W_k, W_v), strict=True))
    k, v = (y.repeat(1, 1, 2 // n_kv_heads) for y in (k, v))
    age = torch.arange(6).unsqueeze(1) - torch.arange(6)  # of key j for query t
    exponents = k.unsqueeze(1) - (age - 1).unsqueeze(-1) * module.log_pace.exp()
    own = (k + module.bonus).unsqueeze(1)
    exponents = torch.where((age == 0).unsqueeze(-1), own, exponents)
    weights = exponents.masked_fill((age < 0).unsqueeze(-1), -torch.inf).softmax(2)
    o = (weights * v.unsqueeze(1)).sum(2)
    torch.testing.assert_close(module(x), (r.sigmoid() * o) @ module.out_proj.weight.T)


def test_the_token_before_is_that_of_the_sequence():
    """Not a padded one, nor the last one of the sequence before it in a pack."""
    module, x = random_module(), torch.randn(1, 9, 8, dtype=torch.float64)
    first, second = module(x[:, :4]), module(x[:, 4:])
    packed = module(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([first, second], 1))
    padding = torch.tensor([[False, True, False, False, True, False, False, False, False]])
    torch.testing.assert_close(module(x, key_padding_mask=padding)[~padding], module(x[~padding][None])[0])


def test_a_state_is_continued_with_a_convolution():
    module = random_module(conv=3)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    first, state = module.prefill(x[:, :3], module.init_state(2))
    second, state = module.prefill(x[:, 3:5], state)
    third, _ = module.step(x[:, 5], state)
    torch.testing.assert_close(torch.cat([first, second, third.unsqueeze(1)], 1), module(x))


def test_a_long_sequence_forgets_at_the_pace_of_each_channel():
    module = random_module()
    with torch.no_grad():
        module.log_pace.copy_(torch.tensor([-40.0, 1.0]).repeat(4))
    x = torch.randn(1, 40, 8, dtype=torch.float64)
    state = module.prefill(x, module.init_state(1))[1]
    later = module.prefill(x[:, 20:], module.init_state(1))[1]
    remembers, forgets = (
        (state.num - later.num * (later.top - state.top).exp()).abs()[0, i::2] for i in (0, 1)
    )
    assert remembers.min() > 1e-3
    assert forgets.max() < 1e-12


def test_channels_start_as_in_the_first_published_layer():
    layer = RWKV4(8, 2, causal=True)
    assert (layer.mix[:, 0] == 1).all()  # the first channel reads the token before
    assert (layer.mix.diff(dim=1) < 0).all()
    torch.testing.assert_close(layer.log_pace[[0, 3, 7]], torch.tensor([-5.0, -5 + 8 * (3 / 7) ** 0.7, 3.0]))
    torch.testing.assert_close(layer.bonus[:3].exp(), 0.3 * torch.tensor([0, 0.5, -0.5]).exp())


def test_options_that_it_cannot_have_are_refused():
    with pytest.raises(UnsupportedError, match="there are no products to rotate"):
        RWKV4(8, 2, causal=True, rotary=True)
    with pytest.raises(ValueError, match="value_dim is 3, but must be head_dim = 4"):
        RWKV4(8, 2, causal=True, value_dim=3)
