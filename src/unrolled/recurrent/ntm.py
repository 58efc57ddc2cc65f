r"""Neural Turing Machine: a controller that reads and writes a memory of N rows through movable heads.

    controller      c_t = tanh(W_x x_t + W_r r_{t-1} + b)          or an LSTM's step on [x_t; r_{t-1}]
    content         u(i) = softmax_i(beta cos(k, M_{t-1}(i)))
    interpolate     w^g = g u + (1 - g) w_{t-1}
    shift           w'(i) = sum_j w^g(i - j mod N) s(j)            j = -R ... R
    sharpen         w_t(i) = w'(i)^gamma / sum_j w'(j)^gamma
    read            r_t = sum_i w_t(i) M_{t-1}(i)                  for each read head
    write           M_t = M_{t-1} * prod_h (1 - w_t e^T) + sum_h w_t a^T      all erases, then all adds
    output          y_t = W_y [c_t; r_t] + b_y

Each head has its own k, beta >= 0, 0 < g < 1, s (a softmax) and gamma >= 1, and each write head also has its
own e (a sigmoid) and a. A linear layer computes all of these from c_t. Graves, Wayne and Danihelka 2014,
"Neural Turing Machines", arXiv 1410.5401, eq. 2-9. The paper leaves the order within a step open: here all
heads address and read the memory before it is written. The memory is initialised to the constant 1e-6, which
trains more reliably than random or learned contents (Collier and Beel 2018, arXiv 1807.08518); every head
starts at row 0, and r_0 = 0.

No input can cause an overflow: beta is at most 50 and gamma at most 20, a is a tanh, norms have an epsilon
inside their roots, and powers are computed as softmax(gamma log w).

Cost, with C = controller_size, H heads and N rows W wide: time O(T (C (C + H W) + H N W)), sequentially; the
number of parameters does not depend on N; per generated token, time O(C (C + H W) + H N W) and a state of
O(N W + H N + C).
Cannot: run in parallel over the sequence.
Equals softmax attention: a head with g = 1, s = delta_0 and gamma = 1 is softmax attention over the rows,
with cosine scores of scale beta.
"""

import math
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.cosine import cosine_weights
from unrolled.ops.options import at_least
from unrolled.ops.precision import apply
from unrolled.recurrent._layer import RecurrentLayer
from unrolled.recurrent._lstm import lstm_step

Controller = Literal["feedforward", "lstm"]

INITIAL_MEMORY = 1e-6  # so small that its cosines are about 0: see `unrolled.ops.cosine.EPSILON`
LARGEST_BETA = 50.0  # cosines differ by up to 2: enough for a nearly one-hot softmax
LARGEST_GAMMA = 20.0
TINY = 1e-16  # added to weights under a logarithm


class NTMState(NamedTuple):
    """Memory and heads; the size never changes.

    `memory [B,N,W]`; `weights [B,heads,N]` of the read heads, then of the write heads; `reads
    [B,read_heads,W]`; `controller`, the state of the controller: empty if it is feed-forward, h and c
    `[B,controller_size]` if it is an LSTM.
    """

    memory: Tensor
    weights: Tensor
    reads: Tensor
    controller: tuple[Tensor, ...]


class NTMTrace(NamedTuple):
    """Weights of the heads: `read [B,T,read_heads,N]` and `write [B,T,write_heads,N]`, each summing to 1."""

    read: Tensor
    write: Tensor


def content(memory: Tensor, key: Tensor, beta: Tensor) -> Tensor:
    """Address `memory [B,N,W]` by `key [B,H,W]` and `beta [B,H,1]` (eq. 5, 6): weights `[B,H,N]`."""
    return cosine_weights(key, memory, beta.squeeze(-1))


def interpolate(found: Tensor, before: Tensor, gate: Tensor) -> Tensor:
    """Interpolate `found [B,H,N]` and `before` by `gate [B,H,1]` (eq. 7): g found + (1 - g) before."""
    return torch.lerp(before, found, gate)


