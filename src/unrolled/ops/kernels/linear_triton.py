"""Linear attention in Triton, for CUDA: chunk by chunk, and all chunks at the same time.

Forward, causal: (1) `chunk_sums`, what each chunk adds to the state; (2) `scan`, which turns these sums in place
into the states before the chunks; (3) `outputs`, each chunk from its state and its own keys. Only (2) walks along
the sequence, with one multiplication and addition per number of the state. A program per head that walked through
the chunks itself would leave a GPU idle at B = 1, H = 8, where 4096 tokens make 512 programs of (1) and of (3).

Backward: (1) and (2) again, then `query_gradients`; (1) over the queries and (2) from the other end give the
gradients of the states; then `key_gradients`, `value_gradients` and `gate_gradients`.

Bidirectional: the queries all read the last state, so its gradient is a sum over all of them.

Memory beside the results: one fp32 state per chunk, R (M+1) / 16 bytes per token and key head, at most once forward
and twice backward (each as much as an fp32 k where M = 64), and backward 8 bytes per token and query head.

Nothing here looks at a value, waits for the device, or allocates outside of PyTorch. Offsets of packed sequences
are read on the device: chunk c of a sequence n that begins at token t has slot t // C + n + c. No two sequences
share a slot, and that there are T // C + N of them is known without looking.
"""

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.linear_chunked import Inputs

OLDEST_TRITON = (3, 3)  # the first with tuples as arguments
OLDEST_GPU = (8, 0)  # Ampere, the first with tf32


class Config(NamedTuple):
    """How the widths up to `width` are computed."""

    width: int
    chunk: int  # tokens of a chunk
    block_r: int  # features at a time
    block_m: int  # values at a time
    warps: int
    stages: int  # of the loads in flight


CONFIGS = (
    Config(width=16, chunk=64, block_r=16, block_m=16, warps=4, stages=1),
    Config(width=64, chunk=64, block_r=32, block_m=32, warps=8, stages=1),
    Config(width=256, chunk=64, block_r=32, block_m=32, warps=8, stages=2),
)
SCAN_BLOCK, SCAN_WARPS, SCAN_STAGES = 256, 2, 4
STEP_BLOCK_M = 32  # small, as one token has few heads to fill a GPU with

State = tuple[Tensor, Tensor]


def supports(inputs: Inputs, cu_seqlens: Tensor | None) -> bool:
    """Whether the kernels run on this device (CUDA, or any under Triton's interpreter) and on these types and widths."""
    q, k, v, *_ = inputs
    return (
        all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in (q, k, v))
        and all(0 < x.shape[-1] <= CONFIGS[-1].width for x in (q, v))
        and _reaches(q.device)
    )


