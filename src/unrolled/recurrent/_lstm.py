"""The base of LSTM layers, without the recurrent product."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unrolled.recurrent._layer import RecurrentLayer, uniform


class LSTMState(NamedTuple):
    """The state after the last token: the output `h` and the cell `c`, each `[B,hidden_size]`."""

    h: Tensor
    c: Tensor


class LSTMLayer(RecurrentLayer[LSTMState]):
    """A layer of long short-term memory, whose subclass defines its `recurrence`.

    The rows of `input_proj`, and of U, are those of i, f, g and o, in this order.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(input_size, hidden_size)
        self.input_proj = nn.Linear(input_size, 4 * hidden_size)
        uniform(self.input_proj, hidden_size)

    def recurrence(self) -> Callable[[Tensor], Tensor]:
        """Return the function from h `[B,hidden_size]` to U h `[B,4 hidden_size]`."""
        raise NotImplementedError

    def init_state(self, batch_size: int) -> LSTMState:
        """Make zeros."""
        return LSTMState(self._zeros(batch_size), self._zeros(batch_size))

    def advance(self, inputs: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Run one step."""
        return _advance(self.recurrence(), inputs, state)

    def scan(self, inputs: Tensor, state: LSTMState, padding: Tensor | None) -> tuple[Tensor, LSTMState]:
        """Run all steps, with U prepared once for all."""
        return self._unroll(partial(_advance, self.recurrence()), inputs, state, padding)


def _advance(recur: Callable[[Tensor], Tensor], inputs: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
    h, c = lstm_step(inputs + recur(state.h), state.c)
    return h, LSTMState(h, c)


def lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c after one step, from the inputs `[B,4N]` of the gates i, f, g and o."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
