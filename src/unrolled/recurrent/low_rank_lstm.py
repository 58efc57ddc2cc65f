r"""Long short-term memory with a recurrent matrix of low rank: parameters no longer grow with N^2.

    i_t, f_t, o_t = sigmoid(A_ifo p_{t-1} + V_ifo x_t + b_ifo)        g_t = tanh(A_g p_{t-1} + V_g x_t + b_g)
    c_t = f_t * c_{t-1} + i_t * g_t                                   h_t = o_t * tanh(c_t)
    p_t = B^T h_t        A: 4 N x r, B: N x r

The four gates read the last output through the same r numbers p, so U = A B^T; all N numbers of h are output.

Sak et al. 2014, "Long short-term memory based recurrent neural network architectures", arXiv 1402.1128
(where layers output p), and the baseline of Jose et al. 2017, arXiv 1705.10142.

Cost, with N = hidden_size, P = input_size and r = rank: time O(T N (r+P)), sequentially;
5 N r + 4 N P + 4 N parameters; per generated token time O(N (r+P)), state 2 N.
Cannot: run in parallel over the sequence, except for V x_t.
Equals softmax attention: never. p is the output of `torch.nn.LSTM` with proj_size = r. With r = N, the cell
can be any LSTM.
"""

from collections.abc import Callable

from torch import Tensor

from unrolled.recurrent._low_rank import LowRank
from unrolled.recurrent._lstm import LSTMLayer


class LowRankLSTM(LSTMLayer):
    """A layer of long short-term memory with U = A B^T; arguments and initial weights as in `LowRankRNN`."""

    def __init__(self, input_size: int, hidden_size: int, *, rank: int = 8):
        super().__init__(input_size, hidden_size)
        self.recurrent = LowRank(4 * hidden_size, hidden_size, rank)

    def recurrence(self) -> Callable[[Tensor], Tensor]:
        """Return h -> U h."""
        return self.recurrent
