r"""Block-sparse softmax attention: each block of queries reads a list of blocks of keys.

Query i is in block b(i) = floor(i / C), and key j is in block floor(j / K). Query i attends to the keys

    J_i = union of { K l, .., K l + K - 1 } over l in blocks[b(i)]
    lse_i = log sum_{j in J_i} exp(scale q_i . k_j)
    o_i = sum_{j in J_i} exp(scale q_i . k_j - lse_i) v_j

where a block that is listed twice counts twice. The keys of each list are gathered for a dense product, so
time is O(T L K (D + M)) for lists of L blocks. Query blocks are processed in groups, and the backward pass
recomputes each group, so memory is that of the inputs, the outputs and one group. On a CPU, the C++ kernels
of softmax attention compute a group, unless there is an `allowed` mask or the inputs are in fp64.

Zaheer et al. 2020, "Big Bird" (arXiv 2007.14062), appendix D, gathers blocks in this way. The result can be
merged with attention to other keys through lse (`ops/merge.py`).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.ops.checks import check_qkv, wrong
from unrolled.ops.chunks import cut
from unrolled.ops.masks import without_padding
from unrolled.ops.merge import average_and_lse
from unrolled.ops.observing import may_read, transforming
from unrolled.ops.operators import differentiable_gradients
from unrolled.ops.options import score_scale
from unrolled.ops.precision import accumulation_dtype, promoted, without_autocast
from unrolled.ops.window import native
from unrolled.ops.window.blocks import Inputs, Options
from unrolled.ops.window.operator import window_attention

CPU_SCORES = 2**18  # scores of a group: 1 MB, which fits the cache
GPU_SCORES = 2**26  # 256 MB, which keep a GPU busy


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    block_size: tuple[int, int],
    allowed: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from each block of queries to its list of blocks of keys.

    The equations are in `unrolled.ops.block_sparse`.

    Args:
        q: queries `[B,T,H,D]`; the last block may be short.
        k: keys `[B,S,G,D]`; H is a multiple of G, and query head h reads key head h // (H/G).
        v: values `[B,S,G,M]`.
        blocks: int64 `[B,H,N,L]`, where B and H may also be 1: for each of the N = ceil(T/C) blocks of
            queries, the indices of the key blocks that it attends to. An index is below ceil(S/K), or -1 for
            no block.
        block_size: (C, K), the lengths of a block of queries and of a block of keys.
        allowed: boolean, broadcastable to `[H,C,L K]`, True = attend: which of the L K keys in its list each
            of the C queries of a block attends to, the same for all blocks. By default, all of them.
        key_padding_mask: `[B,S]`, True = padding: such a key is masked, but keeps its position.
        scale: factor of the scores, 1/sqrt(D) by default.

    Returns:
        `o [B,T,H,M]` in the dtype of `v`, and `lse [B,T,H]`, the logarithm of the softmax's denominator. The
        softmax is computed and `lse` returned in fp32 (fp64 for fp64 inputs). A query that has nothing to
        attend to gives o = 0 with zero gradient and lse = minus infinity. Gradients of any order reach q, k
        and v through both results.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v, key_padding_mask)
    C, K = block_size
    if C < 1 or K < 1:
        raise ValueError(f"block_size is {block_size}, but both lengths must be at least 1")
    (B, T, H, D), (_, S, G, M) = q.shape, v.shape
    N, n_keys = -(-T // C), -(-S // K)
    fits = blocks.dim() == 4 and blocks.shape[0] in (1, B) and blocks.shape[1] in (1, H)
    if blocks.dtype != torch.int64 or not fits or blocks.shape[2] != N:
        raise wrong("blocks", blocks, f"torch.int64 [{B}, {H}, {N}, L]")
    if blocks.numel() and may_read(blocks) and int(blocks.max()) >= n_keys:
        raise ValueError(f"blocks has {int(blocks.max())}, but must be below the {n_keys} blocks of keys")
    if key_padding_mask is not None:
        k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
    q, k, v, out_dtype = *promoted(q, k, v), v.dtype
    dtype, L = accumulation_dtype(q.dtype), blocks.shape[3]
    if N * n_keys * L == 0:
        return v.new_zeros(B, T, H, M, dtype=out_dtype), q.new_full((B, T, H), -math.inf, dtype=dtype)
    with without_autocast(q.device):
        q = _cut(q.to(dtype) * score_scale(scale, D), C)
        k, v = (_cut(x.to(dtype), K).flatten(0, 2) for x in (k, v))
        number = blocks.clamp(min=0)
        hidden = (blocks < 0).repeat_interleave(K, -1)
        if key_padding_mask is not None or S % K:
            padding = _padding(key_padding_mask, B, S, K, q.device)
            row = torch.arange(B, device=q.device).reshape(B, 1, 1, 1)
            hidden = hidden | padding[row * n_keys + number].flatten(-2)
        head = torch.arange(B * G, device=q.device).reshape(B, G, 1, 1).repeat_interleave(H // G, 1)
        places = head * n_keys + number
        hidden = hidden.expand(B, H, N, L * K)
        inputs = (q, k, v, places, hidden, allowed)
        if torch.is_grad_enabled() and not transforming() and not torch.compiler.is_compiling():
            o, lse = _Attend.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            o, lse = _attend_by_groups(*inputs)
        o = o.flatten(2, 3)[:, :, :T].transpose(1, 2)
        return o.to(out_dtype), lse.flatten(2, 3)[:, :, :T].transpose(1, 2)


class _Attend(torch.autograd.Function):
    """`_attend_by_groups`, with a gradient that is computed by groups too.

    The backward pass recomputes the scores and adds up the gradients of the keys in place. Autograd would
    allocate zeros for all keys in every group, which takes time quadratic in the length.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return _attend_by_groups(*inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(do.device):
            return *_gradients(ctx.saved_tensors, do, dlse), None, None, None


def _gradients(saved: tuple[Tensor, ...], do: Tensor, dlse: Tensor) -> list[Tensor | None]:
    q, k, v, places, hidden, allowed = saved
    if torch.is_grad_enabled():  # double backward: differentiate the plain operations

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return _attend_by_groups(q, k, v, places, hidden, allowed)

        return differentiable_gradients(run, [q, k, v], [do, dlse])
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for group in _groups(places, k.shape[1] * q.shape[3], q.device):
        rows = places[:, :, group]
        parts = (q[:, :, group], *_gather(k, v, rows))
        q_g, k_g, v_g = (x.detach().requires_grad_() for x in parts)
        with torch.enable_grad():
            found = _attend(q_g, k_g, v_g, hidden[:, :, group], allowed)
        outer = do[:, :, group], dlse[:, :, group]
        of_q, of_k, of_v = torch.autograd.grad(found, (q_g, k_g, v_g), outer)
        dq.append(of_q)
        for total, part in ((dk, of_k), (dv, of_v)):
            total.index_add_(0, rows.flatten(), part.reshape(-1, *total.shape[1:]))
    return [torch.cat(dq, 2), dk, dv]


def _attend_by_groups(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, hidden: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend from `q [B,H,N,C,D]` to rows `places [B,H,N,L]` of `k [R,K,D]`, `v [R,K,M]`: `o` and `lse`."""
    found = [
        _attend(q[:, :, group], *_gather(k, v, places[:, :, group]), hidden[:, :, group], allowed)
        for group in _groups(places, k.shape[1] * q.shape[3], q.device)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _gather(k: Tensor, v: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Take rows `places [B,H,g,L]` of `k [R,K,D]` and `v [R,K,M]`: `[B,H,g,L K,D]` and `[B,H,g,L K,M]`."""
    size = (*places.shape[:3], places.shape[3] * k.shape[1])
    k, v = (x.index_select(0, places.flatten()).reshape(*size, x.shape[2]) for x in (k, v))
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend from `q [B,H,g,C,D]` to `k [B,H,g,L K,D]`, `v [B,H,g,L K,M]`: `o` and `lse`.

    `hidden [B,H,g,L K]` masks keys for all queries of a block (True = masked).
    """
    if allowed is None:
        # Each block of queries is a sequence with one head, in a window without bounds.
        rows = (x.flatten(0, 2).unsqueeze(2) for x in (q, k, v))
        inputs = Inputs._make((*rows, hidden.flatten(0, 2)))
        if native.can_replace(inputs):
            o, lse = window_attention(inputs, Options(None, (-1, -1), 1.0), "native")
            return o.reshape(*q.shape[:4], v.shape[4]), lse.reshape(q.shape[:4])
    masked = hidden.unsqueeze(-2)
    if allowed is not None:
        masked = masked | ~allowed.expand(q.shape[1], *allowed.shape[-2:]).unsqueeze(1)
    scores = (q @ k.mT).masked_fill(masked, -math.inf)
    o, lse = average_and_lse(scores, v)
    return o, lse.squeeze(-1)


def _groups(places: Tensor, per_pair: int, device: torch.device) -> list[slice]:
    """Split the N query blocks of `places [B,H,N,L]` into groups; a pair of blocks has `per_pair` scores."""
    B, H, N, L = places.shape
    scores = CPU_SCORES if device.type == "cpu" else GPU_SCORES
    size = max(1, scores // max(1, B * H * L * per_pair))
    return [slice(begin, begin + size) for begin in range(0, N, size)]


def _cut(x: Tensor, size: int) -> Tensor:
    """`[B,T,H,D]` to blocks `[B,H,N,size,D]`, with zeros after the end."""
    return cut(x, size).permute(0, 3, 1, 2, 4)


def _padding(key_padding_mask: Tensor | None, B: int, S: int, size: int, device: torch.device) -> Tensor:
    """The padding of each block of keys, `[B N,size]`, True also after the end."""
    if key_padding_mask is None:
        key_padding_mask = torch.zeros(B, S, dtype=torch.bool, device=device)
    return pad(key_padding_mask, (0, -S % size), value=True).reshape(-1, size)
