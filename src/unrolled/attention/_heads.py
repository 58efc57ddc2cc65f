"""Inputs of a mechanism: queries, keys and values, the masks, and a memory to read."""

from typing import Generic, NamedTuple, TypedDict, TypeVar

from torch import Tensor

from unrolled.ops.options import check_integers
from unrolled.ops.state_checks import Growing

Inputs = TypeVar("Inputs")
Projected = tuple[Tensor, Tensor, Tensor]
"""Queries `[B,T,H,D]`, keys `[B,S,G,D]` and values `[B,S,G,M]`; for one token without T and S."""


class Heads(NamedTuple, Generic[Inputs]):
    """What a mechanism attends with: `q [B,T,H,D]`, `k [B,S,G,D]`, `v [B,S,G,M]`; in a step, without T and S.

    `positions [B,T]` is None in cross-attention, and unless `supports.positions` is true; `inputs` is what
    `MultiHeadAttention.read_input` returned; `recent` is the state of the convolution after these tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor | None = None
    inputs: Inputs = None  # type: ignore[assignment]
    recent: Tensor | None = None

    def without_queries(self) -> "Heads[Inputs]":
        """Drop the queries (T = 0), since a state is made of keys and values only."""
        return self._replace(q=self.q[:, :0])


def of_every_head(x: Tensor, n_heads: int) -> Tensor:
    """Give all heads of a group its queries or keys: `[...,groups,D]` to `[...,n_heads,D]`."""
    shared = n_heads // x.shape[-2]
    return x.unsqueeze(-2).expand(*x.shape[:-1], shared, -1).flatten(-3, -2)


def check_groups(n_groups: int, n_heads: int, n_kv_heads: int | None) -> None:
    """Raise ValueError unless all heads can be in groups of one size, each with values of its own."""
    check_integers(1, n_groups=n_groups)
    if n_heads % n_groups:
        raise ValueError(f"n_groups is {n_groups}, but must divide n_heads = {n_heads}")
    if n_kv_heads not in (None, n_heads):
        raise ValueError(
            f"n_kv_heads is {n_kv_heads}, but must be n_heads = {n_heads}: n_groups is the number of query "
            "and key heads"
        )


class Masks(NamedTuple):
    """Which keys may be read; see `MultiHeadAttention.forward`. A mask that a mechanism refuses is None."""

    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def of_keys(self) -> "KeyMasks":
        """Return the masks that linear attention takes, as keyword arguments."""
        return {"key_padding_mask": self.key_padding_mask, "cu_seqlens": self.cu_seqlens}


class KeyMasks(TypedDict, total=False):
    """Masks of keys, the same for all queries of a sequence."""

    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None


NO_MASKS = Masks()


class Memory(NamedTuple):
    """Another sequence, projected once for queries that come later: see `MultiHeadAttention.read`."""

    k: Tensor  # [B,S,G,D]
    v: Tensor  # [B,S,G,M]
    padding: Tensor  # [B,S], True = padding


MEMORY_GROWS: Growing = dict.fromkeys(Memory._fields, (1, "S"))
"""Every field of `Memory` is as long as the memory."""
