"""Options that every mechanism takes, and sets of claims that several of them share."""

from typing import TypedDict

from unrolled.contract import CAUSAL_RECURRENCE


class HeadOptions(TypedDict, total=False):
    """Options of `MultiHeadAttention`, which documents them, for mechanisms with their own `rotary`."""

    causal: bool
    n_kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    bias: bool
    conv: int | None


class CommonOptions(HeadOptions, total=False):
    """Options that every mechanism takes as `**common` and passes on to `MultiHeadAttention`."""

    rotary: bool


GENERAL = CAUSAL_RECURRENCE.but(bidirectional=True, cross=True, single_queries=True)
"""Claims of linear attention; other mechanisms declare the differences."""

BIDIRECTIONAL_ONLY = GENERAL.but(causal=False, packing=False, recurrence="none", single_queries=False)
"""Claims of attention through summaries of the whole sequence."""

ONE_WAY = "it forgets the past; run it over the sequence and over its reverse, or use linear attention"
"""Why a recurrence that forgets is not bidirectional."""
