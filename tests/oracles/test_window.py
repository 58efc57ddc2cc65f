"""Agreement of window attention with local-attention, whose `exact_windowsize` is a sliding window.

Opt-in: `make test-oracles` installs it.
"""

import pytest
import torch
from agreement import assert_agree
from oracles.comparing import assert_all_agree

from unrolled.ops.window.dilated import dilated_window_attention

LOCAL_ATTENTION = "local-attention 1.11.2"


def inputs(length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, 3, 4, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("w", [1, 4, 8])
def test_local_attention_of_an_exact_window(causal, w):
    library = pytest.importorskip("local_attention")
    theirs = library.LocalAttention(w, causal=causal, exact_windowsize=True, use_rotary_pos_emb=False)
    xs = inputs(24)
    expected = theirs(*(x.transpose(1, 2) for x in xs)).transpose(1, 2)
    found, _ = dilated_window_attention(*xs, window_size=(w, 0 if causal else w), dilation=[1, 1, 1])
    what = f"window of {w} keys {'before' if causal else 'on each side'}"
    assert_all_agree(found, expected, xs, what, tolerance=1e-10, library=LOCAL_ATTENTION)


def test_their_own_padding_is_read_unless_a_mask_says_otherwise():
    library = pytest.importorskip("local_attention")
    theirs = library.LocalAttention(
        4, causal=False, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
    )
    xs = inputs(21)
    q, k, v = (x.transpose(1, 2) for x in xs)
    expected = theirs(q, k, v, mask=torch.ones(2, 21, dtype=torch.bool)).transpose(1, 2)
    found, _ = dilated_window_attention(*xs, window_size=(4, 4), dilation=[1, 1, 1])
    assert_agree(found, expected, "21 tokens", tolerance=1e-10, library=LOCAL_ATTENTION)
    unmasked = theirs(q, k, v).transpose(1, 2)
    assert (unmasked - expected)[:, -4:].abs().max() > 1e-3
    assert_agree(unmasked[:, :17], expected[:, :17], "tokens that the end is too far from", tolerance=1e-10)


def test_their_default_window_reaches_less_far_from_the_end_of_a_block():
    """Without `exact_windowsize`, how far back a token reads depends on where in its block it is."""
    library = pytest.importorskip("local_attention")
    theirs = library.LocalAttention(4, causal=True, use_rotary_pos_emb=False)
    q, k, v = (x.transpose(1, 2) for x in inputs(12))
    reach = []
    for i in range(8, 12):
        (gradient,) = torch.autograd.grad(theirs(q, k, v)[:, :, i].sum(), v)
        reach.append(i - int(gradient.abs().sum((0, 1, 3)).nonzero().min()))
    assert reach == [4, 5, 6, 7]
