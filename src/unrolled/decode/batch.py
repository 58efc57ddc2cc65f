"""Sequences that a plan continues side by side, each with options of its own."""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unrolled.decode.request import Sampling
from unrolled.ops import native

if TYPE_CHECKING:
    from unrolled.decode.plan import Plan, PlanState


class Batch:
    """Rows of a state. Those that were started are continued until they end.

    Args:
        plan: what continues them.
        state: of all rows; it is updated.
        logits: [rows, vocab_size] fp32, of the token after those that a row has read; it is updated.

    Attributes:
        length: [rows] long, the number of new tokens of each.
    """

    def __init__(self, plan: "Plan", state: "PlanState", logits: Tensor) -> None:
        self.plan, self.state, self.logits = plan, state, logits
        rows = len(logits)
        self.length = torch.zeros(rows, dtype=torch.long)
        self._status = torch.zeros(rows, dtype=torch.uint8)  # all ended
        self._tokens = [torch.empty(0, dtype=torch.long)] * rows
        self._kept: list[list[Tensor]] = [[]] * rows  # what the descriptions point to
        self._size = native.struct_size("Row")
        self._described = ctypes.create_string_buffer(rows * self._size)

    @property
    def active(self) -> Tensor:
        """Whether each row is continued: [rows] bool."""
        return self._status == native.enum("RowStatus")["ACTIVE"]

    def start(
        self,
        row: int,
        sampling: Sampling,
        key: int,
        limit: int,
        stops: list[list[int]],
        seen: Tensor | None = None,
    ) -> None:
        """Continue a row.

        Args:
            row: its number.
            sampling: how its tokens are drawn.
            key: of its random stream; see `unrolled.generation.sampling.uniform`.
            limit: the most new tokens, at least 1.
            stops: sequences of token ids that end it.
            seen: [vocab_size] uint8, 1 for each token that has occurred, for a penalty of repetition; it is
                updated.
        """
        ends = torch.tensor([len(ids) for ids in stops], dtype=torch.long).cumsum(0)
        stop = torch.tensor([token for ids in stops for token in ids], dtype=torch.long)
        self._tokens[row] = torch.empty(limit, dtype=torch.long)
        self._kept[row] = [ends, stop, *([] if seen is None else [seen])]
        described = native.struct("Row")(
            sampling=_fields(sampling, self.logits.shape[1]),
            key=key,
            limit=limit,
            stops=len(stops),
            stop=native.address(stop),
            stop_end=native.address(ends),
            tokens=native.address(self._tokens[row]),
            seen=native.address(seen),
        )
        place = ctypes.addressof(self._described) + row * self._size
        ctypes.memmove(place, described, self._size)
        self.length[row], self._status[row] = 0, native.enum("RowStatus")["ACTIVE"]

    def draw(self, most: int) -> None:
        """Draw up to `most` tokens for each row that is continued, and read them.

        Raises:
            ValueError: the logits of a row are no distribution, or the model has no position for a token.
        """
        left = self.plan.positions_left(self.state)
        self.state = self.plan.with_room(self.state, most if left is None else min(most, left))
        continuation = native.struct("Continuation")(
            rows=len(self.logits),
            most=most,
            row=ctypes.addressof(self._described),
            logits=native.address(self.logits),
            length=native.address(self.length),
            status=native.address(self._status),
        )
        native.call("decode_on", self.plan.described(self.state), continuation)
        if (bad := (self._status == native.enum("RowStatus")["NO_DISTRIBUTION"]).nonzero()).numel():
            raise ValueError(
                f"logits of row {int(bad[0])} hold NaN, +inf or only -inf, but must define a distribution"
            )
        if (self._status == native.enum("RowStatus")["NO_POSITION"]).any():
            self.plan.with_room(self.state, 1)  # raises

    def end(self, row: int, length: int) -> None:
        """End a row after that many of its new tokens."""
        self.length[row], self._status[row] = length, native.enum("RowStatus")["ENDED"]

    def tokens(self, row: int) -> Tensor:
        """Return the new tokens of a row so far; they are not copied."""
        return self._tokens[row][: int(self.length[row])]


def _fields(sampling: Sampling, vocab_size: int) -> tuple[float, ...]:
    """Return the fields of the struct `Sampling`, in its order."""
    temperature, top_k, top_p, min_p, penalty = sampling
    top_k = vocab_size if top_k is None else min(top_k, vocab_size)
    return (temperature, 1.0 if top_p is None else top_p, 0.0 if min_p is None else min_p, penalty, top_k)
