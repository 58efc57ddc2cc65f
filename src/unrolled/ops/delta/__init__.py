r"""The delta rule: a linear memory that erases what a key holds before it writes a new value.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

The update has two steps. First S decays, S <- a_t S. Then S <- S + b_t k_t (v_t - S^T k_t)^T moves the value
that k_t retrieves towards v_t. This is one step of gradient descent on |S^T k_t - v_t|^2 / 2 with rate b_t.
Keys have length 1.

Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length" (arXiv 2406.06484), section 2.2. Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv
2412.06464), eq. 10. Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), eq. 1, with a gate per feature.
"""

from typing import TypedDict, Unpack

import torch
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
from unrolled.ops.delta import chunked, operator
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.masks import without_padding
from unrolled.ops.node import like_recurrence, one_node
from unrolled.ops.observing import may_read
from unrolled.ops.packing import spans
from unrolled.ops.precision import accumulation_dtype


class Options(TypedDict, total=False):
    """The keyword arguments of `delta_rule`."""

    log_decay: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: Tensor | None


@one_node(like_recurrence)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule over whole sequences, by chunks.

    The equations are in `unrolled.ops.delta`.

    Args:
        q: queries `[B,T,H,D]`; they are not scaled.
        k: keys `[B,T,G,D]` of length at most 1; query head h reads state h // (H/G).
        v: values `[B,T,G,M]`.
        beta: rates `[B,T,G]`, from 0 (write nothing) to 2; 1 replaces what a unit key held.
        log_decay: natural logarithm of the gates a, at most 0. `[B,T,G]`, or `[B,T,G,D]` for a gate of every
            feature of the keys. Minus infinity clears the state, or the state's row of that feature.
        key_padding_mask: `[B,T]`, True = padding: such a token leaves the state unchanged.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1).
        state: S `[B,G,D,M]` before the first token, N rows with `cu_seqlens`; zeros by default.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and the state after the last token, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: an argument of the wrong shape or type; on a CPU in eager mode, where reading values is
            free, keys longer than 1 (for which the rule may diverge), rates outside [0, 2] and positive
            `log_decay`.
    """
    inputs = _prepare(q, k, v, beta, log_decay, key_padding_mask, cu_seqlens, state)
    o, state = operator.delta_rule(inputs, cu_seqlens)
    return o.to(v.dtype), state


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, *, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token: the state decays, is corrected at k, and is read at q.

    Args:
        q: query `[B,H,D]`.
        k: key `[B,G,D]` of length at most 1.
        v: value `[B,G,M]`.
        beta: rate `[B,G]`.
        state: S `[B,G,D,M]`; it is not modified.
        log_decay: `[B,G]` or `[B,G,D]`, at most 0.

    Returns:
        `o [B,H,M]` in the dtype of `v`, and the new state.

    Raises:
        ValueError: as `delta_rule`.
    """
    check_step(q, k, v)
    _check_rule(q, k, v, beta, log_decay, state, k.shape[0])
    o, state = operator.delta_rule_step(q, k, v, beta, state, log_decay)
    return o.to(v.dtype), state


def delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` by its definition, token by token, with the same arguments."""
    cu_seqlens, padding = options.get("cu_seqlens"), options.get("key_padding_mask")
    q, k, v, beta, log_decay, state = _prepare(
        q, k, v, beta, options.get("log_decay"), padding, cu_seqlens, options.get("state")
    )
    if cu_seqlens is None:
        return _recurrence(Inputs(q, k, v, beta, log_decay, state))
    parts = [(v.new_zeros(1, 0, q.shape[2], v.shape[3]), state[:0])]
    for n, (_, start, end) in enumerate(spans(cu_seqlens, *q.shape[:2])):
        tokens = (None if x is None else x[:, start:end] for x in (q, k, v, beta, log_decay))
        parts.append(_recurrence(Inputs._make((*tokens, state[n : n + 1]))))
    outs, states = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(states)


def _recurrence(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run the definition on rows of equal length."""
    q, k, v, beta, log_decay, state = inputs
    steps = [v.new_zeros(len(q), 0, q.shape[2], v.shape[3])]
    for t in range(q.shape[1]):
        gate = None if log_decay is None else log_decay[:, t]
        o, state = chunked.step(q[:, t], k[:, t], v[:, t], beta[:, t], state, gate)
        steps.append(o.unsqueeze(1))
    return torch.cat(steps, dim=1), state


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> Inputs:
    """Check every argument, start from a state of zeros by default, and mask padding.

    A padded token then neither writes to the state nor decays it.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    check_tensor("beta", beta)
    if log_decay is not None:
        check_tensor("log_decay", log_decay)
    (B, T), (_, _, G, D), M = q.shape[:2], k.shape, v.shape[3]
    if k.shape[1] != T:
        like_q = f"[{B}, {T}, G, {D}] like q {list(q.shape)}"
        raise ValueError(f"k has shape {list(k.shape)}, but must be {like_q}")
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        state = q.new_zeros(N, G, D, M, dtype=accumulation_dtype(q.dtype, k.dtype, v.dtype))
    if key_padding_mask is not None:
        q, k, v = (without_padding(x, key_padding_mask) for x in (q, k, v))
        if beta.shape[:2] == (B, T):
            beta = without_padding(beta, key_padding_mask)
        if log_decay is not None and log_decay.shape[:2] == (B, T):
            log_decay = without_padding(log_decay, key_padding_mask)
    _check_rule(q, k, v, beta, log_decay, state, N)
    return Inputs(q, k, v, beta, log_decay, state)


def _check_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor, rows: int
) -> None:
    (*_, G, D), M = k.shape, v.shape[-1]
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    check_state_tensor("state", state, (rows, G, D, M), dtype, k)
    if beta.shape != k.shape[:-1] or not beta.is_floating_point():
        raise wrong("beta", beta, f"floating point {list(k.shape)[:-1]} for k {list(k.shape)}")
    check_device("beta", beta, k, "k is")
    if log_decay is not None:
        axes = "B, G" if k.dim() == 3 else "B, T, G"
        by_feature = isinstance(log_decay, Tensor) and log_decay.dim() == k.dim()
        check_log_decay(log_decay, k, f"[{axes}, D]" if by_feature else f"[{axes}]")
    if not may_read(k) or k.numel() == 0:
        return
    longest = torch.linalg.vector_norm(k.detach(), dim=-1, dtype=dtype).max().item()
    if longest > 1.01:  # tolerates keys normalised in bf16; NaN passes and reaches the output
        raise ValueError(
            f"k has a key of length {longest:g}, but its keys must have length at most 1: "
            "normalise them, as torch.nn.functional.normalize(k, dim=-1) does"
        )
    lowest, highest = (x.item() for x in beta.detach().aminmax())
    if lowest < 0 or highest > 2:
        raise wrong("beta", f"from {lowest:g} to {highest:g}", "in [0, 2]")