def forward(
    inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `linear_chunked.forward` and `linear_packed.forward` do."""
    with _on(inputs.q.device):
        problem = _Problem(inputs, cu_seqlens, causal)
        states, through = problem.key_sums()
        end = problem.scan(problem.keys, states, through, (inputs.kv, inputs.k_sum), keep=causal)
        o, den = problem.outputs(problem.split(states) if causal else end, normalize)
        return o, *end, den


def backward(
    grad_o: Tensor,
    grad_kv: Tensor,
    grad_k_sum: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    den: Tensor,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what `linear_chunked.backward` and `linear_packed.backward` do."""
    gated = inputs.log_decay is not None
    with _on(inputs.q.device):
        problem = _Problem(inputs, cu_seqlens, causal)
        states, through = problem.key_sums()
        end = problem.scan(problem.keys, states, through, (inputs.kv, inputs.k_sum), keep=causal or gated)
        grad = _Gradient(grad_o, grad_o.stride(), den if normalize else None)
        read = problem.split(states) if causal else end
        d_den, d_reads = problem.divisor_gradients(read, grad)
        dq = problem.query_gradients(read, grad, d_den)
        d_states = problem.query_sums(grad, d_den)
        d_end: State = (grad_kv, grad_k_sum)
        if not causal:
            d_end = problem.scan(problem.queries, d_states, None, d_end, keep=False)
        if not causal and gated:
            d_states = torch.zeros_like(states)  # nobody reads the states before the last
        if causal or gated:
            d_first = problem.scan(problem.keys, d_states, through, d_end, from_end=True)
            d_after = problem.split(d_states)
        else:  # one state, from the first key to the last
            d_first = d_after = d_end
        dk, dv = problem.key_and_value_gradients(d_after, grad, d_den)
        d_log_decay = problem.gate_gradients(states, d_states, d_reads) if gated else grad_kv.new_empty(0)
        return dq, dk, dv, d_log_decay, *d_first


def step(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, k_sum: Tensor, log_decay: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One token `q [B,H,R]`, `k [B,G,R]`, `v [B,G,M]` of the recurrence: `o [B,H,M]` and the new state."""
    from unrolled.ops.kernels import linear_triton_kernels as kernels

    (B, H, R), (_, G, M) = q.shape, v.shape
    o, new_kv, new_k_sum = v.new_empty(B, H, M), kv.new_empty(B, G, R, M), kv.new_empty(B, G, R)
    BR, BM = _block(R, CONFIGS[-1].block_r), _block(M, STEP_BLOCK_M)
    strided = [y for x in (q, k, v, log_decay, kv, k_sum) for y in _with_strides(x)]
    sizes = {"R": R, "M": M, "HEADS": _block(H // G, H // G), "BR": BR, "BM": BM}
    with _on(q.device):
        _launch(
            kernels.step,
            (B * G, _blocks(M, BM)),
            *strided,
            o,
            new_kv,
            new_k_sum,
            G,
            H // G,
            **sizes,
            NORMALIZE=normalize,
        )
    return o, new_kv, new_k_sum


class _Slots(NamedTuple):
    """Tokens cut into chunks."""

    n: int
    length: int  # tokens per row of memory
    chunks: int  # per sequence, where they are all equally long
    cu_seqlens: Tensor | None
    owners: Tensor | None  # [n] the sequences of the slots

    @classmethod
    def cut(cls, rows: int, length: int, cu_seqlens: Tensor | None, C: int) -> "_Slots":
        if cu_seqlens is None:
            chunks = _blocks(length, C)
            return cls(rows * chunks, length, chunks, None, None)
        sequences = cu_seqlens.shape[0] - 1
        n = length // C + sequences
        numbers = torch.arange(n, dtype=torch.int32, device=cu_seqlens.device)
        ends = cu_seqlens[1:] // C + numbers[:sequences] + 1
        return cls(
            n,
            length,
            0,
            cu_seqlens.contiguous(),
            torch.searchsorted(ends, numbers, right=True, out_int32=True),
        )


class _Problem:
    """One call's inputs, sizes and blocks; each method allocates what its kernel fills."""

    def __init__(self, inputs: Inputs, cu_seqlens: Tensor | None, causal: bool):
        (B, T, H, R), (_, S, G, M) = inputs.q.shape, inputs.v.shape
        self.inputs, self.causal = inputs, causal
        self.B, self.T, self.H, self.G, self.P, self.R, self.M = B, T, H, G, H // G, R, M
        config = next(config for config in CONFIGS if max(R, M) <= config.width)
        self.keys = _Slots.cut(B, S, cu_seqlens, config.chunk)
        self.queries = _Slots.cut(B, T, cu_seqlens, config.chunk)
        self.sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        BR, BM = _block(R, config.block_r), _block(M, config.block_m)
        self.blocks_r, self.blocks_m = _blocks(R, BR), _blocks(M, BM)
        self.q, self.k, self.v, self.gates = (_with_strides(x) for x in inputs[:4])
        # The products of 16-bit inputs are exact in tf32; see linear_triton_kernels.
        self.raw = "tf32x3" if inputs.q.dtype == torch.float32 else "tf32"
        self.options: dict[str, Any] = {
            **{"R": R, "M": M, "C": config.chunk, "BR": BR, "BM": BM},
            **{"num_warps": config.warps, "num_stages": config.stages},
        }

    def key_sums(self) -> tuple[Tensor, Tensor | None]:
        """What each chunk of keys adds to the state `[slots, G, R*M + R]`, and exp(b_C) `[slots, G]`."""
        from unrolled.ops.kernels import linear_triton_kernels as kernels

        slots, gated = self.keys, self.inputs.log_decay is not None
        states = self._scratch(slots.n, self.G, self.R * self.M + self.R)
        through = self._scratch(slots.n, self.G) if gated else None
        _launch(
            kernels.chunk_sums,
            (slots.n, self.G, self.blocks_r * self.blocks_m),
            *(*self.k, *self.v, None, None, *self.gates, states, through, *slots[1:], self.G, 1),
            **self.options,
            QUERIES=False,
            PRECISION="tf32x3" if gated else self.raw,
        )
        return states, through

    def query_sums(self, grad: "_Gradient", d_den: Tensor | None) -> Tensor:
        """What each chunk of queries adds to the gradient of the state `[slots, G, R*M + R]`."""
        from unrolled.ops.kernels import linear_triton_kernels as kernels

        slots, gates = self.queries, self.gates if self.causal else (None, None)
        states = self._scratch(slots.n, self.G, self.R * self.M + self.R)
        _launch(
            kernels.chunk_sums,
            (slots.n, self.G, self.blocks_r * self.blocks_m),
            *(*self.q, *grad, d_den, *gates, states, None, *slots[1:], self.G, self.P),
            **self.options,
            QUERIES=True,
            PRECISION="tf32x3",
        )
        return states

    def scan(
        self,
        slots: _Slots,
        states: Tensor,
        through: Tensor | None,
        first: tuple[Tensor | None, Tensor | None],
        *,
        keep: bool = True,
        from_end: bool = False,
    ) -> State:
        """Turn what the chunks add into the states they are added to, in place; return the state after all."""
        from unrolled.ops.kernels import linear_triton_kernels as kernels

        G, R, M = self.G, self.R, self.M
        last = self._scratch(self.sequences, G, R, M), self._scratch(self.sequences, G, R)
        _launch(
            kernels.scan,
            (self.sequences * G, _blocks(R * M + R, SCAN_BLOCK)),
            *(states, through, *_with_strides(first[0]), *_with_strides(first[1]), *last),
            *(slots.chunks, slots.cu_seqlens, G),
            **{"R": R, "M": M, "C": self.options["C"], "BLOCK": SCAN_BLOCK, "STAGES": SCAN_STAGES},
            FROM_END=from_end,
            KEEP=keep,
            num_warps=SCAN_WARPS,
        )
        return last

    def outputs(self, states: State, normalize: bool) -> tuple[Tensor, Tensor]:
        """Compute `o [B,T,H,M]` and the divisor `[B,T,H,1]`, empty without."""
        from unrolled.ops.kernels import linear_triton_kernels as kernels

        o = self.inputs.v.new_empty(self.B, self.T, self.H, self.M)
        den = self._scratch(self.B, self.T, self.H, 1) if normalize else None
        _launch(
            kernels.outputs,
            (self.queries.n, self.H),
            *(
                *self.q,
                *self.k,
                *self.v,
                *self.gates,
                *_rows(states),
                o,
                den,
                *self.queries[1:],
                self.G,
                self.P,
            ),
            **self.options,
            CAUSAL=self.causal,
            RAW=self.raw,
        )
        return o, self._scratch(0) if den is None else den

    def divisor_gradients(self, states: State, grad: "_Gradient") -> tuple[Tensor | None, Tensor | None]:
        """Compute `[B,T,H]` the gradients of the divisors, and what the queries send to the gates of their chunk."""
        from unrolled.ops.kernels import linear_triton_backward as kernels

        per_query = self.B, self.T, self.H
        d_den = None if grad.den is None else self._scratch(*per_query)
        d_reads = self._scratch(*per_query) if self.causal and self.gates[0] is not None else None
        if d_den is not None or d_reads is not None:
            _launch(
                kernels.divisor_gradients,
                (self.queries.n, self.H),
                *(*self.q, *self.k, *self.v, *self.gates, *_rows(states), *grad, d_den, d_reads),
                *(*self.queries[1:], self.G, self.P),
                **self.options,
                CAUSAL=self.causal,
                RAW=self.raw,
            )
        return d_den, d_reads

    def query_gradients(self, states: State, grad: "_Gradient", d_den: Tensor | None) -> Tensor:
        """Compute dq from the states that the queries read."""
        from unrolled.ops.kernels import linear_triton_backward as kernels

        dq = self.inputs.q.new_empty(self.inputs.q.shape)
        _launch(
            kernels.query_gradients,
            (self.queries.n, self.H),
            *(*self.k, *self.v, *self.gates, *_rows(states), *grad, d_den, dq),
            *(*self.queries[1:], self.G, self.P),
            **self.options,
            CAUSAL=self.causal,
            RAW=self.raw,
        )
        return dq

    def key_and_value_gradients(
        self, d_states: State, grad: "_Gradient", d_den: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute dk and dv from the gradients of the states after each chunk."""
        from unrolled.ops.kernels import linear_triton_backward as kernels

        dk, dv = (x.new_empty(x.shape) for x in (self.inputs.k, self.inputs.v))
        d_kv, d_kv_stride, *d_k_sum = _rows(d_states)
        sizes = (*self.keys[1:], self.G, self.P)
        _launch(
            kernels.key_gradients,
            (self.keys.n, self.G, self.blocks_r),
            *(*self.q, *self.v, *self.gates, d_kv, d_kv_stride, *d_k_sum, *grad, d_den, dk, *sizes),
            **self.options,
            CAUSAL=self.causal,
            RAW=self.raw,
        )
        _launch(
            kernels.value_gradients,
            (self.keys.n, self.G, self.blocks_m),
            *(*self.q, *self.k, *self.gates, d_kv, d_kv_stride, *grad, dv, *sizes),
            **self.options,
            CAUSAL=self.causal,
            RAW=self.raw,
        )
        return dk, dv

    def gate_gradients(self, states: Tensor, d_states: Tensor, d_reads: Tensor | None) -> Tensor:
        """Compute the gradient of log_decay from the states before the chunks and the gradients after them."""
        from unrolled.ops.kernels import linear_triton_backward as kernels

        d_log_decay = self.gates[0].new_empty(self.gates[0].shape)
        _launch(
            kernels.gate_gradients,
            (self.keys.n, self.G),
            *(*self.k, *self.v, *self.gates, states, d_states, d_reads, d_log_decay),
            *(*self.keys[1:], self.G, self.P),
            **self.options,
            CAUSAL=self.causal,
        )
        return d_log_decay

    def split(self, states: Tensor) -> State:
        """Views of kv and k_sum in a scratch of states."""
        return states.flatten(0, 1)[:, : self.R * self.M], states.flatten(0, 1)[:, self.R * self.M :]

    def _scratch(self, *shape: int) -> Tensor:
        return self.inputs.q.new_empty(shape, dtype=torch.float32)


class _Gradient(NamedTuple):
    """The gradient of the output, and the divisor unless it is 1."""

    grad_o: Tensor
    strides: tuple[int, ...]
    den: Tensor | None


def _rows(states: State) -> tuple[Tensor, int, Tensor, int]:
    """The states with the distance from one chunk and head to the next; whole ones are contiguous."""
    kv, k_sum = (x if x.dim() == 2 else x.flatten(0, 1).flatten(1) for x in states)
    return kv, kv.stride(0), k_sum, k_sum.stride(0)


def _with_strides(x: Tensor | None) -> tuple[Any, Any]:
    return (None, None) if x is None else (x, x.stride())


def _blocks(width: int, block: int) -> int:
    """How many blocks cover a width."""
    return -(-width // block)


def _block(width: int, longest: int) -> int:
    """The power of two that covers a width, from 16 (the least that tensor cores multiply) to `longest`."""
    return max(16, min(longest, 1 << (width - 1).bit_length()))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    if 0 not in grid:
        kernel[grid](*arguments, **options)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device, whichever is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _reaches(device: torch.device) -> bool:
    if device.type == "cuda":
        fit = torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST_GPU
    else:
        fit = os.environ.get("TRITON_INTERPRET") == "1"
    return fit and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= OLDEST_TRITON
