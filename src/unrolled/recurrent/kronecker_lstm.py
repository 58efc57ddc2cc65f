r"""KRU-LSTM: long short-term memory whose four recurrent matrices are Kronecker products of small factors.

    i_t, f_t, o_t = sigmoid(U_ifo h_{t-1} + V_ifo x_t + b_ifo)        g_t = tanh(U_g h_{t-1} + V_g x_t + b_g)
    c_t = f_t * c_{t-1} + i_t * g_t                                   h_t = o_t * tanh(c_t)
    U_i = W_i0 (x) ... (x) W_i,F-1        and likewise for f, g and o, with their own factors

Gates bound the gradients, so the factors need not be unitary, and all numbers are real.

Jose et al. 2017, "Kronecker Recurrent Units", arXiv 1705.10142.

Cost, with factors n_f x n_f, N = hidden_size and P = input_size: time O(T N (sum_f n_f + P)), sequentially; 4
sum_f n_f^2 parameters in U, 16 log2 N for factors of 2; per generated token time O(N (sum_f n_f + P)), state
2 N.
Cannot: run in parallel over the sequence, except for V x_t.
Equals softmax attention: never. With one factor it is `torch.nn.LSTM`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unrolled.recurrent._kronecker import factor_sizes, fuse, matvec
from unrolled.recurrent._lstm import LSTMLayer


class KroneckerLSTM(LSTMLayer):
    """A layer of KRU-LSTM.

    V and b are initialised as in torch's LSTM, the factors as random orthogonal matrices.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs, N.
        factors: the sizes n_f, whose product is N; by default the primes of N, the largest first.

    Raises:
        ValueError: factors that do not multiply to `hidden_size`.
    """

    def __init__(self, input_size: int, hidden_size: int, *, factors: Sequence[int] | None = None):
        super().__init__(input_size, hidden_size)
        sizes = factor_sizes(hidden_size, factors)
        self.factors = nn.ParameterList(nn.Parameter(torch.empty(4, n, n)) for n in sizes)
        for of_gates in self.factors:
            for W in of_gates:
                nn.init.orthogonal_(W)

    def recurrence(self) -> Callable[[Tensor], Tensor]:
        """Return h -> U h."""
        factors = fuse([W.to(self._state_dtype) for W in self.factors])
        return lambda h: matvec(factors, h.expand(4, *h.shape)).transpose(0, 1).flatten(1)
