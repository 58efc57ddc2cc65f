"""Feature maps phi, whose products phi(q) . phi(k) replace exp(q . k).

A map acts on the last axis, from the head width D to `feature_dim`. Queries and keys may be mapped
differently. All features are non-negative except those of the polynomials, whose kernel phi(q) . phi(k) is
still non-negative. Features of half-precision inputs are fp32: fp16 can represent neither large
squares nor exp(-20).
"""

from typing import Any

from unrolled.ops.checks import wrong
from unrolled.ops.feature_maps.base import FeatureMap, QueryKeyMap
from unrolled.ops.feature_maps.elementwise import ELEMENTWISE, Dpfp, Elu, Exp, Relu, SquaredRelu
from unrolled.ops.feature_maps.learned import T2R, Hedgehog, HedgehogSoftmax, PerHeadMap
from unrolled.ops.feature_maps.polynomial import Polynomial, Taylor
from unrolled.ops.feature_maps.positional import CosFormer
from unrolled.ops.options import check_integers

__all__ = [
    "FEATURE_MAPS",
    "T2R",
    "CosFormer",
    "Dpfp",
    "Elu",
    "Exp",
    "FeatureMap",
    "Hedgehog",
    "HedgehogSoftmax",
    "PerHeadMap",
    "Polynomial",
    "QueryKeyMap",
    "Relu",
    "SquaredRelu",
    "Taylor",
    "make_feature_map",
]

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    **ELEMENTWISE,
    "exp": Exp,
    "dpfp": Dpfp,
    "polynomial": Polynomial,
    "taylor": Taylor,
    "cosformer": CosFormer,
    "t2r": T2R,
    "hedgehog": Hedgehog,
    "hedgehog_softmax": HedgehogSoftmax,
}


def make_feature_map(
    name: str, head_dim: int, n_heads: int = 1, n_kv_heads: int | None = None, **options: Any
) -> FeatureMap:
    """Make a feature map by its name in `FEATURE_MAPS`; a learned map has separate weights for each head.

    Args:
        name: one of `FEATURE_MAPS`.
        head_dim: width D of a head.
        n_heads: number of query heads H.
        n_kv_heads: number of key heads G; H by default.
        options: further arguments of the map, such as `max_length` of "cosformer".

    Raises:
        ValueError: an unknown name, or options that do not fit the map.
    """
    if not isinstance(name, str) or name not in FEATURE_MAPS:
        raise wrong("feature_map", repr(name), f"one of {', '.join(FEATURE_MAPS)}, or a FeatureMap")
    check_integers(1, head_dim=head_dim, n_heads=n_heads)
    if n_kv_heads is not None:
        check_integers(1, n_kv_heads=n_kv_heads)
    kind: Any = FEATURE_MAPS[name]
    try:
        if not issubclass(kind, PerHeadMap):
            return kind(head_dim, **options)  # type: ignore[no-any-return]
        queries = kind(head_dim, n_heads, **options)
        return QueryKeyMap(queries, kind(head_dim, n_heads if n_kv_heads is None else n_kv_heads, **options))
    except TypeError as error:
        raise ValueError(f"the options {options} do not fit the feature map {name!r}: {error}") from error
