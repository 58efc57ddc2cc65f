"""Refuse packed sequences, as the replaced functions of transformers do too."""

from collections.abc import Mapping

from torch import Tensor

from unrolled.contract import UnsupportedError
from unrolled.ops.observing import may_read


def refuse_packing(name: str, further: Mapping[str, object]) -> None:
    """Check that the further arguments of a function have no packed sequences.

    Raises:
        UnsupportedError: `cu_seqlens`, `cu_seq_lens_q` or `seq_idx` was given.
    """
    for argument in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if further.get(argument) is not None:
            raise _error(name, argument)


def refuse_restarts(name: str, position_ids: object) -> None:
    """Check that positions `[B,T]` do not begin again within a row, as those of packed sequences do.

    Raises:
        UnsupportedError: they do.
    """
    if not isinstance(position_ids, Tensor) or not may_read(position_ids):
        return
    if (position_ids.diff(dim=-1) < 0).any():
        raise _error(name, "position_ids that begin again")


def _error(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} got {what}, but cannot keep packed sequences apart: put each sequence into a row of its own"
    )
