"""Launches of the Triton kernels of linear attention with a gate for every feature: blocks and grids."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.gla import triton_backward as backward_kernels
from unrolled.ops.gla import triton_kernels as kernels
from unrolled.ops.gla.packed import Inputs
from unrolled.ops.triton.launch import (
    Slots,
    block,
    blocks,
    launch,
    multiplies_from_memory,
    recording,
    with_strides,
)

CHUNK = 64
LEVELS = CHUNK.bit_length() - 1
BLOCK = 64  # features or values at a time
SMALL_BLOCK = 32  # the same for fp32, and for features before Hopper: more do not fit into registers
FEATURES, FEATURES_FROM_MEMORY = 16, 32  # of a program of `feature_gradients`, before Hopper and from it on
WARPS, STAGES = 4, 2
SCAN_BLOCK, SCAN_WARPS, SCAN_STAGES = 256, 2, 4


class Squares(NamedTuple):
    """Constant matrices with a row and a column for each token of a chunk.

    At level l, a chunk is cut in the middle of each block of 2^(l + 1) tokens.
    """

    chosen: Tensor
    """bf16, [levels + 2, C, C]: [l, i, t] is 1 where gate t lies between token i and the cut of its block.

    The last two are not of cuts: 1 where gate t comes after token i, and where t <= i.
    """
    parted: Tensor
    """int16, [levels, C, C]: [l, i, j] is -1, all bits, where the cut of a block lies between i and j."""


def squares(device: torch.device) -> Squares:
    """Return the matrices for chunks of CHUNK tokens.

    They are made once, but not while a CUDA graph is recorded: what is made then belongs to the graph.
    """
    return _squares.__wrapped__(device) if recording(device) else _squares(device)


@functools.cache
def _squares(device: torch.device) -> Squares:
    i, levels = torch.arange(CHUNK, device=device), torch.arange(LEVELS + 1, device=device)[:, None, None]
    row, column = i[:, None], i[None, :]
    right = (row >> levels) & 1 == 1
    in_half = row >> levels == column >> levels
    between = in_half & torch.where(right, column <= row, column > row)
    chosen = torch.cat([between, (column <= row)[None]]).to(torch.bfloat16)
    parted = ((row >> levels) ^ (column >> levels)) == 1
    return Squares(chosen, -parted[:LEVELS].to(torch.int16))


class Problem:
    """One call's inputs, sizes and blocks; each method allocates what its kernel fills."""

    def __init__(self, inputs: Inputs, cu_seqlens: Tensor | None):
        (B, T, H, R), (G, M) = inputs.q.shape, inputs.v.shape[2:]
        self.inputs, self.B, self.T, self.H, self.G, self.R, self.M = inputs, B, T, H, G, R, M
        self.slots = Slots.cut(B, T, cu_seqlens, CHUNK)
        short, from_memory = inputs.q.dtype != torch.float32, multiplies_from_memory(inputs.q.device)
        BR = block(R, BLOCK if short and from_memory else SMALL_BLOCK)
        BM = block(M, BLOCK if short else SMALL_BLOCK)
        self.features = block(R, FEATURES_FROM_MEMORY if from_memory else FEATURES)
        self.blocks_r, self.blocks_m = blocks(R, BR), blocks(M, BM)
        self.q, self.k, self.v, gates = (with_strides(x) for x in inputs[:4])
        self.gates = *gates, squares(inputs.q.device).chosen
        self.places = *self.slots[1:], G, H // G
        self.levels = {"LEVELS": LEVELS}
        self.options = {"C": CHUNK, "num_warps": WARPS, "num_stages": STAGES}
        self.of_features, self.of_values = {"R": R, "BR": BR}, {"M": M, "BM": BM}
        self.sizes = self.of_features | self.of_values | self.levels | self.options

    def weights(self) -> Tensor:
        """Compute W of all chunks, `[B,T,H,C]`."""
        pairs, grid = self._scratch(self.B, self.T, self.H, CHUNK), (self.slots.n, self.H)
        sizes = self.of_features | self.levels | self.options
        launch(kernels.weights, grid, *self.q, *self.k, *self.gates, pairs, *self.places, **sizes)
        return pairs

    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the states before the chunks, the decays through them, and the last states."""
        through = self._scratch(self.slots.n, self.G, self.R)
        states = self._chunk_sums((*self.k, *self.v), through, 1, QUERIES=False)
        return states, through, self._scan(states, through, self.inputs.state, from_end=False)

    def state_gradients(self, grad_o: Tensor, through: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the states after the chunks, and of the first states."""
        states = self._chunk_sums((*self.q, *with_strides(grad_o)), through, self.places[-1], QUERIES=True)
        return states, self._scan(states, through, last, from_end=True)

    def _chunk_sums(
        self, tensors: tuple[object, ...], through: Tensor, heads: int, **options: bool
    ) -> Tensor:
        states = self._scratch(self.slots.n, self.G, self.R * self.M)
        grid = self.slots.n, self.G, self.blocks_r * self.blocks_m
        arguments = (*tensors, *self.gates, states, through, *self.slots[1:], self.G, heads)
        launch(kernels.chunk_sums, grid, *arguments, **self.sizes, **options)
        return states

    def _scan(self, states: Tensor, through: Tensor, first: Tensor, *, from_end: bool) -> Tensor:
        last = self._scratch(*first.shape)
        sizes = {"R": self.R, "M": self.M, "C": CHUNK, "BLOCK": SCAN_BLOCK, "STAGES": SCAN_STAGES}
        launch(
            kernels.scan,
            (len(first) * self.G, blocks(self.R * self.M, SCAN_BLOCK)),
            *(states, through, first.contiguous(), last, self.slots.chunks, self.slots.cu_seqlens, self.G),
            **sizes,
            FROM_END=from_end,
            num_warps=SCAN_WARPS,
        )
        return last

    def outputs(self, pairs: Tensor, states: Tensor) -> Tensor:
        """Compute `o [B,T,H,M]`."""
        o = self.inputs.v.new_empty(self.B, self.T, self.H, self.M)
        grid = self.slots.n, self.H, self.blocks_m
        tensors = (*self.q, *self.v, *self.gates, pairs, states, o)
        launch(kernels.outputs, grid, *tensors, *self.places, **self.sizes)
        return o

    def value_gradients(self, grad_o: Tensor, pairs: Tensor, d_states: Tensor) -> Tensor:
        """Compute dv from W and the gradients of the states after the chunks."""
        dv = self.inputs.v.new_empty(self.inputs.v.shape)
        grid = self.slots.n, self.G, self.blocks_m
        tensors = (*self.k, *with_strides(grad_o), *self.gates, pairs, d_states, dv)
        launch(backward_kernels.value_gradients, grid, *tensors, *self.places, **self.sizes)
        return dv

    def feature_gradients(
        self, grad_o: Tensor, pairs: Tensor, states: Tensor, d_states: Tensor
    ) -> list[Tensor]:
        """Compute dq, dk and dlog_decay; in `pairs`, dW replaces W."""
        grad, sizes = with_strides(grad_o), self.of_values | self.options
        of_pairs = (*self.v, *grad, pairs, *self.places)
        launch(backward_kernels.weight_gradients, (self.slots.n, self.H), *of_pairs, **sizes)
        q, k, _, log_decay, _ = self.inputs
        found = [x.new_empty(x.shape) for x in (q, k, log_decay)]
        read = *self.q, *self.k, *self.v, *grad, *self.gates, squares(q.device).parted
        tensors = *read, pairs, states, d_states, *found
        grid = self.slots.n, self.G, blocks(self.R, self.features)
        sizes = self.sizes | {"BR": self.features, "BM": block(self.M, SMALL_BLOCK), "num_stages": 1}
        launch(backward_kernels.feature_gradients, grid, *tensors, *self.places, **sizes)
        return found

    def _scratch(self, *shape: int) -> Tensor:
        return self.inputs.q.new_empty(shape, dtype=torch.float32)
