"""Refuse packed sequences, as the replaced functions of transformers do too."""

from collections.abc import Mapping

from unrolled.contract import UnsupportedError


def refuse_packing(name: str, further: Mapping[str, object]) -> None:
    """Check that the further arguments of a function have no packed sequences.

    Raises:
        UnsupportedError: `cu_seqlens`, `cu_seq_lens_q` or `seq_idx` was given.
    """
    for argument in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if further.get(argument) is not None:
            raise UnsupportedError(
                f"{name} got {argument}, but cannot keep packed sequences apart: "
                "put each sequence into a row of its own"
            )
