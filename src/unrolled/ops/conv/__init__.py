r"""Short causal convolution: every channel is filtered over the last W tokens with taps of its own.

    y_tc = f(b_c + sum_{l < W} w_cl x_t+l-W+1,c)

f is the identity or silu, and the bias b may be absent. The last tap is that of the current token, as in
`torch.nn.functional.conv1d`. The state holds the last W - 1 inputs. The inputs before the first token are
those of the given state, zeros by default.

With W = 4 on queries, keys and values: Yang et al. 2024 (arXiv 2406.06484), section 3.3; Dao and Gu 2024
(arXiv 2405.21060), section 7. A recurrence alone is poor at comparing a token with its
neighbours (Fu et al. 2022, arXiv 2212.14052, section 3).

Time O(T C W), memory O(T C), state O(C W).
"""

from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from unrolled.ops.checks import check_device, check_padding_or_pack, check_state_tensor, check_tensor, shape
from unrolled.ops.conv import operator, plain
from unrolled.ops.packing import spans, valid_tokens_first
from unrolled.ops.precision import accumulation_dtype


class Options(TypedDict, total=False):
    """The keyword arguments of `causal_conv`."""

    bias: Tensor | None
    activation: Literal["silu"] | None
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: Tensor | None


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Filter whole sequences (equation above).

    Args:
        x: `[B,T,C]`.
        weight: taps `[C,W]`, the last one for the current token.
        bias: `[C]`, or None.
        activation: f, `"silu"` or None for the identity.
        key_padding_mask: `[B,T]`, True = padding: a padded token is left out, so the tokens on both sides of
            it become neighbours. Its output is 0.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).
        state: inputs before the first token `[B,W-1,C]`, the latest last; N rows with `cu_seqlens`; zeros by
            default.

    Returns:
        `y [B,T,C]` in the dtype of `x`, and the state after the last token, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    state = _check(x, weight, bias, activation, key_padding_mask, cu_seqlens, state)
    silu = activation == "silu"
    if key_padding_mask is None:
        return operator.causal_conv(x, weight, bias, state, cu_seqlens, silu)
    (x,), padding, restore = valid_tokens_first(key_padding_mask, x)
    y, _ = operator.causal_conv(x, weight, bias, state, None, silu)
    past = torch.cat([state, x.to(state.dtype)], dim=1)
    last = (~padding).sum(1, keepdim=True) + torch.arange(state.shape[1], device=x.device)
    after = past.gather(1, last.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return restore(y.masked_fill(padding.unsqueeze(-1), 0)), after


def causal_conv_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Filter one token.

    Args:
        x: `[B,C]`.
        weight, bias, activation: as in `causal_conv`.
        state: `[B,W-1,C]`; it is not modified.

    Returns:
        `y [B,C]` in the dtype of `x`, and the new state.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    _check(x.unsqueeze(1), weight, bias, activation, None, None, state)
    y, after = plain.forward(x.unsqueeze(1), weight, bias, state, silu=activation == "silu")
    return y.squeeze(1), after


def causal_conv_reference(x: Tensor, weight: Tensor, **options: Unpack[Options]) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv` by its definition, token by token, with the same arguments."""
    key_padding_mask, cu_seqlens = options.get("key_padding_mask"), options.get("cu_seqlens")
    bias, activation = options.get("bias"), options.get("activation")
    state = _check(x, weight, bias, activation, key_padding_mask, cu_seqlens, options.get("state"))
    y, states = torch.zeros_like(x), []
    for n, (b, start, end) in enumerate(spans(cu_seqlens, *x.shape[:2])):
        past = state[n : n + 1]
        for t in range(start, end):
            if key_padding_mask is None or not key_padding_mask[b, t]:
                token = x[b : b + 1, t : t + 1]
                y[b, t], past = plain.forward(token, weight, bias, past, silu=activation == "silu")
        states.append(past)
    return y, torch.cat([state[:0], *states])


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> Tensor:
    """Check every argument; return the state, zeros by default."""
    for name, y, n_axes, axes in (("x", x, 3, "[B, T, C]"), ("weight", weight, 2, "[C, W]")):
        check_tensor(name, y)
        if y.dim() != n_axes or not y.is_floating_point():
            raise ValueError(f"{name} is {y.dtype} of shape {shape(y)}, but must be floating point {axes}")
    (B, _, C), W = x.shape, weight.shape[1]
    if weight.shape[0] != C or W < 1:
        raise ValueError(f"weight has shape {shape(weight)}, but must be [{C}, W] for x {shape(x)}")
    check_device("weight", weight, x, "x is")
    if bias is not None:
        check_tensor("bias", bias)
        if bias.shape != (C,) or not bias.is_floating_point():
            raise ValueError(f"bias is {bias.dtype} of shape {shape(bias)}, but must be floating point [{C}]")
        check_device("bias", bias, x, "x is")
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}, but must be 'silu' or None")
    check_padding_or_pack(key_padding_mask, cu_seqlens, x)
    sizes = (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, W - 1, C)
    dtype = accumulation_dtype(x.dtype, weight.dtype)
    if state is None:
        return x.new_zeros(sizes, dtype=dtype)
    check_state_tensor("state", state, sizes, dtype, x)
    return state
