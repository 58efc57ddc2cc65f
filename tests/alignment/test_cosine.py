"""Content addressing against its equations, and the function that the Neural Turing Machine reads by."""

import pytest
import torch
from agreement import normal
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention, softplus

from unrolled.alignment.cosine import CosineAttention
from unrolled.ops.cosine import cosine_weights, unit


@pytest.mark.parametrize("keys", [(), (3,), (3, 2)])
def test_weights_are_the_softmax_of_cosines(keys):
    key, memory, beta = normal(2, *keys, 5), normal(2, 7, 5, seed=1), normal(2, *keys, seed=2).exp()
    rows = memory.reshape(2, *[1] * len(keys), 7, 5)
    expected = (beta.unsqueeze(-1) * cosine_similarity(key.unsqueeze(-2), rows, dim=-1)).softmax(-1)
    torch.testing.assert_close(
        cosine_weights(key, memory, beta, epsilon=0.0), expected, rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(cosine_weights(key, memory, beta), expected, rtol=0, atol=1e-7)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, :3] = True
    found = cosine_weights(key, memory, beta, key_padding_mask=mask)
    torch.testing.assert_close(found[:1, ..., 3:], cosine_weights(key[:1], memory[:1, 3:], beta[:1]))
    assert not found[:1, ..., :3].any()
    assert cosine_weights(key[:0], memory[:0], beta[:0]).shape == (0, *keys, 7)


def test_zeros_have_a_cosine_of_0_and_finite_gradients():
    key, memory = torch.zeros(1, 5, requires_grad=True), torch.zeros(1, 4, 5, requires_grad=True)
    weights = cosine_weights(key, memory, torch.full((1,), 50.0))
    torch.testing.assert_close(weights, torch.full((1, 4), 0.25))
    gradients = torch.autograd.grad(weights[0, 0], [key, memory])
    assert all(g.isfinite().all() for g in gradients)


def test_the_module_makes_keys_and_strengths_of_queries():
    torch.manual_seed(0)
    module = CosineAttention(4, 5).double()
    query, memory = normal(2, 3, 4), normal(2, 7, 5, seed=1)
    context, weights, _ = module.recall(query, module.read(memory))
    expected = cosine_weights(
        module.key_proj(query), memory, softplus(module.strength_proj(query)).squeeze(-1)
    )
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(context, expected @ memory, rtol=1e-12, atol=1e-13)


def test_with_unit_vectors_it_is_softmax_attention_of_scale_beta():
    key, memory = unit(normal(2, 3, 5), 0.0), unit(normal(2, 7, 5, seed=1), 0.0)
    weights = cosine_weights(key, memory, torch.full((2, 3), 2.5, dtype=torch.float64), epsilon=0.0)
    expected = scaled_dot_product_attention(key, memory, memory, scale=2.5)
    torch.testing.assert_close(weights @ memory, expected, rtol=1e-12, atol=1e-13)


def test_half_precision_is_that_of_its_inputs_only():
    """The squares of 300 are beyond fp16, and the small number in each norm is below it."""
    key, memory = torch.full((1, 4), 300.0), torch.tensor([[[300.0] * 4, [300.0, 0, 0, 0], [0.0] * 4]])
    expected = cosine_weights(key, memory, torch.full((1,), 5.0))
    found = cosine_weights(key.half(), memory.half(), torch.full((1,), 5.0).half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)
    nothing = cosine_weights(torch.zeros(1, 4).half(), memory.half(), torch.ones(1).half())
    torch.testing.assert_close(nothing, torch.full((1, 3), 1 / 3).half())


def test_autocast_rounds_no_cosine():
    key, memory, beta = normal(2, 3, 8).float(), normal(2, 9, 8, seed=1).float(), torch.full((2, 3), 20.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = cosine_weights(key, memory, beta)
    assert torch.equal(found, cosine_weights(key, memory, beta))
