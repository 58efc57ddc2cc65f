r"""Clustered attention: similar queries share their attention, and each recomputes it on the top keys.

Queries are grouped into C clusters. The mean query of each cluster c attends to all keys. T_c are the k keys
to which it gives the largest weights, and m_c is the sum of these weights:

    A_cj = softmax_j(mean q_c . k_j / sqrt(D))                            the clusters' attention, [C, S]
    o_i  = m_c sum_{j in T_c} softmax_{T_c}(q_i . k_j / sqrt(D)) v_j + sum_{j not in T_c} A_cj v_j,   c = c(i)

So the k keys keep the total weight m_c that the cluster gives them, and each query divides this weight among
them by its own scores. With k = 0 it gets the output of its cluster, o_i = sum_j A_cj v_j ("clustered
attention"; with k > 0, "improved clustered attention").

Clustering works on hashes: the hash of a query is the signs of `bits` random projections, with a random
offset. Lloyd's algorithm assigns each hash to the centroid that differs in the fewest bits, then sets each
bit of a centroid to the majority of its members. Initial centroids are evenly spaced in the sorted list of
distinct hashes. Other rows, other heads and padding have no influence, and clusters have no gradient.

Vyas, Katharopoulos and Fleuret 2020, "Fast Transformers with Clustered Attention", arXiv 2007.04825, sections
3.2 and 3.3. Their code starts from hashes at random positions, padding included, the same for a whole batch.

Cost per head, for L iterations of Lloyd's algorithm: time O(S C (D + M) + T k (D + M) + L T C bits), memory
O((T + S + C k) (D + M) + C (S + T) + T (bits + k)).
Cannot: be causal (a mean query mixes past and future), or honour an arbitrary `attn_mask`. Where a projection
is nearly 0, rounding decides its sign, and so possibly the cluster of a query.
Equals softmax attention: with k >= S; with no more queries than clusters; also with more queries, if no more
of them are distinct than there are clusters, and all their hashes differ.

With `rotary`, queries and keys are rotated by their positions before the queries are clustered.
"""

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._heads import NO_MASKS, Projected
from unrolled.attention._options import BIDIRECTIONAL_ONLY
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.checks import check_qkv
from unrolled.ops.masks import without_padding, zero_padding
from unrolled.ops.node import any_length, like_attention, one_node
from unrolled.ops.options import check_integers
from unrolled.ops.packing import reorder
from unrolled.ops.positions import positions_from_padding
from unrolled.ops.precision import accumulated, accumulation_dtype, without_autocast
from unrolled.ops.random_features import Projection
from unrolled.ops.replay import chosen
from unrolled.ops.softmax import softmax_attention, softmax_or_zero

MAX_BITS = 62  # of a hash, kept in 64 bits, so that a larger value than any hash exists


def sign_clusters(codes: Tensor, n_clusters: int, iterations: int, padding: Tensor) -> Tensor:
    """Assign hashes to clusters by Lloyd's algorithm: `[X,T]`, numbers from 0 to C - 1.

    Args:
        codes: `[X,T,bits]`, entries 1 and -1 in fp32; at most 62 bits.
        n_clusters: number C of clusters.
        iterations: how often centroids are updated.
        padding: `[X,T]`, True = no query; its cluster has no meaning.
    """
    T, bits = codes.shape[1:]
    codes = codes.masked_fill(padding.unsqueeze(-1), 0)
    # Initial centroids: of the u distinct hashes in order, those at floor(c u / C).
    powers = 2 ** torch.arange(bits, device=codes.device)
    hashes = ((codes > 0) * powers).sum(-1).masked_fill(padding, 2**MAX_BITS)
    hashes, order = hashes.sort(dim=1, stable=True)
    first = pad(hashes[:, 1:] != hashes[:, :-1], (1, 0), value=True) & (hashes < 2**MAX_BITS)
    rank = first.cumsum(1)
    number = torch.arange(n_clusters, device=codes.device) * rank[:, -1:] // n_clusters + 1
    nth = torch.searchsorted(rank, number).clamp(max=T - 1)
    centroids = reorder(codes, order.gather(1, nth))
    for _ in range(iterations):
        nearest = (codes @ centroids.mT).argmax(-1)
        votes = _sum_by(nearest, codes, n_clusters)
        centroids = torch.where(votes == 0, centroids, votes.sign())
    return (codes @ centroids.mT).argmax(-1)


