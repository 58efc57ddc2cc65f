"""The cache that transformers carries from one call of a model to the next, holding a state of ours.

A state is a value, so that a cache only has to remember the latest one: whoever reads tokens puts the next
state in its place, and the one before stays as it was for those who kept it.
"""

from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from unrolled.contract import UnsupportedError
from unrolled.ops import state as states

KEYS_REFUSED = "this layer of the cache holds a state, not keys and values: use `put` instead"


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """One entry of a cache: any state, or None before the first token.

    What beam search and sampling do to a batch, they do to the rows of the state. A state cannot be taken
    back to an earlier token, so `crop` is refused, and with it what relies on it: assisted decoding.

    Args:
        state: a value of tensors, batch first, such as `DecoderState` or the state of one attention module.
        seen: number of positions that it has read, with those of padding, as transformers counts them.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, state: Any = None, seen: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.seen = state, seen
        self.is_initialized = state is not None

    def put(self, state: Any, read: int) -> None:
        """Replace the state by the one after `read` more positions."""
        self.state, self.seen = state, self.seen + read
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """Rows of the state; there is no such attribute before the first token."""
        if self.state is None:
            raise AttributeError("batch_size: this layer has no state yet")
        return next(iter(states.leaves(self.state).values())).shape[0]

    def nbytes(self) -> int:
        """Bytes that the state holds."""
        return 0 if self.state is None else states.nbytes(self.state)

    def get_seq_length(self) -> int:
        """How many positions have been read."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: there is no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask over what has been read and `query_length` more."""
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the state of the row that its beam goes on from."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these indices, or where a mask [B] is True."""
        if self.state is not None:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.state = states.select(self.state, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row in its place."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self.is_initialized = None, 0, False

    def offload(self) -> None:
        """Do nothing: a state of constant size stays where it is."""

    def prefetch(self) -> None:
        """Do nothing, as `offload`."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back.

        Raises:
            UnsupportedError: there are some to take back.
        """
        if tokens_to_remove:
            raise UnsupportedError(
                f"a state cannot be taken back by {tokens_to_remove} tokens: keep the state of that position "
                "and go on from there instead"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(KEYS_REFUSED)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refuse keys and values.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(KEYS_REFUSED)


class StateCache(Cache):
    """A cache whose layers hold states, or keys and values where they are transformers' own.

    Args:
        layers: for each layer of the model a `StateLayer`, or a layer of transformers such as `DynamicLayer`;
            by default one `StateLayer`, for a model that puts everything into one state.
    """

    layers: list[Any]

    def __init__(self, layers: list[Any] | None = None) -> None:
        super().__init__(layers=[StateLayer()] if layers is None else layers)

    @classmethod
    def of(cls, state: Any, seen: int) -> Self:
        """Make a cache of one state that has read `seen` positions."""
        return cls([StateLayer(state, seen)])

    def nbytes(self) -> int:
        """Bytes that the states, keys and values of all layers hold."""
        return sum(_nbytes(layer) for layer in self.layers)


def _nbytes(layer: Any) -> int:
    if isinstance(layer, StateLayer):
        return layer.nbytes()
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor))
