"""What type torch gives to new tensors by default changes no result, and values are not read where there are none."""

import math

import pytest
import torch
from defaults import default_dtype
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import softplus

from unrolled import attention
from unrolled.attention._decays import random_decay_biases, random_log_paces

CAUSAL = [name for name in attention.names() if attention.load(name).supports.causal]


def results(layer, x):
    """The output, all gradients, and where there is a recurrence what it gives."""
    y = layer(x)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    found = [y, *torch.autograd.grad(y.square().sum(), inputs, materialize_grads=True)]
    if layer.supports.recurrence != "none":
        with torch.no_grad():
            y, state = layer.prefill(x[:, :-1], layer.init_state(len(x)))
            found += [y, layer.step(x[:, -1], state)[0]]
    return found


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_default_type_of_new_tensors_does_not_matter(name, default):
    torch.manual_seed(0)
    kind = attention.load(name)
    conv = {"conv": 4} if kind.supports.recurrence != "none" else {}
    layer, x = kind(32, 4, causal=True, **conv).eval(), torch.randn(2, 70, 32, requires_grad=True)
    expected = results(layer, x)
    with default_dtype(default):
        found = results(layer, x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", CAUSAL)
def test_tensors_without_values_give_shapes(name):
    layer = attention.load(name)(16, 2, causal=True)
    mode = FakeTensorMode()
    data = torch.randn(2, 40, 16)
    with mode:
        for module in layer.modules():
            for own in (module._parameters, module._buffers):
                own |= {name: mode.from_tensor(x) for name, x in own.items() if x is not None}
        x = mode.from_tensor(data).requires_grad_()
        y = layer(x)
        assert y.shape == x.shape
        y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_meta_device_gives_shapes(name, grad):
    layer = attention.load(name)(16, 2, causal=True).to("meta")
    x = torch.empty(2, 40, 16, device="meta", requires_grad=grad)
    with torch.set_grad_enabled(grad):
        assert layer(x).shape == x.shape
        if layer.supports.recurrence != "none":
            y, state = layer.prefill(x[:, :-1], layer.init_state(2))
            assert y.shape == (2, 39, 16)
            assert layer.step(x[:, -1], state)[0].shape == (2, 16)
    with pytest.raises(ValueError, match=r"is torch\.float64, but the weights are torch\.float32"):
        layer(x.double())


def test_decays_start_over_the_whole_range():
    torch.manual_seed(0)
    paces, sizes = random_log_paces(10_000).exp(), softplus(random_decay_biases(10_000)).log()
    for found, low, high in ((paces, 1, 16), (sizes, math.log(1e-3), math.log(1e-1))):
        expected = [low, (low + high) / 2, high]
        assert [found.min().item(), found.mean().item(), found.max().item()] == pytest.approx(
            expected, rel=0.02
        )
