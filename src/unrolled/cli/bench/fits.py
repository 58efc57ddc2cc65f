"""How a cost grows with a size: the exponent of a power law."""

from collections.abc import Sequence

import numpy as np


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Fit cost = c size^p by least squares of the logarithms over the larger half of the sizes; return p.

    Small sizes tell what a call costs rather than how it grows. None for fewer than two points, or where a
    cost is 0.
    """
    points = sorted(zip(sizes, costs, strict=True))[-max(2, (len(sizes) + 1) // 2) :]
    if len(points) < 2 or min(cost for _, cost in points) <= 0:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])
