"""Launches of the Triton kernels of linear attention: block sizes, grids and scratch memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.linear import triton_backward as backward_kernels
from unrolled.ops.linear import triton_kernels as kernels
from unrolled.ops.linear.chunked import Inputs, Options, Token
from unrolled.ops.triton.launch import Slots, block, blocks, launch, multiplies_from_memory, with_strides


class Config(NamedTuple):
    """Block sizes for widths up to `width`; each number is a power of two."""

    width: int
    chunk: int  # tokens of a chunk
    block: int  # features and values of a program or of a step of its loop
    columns: int  # features or values of a program that computes gradients; it computes the scores once
    inner: int  # values or features of a step of that program's loop
    warps: int
    sum_warps: int  # warps of `chunk_sums`
    stages: int  # stages of loads in flight


CONFIGS = (
    Config(width=16, chunk=64, block=16, columns=16, inner=16, warps=4, sum_warps=4, stages=1),
    Config(width=64, chunk=64, block=32, columns=32, inner=32, warps=8, sum_warps=8, stages=1),
    Config(width=256, chunk=64, block=32, columns=32, inner=32, warps=8, sum_warps=8, stages=2),
)
CONFIGS_FROM_MEMORY = (  # see `multiplies_from_memory`; on other GPUs, registers are too few for these
    CONFIGS[0],
    Config(width=256, chunk=64, block=64, columns=64, inner=64, warps=4, sum_warps=4, stages=1),
)
CONFIGS_OF_16_BITS = (
    CONFIGS[0],
    Config(width=64, chunk=64, block=64, columns=64, inner=64, warps=4, sum_warps=4, stages=2),
    Config(width=256, chunk=64, block=64, columns=128, inner=32, warps=8, sum_warps=4, stages=2),
)
CONFIGS_OF_16_BITS_FROM_MEMORY = (*CONFIGS_OF_16_BITS[:2], CONFIGS_FROM_MEMORY[-1])
SCAN_BLOCK, SCAN_WARPS, SCAN_STAGES = 256, 2, 4
STEP_BLOCK_R, STEP_BLOCK_M = 32, 32  # small, since the few heads of one token must fill a GPU

State = tuple[Tensor, Tensor]  # kv and k_sum


def config_for(configs: tuple[Config, ...], R: int, M: int) -> Config:
    """Return the first of the configs that is for heads of this width."""
    return next(config for config in configs if max(R, M) <= config.width)


def options_of(config: Config, R: int, M: int) -> dict[str, int]:
    """Return the sizes and blocks of most kernels, as their arguments."""
    sizes = {"R": R, "M": M, "C": config.chunk, "BR": block(R, config.block), "BM": block(M, config.block)}
    return sizes | {"num_warps": config.warps, "num_stages": config.stages}


class OutputGradient(NamedTuple):
    """The gradient of the output, and the divisor unless it is 1."""

    grad_o: Tensor
    strides: tuple[int, ...]
    den: Tensor | None


class Problem:
    """One call's inputs, sizes and blocks; each method allocates what its kernel fills."""

    def __init__(self, inputs: Inputs, options: Options):
        cu_seqlens, causal = options.cu_seqlens, options.causal
        (B, T, H, R), (_, S, G, M) = inputs.q.shape, inputs.v.shape
        self.inputs, self.causal = inputs, causal
        self.B, self.T, self.H, self.G, self.P, self.R, self.M = B, T, H, G, H // G, R, M
        self.from_memory = multiplies_from_memory(inputs.q.device)
        config = config_for(self._configs(), R, M)
        self.keys = Slots.cut(B, S, cu_seqlens, config.chunk)
        self.queries = self.keys if T == S else Slots.cut(B, T, cu_seqlens, config.chunk)
        self.sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.options = options_of(config, R, M)
        self.blocks = blocks(R, self.options["BR"]) * blocks(M, self.options["BM"])
        self.of_features = {"BR": block(R, config.columns), "BM": block(M, config.inner)}
        self.of_sums = {"num_warps": config.sum_warps}
        self.of_values = {"BR": block(R, config.inner), "BM": block(M, config.columns)}
        self.q, self.k, self.v, self.gates = (with_strides(x) for x in inputs[:4])
        self.chunk = config.chunk

    def _configs(self) -> tuple[Config, ...]:
        if self.inputs.q.dtype == torch.float32:
            return CONFIGS_FROM_MEMORY if self.from_memory else CONFIGS
        return CONFIGS_OF_16_BITS_FROM_MEMORY if self.from_memory else CONFIGS_OF_16_BITS

    def key_sums(self) -> tuple[Tensor, Tensor | None]:
        """What each chunk of keys adds to the state `[slots, G, R*M + R]`, and exp(b_C) `[slots, G]`."""
        gated = self.inputs.log_decay is not None
        through = self._scratch(self.keys.n, self.G, dtype=torch.float64) if gated else None
        tensors = (*self.k, *self.v, None, None, *self.gates)
        return self._chunk_sums(self.keys, tensors, through, 1, QUERIES=False), through

    def query_sums(self, grad: OutputGradient, d_den: Tensor | None) -> Tensor:
        """What each chunk of queries adds to the gradient of the state `[slots, G, R*M + R]`."""
        tensors = (*self.q, *grad, d_den, *(self.gates if self.causal else (None, None)))
        return self._chunk_sums(self.queries, tensors, None, self.P, QUERIES=True)

    def _chunk_sums(
        self, slots: Slots, tensors: tuple[object, ...], through: Tensor | None, heads: int, **options: object
    ) -> Tensor:
        states = self._scratch(slots.n, self.G, self.R * self.M + self.R)
        grid = slots.n, self.G, self.blocks
        arguments = (*tensors, states, through, *slots[1:], self.G, heads)
        launch(kernels.chunk_sums, grid, *arguments, **self.options | self.of_sums, **options)
        return states

    def scan(
        self,
        slots: Slots,
        states: Tensor,
        through: Tensor | None,
        first: tuple[Tensor | None, Tensor | None],
        *,
        keep: bool = True,
        from_end: bool = False,
    ) -> State:
        """Turn what the chunks add into the states they are added to, in place; return the last state."""
        G, R, M = self.G, self.R, self.M
        last = self._scratch(self.sequences, G, R, M), self._scratch(self.sequences, G, R)
        launch(
            kernels.scan,
            (self.sequences * G, blocks(R * M + R, SCAN_BLOCK)),
            *(states, through, *with_strides(first[0]), *with_strides(first[1]), *last),
            *(slots.chunks, slots.cu_seqlens, G),
            *(R, M, self.chunk, SCAN_BLOCK, SCAN_STAGES),
            FROM_END=from_end,
            KEEP=keep,
            num_warps=SCAN_WARPS,
        )
        return last

    def outputs(self, states: State, normalize: bool) -> tuple[Tensor, Tensor]:
        """Compute `o [B,T,H,M]` and the divisor `[B,T,H,1]`, which is empty without `normalize`."""
        o = self.inputs.v.new_empty(self.B, self.T, self.H, self.M)
        den = self._scratch(self.B, self.T, self.H, 1) if normalize else None
        tensors = (*self.q, *self.k, *self.v, *self.gates, *_rows(states), o, den)
        self._launch_pairs(kernels.outputs, tensors, self.queries, self.H)
        return o, self._scratch(0) if den is None else den

    def query_gradients(
        self, states: State, grad: OutputGradient
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute dq, the gradients of the divisors, and the queries' part of the gates' `[B,T,H]`."""
        dq, per_query = self.inputs.q.new_empty(self.inputs.q.shape), (self.B, self.T, self.H)
        d_den = None if grad.den is None else self._scratch(*per_query)
        d_reads = self._scratch(*per_query) if self.causal and self.gates[0] is not None else None
        tensors = (*self.q, *self.k, *self.v, *self.gates, *_rows(states), *grad, d_den, d_reads, dq)
        kernel = backward_kernels.query_gradients
        self._launch_pairs(kernel, tensors, self.queries, self.H, **self.of_features)
        return dq, d_den, d_reads

    def key_gradients(
        self, d_states: State, grad: OutputGradient, d_den: Tensor | None, dk: Tensor
    ) -> Tensor:
        """Fill dk from the gradients of the states after each chunk."""
        tensors = (*self.q, *self.v, *self.gates, *_rows(d_states), *grad, d_den, dk)
        grid = self.G, blocks(self.R, self.of_features["BR"])
        kernel = backward_kernels.key_gradients
        self._launch_pairs(kernel, tensors, self.keys, *grid, **self.of_features)
        return dk

    def value_gradients(self, d_kv: State | None, grad: OutputGradient, like: Tensor) -> Tensor:
        """Compute dv, of the type of `like`, from the gradients of the states after each chunk, if given."""
        dv = like.new_empty(like.shape)
        rows = (None, 0) if d_kv is None else _rows(d_kv)[:2]
        tensors = (*self.q, *self.k, *self.gates, *rows, *grad, dv)
        grid = self.G, blocks(self.M, self.of_values["BM"])
        kernel = backward_kernels.value_gradients
        self._launch_pairs(kernel, tensors, self.keys, *grid, **self.of_values)
        return dv

    def gate_gradients(
        self, log_decay: Tensor, states: Tensor, d_states: Tensor, d_reads: Tensor | None
    ) -> Tensor:
        """Compute the gradient of log_decay, given the states before and the gradients after the chunks."""
        d_log_decay = log_decay.new_empty(log_decay.shape)
        launch(
            backward_kernels.gate_gradients,
            (self.keys.n, self.G),
            *(*self.k, *self.v, *self.gates, states, d_states, d_reads, d_log_decay),
            *(*self.keys[1:], self.G, self.P),
            **self.options | self.of_features,
            CAUSAL=self.causal,
        )
        return d_log_decay

    def _launch_pairs(
        self, kernel: Any, tensors: tuple[object, ...], slots: Slots, *grid: int, **sizes: int
    ) -> None:
        """Launch a kernel that multiplies queries with keys, once for each slot and point of the grid."""
        arguments = (*tensors, *slots[1:], self.G, self.P)
        launch(kernel, (slots.n, *grid), *arguments, **self.options | sizes, CAUSAL=self.causal)

    def split(self, states: Tensor) -> State:
        """Views of kv and k_sum in a scratch of states."""
        return states.flatten(0, 1)[:, : self.R * self.M], states.flatten(0, 1)[:, self.R * self.M :]

    def _scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inputs.q.new_empty(shape, dtype=dtype)


def step(token: Token, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence for one token."""
    q, k, v, kv, k_sum, log_decay = token
    (B, H, R), (_, G, M) = q.shape, v.shape
    P, BM = H // G, block(M, STEP_BLOCK_M)
    o, new_kv, new_k_sum = v.new_empty(B, H, M), kv.new_empty(B, G, R, M), kv.new_empty(B, G, R)
    strided = (y for x in (q, k, v, log_decay, kv, k_sum) for y in with_strides(x))
    sizes = (R, M, block(P), block(R, STEP_BLOCK_R), BM, normalize)
    launch(kernels.step, (B * G, blocks(M, BM)), *strided, o, new_kv, new_k_sum, G, P, *sizes)
    return o, new_kv, new_k_sum


def _rows(states: State) -> tuple[Tensor, int, Tensor, int]:
    """Return states with their strides from one chunk and head to the next."""
    kv, k_sum = (x if x.dim() == 2 else x.flatten(0, 1).flatten(1) for x in states)
    return kv, kv.stride(0), k_sum, k_sum.stride(0)
