"""The instructions of feature maps."""

import math
from collections.abc import Callable
from typing import Any

import torch

from unrolled.contract import UnsupportedError
from unrolled.decode.builder import Builder
from unrolled.decode.program import Value
from unrolled.ops.feature_maps import (
    T2R,
    CosFormer,
    Dpfp,
    Elu,
    Exp,
    Hedgehog,
    HedgehogSoftmax,
    Polynomial,
    QueryKeyMap,
    Relu,
    SquaredRelu,
    Taylor,
)
from unrolled.ops.feature_maps.elementwise import LARGEST_EXPONENT


def features(builder: Builder, phi: Any, q: Value, k: Value) -> tuple[Value, Value]:
    """Map queries and keys, all heads of each.

    Raises:
        UnsupportedError: there are no instructions for this map.
    """
    queries, keys = (phi.queries, phi.keys) if type(phi) is QueryKeyMap else (phi, phi)
    maps = _MAPS.get(type(queries)), _MAPS.get(type(keys))
    if maps[0] is None or maps[1] is None or any(x.replaced for x in (phi, queries, keys)):
        raise UnsupportedError(f"a plan cannot run the feature map {type(phi).__name__}")
    return maps[0](builder, queries, q, True), maps[1](builder, keys, k, False)


def _elementwise(function: str) -> Callable[[Builder, Any, Value, bool], Value]:
    def phi(builder: Builder, phi: Any, x: Value, of_queries: bool) -> Value:
        return builder.apply(function, x)

    return phi


def _exp(builder: Builder, phi: Exp, x: Value, of_queries: bool) -> Value:
    return _exponentials(builder, x, phi.head_dim, of_queries)


def _exponentials(builder: Builder, x: Value, width: int, of_queries: bool) -> Value:
    kind = "exp_of_queries" if of_queries else "exp_of_keys"
    return builder.features(kind, x, width, width, scale=LARGEST_EXPONENT)


def _dpfp(builder: Builder, phi: Dpfp, x: Value, of_queries: bool) -> Value:
    return builder.features("neighbours", x, phi.head_dim, phi.feature_dim, window=phi.nu)


def _polynomial(builder: Builder, phi: Polynomial, x: Value, of_queries: bool) -> Value:
    weights = torch.tensor([1.0, phi.offset, math.sqrt(2 * phi.offset), 1.0], dtype=torch.float32)
    return builder.features("pairs", x, phi.head_dim, phi.feature_dim, weight=weights)


def _taylor(builder: Builder, phi: Taylor, x: Value, of_queries: bool) -> Value:
    weights = torch.tensor([phi.head_dim**-0.25, 1.0, 1.0, math.sqrt(0.5)], dtype=torch.float32)
    return builder.features("pairs", x, phi.head_dim, phi.feature_dim, weight=weights)


def _cosformer(builder: Builder, phi: CosFormer, x: Value, of_queries: bool) -> Value:
    builder.limit_positions(phi.max_length + 1)
    turn = torch.tensor([math.pi / 2 / phi.max_length], dtype=torch.double)
    x = builder.apply("relu", x)
    return builder.features("by_position", x, phi.head_dim, phi.feature_dim, frequencies=turn)


def _t2r(builder: Builder, phi: T2R, x: Value, of_queries: bool) -> Value:
    return builder.apply("relu", builder.linear_by_head(x, phi.weight, phi.bias))


def _hedgehog(builder: Builder, phi: Hedgehog, x: Value, of_queries: bool) -> Value:
    return _exponentials(builder, _signed(builder, phi, x), phi.feature_dim, of_queries)


def _hedgehog_softmax(builder: Builder, phi: HedgehogSoftmax, x: Value, of_queries: bool) -> Value:
    return builder.features("probabilities", _signed(builder, phi, x), phi.head_dim, phi.head_dim)


def _signed(builder: Builder, phi: Hedgehog, x: Value) -> Value:
    y = builder.linear_by_head(x, phi.weight, phi.bias)
    return builder.features("with_negatives", y, phi.head_dim, phi.feature_dim)


_MAPS: dict[type, Callable[[Builder, Any, Value, bool], Value]] = {
    Elu: _elementwise("elu_plus_one"),
    Relu: _elementwise("relu"),
    SquaredRelu: _elementwise("squared_relu"),
    Exp: _exp,
    Dpfp: _dpfp,
    Polynomial: _polynomial,
    Taylor: _taylor,
    CosFormer: _cosformer,
    T2R: _t2r,
    Hedgehog: _hedgehog,
    HedgehogSoftmax: _hedgehog_softmax,
}
