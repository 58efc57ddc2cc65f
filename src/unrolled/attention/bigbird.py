r"""BigBird attention: softmax attention to nearby, random and global blocks of keys.

The n tokens of a sequence form N = ceil(n / b) blocks of b. Query block i reads key block j, once, if

    |i - j| <= (w - 1) / 2                near: w blocks, its own in the middle
    j in R_i                              random: r blocks, different for each head
    j < f  or  j >= N - e                 global columns: the first f blocks and the last e
    i < f  or  i >= N - e                 global rows: they read everything

R_i consists of r blocks, drawn uniformly from those that i does not read otherwise, or of all of those if
there are no more than r. The first g tokens may be global: they precede the blocks, read all tokens and are
read by all. The paper's ITC is f = e = 1 and g = 0; its ETC is f = e = 0 with g tokens put before the
sequence. N counts the blocks of valid tokens, so that padding is never a global block. Random blocks are
computed from the seed, the head, the block and N, so training and evaluation read the same ones.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv 2007.14062, section 2 and appendix D.

Cost per head: time O(T ((w + r + f + e) b + g) (D + M)), memory O(T (D + M)).
Cannot: be causal, read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: where every block reads all blocks, N <= f + e + r + (w + 1) / 2. Softmax attention
is then computed.

With `rotary`, queries and keys are rotated by their positions.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._options import BIDIRECTIONAL_ONLY
from unrolled.attention._packed import attend_packed
from unrolled.attention._parts import attend_to_keys
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.block_sparse import block_sparse_attention
from unrolled.ops.checks import check_key_padding_mask, check_qkv, shape
from unrolled.ops.masks import zero_padding
from unrolled.ops.merge import merge_softmax
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.options import check_integers
from unrolled.ops.packing import reorder, valid_first
from unrolled.ops.softmax import softmax_attention


@dataclass(frozen=True)
class Layout:
    """The numbers b, w, (f, e), g and r of the definition."""

    block_size: int = 64
    window_blocks: int = 3
    global_blocks: tuple[int, int] = (1, 1)
    global_tokens: int = 0
    random_blocks: int = 3

    def __post_init__(self) -> None:
        b, w, ends = self.block_size, self.window_blocks, self.global_blocks
        check_integers(1, block_size=b)
        check_integers(0, global_tokens=self.global_tokens, random_blocks=self.random_blocks)
        if type(w) is not int or w < 1 or w % 2 == 0:
            raise ValueError(f"window_blocks is {w!r}, but must be odd: a block and as many on each side")
        counts = ends if isinstance(ends, tuple | list) else ()
        if len(counts) != 2 or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"global_blocks is {ends!r}, but must be (first, last), both at least 0")

    def count_blocks(self, n: Tensor) -> Tensor:
        """Return N for n tokens."""
        return ((n - self.global_tokens).clamp(min=0) + self.block_size - 1) // self.block_size

    def reads_all(self, length: int) -> bool:
        """Return whether every block of a sequence up to this length reads all of it."""
        at_the_edge = self.window_blocks // 2 + 1 + self.random_blocks + sum(self.global_blocks)
        return length <= self.global_tokens + at_the_edge * self.block_size


def draw_blocks(layout: Layout, seed: Tensor, n_heads: int, n_blocks: Tensor, n_rows: int) -> Tensor:
    """Draw R_i of blocks i < n_rows of sequences of `n_blocks [B]` blocks: `[B,H,n_rows,r]`, -1 for none.

    `seed` is int64 and holds one or more numbers below 2^63, which are hashed together.
    """
    f, e = layout.global_blocks
    i, begin = torch.arange(n_rows, device=seed.device), torch.full_like(n_blocks, f)[:, None, None]
    end = (n_blocks[:, None, None] - e).clamp(min=f)
    # The blocks that i does not read otherwise are begin..left and right..end.
    left = (i - layout.window_blocks // 2).clamp(begin, end)
    right = (i + layout.window_blocks // 2 + 1).clamp(begin, end)
    available = left - begin + end - right
    bits = torch.zeros((), dtype=torch.int64, device=seed.device)
    head = torch.arange(n_heads, device=seed.device).unsqueeze(1)
    for number in (*(part for x in seed.reshape(-1) for part in (x & 0x7FFFFFFF, x >> 31)), head, i):
        bits = _scramble(bits ^ number)
    none = torch.iinfo(torch.int64).max
    drawn = (available + bits).unsqueeze(-1)[..., :0]
    for t in range(layout.random_blocks):
        bits = _scramble(bits + 1)
        nth = (bits * (available - t).clamp(min=0)) >> 32  # of the remaining blocks
        for earlier in drawn.unbind(-1):  # in ascending order, so that each is skipped
            nth = nth + (nth >= earlier)
        nth = nth.masked_fill(available <= t, none)
        drawn = torch.cat([drawn, nth.unsqueeze(-1)], -1).sort(-1).values
    place = f + drawn
    place = torch.where(place < left.unsqueeze(-1), place, place + (right - left).unsqueeze(-1))
    return place.masked_fill(drawn == none, -1)


def _scramble(x: Tensor) -> Tensor:
    """Map 32 bits one to one to 32 pseudorandom bits."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def block_lists(layout: Layout, drawn: Tensor, n_blocks: Tensor) -> Tensor:
    """List the blocks that each non-global block reads, none of them twice: `[B,H,N,L]`, -1 for none.

    `drawn [B,H,N,r]` may name any blocks, and `n_blocks` is `[B]`.
    """
    (f, e), radius = layout.global_blocks, layout.window_blocks // 2
    i = torch.arange(drawn.shape[2], device=drawn.device).unsqueeze(1)
    count = n_blocks[:, None, None, None]

    def steps(begin: int, end: int) -> Tensor:
        return torch.arange(begin, end, device=drawn.device)

    def other_than_global(j: Tensor) -> Tensor:
        return (j >= f) & (j < count - e)

    first, near, last = steps(0, f) + 0 * count, i + steps(-radius, radius + 1), count - e + steps(0, e)
    again = (drawn.unsqueeze(-1) == drawn.unsqueeze(-2)).tril(-1).any(-1)
    parts = (
        (first, first < count),
        (near, other_than_global(near)),
        (last, last >= f),
        (drawn, other_than_global(drawn) & ((drawn - i).abs() > radius) & ~again),
    )
    size = (max(len(drawn), len(n_blocks)), *drawn.shape[1:3], -1)
    return torch.cat([torch.where(valid, j, -1).expand(size) for j, valid in parts], -1)


