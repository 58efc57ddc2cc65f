"""Interfaces between the packages: capabilities, batches, data sets, recurrent models."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""Targets with this value are ignored, as in `torch.nn.functional.cross_entropy`."""

Recurrence = Literal["constant", "growing", "none"]
Split = Literal["train", "val"]


class UnsupportedError(NotImplementedError):
    """A mechanism does not support what was requested; the message says what to use instead."""


@dataclass(frozen=True)
class Supports:
    """The capabilities that a mechanism declares; `unrolled.testing.check_mechanism` checks each of them.

    Attributes:
        causal: position i may be computed from positions up to i only.
        bidirectional: every position may attend to every other.
        cross: queries and keys may come from different sequences.
        padding: `key_padding_mask` is honoured exactly.
        packing: `cu_seqlens` is honoured exactly.
        recurrence: the size of the state that `step` carries: "constant", "growing" with the number of
            tokens seen, or "none" where the mechanism cannot run as a recurrence.
        attn_mask: an arbitrary mask of query-key pairs is honoured exactly.
        global_mask: `forward` takes a mask of global tokens, which attend to all other tokens and to which
            all others attend.
        dynamic_length: `torch.export` can export `forward` for any number of rows and a dynamic length of at
            least 8 tokens, for inference and without masks, and the exported graph gives the same outputs at
            every length.
        weights: each output is a weighted mean of the values; if `cross` is claimed too,
            `weights(query, memory)` returns the weights.
        single_queries: the output of a query does not depend on other queries, so `read` and `recall` work
            one query at a time.
        max_length: the constructor takes `max_length`, and longer sequences raise ValueError.
        positions: the mechanism uses the position of each token, and its state counts the tokens in a field
            `position`.
        reads_input: the outputs of the heads depend not only on their queries, keys and values, but also on
            the input that these are projected from.
        sequence: causal attention may run over a sequence whose slices are in several processes; see
            `unrolled.ops.sequence`.
    """

    causal: bool
    bidirectional: bool
    cross: bool
    padding: bool
    packing: bool
    recurrence: Recurrence
    attn_mask: bool = False
    global_mask: bool = False
    dynamic_length: bool = True
    weights: bool = False
    single_queries: bool = False
    max_length: bool = False
    positions: bool = False
    reads_input: bool = False
    sequence: bool = False

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


CAUSAL_RECURRENCE = Supports(
    causal=True, bidirectional=False, cross=False, padding=True, packing=True, recurrence="constant"
)
"""The capabilities of a causal mechanism that runs as a recurrence with a state of constant size."""


class Batch(NamedTuple):
    """Inputs and targets, in the shapes that the loss of the model takes.

    Attributes:
        inputs: the inputs of the model.
        targets: the targets; -100 (`IGNORED`) where nothing is predicted, as at padding.
        key_padding_mask: True where `inputs` has padding; None where no row has any.
        cu_seqlens: int32 `[N+1]` offsets of N sequences in the rows `[B,T]`, counted as if the rows were laid
            end to end; each row begins a new sequence. None if every row is one sequence.
        continues: bool `[B]`, True where a row continues the same row of the previous batch. None if no row
            ever does.
    """

    inputs: "Tensor"
    targets: "Tensor"
    key_padding_mask: "Tensor | None" = None
    cu_seqlens: "Tensor | None" = None
    continues: "Tensor | None" = None


class Dataset(Protocol):
    """A data set that can be trained on. No method uses a global random generator."""

    def batch(self, split: Split, *, step: int, batch_size: int, seed: int) -> Batch:
        """Return batch number `step`, counted from 0.

        The batch depends on the arguments only, so a resumed run sees the same data.
        """
        ...

    def eval_batches(self, batch_size: int, /) -> Iterable[Batch]:
        """Yield the whole validation split in order, each example once; the last batch may be smaller."""
        ...


class VocabularyConfig(Protocol):
    """The part of a model's config that generation reads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def start_token(self) -> bool:
        """Whether the id `vocab_size` is a start symbol, which begins every sequence."""


@runtime_checkable
class Recurrent(Protocol):
    """A model that `generate` can run."""

    @property
    def config(self) -> VocabularyConfig:
        """The config of the model."""

    def init_state(self, batch_size: int) -> Any:
        """Return the state before the first token."""

    def prefill(
        self, tokens: "Tensor", state: Any, *, key_padding_mask: "Tensor | None" = None
    ) -> "tuple[Tensor, Any]":
        """Read tokens [B, T] in parallel, padded on the left.

        Returns logits [B, n, V] after the last n of them, n >= 1, and the state.
        """

    def step(self, token: "Tensor", state: Any) -> "tuple[Tensor, Any]":
        """Read one token per row [B]; return logits [B, V] and the next state."""
