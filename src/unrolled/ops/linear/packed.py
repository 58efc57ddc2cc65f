"""Linear attention in plain PyTorch; packed sequences of similar lengths run together, padded."""

from torch import Tensor

from unrolled.ops.linear import chunked
from unrolled.ops.linear.chunked import Gradients, Inputs, Options, OutputGradients, Outputs
from unrolled.ops.masks import without_padding
from unrolled.ops.packing import length_buckets, put_tokens
from unrolled.ops.precision import accumulation_dtype


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, options: Options) -> Outputs:
    """Compute what `chunked.forward` does for each sequence; the states have one row per sequence."""
    cu_seqlens, causal, normalize, _ = options
    if cu_seqlens is None:
        return chunked.forward(inputs, causal, normalize)
    o, kv_end, k_sum_end, den = like_outputs(inputs, options)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        part = chunked.forward(_part(inputs, rows, tokens, padding), causal, normalize)
        o = put_tokens(o, tokens, padding, part.o)
        kv_end, k_sum_end = kv_end.index_copy(0, rows, part.kv), k_sum_end.index_copy(0, rows, part.k_sum)
        if normalize:
            den = put_tokens(den, tokens, padding, part.den)
    return Outputs(o, kv_end, k_sum_end, den)


def backward(grads: OutputGradients, inputs: Inputs, den: Tensor, options: Options) -> Gradients:
    """Compute the gradients of the inputs, as `chunked.backward` does."""
    cu_seqlens, causal, normalize, _ = options
    if cu_seqlens is None:
        return chunked.backward(grads, inputs, den, causal, normalize)
    *of_tokens, d_kv, d_k_sum = like_gradients(grads, inputs)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        part_grads = OutputGradients(_gather(grads.o, tokens, padding), grads.kv[rows], grads.k_sum[rows])
        part_den = _gather(den, tokens, padding) if normalize else den
        part_inputs = _part(inputs, rows, tokens, padding)
        part = chunked.backward(part_grads, part_inputs, part_den, causal, normalize)
        of_tokens = [
            put_tokens(x, tokens, padding, piece) if len(piece) else x  # there is no gradient of absent gates
            for x, piece in zip(of_tokens, part[:4], strict=True)
        ]
        d_kv, d_k_sum = d_kv.index_copy(0, rows, part.kv), d_k_sum.index_copy(0, rows, part.k_sum)
    return Gradients._make((*of_tokens, d_kv, d_k_sum))


def like_outputs(inputs: Inputs, options: Options, features: int | None = None) -> Outputs:
    """Uninitialised tensors of the shapes and types that a forward pass returns.

    `features` is their number if q and k are yet to be mapped to more of them.
    """
    (B, T, H, R), (_, _, G, M) = inputs.q.shape, inputs.v.shape
    R = R if features is None else features
    N = B if options.cu_seqlens is None else options.cu_seqlens.shape[0] - 1
    dtype = accumulation_dtype(inputs.q.dtype)
    return Outputs(
        inputs.v.new_empty(B, T, H, M),
        inputs.k.new_empty(N, G, R, M, dtype=dtype),
        inputs.k.new_empty(N, G, R, dtype=dtype),
        inputs.q.new_empty((B, T, H, 1) if options.normalize else 0, dtype=dtype),
    )


def like_gradients(grads: OutputGradients, inputs: Inputs) -> Gradients:
    """Uninitialised tensors of the shapes and types that a backward pass returns, contiguous."""
    log_decay = grads.kv.new_empty(0) if inputs.log_decay is None else inputs.log_decay
    like = (*inputs[:3], log_decay, grads.kv, grads.k_sum)
    return Gradients._make(x.new_empty(x.shape) for x in like)


def _part(inputs: Inputs, rows: Tensor, tokens: Tensor, padding: Tensor) -> Inputs:
    """The inputs of one bucket: its tokens, padded, and the states of its rows."""
    of_tokens = (None if x is None else _gather(x, tokens, padding) for x in inputs[:4])
    states = (None if x is None else x[rows] for x in inputs[4:])
    return Inputs._make((*of_tokens, *states))


def _gather(x: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
    """[1,T,...] -> [n,L,...] by packed position, with zeros at the padding."""
    return without_padding(x[0, tokens], padding)
