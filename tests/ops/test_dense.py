"""Linear layers of a few rows: the kernel on every instruction set, and when torch computes them instead."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from unrolled.ops import native
from unrolled.ops.dense import Linear, linear
from unrolled.ops.dense import native as dense_native
from unrolled.ops.dispatch import prefer

pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_kernels = pytest.mark.skipif(not native.available(), reason=str(native.missing()))
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture
def runs(monkeypatch):
    """Count the layers that the kernel computed."""
    found, kernel = [], dense_native.linear

    def count(*tensors):
        found.append(kernel(*tensors))
        return found[-1]

    monkeypatch.setattr(dense_native, "linear", count)
    return found


@needs_kernels
@pytest.mark.parametrize("instruction_set", native.instruction_sets())
@settings(max_examples=40)
@given(
    rows=st.integers(1, 33),
    inputs=st.sampled_from([1, 3, 16, 33, 64, 200]),
    outputs=st.sampled_from([1, 5, 6, 16, 31, 48]),
    dtype=st.sampled_from(list(ROUNDING)),
    biased=st.booleans(),
)
def test_it_is_as_exact_as_its_sums_can_be(instruction_set, rows, inputs, outputs, dtype, biased):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    with native.use(instruction_set):
        found = dense_native.linear(x, weight, bias)
    expected = x.double() @ weight.double().mT + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().mT + (0 if bias is None else bias.double().abs())
    # The bound of a sum in any order (Higham 2002, eq. 3.5), and the rounding of the result.
    bound = (inputs + 2) * ROUNDING[torch.float32] * size + ROUNDING[dtype] * expected.abs()
    if dtype == torch.float16:
        bound += 2.0**-25  # half of the smallest number
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= bound * (1 + 1e-3)).all()


@needs_kernels
def test_two_threads_give_the_same(runs):
    x, layer = torch.randn(3, 512), Linear(512, 512)
    before = torch.get_num_threads()
    with torch.no_grad():
        one = layer(x)
        torch.set_num_threads(2)
        two = layer(x)
    torch.set_num_threads(before)
    assert len(runs) == 2
    assert torch.equal(one, two)


@needs_kernels
def test_it_takes_any_strides_and_leading_axes_of_the_input(runs):
    layer, x = Linear(8, 6), torch.randn(8, 2, 3).permute(2, 1, 0)
    with torch.no_grad():
        found = layer(x)
    assert len(runs) == 1
    torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias))


def in_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def without_kernels(layer, x):
    with prefer("plain"):
        return layer(x)


OTHERWISE = {
    "with gradients": lambda layer, x: layer(x),
    "in autocast": in_autocast,
    "in vmap": lambda layer, x: torch.vmap(layer)(x),
    "traced": lambda layer, x: torch.jit.trace(layer, x, check_trace=False)(x),
    "many rows": lambda layer, x: layer(x.repeat(20, 1))[: len(x)],
    "strided weights": lambda layer, x: linear(x, layer.weight.mT.contiguous().mT, layer.bias),
    "in double": lambda layer, x: layer.double()(x.double()).float(),
    "without kernels": without_kernels,
}


@pytest.mark.parametrize("way", OTHERWISE)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_torch_computes_what_the_kernel_may_not(way, runs):
    layer, x = Linear(8, 6), torch.randn(5, 8)
    with torch.set_grad_enabled(way == "with gradients"):
        found = OTHERWISE[way](layer, x)
    assert not runs
    expected = F.linear(x, layer.weight.float(), layer.bias.float())
    torch.testing.assert_close(
        found.float(), expected, rtol=0.02, atol=0.02 if way == "in autocast" else 1e-6
    )


def test_wrong_shapes_are_torchs_error():
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(8, 6)(torch.randn(5, 7))


def test_nothing_in_gives_nothing():
    with torch.no_grad():
        assert Linear(8, 6)(torch.randn(0, 8)).shape == (0, 6)
