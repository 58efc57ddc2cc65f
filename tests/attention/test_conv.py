"""The short convolution of queries, keys and values, for every mechanism that runs as a recurrence."""

import pytest
import torch
from contract_parts import in_two_parts
from torch.nn.functional import silu

from unrolled import attention
from unrolled.contract import UnsupportedError
from unrolled.ops import state as states
from unrolled.testing import Maker

RECURRENT = [name for name in attention.names() if attention.load(name).supports.recurrence != "none"]
OPTIONS = {"aft": {"max_length": 16}, "topk": {"n_keys": 16}}


def mechanism(name, conv=3, **options):
    torch.manual_seed(0)
    module = (
        attention.load(name)(8, 2, causal=True, conv=conv, **OPTIONS.get(name, {}), **options).double().eval()
    )
    if conv:
        for parameter in module.short_conv.parameters():
            torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("name", [name for name in RECURRENT if not attention.load(name).mixes_input])
def test_heads_are_filtered_before_the_mechanism_attends(name):
    """Against the same mechanism without a convolution, given heads that are filtered by hand."""
    module, plain = mechanism(name), mechanism(name, conv=None)
    weights = module.state_dict()
    taps, bias = weights.pop("short_conv.weight"), weights.pop("short_conv.bias", 0)
    plain.load_state_dict(weights)
    x = torch.randn(2, 7, 8, dtype=torch.double)
    sizes = [y.shape[-2:] for y in plain.project(x)]
    flat = torch.cat([y.flatten(-2) for y in plain.project(x)], -1)
    padded = torch.nn.functional.pad(flat, (0, 0, 2, 0))
    filtered = sum(taps[:, i] * padded[:, i : i + 7] for i in range(3)) + bias
    if module.conv_activation:
        filtered = silu(filtered)
        plain.short_conv = module.short_conv  # which says that silu was applied
    expected = plain.attend(_heads(plain, filtered, sizes, x), attention.base.Masks())
    torch.testing.assert_close(module(x), plain.merge_heads(expected, x))


def _heads(module, flat, sizes, x):
    parts = torch.split(flat, [a * b for a, b in sizes], -1)
    q, k, v = (part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True))
    positions = module.positions_of(x) if module.supports.positions else None
    return attention.base.Heads(q, k, v, positions, module.read_input(x))


@pytest.mark.parametrize("name", RECURRENT)
def test_prefill_and_steps_continue_the_sequence(name):
    module, x = mechanism(name), torch.randn(2, 9, 8, dtype=torch.double)
    expected = module(x)
    with torch.no_grad():
        y, state = module.prefill(x[:, :4], module.init_state(2))
        kept, outs = states.map_tensors(torch.clone, state), [y]
        after = state
        for x_t in x[:, 4:].unbind(1):
            y_t, after = module.step(x_t, after)
            outs.append(y_t.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    assert all(
        torch.equal(a, b)
        for a, b in zip(states.leaves(kept).values(), states.leaves(state).values(), strict=True)
    )


def test_a_new_convolution_changes_nothing():
    torch.manual_seed(0)
    module = attention.load("linear")(8, 2, causal=True, conv=4)
    plain = attention.load("linear")(8, 2, causal=True)
    plain.load_state_dict(module.state_dict(), strict=False)
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "delta_net"])
@in_two_parts
def test_the_contract_holds(name, check_part):
    check_part(Maker(attention.load(name), {"conv": 4}))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "linear",
            {"conv": 4},
            UnsupportedError,
            "conv is 4, but linear attention has a convolution only where",
        ),
        ("linformer", {"conv": 4}, UnsupportedError, "conv is 4, but linformer attention has a convolution"),
        ("linear", {"conv": 1, "causal": True}, ValueError, "conv is 1, but must be at least 2, or None"),
        ("linear", {"conv": 2.5, "causal": True}, ValueError, "conv is 2.5, but must be an integer"),
    ],
)
def test_wrong_options_are_named(name, options, error, message):
    with pytest.raises(error, match=message):
        attention.load(name)(8, 2, **options)


def test_masks_that_a_neighbour_would_get_around_are_refused():
    module = attention.load("softmax")(8, 2, causal=True, conv=4)
    x = torch.randn(1, 5, 8)
    with pytest.raises(UnsupportedError, match="does not support attn_mask"):
        module(x, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="does not support cross-attention"):
        module(x, x)


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_half_precision_reads_the_filtered_heads(name):
    """Reformer projects its queries again, in fp32, to choose their buckets.

    Rounding may change which keys Reformer and top-k read for a few queries, hence the median.
    """
    module, x = mechanism(name), torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    exact = module(x.double())
    for found in (module.bfloat16()(x.bfloat16()), module.float()(x)):
        assert (found - exact).abs().median() < 0.03 * exact.abs().max()
