"""RWKV-4 of transformers, whose state is not a cache, with the kernels of this library and without."""

import pytest
import torch
import transformers
from transformers.models.rwkv import modeling_rwkv

from unrolled.interop import hf
from unrolled.interop.hf.accelerate.wkv import rwkv_linear_attention


def make():
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, eos_token_id=None)
    model = transformers.RwkvForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens():
    # One row, since a step of several rows mixes them in transformers.
    return torch.randint(0, 64, (1, 21), generator=torch.Generator().manual_seed(1))


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def gradients(model):
    model.train()
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_those_of_transformers(dtype):
    model = make().to(dtype)
    before, slopes = model(tokens()).logits.detach(), gradients(model)
    generated = model.generate(tokens(), max_new_tokens=8, do_sample=False)
    report = hf.accelerate(model)
    assert {str(layer.replaced) for layer in report.layers} == {"{'rwkv_linear_attention': 'wkv'}"}
    assert len(report.layers) == 3
    accelerated = model(tokens()).logits.detach()
    assert not torch.equal(accelerated, before)  # other code ran
    assert_close(accelerated, before)
    assert_close(gradients(model), slopes)
    assert torch.equal(model.generate(tokens(), max_new_tokens=8, do_sample=False), generated)
    hf.restore(model)
    assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize("switches", [(1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1)])
@torch.no_grad()
def test_a_state_goes_on_with_and_without(switches):
    model, state, found = make(), None, []
    expected = model(tokens()).logits
    for part, ours in zip(tokens().split((14, 1, 5, 1), dim=1), switches, strict=True):
        (hf.accelerate if ours else hf.restore)(model)
        output = model(part, use_cache=True, state=state)
        state = output.state
        found.append(output.logits)
    assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [True, False])
def test_narrow_types_are_as_close_as_those_of_transformers(dtype, given):
    generator = torch.Generator().manual_seed(0)
    pace, bonus, *state = (torch.randn(n, 6, generator=generator) for n in (1, 1, 2, 2, 2))
    key, value = (torch.randn(2, 30, 6, generator=generator).to(dtype) for _ in range(2))
    inputs = (pace[0], bonus[0], key, value, tuple(x.exp() for x in state) if given else None, True)
    exact, _ = modeling_rwkv.rwkv_linear_attention(*inputs[:2], key.double(), value.double(), *inputs[4:])
    (found, ours), (expected, theirs) = (
        f(*inputs) for f in (rwkv_linear_attention, modeling_rwkv.rwkv_linear_attention)
    )
    assert found.dtype == expected.dtype
    assert (found - exact).abs().max() <= 1.5 * (expected - exact).abs().max()
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == reference.dtype
    torch.testing.assert_close(ours[0] * ours[2].exp(), theirs[0] * theirs[2].exp(), atol=1e-4, rtol=1e-4)
