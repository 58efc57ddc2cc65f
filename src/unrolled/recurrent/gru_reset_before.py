r"""The gated recurrent unit as it was published: the reset gate acts before the recurrent product.

    r_t = sigmoid(W_r x_t + U_r h_{t-1} + b_r)
    z_t = sigmoid(W_z x_t + U_z h_{t-1} + b_z)
    n_t = tanh(W_n x_t + U_n (r_t * h_{t-1}) + b_n)
    h_t = (1 - z_t) * h_{t-1} + z_t * n_t

Cho et al. 2014, arXiv 1406.1078v3, eq. 5-8, with the update gate of Bahdanau et al. 2014, arXiv 1409.0473,
appendix A.1.1: z_t admits the new state. (In Cho et al. and in `torch.nn.GRU`, z_t keeps the old state;
negating the weights of z converts one form into the other.)

Cost, with N = hidden_size and P = input_size: time O(T N (N+P)), sequentially, with two products per step;
3 (N^2 + N P + N) parameters; per generated token time O(N (N+P)), state O(N).
Cannot: run in parallel over the sequence, except for W x_t; `torch.nn.GRU` cannot represent it.
Equals softmax attention: never. It is the GRU of Keras with reset_after=False and negated weights of z.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.recurrent._layer import RecurrentLayer, uniform
from unrolled.recurrent.gru import GRUState


class GRUResetBefore(RecurrentLayer[GRUState]):
    """A layer of the published gated recurrent unit; the arguments are those of `RecurrentLayer`.

    The rows of `input_proj` and `recurrent` are those of r, z and n; initial weights are as in `GRU`.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(input_size, hidden_size)
        self.input_proj = nn.Linear(input_size, 3 * hidden_size)
        self.recurrent = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        uniform(self, hidden_size)

    def init_state(self, batch_size: int) -> GRUState:
        """Make zeros."""
        return GRUState(self._zeros(batch_size))

    def advance(self, inputs: Tensor, state: GRUState) -> tuple[Tensor, GRUState]:
        """Run one step."""
        (h,), N = state, self.hidden_size
        U = self.recurrent.to(h.dtype)
        r, z = torch.sigmoid(inputs[..., : 2 * N] + F.linear(h, U[: 2 * N])).chunk(2, -1)
        n = torch.tanh(inputs[..., 2 * N :] + F.linear(r * h, U[2 * N :]))
        h = torch.lerp(h, n, z)
        return h, GRUState(h)
