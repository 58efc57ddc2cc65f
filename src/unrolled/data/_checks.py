"""Checks of the arguments of `batch` and `eval_batches`."""

from unrolled.contract import Split
from unrolled.fields import Count, Size, check_value


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is the name of a split."""
    check_value("split", split, Split)


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError unless `batch_size` is an integer of at least 1."""
    check_value("batch_size", batch_size, Size)


def check_request(split: str, step: int, batch_size: int, seed: int) -> None:
    """Raise ValueError unless the arguments name a batch."""
    check_split(split)
    check_value("step", step, Count)
    check_batch_size(batch_size)
    check_value("seed", seed, Count)
