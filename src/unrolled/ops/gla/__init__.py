r"""Linear attention with a gate for every feature: S_t = diag(a_t) S_{t-1} + k_t v_t^T in all its forms.

With features q, k (of any sign), gates a_t = exp(log_decay_t), one for each of the R features, and state S,

    S_t = diag(a_t) S_{t-1} + k_t v_t^T        o_i = S_p(i)^T q_i

where p(i) is the last key that query i may read: i plus the number of keys minus the number of queries
(causal, bottom-right aligned). Written out, the weight of key j for query i is
sum_r q_ir k_jr a_j+1,r ... a_p(i),r. There is no denominator.

Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635),
section 4. If the gate is the same for all features of a head, `ops.linear` is faster.
"""

from collections.abc import Callable
from typing import Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.ops.checks import check_log_decay, check_qkv, check_state_tensor, check_step
from unrolled.ops.gla import chunked, operator
from unrolled.ops.gla.packed import Inputs
from unrolled.ops.masks import without_padding
from unrolled.ops.packing import spans
from unrolled.ops.precision import accumulation_dtype, promoted


class Options(TypedDict, total=False):
    """Keyword arguments of `diagonal_linear_attention`."""

    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: Tensor | None


class _OutputOnly(Options, total=False):
    return_state: Literal[False]


class _OutputAndState(Options, total=False):
    return_state: Required[Literal[True]]


@overload
def diagonal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Unpack[_OutputOnly]
) -> Tensor: ...


@overload
def diagonal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Unpack[_OutputAndState]
) -> tuple[Tensor, Tensor]: ...


def diagonal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention with a decay for every feature, in time and memory linear in the length.

    Args:
        q: query features `[B,T,H,R]`.
        k: key features `[B,S,G,R]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        log_decay: natural logarithm of the gates `[B,S,G,R]`, at most 0; minus infinity clears the state.
        key_padding_mask: `[B,S]`, True = padding: a padded key does not change the state, and its gates count
            as 1.
        cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row (B = 1, T = S).
        state: S before the first key, `[B,G,R,M]`; N rows with `cu_seqlens`.
        return_state: also return S after the last key.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and with `return_state` the state. Sums are kept in fp32 (fp64 for
        fp64 inputs). There is no denominator: pass `v` in fp32 if the sums may overflow in fp16. Gradients of
        any order reach every input and pass through both states.

    Raises:
        ValueError: an argument of the wrong shape or type; decreasing offsets; a positive `log_decay`, which
            is only checked on a CPU in eager mode, where reading values is cheap.
    """
    options: Options = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens, "state": state}
    o, after = _run(operator.diagonal_linear_attention, q, k, v, log_decay, **options)
    return (o, after) if return_state else o


def diagonal_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: S' = diag(a) S + k v^T, o = S'^T q.

    Args:
        q: query features `[B,H,R]`.
        k: key features `[B,G,R]`.
        v: value `[B,G,M]`.
        log_decay: `[B,G,R]`, at most 0.
        state: S `[B,G,R,M]`; it is not modified.

    Returns:
        `o [B,H,M]` in the dtype of `v`, and the new state.

    Raises:
        ValueError: as `diagonal_linear_attention`.
    """
    check_step(q, k, v)
    check_log_decay(log_decay, k, "[B, G, R]")
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    check_state_tensor("state", state, (*k.shape, v.shape[-1]), dtype, k)
    return operator.diagonal_linear_attention_step(q, k, v, log_decay, state)


def diagonal_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    return_state: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `diagonal_linear_attention` by its definition, token by token.

    Every other form must equal it.
    """
    o, after = _run(_recurrence, q, k, v, log_decay, **options)
    return (o, after) if return_state else o


def _recurrence(inputs: Inputs, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, state = inputs
    if cu_seqlens is not None:
        parts = [(q.new_empty(1, 0, q.shape[2], v.shape[3]), state[:0])]
        for n, (_, i, j) in enumerate(spans(cu_seqlens, *q.shape[:2])):
            tokens = Inputs(q[:, i:j], k[:, i:j], v[:, i:j], log_decay[:, i:j], state[n : n + 1])
            parts.append(_recurrence(tokens, None))
        outs, states = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(states)
    steps = [q.new_empty(len(q), 0, q.shape[2], v.shape[3])]
    for t in range(q.shape[1]):
        o, state = chunked.step(q[:, t], k[:, t], v[:, t], log_decay[:, t], state)
        steps.append(o.unsqueeze(1))
    return torch.cat(steps, dim=1), state


Form = Callable[[Inputs, Tensor | None], tuple[Tensor, Tensor]]


def _run(
    form: Form, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Check every argument, remove padding, and run a form that needs T = S."""
    key_padding_mask, cu_seqlens = options.get("key_padding_mask"), options.get("cu_seqlens")
    state = options.get("state")
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    check_log_decay(log_decay, k, "[B, S, G, R]", key_padding_mask)
    (B, T, _, _), S = q.shape, k.shape[1]
    dtype, out_dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype), v.dtype
    sizes = (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, *k.shape[2:], v.shape[3])
    if state is None:
        state = k.new_zeros(sizes, dtype=dtype)
    check_state_tensor("state", state, sizes, dtype, k)
    if key_padding_mask is not None:
        k, v, log_decay = (without_padding(x, key_padding_mask) for x in (k, v, log_decay))
    q, k, v = promoted(q, k, v)
    if S > T:  # the last query is aligned with the last key
        q = pad(q, (0, 0, 0, 0, S - T, 0))
    elif T > S:  # zeros in front, whose gates are 1
        k, v, log_decay = (pad(x, (0, 0, 0, 0, T - S, 0)) for x in (k, v, log_decay))
    o, state = form(Inputs(q, k, v, log_decay, state), cu_seqlens)
    return o[:, max(S - T, 0) :].to(out_dtype), state