def shift(weights: Tensor, moves: Tensor) -> Tensor:
    """Shift `weights [B,H,N]` cyclically by the distribution `moves [B,H,2R+1]` (eq. 8).

    Entry k of `moves` is the share that moves by k - R rows: the first by -R, the last by R.
    """
    n, reach = weights.shape[-1], moves.shape[-1] // 2
    if reach == 0:
        return weights * moves
    circle = torch.cat([weights[..., -reach:], weights, weights[..., :reach]], -1)
    moved = circle[..., 2 * reach :] * moves[..., :1]
    for k in range(1, 2 * reach + 1):
        start = 2 * reach - k
        moved = torch.addcmul(moved, circle[..., start : start + n], moves[..., k : k + 1])
    return moved


def sharpen(weights: Tensor, gamma: Tensor) -> Tensor:
    """Raise `weights [B,H,N]` to the power `gamma [B,H,1]` and normalise, as a softmax (eq. 9)."""
    return (gamma * (weights.clamp(min=0) + TINY).log()).softmax(-1)


def read(memory: Tensor, weights: Tensor) -> Tensor:
    """Read `memory [B,N,W]` by the heads' `weights [B,H,N]` (eq. 2): `[B,H,W]`."""
    return weights @ memory


def write(memory: Tensor, weights: Tensor, erase: Tensor, add: Tensor) -> Tensor:
    """Erase, then add, by the heads' `weights [B,H,N]`, `erase` and `add [B,H,W]` (eq. 3, 4)."""
    for w, e in zip(weights.unbind(1), erase.unbind(1), strict=True):
        memory = torch.addcmul(memory, memory * w.unsqueeze(-1), e.unsqueeze(1), value=-1)
    return torch.baddbmm(memory, weights.mT, add)


