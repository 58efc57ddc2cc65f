"""Stops: one token id or several, each an id or a sequence of ids."""

from collections.abc import Sequence

from unrolled.ops.checks import wrong

Stop = int | Sequence[int | Sequence[int]] | None


def stop_sequences(stop: Stop, vocab_size: int) -> list[list[int]]:
    """Return each stop as a list of token ids.

    Raises:
        ValueError: a stop is empty, not made of integers, or holds an id outside [0, vocab_size).
    """
    if isinstance(stop, str):
        raise ValueError(f"stop is {stop!r}, but must be an id, or ids or sequences of them")
    alternatives = [] if stop is None else stop if isinstance(stop, Sequence) else [stop]
    stops = [list(ids) if isinstance(ids, Sequence) else [ids] for ids in alternatives]
    for ids in stops:
        if not all(type(token) is int for token in ids):
            raise wrong("stop", repr(stop), "a token id, or a list of ids and of lists of ids")
        if not ids:
            raise ValueError("stop holds an empty sequence, which every continuation ends with")
        if not all(0 <= token < vocab_size for token in ids):
            raise ValueError(f"stop holds {ids}, with a token id outside [0, {vocab_size})")
    return stops
