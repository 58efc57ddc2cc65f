"""Perceiver attention: the definition, its low rank, and the read that is softmax attention."""

import pytest
import torch
from agreement import assert_same, normal
from contract_parts import in_two_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled import attention
from unrolled.attention.perceiver import (
    PerceiverAttention,
    latent_read,
    perceiver_attention,
    perceiver_attention_reference,
)
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import Maker


def inputs(T=5, S=7, N=3, H=4, G=2, D=3, M=2, B=2) -> list[torch.Tensor]:
    shapes = [(B, T, H, D), (B, S, G, D), (B, S, G, M), (N, H, D), (H * D, H * M)]
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def by_hand(q, k, v, latents, weight, padding):
    """The three equations, one row and one head at a time."""
    (B, _, H, D), group = q.shape, q.shape[2] // k.shape[2]

    def softmax(q, k, v):
        return (q @ k.mT / D**0.5).softmax(-1) @ v

    rows = []
    for b in range(B):
        kept, ell = ~padding[b], latents if latents.dim() == 3 else latents[b]
        read = [softmax(ell[:, h], k[b, kept, h // group], v[b, kept, h // group]) for h in range(H)]
        z = torch.stack(read, 1)
        memory = torch.stack([x + (weight @ y.flatten()).view(H, D) for x, y in zip(ell, z, strict=True)])
        rows.append(torch.stack([softmax(q[b, :, h], memory[:, h], z[:, h]) for h in range(H)], 1))
    return torch.stack(rows)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("form", [perceiver_attention, perceiver_attention_reference])
def test_the_definition_with_padding_and_gradients(form, given):
    arguments = inputs()
    if given:
        arguments[3] = normal(2, 3, 4, 3, seed=9).requires_grad_()
    padding = torch.tensor([[0, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1]], dtype=torch.bool)
    found, expected = form(*arguments, key_padding_mask=padding), by_hand(*arguments, padding)
    assert_same(found, expected, arguments, atol=1e-12, rtol=1e-12)


@settings(max_examples=25)
@given(*[st.integers(1, 70)] * 2, st.integers(1, 9), st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]))
def test_any_lengths_agree_with_the_reference(T, S, N, heads):
    arguments = inputs(T, S, N, *heads)
    torch.testing.assert_close(
        perceiver_attention(*arguments), perceiver_attention_reference(*arguments), atol=1e-12, rtol=1e-12
    )


def test_latents_that_are_the_queries_read_as_softmax_attention_does():
    q, k, v, *_ = inputs()
    padding = torch.tensor([[0, 1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    found = latent_read(q, k, v, key_padding_mask=padding)
    assert torch.equal(found, softmax_attention(q, k, v, key_padding_mask=padding))


def test_the_matrix_of_attention_has_the_rank_of_the_latents_and_rows_that_sum_to_one():
    q, k, _, latents, _ = inputs(T=20, S=20, N=3, H=1, G=1, D=3)
    columns = torch.eye(20, dtype=torch.float64).expand(2, 20, 20).unsqueeze(2)
    matrix = perceiver_attention(q, k, columns, latents, normal(3, 20, seed=5))[:, :, 0]
    assert torch.linalg.matrix_rank(matrix).tolist() == [3, 3]
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 20, dtype=torch.float64))


def test_the_order_of_the_inputs_changes_nothing_but_the_order_of_the_outputs():
    module = PerceiverAttention(16, 4, n_latents=5).double()
    x, order = normal(2, 9, 16), torch.randperm(9)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(module(x[:, :4], x[:, order]), module(x[:, :4], x), atol=1e-13, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("n_latents", [2, 200])
@in_two_parts
def test_it_keeps_the_contract_with_few_and_many_latents(n_latents, check_part):
    check_part(Maker(PerceiverAttention, {"n_latents": n_latents}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerceiverAttention(16, 4, n_latents=0), "n_latents is 0, but must be at least 1"),
        (lambda: perceiver_attention(*inputs()[:3], normal(3, 4, 2), normal(12, 8)), r"latents has shape \[3, 4, 2\], but must be \[N, 4, 3\]"),
        (lambda: perceiver_attention(*inputs()[:4], normal(8, 12)), r"weight has shape \[8, 12\], but must be \[H D, H M\] = \[12, 8\]"),
        (lambda: perceiver_attention(*inputs()[:3], normal(3, 3, 4, 3), normal(12, 8)), r"latents has shape \[3, 3, 4, 3\]"),
        (
            lambda: PerceiverAttention(16, 4)(torch.zeros(1, 3, 16), key_padding_mask=torch.zeros(1, 3).bool(), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
            "key_padding_mask was given with cu_seqlens",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_latents_start_as_large_as_queries():
    torch.manual_seed(0)
    assert attention.load("perceiver")(64, 4).latents.std().item() == pytest.approx(1, rel=0.05)
