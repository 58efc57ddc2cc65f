"""Linear attention as one torch operator, which dispatches to the backends."""

from typing import Any, Protocol

from torch import Tensor

from unrolled.ops.dispatch import check_backend, choose, prefers
from unrolled.ops.feature_maps import FeatureMap
from unrolled.ops.linear import chunked, mapped, native, packed, triton
from unrolled.ops.linear.chunked import Gradients, Inputs, Options, OutputGradients, Outputs, Token
from unrolled.ops.observing import inferring, transforming
from unrolled.ops.operators import register
from unrolled.ops.precision import promoted


class Backend(mapped.Backend, Protocol):
    """The functions of the module of a backend."""

    def supports(self, q: Tensor, v: Tensor) -> bool:
        """Whether it can run inputs of this type and these widths on this device."""


BACKENDS: dict[str, Backend] = {  # the fastest first
    "triton": triton,
    "native": native,
    "plain": packed,
}
STEPS = {"triton": triton, "native": native}  # backends with a kernel for one token, the fastest first


def linear_attention(inputs: Inputs, options: Options, backend: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o` and the state after the last key, for checked inputs of one type, with T = S if causal."""
    check_backend(backend, BACKENDS)
    if transforming():
        return mapped.forward(packed, inputs, options)[:3]
    o, kv, k_sum, _ = _operator(*inputs, *options, backend)
    return o, kv, k_sum


def linear_attention_step(
    token: Token, normalize: bool, feature_map: FeatureMap | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `o` and the new state for one checked token, after applying `feature_map` to q and k.

    The kernels run in eager inference only: they have no gradients, and they are not torch operators, as
    dispatching an operator would take longer than the kernel. Otherwise the plain form runs, which
    `torch.compile` fuses.
    """
    q, k, v, *_ = token
    eager = inferring(*token)
    known = feature_map is None or (type(feature_map) in native.FEATURE_MAPS and not feature_map.replaced)
    fusible = q.dtype == k.dtype == v.dtype and known
    if eager and fusible and prefers("native") and native.supports(q, v):
        return native.step(token, normalize, feature_map)
    if feature_map is not None:
        q, k = feature_map.phi_q(q), feature_map.phi_k(k)
    out_dtype = v.dtype
    q, k, v = promoted(q, k, v)
    kernels = (kernel for name, kernel in STEPS.items() if prefers(name) and kernel.supports(q, v))
    kernel = next(kernels, chunked) if eager else chunked
    o, kv, k_sum = kernel.step(token._replace(q=q, k=k, v=v), normalize)
    return o.to(out_dtype), kv, k_sum


def _split(arguments: tuple[object, ...]) -> tuple[Inputs, Options]:
    return Inputs._make(arguments[:6]), Options._make(arguments[6:10])


def _forward(*arguments: object) -> Outputs:
    inputs, options = _split(arguments)
    chosen = choose(BACKENDS, arguments[10], inputs.q, inputs.q, inputs.v)
    if chosen is native:
        return native.forward(inputs, options)
    return mapped.forward(chosen, inputs, options)


def _backward(*arguments: Any) -> Gradients:
    *tensors, cu_seqlens, den, causal, normalize, feature_map, backend, gate_gradients = arguments
    grads, inputs = OutputGradients(*tensors[:3]), Inputs(*tensors[3:])
    chosen = choose(BACKENDS, backend, inputs.q, inputs.q, inputs.v)
    options = Options(cu_seqlens, causal, normalize, feature_map)
    if chosen is native:
        return native.backward(grads, inputs, den, options, gate_gradients=gate_gradients)
    return mapped.backward(chosen, grads, inputs, den, options)


def _like_gradients(*arguments: object) -> list[Tensor]:
    grads, inputs = OutputGradients._make(arguments[:3]), Inputs._make(arguments[3:9])
    return list(packed.like_gradients(grads, inputs))


_operator = register(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? kv, Tensor? k_sum,"
    " Tensor? cu_seqlens, bool causal, bool normalize, str? feature_map, str? backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_attention_backward(Tensor grad_o, Tensor grad_kv, Tensor grad_k_sum,"
    " Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? kv, Tensor? k_sum,"
    " Tensor? cu_seqlens, Tensor den, bool causal, bool normalize, str? feature_map, str? backend,"
    " bool gate_gradients)"
    " -> Tensor[]",
    _forward,
    _backward,
    lambda *arguments: mapped.forward(packed, *_split(arguments))[:3],
    like_outputs=lambda *arguments: packed.like_outputs(*_split(arguments)),
    like_gradients=_like_gradients,
    n_inputs=6,
    n_tensors=7,
    n_outputs=3,
    saved_outputs=[3],  # den
    may_skip=[3],  # log_decay
)
