"""Linear attention on a CPU: passes the tensors to the C++ kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops import native
from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.feature_maps.elementwise import ELEMENTWISE
from unrolled.ops.linear import packed
from unrolled.ops.linear.chunked import Gradients, Inputs, Options, OutputGradients, Outputs, Token
from unrolled.ops.native import TYPES, View, address, readable, sequences, struct, view

# Feature maps that the kernels can apply to q and k, with the values of the enum in C++.
FEATURE_MAPS: dict[type[FeatureMap | None], int] = {type(None): 0}
FEATURE_MAPS |= {kind: number for number, kind in enumerate(ELEMENTWISE.values(), 1)}


class RandomFeatures(NamedTuple):
    """The random features that the kernels make of q and k, as `native/feature_rows.h` defines them."""

    rows: Tensor  # [1 or G,R,D]
    key_shift: Tensor | None = None  # [B,S,G] in fp32


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels can run inputs of this type, on this device."""
    return q.is_cpu and q.dtype in TYPES and q.shape[-2] > 0 and native.available()


def forward(inputs: Inputs, options: Options, random: RandomFeatures | None = None) -> Outputs:
    """Compute what `packed.forward` does, for random features of q and k if `random` is given."""
    problem, _kept = described(inputs, options, random=random)
    outputs = packed.like_outputs(inputs, options, None if random is None else random.rows.shape[1])
    o, kv, k_sum, divisor = map(address, outputs)
    native.call("linear_forward", problem, struct("LinearOutputs")(o=o, kv=kv, k_sum=k_sum, divisor=divisor))
    return outputs


def backward(
    grads: OutputGradients,
    inputs: Inputs,
    den: Tensor,
    options: Options,
    *,
    random: RandomFeatures | None = None,
    gate_gradients: bool = True,
) -> Gradients:
    """Compute what `packed.backward` does, for random features of q and k if `random` is given.

    Without `gate_gradients`, the gradient of `log_decay` has no meaning, which saves time and memory.
    """
    problem, _kept = described(inputs, options, random=random)
    grad_o, grad_kv, grad_k_sum = readable(grads.o), grads.kv.contiguous(), grads.k_sum.contiguous()
    found = packed.like_gradients(grads, inputs)
    gated = inputs.log_decay is not None and gate_gradients
    d_gates = torch.empty(found.log_decay.shape, dtype=torch.double, device="cpu") if gated else None
    d_divisor = native.floats(*inputs.q.shape[:3])
    d_log_from_start = torch.empty_like(d_divisor) if gated else None
    saved = native.linear_saved_floats(problem) if gated else 0
    states = native.floats(saved)
    gradients = struct("LinearGradients")(
        o=view(grad_o),
        kv=address(grad_kv),
        k_sum=address(grad_k_sum),
        divisor=address(den),
        d_q=address(found.q),
        d_k=address(found.k),
        d_v=address(found.v),
        d_log_decay=address(d_gates),
        d_rates=0,
        d_kv=address(found.kv),
        d_k_sum=address(found.k_sum),
        d_divisor=address(d_divisor),
        d_log_from_start=address(d_log_from_start),
        states=address(states),
        residuals=0,
    )
    native.call("linear_backward", problem, gradients)
    return found if d_gates is None else found._replace(log_decay=d_gates.to(found.log_decay.dtype))


def peaks(k: Tensor, rows: Tensor) -> Tensor:
    """Compute the largest exponent `[B,S,G]` of the random features of each key, without a shift."""
    B, S, G, _ = k.shape
    inputs, options = Inputs(k, k, k, None, None, None), Options(None, False, True, None)
    problem, _kept = described(inputs, options, random=RandomFeatures(rows))
    found = native.floats(B, S, G)
    native.call("key_peaks", problem, struct("KeyPeaks")(peak=address(found)))
    return found


def step(
    token: Token, normalize: bool, feature_map: FeatureMap | None = None, rates: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token and the previous state.

    The token's `log_decay` is `[B,G]`, or `[B,G,R]` for a gate of each feature. With `rates`, this is a step
    of the delta rule; `normalize` is then False and `k_sum` empty.
    """
    q, k, v, kv, k_sum, log_decay = token
    B, H, M = *q.shape[:2], v.shape[2]
    q, k, v, kv, k_sum = readable(q), readable(k), readable(v), kv.contiguous(), k_sum.contiguous()
    by_feature = log_decay is not None and log_decay.dim() == 3
    if log_decay is not None:
        log_decay = log_decay.to(torch.float32 if by_feature else torch.float64).contiguous()
    rates = None if rates is None else rates.float().contiguous()
    o = v.new_empty(B, H, M)
    kv_after, k_sum_after = torch.empty_like(kv), torch.empty_like(k_sum)
    step = struct("LinearStep")(
        batch=B,
        **native.sizes(q, k, v),
        normalize=normalize,
        feature_map=FEATURE_MAPS[type(feature_map)],
        q=_token(q),
        k=_token(k),
        v=_token(v),
        log_decay=0 if by_feature else address(log_decay),
        feature_log_decay=address(log_decay) if by_feature else 0,
        rates=address(rates),
        kv=address(kv),
        k_sum=address(k_sum),
        o=address(o),
        kv_after=address(kv_after),
        k_sum_after=address(k_sum_after),
    )
    native.call("linear_step", step)
    return o, kv_after, k_sum_after


def _token(x: Tensor) -> View:
    """Describe `[batch, heads, width]`, a tensor without an axis of tokens."""
    batch, head, _ = x.stride()
    return address(x), batch, 0, head


def described(
    inputs: Inputs,
    options: Options,
    rates: Tensor | None = None,
    unit_epsilon: float = 0.0,
    query_scale: float = 1.0,
    random: RandomFeatures | None = None,
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """Fill the struct, and return the tensors that it points to, which must stay alive during the call."""
    q, k, v, log_decay, kv, k_sum = inputs
    cu_seqlens, causal, normalize, feature_map = options
    (B, T), S = q.shape[:2], v.shape[1]
    N, cu_seqlens = sequences(cu_seqlens, B, T)
    q, k, v = readable(q), readable(k), readable(v)
    log_decay = None if log_decay is None else log_decay.double().contiguous()
    rates, kv, k_sum = (None if x is None else x.float().contiguous() for x in (rates, kv, k_sum))
    sizes, rows, transposed, key_shift = native.sizes(q, k, v), None, None, None
    if random is not None:
        rows, transposed = _padded(random.rows), _padded(random.rows.mT)
        key_shift = None if random.key_shift is None else random.key_shift.contiguous()
        sizes["features"] = random.rows.shape[1]
    problem = struct("Linear")(
        sequences=N,
        queries=T,
        keys=S,
        **sizes,
        causal=causal,
        normalize=normalize,
        offsets=address(cu_seqlens),
        q=view(q),
        k=view(k),
        v=view(v),
        log_decay=address(log_decay),
        rates=address(rates),
        kv=address(kv),
        k_sum=address(k_sum),
        unit_epsilon=unit_epsilon,
        query_scale=query_scale,
        feature_map=FEATURE_MAPS[type(None) if feature_map is None else ELEMENTWISE[feature_map]],
        width=q.shape[-1],
        row_heads=0 if random is None else len(random.rows),
        rows=address(rows),
        transposed_rows=address(transposed),
        key_shift=address(key_shift),
    )
    return problem, (cu_seqlens, q, k, v, log_decay, rates, kv, k_sum, rows, transposed, key_shift)


def _padded(x: Tensor) -> Tensor:
    """Pad rows by zeros to a multiple of 16, so that every instruction set can read them in whole vectors."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 16)).contiguous()
