r"""Long short-term memory: a cell state that gates add to and forget.

    i_t, f_t, o_t = sigmoid(U_ifo h_{t-1} + V_ifo x_t + b_ifo)        g_t = tanh(U_g h_{t-1} + V_g x_t + b_g)
    c_t = f_t * c_{t-1} + i_t * g_t                                   h_t = o_t * tanh(c_t)

Hochreiter & Schmidhuber 1997, "Long short-term memory", with the forget gate of Gers et al. 2000, "Learning
to forget", as in Jose et al. 2017, arXiv 1705.10142.

Cost, with N = hidden_size and P = input_size: time O(T N (N+P)), sequentially; 4 (N^2 + N P + N)
parameters; per generated token time O(N (N+P)), state 2 N.
Cannot: run in parallel over the sequence, except for V x_t.
Equals softmax attention: never. It is `torch.nn.LSTM`, whose biases are each a sum of two.
"""

from collections.abc import Callable

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.recurrent._layer import uniform
from unrolled.recurrent._lstm import LSTMLayer, LSTMState
from unrolled.recurrent._torch import run


class LSTM(LSTMLayer):
    """A layer of long short-term memory; the arguments are those of `RecurrentLayer`.

    All weights are initialised uniformly in +-1/sqrt(hidden_size), as in torch.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(input_size, hidden_size)
        self.recurrent = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        uniform(self, hidden_size)

    def recurrence(self) -> Callable[[Tensor], Tensor]:
        """Return h -> U h."""
        U = self.recurrent.to(self._state_dtype)
        return lambda h: F.linear(h, U)

    def fused(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState] | None:
        """Run torch's kernel for all steps."""
        W, b = self.input_proj.weight, self.input_proj.bias
        return run(_VF.lstm, x, state, [W, self.recurrent, b, torch.zeros_like(b)])
