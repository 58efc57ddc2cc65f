r"""Attention to the tokens that hash to the same bucket: hashing, and one softmax over several rounds.

In round r query i reads a set P_i^r of keys of the same sequence, never key i. Over all R rounds

    P_i = union of P_i^r        o_i = sum_{j in P_i} softmax_j(scale q_i . k_j) v_j, or v_i if P_i is empty

A round multiplies blocks of c queries with 2c keys, and gives o_i^r with its log-sum-exp. If N_ij rounds read
key j, its score is reduced by log N_ij in each of these rounds. Merging the rounds then gives the softmax
over the union.

Kitaev, Kaiser and Levskaya 2020, "Reformer", arXiv 2001.04451, section 2 and appendix A. The module
`reformer` defines the sets, and says why the causal ones differ from those of the paper.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unrolled.ops.checks import check_key_padding_mask, check_qkv, shape
from unrolled.ops.merge import average_and_lse, merge_softmax
from unrolled.ops.node import like_attention, one_node
from unrolled.ops.observing import observed
from unrolled.ops.operators import differentiable_gradients
from unrolled.ops.packing import reorder
from unrolled.ops.precision import accumulation_dtype, without_autocast

ABSENT = -1  # the bucket of padding

MASKED = -1e30  # the score of a key that is not read: finite, since a query may have no other

CPU_SCORES = 2**18  # scores that are computed at once: 1 MB, which fits the cache


def unit_keys(q: Tensor) -> Tensor:
    """Return k = q / |q|, with 1e-6 added to the mean square to avoid a division by 0."""
    length = (q.shape[-1] * (q.square().mean(-1, keepdim=True) + 1e-6)).sqrt()
    return q / length


def hash_buckets(rotated: Tensor, factors: Sequence[int]) -> Tensor:
    """Buckets of `rotated` = x R `[..., sum(factors)/2]`: integers `[...]` below the product of the factors.

    Each factor n hashes the next n/2 numbers into n buckets; the first factor varies fastest.
    """
    bucket, stride = torch.zeros(rotated.shape[:-1], dtype=torch.long, device=rotated.device), 1
    for part, n in zip(torch.split(rotated, [n // 2 for n in factors], -1), factors, strict=True):
        bucket = bucket + stride * torch.cat([part, -part], -1).argmax(-1)
        stride *= n
    return bucket


@one_node(like_attention)
def lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: Tensor,
    *,
    chunk: int,
    causal: bool = False,
    same_bucket: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attend within chunks of the tokens sorted by bucket, as published (equations above): `[B,T,H,M]`.

    Args:
        q, k: `[B,T,H,D]`, of the same tokens.
        v: `[B,T,H,M]`.
        buckets: `[B,T,H,R]`, integers, for each of R rounds; -1 for padding.
        chunk: length c of the chunks.
        causal: mask later keys, as the paper does. Their buckets still matter: see the module `reformer`.
        same_bucket: mask the keys of other buckets.
        key_padding_mask: `[B,T]`, True = padding, which gives 0.
        scale: factor of the scores.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, but must be at least 1")
    tokens = _tokens(q, k, v, buckets, key_padding_mask)
    if v.numel() == 0:
        return v
    order, place = _sort(tokens)
    last = (tokens.present.sum(1).clamp(min=1) - 1).view(-1, 1, 1) // chunk
    own = place // chunk
    before = torch.where(own > 0, own - 1, last)
    codes = torch.stack([own, before], -1).int()  # fast to compare
    if same_bucket:
        codes = codes.long() * (tokens.buckets.amax() + 1) + tokens.buckets.unsqueeze(-1)
    absent = ~tokens.present[:, None, :, None]

    def reads(query: Tensor, key: Tensor) -> Tensor:
        return (query[..., 0] == key[..., 0]) | (query[..., 1] == key[..., 0])

    def may_read(i: Tensor, j: Tensor) -> Tensor:
        return j < i if causal else j != i

    (N, R, T), C = order.shape, -(-q.shape[1] // chunk)
    block = torch.arange(C, device=q.device).expand(N, R, C)
    previous = torch.where(block > 0, block - 1, last)
    layout = Layout(
        torch.nn.functional.pad(order, (0, C * chunk - T), value=ABSENT).view(N, R, C, chunk),
        place,
        previous.masked_fill(previous == block, ABSENT),
    )
    sets = Sets(codes.masked_fill(absent, -2), codes[..., :1].masked_fill(absent, -1), reads, may_read)
    return _by_token(_attend(tokens, sets, layout, scale), q.shape[0]).to(v.dtype)


@one_node(like_attention)
def causal_lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: Tensor,
    *,
    n_buckets: int,
    window: int,
    key_padding_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attend to the last `window` earlier tokens of the same bucket (equations above): `[B,T,H,M]`.

    Args:
        q, k, v, key_padding_mask, scale: as for `lsh_attention`.
        buckets: `[B,T,H,R]`, integers below `n_buckets`, for each of R rounds; -1 for padding.
        n_buckets: number of buckets.
        window: number of tokens c.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    if window < 1:
        raise ValueError(f"window is {window}, but must be at least 1")
    tokens = _tokens(q, k, v, buckets, key_padding_mask)
    if v.numel() == 0:
        return v
    _, place = _sort(tokens)
    # Codes of different buckets differ by more than `window`, so one difference tests bucket and distance.
    # Codes are doubled, so that 0 < i - j <= window is one comparison, |2 (i - j) - window - 1| < window.
    code = place + tokens.buckets * (window + 1)
    if 2 * (n_buckets * (window + 1) + q.shape[1]) < 2**31:
        code = code.int()  # fast to compare
    code = 2 * code.masked_fill(~tokens.present.unsqueeze(1), -window - 2).unsqueeze(-1)

    def reads(query: Tensor, key: Tensor) -> Tensor:
        return (query - key).squeeze(-1).abs() < window

    layout = _blocks_of_buckets(tokens, place, n_buckets, window)
    sets = Sets(code - window - 1, code, reads, None)
    return _by_token(_attend(tokens, sets, layout, scale), q.shape[0]).to(v.dtype)


class Tokens(NamedTuple):
    """The inputs as N = B*H rows, in the accumulation dtype, with zeros at padding."""

    q: Tensor  # [N,T,D]
    k: Tensor  # [N,T,D]
    v: Tensor  # [N,T,M]
    buckets: Tensor  # [N,R,T]
    present: Tensor  # [N,T]


class Sets(NamedTuple):
    """Key j is in the set of query i in a round if `reads(code of i, code of j)` and `may_read(i, j)`.

    Both functions broadcast. Without `may_read`, the codes alone decide.
    """

    query: Tensor  # [N,R,T,F], integers
    key: Tensor  # [N,R,T,1]
    reads: Callable[[Tensor, Tensor], Tensor]
    may_read: Callable[[Tensor, Tensor], Tensor] | None


class Layout(NamedTuple):
    """An arrangement in C blocks of c slots, such that a query reads its own block and one other."""

    tokens: Tensor  # [N,R,C,c], the token in each slot, or -1
    slot: Tensor  # [N,R,T], the slot of each token
    other: Tensor  # [N,R,C], the other block, or -1


def _tokens(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, key_padding_mask: Tensor | None) -> Tokens:
    check_qkv(q, k, v)
    if q.shape != k.shape:
        raise ValueError(
            f"k has shape {shape(k)}, but must be {shape(q)} like q: both are of the same tokens"
        )
    if buckets.dim() != 4 or buckets.shape[:3] != q.shape[:3] or buckets.is_floating_point():
        raise ValueError(
            f"buckets is {buckets.dtype} of shape {shape(buckets)}, "
            f"but must be integers {[*q.shape[:3], 'R']}"
        )
    if key_padding_mask is not None:
        check_key_padding_mask(key_padding_mask, *q.shape[:2])
        buckets = buckets.masked_fill(key_padding_mask[:, :, None, None], ABSENT)
    buckets = buckets.permute(0, 2, 3, 1).flatten(0, 1)
    present = buckets[:, 0] != ABSENT
    dtype, absent = accumulation_dtype(q.dtype, k.dtype, v.dtype), ~present.unsqueeze(-1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(dtype).masked_fill(absent, 0) for x in (q, k, v))
    return Tokens(q, k, v, buckets, present)


def _by_token(o: Tensor, batch: int) -> Tensor:
    """`[N,T,M]` to `[B,T,H,M]`."""
    return torch.unflatten(o, 0, (batch, -1)).transpose(1, 2)


def _sort(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Sort by bucket, then position, with padding last: the token at each place, and the inverse."""
    buckets, last = tokens.buckets, torch.iinfo(tokens.buckets.dtype).max
    order = buckets.masked_fill(buckets == ABSENT, last).argsort(dim=-1, stable=True)
    return order, _scatter(order, torch.arange(order.shape[-1], device=order.device), order.shape[-1])


