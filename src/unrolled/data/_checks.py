"""Wrong arguments, refused in one sentence."""

from typing import get_args

from unrolled.data import Split


def check_integer(name: str, value: object, minimum: int) -> None:
    """Refuse anything but an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} is {value!r}, but must be an integer of at least {minimum}")


def check_split(split: str) -> None:
    """Refuse the name of a split that no data set has."""
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}, but the splits are {' and '.join(get_args(Split))}")


def check_request(split: str, step: int, batch_size: int, seed: int) -> None:
    """Refuse a batch that does not exist."""
    check_split(split)
    check_integer("step", step, 0)
    check_integer("batch_size", batch_size, 1)
    check_integer("seed", seed, 0)
