"""A projection that was replaced by an adapter, or that has a hook, counts in every method."""

import copy

import pytest
import torch
from adapters import Doubled

from unrolled import attention
from unrolled.ops.state import leaves

CAUSAL = [name for name in attention.names() if attention.load(name).supports.recurrence != "none"]
OPTIONS = {"linformer": {"max_length": 9}, "spatiotemporal": {"shape": (1, 3, 3)}}


def pair(name, causal, part):
    """Return a module whose part is wrapped, and one whose part has doubled weights."""
    torch.manual_seed(0)
    wrapped = attention.load(name)(8, 2, causal=causal, **OPTIONS.get(name, {})).double().eval()
    doubled = copy.deepcopy(wrapped)
    for parameter in getattr(doubled, part).parameters():
        parameter.data *= 2
    setattr(wrapped, part, Doubled(getattr(wrapped, part)))
    return wrapped, doubled


@pytest.mark.parametrize("part", ["qkv_proj", "out_proj"])
@pytest.mark.parametrize("name", attention.names())
def test_an_adapter_counts_in_forward(name, part):
    causal = not attention.load(name).supports.bidirectional
    wrapped, doubled = pair(name, causal, part)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(wrapped(x), doubled(x))


@pytest.mark.parametrize("part", ["qkv_proj", "out_proj"])
@pytest.mark.parametrize("name", CAUSAL)
def test_an_adapter_counts_in_a_recurrence(name, part):
    wrapped, doubled = pair(name, True, part)
    x, found = torch.randn(2, 9, 8, dtype=torch.float64), []
    for module in (wrapped, doubled):
        y, state = module.prefill(x[:, :8], module.init_state(2))
        y_t, state = module.step(x[:, 8], state)
        found.append([y, y_t, *leaves(state).values()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_an_adapter_counts_in_a_memory(name):
    for part in ("qkv_proj", "out_proj"):
        wrapped, doubled = pair(name, False, part)
        query, memory = torch.randn(2, 2, 5, 8, dtype=torch.float64).unbind()
        torch.testing.assert_close(
            wrapped.recall(query, wrapped.read(memory)), doubled.recall(query, doubled.read(memory))
        )


def test_hooks_and_adapters_of_the_memory_projection_of_a_perceiver_count():
    wrapped, doubled = pair("perceiver", False, "memory_proj")
    hooked, x = copy.deepcopy(wrapped), torch.randn(2, 9, 8, dtype=torch.float64)
    hooked.memory_proj = hooked.memory_proj.base
    assert not torch.equal(hooked(x), doubled(x))
    hooked.memory_proj.register_forward_hook(lambda layer, inputs, y: 2 * y)
    for module in (wrapped, hooked):
        torch.testing.assert_close(module(x), doubled(x))
