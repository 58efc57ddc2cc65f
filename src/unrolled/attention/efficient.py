r"""Efficient attention: queries are a softmax over their features, keys a softmax over all positions.

    o_i = sum_c softmax(q_i)_c G_c        G_c = sum_j softmax_j(k_jc) v_j        (c runs over the D features)

Each feature of the keys weighs the positions and averages the values by these weights; each query mixes the D
averages. The implied weights, sum_c softmax(q_i)_c softmax_j(k_jc), are positive and sum to 1 without a
denominator. There is no 1/sqrt(D).

Causal attention, which is not in the paper, takes the softmax of query i over the positions j <= i. With m_t
the running maximum of each feature, which cancels and so needs no gradient, it is a recurrence:

    S_t = diag(exp(m_{t-1} - m_t)) S_{t-1} + exp(k_t - m_t) v_t^T
    z_t = exp(m_{t-1} - m_t) * z_{t-1} + exp(k_t - m_t)
    o_t = S_t^T (softmax(q_t) / z_t)

This is linear attention with a decay for every feature. Nothing overflows, and no future key is read.

Shen, Zhang, Zhao, Yi and Li 2018, "Efficient Attention: Attention with Linear Complexities",
arXiv 1812.01243: section 3.2 (definition and the two normalisations).

Cost per head, with values M wide and chunks of C tokens (8 to 128, by backend): in training time O(T D M)
(causal O(T (D M + C (D+M)))) and memory O(T (D+M)); per generated token time, memory and state O(D M).
Cannot: honour an arbitrary `attn_mask`. The softmax over features makes queries flatter as D grows.
Equals softmax attention: never.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._heads import KeyMasks
from unrolled.attention._options import GENERAL
from unrolled.attention._packed import attend_packed
from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.ops.checks import check_qkv, check_step, shape
from unrolled.ops.gla import diagonal_linear_attention, diagonal_linear_attention_step
from unrolled.ops.linear import check_state, linear_attention
from unrolled.ops.linear.chunked import safe_divide
from unrolled.ops.masks import without_padding
from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.scan import linear_scan
from unrolled.ops.sequence import Shifted


class EfficientState(NamedTuple):
    """S `[B,G,D,M]`, z and m `[B,G,D]`; its size never changes."""

    kv: Tensor
    k_sum: Tensor
    k_max: Tensor


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, **masks: Unpack[KeyMasks]) -> Tensor:
    """Bidirectional efficient attention, in time and memory linear in the lengths (equations above).

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,S,G,D]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        masks: `key_padding_mask [B,S]`, True = padding; or `cu_seqlens`, int32 `[N+1]` offsets of N sequences
            packed into one row (B = 1, T = S).

    Returns:
        `o [B,T,H,M]` in the dtype of `v`; 0 for a query that has nothing to attend to.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    key_padding_mask, cu_seqlens = masks.get("key_padding_mask"), masks.get("cu_seqlens")
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    maps = k.to(dtype)
    if key_padding_mask is not None:
        # Not -inf, whose softmax is NaN in rows of padding only; `linear_attention` masks padding anyway.
        maps = maps.masked_fill(key_padding_mask[..., None, None], torch.finfo(dtype).min)
    if cu_seqlens is None:
        maps = maps.softmax(1)
    else:
        maps = _softmax_in_segments(maps[0], segment_ids(cu_seqlens, k.shape[1]), len(cu_seqlens) - 1)
    return linear_attention(q.to(dtype).softmax(-1), maps, v, normalize=False, **masks)


