"""Runners, which read tokens and continue sequences for the engine; only they know what is in a state."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unrolled.decode import Plan, PlanState
from unrolled.decode.batch import Batch, Drawing
from unrolled.decode.memory import Mark
from unrolled.ops import native

Wanted = Literal["none", "last", "all"]


class Rows(Protocol):
    """Rows of sequences that are continued together; see `unrolled.decode.batch.Batch`."""

    logits: Tensor
    length: Tensor
    states: list[Any]
    told: list[Tensor | None]

    @property
    def active(self) -> Tensor:
        """Whether each row is continued: [rows] bool."""

    def start(self, row: int, state: Any, drawing: Drawing) -> None:
        """Continue a sequence in a row, from the logits of this row."""

    def draw(self, most: int) -> None:
        """Draw up to `most` tokens for each active row; the last token of a row that ends is not read."""

    def pause(self, row: int, paused: bool) -> None:
        """Leave a row that has not ended as it is, or continue it again."""

    def end(self, row: int, length: int) -> None:
        """End a row after `length` of its new tokens."""

    def tokens(self, row: int) -> Tensor:
        """Return the new tokens of a row so far."""

    def failed(self) -> list[int]:
        """Return the rows that ended because they could not be continued."""

    def reason(self, row: int) -> str:
        """Return why a row could not be continued."""


class Runner(Protocol):
    """Reads tokens of one sequence at a time, and continues many sequences together.

    Attributes:
        vocab_size: number of tokens that can be drawn.
        n_positions: maximum number of tokens of a sequence; None for any number.
    """

    vocab_size: int
    n_positions: int | None

    def rows(self, count: int) -> Rows:
        """Make `count` rows, all idle."""

    def empty(self) -> Any:
        """The state of a sequence before its first token."""

    def copy(self, state: Any, tokens: int) -> Any:
        """Copy a state, with room for `tokens` tokens in all."""

    def mark(self, state: Any) -> Any:
        """Note a state, for `back`."""

    def back(self, mark: Any) -> Any:
        """Return a state as it was when it was noted, though more tokens may have been read since."""

    def read(self, tokens: Tensor, state: Any, wanted: Wanted) -> tuple[Tensor, Any]:
        """Read tokens [n]; `state` must not be used again.

        Returns:
            The logits in fp32 after no token [0, vocab_size], after the last token [1, vocab_size] or after
            each token [n, vocab_size], as `wanted` says; and the new state.
        """

    def nbytes(self, tokens: int) -> int:
        """Bytes of the state of a sequence with room for `tokens` tokens."""

    def tensors(self, state: Any) -> dict[str, Tensor]:
        """Return a copy of a state as tensors by name, without room for more tokens."""

    def state(self, tensors: Mapping[str, Tensor], tokens: int) -> Any:
        """Make the state after `tokens` tokens from what the method `tensors` returned.

        Raises:
            ValueError: the tensors do not fit the model.
        """


class PlanRunner:
    """Runs a plan.

    Args:
        plan: the model with packed weights.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.vocab_size = plan, plan.config.vocab_size
        self.n_positions = plan.n_positions

    def rows(self, count: int) -> Batch:
        """Make `count` rows, all idle."""
        return Batch(self.plan, native.floats(count, self.vocab_size))

    def empty(self) -> PlanState:
        """The state of a sequence before its first token."""
        return self.plan.init_state(1)

    def copy(self, state: PlanState, tokens: int) -> PlanState:
        """Copy a state, with room for `tokens` tokens in all."""
        return self.plan.resized(state, tokens)

    def mark(self, state: PlanState) -> Mark:
        """Note a state, for `back`."""
        return self.plan.mark(state)

    def back(self, mark: Mark) -> PlanState:
        """Return a state as it was when it was noted."""
        return self.plan.back(mark)

    def read(self, tokens: Tensor, state: PlanState, wanted: Wanted) -> tuple[Tensor, PlanState]:
        """Read tokens [n]; see `Runner.read`."""
        n = len(tokens)
        count = {"none": 0, "last": 1, "all": n}[wanted]
        logits = native.floats(count, self.vocab_size)
        state = self.plan.with_room(state, n)
        places = torch.arange(count - n, count, device="cpu").clamp(min=-1)
        self.plan.read(tokens, torch.zeros_like(tokens), places, [state], logits)
        return logits, state

    def nbytes(self, tokens: int) -> int:
        """Bytes of the state of a sequence with room for `tokens` tokens."""
        return self.plan.state_bytes(tokens)

    def tensors(self, state: PlanState) -> dict[str, Tensor]:
        """Return a copy of a state as tensors by name, without the number of tokens."""
        trimmed = self.plan.resized(state, 0)
        return {"fixed": trimmed.fixed, "cache": trimmed.cache}

    def state(self, tensors: Mapping[str, Tensor], tokens: int) -> PlanState:
        """Make the state after `tokens` tokens from what the method `tensors` returned."""
        # Checked first: a client may have sent any number of tokens, which could take all memory.
        found, expected = 8 + sum(x.nbytes for x in tensors.values()), self.plan.state_bytes(tokens)
        if found != expected:
            raise ValueError(f"the state has {found} bytes, but must have {expected} after {tokens} tokens")
        like = self.plan.resized(self.plan.init_state(1), tokens)
        check_like(tensors, {"fixed": like.fixed, "cache": like.cache})
        return PlanState(
            torch.tensor([tokens], device="cpu"), tensors["fixed"].clone(), tensors["cache"].clone()
        )


def check_names(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check the names of the tensors of a state.

    Raises:
        ValueError: the names differ.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"the state has the tensors {sorted(found)}, but must have {sorted(expected)}")


def check_like(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check the tensors of a state.

    Raises:
        ValueError: the names, shapes or dtypes differ.
    """
    check_names(found, expected)
    for name, x in expected.items():
        if found[name].shape != x.shape or found[name].dtype != x.dtype:
            raise ValueError(
                f"{name} of the state is {found[name].dtype} {list(found[name].shape)}, "
                f"but must be {x.dtype} {list(x.shape)}"
            )
