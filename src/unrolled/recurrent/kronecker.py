r"""Kronecker recurrent units: a complex state and a recurrent matrix that is a product of small factors.

    h_t = phi(U h_{t-1} + V x_t + b)        U = W_0 (x) ... (x) W_{F-1}        phi(z) = tanh(|z|) z / |z|

The N = hidden_size / 2 units are complex, and so are U, V and b. Real orthogonal matrices form two separate
sets (determinant 1 and -1), and training cannot move from one to the other. Unitary matrices form one set.
phi keeps the phase, is bounded, and is tanh for real numbers. The factors are initially unitary, and so is U;
`unitary_penalty` keeps them close to unitary.

Jose et al. 2017, "Kronecker Recurrent Units", arXiv 1705.10142.

Cost, with factors n_f x n_f and P = input_size: time O(T N sum_f n_f) for U, O(T N P) for V x_t,
sequentially; 2 sum_f n_f^2 real parameters in U, which is 8 log2 N for factors of 2 and 2 N^2 for one
factor; per generated token time O(N (sum_f n_f + P)), state 2 N numbers.
Cannot: run in parallel over the sequence, except for V x_t; run in half precision, which has no complex
numbers (U and the state are then fp32).
Equals softmax attention: never. With one factor and real numbers it is `torch.nn.RNN`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unrolled.recurrent._kronecker import factor_sizes, fuse, matvec
from unrolled.recurrent._layer import RecurrentLayer, uniform


class KroneckerState(NamedTuple):
    """The last output, `h [B,hidden_size]`: first the real parts of all units, then the imaginary parts."""

    h: Tensor


class KroneckerRNN(RecurrentLayer[KroneckerState]):
    """A layer of Kronecker recurrent units.

    Its output is the real parts of all units, then their imaginary parts. V and b are initialised uniformly
    in +-1/sqrt(N), the factors as random unitary matrices.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs, 2 N.
        factors: the sizes n_f, whose product is N; by default the primes of N, the largest first.

    Raises:
        ValueError: an odd `hidden_size`, or factors that do not multiply to half of it.
    """

    def __init__(self, input_size: int, hidden_size: int, *, factors: Sequence[int] | None = None):
        super().__init__(input_size, hidden_size)
        if hidden_size % 2:
            raise ValueError(f"hidden_size is {hidden_size}, but must be even: a real and an imaginary part")
        self.input_proj = nn.Linear(input_size, hidden_size)
        uniform(self.input_proj, hidden_size // 2)
        sizes = factor_sizes(hidden_size // 2, factors)
        self.factors = nn.ParameterList(nn.Parameter(torch.view_as_real(_unitary(n))) for n in sizes)

    def init_state(self, batch_size: int) -> KroneckerState:
        """Make zeros."""
        return KroneckerState(self._zeros(batch_size))

    def advance(self, inputs: Tensor, state: KroneckerState) -> tuple[Tensor, KroneckerState]:
        """Run one step."""
        return _advance(self._fused_factors(), inputs, state)

    def scan(
        self, inputs: Tensor, state: KroneckerState, padding: Tensor | None
    ) -> tuple[Tensor, KroneckerState]:
        """Run all steps, with the factors fused once for all."""
        return self._unroll(partial(_advance, self._fused_factors()), inputs, state, padding)

    def unitary_penalty(self) -> Tensor:
        """sum_f ||W_f^H W_f - I||^2 (Frobenius), a real number to add to a loss, times a weight.

        Where it is 0, all factors and U are unitary, and the recurrent product preserves the norm of a state.
        """
        penalties = []
        for W in self._factors():
            square = W.mH @ W
            error = torch.view_as_real(square - torch.eye(W.shape[-1], dtype=W.dtype, device=W.device))
            penalties.append(error.square().sum())
        return torch.stack(penalties).sum()

    def _factors(self) -> list[Tensor]:
        return [torch.view_as_complex(W.to(self._state_dtype)) for W in self.factors]

    def _fused_factors(self) -> list[Tensor]:
        return fuse([W.unsqueeze(0) for W in self._factors()])


def _advance(factors: list[Tensor], inputs: Tensor, state: KroneckerState) -> tuple[Tensor, KroneckerState]:
    h = torch.complex(*state.h.chunk(2, -1))
    Uh = matvec(factors, h.unsqueeze(0))[0]
    z = inputs + torch.cat([Uh.real, Uh.imag], -1)
    real, imag = z.chunk(2, -1)
    modulus = torch.hypot(real, torch.hypot(imag, imag.new_tensor(1e-6)))  # at 0, hypot has no gradient
    h = z * (torch.tanh(modulus) / modulus).repeat(1, 2)
    return h, KroneckerState(h)


def _unitary(n: int) -> Tensor:
    """Draw a unitary matrix uniformly: the Q of a complex Gaussian, with the phases of R's diagonal.

    The computation is in fp64, so that the only error of the fp32 result is its rounding.
    """
    Q, R = torch.linalg.qr(torch.randn(n, n, dtype=torch.complex64).to(torch.complex128))
    unitary: Tensor = Q * R.diagonal().sgn()
    return unitary.to(torch.complex64)
