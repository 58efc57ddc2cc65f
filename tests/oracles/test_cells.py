"""Recurrent cells against Keras, whose GRU has the published form that torch's has not; in fp64.

What Keras hands to torch's kernels is exact. What it computes itself, as this form of the GRU, goes through its
`ops.matmul`, which rounds fp64 to fp32; so that is compared a second time with torch's product in its place.
"""

import importlib
import os

import pytest
import torch
from agreement import assert_agree, gradients

from unrolled.recurrent.gru import GRU
from unrolled.recurrent.gru_reset_before import GRUResetBefore
from unrolled.recurrent.lstm import LSTM

pytestmark = pytest.mark.oracles
N, P = 6, 4


@pytest.fixture(scope="module")
def keras():
    os.environ["KERAS_BACKEND"] = "torch"
    library = pytest.importorskip("keras")
    assert library.backend.backend() == "torch"
    return library


def in_keras(layer, x, *weights):
    """Build a layer and give it these weights."""
    layer.build(x.shape)
    for variable, weight in zip(layer.weights, weights, strict=True):
        variable.assign(weight.detach().numpy())
    return layer


def rows(weight, order, signs=(1, 1, 1, 1)):
    """Take the blocks of a weight's rows in another order, some of them negated."""
    parts = weight.detach().chunk(len(order))
    return torch.cat([sign * parts[i] for i, sign in zip(order, signs, strict=False)])


def compare(keras, ours, theirs, x, name, tolerance=1e-12):
    y, expected, library = ours(x), theirs(x), f"keras {keras.__version__}"
    assert_agree(y, expected, name, tolerance=tolerance, library=library)
    found, expected = (gradients(z, (x,))[0] for z in (y, expected))
    assert_agree(found, expected, f"{name}: gradient of x", tolerance=tolerance, library=library)


def inputs():
    x = torch.randn(3, 11, P, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.requires_grad_()


def test_keras_multiplies_in_fp32(keras):
    """The smallest example of why the tolerance of `test_gru_reset_before` is what it is."""
    third = torch.full((1, 1), 1 / 3, dtype=torch.float64)
    found = keras.ops.matmul(third, keras.Variable(third.numpy(), dtype="float64"))
    assert 1e-10 < (found - third * third).abs() < 1e-7


@pytest.mark.parametrize("exact", [False, True], ids=["as it is", "exact products"])
def test_gru_reset_before(keras, exact, monkeypatch):
    """Keras' order of gates is z, r, n, and its z keeps the old state."""
    ours, x = GRUResetBefore(P, N).double(), inputs()
    order, signs = (1, 0, 2), (-1, 1, 1)
    W, U, b = (rows(w, order, signs) for w in (ours.input_proj.weight, ours.recurrent, ours.input_proj.bias))
    layer = keras.layers.GRU(N, return_sequences=True, reset_after=False, dtype="float64")
    theirs = in_keras(layer, x, W.T, U.T, b)
    if not exact:
        compare(keras, ours, theirs, x, "GRU, reset before (fp32 products)", tolerance=1e-6)
        return
    its_ops = importlib.import_module("keras.src.ops")
    monkeypatch.setattr(its_ops, "matmul", lambda a, b: torch.matmul(a, getattr(b, "value", b)))
    compare(keras, ours, theirs, x, "GRU, reset before (fp64 products)")


def test_gru(keras):
    ours, x = GRU(P, N).double(), inputs()
    order = (1, 0, 2)
    W, U, b = (rows(w, order) for w in (ours.input_proj.weight, ours.recurrent, ours.input_proj.bias))
    c = torch.nn.functional.pad(ours.recurrent_bias, (2 * N, 0))
    layer = keras.layers.GRU(N, return_sequences=True, reset_after=True, dtype="float64")
    compare(keras, ours, in_keras(layer, x, W.T, U.T, torch.stack([b, c])), x, "GRU, reset after")


def test_the_two_grus_are_two_functions(keras):
    """The same weights in the other convention give something else."""
    ours, x = GRUResetBefore(P, N).double(), inputs()
    order, signs = (1, 0, 2), (-1, 1, 1)
    W, U, b = (rows(w, order, signs) for w in (ours.input_proj.weight, ours.recurrent, ours.input_proj.bias))
    layer = keras.layers.GRU(N, return_sequences=True, reset_after=True, dtype="float64")
    expected = in_keras(layer, x, W.T, U.T, torch.stack([b, 0 * b]))(x)
    assert (ours(x) - expected).abs().max() > 1e-3


def test_lstm(keras):
    ours, x = LSTM(P, N).double(), inputs()
    W, U, b = ours.input_proj.weight, ours.recurrent, ours.input_proj.bias  # i, f, g, o in both
    layer = keras.layers.LSTM(N, return_sequences=True, dtype="float64")
    compare(keras, ours, in_keras(layer, x, W.T, U.T, b), x, "LSTM")
