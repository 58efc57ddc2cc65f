"""Checks of the arguments that the methods of all stores share."""

import re

MOST_NAME = 512  # bytes
DIGEST = re.compile(r"[0-9a-f]{64}")


def check_key(key: str) -> None:
    """Check that a key is 64 hex digits."""
    if not DIGEST.fullmatch(key):
        raise ValueError(f"the id of a state must be 64 hex digits in lower case, not {key[:80]!r}")


def check_name(name: str) -> None:
    """Check that the name of a session is text of 1 to 512 bytes."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError("the name of a session must be text, but it holds half a character") from None
    if not 1 <= size <= MOST_NAME:
        raise ValueError(f"the name of a session must have 1 to {MOST_NAME} bytes, not {size}")


def check_swap(name: str, expected: str | None, new: str | None) -> None:
    """Check the arguments of `Store.swap`."""
    check_name(name)
    for key in (expected, new):
        if key is not None:
            check_key(key)


class StateTooLargeError(ValueError):
    """A value is larger than the limit of a store."""


def check_size(value: bytes, most_bytes: int) -> None:
    """Check that a value is not larger than the limit of a store."""
    if len(value) > most_bytes:
        raise StateTooLargeError(
            f"the state has {len(value):,} bytes, but the store keeps {most_bytes:,} at most"
        )