def _scatter(places: Tensor, values: Tensor, size: int) -> Tensor:
    """Return y with y[..., places] = values along the last axis, -1 elsewhere."""
    y = torch.full((*places.shape[:-1], size), ABSENT, device=places.device)
    return y.scatter(-1, places, values.expand_as(places))


def _blocks_of_buckets(tokens: Tokens, place: Tensor, n_buckets: int, size: int) -> Layout:
    """Start each bucket in a new block.

    The slots of a query's keys then depend on earlier tokens only, so that later tokens change no bit.
    """
    (N, R, T), buckets = place.shape, tokens.buckets
    C = min(T, (T + n_buckets * (size - 1)) // size)  # the most blocks that T tokens can take
    absent = buckets == ABSENT
    bucket = buckets.masked_fill(absent, n_buckets)
    count = place.new_zeros(N, R, n_buckets + 1).scatter_add(-1, bucket, torch.ones_like(bucket))
    first_place, blocks = count.cumsum(-1) - count, (count + size - 1) // size
    first_slot = (blocks.cumsum(-1) - blocks) * size
    slot = (place + (first_slot - first_place).gather(-1, bucket)).masked_fill(absent, C * size)
    token = _scatter(slot, torch.arange(T, device=place.device), C * size + 1)[..., :-1]
    other = torch.arange(-1, C - 1, device=place.device).expand(N, R, C)
    return Layout(token.view(N, R, C, size), slot.masked_fill(absent, 0), other)


def _attend(tokens: Tokens, sets: Sets, layout: Layout, scale: float) -> Tensor:
    """Compute the softmax over the union of the sets, `[N,T,M]`."""
    (T, (R, C, c)), v = (tokens.q.shape[1], layout.tokens.shape[1:]), tokens.v
    dense = R * C * c * 2 * c >= T * T
    size = max(1, CPU_SCORES // (T * T if dense else C * c * 2 * c))
    if not v.is_cpu or observed():
        size = len(v)
    with without_autocast(v.device):
        parts = [
            _all_pairs(*rows[:2], scale) if dense else _union(*rows, scale)
            for rows in _split(tokens, sets, layout, size)
        ]
        o, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        o = torch.where((lse == -torch.inf).unsqueeze(-1), v, o)
        return o.masked_fill(~tokens.present.unsqueeze(-1), 0)


def _split(tokens: Tokens, sets: Sets, layout: Layout, size: int) -> Iterator[tuple[Tokens, Sets, Layout]]:
    """Split the N rows into parts of this size."""
    parts = (zip(*(torch.split(x, size) for x in of), strict=True) for of in (tokens, sets[:2], layout))
    for token, code, slot in zip(*parts, strict=True):
        query, key = code
        yield Tokens._make(token), sets._replace(query=query, key=key), Layout._make(slot)


def _all_pairs(tokens: Tokens, sets: Sets, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the definition: one softmax over all pairs, masked by the union."""
    rounds = zip(sets.query.unbind(1), sets.key.unbind(1), strict=True)
    member = reduce(or_, (sets.reads(i.unsqueeze(2), j.unsqueeze(1)) for i, j in rounds))
    if sets.may_read is not None:
        i = torch.arange(tokens.q.shape[1], device=tokens.q.device)
        member = member & sets.may_read(i.unsqueeze(1), i)
    return _average(tokens.q, tokens.k, tokens.v, member, scale)


def _union(tokens: Tokens, sets: Sets, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the rounds and merge them: `o [N,T,M]`, `lse [N,T]`."""
    rounds = range(layout.tokens.shape[1])
    return merge_softmax([_round(tokens, sets, layout, r, scale) for r in rounds])


def _round(tokens: Tokens, sets: Sets, layout: Layout, r: int, scale: float) -> tuple[Tensor, Tensor]:
    """Compute one round, in which a key that n rounds read weighs 1/n: `o [N,T,M]`, `lse [N,T]`."""
    block, other = layout.tokens[:, r], layout.other[:, r]
    # Any block may replace a missing one, since its tokens are masked. This uses `%` because Inductor fails
    # on a clamped `arange` as index.
    beside = reorder(block, other % other.shape[-1]).masked_fill((other == ABSENT).unsqueeze(-1), ABSENT)
    readable = torch.cat([beside, block], -1)
    i, j = block.clamp(min=0), readable.clamp(min=0)
    rounds = [
        sets.reads(reorder(query, i).unsqueeze(3), reorder(key, j).unsqueeze(2))
        for query, key in zip(sets.query.unbind(1), sets.key.unbind(1), strict=True)
    ]
    allowed = rounds[r] & (readable != ABSENT).unsqueeze(2)
    if sets.may_read is not None:
        allowed = allowed & sets.may_read(i.unsqueeze(3), j.unsqueeze(2))
    count = allowed if len(rounds) == 1 else allowed * sum(x.short() for x in rounds)
    o, lse = _average(reorder(tokens.q, i), reorder(tokens.k, j), reorder(tokens.v, j), count, scale)
    slot = layout.slot[:, r]
    return reorder(o.flatten(1, 2), slot), reorder(lse.flatten(1, 2), slot)


def _average(q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Average `v [...,s,M]` by a softmax in which key j of query i weighs 1/n_ij: `[...,t,M]` and its lse.

    `count [...,t,s]` has n_ij, 0 for a key that the query does not read; booleans stand for 0 and 1. Without
    keys, the average is 0 and its lse minus infinity.
    """
    batch = q.shape[:-2]
    q, k, v, count = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, count))
    if observed():
        o, lse = average_and_lse(_scores(q, k, count, scale), v)
    else:
        o, lse = _Average.apply(q, k, v, count, scale)  # type: ignore[no-untyped-call]
    return o.reshape(*batch, *o.shape[1:]), lse.reshape(*batch, lse.shape[1])


def _scores(q: Tensor, k: Tensor, count: Tensor, scale: float) -> Tensor:
    """Compute scale q_i . k_j - log n_ij, minus infinity where n_ij = 0."""
    bias = -count.to(q.dtype).log().abs()
    return torch.baddbmm(bias, q, k.mT, alpha=scale)


class _Average(torch.autograd.Function):
    """`_average` with a gradient in few passes over the scores.

    With the weights w, which add up to 1, and the scores s,

        o = w v        ds = w (do v^T - delta)        delta = do . o - dlse

    The largest weight is exp(top - lse), so lse costs no exponentials beside those of torch's softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = ((scale * q) @ k.mT).masked_fill_(count == 0, MASKED)
        top = scores.amax(-1, keepdim=True)
        nothing = top == MASKED
        weights = scores.softmax(-1)
        lse = top - weights.amax(-1, keepdim=True).log()
        if count.dtype != torch.bool:
            total = weights.div_(count.clamp(min=1)).sum(-1, keepdim=True)
            weights.div_(total)
            lse += total.log()
        o = (weights @ v).masked_fill_(nothing, 0)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, count, weights, nothing, o)
        return o, lse.masked_fill_(nothing, -torch.inf)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, count, weights, nothing, o = ctx.saved_tensors
        scale = ctx.scale
        if torch.is_grad_enabled():  # double backward: differentiate the plain operations

            def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                return average_and_lse(_scores(q, k, count, scale), v)

            return *differentiable_gradients(run, [q, k, v], [do, dlse]), None, None
        do, dlse = do.masked_fill(nothing, 0), dlse.masked_fill(nothing, 0)
        delta = (do * o).sum(-1, keepdim=True) - dlse
        ds = torch.baddbmm(-delta, do, v.mT).mul_(weights)
        return scale * (ds @ k), scale * (ds.mT @ q), weights.mT @ do, None, None