def bigbird_pattern(layout: Layout, drawn: Tensor, length: int) -> Tensor:
    """The definition: whether query i reads key j, `[H,length,length]`, with `drawn [H,N,r]`."""
    (f, e), g, N = layout.global_blocks, layout.global_tokens, drawn.shape[1]
    i, j = torch.arange(N).unsqueeze(1), torch.arange(N)
    is_global = (j < f) | (j >= N - e)
    near = (i - j).abs() <= layout.window_blocks // 2
    random = (drawn.cpu().unsqueeze(-1) == j).any(-2)
    blocks = near | random | is_global | is_global.unsqueeze(1)
    reads = torch.ones(len(drawn), length, length, dtype=torch.bool)
    block = torch.arange(max(0, length - g)) // layout.block_size
    reads[:, g:, g:] = blocks[:, block][:, :, block]
    return reads


def bigbird_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, drawn: Tensor, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Attend from `q [B,T,H,D]` to `k [B,T,G,D]`, `v [B,T,G,M]`: `[B,T,H,M]`.

    Args:
        q, k, v: as for `softmax_attention`, all of the same tokens.
        layout: what is read.
        drawn: int64 `[B,H,N,r]`, or 1 for B: the random blocks of each block, -1 for none; see `draw_blocks`.
            N is that of T tokens. Blocks that are read anyway are not read twice.
        key_padding_mask: `[B,T]`, True = padding.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v)
    (B, T, H, _), S = q.shape, k.shape[1]
    if S != T:
        raise ValueError(f"k has length {S}, but must have {T} like q: both are of the same tokens")
    k, v = zero_padding(key_padding_mask, k, v)
    (f, e), g, b = layout.global_blocks, layout.global_tokens, layout.block_size
    n = torch.full((1,), T, device=q.device)
    N = max(0, -(-(T - g) // b))
    if drawn.dtype != torch.int64 or drawn.dim() != 4 or drawn.shape[1:3] != (H, N):
        raise ValueError(
            f"drawn is {drawn.dtype} of shape {shape(drawn)}, but must be torch.int64 [{B}, {H}, {N}, r]"
        )
    padding, places = None, None
    if key_padding_mask is not None:
        n, places = (~key_padding_mask).sum(1), valid_first(key_padding_mask)
        q, k, v, padding = (reorder(x, places) for x in (q, k, v, key_padding_mask))
    n_blocks = layout.count_blocks(n)
    # Blocks that are not global, then the global tokens, the first blocks and the last ones.
    blocks, masked = block_lists(layout, drawn, n_blocks), None if padding is None else padding[:, g:]
    part = block_sparse_attention(
        q[:, g:], k[:, g:], v[:, g:], blocks, block_size=(b, b), key_padding_mask=masked
    )
    o = part[0]
    if g > 0:
        masked = None if padding is None else padding[:, :g]
        o, _ = merge_softmax([part, attend_to_keys(q[:, g:], k[:, :g], v[:, :g], masked)])
    if g + f > 0:
        begin = softmax_attention(q[:, : g + f * b], k, v, key_padding_mask=padding)
        o = torch.cat([begin, o[:, f * b :]], 1)
    if e > 0:
        missing = max(0, g + max(N, e) * b - T)  # the last blocks may extend past the last token
        whole = (0, 0, 0, 0, 0, missing)
        start = (g + (n_blocks - e) * b).clamp(min=0).unsqueeze(1)
        tokens = (start + torch.arange(e * b, device=q.device)).expand(B, -1)[..., None, None]
        end = pad(q, whole).gather(1, tokens.expand(-1, -1, *q.shape[2:]))
        end = softmax_attention(end, k, v, key_padding_mask=padding)
        o = pad(o, whole).scatter(1, tokens.expand(-1, -1, *o.shape[2:]), end)[:, :T]
    return o if places is None else reorder(o, places.argsort(1))


@one_node(like_attention)
def seeded_bigbird_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, seed: Tensor, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Draw the random blocks as `draw_blocks` does, and attend as `bigbird_attention` does.

    Sequences in which every block reads all get softmax attention.
    """
    (B, T, H, _), padding = q.shape, key_padding_mask
    if layout.reads_all(T):
        return softmax_attention(q, k, v, key_padding_mask=padding)
    n = torch.full((1,), T, device=q.device)
    if padding is not None:
        check_key_padding_mask(padding, B, T)
        n = (~padding).sum(1)
    n_rows = -(-max(0, T - layout.global_tokens) // layout.block_size)
    drawn = draw_blocks(layout, seed, H, layout.count_blocks(n), n_rows)
    return bigbird_attention(q, k, v, layout, drawn, key_padding_mask=padding)


class BigBirdAttention(MultiHeadAttention[None, None]):
    """Multi-head BigBird attention, for encoders.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        block_size: number of tokens b of a block.
        window_blocks: odd number w of near blocks, the block itself among them.
        global_blocks: numbers (f, e) of global blocks at the beginning and at the end.
        global_tokens: number g of global tokens, which the caller puts at the beginning of the sequence, and
            which are in no block; with global_blocks = (0, 0), the paper's ETC.
        random_blocks: number r of random blocks.
        seed: a number of up to 63 bits; by default drawn like initial weights, from torch's generator.

    Raises:
        ValueError: sizes out of range.
        UnsupportedError: causal attention.
    """

    supports = BIDIRECTIONAL_ONLY.but(cross=False, packing=True)
    one_way = "global tokens read past and future and pass them on; use sparse_transformer attention"
    seed: Tensor
    redraws: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        block_size: int = 64,
        window_blocks: int = 3,
        global_blocks: tuple[int, int] = (1, 1),
        global_tokens: int = 0,
        random_blocks: int = 3,
        seed: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        self.layout = Layout(block_size, window_blocks, global_blocks, global_tokens, random_blocks)
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        if seed < 0:  # `ChecksOptions` refuses 64 bits and more
            raise ValueError(f"seed is {seed!r}, but must be at least 0 and below 2^63")
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("redraws", torch.tensor(0))

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if masks.cu_seqlens is not None:
            return attend_packed(self.attend, heads, masks.cu_seqlens)
        (q, k), seed, padding = self.rotated(heads), self._seeds(), masks.key_padding_mask
        return seeded_bigbird_attention(q, k, heads.v, self.layout, seed, key_padding_mask=padding)

    def redraw(self) -> None:
        """Draw new blocks, determined by the seed and the number of redraws."""
        self.redraws += 1

    def pattern(self, length: int) -> Tensor:
        """Count how often query i reads key j: `[H,length,length]`, 0 or 1."""
        n_blocks = self.layout.count_blocks(torch.full((1,), length, device=self.seed.device))
        drawn = draw_blocks(self.layout, self._seeds(), self.n_heads, n_blocks, int(n_blocks))
        return bigbird_pattern(self.layout, drawn[0], length).long()

    def _seeds(self) -> Tensor:
        return torch.stack([self.seed, self.redraws])

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return ", ".join(f"{name}={value}" for name, value in vars(self.layout).items())
