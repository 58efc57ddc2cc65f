"""What the LSTMs share: everything but the recurrent product."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unrolled.recurrent._layer import RecurrentLayer, uniform, unroll


class LSTMState(NamedTuple):
    """What has been read so far: the last output `h` and the cell `c`, each `[B,hidden_size]`."""

    h: Tensor
    c: Tensor


class LSTMLayer(RecurrentLayer):
    """A layer of long short-term memory, whose subclass gives its `recurrence`.

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
        """Zeros."""
        size = (batch_size, self.hidden_size)
        zeros = self._weight.new_zeros(size, dtype=self._state_dtype)
        return LSTMState(zeros, zeros.clone())

    def project(self, x: Tensor) -> Tensor:
        """V x + b of the four gates, `[...,4 hidden_size]`."""
        return self.input_proj(x)  # type: ignore[no-any-return]

    def advance(self, inputs: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Go one step."""
        return _advance(self.recurrence(), inputs, state)

    def scan(self, inputs: Tensor, state: LSTMState, padding: Tensor | None) -> tuple[Tensor, LSTMState]:
        """Go all steps, with U prepared once for all."""
        if inputs.shape[1] == 0:
            return super().scan(inputs, state, padding)
        return unroll(partial(_advance, self.recurrence()), inputs, state, padding)


def _advance(recur: Callable[[Tensor], Tensor], inputs: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
    h, c = lstm_step(inputs + recur(state.h), state.c)
    return h, LSTMState(h, c)


def lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """h and c after one step, from the sums `[B,4N]` that go into its gates i, f, g and o."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
