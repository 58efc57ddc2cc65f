r"""Random feature attention (RFA): linear attention whose features estimate a Gaussian kernel of directions.

    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i
    S_i = g_i S_{i-1} + (1 - g_i) phi(k_i) v_i^T        z_i = g_i z_{i-1} + (1 - g_i) phi(k_i)

Without the gate, g_i and 1 - g_i are both 1, and bidirectional attention sums over all keys. Only the
directions of queries and keys matter: with u = x / |x|, a learned scale s in R^D for each key/value head
(initially 1) and n rows of W drawn from N(0, I),

    fourier   phi(x) = [sin(W(s u)), cos(W(s u))] / sqrt(n)    E[phi(x) . phi(y)] = exp(-|s(u_x - u_y)|^2 / 2)
    arccos    phi(x) = relu(W(s u)) / sqrt(n)                  the arc-cosine kernel of order 1 of s u

The gate (RFA-Gate) is one number per key/value head and token, g_i = sigmoid(w . x_i + b), by which a head
forgets. Initially w = 0, and g is from 0.9 to 0.99 across the heads, a memory of 10 to 100 tokens.

Peng, Pappas, Yogatama, Schwartz, Smith and Kong 2021, "Random Feature Attention", arXiv 2103.02143: theorem 1
(features), section 3.1 (attention), section 3.2 (gate). The paper draws rows of variance s^2 but states the
kernel with 1 / s^2; here s multiplies, as in the authors' code. `rotary` rotates the vectors s u, so that
weights depend on distances for any s. For the paper's stateful variant, call `prefill` on each segment, and
pass it the detached state after the previous segment.

Cost per head, with R = 2n features (n for arccos), values M wide and chunks of C tokens (8 to 128, by
backend): in training time O(T R (D + M + C)) and memory O(T R); per generated token time O(R (D + M)), memory
and state O(R M).
Cannot: honour an arbitrary `attn_mask`, or distinguish keys of one direction; with the gate it is causal
only. Fourier features may be negative: with mean(s^2) above about 3 their divisor may be small or negative
(`signed_linear_attention`), and a warning says so. Arccos features are not negative.
Equals softmax attention: in the limit of large n, for fourier features without the gate and with equal
entries of s, with scores s^2 u_q . u_k.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from unrolled.attention._heads import KeyMasks
from unrolled.attention._options import GENERAL
from unrolled.attention._state import advance, total_decay
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.checks import check_cu_seqlens, check_key_padding_mask, may_read
from unrolled.ops.dense import Linear
from unrolled.ops.linear import Keys, LinearOptions, LinearState, linear_attention, linear_attention_step
from unrolled.ops.masks import without_padding
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.random_features import (
    Projection,
    Rows,
    signed_linear_attention,
    signed_linear_attention_step,
)
from unrolled.ops.sequence import Decayed


class RfaSums(NamedTuple):
    """S `[B,G,R,M]`, z `[B,G,R]`, and the sum of the factors (1 - g_j) g_{j+1} ... g_i, `[B,G]`.

    The sum of the factors is 1 without a gate.
    """

    kv: Tensor
    k_sum: Tensor
    weight: Tensor


class RfaState(NamedTuple):
    """The sums of `RfaSums`, the number of tokens seen `[B]`, and the number of redraws `[B]`."""

    kv: Tensor
    k_sum: Tensor
    weight: Tensor
    position: Tensor
    draw: Tensor


def rfa_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, gate_logits: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute the definition with its weights `[B,H,T,S]`, for T = S and `k`, `v` of H heads.

    Arguments are those of `rfa_attention`. Gated, key j has the weight (1 - g_j) g_{j+1} ... g_i.
    """
    weights = torch.einsum("bthr,bshr->bhts", q, k)
    if gate_logits is not None:
        b = logsigmoid(gate_logits).cumsum(1).transpose(1, 2)
        weights = weights * (b.unsqueeze(-1) - b.unsqueeze(-2)).exp()
        weights = weights * torch.sigmoid(-gate_logits).transpose(1, 2).unsqueeze(-2)
    if causal:
        weights = weights.tril()
    return torch.einsum("bhts,bshm->bthm", weights / weights.sum(-1, keepdim=True), v)


class RfaOptions(KeyMasks, total=False):
    """Options of `rfa_attention`."""

    gate_logits: Tensor | None
    causal: bool
    state: RfaSums | None