def feedforward(inputs: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a stateless controller: one layer."""
    return inputs.tanh(), ()


def lstm(inputs: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run an LSTM as controller, from the inputs `[B,4C]` of its gates i, f, g, o."""
    h, c = lstm_step(inputs, state[1])
    return h, (h, c)


CONTROLLERS = {"feedforward": feedforward, "lstm": lstm}


class NTM(RecurrentLayer[NTMState]):
    """A layer with a controller and a memory.

    All weights are initialised as in torch's linear layers.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs.
        controller: "feedforward" or "lstm".
        controller_size: width of the controller; `hidden_size` by default.
        memory_size: number N of rows. No parameter depends on it, so a layer with another number can load the
            weights.
        memory_width: width W of a row.
        read_heads, write_heads: numbers of heads.
        reach: largest shift R of a head in one step, in rows.

    Raises:
        ValueError: a size below 1, a `reach` below 0 or beyond the memory, or an unknown controller.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        controller: Controller = "lstm",
        controller_size: int | None = None,
        memory_size: int = 128,
        memory_width: int = 20,
        read_heads: int = 1,
        write_heads: int = 1,
        reach: int = 1,
    ):
        super().__init__(input_size, hidden_size)
        if controller not in get_args(Controller):
            raise ValueError(f"controller is {controller!r}, but must be one of {get_args(Controller)}")
        self.controller = controller
        self.controller_size = hidden_size if controller_size is None else controller_size
        self.memory_size, self.memory_width = memory_size, memory_width
        self.read_heads, self.write_heads, self.reach = read_heads, write_heads, reach
        for name in ("controller_size", "memory_size", "memory_width", "read_heads", "write_heads", "reach"):
            at_least(0 if name == "reach" else 1, name, getattr(self, name))
        if reach >= memory_size:
            raise ValueError(f"reach is {reach}, but must be below memory_size = {memory_size}")

        C, W, gates = self.controller_size, memory_width, 4 if controller == "lstm" else 1
        # Parameters of each head (k; beta, g, gamma; s), then those of each write head (e, a).
        self._head_sizes = [W, 1, 1, 1, 2 * reach + 1]
        n_addressing = (read_heads + write_heads) * sum(self._head_sizes)
        n_carried = read_heads * W + (C if controller == "lstm" else 0)
        self.input_proj = nn.Linear(input_size, gates * C)
        self.recurrent = nn.Parameter(torch.empty(gates * C, n_carried))
        self.head_proj = nn.Linear(C, n_addressing + write_heads * 2 * W)
        self.out_proj = nn.Linear(C + read_heads * W, hidden_size)
        nn.init.uniform_(self.recurrent, -1 / math.sqrt(n_carried), 1 / math.sqrt(n_carried))

    def init_state(self, batch_size: int) -> NTMState:
        """Make the state before the first token: constant memory, every head at row 0, reads of 0."""
        zeros = partial(self.recurrent.new_zeros, dtype=self._state_dtype)
        weights = zeros(batch_size, self.read_heads + self.write_heads, self.memory_size)
        weights[..., 0] = 1
        return NTMState(
            zeros(batch_size, self.memory_size, self.memory_width) + INITIAL_MEMORY,
            weights,
            zeros(batch_size, self.read_heads, self.memory_width),
            tuple(zeros(batch_size, self.controller_size) for _ in range(2 * (self.controller == "lstm"))),
        )

    def advance(self, inputs: Tensor, state: NTMState) -> tuple[Tensor, NTMState]:
        """Run one step."""
        both, state = self._turn(inputs, state)
        return self._output(both), state

    def scan(self, inputs: Tensor, state: NTMState, padding: Tensor | None) -> tuple[Tensor, NTMState]:
        """Run all steps, then compute all outputs in one product."""
        if not inputs.shape[1]:
            return super().scan(inputs, state, padding)
        both, state = self._unroll(self._turn, inputs, state, padding)
        return self._output(both), state

    def trace(self, x: Tensor) -> NTMTrace:
        """Run over `x [B,T,input_size]` from the initial state, and return the weights of all heads."""
        self._check_input("x", x, 3)
        state, places = self.init_state(x.shape[0]), []
        for x_t in x.unbind(1):
            _, state = self.step(x_t, state)
            places.append(state.weights)
        if not places:
            raise ValueError("x has length 0, but must have at least 1 step to trace")
        heads = torch.split(torch.stack(places, 1), [self.read_heads, self.write_heads], 2)
        return NTMTrace(*heads)

    def _turn(self, inputs: Tensor, state: NTMState) -> tuple[Tensor, NTMState]:
        """Run one step without the output layer: [c_t; r_t] and the new state."""
        dtype, R, W = inputs.dtype, self.read_heads, self.memory_width
        carried = torch.cat([state.reads.flatten(1), *state.controller[:1]], 1)
        gates = torch.addmm(inputs, carried, self.recurrent.to(dtype).mT)
        c, controller = CONTROLLERS[self.controller](gates, state.controller)
        outputs = apply(self.head_proj, c)

        B, heads, each = len(outputs), R + self.write_heads, sum(self._head_sizes)
        addressing, writing = outputs[:, : heads * each], outputs[:, heads * each :]
        key, beta, gate, gamma, moves = torch.split(addressing.reshape(B, heads, each), self._head_sizes, -1)
        erase, add = writing.reshape(B, self.write_heads, 2 * W).chunk(2, -1)
        found = content(state.memory, key, F.softplus(beta).clamp(max=LARGEST_BETA))
        weights = shift(interpolate(found, state.weights, gate.sigmoid()), moves.softmax(-1))
        weights = sharpen(weights, 1 + F.softplus(gamma).clamp(max=LARGEST_GAMMA - 1))

        reads = read(state.memory, weights[:, :R])
        memory = write(state.memory, weights[:, R:], erase.sigmoid(), add.tanh())
        return torch.cat([c, reads.flatten(1)], 1), NTMState(memory, weights, reads, controller)

    def _output(self, both: Tensor) -> Tensor:
        return apply(self.out_proj, both)
