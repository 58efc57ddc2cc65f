"""Checks of the options of a mechanism. Each failure is one sentence that names the option."""

import math


def check_integers(low: int, **sizes: object) -> None:
    """Require integers, which True is not, of at least `low`."""
    for name, n in sizes.items():
        if type(n) is not int:
            raise ValueError(f"{name} is {n!r}, but must be an integer")
        if n < low:
            raise ValueError(f"{name} is {n}, but must be at least {low}")


def at_least(low: int, name: str, size: int) -> int:
    """Return `size`, or raise ValueError naming it unless it is a whole number of at least `low`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < low:
        raise ValueError(f"{name} is {size!r}, but must be a whole number of at least {low}")
    return size


def check_finite(**numbers: object) -> None:
    """Require numbers, integers or not, other than infinity and nan."""
    for name, x in numbers.items():
        if type(x) not in (int, float) or not math.isfinite(x):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {x!r}, but must be a finite number")


def check_booleans(**flags: object) -> None:
    """Require True or False."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r}, but must be True or False")
