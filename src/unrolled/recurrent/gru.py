r"""The gated recurrent unit as torch and cuDNN have it: the reset gate acts after the recurrent product.

    r_t = sigmoid(W_r x_t + U_r h_{t-1} + b_r)
    z_t = sigmoid(W_z x_t + U_z h_{t-1} + b_z)
    n_t = tanh(W_n x_t + b_n + r_t * (U_n h_{t-1} + c))
    h_t = (1 - z_t) * n_t + z_t * h_{t-1}

Cho et al. 2014, arXiv 1406.1078v1. With this form of the reset gate one matrix product serves all three
gates. Here z_t keeps the old state, as in Cho et al.; in `gru_reset_before`, it admits the new one, as in
Bahdanau et al. 2014.

Cost, with N = hidden_size and P = input_size: time O(T N (N+P)), sequentially; 3 (N^2 + N P + N) + N
parameters; per generated token time O(N (N+P)), state O(N).
Cannot: represent the cell whose reset gate acts before the product, with any weights; run in parallel over
the sequence, except for W x_t.
Equals softmax attention: never. It is `torch.nn.GRU`, whose biases of r and z are each a sum of two.
"""

from typing import NamedTuple

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.recurrent._layer import RecurrentLayer, uniform
from unrolled.recurrent._torch import run


class GRUState(NamedTuple):
    """The state after the last token, `h [B,hidden_size]`."""

    h: Tensor


class GRU(RecurrentLayer[GRUState]):
    """A layer of gated recurrent units; the arguments are those of `RecurrentLayer`.

    The rows of `input_proj` and `recurrent` are those of r, z and n, and all weights are initialised
    uniformly in +-1/sqrt(hidden_size), both as in torch.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(input_size, hidden_size)
        self.input_proj = nn.Linear(input_size, 3 * hidden_size)
        self.recurrent = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.recurrent_bias = nn.Parameter(torch.empty(hidden_size))  # c; those of r and z are in input_proj
        uniform(self, hidden_size)

    def init_state(self, batch_size: int) -> GRUState:
        """Make zeros."""
        return GRUState(self._zeros(batch_size))

    def advance(self, inputs: Tensor, state: GRUState) -> tuple[Tensor, GRUState]:
        """Run one step."""
        (h,), N = state, self.hidden_size
        recurrent = F.linear(h, self.recurrent.to(h.dtype))
        r, z = torch.sigmoid(inputs[..., : 2 * N] + recurrent[..., : 2 * N]).chunk(2, -1)
        n = torch.tanh(inputs[..., 2 * N :] + r * (recurrent[..., 2 * N :] + self.recurrent_bias.to(h.dtype)))
        h = torch.lerp(n, h, z)
        return h, GRUState(h)

    def fused(self, x: Tensor, state: GRUState) -> tuple[Tensor, GRUState] | None:
        """Run torch's kernel for all steps."""
        recurrent_bias = F.pad(self.recurrent_bias, (2 * self.hidden_size, 0))
        weights = [self.input_proj.weight, self.recurrent, self.input_proj.bias, recurrent_bias]
        return run(_VF.gru, x, state, weights)
