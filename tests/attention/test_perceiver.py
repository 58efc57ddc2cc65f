"""Perceiver attention: the definition, its low rank, and the read that is softmax attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.attention.perceiver import (
    PerceiverAttention,
    latent_read,
    perceiver_attention,
    perceiver_attention_reference,
)
from unrolled.contract import UnsupportedError
from unrolled.ops.softmax import softmax_attention
from unrolled.testing import check_mechanism


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(T=5, S=7, N=3, H=4, G=2, D=3, M=2, B=2) -> list[torch.Tensor]:
    shapes = [(B, T, H, D), (B, S, G, D), (B, S, G, M), (N, H, D), (H * D, H * M)]
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def by_hand(q, k, v, latents, weight, padding=None):
    """The three equations for one row, one head and one vector at a time."""
    (B, T, H, D), group = q.shape, q.shape[2] // k.shape[2]
    rows = []
    for b in range(B):
        kept = [j for j in range(k.shape[1]) if padding is None or not padding[b, j]]
        ell = latents if latents.dim() == 3 else latents[b]
        z = torch.stack(
            [
                torch.stack(
                    [
                        torch.softmax(
                            torch.stack([ell[n, h] @ k[b, j, h // group] / D**0.5 for j in kept]), 0
                        )
                        @ torch.stack([v[b, j, h // group] for j in kept])
                        for h in range(H)
                    ]
                )
                for n in range(ell.shape[0])
            ]
        )
        memory = torch.stack([ell[n] + (weight @ z[n].flatten()).view(H, D) for n in range(ell.shape[0])])
        rows.append(
            torch.stack(
                [
                    torch.stack(
                        [torch.softmax(memory[:, h] @ q[b, t, h] / D**0.5, 0) @ z[:, h] for h in range(H)]
                    )
                    for t in range(T)
                ]
            )
        )
    return torch.stack(rows)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("form", [perceiver_attention, perceiver_attention_reference])
def test_the_definition_with_padding_and_gradients(form, given):
    arguments = inputs()
    if given:
        arguments[3] = normal(2, 3, 4, 3, seed=9).requires_grad_()
    padding = torch.tensor([[0, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1]], dtype=torch.bool)
    found, wanted = form(*arguments, key_padding_mask=padding), by_hand(*arguments, padding)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    weights = normal(*wanted.shape, seed=8)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), arguments),
        torch.autograd.grad((wanted * weights).sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@settings(deadline=None, max_examples=25)
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


def test_latents_are_all_that_grows_with_their_number():
    def count(n: int) -> int:
        return sum(p.numel() for p in PerceiverAttention(16, 4, n_latents=n).parameters())

    assert count(9) - count(5) == 4 * 16


@pytest.mark.parametrize("n_latents", [2, 200])
def test_it_keeps_the_contract_with_few_and_many_latents(n_latents):
    check_mechanism(PerceiverAttention, n_latents=n_latents)


def test_one_latent_gives_every_query_what_it_has_read():
    q, k, v, latents, weight = inputs(N=1)
    o, z = perceiver_attention(q, k, v, latents, weight), latent_read(latents, k, v)
    torch.testing.assert_close(o, z.expand_as(o))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PerceiverAttention(16, 4, causal=True), UnsupportedError, "PerceiverAR, or linear attention"),
        (lambda: PerceiverAttention(16, 4, rotary=True), UnsupportedError, "use other positions"),
        (lambda: PerceiverAttention(16, 4, n_latents=0), ValueError, "n_latents is 0, but must be at least 1"),
        (lambda: perceiver_attention(*inputs()[:3], normal(3, 4, 2), normal(12, 8)), ValueError, r"latents has shape \[3, 4, 2\], but must be \[N, 4, 3\]"),
        (lambda: perceiver_attention(*inputs()[:4], normal(8, 12)), ValueError, r"weight has shape \[8, 12\], but must be \[H D, H M\] = \[12, 8\]"),
        (lambda: perceiver_attention(*inputs()[:3], normal(3, 3, 4, 3), normal(12, 8)), ValueError, r"latents has shape \[3, 3, 4, 3\]"),
        (
            lambda: PerceiverAttention(16, 4)(torch.zeros(1, 3, 16), key_padding_mask=torch.zeros(1, 3).bool(), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
            ValueError,
            "key_padding_mask was given with cu_seqlens",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_sentence(make, error, message):
    with pytest.raises(error, match=message):
        make()
