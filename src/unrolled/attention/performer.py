r"""Performer: softmax attention estimated by random features, in time linear in the length (FAVOR+).

    o_i = sum_{j <= i} (phi(q_i) . phi(k_j)) v_j / sum_{j <= i} phi(q_i) . phi(k_j)

Bidirectional attention sums over all j. With x = q / D^(1/4) and y = k / D^(1/4), the product x . y is the
score of softmax attention. With m rows of W drawn from N(0, I), E[phi(q) . phi(k)] = exp(q . k / sqrt(D)) for

    positive        phi(q) = exp(Wx - |x|^2/2) / sqrt(m)                      R = m features, all positive
    hyperbolic      phi(q) = exp([Wx, -Wx] - |x|^2/2) / sqrt(2m)              R = 2m, all positive
    trigonometric   phi(q) = exp(|x|^2/2) [sin(Wx), cos(Wx)] / sqrt(m)        R = 2m, of either sign

Generalised features f(Wq) + 0.001 with f >= 0 define a kernel of their own. They are deterministic if W = I
("identity").

Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv 2009.14794: section 2.3 with lemma 1
(positive and hyperbolic features) and lemma 2 (their errors), 2.4 (orthogonal rows), theorem 1 (regularised
rows). The following stabilisation is not from the paper, and differs from the published implementations.

Features overflow any float, so exponents are shifted. Queries are shifted by their own maximum, which
cancels. Keys are shifted by M_t, the maximum of all exponents up to token t (of the whole sequence if
bidirectional):

    S_t = exp(M_{t-1} - M_t) S_{t-1} + exp(-M_t) phi(k_t) v_t^T

This is linear attention with a decay, and M_t cancels as well. One maximum over the whole sequence, as in the
published implementations, leaks the size of future keys into the past. Rows are drawn once; only `redraw`
draws new ones.

Cost per head, with values M wide and chunks of C tokens (8 to 128, by backend): in training time
O(T R (D + M + C)) and memory O(T (D + M)) where the C++ kernels make the features (`unrolled.ops.favor`;
positive and hyperbolic ones), otherwise O(T R); per generated token time O(R (D + M)), memory and state
O(R M).
Cannot: honour an arbitrary `attn_mask`, or represent a weight that is less than e^-87 (in fp32) times the
largest product of features so far. A query all of whose weights are that small gets 0. The divisor of
trigonometric features may be small or negative (`signed_linear_attention`), and such outputs have few digits.
Equals softmax attention: as m grows, and in practice for small queries and keys only. The variance grows like
exp(|x + y|^2): with D = 64 and entries of unit variance the error is larger than the output even with m =
8192. FAVOR+ does not approximate such softmax attention with any practical number of features: it is a
mechanism of its own, to be trained as such. With entries of standard deviation 0.5 the error is about half of
the output at m = 256, and a tenth at m = 8192 (measured in `tests/attention/test_performer.py`).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._options import GENERAL
from unrolled.attention._state import position_after
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.contract import UnsupportedError
from unrolled.ops import favor
from unrolled.ops.checks import check_qkv
from unrolled.ops.favor import FavorState
from unrolled.ops.linear import LinearOptions, LinearState, linear_attention, linear_attention_step
from unrolled.ops.masks import without_padding
from unrolled.ops.observing import changed
from unrolled.ops.options import check_choice
from unrolled.ops.precision import accumulated, without_autocast
from unrolled.ops.random_features import (
    Projection,
    Rows,
    signed_linear_attention,
    signed_linear_attention_step,
)
from unrolled.ops.sequence import Shifted

FLOOR = 1e-3  # of generalised features, so that none of their products is 0


class PerformerState(NamedTuple):
    """A `FavorState`, the number of tokens seen `[B]`, and the number of redraws of its features `[B]`."""

    kv: Tensor
    k_sum: Tensor
    log_scale: Tensor
    position: Tensor
    draw: Tensor


class Features(NamedTuple):
    """phi(x) = exp(exponent + log_size) * wave; None stands for 0, 0 and 1.

    The largest exponent is 0, so that no rounding of a large `log_size` can make a shifted feature overflow.
    """

    exponent: Tensor | None  # [...,H,R]
    log_size: Tensor | None  # [...,H]
    wave: Tensor | None  # [...,H,R]

    def peak(self) -> Tensor | None:
        """Return the largest of exponent + log_size `[...,H]`, detached; None without exponentials."""
        return None if self.log_size is None else self.log_size.detach()

    def shifted(self, shift: Tensor | None) -> Tensor:
        """Return phi(x) exp(-shift) for a shift `[...,H]`, which is None where `peak` is.

        An infinite shift gives 0. The exponent may be overwritten, since it is by far the largest tensor of a
        layer.
        """
        if self.log_size is None or shift is None:
            assert self.wave is not None  # features have an exponent, a wave or both
            return self.wave
        log_size = (self.log_size - shift).unsqueeze(-1)
        size = log_size.exp() if self.exponent is None else self.exponent.add_(log_size).exp_()
        return size if self.wave is None else size * self.wave


Project = Callable[[Tensor], Tensor]
"""W x of `x [...,H,D]`."""


def positive(x: Tensor, rows: Project) -> Features:
    """Return exp(Wx - |x|^2/2) / sqrt(R)."""
    x = x * x.shape[-1] ** -0.25
    wx = rows(x)
    top = wx.detach().amax(-1)
    # Overwriting a view of a product makes autograd copy its gradient.
    exponent = wx.sub_(top.unsqueeze(-1)) if wx.is_contiguous() else wx - top.unsqueeze(-1)
    return Features(exponent, top - x.square().sum(-1) / 2 - math.log(wx.shape[-1]) / 2, None)


def hyperbolic(x: Tensor, rows: Project) -> Features:
    """Return positive features of W and -W."""

    def both_signs(x: Tensor) -> Tensor:
        wx = rows(x)
        return torch.cat([wx, -wx], -1)

    return positive(x, both_signs)


def trigonometric(x: Tensor, rows: Project) -> Features:
    """Return exp(|x|^2/2) [sin(Wx), cos(Wx)] / sqrt(m)."""
    x = x * x.shape[-1] ** -0.25
    wx = rows(x)
    return Features(None, x.square().sum(-1) / 2, torch.cat([wx.sin(), wx.cos()], -1) * wx.shape[-1] ** -0.5)


def generalised(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Project], Features]:
    """Make the features f(Wx) + 0.001."""
    return lambda x, rows: Features(None, None, f(rows(x)) + FLOOR)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, LinearState]:
    """Call `linear_attention`, and return its output and state."""
    return linear_attention(q, k, v, return_state=True, **options)


class Kind(NamedTuple):
    """A kind of features, their number for each row of W, and the linear attention for their signs."""

    features: Callable[[Tensor, Project], Features]
    per_row: int = 1
    attend: Callable[..., tuple[Tensor, LinearState]] = attend
    step: Callable[..., tuple[Tensor, LinearState]] = linear_attention_step


SOFTMAX = {
    "positive": Kind(positive),
    "hyperbolic": Kind(hyperbolic, 2),
    "trigonometric": Kind(trigonometric, 2, signed_linear_attention, signed_linear_attention_step),
}
GENERALISED = {
    "relu": Kind(generalised(torch.relu)),
    "squared_relu": Kind(generalised(lambda x: x.relu().square())),
    "abs": Kind(generalised(torch.abs)),
    "sigmoid": Kind(generalised(torch.sigmoid)),
}
KINDS = SOFTMAX | GENERALISED


class FavorMap(nn.Module):
    """Features of queries and keys `[...,H,D]`.

    Args:
        head_dim: D.
        features: a name in `SOFTMAX` or `GENERALISED`.
        projection: holds W; None for the identity.
    """

    def __init__(self, head_dim: int, features: str, projection: Projection | None):
        super().__init__()
        self.features, self.projection = features, projection
        n_rows = head_dim if projection is None else projection.weight.shape[1]
        self.feature_dim = self.kind.per_row * n_rows

    @property
    def kind(self) -> Kind:
        """The functions of these features; not an attribute, since functions cannot be pickled."""
        return KINDS[self.features]

    def forward(self, x: Tensor) -> Features:
        """Return phi(x), in at least fp32."""
        with without_autocast(x.device):
            x = accumulated(x)
            return self.kind.features(x, (lambda x: x) if self.projection is None else self.projection)

    def exponential_rows(self) -> Tensor | None:
        """Return W if these are the features of `unrolled.ops.favor`, and W needs no gradient, else None."""
        if self.projection is None or self.features not in ("positive", "hyperbolic"):
            return None
        rows = self.projection.weight
        if (rows.requires_grad and torch.is_grad_enabled()) or changed((self, self.projection)):
            return None
        return rows if self.features == "positive" else torch.cat([rows, -rows], 1)

    def extra_repr(self) -> str:
        """Return kind and number of features, for `print(model)`."""
        return f"features={self.features!r}, feature_dim={self.feature_dim}"


def favor_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, phi: FavorMap, *, causal: bool = False
) -> Tensor:
    """Compute the definition with its weights `[B,H,T,S]` and nothing shifted, for `k` and `v` of H heads."""
    q, k = (phi(x).shifted(x.new_zeros(x.shape[:-1])) for x in (q, k))
    weights = torch.einsum("bthr,bshr->bhts", q, k)
    if causal:
        weights = weights.tril(k.shape[1] - q.shape[1])
    return torch.einsum("bhts,bshm->bthm", weights / weights.sum(-1, keepdim=True), v.to(weights.dtype))


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FavorMap,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: FavorState | None = None,
) -> tuple[Tensor, FavorState]:
    """Attend from `q [B,T,H,D]` to `k [B,S,G,D]`, `v [B,S,G,M]` by linear attention on shifted features.

    Masks and `state` are as for `linear_attention`, but only one of `cu_seqlens` and `state` may be given.

    Returns:
        `o [B,T,H,M]`, and the state after the last key.
    """
    check_qkv(q, k, v, key_padding_mask, cu_seqlens)
    rows, masks = phi.exponential_rows(), Masks(key_padding_mask, None, cu_seqlens)
    learned = state is not None and torch.is_grad_enabled() and state.log_scale.requires_grad
    if rows is not None and not learned and favor.supports(q, k, v, causal):
        return favor.favor_attention(q, k, v, rows, causal=causal, state=state, **masks.of_keys())
    if key_padding_mask is not None:
        k = without_padding(k, key_padding_mask)
    k_features, shift, log_decay = phi(k), None, None
    log_scale = favor.lowest(k) if state is None else state.log_scale
    before = None if state is None else LinearState(state.kv, state.k_sum)
    peak = k_features.peak()
    if peak is not None:
        shift, log_decay, last = favor.shifts(peak, log_scale, causal, key_padding_mask, cu_seqlens)
        if before is not None:
            before = LinearState(*favor.rescaled(*before, log_scale, last, causal))
        log_scale = last
        if key_padding_mask is not None:  # the features of padded keys are 0, due to their shift
            v, masks = without_padding(v, key_padding_mask), masks._replace(key_padding_mask=None)
    q, k = _query_features(phi(q)), k_features.shifted(shift)
    o, after = phi.kind.attend(q, k, v, causal=causal, log_decay=log_decay, state=before, **masks.of_keys())
    return o, FavorState(*after, log_scale)


def favor_attention_step(
    q: Tensor, k: Tensor, v: Tensor, phi: FavorMap, state: FavorState
) -> tuple[Tensor, FavorState]:
    """Run one token of the recurrence: `q [B,H,D]`, `k [B,G,D]`, `v [B,G,M]` to `o [B,H,M]` and a state."""
    k_features, log_decay, log_scale = phi(k), None, state.log_scale
    peak = k_features.peak()
    if peak is not None:
        log_scale = torch.maximum(log_scale, peak)
        log_decay = favor.log_decay_between(state.log_scale, log_scale)
    q, k = _query_features(phi(q)), k_features.shifted(log_scale)
    o, after = phi.kind.step(q, k, v, LinearState(state.kv, state.k_sum), log_decay=log_decay)
    return o, FavorState(*after, log_scale)


def _query_features(features: Features) -> Tensor:
    """Return features of queries, each shifted by its own maximum."""
    return features.shifted(features.peak())


class PerformerAttention(MultiHeadAttention[PerformerState, None]):
    """Multi-head attention by random features of the softmax kernel, or of another.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        features: "positive", "hyperbolic" or "trigonometric" for the softmax kernel; "relu", "squared_relu",
            "abs" or "sigmoid" for a generalised one.
        n_features: number m of rows of W; 256 by default, D with identity rows.
        rows: "orthogonal", "regularised" or "independent" (see `draw_rows`), or "identity", without random
            rows, for generalised features.
        per_head: draw rows for each key/value head, rather than one set for all.
        seed: seed of the rows; by default drawn from torch's generator like initial weights.

    Raises:
        ValueError: unknown features or rows, or numbers that do not fit them.
        UnsupportedError: rotary positions with identity rows.
    """

    supports = GENERAL.but(sequence=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        features: str = "positive",
        n_features: int | None = None,
        rows: Rows | Literal["identity"] = "orthogonal",
        per_head: bool = False,
        seed: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_choice("features", features, KINDS)
        projection = None
        if rows != "identity":
            n_features = 256 if n_features is None else n_features
            n_draws = self.n_kv_heads if per_head else 1
            projection = Projection(n_draws, n_features, self.head_dim, rows, seed)
        elif features in SOFTMAX:
            raise ValueError(f"rows is 'identity', but must be random for {features} features")
        elif n_features not in (None, self.head_dim) or per_head or seed is not None:
            raise ValueError(
                f"n_features is {n_features}, per_head {per_head} and seed {seed}, but must be "
                f"{self.head_dim} or None, False and None for rows = 'identity'"
            )
        elif self.rotary:
            raise UnsupportedError("identity rows cannot express rotary positions; use random rows")
        self.feature_map = FavorMap(self.head_dim, features, projection)

    def redraw(self) -> None:
        """Draw new rows, determined by the seed and the number of redraws; nothing else redraws them.

        Afterwards, a state that was made with the previous rows is refused.
        """
        if self.feature_map.projection is None:
            raise UnsupportedError("identity rows are not random; use rows='orthogonal', for example")
        self.feature_map.projection.redraw()

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        return self._favor(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> PerformerState:
        """Make the state of `batch_size` sequences before their first token: empty sums, no maximum."""
        like, R = self.out_weight, self.feature_map.feature_dim
        kv = like.new_zeros(batch_size, self.n_kv_heads, R, self.value_dim, dtype=self.state_dtype)
        log_scale = kv.new_full(kv.shape[:2], favor.LOWEST)
        position = kv.new_zeros(batch_size, dtype=torch.long)
        projection = self.feature_map.projection
        draw = position.clone() if projection is None else projection.redraws.repeat(batch_size)
        return PerformerState(kv, kv.new_zeros(kv.shape[:3]), log_scale, position, draw)

    def prefill_heads(
        self, heads: Heads[None], state: PerformerState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, PerformerState]:
        """Attend in parallel, continuing from a state."""
        o, after = self._favor(heads, FavorState(*state[:3]), Masks(key_padding_mask))
        position = position_after(state.position, heads.q, key_padding_mask)
        return self._unless_redrawn(o, state), PerformerState(*after, position, state.draw)

    def summarise(self, heads: Heads[None], key_padding_mask: Tensor | None) -> Shifted:
        """Sum over these tokens, with exponents shifted by the largest of them."""
        q, k = self.rotated(heads)
        _, own = favor_attention(q[:, :0], k, heads.v, self.feature_map, key_padding_mask=key_padding_mask)
        return Shifted(own._asdict())

    def step_heads(self, heads: Heads[None], state: PerformerState) -> tuple[Tensor, PerformerState]:
        """Run one step of the recurrence."""
        before = FavorState(*state[:3])
        o, after = favor_attention_step(*self.rotated(heads), heads.v, self.feature_map, before)
        return self._unless_redrawn(o, state), PerformerState(*after, state.position + 1, state.draw)

    def _favor(self, heads: Heads[None], state: FavorState | None, masks: Masks) -> tuple[Tensor, FavorState]:
        q, k = self.rotated(heads)
        options = masks.of_keys()
        return favor_attention(q, k, heads.v, self.feature_map, causal=self.causal, state=state, **options)

    def _unless_redrawn(self, o: Tensor, state: PerformerState) -> Tensor:
        projection = self.feature_map.projection
        return o if projection is None else projection.unless_redrawn(o, state.draw)
