"""Models that no plan can run: the model itself reads and continues each sequence, one at a time.

So the results of a sequence do not depend, bit for bit, on other sequences.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unrolled.contract import Recurrent
from unrolled.decode.batch import MOST_TOLD, Drawing
from unrolled.decode.request import Sampling
from unrolled.generation import sampling as drawing
from unrolled.generation.engine import filtered
from unrolled.models.language_model import keeping
from unrolled.models.limits import n_positions
from unrolled.ops.state import leaves, map_tensors, nbytes
from unrolled.serving.runner import Wanted, check_names

MEASURED = 255  # tokens; states of blocks are largest just before a multiple of the block


class ModelRunner:
    """Runs a model, which must be in evaluation mode, on a CPU.

    Args:
        model: the model, in evaluation mode.
    """

    def __init__(self, model: Recurrent) -> None:
        self.model, self.vocab_size = model, int(model.config.vocab_size)
        self.n_positions = n_positions(model)
        most = min(MEASURED, self.n_positions or MEASURED)
        self._lengths = (max(most // 2, 1), most)
        self._sizes = [nbytes(self._after(n)) for n in self._lengths]

    def rows(self, count: int) -> "ModelRows":
        """Make `count` rows, all idle."""
        return ModelRows(self.model, count, self.vocab_size)

    def empty(self) -> Any:
        """The state of a sequence before its first token."""
        return self.model.init_state(1)

    def copy(self, state: Any, tokens: int) -> Any:
        """Return the state itself, since models do not change states in place."""
        return state

    def mark(self, state: Any) -> Any:
        """Return the state itself, since models do not change states in place."""
        return state

    def back(self, mark: Any) -> Any:
        """Return the state that was noted."""
        return mark

    def read(self, tokens: Tensor, state: Any, wanted: Wanted) -> tuple[Tensor, Any]:
        """Read tokens [n]; see `unrolled.serving.runner.Runner.read`."""
        count = {"none": 0, "last": 1, "all": len(tokens)}[wanted]
        if len(tokens) == 1:  # rounded like tokens that are drawn
            logits, state = self.model.step(tokens, state)
        else:
            kept = keeping(self.model, max(count, 1))
            of_one, state = self.model.prefill(tokens.unsqueeze(0), state, **kept)
            logits = of_one[0]
        return logits[len(logits) - count :].float(), state

    def nbytes(self, tokens: int) -> int:
        """Bytes of the state after `tokens` tokens, estimated from the sizes after 127 and 255 tokens."""
        (short, long), (least, most) = self._lengths, self._sizes
        return most + (tokens - long) * (most - least) // max(long - short, 1)

    def tensors(self, state: Any) -> dict[str, Tensor]:
        """Return the tensors of a state by name."""
        # An axis of size 1 may have any stride; the contiguous format gives it the one that its bytes need.
        return {
            name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in leaves(state).items()
        }

    def state(self, tensors: Mapping[str, Tensor], tokens: int) -> Any:
        """Make the state after `tokens` tokens from what the method `tensors` returned."""
        like = self.model.init_state(1)
        expected = leaves(like)
        check_names(tensors, expected)
        for name, x in tensors.items():
            if name.split(".")[-1] == "position" and not (x.numel() == 1 and x.item() == tokens):
                raise ValueError(f"{name} of the state must be {tokens}, its number of tokens")
        if (size := sum(x.nbytes for x in tensors.values())) > (most := self.nbytes(tokens + MEASURED)):
            raise ValueError(f"the state has {size:,} bytes, but one of {tokens:,} tokens at most {most:,}")
        in_order = iter([tensors[name].clone() for name in expected])
        state = map_tensors(lambda _: next(in_order), like)
        if self.n_positions is None or tokens < self.n_positions:
            self._check(state)
        return state

    @torch.no_grad()
    def _check(self, state: Any) -> None:
        """Read a token, for the layers check shapes and dtypes when they read; the state stays as it is."""
        try:
            self.model.step(torch.zeros(1, dtype=torch.long), state)
        except Exception as error:  # of any type: a client may have sent anything
            raise ValueError(f"the state does not fit the model: {error}") from error

    def _after(self, tokens: int) -> Any:
        """The state after `tokens` zeros, whose shapes are those of any sequence of this length."""
        _, state = self.model.prefill(torch.zeros(1, tokens, dtype=torch.long), self.model.init_state(1))
        return state


class ModelRows:
    """Rows that are continued one after another; see `unrolled.decode.batch.Batch`."""

    def __init__(self, model: Recurrent, count: int, vocab_size: int) -> None:
        self._model = model
        self.logits = torch.empty(count, vocab_size)
        self.length = torch.zeros(count, dtype=torch.long)
        self.active = torch.zeros(count, dtype=torch.bool)
        self.states: list[Any] = [None] * count
        self.told: list[Tensor | None] = [None] * count
        self._drawings = [Drawing(Sampling(), 0, 0, [])] * count
        self._drawn: list[list[int]] = [[] for _ in range(count)]
        self._failed: dict[int, str] = {}

    def start(self, row: int, state: Any, drawing: Drawing) -> None:
        """Continue a sequence in a row, from the logits of this row."""
        self._failed.pop(row, None)
        self.states[row], self._drawings[row] = state, drawing
        self.told[row] = torch.empty(MOST_TOLD, self.logits.shape[1]) if drawing.tells else None
        self._drawn[row], self.length[row], self.active[row] = [], 0, True

    def draw(self, most: int) -> None:
        """Draw up to `most` tokens for each active row."""
        rows: list[int] = self.active.nonzero().flatten().tolist()
        if any(self.told[row] is not None for row in rows):
            most = min(most, MOST_TOLD)
        for step in range(most):
            for row in rows:
                if self.active[row]:
                    self._draw_one(row, step)

    def pause(self, row: int, paused: bool) -> None:
        """Leave a row that has not ended as it is, or continue it again."""
        self.active[row] = not paused

    def end(self, row: int, length: int) -> None:
        """End a row after `length` of its new tokens."""
        self.length[row], self.active[row] = length, False

    def tokens(self, row: int) -> Tensor:
        """Return the new tokens of a row so far."""
        return torch.tensor(self._drawn[row][: int(self.length[row])], dtype=torch.long)

    def failed(self) -> list[int]:
        """Return the rows that ended because they could not be continued."""
        return sorted(self._failed)

    def reason(self, row: int) -> str:
        """Return why a row could not be continued."""
        return self._failed[row]

    def _draw_one(self, row: int, step: int) -> None:
        options, key, limit, stops, seen, _ = self._drawings[row]
        drawn, told = self._drawn[row], self.told[row]
        logits = self.logits[row : row + 1]
        if told is not None:
            told[step] = logits[0]
        of_row = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen.bool().unsqueeze(0)
        try:
            draw = drawing.uniform(key, len(drawn))
            token = drawing.sample(filtered(logits, of_row, options), [draw])
            drawn.append(int(token))
            self.length[row] = len(drawn)
            if seen is not None:
                seen[token] = 1
            if len(drawn) == limit or any(drawn[-len(ids) :] == ids for ids in stops):
                self.active[row] = False
                return
            logits, self.states[row] = self._model.step(token, self.states[row])
        except ValueError as error:
            self._failed[row], self.active[row] = str(error), False
            return
        self.logits[row] = logits[0].float()
