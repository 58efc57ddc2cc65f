"""Linear attention over packed sequences in plain PyTorch: each group of similar lengths runs padded."""

from torch import Tensor

from unrolled.ops import linear_chunked
from unrolled.ops.packing import length_buckets
from unrolled.ops.precision import accumulation_dtype


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    cu_seqlens: Tensor,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `linear_chunked.forward` does for each sequence; the states have one row per sequence."""
    o, kv_end, k_sum_end, den = like_outputs(q, k, v, cu_seqlens, normalize)
    for rows, tokens, padding in length_buckets(cu_seqlens):
        q_part, k_part, v_part = (_gather(x, tokens, padding) for x in (q, k, v))
        gates = None if log_decay is None else _gather(log_decay, tokens, padding)
        kv_part, k_sum_part = None if kv is None else kv[rows], None if k_sum is None else k_sum[rows]
        o_part, kv_end[rows], k_sum_end[rows], den_part = linear_chunked.forward(
            q_part, k_part, v_part, gates, kv_part, k_sum_part, causal, normalize
        )
        o[0, tokens[~padding]] = o_part[~padding]
        if normalize:
            den[0, tokens[~padding]] = den_part[~padding]
    return o, kv_end, k_sum_end, den


def backward(
    grad_o: Tensor,
    grad_kv: Tensor,
    grad_k_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    cu_seqlens: Tensor,
    den: Tensor,
    causal: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `q, k, v, log_decay, kv, k_sum`, as `linear_chunked.backward` does."""
    gradients = like_gradients(grad_kv, grad_k_sum, q, k, v, log_decay)
    for rows, tokens, padding in length_buckets(cu_seqlens):
        part = linear_chunked.backward(
            _gather(grad_o, tokens, padding),
            grad_kv[rows],
            grad_k_sum[rows],
            _gather(q, tokens, padding),
            _gather(k, tokens, padding),
            _gather(v, tokens, padding),
            None if log_decay is None else _gather(log_decay, tokens, padding),
            None if kv is None else kv[rows],
            None if k_sum is None else k_sum[rows],
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
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zeros of the shapes and types that a forward pass returns."""
    B, T, H, R = q.shape
    G, M = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = accumulation_dtype(q.dtype)
    return (
        v.new_zeros(B, T, H, M),
        k.new_zeros(N, G, R, M, dtype=dtype),
        k.new_zeros(N, G, R, dtype=dtype),
        q.new_zeros((B, T, H, 1) if normalize else 0, dtype=dtype),
    )


def like_gradients(
    grad_kv: Tensor, grad_k_sum: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Zeros of the shapes and types that a backward pass returns, in the plain memory order."""
    return (
        q.new_zeros(q.shape),
        k.new_zeros(k.shape),
        v.new_zeros(v.shape),
        grad_kv.new_zeros(0) if log_decay is None else log_decay.new_zeros(log_decay.shape),
        grad_kv.new_zeros(grad_kv.shape),
        grad_k_sum.new_zeros(grad_k_sum.shape),
    )


def _gather(x: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
    """[1,T,...] -> [n,L,...] by packed position, with zeros at the padding."""
    mask = padding.reshape(*padding.shape, *[1] * (x.dim() - 2))
    return x[0, tokens].masked_fill(mask, 0)