def rfa_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[RfaOptions]) -> tuple[Tensor, RfaSums]:
    """Attend by features `q [B,T,H,R]`, `k [B,S,G,R]`, whose products are not negative, to `v [B,S,G,M]`.

    Args:
        q, k, v: as for `linear_attention`.
        options: `gate_logits [B,S,G]`, whose sigmoid is the gates; None for no gate. The masks, `causal` and
            `state` are as for `linear_attention`.

    Returns:
        `o [B,T,H,M]`, and the sums after the last key.
    """
    return _attend(_unsigned, q, k, v, **options)


def signed_rfa_attention(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[RfaOptions]
) -> tuple[Tensor, RfaSums]:
    """Attend as `rfa_attention` does, but by features whose products may be negative.

    The absolute value of a divisor is at least a millionth of the total weight of the keys.
    """
    return _attend(signed_linear_attention, q, k, v, **options)


def _unsigned(
    q: Tensor, k: Tensor, v: Tensor, *, weight: Tensor | None, **options: Unpack[LinearOptions]
) -> tuple[Tensor, LinearState]:
    return linear_attention(q, k, v, return_state=True, **options)


def _attend(
    attend: Callable[..., tuple[Tensor, LinearState]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gate_logits: Tensor | None = None,
    state: RfaSums | None = None,
    **options: Unpack[Keys],
) -> tuple[Tensor, RfaSums]:
    key_padding_mask, cu_seqlens = options.get("key_padding_mask"), options.get("cu_seqlens")
    if key_padding_mask is not None and gate_logits is not None:
        check_key_padding_mask(key_padding_mask, *k.shape[:2])
        k, gate_logits = (without_padding(x, key_padding_mask) for x in (k, gate_logits))
    keys, log_decay = _gated(k, gate_logits)
    options["log_decay"] = log_decay
    if gate_logits is None:
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, q, k)
        N = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        weights, total = None, k.new_ones(N, k.shape[2], dtype=accumulation_dtype(k.dtype, v.dtype))
    else:
        weights, total = _weights(q.shape[1], gate_logits.to(k.dtype), state, options)
        weights = weights.repeat_interleave(q.shape[2] // k.shape[2], -1)
    before = None if state is None else LinearState(state.kv, state.k_sum)
    o, after = attend(q, keys, v, state=before, weight=weights, **options)
    return o, RfaSums(*after, total)


def rfa_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: RfaSums, *, gate_logits: Tensor | None = None
) -> tuple[Tensor, RfaSums]:
    """Run one token of `rfa_attention`: `q [B,H,R]`, `k [B,G,R]`, `v [B,G,M]`, `gate_logits [B,G]`."""
    keys, log_decay, total = _gate_step(k, state, gate_logits)
    o, after = linear_attention_step(q, keys, v, LinearState(*state[:2]), log_decay=log_decay)
    return o, RfaSums(*after, total)


