"""Sequences that a plan continues side by side, each with options of its own."""

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unrolled.decode.memory import PlanState
from unrolled.decode.request import Sampling
from unrolled.ops import native

if TYPE_CHECKING:
    from unrolled.decode.plan import Plan


MOST_TOLD = 16  # the most tokens drawn at once while a row keeps its logits


class Drawing(NamedTuple):
    """How a row is continued.

    Attributes:
        sampling: how its tokens are drawn.
        key: the key of its random stream; see `unrolled.generation.sampling.uniform`.
        limit: the most new tokens, at least 1.
        stops: sequences of token ids that end it.
        seen: [vocab_size] uint8, 1 for each token that has occurred, for a penalty of repetition; it is
            updated.
        tells: whether to keep the logits that tokens are drawn from.
    """

    sampling: Sampling
    key: int
    limit: int
    stops: list[list[int]]
    seen: Tensor | None = None
    tells: bool = False


class Batch:
    """Rows, each with a state of its own. A row that was started is continued until it ends.

    Args:
        plan: the plan that continues the rows.
        logits: [rows, vocab_size] fp32, the logits of the next token of each row; they are updated.

    Attributes:
        length: [rows] long, the number of new tokens of each row.
        states: the state of each row, as a batch of one; they are updated.
        told: for each row that keeps its logits, [MOST_TOLD, vocab_size]: the logits that the last `draw`
            drew tokens from.
    """

    def __init__(self, plan: "Plan", logits: Tensor) -> None:
        self.plan, self.logits = plan, logits
        rows = len(logits)
        self.states: list[PlanState | None] = [None] * rows
        self.told: list[Tensor | None] = [None] * rows
        self.length = torch.zeros(rows, dtype=torch.long, device="cpu")
        self._status = torch.zeros(rows, dtype=torch.uint8, device="cpu")  # all ended
        self._tokens = [torch.empty(0, dtype=torch.long, device="cpu")] * rows
        self._fields: list[dict[str, Any]] = [{}] * rows  # of the descriptions, without the tokens
        self._kept: list[list[Tensor]] = [[]] * rows  # what the descriptions point to
        self._size = native.struct_size("Row")
        self._described = ctypes.create_string_buffer(rows * self._size)

    @property
    def active(self) -> Tensor:
        """Whether each row is continued: [rows] bool."""
        return self._status == native.enum("RowStatus")["ACTIVE"]

    def start(self, row: int, state: "PlanState", drawing: Drawing) -> None:
        """Start a row, which is then continued from the logits that it has.

        Args:
            row: the number of the row.
            state: the state of one sequence; it is updated in place, or replaced by a larger one.
            drawing: how the row is continued.
        """
        sampling, key, limit, stops, seen, tells = drawing
        self.states[row] = state
        self.told[row] = native.floats(MOST_TOLD, self.logits.shape[1]) if tells else None
        ends = torch.tensor([len(ids) for ids in stops], dtype=torch.long, device="cpu").cumsum(0)
        stop = torch.tensor([token for ids in stops for token in ids], dtype=torch.long, device="cpu")
        self._tokens[row] = torch.empty(0, dtype=torch.long, device="cpu")
        self._kept[row] = [ends, stop, *([] if seen is None else [seen])]
        self._fields[row] = {
            "sampling": _fields(sampling, self.logits.shape[1]),
            "key": key,
            "limit": limit,
            "stops": len(stops),
            "stop": native.address(stop),
            "stop_end": native.address(ends),
            "seen": native.address(seen),
            "told": native.address(self.told[row]),
        }
        self.length[row], self._status[row] = 0, native.enum("RowStatus")["ACTIVE"]

    def draw(self, most: int) -> None:
        """Draw up to `most` tokens for each row that is continued, and read them.

        While a row keeps its logits, at most `MOST_TOLD` tokens are drawn.
        """
        active: list[int] = self.active.nonzero().flatten().tolist()
        if any(self.told[row] is not None for row in active):
            most = min(most, MOST_TOLD)
        length = self.length.tolist()
        for row in active:
            # A cache with room for more tokens than the row may get would be copied and doubled for nothing.
            left = self._fields[row]["limit"] - length[row]
            self.states[row] = self._with_room(self.states[row], min(most, left))
            self._describe(row, length[row] + most)
        sequences = self.plan.sequences(self.states)
        continuation = native.struct("Continuation")(
            rows=len(self.logits),
            most=most,
            row=ctypes.addressof(self._described),
            logits=native.address(self.logits),
            length=native.address(self.length),
            status=native.address(self._status),
        )
        native.call("decode_on", self.plan.described(sequences), continuation)

    def failed(self) -> list[int]:
        """Return the rows that ended because they could not go on; `reason` says why."""
        rows: list[int] = (self._status > native.enum("RowStatus")["ACTIVE"]).nonzero().flatten().tolist()
        return rows

    def reason(self, row: int) -> str:
        """Say why a row could not go on."""
        if int(self._status[row]) == native.enum("RowStatus")["NO_DISTRIBUTION"]:
            return f"logits of row {row} hold NaN, +inf or only -inf, but must define a distribution"
        state = self.states[row]
        return self.plan.too_long(1 if state is None else int(state.position) + 1)

    def _with_room(self, state: "PlanState | None", tokens: int) -> "PlanState":
        assert state is not None, "a row that was started has a state"
        return self.plan.with_room(state, min(tokens, self.plan.positions_left(state)))

    def _describe(self, row: int, tokens: int) -> None:
        """Describe a row to the kernel, with space for that many new tokens or as many as it may have."""
        fields, old = self._fields[row], self._tokens[row]
        if (needed := min(tokens, fields["limit"])) <= len(old):
            return
        # At least doubled, so that tokens are seldom copied; not the limit, which may exceed the memory.
        made = torch.empty(min(max(needed, 2 * len(old)), fields["limit"]), dtype=torch.long, device="cpu")
        made[: len(old)] = old
        self._tokens[row] = made
        described = native.struct("Row")(**fields, tokens=native.address(made))
        place = ctypes.addressof(self._described) + row * self._size
        ctypes.memmove(place, described, self._size)

    def pause(self, row: int, paused: bool) -> None:
        """Leave a row that has not ended as it is, or continue it again."""
        self._status[row] = native.enum("RowStatus")["ENDED" if paused else "ACTIVE"]

    def end(self, row: int, length: int) -> None:
        """End a row after the first `length` of its new tokens."""
        self.length[row], self._status[row] = length, native.enum("RowStatus")["ENDED"]

    def tokens(self, row: int) -> Tensor:
        """Return the new tokens of a row so far; they are not copied."""
        return self._tokens[row][: int(self.length[row])]


def _fields(sampling: Sampling, vocab_size: int) -> tuple[float, ...]:
    """Return the fields of the struct `Sampling`, in its order."""
    temperature, top_k, top_p, min_p, penalty = sampling
    top_k = vocab_size if top_k is None else min(top_k, vocab_size)
    return (temperature, 1.0 if top_p is None else top_p, 0.0 if min_p is None else min_p, penalty, top_k)
