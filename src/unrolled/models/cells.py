"""Stacks of recurrent layers by the name of their cell, for models that take any cell."""

from itertools import pairwise
from typing import Any

from unrolled import recurrent
from unrolled.recurrent import Stacked


def stack_of(cell: str, cell_options: dict[str, Any], widths: list[int], *, dropout: float = 0.0) -> Stacked:
    """Stack one layer for each pair of consecutive `widths`, with dropout between the layers.

    Raises:
        ValueError: there is no such cell, or it does not take one of its options.
    """
    make = recurrent.load(cell)
    try:
        return Stacked([make(a, b, **cell_options) for a, b in pairwise(widths)], dropout=dropout)
    except TypeError as error:
        raise ValueError(f"cell_options of {cell!r} do not fit: {error}") from error
