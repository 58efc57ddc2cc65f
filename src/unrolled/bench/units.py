"""Quantities with three digits and a unit."""


def brief_time(seconds: float) -> str:
    """Write a time: "1.25 ms"."""
    if seconds >= 999.5:  # which would be written as 1e+03
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def size(nbytes: float) -> str:
    """Write a number of bytes, in powers of ten: "34.9 kB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * factor:  # which rounds to 1 of this unit
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.3g} bytes"


def duration(seconds: float) -> str:
    """Write how long a person waited: "2 min 5 s"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
