r"""Retention: linear attention whose state decays at a fixed rate per head, without a denominator (RetNet).

    S_t = gamma_h S_{t-1} + k_t v_t^T        o_t = S_t^T q_t / sqrt(D)        gamma_h = 1 - 2^(-5-h)
    y_t = W_o (swish(W_g x_t) * norm_h(o_t))

Written out, o_i = sum_{j <= i} gamma_h^(i-j) (q_i . k_j) v_j / sqrt(D). Queries and keys are first rotated
by their positions, so that q_i . k_j depends on i - j; the decay that xPos adds to a rotation is gamma.
norm_h is an RMS norm of each head, o / sqrt(mean(o^2) + eps), which bounds the output as a denominator would.

Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models", arXiv 2307.08621:
eq. 5 (parallel), 6 (recurrent), 7 (by chunks), 8 (heads, norm and gate). The normalisations of section 2.2
are left out. Each of them multiplies a row of o by a number s. The norm removes this factor, but its eps then
acts as eps / s^2. Where eps is much smaller than mean(o^2), the difference is no larger than rounding.

To load weights of the authors' code (torchscale), use `bias=False`, `angles="closed"`, its eps (1e-6 by
default), and a `head_norm.weight` of 1. Its projections are parts of `qkv_proj`, in the order q, k, v.

Cost per head, with values M wide and chunks of C tokens (8 to 128, by backend): in training time
O(T (D M + C (D+M))) and memory O(T (D+M)); per generated token time, memory and state O(D M).
Cannot: run bidirectionally, read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: never. Without decay, rotation, norm and gate it is unnormalised linear attention.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from unrolled.attention._heads import KeyMasks
from unrolled.attention._options import ONE_WAY, HeadOptions
from unrolled.attention._state import position_after, without_denominator
from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.attention.linear import last
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.checks import check_qkv, shape
from unrolled.ops.dense import Linear
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.linear import Keys, linear_attention, linear_attention_step
from unrolled.ops.positions import rotary
from unrolled.ops.precision import accumulation_dtype, exact_dtype
from unrolled.ops.sequence import Decayed

Rotate = Callable[[Tensor, Tensor], Tensor]  # of vectors and positions


class RetentionState(NamedTuple):
    """S `[B,G,D,M]`, and the number of tokens seen `[B]`; its size never changes."""

    kv: Tensor
    position: Tensor


def log_gamma(n_heads: int, device: torch.device | None = None) -> Tensor:
    """log(1 - 2^(-5-h)) of the heads h = 0 ... n_heads - 1, `[n_heads]` (eq. 8)."""
    h = torch.arange(n_heads, device=device, dtype=exact_dtype(torch.device(device or "cpu")))
    return torch.log1p(-(2.0 ** (-5 - h)))


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    positions: Tensor | None = None,
    *,
    rotate: Rotate = rotary,
    state: Tensor | None = None,
    **masks: Unpack[KeyMasks],
) -> tuple[Tensor, Tensor]:
    """Causal retention, in time and memory linear in the length (equations above, up to o).

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,T,G,D]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,T,G,M]`.
        log_decay: logarithm of gamma for each key head `[G]`, at most 0.
        positions: positions of the keys, the last T of which are those of the queries. Queries and keys are
            rotated by their positions; by default, they are not rotated.
        rotate: the function of vectors and positions that rotates the vectors.
        state: S before the first key, `[B,G,D,M]`.
        masks: `key_padding_mask [B,T]`, True = padding, which leaves the state as it was; or `cu_seqlens`,
            int32 `[N+1]` offsets of N sequences packed into one row (B = 1).

    Returns:
        `o [B,T,H,M]` in fp32 (fp64 for fp64 inputs), since a sum without a denominator may overflow fp16, and
        S after the last key.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v)
    if log_decay.shape != k.shape[2:3]:
        raise ValueError(f"log_decay has shape {shape(log_decay)}, but must be [G] = [{k.shape[2]}]")
    q, k, v = _scaled_and_rotated(q, k, v, positions, rotate)
    before = None if state is None else without_denominator(state)
    options: Keys = {"causal": True, "log_decay": log_decay.expand(k.shape[:3]), **masks}
    o, after = linear_attention(q, k, v, state=before, return_state=True, normalize=False, **options)
    return o, after.kv


def retention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    position: Tensor | None = None,
    *,
    rotate: Rotate = rotary,
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence (eq. 6): `q [B,H,D]`, `k [B,G,D]`, `v [B,G,M]`, `position [B]`."""
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))  # the batch becomes the length
    q, k, v = _scaled_and_rotated(q, k, v, None if position is None else position.unsqueeze(0), rotate)
    before, rates = without_denominator(state), log_decay.expand(k.shape[1:3])
    o, after = linear_attention_step(q[0], k[0], v[0], before, log_decay=rates, normalize=False)
    return o, after.kv


def retention_reference(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Compute the output of `retention` by eq. 5: o = (Q K^T * decay) V / sqrt(D), decay_ij = gamma^(i-j)."""
    (_, T, H, D), G = q.shape, k.shape[2]
    distance = torch.arange(T, device=q.device).unsqueeze(1) - torch.arange(T, device=q.device)
    decay = (distance.clamp(min=0) * log_decay.to(q.dtype)[:, None, None]).exp() * (distance >= 0)
    k, v, decay = (x.repeat_interleave(H // G, dim) for x, dim in ((k, 2), (v, 2), (decay, 0)))
    o: Tensor = torch.einsum("bihd,bjhd,hij,bjhm->bihm", q * D**-0.5, k, decay, v)
    return o


def _scaled_and_rotated(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, rotate: Rotate
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype, k.dtype, v.dtype)
    q, k, v = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
    if positions is None:
        return q, k, v
    return rotate(q, last(positions, q)), rotate(k, positions), v


class Retention(MultiHeadAttention[RetentionState, None]):
    """Multi-scale retention: heads with different decays, each normalised, behind a swish gate.

    Values are as wide as queries by default, as in the other mechanisms; in the paper they are twice as wide:
    `value_dim=2 * d_model // n_heads`.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal. With `n_kv_heads`, each key head
            has its own decay.
        rotary: rotate queries and keys by their positions, as the paper does. A model sets this according to
            its `positions`, unless the options of the layer set it.
        angles: "rotary", base^(-2i/D) as everywhere here, or "closed", base^(-2i/(D-2)) as in torchscale.
        eps: added to the mean square of a head, above 0.

    Raises:
        ValueError: an option is out of range.
        UnsupportedError: bidirectional attention.
    """

    supports = CAUSAL_RECURRENCE.but(sequence=True)
    one_way = ONE_WAY

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        rotary: bool = True,
        angles: Literal["rotary", "closed"] = "rotary",
        eps: float = 1e-5,
        **common: Unpack[HeadOptions],
    ):
        super().__init__(d_model, n_heads, rotary=rotary, **common)
        if angles not in ("rotary", "closed"):
            raise ValueError(f"angles is {angles!r}, but must be 'rotary' or 'closed'")
        self.closed = angles == "closed"
        self.head_norm = HeadRMSNorm(n_heads, self.value_dim, eps)
        self.gate_proj = Linear(d_model, n_heads * self.value_dim, bias=self.qkv_proj.bias is not None)

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return self._retain(heads, None, masks)[0]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys by their positions."""
        return rotary(x, positions, base=self.rotary_base, dim=self.rotary_dim, closed=self.closed)

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate it, and project."""
        return super().merge_heads(self.head_norm(o, self.gate_proj(x).reshape(o.shape)), x)

    def init_heads(self, batch_size: int) -> RetentionState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        like = self.out_weight
        size = (batch_size, self.n_kv_heads, self.head_dim, self.value_dim)
        kv = like.new_zeros(size, dtype=self.state_dtype)
        return RetentionState(kv, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads[None], state: RetentionState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, RetentionState]:
        """Attend in parallel, continuing from a state."""
        o, kv = self._retain(heads, state.kv, Masks(key_padding_mask))
        return o, RetentionState(kv, position_after(state.position, heads.q, key_padding_mask))

    def summarise(self, heads: Heads[None], key_padding_mask: Tensor | None) -> Decayed:
        """Sum over these tokens; the earlier state decays with each of them."""
        _, kv = self._retain(heads.without_queries(), None, Masks(key_padding_mask))
        nothing = torch.zeros(len(kv), dtype=torch.long, device=kv.device)
        tokens = position_after(nothing, heads.k, key_padding_mask)
        rates = log_gamma(self.n_kv_heads, kv.device)
        return Decayed({"kv": kv}, (tokens.unsqueeze(1) * rates).to(kv.dtype))

    def _retain(self, heads: Heads[None], state: Tensor | None, masks: Masks) -> tuple[Tensor, Tensor]:
        q, k, v, positions, *_ = heads
        rates = log_gamma(self.n_kv_heads, q.device)
        return retention(q, k, v, rates, positions, rotate=self.rotate, state=state, **masks.of_keys())

    def step_heads(self, heads: Heads[None], state: RetentionState) -> tuple[Tensor, RetentionState]:
        """Run one step of the recurrence (eq. 6)."""
        q, k, v, position, *_ = heads
        rates = log_gamma(self.n_kv_heads, q.device)
        o, kv = retention_step(q, k, v, rates, state.kv, position, rotate=self.rotate)
        return o, RetentionState(kv, state.position + 1)
