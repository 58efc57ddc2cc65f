r"""The selective scan of Mamba: every channel has N states, each with a decay that depends on the token.

    h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t        y_t = sum_n c_tn h_tn

The state h has C channels and N numbers for each. A token's x and its step size dt are numbers of each
channel, b writes to the states and c reads from them, and a holds the rates of decay.

Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752),
eq. 2 and algorithm 2. As in their code, dt multiplies b; eq. 4 has (exp(dt a) - 1) / a in place of dt.

Time O(T C N), state O(C N). Memory: O(T (C + N)) in the kernel, with O(T N C / 64) for gradients, and
O(T C N) in plain PyTorch.
"""

import torch
from torch import Tensor

from unrolled.ops.checks import check_padding_or_pack, check_rates, check_state_tensor, check_tensor, wrong
from unrolled.ops.masks import without_padding
from unrolled.ops.node import one_node
from unrolled.ops.observing import may_read
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.selective_scan import operator
from unrolled.ops.selective_scan.plain import Inputs


def _like_results(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *_: object,
    cu_seqlens: Tensor | None = None,
    **__: object,
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(rows, *a.shape, dtype=_state_dtype(x, dt, a, b, c))


@one_node(_like_results)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan whole sequences.

    The equations are in `unrolled.ops.selective_scan`.

    Args:
        x: `[B,T,C]`.
        dt: step sizes `[B,T,C]`, at least 0.
        a: rates `[C,N]`, at most 0.
        b: `[B,T,N]`.
        c: `[B,T,N]`.
        key_padding_mask: `[B,T]`, True = padding: such a token leaves the state unchanged, and its output
            is 0.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).
        state: h `[B,C,N]` before the first token, N rows with `cu_seqlens`; zeros by default.

    Returns:
        `y [B,T,C]` in the dtype of `x`, and the state after the last token, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: an argument of the wrong shape or type, step sizes below 0, or rates above 0.
    """
    inputs = _checked(x, dt, a, b, c, state, cu_seqlens, key_padding_mask)
    if key_padding_mask is not None:
        x, dt, b, c = (without_padding(each, key_padding_mask) for each in (x, dt, b, c))
        inputs = inputs._replace(x=x, dt=dt, b=b, c=c)
    y, after = operator.selective_scan(inputs, cu_seqlens)
    return y.to(x.dtype), after


def selective_scan_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one token.

    Args:
        x: `[B,C]`.
        dt: step sizes `[B,C]`, at least 0.
        a: rates `[C,N]`, at most 0.
        b: `[B,N]`.
        c: `[B,N]`.
        state: h `[B,C,N]`; it is not modified.

    Returns:
        `y [B,C]` in the dtype of `x`, and the new state.

    Raises:
        ValueError: as `selective_scan`.
    """
    for name, each, axes in (
        ("x", x, "[B, C]"),
        ("dt", dt, "[B, C]"),
        ("b", b, "[B, N]"),
        ("c", c, "[B, N]"),
    ):
        check_tensor(name, each)
        if each.dim() != 2 or not each.is_floating_point():
            raise wrong(name, each, f"floating point {axes}")
    check_tensor("state", state)
    x, dt, b, c = (each.unsqueeze(1) for each in (x, dt, b, c))
    y, after = operator.selective_scan_step(_checked(x, dt, a, b, c, state))
    return y.squeeze(1).to(x.dtype), after


def _state_dtype(*inputs: Tensor) -> torch.dtype:
    return accumulation_dtype(*(each.dtype for each in inputs))


def _checked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
) -> Inputs:
    """Check every argument; the state is zeros by default."""
    for name, each, axes in (("x", x, "[B, T, C]"), ("a", a, "[C, N]")):
        check_tensor(name, each)
        if each.dim() != axes.count(",") + 1 or not each.is_floating_point():
            raise wrong(name, each, f"floating point {axes}")
    (B, T, C), N = x.shape, a.shape[1]
    for name, each, sizes in (
        ("dt", dt, [B, T, C]),
        ("a", a, [C, N]),
        ("b", b, [B, T, N]),
        ("c", c, [B, T, N]),
    ):
        check_tensor(name, each)
        if list(each.shape) != sizes or not each.is_floating_point():
            raise wrong(name, each, f"floating point {sizes}")
        if each.device != x.device:
            raise ValueError(f"{name} is on {each.device}, but x is on {x.device}: move one of them")
    check_padding_or_pack(padding, cu_seqlens, x)
    if may_read(dt):
        read = dt if padding is None else dt[~padding]
        if bool((read < 0).any()):
            raise wrong("dt", f"as low as {read.min().item():g}", "at least 0")
    check_rates("a", a)
    rows, dtype = B if cu_seqlens is None else cu_seqlens.shape[0] - 1, _state_dtype(x, dt, a, b, c)
    if state is None:
        state = x.new_zeros(rows, C, N, dtype=dtype)
    check_state_tensor("state", state, (rows, C, N), dtype, x)
    return Inputs(x, dt, a, b, c, state)
