"""The longest sequence that a model can read."""

from typing import Any


def n_positions(model: Any) -> int | None:
    """Return the maximum number of tokens of a sequence, the least of all layers; None for any number."""
    of_layers = (getattr(module, "most_positions", None) for module in model.modules())
    found = [getattr(model.config, "n_positions", None), *of_layers]
    return min((n for n in found if n is not None), default=None)
