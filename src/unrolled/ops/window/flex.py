"""Window attention on CUDA through `torch.nn.attention.flex_attention`, compiled on first use.

flex skips the blocks of 128 x 128 scores that are fully masked, and masks the scores of partly masked blocks.
The blocks are computed from the window, so nothing of size [T,S] is allocated, and cached for the last few
windows. Padding and packing are masked score by score, so they change neither blocks nor kernel.

Autograd differentiates flex itself, so it is not part of the operator in `operator.py`: inside an operator,
autograd records nothing.

On a CPU, the tests compare the blocks with those that torch derives from the mask, run the forward pass
through uncompiled flex, and take gradients through a substitute, as flex has none on a CPU.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.packing import segment_ids
from unrolled.ops.precision import without_autocast
from unrolled.ops.window.blocks import Inputs, Options, bounded

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # scores on a side of flex's blocks
NARROWEST = 16  # the narrowest heads that flex's kernels can run
VARIANTS = 64  # combinations of dtypes, masks and numbers of heads to compile at most; torch's default is 8


class Blocks(NamedTuple):
    """The key blocks that each query block attends to, partly or fully."""

    partly: Tensor  # bool [ceil(T/128), ceil(S/128)]
    fully: Tensor


def supports(inputs: Inputs) -> bool:
    """Whether flex can run this: on CUDA, in a supported type, and not on empty tensors."""
    q, _, v, _ = inputs
    return (
        q.is_cuda
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and min(q.shape[3], v.shape[3]) >= NARROWEST
        and min(*q.shape, *v.shape) > 0
    )


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` in the dtype of `v` and `lse [B,T,H]` in fp32, and let autograd record it."""
    q, k, v, padding = inputs
    cu_seqlens, window_size, scale = options
    T, S = q.shape[1], k.shape[1]
    compiling = torch.compiler.is_compiling()  # flex is then compiled with the rest
    run = _compiled() if q.is_cuda and not compiling else _flex
    make_mask = _block_mask if compiling else _kept_block_mask
    segments = None if cu_seqlens is None else segment_ids(cu_seqlens, T)
    with without_autocast(q.device):
        o, lse = run(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=_mask_scores(padding, segments),
            block_mask=make_mask(*window_size, T, S, q.device),
            scale=scale,
            enable_gqa=True,
        )
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    if padding is None and T == S:
        return o, lse
    nothing = lse == -torch.inf  # then no gradient may pass, not even NaN
    return o.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -torch.inf)


def readable_blocks(left: int, right: int, T: int, S: int, device: torch.device) -> Blocks:
    """Compute which blocks of scores the window covers; blocks that extend beyond T or S are read partly."""
    left, right = bounded((left, right), T, S)
    first = torch.arange(0, T, BLOCK, device=device).unsqueeze(-1) + (S - T)
    last = (first + BLOCK - 1).clamp(max=S - 1)
    low = torch.arange(0, S, BLOCK, device=device)
    high = low + BLOCK - 1
    touched = (low <= last + right) & (high >= first - left)
    whole = (first + BLOCK <= S) & (high < S)
    fully = whole & (high <= first + right) & (low >= last - left)
    return Blocks(touched & ~fully, fully)


@lru_cache(maxsize=16)
def _kept_block_mask(left: int, right: int, T: int, S: int, device: torch.device) -> "BlockMask":
    with torch.inference_mode(False):  # a mask that was made for generation must serve training too
        return _block_mask(left, right, T, S, device)


def _block_mask(left: int, right: int, T: int, S: int, device: torch.device) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask

    blocks = readable_blocks(left, right, T, S, device)
    return BlockMask.from_kv_blocks(
        *_indices(blocks.partly),
        *_indices(blocks.fully),
        BLOCK_SIZE=BLOCK,
        mask_mod=_window(left, right, T, S, device),
        seq_lengths=(T, S),
    )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks in each row, and all block indices, these blocks first: `[1,1,...]`."""
    number = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return number[None, None], order[None, None]


def _window(left: int, right: int, T: int, S: int, device: torch.device) -> Callable[..., Tensor]:
    """Make flex's `mask_mod`. The bounds are a tensor, as each pair of constants would be compiled again."""
    left, right = bounded((left, right), T, S)
    # The range of j - i, where query i has the position i + S - T.
    bounds = torch.tensor([S - T - left, S - T + right], device=device)

    def may_read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i >= bounds[0]) & (j - i <= bounds[1])

    return may_read


def _mask_scores(padding: Tensor | None, segments: Tensor | None) -> Callable[..., Tensor] | None:
    """Make flex's `score_mod`, which masks padding and the other sequences of a pack."""
    if padding is None and segments is None:
        return None

    def mask(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if padding is not None:
            score = torch.where(padding[b, j], -torch.inf, score)
        if segments is not None:
            score = torch.where(segments[i] != segments[j], -torch.inf, score)
        return score

    return mask


def _flex(*args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Run flex, which returns `o` and `lse` in other ways in older versions of torch."""
    from torch.nn.attention import flex_attention as module

    run: Callable[..., Any] = module.flex_attention
    if hasattr(module, "AuxRequest"):
        o, aux = run(*args, **options, return_aux=module.AuxRequest(lse=True))
        return o, aux.lse
    o, lse = run(*args, **options, return_lse=True)
    return o, lse


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    # With fullgraph, exceeding the recompile limit is an error; without, flex would silently allocate [T,S].
    run = torch.compile(_flex, fullgraph=True)

    def run_compiled(*args: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        with torch._dynamo.config.patch(recompile_limit=VARIANTS):
            o, lse = run(*args, **options)
            return o, lse

    return run_compiled
