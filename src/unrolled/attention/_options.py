"""Options that every mechanism takes, and sets of claims that several of them share."""

from typing import TypedDict

from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.options import check_above_zero
from unrolled.ops.positions import ROTARY_BASE


class HeadOptions(TypedDict, total=False):
    """Options of `MultiHeadAttention`, documented there, except `rotary`, whose default may differ."""

    causal: bool
    n_kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    bias: bool
    conv: int | None
    rotary_base: float
    rotary_dim: int | None


class CommonOptions(HeadOptions, total=False):
    """Options that every mechanism takes as `**common` and passes on to `MultiHeadAttention`."""

    rotary: bool


GENERAL = CAUSAL_RECURRENCE.but(bidirectional=True, cross=True, single_queries=True)
"""Claims of linear attention; other mechanisms declare the differences."""

BIDIRECTIONAL_ONLY = GENERAL.but(causal=False, packing=False, recurrence="none", single_queries=False)
"""Claims of attention through summaries of the whole sequence."""

ONE_WAY = "it forgets the past; run it over the sequence and over its reverse, or use linear attention"
"""Why a recurrence that forgets is not bidirectional."""


def check_rotation(rotary: bool, base: float, dim: int | None, head_dim: int) -> None:
    """Raise ValueError unless the base is above 0, and `dim` is None or even, from 2 to `head_dim`.

    Without `rotary`, both must have their defaults.
    """
    check_above_zero(rotary_base=base)
    if dim is not None and (dim % 2 or not 2 <= dim <= head_dim):
        raise ValueError(f"rotary_dim is {dim}, but must be even, from 2 to head_dim = {head_dim}")
    for name, value, default in (("rotary_base", base, ROTARY_BASE), ("rotary_dim", dim, None)):
        if value != default and not rotary:
            raise ValueError(f"{name} is {value}, but rotary is False: make it True, or leave {name} out")
