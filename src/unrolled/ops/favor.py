"""Linear attention of positive random features, which the C++ kernels of a CPU make chunk by chunk.

    phi(x) = exp(W y - |y|^2 / 2) / sqrt(R),    y = x / D^(1/4)

There are R features of an x that is D wide. R is several times D, so storing the features of all tokens takes
most of the memory and time of a layer. Here, they exist for one chunk of tokens of one head at a time. The
backward pass makes them again from q and k.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.checks import check_state_tensor, wrong
from unrolled.ops.dispatch import prefers
from unrolled.ops.linear import check_state, native, packed
from unrolled.ops.linear.chunked import Inputs, Options, OutputGradients
from unrolled.ops.linear.native import RandomFeatures
from unrolled.ops.masks import without_padding
from unrolled.ops.native import TYPES, available
from unrolled.ops.observing import transforming
from unrolled.ops.operators import register
from unrolled.ops.packing import segment_ids
from unrolled.ops.positions import positions_from_cu_seqlens
from unrolled.ops.precision import accumulation_dtype, promoted, without_autocast

LOWEST = torch.finfo(torch.float32).min  # the maximum over no keys: unlike -inf, it can be subtracted


class FavorState(NamedTuple):
    """S_t `[B,G,R,M]`, z_t `[B,G,R]` and M_t `[B,G]`."""

    kv: Tensor
    k_sum: Tensor
    log_scale: Tensor


class Shifts(NamedTuple):
    """What the exponents of keys are reduced by, `[B,S,G]`, and the decay of the state that follows from it.

    The decay is None if attention is bidirectional. `last` is the maximum M after the last key, `[B,G]`.
    """

    shift: Tensor
    log_decay: Tensor | None
    last: Tensor


def shifts(
    peak: Tensor, before: Tensor, causal: bool, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Shifts:
    """Return the shifts of keys with the largest exponents `peak [B,S,G]`, after a maximum `before [B,G]`.

    The shift of padded keys is infinite.
    """
    padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(-1)
    unpadded = peak if padding is None else peak.masked_fill(padding, LOWEST)
    previous, running = _running_maximum(unpadded, before, cu_seqlens)
    # A copy of the last maximum: a slice would keep all of them in memory.
    last, log_decay = torch.cat([before.unsqueeze(1), running[:, -1:]], 1)[:, -1], None
    if causal:
        shift, log_decay = running, log_decay_between(previous, running)
    elif cu_seqlens is None:
        shift = last.unsqueeze(1).expand_as(peak)
    else:
        ends = cu_seqlens[1:].long() - 1
        shift = running[:, ends[segment_ids(cu_seqlens, peak.shape[1])]]
    return Shifts(shift if padding is None else shift.masked_fill(padding, torch.inf), log_decay, last)


def log_decay_between(previous: Tensor, running: Tensor) -> Tensor:
    """Return M_{t-1} - M_t, and 0 at the first token, which has nothing to decay."""
    return (previous - running).masked_fill(previous == LOWEST, 0)


def rescaled(kv: Tensor, k_sum: Tensor, before: Tensor, after: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return a state relative to the maximum `[B,G]` after the last key; if causal, its decay does this."""
    if causal:
        return kv, k_sum
    factor = (before - after).exp().unsqueeze(-1)
    return kv * factor.unsqueeze(-1), k_sum * factor


