"""Rounding by a sample: what is left makes up for what was rounded, and outputs change less."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MODELS, V, decoder
from torch import nn
from torch.nn.functional import pad

from unrolled.decode import plan
from unrolled.decode.calibration import DAMPING, compensated, second_moments
from unrolled.decode.packing import GROUP, fitted, rounded
from unrolled.ops import native


def correlated(rows, inputs):
    """Inputs that have a few directions in common, and a mean."""
    return torch.randn(rows, 5) @ torch.randn(5, inputs) + 0.3 * torch.randn(rows, inputs) + 0.5


def one_by_one(w, H):
    """Round input by input; by a linear system, the rest minimises (w - w')^T H (w - w') each time."""
    w, scales, done = w.double(), [], []
    H = H + DAMPING * H.diagonal().mean() * torch.eye(len(H))
    for j in range(w.shape[1]):
        left = w[:, j:].clone()
        if j:
            error = w[:, :j] - torch.stack(done, 1)
            left += torch.linalg.solve(H[j:, j:], H[j:, :j] @ error.T).T
        if j % GROUP == 0:
            scales.append(fitted(left[:, :GROUP].float())[1][:, 0])
        scale = scales[-1].double()
        done.append((left[:, 0] / scale).round().clamp(-8, 7) * scale)
    return torch.stack(done, 1)


@settings(max_examples=15)
@given(groups=st.integers(1, 3), seed=st.integers(0, 999))
def test_the_rest_makes_up_for_what_was_rounded(groups, seed):
    torch.manual_seed(seed)
    w, x = torch.randn(6, GROUP * groups), correlated(300, GROUP * groups).double()
    H = x.T @ x / len(x)
    whole, scale = compensated(w, H)
    found, expected = (whole * scale).flatten(1), one_by_one(w, H)
    # A weight on the border of two steps may go either way, and those after it follow.
    same = (found - expected).abs().amax(1) <= 1e-5
    assert same.sum() >= 5
    assert whole.min() >= -8
    assert whole.max() <= 7


@settings(max_examples=15)
@given(inputs=st.integers(1, 100), seed=st.integers(0, 999))
def test_outputs_change_less(inputs, seed):
    """Over ten samples: of a single sample with three to five inputs, one in 300 loses more than 5 percent."""
    torch.manual_seed(seed)
    before = after = 0.0
    for _ in range(10):
        w, x = torch.randn(200, inputs), correlated(500, inputs)
        H = (x.T @ x).double() / len(x)
        whole, scale = compensated(pad(w, (0, -inputs % GROUP)), H)
        found = (whole * scale).flatten(1)[:, :inputs]
        plain, made_up = (((y - w).double() @ H * (y - w)).sum() for y in (rounded(w, "int4"), found))
        before, after = before + float(plain), after + float(made_up)
    assert after <= before * (0.5 if inputs >= 20 else 1.05)


def test_inputs_that_are_always_0_do_no_harm():
    w, H = torch.randn(3, GROUP), torch.zeros(GROUP, GROUP, dtype=torch.double)
    whole, scale = compensated(w, H)
    assert torch.equal((whole * scale).flatten(1), rounded(w, "int4"))


def test_moments_are_those_of_the_inputs():
    model = decoder().train()
    tokens = torch.randint(V, (2, 9))
    found = second_moments(model, tokens)
    assert model.training
    layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert found.keys() == layers
    x = model.eval().embedding(tokens).flatten(0, 1).detach()
    x = model.stack.layers[0].attention_norm(x).double().detach()
    torch.testing.assert_close(found["stack.blocks.0.attention.qkv_proj"], x.T @ x / 18, rtol=1e-5, atol=1e-6)
    assert not any(layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.skipif(not native.available(), reason=str(native.missing()))
@torch.no_grad()
def test_a_plan_by_a_sample_is_closer_to_its_model():
    model = decoder(**MODELS["hybrid"], d_model=64)
    tokens = torch.randint(V, (40, 60), generator=torch.Generator().manual_seed(0))
    exact = model(tokens)
    errors = []
    for sample in (None, tokens):
        p = plan(model, "int4", sample=sample)
        found, _ = p.prefill(tokens, p.init_state(40))
        errors.append((found - exact).square().mean())
    assert errors[1] < 0.8 * errors[0]
    with pytest.raises(ValueError, match="sample is given, but must be None for weights = 'int8'"):
        plan(model, "int8", sample=tokens)
    with pytest.raises(ValueError, match="ids from 99 to 99"):
        plan(model, "int4", sample=torch.full((1, 2), 99))
    with pytest.raises(ValueError, match="sample is a list, but must be a tensor"):
        plan(model, "int4", sample=[[1, 2]])
    with pytest.raises(ValueError, match="sample holds ids from 99 to 99, but they must be in"):
        plan(model, "int4", sample=torch.full((1, 2), 99))
    with pytest.raises(ValueError, match=r"sample has shape \[1, 0\], but must have at least one token"):
        plan(model, "int4", sample=torch.empty(1, 0, dtype=torch.long))


def test_moments_are_those_without_dropout():
    model, tokens = decoder(dropout=0.5), torch.randint(V, (2, 9))
    expected = second_moments(model, tokens)
    found = second_moments(model.train(), tokens)
    assert all(torch.equal(found[name], H) for name, H in expected.items())


@torch.no_grad()
def test_inputs_that_are_not_finite_are_named():
    model = decoder()
    model.embedding.weight[3] = torch.nan
    with pytest.raises(
        ValueError, match=r"the inputs of stack\.blocks\.0\..* on the sample are not all finite"
    ):
        plan(model, "int4", sample=torch.full((2, 9), 3))
