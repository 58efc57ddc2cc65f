r"""The plain recurrent network with a recurrent matrix of low rank: parameters no longer grow with N^2.

    h_t = tanh(A B^T h_{t-1} + V x_t + b)        A, B: N x r

Each step reads the state only through the r numbers B^T h; all N numbers are kept and output.

The baseline of Jose et al. 2017, arXiv 1705.10142; as a factorisation Denil et al. 2013, arXiv 1306.0543.

Cost, with N = hidden_size, P = input_size and r = rank: time O(T N (r+P)), sequentially;
2 N r + N P + N parameters; per generated token time O(N (r+P)), state N.
Cannot: run in parallel over the sequence, except for V x_t.
Equals softmax attention: never. It is `torch.nn.RNN` with weight_hh = A B^T. With r = N, A B^T can be any
matrix.
"""

import torch
from torch import Tensor, nn

from unrolled.recurrent._layer import RecurrentLayer, uniform
from unrolled.recurrent._low_rank import LowRank
from unrolled.recurrent.rnn import RNNState


class LowRankRNN(RecurrentLayer[RNNState]):
    """A layer of Elman's cell with U = A B^T.

    V and b are initialised as in torch's RNN, A and B so that the entries of U have the variance of torch's.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs, N.
        rank: r, from 1 to N.

    Raises:
        ValueError: a rank outside 1 .. N.
    """

    def __init__(self, input_size: int, hidden_size: int, *, rank: int = 8):
        super().__init__(input_size, hidden_size)
        self.input_proj = nn.Linear(input_size, hidden_size)
        uniform(self.input_proj, hidden_size)
        self.recurrent = LowRank(hidden_size, hidden_size, rank)

    def init_state(self, batch_size: int) -> RNNState:
        """Make zeros."""
        return RNNState(self._zeros(batch_size))

    def advance(self, inputs: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        """Run one step."""
        h = torch.tanh(inputs + self.recurrent(state.h))
        return h, RNNState(h)
