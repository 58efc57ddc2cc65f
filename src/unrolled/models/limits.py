"""The longest sequence that a model can read."""

from typing import Any

from unrolled.attention.aft import AFT
from unrolled.ops.feature_maps.positional import CosFormer


def n_positions(model: Any) -> int | None:
    """Return the maximum number of tokens of a sequence, the least of all layers; None for any number."""
    found = [getattr(model.config, "n_positions", None)]
    for module in model.modules():
        if isinstance(module, CosFormer):
            found.append(module.max_length + 1)
        elif isinstance(module, AFT):
            found.append(module.max_length)
    return min((n for n in found if n is not None), default=None)
