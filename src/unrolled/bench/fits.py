"""How a cost grows with a size: the exponent of a power law."""

from collections.abc import Sequence

import numpy as np


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Fit cost = c size^p by least squares of the logarithms over the larger half of the sizes; return p.

    At small sizes the overhead of a call dominates.

    Raises:
        ValueError: there are fewer than two points, or a cost is not positive.
    """
    if len(sizes) < 2 or min(costs) <= 0:
        raise ValueError(
            f"costs at sizes {list(sizes)} are {list(costs)}, but must be two or more that are positive"
        )
    points = sorted(zip(sizes, costs, strict=True))[-max(2, (len(sizes) + 1) // 2) :]
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])