def signed_rfa_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: RfaSums, *, gate_logits: Tensor | None = None
) -> tuple[Tensor, RfaSums]:
    """Run one token of `signed_rfa_attention`; shapes as in `rfa_attention_step`."""
    keys, log_decay, total = _gate_step(k, state, gate_logits)
    weight, before = total.repeat_interleave(q.shape[1] // k.shape[1], -1), LinearState(*state[:2])
    o, after = signed_linear_attention_step(q, keys, v, before, log_decay=log_decay, weight=weight)
    return o, RfaSums(*after, total)


def _gate_step(k: Tensor, state: RfaSums, gate_logits: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (1 - g) phi(k), log g, and the new sum of factors."""
    total = state.weight
    if gate_logits is not None:
        logits = gate_logits.to(total.dtype)
        total = total * torch.sigmoid(logits) + torch.sigmoid(-logits)
    return *_gated(k, gate_logits), total


def _gated(k: Tensor, gate_logits: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (1 - g) phi(k), and log g."""
    if gate_logits is None:
        return k, None
    gate_logits = gate_logits.to(k.dtype)
    return k * torch.sigmoid(-gate_logits).unsqueeze(-1), logsigmoid(gate_logits)


def _weights(T: int, gate_logits: Tensor, state: RfaSums | None, options: Keys) -> tuple[Tensor, Tensor]:
    """Return w_i = g_i w_{i-1} + 1 - g_i, as each of T queries reads it, `[B,T,G]`, and the last `[B,G]`."""
    new = torch.sigmoid(-gate_logits).unsqueeze(-1)
    before = None
    if state is not None:
        weight = state.weight.unsqueeze(-1)
        before = LinearState(weight.unsqueeze(-1), weight)
    ones, queries = torch.ones_like(new), new.new_ones(new.shape[0], T, *new.shape[2:])
    w, after = linear_attention(
        queries, new, ones, state=before, return_state=True, normalize=False, **options
    )
    return w.squeeze(-1), after.k_sum.squeeze(-1)


class Kernel(NamedTuple):
    """A kernel: its features of W (s u), and attention by them."""

    features: Callable[[Tensor], Tensor]
    per_row: int
    attend: Callable[..., tuple[Tensor, RfaSums]]
    step: Callable[..., tuple[Tensor, RfaSums]]
    sharpest: float | None = None  # mean(s^2) up to which divisors of 64 features are rarely negative


def fourier(wx: Tensor) -> Tensor:
    """Return [sin(Wx), cos(Wx)]."""
    return torch.cat([wx.sin(), wx.cos()], -1)


KERNELS = {
    "fourier": Kernel(fourier, 2, signed_rfa_attention, signed_rfa_attention_step, sharpest=3.0),
    "arccos": Kernel(torch.relu, 1, rfa_attention, rfa_attention_step),
}


class RfaMap(nn.Module):
    """Features of queries and keys `[...,H,D]`, with norms of 1 (fourier) or about |s u| / sqrt(2) (arccos).

    Args:
        n_heads: number of heads, each with its own rows and scale.
        head_dim: D.
        features: "fourier" or "arccos".
        n_features: number n of rows per head.
        rows: distribution of the rows, see `draw_rows`.
        seed: see `Projection`.

    Raises:
        ValueError: unknown features or rows, or sizes out of range.
    """

    not_decayed = ("scale",)

    def __init__(
        self, n_heads: int, head_dim: int, features: str, n_features: int, rows: Rows, seed: int | None
    ):
        super().__init__()
        if features not in KERNELS:
            raise ValueError(f"features is {features!r}, but must be one of {', '.join(KERNELS)}")
        self.features = features
        self.feature_dim = self.kernel.per_row * n_features
        self.scale = nn.Parameter(torch.ones(n_heads, head_dim))
        self.projection = Projection(n_heads, n_features, head_dim, rows, seed)
        self._warned = False

    @property
    def kernel(self) -> Kernel:
        """The functions of this kernel; not an attribute, since functions cannot be pickled."""
        return KERNELS[self.features]

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return phi(x) `[...,H,R]`, in at least fp32; a vector of zeros, without a direction, stays zero.

        `rotate`, if given, rotates the vectors s u by their positions.
        """
        with without_autocast(x.device):
            x = x.to(accumulation_dtype(x.dtype))
            scale = self.scale.to(x.dtype).repeat_interleave(x.shape[-2] // len(self.scale), 0)
            zero = (x == 0).all(-1, keepdim=True)  # the norm of zeros has no second derivative
            x = torch.where(zero, 1, x)
            x = x / x.detach().abs().amax(-1, keepdim=True)  # else the square of a small number would be 0
            x = torch.where(zero, 0, x / x.norm(dim=-1, keepdim=True)) * scale
            if rotate is not None:
                x = rotate(x)
            wx: Tensor = self.projection(x)
            return self.kernel.features(wx) / math.sqrt(wx.shape[-1])

    def warn_if_sharp(self) -> None:
        """Warn once if the learned scale makes divisors unreliable, where reading it costs nothing."""
        sharpest = self.kernel.sharpest
        if sharpest is None or self._warned or not may_read(self.scale):
            return
        sharpness = float(self.scale.detach().square().mean())
        if sharpness > sharpest:
            self._warned = True
            warnings.warn(
                f"the learned scale of random Fourier features has mean(scale^2) = {sharpness:.1f}, above "
                f"{sharpest:g}: their estimated divisors may be near 0 or negative and the outputs large; "
                "bound the scale, increase n_features, or use features='arccos'",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        """Return kernel and number of features, for `print(model)`."""
        return f"features={self.features}, feature_dim={self.feature_dim}"


class Gate(NamedTuple):
    """Logits of g `[...,G]`."""

    logits: Tensor


class RandomFeatureAttention(MultiHeadAttention[RfaState, Gate | None]):
    """Multi-head random feature attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        features: "fourier" or "arccos".
        n_features: number n of rows of W for each key/value head.
        gate: forget as RFA-Gate does; causal self-attention only.
        rows: "orthogonal", "regularised" or "independent", see `draw_rows`.
        seed: seed of the rows; by default drawn from torch's generator like initial weights.

    Raises:
        ValueError: unknown features or rows, or sizes out of range.
        UnsupportedError: bidirectional attention with a gate.
    """

    supports = GENERAL.but(sequence=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        features: str = "fourier",
        n_features: int = 64,
        gate: bool = False,
        rows: Rows = "orthogonal",
        seed: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        if gate:
            self.supports = self.supports.but(bidirectional=False, cross=False, reads_input=True)
            if not self.causal:
                raise UnsupportedError("the gate of rfa is causal: use causal=True or gate=False")
        self.feature_map = RfaMap(self.n_kv_heads, self.head_dim, features, n_features, rows, seed)
        self.gate_proj = Linear(d_model, self.n_kv_heads) if gate else None
        if self.gate_proj is not None:
            # g = 1 - 10^-1 ... 1 - 10^-2, in equal steps of the exponent
            forgotten = torch.logspace(-1, -2, self.n_kv_heads)
            with torch.no_grad():
                self.gate_proj.weight.zero_()
                self.gate_proj.bias.copy_(-torch.logit(forgotten))

    def read_input(self, x: Tensor) -> Gate | None:
        """Compute the logits of the gates `[...,G]`."""
        return None if self.gate_proj is None else Gate(self.gate_proj(x))

    def redraw(self) -> None:
        """Draw new rows; see `PerformerAttention.redraw`."""
        self.feature_map.projection.redraw()

    def attend(self, heads: Heads[Gate | None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return self._run(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> RfaState:
        """Make the state of `batch_size` sequences before their first token."""
        like, R = self.out_proj.weight, self.feature_map.feature_dim
        kv = like.new_zeros(batch_size, self.n_kv_heads, R, self.value_dim, dtype=self.state_dtype)
        draw = self.feature_map.projection.redraws.repeat(batch_size)
        weight = kv.new_full(kv.shape[:2], 1.0 if self.gate_proj is None else 0.0)
        return RfaState(kv, kv.new_zeros(kv.shape[:3]), weight, torch.zeros_like(draw), draw)

    def prefill_heads(
        self, heads: Heads[Gate | None], state: RfaState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, RfaState]:
        """Attend in parallel, continuing from a state."""
        o, after = self._run(heads, RfaSums(*state[:3]), Masks(key_padding_mask))
        o = self.feature_map.projection.unless_redrawn(o, state.draw)
        return o, RfaState(*after, advance(state.position, heads.q, key_padding_mask), state.draw)

    def summarise(self, heads: Heads[Gate | None], key_padding_mask: Tensor | None) -> Decayed:
        """Sum over these tokens; the earlier state decays by their gates."""
        _, k, logits = self._features(heads)
        if key_padding_mask is not None:
            k = without_padding(k, key_padding_mask)
            logits = None if logits is None else without_padding(logits, key_padding_mask)
        keys, log_decay = _gated(k, logits)
        options: LinearOptions = {"log_decay": log_decay, "key_padding_mask": key_padding_mask}
        q = heads.q.new_empty(len(k), 0, *k.shape[2:])
        _, own = linear_attention(q, keys, heads.v, return_state=True, **options)
        sums = own._asdict()
        if logits is None or log_decay is None:
            return Decayed(sums, own.k_sum.new_zeros(own.k_sum.shape[:2]))
        _, weight = _weights(0, logits.to(k.dtype), None, options)
        return Decayed({**sums, "weight": weight}, total_decay(log_decay, key_padding_mask))

    def step_heads(self, heads: Heads[Gate | None], state: RfaState) -> tuple[Tensor, RfaState]:
        """Run one step of the recurrence."""
        q, k, logits = self._features(heads)
        before = RfaSums(*state[:3])
        o, after = self.feature_map.kernel.step(q, k, heads.v, before, gate_logits=logits)
        o = self.feature_map.projection.unless_redrawn(o, state.draw)
        return o, RfaState(*after, state.position + 1, state.draw)

    def _run(self, heads: Heads[Gate | None], state: RfaSums | None, masks: Masks) -> tuple[Tensor, RfaSums]:
        q, k, logits = self._features(heads)
        attend, common = self.feature_map.kernel.attend, masks.of_keys()
        return attend(q, k, heads.v, gate_logits=logits, causal=self.causal, state=state, **common)

    def _features(self, heads: Heads[Gate | None]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the features of queries and keys, and the logits of the gates."""
        self.feature_map.warn_if_sharp()
        rotate = None if heads.positions is None else partial(self.rotate, positions=heads.positions)
        q, k = (self.feature_map(x, rotate) for x in heads[:2])
        return q, k, None if heads.inputs is None else heads.inputs.logits

    def refuse(self, capability: str, given: Tensor | None, what: str) -> None:
        """Refuse another sequence if there is a gate, with advice."""
        if self.gate_proj is not None and capability == "cross" and given is not None:
            raise UnsupportedError(f"the gate of rfa reads a single sequence; use gate=False for {what}")
        super().refuse(capability, given, what)