def group(cluster: Tensor, n_clusters: int, size: int, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange the queries in blocks of `size` places, each block for one cluster.

    Returns:
        the size of each cluster, `[X,C]`; the place of each query, `[X,T]`, where padding is placed after the
        last; and the cluster of each block, `[X,N]` with N = ceil(T/size) + C.
    """
    X, T = cluster.shape
    n_blocks = -(-T // size) + n_clusters
    of_cluster = cluster.masked_fill(padding, n_clusters)
    members = torch.zeros(X, n_clusters + 1, dtype=torch.long, device=cluster.device)
    members = members.scatter_add(1, of_cluster, torch.ones_like(of_cluster))
    ordered, order = of_cluster.sort(dim=1, stable=True)
    nth = torch.arange(T, device=cluster.device) - (members.cumsum(1) - members).gather(1, ordered)
    blocks = (members[:, :-1] + size - 1) // size
    end = blocks.cumsum(1)
    begin = pad(end - blocks, (0, 1), value=n_blocks)
    place = torch.zeros_like(order).scatter(1, order, begin.gather(1, ordered) * size + nth)
    place = place.masked_fill(padding, n_blocks * size)
    number = torch.arange(n_blocks, device=cluster.device).expand(X, -1).contiguous()
    of_block = torch.searchsorted(end, number, right=True).clamp(max=n_clusters - 1)
    return members[:, :-1], place, of_block


def clustered_reference(q: Tensor, k: Tensor, v: Tensor, cluster: Tensor, n_keys: int) -> Tensor:
    """One head by the equations: `q [T,D]`, `k [S,D]`, `v [S,M]`, `cluster [T]` to `[T,M]`."""
    rows = []
    for i, c in enumerate(cluster):
        shared = (k @ q[cluster == c].mean(0) / math.sqrt(q.shape[-1])).softmax(-1)
        top = shared.topk(min(n_keys, len(k))).indices
        rest = shared.index_fill(0, top, 0) @ v
        own = (k[top] @ q[i] / math.sqrt(q.shape[-1])).softmax(-1)
        rows.append(shared[top].sum() * own @ v[top] + rest)
    return torch.stack(rows)


@one_node(like_attention)
def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cluster: Tensor,
    n_clusters: int,
    n_keys: int,
    *,
    q_padding: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attend from `q [B,T,H,D]` in clusters to `k [B,S,G,D]` and `v [B,S,G,M]`: `[B,T,H,M]`.

    Args:
        q, k, v: as for `softmax_attention`.
        cluster: `[B,T,H]`, the cluster of each query, from 0 to C - 1.
        n_clusters: number C of clusters.
        n_keys: number k of keys that a query weighs by its own scores.
        q_padding: `[B,T]`, True = no query: it is in no cluster, and its output is 0.
        key_padding_mask: `[B,S]`, True = padding.

    Raises:
        ValueError: an argument of the wrong shape or type.
    """
    check_qkv(q, k, v)
    (B, T, H, D), (S, G, M) = q.shape, v.shape[1:]
    out_dtype, dtype = v.dtype, accumulation_dtype(q.dtype, k.dtype, v.dtype)
    k, v = zero_padding(key_padding_mask, k, v)
    absent = q.new_zeros(B, T, dtype=torch.bool) if q_padding is None else q_padding
    absent = absent.unsqueeze(1).expand(B, H, T).reshape(B * H, T)
    cluster = cluster.transpose(1, 2).reshape(B * H, T)
    with without_autocast(q.device):
        # Mean queries. X = B*H rows of queries, C clusters each; P = H/G query heads read one key head.
        q = q.to(dtype).transpose(1, 2).reshape(B * H, T, D) * D**-0.5
        k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
        size = -(-T // n_clusters)
        members, place, of_block = group(cluster, n_clusters, size, absent)
        n_blocks = of_block.shape[1]
        blocks = q.new_zeros(B * H, n_blocks * size + 1, D)
        blocks = blocks.scatter(1, place.unsqueeze(-1).expand(-1, -1, D), q)[:, :-1]
        blocks = blocks.reshape(B * H, n_blocks, size, D)
        means = _sum_by(of_block, blocks.sum(2), n_clusters) / members.clamp(min=1).unsqueeze(-1)

        # Attention of the clusters, split into the top keys and the rest.
        scores = means.reshape(B, G, H // G * n_clusters, D) @ k.mT  # [B,G,P*C,S]
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        n_keys = min(n_keys, S)
        top = chosen(lambda: scores.detach().topk(n_keys, sorted=False).indices, S)
        hidden = (scores.gather(-1, top) == -torch.inf).reshape(B * H, n_clusters, 1, n_keys)
        shared = softmax_or_zero(scores)
        mass = shared.gather(-1, top).sum(-1).reshape(B * H, n_clusters, 1, 1)
        rest = (shared.scatter(-1, top, 0) @ v).reshape(B * H, n_clusters, 1, M)

        # Attention of each query to the top keys of its cluster.
        head = torch.arange(B * G, device=q.device).reshape(B, G, 1, 1)
        top = (head * S + top).reshape(B * H, n_clusters, n_keys)
        kept_k, kept_v = (_take(x.flatten(0, 2), reorder(top, of_block)) for x in (k, v))  # [X,N,k,D]
        own = (blocks @ kept_k.mT).masked_fill(reorder(hidden, of_block), -torch.inf)
        o = reorder(mass, of_block) * (softmax_or_zero(own) @ kept_v) + reorder(rest, of_block)
        o = pad(o.flatten(1, 2), (0, 0, 0, 1))  # the output at padding
        o = o.gather(1, place.unsqueeze(-1).expand(-1, -1, M))
    return o.reshape(B, H, T, M).transpose(1, 2).to(out_dtype)


def _sum_by(number: Tensor, x: Tensor, n: int) -> Tensor:
    """Sum the rows of `x [X,N,W]` by their `number [X,N]`: `[X,n,W]`."""
    X, _, W = x.shape
    row = torch.arange(X, device=x.device).unsqueeze(1)
    total = x.new_zeros(X * n, W).index_add(0, (row * n + number).flatten(), x.flatten(0, 1))
    return total.reshape(X, n, W)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of `x [R,W]` at `index [...]`: `[...,W]`."""
    return x.index_select(0, index.flatten()).reshape(*index.shape, x.shape[1])


class ClusteredAttention(MultiHeadAttention[None, bool]):
    """Multi-head clustered attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        n_clusters: number C of clusters per head; up to C queries get softmax attention.
        n_keys: number k of keys that a query weighs by its own scores; 0 for plain clustered attention.
        bits: length of the hashes, up to 62.
        iterations: how often Lloyd's algorithm updates the centroids.
        seed: seed of the hash projections (in the state_dict); by default drawn like initial weights.

    Raises:
        ValueError: sizes out of range.
        UnsupportedError: causal attention.
    """

    supports = BIDIRECTIONAL_ONLY
    one_way = "the mean of a cluster mixes past and future; use topk or reformer attention"

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_clusters: int = 100,
        n_keys: int = 32,
        bits: int = 32,
        iterations: int = 10,
        seed: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_integers(1, n_clusters=n_clusters)
        check_integers(0, n_keys=n_keys, iterations=iterations)
        if not 1 <= bits <= MAX_BITS:
            raise ValueError(f"bits is {bits!r}, but must be between 1 and {MAX_BITS}")
        self.n_clusters, self.n_keys, self.iterations = n_clusters, n_keys, iterations
        self.hash = Projection(1, bits, self.head_dim + 1, "independent", seed)

    def heads_of(
        self, projected: Projected, x: Tensor, masks: Masks = NO_MASKS, *, cross: bool = False, **others: Any
    ) -> Heads[bool]:
        """Record whether queries and keys come from the same tokens and share one padding mask."""
        return super().heads_of(projected, x, masks, cross=cross, **others)._replace(inputs=not cross)

    def attend(self, heads: Heads[bool], masks: Masks) -> Tensor:
        """Attend in parallel."""
        padding = masks.key_padding_mask
        q, k = self.rotated(heads)
        if not any_length(q) and (self.n_clusters >= q.shape[1] or self.n_keys >= k.shape[1]):
            return softmax_attention(q, k, heads.v, key_padding_mask=padding)
        q_padding = padding[:, : q.shape[1]] if heads.inputs and padding is not None else None
        C, n_keys = self.n_clusters, self.n_keys
        cluster = chosen(lambda: self.cluster(q, q_padding), max(C, q.shape[1]))
        return clustered_attention(
            q, k, heads.v, cluster, C, n_keys, q_padding=q_padding, key_padding_mask=padding
        )

    @torch.no_grad()
    def cluster(self, q: Tensor, padding: Tensor | None = None) -> Tensor:
        """Assign queries `[B,T,H,D]` to the clusters of their row and head: `[B,T,H]`, from 0 to C - 1.

        In a row with no more queries than clusters, each query has its own.
        """
        B, T, H, _ = q.shape
        if padding is None:
            padding = q.new_zeros(B, T, dtype=torch.bool)
        q = without_padding(accumulated(q), padding)
        with without_autocast(q.device):
            codes = torch.where(self.hash(pad(q, (0, 1), value=1)) > 0, 1.0, -1.0)
            codes = codes.to(torch.float32).transpose(1, 2).flatten(0, 1)
            found = sign_clusters(codes, self.n_clusters, self.iterations, padding.repeat_interleave(H, 0))
        found = found.reshape(B, H, T).transpose(1, 2)
        few = (~padding).sum(1) <= self.n_clusters
        return torch.where(few[:, None, None], positions_from_padding(padding).unsqueeze(-1), found)
