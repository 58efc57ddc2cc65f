r"""The weighted averages of RWKV-4: every channel averages its values, with weights that decay.

    o_t = (exp(k_t + u) v_t + sum_{j<t} w_tj v_j) / (exp(k_t + u) + sum_{j<t} w_tj)
    w_tj = exp(k_j + (t - 1 - j) d)

All operations are elementwise. The log decay d of a channel is at most 0, and its bonus u weighs the token
itself. A state has both sums over the tokens so far, divided by exp(m) for a number m that is close to the
largest exponent, so that no exponential overflows:

    num_t = exp(d) num_{t-1} + exp(k_t) v_t        den_t = exp(d) den_{t-1} + exp(k_t)

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048: the WKV operator, and
for the scaled sums the appendix on the time-mixing block as an RNN cell. The decay there is w = -d. With
d = 0 and u = 0 it is the causal AFT-simple of Zhai et al. 2021 (arXiv 2105.14103).

Time and memory O(T C) for C channels; state O(C).
"""

import torch
from torch import Tensor

from unrolled.ops.checks import check_padding_or_pack, check_rates, check_state_tensor, check_tensor, wrong
from unrolled.ops.masks import without_padding
from unrolled.ops.node import one_node
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.wkv import operator
from unrolled.ops.wkv.plain import LOWEST, Inputs


def _like_results(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *_: object,
    cu_seqlens: Tensor | None = None,
    **__: object,
) -> tuple[Tensor, Tensor]:
    rows = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(v.shape), v.new_empty(rows, 3, k.shape[2], dtype=_state_dtype(k, v, log_decay, bonus))


@one_node(_like_results)
def wkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Average over whole sequences.

    The equations are in `unrolled.ops.wkv`.

    Args:
        k: logarithms of the weights, `[B,T,C]`.
        v: values `[B,T,C]`.
        log_decay: d `[C]`, at most 0.
        bonus: u `[C]`.
        key_padding_mask: `[B,T]`, True = padding: such a token leaves the state unchanged, and its output
            is 0.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).
        state: exp(-m) num, exp(-m) den and m, `[B,3,C]`, before the first token, N rows with `cu_seqlens`;
            by default that of `empty_state`.

    Returns:
        `o [B,T,C]` in the dtype of `v`, and the state after the last token, in fp32 (fp64 for fp64 inputs).
        m counts as a constant in gradients. That of the outputs is exact, since they do not depend on m.

    Raises:
        ValueError: an argument of the wrong shape or type, or a log decay above 0.
    """
    inputs = _checked(k, v, log_decay, bonus, state, cu_seqlens, key_padding_mask)
    if key_padding_mask is not None:
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
        inputs = inputs._replace(k=k, v=v)
    o, after = operator.wkv(inputs, key_padding_mask, cu_seqlens)
    return o.to(v.dtype), after


def wkv_step(k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run one token.

    Args:
        k: `[B,C]`.
        v: `[B,C]`.
        log_decay: d `[C]`, at most 0.
        bonus: u `[C]`.
        state: `[B,3,C]`; it is not modified.

    Returns:
        `o [B,C]` in the dtype of `v`, and the new state.

    Raises:
        ValueError: as `wkv`.
    """
    check_tensor("k", k)
    if k.dim() != 2 or not k.is_floating_point():
        raise wrong("k", k, "floating point [B, C]")
    check_tensor("v", v)
    if v.shape != k.shape or not v.is_floating_point():
        raise wrong("v", v, f"floating point {list(k.shape)}")
    check_tensor("state", state)
    inputs = _checked(k.unsqueeze(1), v.unsqueeze(1), log_decay, bonus, state)
    o, after = operator.wkv_step(inputs)
    return o.squeeze(1).to(v.dtype), after


def empty_state(rows: int, channels: int, like: Tensor) -> Tensor:
    """Make the state before the first token, `[rows,3,channels]`: empty sums, and an m below every k."""
    state = like.new_zeros(rows, 3, channels)
    state[:, 2] = LOWEST
    return state


def _state_dtype(*inputs: Tensor) -> torch.dtype:
    return accumulation_dtype(*(each.dtype for each in inputs))


def _checked(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
) -> Inputs:
    """Check every argument; the state is empty by default."""
    check_tensor("k", k)
    if k.dim() != 3 or not k.is_floating_point():
        raise wrong("k", k, "floating point [B, T, C]")
    B, T, C = k.shape
    for name, each, sizes in (("v", v, [B, T, C]), ("log_decay", log_decay, [C]), ("bonus", bonus, [C])):
        check_tensor(name, each)
        if list(each.shape) != sizes or not each.is_floating_point():
            raise wrong(name, each, f"floating point {sizes}")
        if each.device != k.device:
            raise ValueError(f"{name} is on {each.device}, but k is on {k.device}: move one of them")
    check_padding_or_pack(padding, cu_seqlens, k)
    check_rates("log_decay", log_decay)
    rows, dtype = B if cu_seqlens is None else cu_seqlens.shape[0] - 1, _state_dtype(k, v, log_decay, bonus)
    if state is None:
        state = empty_state(rows, C, k.new_empty(0, dtype=dtype))
    check_state_tensor("state", state, (rows, 3, C), dtype, k)
    return Inputs(k, v, log_decay, bonus, state)
