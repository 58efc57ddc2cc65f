"""The registry: every case of the benchmark, by name."""

from unrolled.bench import (
    cuda,
    decode,
    delta,
    dplr,
    gla,
    images,
    linear,
    mechanisms,
    models,
    variations,
    window,
)
from unrolled.bench.case import Case

CASES: dict[str, Case] = {
    case.name: case
    for case in [
        *linear.CASES,
        *variations.CASES,
        *gla.CASES,
        *delta.CASES,
        *dplr.CASES,
        *window.CASES,
        *decode.CASES,
        *models.CASES,
        *images.CASES,
        *mechanisms.CASES,
        *cuda.CASES,
    ]
}


def find(name: str) -> Case:
    """Return a case.

    Raises:
        ValueError: there is no case of this name.
    """
    if name not in CASES:
        raise ValueError(f"there is no case {name!r}; the cases are {', '.join(CASES)}")
    return CASES[name]
