"""Launches of the Triton kernels of the delta rule: block sizes, grids and scratch memory."""

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.delta import triton_backward as backward_kernels
from unrolled.ops.delta import triton_kernels as kernels
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.linear import chunked as linear
from unrolled.ops.linear import triton_launch as linear_launch
from unrolled.ops.linear.triton_launch import Config
from unrolled.ops.triton.launch import block, blocks, launch, with_strides

INVERTED = 16  # tokens of the blocks in which systems are inverted, the fewest that tensor cores multiply
CONFIGS_OF_16_BITS = (  # queries and keys of 16 bits, and values of fp32
    linear_launch.CONFIGS[0],
    Config(width=64, chunk=64, block=64, columns=64, inner=32, warps=8, sum_warps=4, stages=2),
    linear_launch.CONFIGS_OF_16_BITS[-1],
)
CONFIGS_OF_16_BITS_FROM_MEMORY = (
    linear_launch.CONFIGS[0],
    Config(width=64, chunk=64, block=64, columns=64, inner=64, warps=4, sum_warps=4, stages=1),
    linear_launch.CONFIGS_OF_16_BITS[-1],
)
SCAN_WARPS, SCAN_ROWS = 4, 64  # the state of a scan is in registers, in tiles of 64 key features


class Corrections(NamedTuple):
    """The solved systems of all chunks, in fp32."""

    inverses: Tensor  # (I + A)^-1 [slots,G,C,C]
    u: Tensor  # [B,T,G,M]
    w: Tensor  # [B,T,G,R]
    to_end: Tensor | None  # e^(L_C - L) [B,T,G]
    through: Tensor | None  # e^(L_C) [slots,G]


class Problem(linear_launch.Problem):
    """Gated linear attention whose values are the corrections N, and the launches that compute N."""

    def __init__(self, inputs: Inputs, cu_seqlens: Tensor | None):
        q, k, v, beta, log_decay, state = inputs
        options = linear.Options(cu_seqlens, causal=True, normalize=False)
        super().__init__(linear.Inputs(q, k, v, log_decay, None, None), options)
        self.beta, self.state = with_strides(beta), state
        configs = linear_launch.CONFIGS_FROM_MEMORY if self.from_memory else linear_launch.CONFIGS
        config = linear_launch.config_for(configs, self.R, self.M)._replace(stages=1)
        self.of_systems = linear_launch.options_of(config, self.R, self.M)
        self.tensors = *self.k, *self.v, *self.beta, *self.gates

    def _configs(self) -> tuple[Config, ...]:
        if self.inputs.q.dtype == torch.float32:
            return super()._configs()
        return CONFIGS_OF_16_BITS_FROM_MEMORY if self.from_memory else CONFIGS_OF_16_BITS

    def with_values(self, n: Tensor) -> "Problem":
        """Return the problem of linear attention with these values."""
        other = copy(self)
        other.v = with_strides(n)
        return other

    def corrections(self) -> Corrections:
        """Solve the triangular systems."""
        tokens, gated, C = (self.B, self.T, self.G), self.gates[0] is not None, self.chunk
        found = Corrections(
            self._scratch(self.keys.n, self.G, C, C),
            self._scratch(*tokens, self.M),
            self._scratch(*tokens, self.R),
            self._scratch(*tokens) if gated else None,
            self._scratch(self.keys.n, self.G) if gated else None,
        )
        grid, slots = (self.keys.n, self.G), (*self.keys[1:], self.G)
        systems = *self.k, *self.beta, *self.gates, found.inverses
        sizes = {"R": self.R, "C": C, "BR": self.of_systems["BR"], "S": INVERTED}
        levels = INVERTED.bit_length() - 1
        launch(kernels.inverses, grid, *systems, *slots, **sizes, LEVELS=levels, num_warps=1, num_stages=1)
        launch(kernels.corrections, grid, *self.tensors, *found, *slots, **self.of_systems)
        return found

    def scan_corrections(self, found: Corrections, n: Tensor) -> tuple[Tensor, Tensor]:
        """Fill `n [B,T,G,M]`, which may be U; return the states before the chunks, and the last states."""
        states = self._scratch(self.keys.n, self.G, self.R * self.M + self.R)
        states[..., self.R * self.M :] = 0  # linear attention's sum of keys, which the delta rule lacks
        after = self.state.new_empty(self.state.shape)
        tensors = (found.w, found.u, n, found.to_end, found.through, *with_strides(self.state))
        sizes = {"columns": 16, "stages": 3} if self.from_memory else {"columns": 32, "stages": 2}
        self._walk(kernels.scan, *tensors, states, after, **sizes)
        return states, after

    def scan_back(
        self, found: Corrections, d_n: Tensor, d_states: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Complete the gradients of N and of the states in place, given what the outputs add to them.

        Returns:
            the gradients of the states after the chunks, and of the first states.
        """
        d_first = self.state.new_empty(self.state.shape)
        tensors = (found.w, d_n, found.to_end, found.through, *with_strides(last))
        self._walk(backward_kernels.scan_back, *tensors, d_states, d_first, columns=32, stages=2)
        return d_states, d_first

    def _walk(self, kernel: object, *tensors: object, columns: int, stages: int) -> None:
        rows = block(self.R, SCAN_ROWS)
        tiles = blocks(self.R, rows)
        BM = block(self.M, columns if tiles <= 2 else 16)
        sizes = {"R": self.R, "M": self.M, "C": self.chunk, "ROWS": rows, "TILES": tiles, "BM": BM}
        _, length, chunks, cu_seqlens, _ = self.keys
        launch(
            kernel,
            (self.sequences * self.G, blocks(self.M, BM)),
            *(*self.k, *tensors, length, chunks, cu_seqlens, self.G),
            **sizes,
            num_warps=SCAN_WARPS,
            num_stages=stages if tiles == 1 else 1,
        )

    def correction_gradients(
        self, found: Corrections, d_n: Tensor, states: Tensor, d_reads: Tensor | None, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute dv and dbeta, add to d_reads, and prepare `found` for `add_key_gradients`."""
        dv, d_beta = self.inputs.v.new_empty(self.inputs.v.shape), beta.new_empty(beta.shape)
        arguments = (*self.tensors, found.u, found.w, d_n, states, found.inverses, d_reads, dv, d_beta)
        sizes = (*self.keys[1:], self.G, self.P)
        kernel = backward_kernels.correction_gradients
        launch(kernel, (self.keys.n, self.G), *arguments, *sizes, **self.of_systems)
        return dv, d_beta

    def add_key_gradients(self, found: Corrections, d_read: Tensor) -> Tensor:
        """Return dk: `d_read`, the gradient through outputs and states in fp32, plus that of the systems."""
        dk = self.inputs.k.new_empty(self.inputs.k.shape)
        arguments = (*self.k, *self.beta, *self.gates, found.w, found.inverses, d_read, dk)
        grid = self.keys.n, self.G, blocks(self.R, self.of_systems["BR"])
        launch(backward_kernels.key_gradients, grid, *arguments, *self.keys[1:], self.G, **self.of_systems)
        return dk