def causal_efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    state: EfficientState | None = None,
) -> tuple[Tensor, EfficientState]:
    """Causal efficient attention, in time and memory linear in the lengths (equations above).

    Args:
        q, k, v, key_padding_mask: as in `efficient_attention`; query i reads keys up to i + S - T only.
        state: the state before the first key.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and the state after the last key.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v, key_padding_mask)
    (B, T, H, D), (_, S, G, _) = q.shape, k.shape
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    if state is None:
        state = empty_state(k, v, dtype)
    _check_state(state, (B, G, D, v.shape[3]), dtype, k)
    kv, k_sum, k_max = state
    k = k.to(dtype)
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[..., None, None], -torch.inf)
        v = without_padding(v, key_padding_mask)
    if T > S:  # the first queries precede all keys
        k, v = (pad(x, (0, 0, 0, 0, T - S, 0), value=nothing) for x, nothing in ((k, -torch.inf), (v, 0.0)))
    maxima = _running_maxima(torch.cat([k_max.unsqueeze(1), k.detach()], dim=1))
    log_decay = maxima[:, :-1] - maxima[:, 1:]
    k = (k - maxima[:, 1:]).exp()
    sums = linear_scan(pad(log_decay.exp(), (0, 0, 0, 0, 1, 0)), torch.cat([k_sum.unsqueeze(1), k], dim=1))
    read = sums[:, -T:] if T else sums[:, :0]
    q = safe_divide(q.to(dtype).softmax(-1), read.repeat_interleave(H // G, 2))
    o, kv = diagonal_linear_attention(q, k, v, log_decay, state=kv, return_state=True)
    # Copies, since views would keep the whole tensors alive.
    return o, EfficientState(kv, sums[:, -1].clone(), maxima[:, -1].clone())


def causal_efficient_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: EfficientState
) -> tuple[Tensor, EfficientState]:
    """One token of the recurrence: `q [B,H,D]`, `k [B,G,D]`, `v [B,G,M]` to `o [B,H,M]` and the new state."""
    check_step(q, k, v)
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    _check_state(state, (*k.shape, v.shape[2]), dtype, k)
    k = k.to(dtype)
    k_max = torch.maximum(state.k_max, k.detach())
    log_decay = state.k_max - k_max
    k = (k - k_max).exp()
    k_sum = state.k_sum * log_decay.exp() + k
    q = q.to(dtype).softmax(-1) / k_sum.repeat_interleave(q.shape[1] // k.shape[1], 1)
    o, kv = diagonal_linear_attention_step(q, k, v, log_decay, state.kv)
    return o, EfficientState(kv, k_sum, k_max)


def efficient_attention_reference(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Compute either form by its definition: a softmax over the keys for each query and feature.

    `allowed [T,S]`: True = query i may read key j; each query must have at least one. Time and memory
    O(T S D).
    """
    P = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(P, 2), v.repeat_interleave(P, 2)
    logits = k.transpose(1, 3).unsqueeze(3).masked_fill(~allowed, -torch.inf)  # [B,D,H,T,S]
    return torch.einsum("bthc,bchts,bshm->bthm", q.softmax(-1), logits.softmax(-1), v)


def empty_state(k: Tensor, v: Tensor, dtype: torch.dtype) -> EfficientState:
    """Make the state before any key `[B,S,G,D]` and value `[B,S,G,M]`."""
    k_sum = k.new_zeros(k.shape[0], *k.shape[2:], dtype=dtype)
    kv = k_sum.new_zeros(*k_sum.shape, v.shape[-1])
    return EfficientState(kv, k_sum, torch.full_like(k_sum, torch.finfo(dtype).min))


def _check_state(state: EfficientState, sizes: tuple[int, ...], dtype: torch.dtype, tokens: Tensor) -> None:
    check_state(state, sizes, dtype, tokens)
    if state.k_max.shape != sizes[:3]:
        raise ValueError(f"state.k_max has shape {shape(state.k_max)}, but must be {list(sizes[:3])}")


def _running_maxima(x: Tensor) -> Tensor:
    """Return the running maximum along axis 1; contiguous along that axis it is twice as fast."""
    return x.movedim(1, -1).contiguous().cummax(-1).values.movedim(-1, 1)


def _softmax_in_segments(k: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """Softmax over the tokens of each segment: `k [T,G,D]`, `segment [T]` -> `[1,T,G,D]`."""
    lowest = k.new_full((n_segments, *k.shape[1:]), -torch.inf)
    index = segment[:, None, None].expand(k.shape)
    maxima = lowest.scatter_reduce(0, index, k.detach(), "amax")
    k = (k - maxima[segment]).exp()
    return (k / torch.zeros_like(lowest).index_add(0, segment, k)[segment]).unsqueeze(0)


class EfficientAttention(MultiHeadAttention[EfficientState, None]):
    """Multi-head efficient attention; its options are those of `MultiHeadAttention`, without `rotary`.

    The paper's module adds its input to the output; here, as for every mechanism, the block does that.
    """

    supports = GENERAL.but(sequence=True)
    no_rotary = "rotated probabilities may be negative; use other positions"

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if not self.causal:
            return efficient_attention(*heads[:3], **masks.of_keys())
        if masks.cu_seqlens is not None:
            return attend_packed(self.attend, heads, masks.cu_seqlens)
        return causal_efficient_attention(*heads[:3], key_padding_mask=masks.key_padding_mask)[0]

    def init_heads(self, batch_size: int) -> EfficientState:
        """Make the state of `batch_size` sequences before their first token."""
        k = self.out_weight.new_empty(batch_size, 0, self.n_kv_heads, self.head_dim)
        return empty_state(k, k.new_empty(0, self.value_dim), self.state_dtype)

    def prefill_heads(
        self, heads: Heads[None], state: EfficientState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, EfficientState]:
        """Attend in parallel, continuing from a state."""
        return causal_efficient_attention(*heads[:3], key_padding_mask=key_padding_mask, state=state)

    def summarise(self, heads: Heads[None], key_padding_mask: Tensor | None) -> Shifted:
        """Sum over these tokens, with exponents shifted by the largest key of each feature."""
        q, k, v = heads.without_queries()[:3]
        _, own = causal_efficient_attention(q, k, v, key_padding_mask=key_padding_mask)
        return Shifted(own._asdict())

    def step_heads(self, heads: Heads[None], state: EfficientState) -> tuple[Tensor, EfficientState]:
        """Run one step of the recurrence."""
        return causal_efficient_attention_step(*heads[:3], state)
