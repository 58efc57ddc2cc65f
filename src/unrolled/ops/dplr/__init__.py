r"""The rule of a diagonal plus low rank: a linear memory that decays, and moves what it holds to other keys.

    S_t = (diag(w_t) + b_t a_t^T) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t

a_t reads a value from the state before the state decays. After the decay, this value is written at b_t. With
a_t = w_t * k_t, b_t = -beta_t k_t and values beta_t v_t, this is the delta rule with a gate for every feature
(`unrolled.ops.delta`).

Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution" (arXiv 2503.14456).
"""

from torch import Tensor

from unrolled.ops.checks import (
    check_device,
    check_log_decay,
    check_qkv,
    check_state_tensor,
    check_step,
    check_tensor,
    wrong,
)
from unrolled.ops.dplr import operator
from unrolled.ops.dplr.chunked import Inputs
from unrolled.ops.masks import without_padding
from unrolled.ops.node import like_recurrence, one_node
from unrolled.ops.precision import accumulation_dtype


@one_node(like_recurrence)
def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule over whole sequences, by chunks.

    The equations are in `unrolled.ops.dplr`.

    Args:
        q: queries `[B,T,H,D]`; they are not scaled.
        k: keys `[B,T,H,D]`.
        v: values `[B,T,H,M]`.
        a: vectors that read the state before a token is written, `[B,T,H,D]`.
        b: vectors at which the values read by a are written, `[B,T,H,D]`. With b_t = -beta a_t and |a_t| = 1,
            the state stays bounded for beta from 0 to 2; with others, it may grow without bound.
        log_decay: natural logarithm of the gates w `[B,T,H,D]`, at most 0.
        key_padding_mask: `[B,T]`, True = padding: such a token leaves the state unchanged.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).
        state: S `[B,H,D,M]` before the first token, N rows with `cu_seqlens`; zeros by default.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and the state after the last token, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    (B, _, H, D), M = q.shape, v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        state = q.new_zeros(N, H, D, M, dtype=accumulation_dtype(q.dtype, k.dtype, v.dtype))
    inputs = Inputs(q, k, v, a, b, log_decay, state)
    _check_rule(inputs, N, key_padding_mask)
    if key_padding_mask is not None:
        inputs = Inputs._make([*(without_padding(x, key_padding_mask) for x in inputs[:-1]), state])
    o, state = operator.dplr(inputs, cu_seqlens)
    return o.to(v.dtype), state


def dplr_step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: a reads, the state decays, what a read is written at b and v at k, and q reads.

    Args:
        q, k, a, b: `[B,H,D]`.
        v: value `[B,H,M]`.
        log_decay: `[B,H,D]`, at most 0.
        state: S `[B,H,D,M]`; it is not modified.

    Returns:
        `o [B,H,M]` in the dtype of `v`, and the new state.

    Raises:
        ValueError: as `dplr`.
    """
    check_step(q, k, v)
    inputs = Inputs(q, k, v, a, b, log_decay, state)
    _check_rule(inputs, k.shape[0])
    o, state = operator.dplr_step(inputs)
    return o.to(v.dtype), state


def _check_rule(inputs: Inputs, rows: int, padding: Tensor | None = None) -> None:
    q, k, v, a, b, log_decay, state = inputs
    for name, x in {"k": k, "a": a, "b": b}.items():
        check_tensor(name, x)
        if x.shape != q.shape or not x.is_floating_point():
            raise wrong(name, x, f"floating point {list(q.shape)} like q")
        check_device(name, x, q, "q is")
    check_log_decay(log_decay, k, "[B, H, D]" if k.dim() == 3 else "[B, T, H, D]", padding)
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    check_state_tensor("state", state, (rows, *k.shape[-2:], v.shape[-1]), dtype, k)
