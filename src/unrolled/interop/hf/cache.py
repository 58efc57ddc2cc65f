"""The cache that transformers passes from one call of a model to the next, with a state of this library.

A cache only holds the latest state: each call replaces it by the next state. A state that was read from a
cache does not change; neither does a copy of the cache.
"""

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from unrolled.contract import UnsupportedError
from unrolled.ops import state as states
from unrolled.ops.state import Parts

if TYPE_CHECKING:
    from unrolled.decode import Plan

State = Parts
KEYS_REFUSED = "this layer of the cache holds a state, not keys and values: use `put` instead"


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """One entry of a cache: any state, or None before the first token.

    Beam search and sampling select rows of the state like rows of a batch. A state cannot be rolled back to
    an earlier token, so `crop` and therefore assisted decoding are refused.

    Args:
        state: a state of tensors, batch first, such as `DecoderState` or the state of one attention module.
        seen: number of positions that the state has read, including padding, as transformers counts them.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, state: State | None = None, seen: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.seen = state, seen
        self.is_initialized = state is not None

    @property
    def state(self) -> State | None:
        """The latest state, in the form of the model; while a plan runs in `generate`, a copy of it."""
        if self.plan is None:
            latest: State | None = self.latest
            return latest
        return self.plan.to_model(self.latest)

    @state.setter
    def state(self, state: State | None) -> None:
        self.latest: Any = state  # in the form of the plan, if there is one
        self.plan: Plan | None = None

    def put(self, state: State, read: int, plan: "Plan | None" = None) -> None:
        """Replace the state by the one after `read` more positions, in the form of the plan if one is given.

        A plan may change its own latest state in place.
        """
        self.latest, self.plan, self.seen = state, plan, self.seen + read
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """Number of rows of the state; the attribute does not exist before the first token."""
        if self.latest is None:
            raise AttributeError("batch_size: this layer has no state yet")
        return next(iter(states.leaves(self.latest).values())).shape[0]

    def nbytes(self) -> int:
        """Bytes that the state holds."""
        return 0 if self.latest is None else states.nbytes(self.latest)

    def get_seq_length(self) -> int:
        """Number of positions read."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask over the positions read and `query_length` more."""
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the state of the row that its beam continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at these indices, or those where a mask [B] is True."""
        if self.latest is not None:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.latest = states.select(self.latest, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` copies of it."""
        if self.latest is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self.is_initialized = None, 0, False

    def offload(self) -> None:
        """Do nothing: a state of constant size stays where it is."""

    def prefetch(self) -> None:
        """Do nothing, like `offload`."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens.

        Raises:
            UnsupportedError: the number of tokens to remove is not 0.
        """
        if tokens_to_remove:
            raise UnsupportedError(
                f"a state cannot go back by {abs(tokens_to_remove)} tokens: save the state before those "
                "tokens and continue from it"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(KEYS_REFUSED)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse keys and values.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(KEYS_REFUSED)


class StateCache(Cache):
    """A cache whose layers hold states, or keys and values if they are layers of transformers.

    Args:
        layers: for each layer of the model, a `StateLayer` or a layer of transformers such as `DynamicLayer`.
            The default is one `StateLayer`, for a model with one state for all layers.
    """

    def __init__(self, layers: list[Any] | None = None) -> None:
        super().__init__(layers=[StateLayer()] if layers is None else layers)

    @classmethod
    def of(cls, state: State, seen: int) -> Self:
        """Make a cache of one state that has read `seen` positions."""
        return cls([StateLayer(state, seen)])

    @property
    def only(self) -> StateLayer | None:
        """The layer of a cache that consists of one `StateLayer`; None for other caches."""
        first = self.layers[0] if len(self.layers) == 1 else None
        return first if isinstance(first, StateLayer) else None

    def nbytes(self) -> int:
        """Bytes that the states, keys and values of all layers hold."""
        return sum(_nbytes(layer) for layer in self.layers)


def _nbytes(layer: object) -> int:
    if isinstance(layer, StateLayer):
        return layer.nbytes()
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(x.nbytes for x in held if isinstance(x, Tensor))
