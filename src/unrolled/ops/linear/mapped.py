"""Linear attention of the features of q and k, for backends whose kernels do not make features themselves.

q and k themselves are saved for the backward pass, which maps them to features a second time.
"""

from typing import Protocol

from torch import Tensor

from unrolled.ops.feature_maps.elementwise import ELEMENTWISE
from unrolled.ops.linear.chunked import Gradients, Inputs, Options, OutputGradients, Outputs
from unrolled.ops.precision import accumulation_dtype


class Backend(Protocol):
    """The functions of the module of a backend."""

    def forward(self, inputs: Inputs, options: Options) -> Outputs:
        """Compute the outputs."""

    def backward(self, grads: OutputGradients, inputs: Inputs, den: Tensor, options: Options) -> Gradients:
        """Compute the gradients of the inputs."""


def forward(backend: Backend, inputs: Inputs, options: Options) -> Outputs:
    """Compute the outputs of a backend for the features; differentiable if the backend's operations are."""
    if options.feature_map is None:
        return backend.forward(inputs, options)
    outputs = backend.forward(_features(inputs, options.feature_map), options._replace(feature_map=None))
    return outputs._replace(o=outputs.o.to(inputs.v.dtype))


def backward(
    backend: Backend, grads: OutputGradients, inputs: Inputs, den: Tensor, options: Options
) -> Gradients:
    """Compute the gradients of q, k and the other inputs."""
    if options.feature_map is None:
        return backend.backward(grads, inputs, den, options)
    features, slope = _features(inputs, options.feature_map), ELEMENTWISE[options.feature_map].slope
    grads = grads._replace(o=grads.o.to(features.v.dtype))
    found = backend.backward(grads, features, den, options._replace(feature_map=None))
    q, k, v = inputs[:3]
    return found._replace(
        q=(found.q * slope(q.to(features.q.dtype))).to(q.dtype),
        k=(found.k * slope(k.to(features.k.dtype))).to(k.dtype),
        v=found.v.to(v.dtype),
    )


def _features(inputs: Inputs, feature_map: str) -> Inputs:
    """Replace q and k by their features, and convert all to the type that features have."""
    phi, dtype = ELEMENTWISE[feature_map].function, accumulation_dtype(inputs.q.dtype)
    q, k, v = (x.to(dtype) for x in inputs[:3])
    return inputs._replace(q=phi(q), k=phi(k), v=v)
