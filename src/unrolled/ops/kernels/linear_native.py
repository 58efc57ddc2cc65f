"""Linear attention on a CPU: hands the tensors to the C++ kernels, whose structs are mirrored here."""

import ctypes

import torch
from torch import Tensor

from unrolled.ops import linear_packed
from unrolled.ops.checks import check_offsets
from unrolled.ops.feature_maps import Elu, FeatureMap, Relu, SquaredRelu
from unrolled.ops.kernels import native
from unrolled.ops.kernels.native import FLAG, INT, POINTER, TYPES, TensorView, address, readable, view
from unrolled.ops.linear_chunked import Inputs

# What the step can do to q and k first.
FEATURE_MAPS: dict[type[FeatureMap | None], int] = {type(None): 0, Elu: 1, Relu: 2, SquaredRelu: 3}


class Linear(ctypes.Structure):
    """`Linear` of `native/problem.h`."""

    _fields_ = [
        *((name, INT) for name in ("sequences", "queries", "keys", "heads", "groups", "features", "values")),
        *((name, FLAG) for name in ("type", "causal", "normalize", "threads")),
        ("offsets", POINTER),
        *((name, TensorView) for name in "qkv"),
        *((name, POINTER) for name in ("log_decay", "kv", "k_sum")),
    ]


class LinearOutputs(ctypes.Structure):
    """`LinearOutputs` of `native/problem.h`."""

    _fields_ = [(name, POINTER) for name in ("o", "kv", "k_sum", "divisor")]


class LinearGradients(ctypes.Structure):
    """`LinearGradients` of `native/problem.h`."""

    _fields_ = [
        ("o", TensorView),
        *((name, POINTER) for name in ("kv", "k_sum", "divisor")),
        *((name, POINTER) for name in ("d_q", "d_k", "d_v", "d_log_decay", "d_kv", "d_k_sum")),
        *((name, POINTER) for name in ("d_divisor", "read", "states")),
    ]


class LinearStep(ctypes.Structure):
    """`LinearStep` of `native/problem.h`."""

    _fields_ = [
        *((name, INT) for name in ("batch", "heads", "groups", "features", "values")),
        *((name, FLAG) for name in ("type", "normalize", "threads", "feature_map")),
        *((f"{x}_{name}", INT) for x in "qkv" for name in ("at", "batch", "token", "head")),
        *((name, POINTER) for name in ("log_decay", "kv", "k_sum", "o", "kv_after", "k_sum_after")),
    ]


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels can run inputs of this type, on this device."""
    return q.is_cpu and q.dtype in TYPES and q.shape[-2] > 0 and native.available()


def forward(
    inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `linear_chunked.forward` and `linear_packed.forward` do."""
    problem, _kept = _problem(inputs, cu_seqlens, causal, normalize)
    outputs = linear_packed.like_outputs(inputs, cu_seqlens, normalize)
    native.call("linear_forward", problem, LinearOutputs(*map(address, outputs)))
    return outputs


def backward(
    grad_o: Tensor,
    grad_kv: Tensor,
    grad_k_sum: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    divisor: Tensor,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what `linear_chunked.backward` and `linear_packed.backward` do."""
    problem, _kept = _problem(inputs, cu_seqlens, causal, normalize)
    grad_o, grad_kv, grad_k_sum = readable(grad_o), grad_kv.contiguous(), grad_k_sum.contiguous()
    d_q, d_k, d_v, d_log_decay, d_kv, d_k_sum = linear_packed.like_gradients(grad_kv, grad_k_sum, inputs)
    gated = inputs.log_decay is not None
    d_gates = torch.empty(d_log_decay.shape, dtype=torch.double) if gated else None
    d_divisor, read = torch.empty(2, *inputs.q.shape[:3], dtype=torch.float32)
    saved = native.call("linear_saved_floats", problem) if gated else 0
    states = torch.empty(saved, dtype=torch.float32)
    arriving = (view(grad_o), *map(address, (grad_kv, grad_k_sum, divisor)))
    leaving = map(address, (d_q, d_k, d_v, d_gates, d_kv, d_k_sum, d_divisor, read, states))
    native.call("linear_backward", problem, LinearGradients(*arriving, *leaving))
    if d_gates is not None:
        d_log_decay = d_gates.to(d_log_decay.dtype)
    return d_q, d_k, d_v, d_log_decay, d_kv, d_k_sum


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    k_sum: Tensor,
    log_decay: Tensor | None,
    normalize: bool,
    feature_map: FeatureMap | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each and the state `kv`, `k_sum`."""
    (B, H, R), (_, G, M) = q.shape, v.shape
    q, k, v, kv, k_sum = readable(q), readable(k), readable(v), kv.contiguous(), k_sum.contiguous()
    log_decay = None if log_decay is None else log_decay.double().contiguous()
    o = v.new_empty(B, H, M)
    kv_after, k_sum_after = torch.empty_like(kv), torch.empty_like(k_sum)
    sizes, threads = (B, H, G, R, M), torch.get_num_threads()
    (q_batch, q_head, _), (k_batch, k_head, _), (v_batch, v_head, _) = q.stride(), k.stride(), v.stride()
    step = LinearStep(
        *(*sizes, TYPES[q.dtype], normalize, threads, FEATURE_MAPS[type(feature_map)]),
        *(address(q), q_batch, 0, q_head),
        *(address(k), k_batch, 0, k_head),
        *(address(v), v_batch, 0, v_head),
        *map(address, (log_decay, kv, k_sum, o, kv_after, k_sum_after)),
    )
    native.call("linear_step", step)
    return o, kv_after, k_sum_after


def _problem(
    inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool
) -> tuple[Linear, tuple[Tensor | None, ...]]:
    """Describe the problem; the tensors own the memory it points at, and are kept until it is solved."""
    q, k, v, log_decay, kv, k_sum = inputs
    (B, T, H, R), (_, S, G, M) = q.shape, v.shape
    N = B
    if cu_seqlens is not None:
        check_offsets(cu_seqlens.tolist(), T)  # wrong ones would read and write anywhere
        N, cu_seqlens = cu_seqlens.shape[0] - 1, cu_seqlens.contiguous()
    q, k, v = readable(q), readable(k), readable(v)
    log_decay, kv, k_sum = (
        None if x is None else x.to(dtype).contiguous()
        for x, dtype in ((log_decay, torch.double), (kv, torch.float32), (k_sum, torch.float32))
    )
    sizes = (N, T, S, H, G, R, M, TYPES[q.dtype], causal, normalize, torch.get_num_threads())
    views = (view(q), view(k), view(v))
    problem = Linear(*sizes, address(cu_seqlens), *views, *map(address, (log_decay, kv, k_sum)))
    return problem, (cu_seqlens, q, k, v, log_decay, kv, k_sum)
