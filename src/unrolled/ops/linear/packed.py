"""Linear attention in plain PyTorch, of packed sequences too: each group of similar lengths runs padded."""

from torch import Tensor

from unrolled.ops.linear import chunked
from unrolled.ops.linear.chunked import Inputs
from unrolled.ops.masks import without_padding
from unrolled.ops.packing import length_buckets
from unrolled.ops.precision import accumulation_dtype


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether this form can run: always."""
    return True


def forward(
    inputs: Inputs, cu_seqlens: Tensor | None, causal: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `chunked.forward` does for each sequence; the states have one row per sequence."""
    if cu_seqlens is None:
        return chunked.forward(inputs, causal, normalize)
    o, kv_end, k_sum_end, den = like_outputs(inputs, cu_seqlens, normalize)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        o_part, kv_end[rows], k_sum_end[rows], den_part = chunked.forward(
            _part(inputs, rows, tokens, padding), causal, normalize
        )
        o[0, tokens[~padding]] = o_part[~padding]
        if normalize:
            den[0, tokens[~padding]] = den_part[~padding]
    return o, kv_end, k_sum_end, den


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
    """Compute the gradients of `inputs`, as `chunked.backward` does."""
    if cu_seqlens is None:
        return chunked.backward(grad_o, grad_kv, grad_k_sum, inputs, den, causal, normalize)
    gradients = like_gradients(grad_kv, grad_k_sum, inputs)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        part = chunked.backward(
            _gather(grad_o, tokens, padding),
            grad_kv[rows],
            grad_k_sum[rows],
            _part(inputs, rows, tokens, padding),
            _gather(den, tokens, padding) if normalize else den,
            causal,
            normalize,
        )
        for whole, piece in zip(gradients[:4], part[:4], strict=True):
            if len(piece):
                whole[0, tokens[~padding]] = piece[~padding]
        gradients[4][rows], gradients[5][rows] = part[4], part[5]
    return gradients


def like_outputs(
    inputs: Inputs, cu_seqlens: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised tensors of the shapes and types that a forward pass returns."""
    (B, T, H, R), (_, _, G, M) = inputs.q.shape, inputs.v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = accumulation_dtype(inputs.q.dtype)
    return (
        inputs.v.new_empty(B, T, H, M),
        inputs.k.new_empty(N, G, R, M, dtype=dtype),
        inputs.k.new_empty(N, G, R, dtype=dtype),
        inputs.q.new_empty((B, T, H, 1) if normalize else 0, dtype=dtype),
    )


def like_gradients(
    grad_kv: Tensor, grad_k_sum: Tensor, inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised tensors of the shapes and types that a backward pass returns, contiguous."""
    q, k, v, log_decay, _, _ = inputs
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        grad_kv.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape),
        grad_kv.new_empty(grad_kv.shape),
        grad_k_sum.new_empty(grad_k_sum.shape),
    )


def _part(inputs: Inputs, rows: Tensor, tokens: Tensor, padding: Tensor) -> Inputs:
    """The inputs of one bucket: its tokens side by side, and the states of its rows."""
    q, k, v, log_decay, kv, k_sum = inputs
    return Inputs(
        _gather(q, tokens, padding),
        _gather(k, tokens, padding),
        _gather(v, tokens, padding),
        None if log_decay is None else _gather(log_decay, tokens, padding),
        None if kv is None else kv[rows],
        None if k_sum is None else k_sum[rows],
    )


def _gather(x: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
    """[1,T,...] -> [n,L,...] by packed position, with zeros at the padding."""
    return without_padding(x[0, tokens], padding)
