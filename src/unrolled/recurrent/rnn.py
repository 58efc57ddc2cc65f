r"""The plain recurrent network of Elman: a state that is the output.

    h_t = tanh(U h_{t-1} + V x_t + b)

Elman 1990, "Finding structure in time", eq. of fig. 2, as in Jose et al. 2017, arXiv 1705.10142, eq. 1.

Cost, with N = hidden_size and P = input_size: time O(T N (N+P)), sequentially; N^2 + N P + N
parameters; per generated token time O(N (N+P)), state O(N).
Cannot: read the past except through its N numbers; run in parallel over the sequence, except for V x_t.
Equals softmax attention: never. It is `torch.nn.RNN` with the sum of its two biases.
"""

from typing import NamedTuple

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.recurrent._layer import RecurrentLayer, uniform
from unrolled.recurrent._torch import run


class RNNState(NamedTuple):
    """The state after the last token, `h [B,hidden_size]`."""

    h: Tensor


class RNN(RecurrentLayer[RNNState]):
    """A layer of Elman's cell; the arguments are those of `RecurrentLayer`.

    All weights are initialised uniformly in +-1/sqrt(hidden_size), as in torch.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(input_size, hidden_size)
        self.input_proj = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Parameter(torch.empty(hidden_size, hidden_size))
        uniform(self, hidden_size)

    def init_state(self, batch_size: int) -> RNNState:
        """Make zeros."""
        return RNNState(self._zeros(batch_size))

    def advance(self, inputs: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        """Run one step."""
        h = torch.tanh(inputs + F.linear(state.h, self.recurrent.to(state.h.dtype)))
        return h, RNNState(h)

    def fused(self, x: Tensor, state: RNNState) -> tuple[Tensor, RNNState] | None:
        """Run torch's kernel for all steps."""
        W, b = self.input_proj.weight, self.input_proj.bias
        return run(_VF.rnn_tanh, x, state, [W, self.recurrent, b, torch.zeros_like(b)])