def supports(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether `favor_attention` can run: on a CPU in eager mode, with a query for each key if causal."""
    traced = torch.compiler.is_compiling() or transforming()
    aligned = not causal or q.shape[1] == k.shape[1]
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    supported = q.is_cpu and dtype in TYPES and q.shape[-2] > 0 and available()
    return aligned and supported and not traced and prefers("native")


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: FavorState | None = None,
) -> tuple[Tensor, FavorState]:
    """Attend to keys by the features above, and return the state after the last key.

    The caller has checked q, k, v, the mask and the offsets by `check_qkv`.

    Args:
        q: queries `[B,T,H,D]`.
        k: keys `[B,S,G,D]`.
        v: values `[B,S,G,M]`.
        rows: W, `[1,R,D]` or `[G,R,D]`; it has no gradient.
        state: the state before the first key; not with `cu_seqlens`.
        causal, key_padding_mask, cu_seqlens: as for `linear_attention`.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and the state; with `cu_seqlens`, its maximum is that of the last
        sequence.

    Raises:
        ValueError: shapes or types that do not fit each other, or a state with `cu_seqlens`.
    """
    (B, _, G, D), M, R = k.shape, v.shape[-1], rows.shape[1]
    if rows.shape not in ((1, R, D), (G, R, D)):
        raise wrong("rows", rows, f"[1, R, {D}] or [{G}, R, {D}] for keys of this width")
    kv, k_sum, log_scale = None, None, lowest(k)
    if state is not None:
        if cu_seqlens is not None:
            raise ValueError("state and cu_seqlens are both given, but only one of them may be")
        check_state(state, (B, G, R, M), torch.float32, k)
        check_state_tensor("state.log_scale", state.log_scale, (B, G), torch.float32, k)
        kv, k_sum, log_scale = state
    if key_padding_mask is not None:
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    o, *after = _operator(q, k, v, kv, k_sum, rows, log_scale, key_padding_mask, cu_seqlens, causal)
    return o.to(out_dtype), FavorState(after[0], after[1], after[2].detach())


def lowest(k: Tensor) -> Tensor:
    """Return the maximum `[B,G]` before the first of the keys `[B,S,G,D]`."""
    return k.new_full((k.shape[0], k.shape[2]), LOWEST, dtype=accumulation_dtype(k.dtype))


def _exponents(x: Tensor, rows: Tensor) -> Tensor:
    """Compute the exponents that the kernels compute, for gradients of gradients."""
    y = (x.float() * x.shape[-1] ** -0.25).unsqueeze(-2)
    of_heads = rows.float().repeat_interleave(x.shape[-2] // len(rows), 0)
    exponents: Tensor = y @ of_heads.mT - y.square().sum(-1, keepdim=True) / 2
    return exponents.squeeze(-2)


def _log_size(rows: Tensor) -> float:
    """Return the part -log(sqrt(R)) of all exponents, which the kernels leave out."""
    return -math.log(rows.shape[1]) / 2


def _options(cu_seqlens: Tensor | None, causal: bool) -> Options:
    return Options(cu_seqlens, causal, normalize=True)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, kv, k_sum, rows, log_scale, padding, cu_seqlens, causal = arguments
    constant = _log_size(rows)
    found = shifts(native.peaks(k, rows) + constant, log_scale, causal, padding, cu_seqlens)
    shift, log_decay = found.shift - constant, found.log_decay
    state = (None, None) if kv is None else rescaled(kv, k_sum, log_scale, found.last, causal)
    inputs = Inputs(q, k, v, log_decay, *state)
    outputs = native.forward(inputs, _options(cu_seqlens, causal), RandomFeatures(rows, shift))
    gates = shift.new_empty(0) if log_decay is None else log_decay
    return *outputs[:3], found.last, outputs.den, shift, gates


def _backward(*arguments: Any) -> list[Tensor]:
    *grads, q, k, v, kv, k_sum, rows, log_scale, _, cu_seqlens = arguments[:12]
    last, den, shift, log_decay, causal = arguments[12:]
    state = (None, None) if kv is None else rescaled(kv, k_sum, log_scale, last, causal)
    inputs = Inputs(q, k, v, log_decay if causal else None, *state)
    options, random = _options(cu_seqlens, causal), RandomFeatures(rows, shift)
    outputs = OutputGradients(*grads)
    found = native.backward(outputs, inputs, den, options, random=random, gate_gradients=False)
    d_kv, d_k_sum = found.kv, found.k_sum
    if kv is not None:  # otherwise their gradients are ignored
        d_kv, d_k_sum = rescaled(d_kv, d_k_sum, log_scale, last, causal)
    return [found.q, found.k, found.v, d_kv, d_k_sum]


def _plain(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, kv, k_sum, rows, log_scale, padding, cu_seqlens, causal = arguments
    with without_autocast(q.device):
        of_queries, of_keys = _exponents(q, rows), _exponents(k, rows)
        peak = of_keys.detach().amax(-1) + _log_size(rows)
        shift, log_decay, last = shifts(peak, log_scale, causal, padding, cu_seqlens)
        phi_q = (of_queries - of_queries.detach().amax(-1, keepdim=True)).exp()
        phi_k = (of_keys + (_log_size(rows) - shift).unsqueeze(-1)).exp()
        state = (None, None) if kv is None else rescaled(kv, k_sum, log_scale, last, causal)
        inputs = Inputs(phi_q, phi_k, v.float(), log_decay, *state)
        o, kv, k_sum, _ = packed.forward(inputs, _options(cu_seqlens, causal))
        return o.to(v.dtype), kv, k_sum


def _like_outputs(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, _, _, rows, log_scale, _, cu_seqlens, causal = arguments
    (B, S, G, _), (_, T, H, _), R, M = k.shape, q.shape, rows.shape[1], v.shape[-1]
    n = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        v.new_empty(B, T, H, M),
        log_scale.new_empty(n, G, R, M),
        log_scale.new_empty(n, G, R),
        log_scale.new_empty(log_scale.shape),
        log_scale.new_empty(B, T, H, 1),
        log_scale.new_empty(B, S, G),
        log_scale.new_empty((B, S, G) if causal else 0),
    )


def _like_gradients(*arguments: Any) -> list[Tensor]:
    _, d_kv, d_k_sum, q, k, v, *_ = arguments
    return [x.new_empty(x.shape) for x in (q, k, v, d_kv, d_k_sum)]


_operator = register(
    "favor_attention(Tensor q, Tensor k, Tensor v, Tensor? kv, Tensor? k_sum, Tensor rows, Tensor log_scale,"
    " Tensor? key_padding_mask, Tensor? cu_seqlens, bool causal)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "favor_attention_backward(Tensor grad_o, Tensor grad_kv, Tensor grad_k_sum, Tensor q, Tensor k, Tensor v,"
    " Tensor? kv, Tensor? k_sum, Tensor rows, Tensor log_scale, Tensor? key_padding_mask, Tensor? cu_seqlens,"
    " Tensor last, Tensor den, Tensor shift, Tensor log_decay, bool causal) -> Tensor[]",
    _forward,
    _backward,
    _plain,
    like_outputs=_like_outputs,
    like_gradients=_like_gradients,
    n_inputs=5,
    n_tensors=9,
    n_outputs=3,
    saved_outputs=[3, 4, 5, 6],  # the last maximum, den, shift and log_decay
)


def _running_maximum(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the maximum of `before [B,G]` and `x [B,S,G]`, exclusive and inclusive of each token.

    With `cu_seqlens`, each packed sequence starts again at `LOWEST`.
    """
    if cu_seqlens is None:
        running = torch.cat([before.unsqueeze(1), x], dim=1).cummax(1).values
        return running[:, :-1], running[:, 1:]
    segment = segment_ids(cu_seqlens, x.shape[1]).unsqueeze(-1)
    # One integer that orders sequences first, and values within a sequence second.
    rank = x.argsort(1).argsort(1) + segment * x.shape[1]
    running = x.gather(1, rank.cummax(1).indices)
    first = positions_from_cu_seqlens(cu_seqlens, x.shape[1]).unsqueeze(-1) == 0
    return running.roll(1, 1).masked_fill(first, LOWEST), running
