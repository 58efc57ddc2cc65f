"""What every sequence layer promises: the capabilities it declares and the error for all others."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

IGNORED = -100
"""A target of this value is not predicted and not counted, as in `torch.nn.functional.cross_entropy`."""

Recurrence = Literal["constant", "growing", "none"]


class UnsupportedError(NotImplementedError):
    """A mechanism was asked for something it does not claim to do; the message says what to use instead."""


@dataclass(frozen=True)
class Supports:
    """The capabilities a mechanism declares, each of them checked by `unrolled.testing.check_mechanism`.

    Attributes:
        causal: position i may be computed from positions up to i only.
        bidirectional: every position may read every other one.
        cross: queries and keys may come from different sequences.
        padding: `key_padding_mask` is honoured exactly.
        packing: `cu_seqlens` is honoured exactly.
        recurrence: the size of the state that `step` carries: "constant", "growing" with the number of
            tokens seen, or "none" where the mechanism cannot run as a recurrence.
        attn_mask: an arbitrary mask of query-key pairs is honoured exactly.
        global_mask: `forward` takes a mask of the tokens that read all others and are read by them.
        dynamic_length: `torch.export` of `forward` takes a length that is not fixed, from 8 tokens on, and
            the graph agrees at each; without masks, and for inference.
        weights: an output is a weighted mean of the values, and `weights` returns the weights.
        single_queries: what one query reads does not depend on the others, so that `read` and `recall` serve
            queries that come one after another.
        max_length: the constructor takes `max_length`, and longer sequences raise ValueError.
        positions: the mechanism uses the position of each token, and its state counts the tokens.
        reads_input: the mechanism reads more from its input than queries, keys and values, so that their
            projections alone do not determine its output.
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

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)
