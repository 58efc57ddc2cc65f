r"""Reformer: attention to the tokens that hash to the same bucket.

    h(x) = argmax [x R; -x R]                         bucket of x; one random R for each head and round
    o_i = sum_{j in P_i} a_ij v_j                     P_i = union over the rounds r of P_i^r
    a_ij = exp(q_i . k_j) / sum_{j' in P_i} exp(q_i . k_j')        k_j = q_j / |q_j|

Queries and keys share one projection. Token i is not in its own P_i; if P_i is empty, o_i = v_i. The sets are

    bidirectional   sort the tokens by bucket, then position, and cut them into chunks of c; P_i^r is the
                    chunk of i and the one before it, cyclically. `same_bucket` keeps only the members of i's
                    bucket (eq. 4 of the paper; the authors' code reads both chunks).
    causal          P_i^r is the last c of the earlier members of i's bucket.

Kitaev, Kaiser and Levskaya 2020, "Reformer: The Efficient Transformer", arXiv 2001.04451, section 2. Each
round gives o_i^r and its log-sum-exp. If N_ij rounds read key j, its score is reduced by log N_ij in each of
these rounds (appendix A). Merging the rounds then gives one softmax over the union. The paper's finite
penalty of 1e5 for i itself is infinite here. As in the authors' code, scores are not divided by sqrt(D):
`scale` is 1.

**Why the causal form differs from the paper's.** The paper masks the later keys of each chunk. Then no value
of a later token enters o_i. But sorting also puts later tokens of lower buckets before i. They move i to
another chunk, and so change which *earlier* keys it reads. So o_i depends on the past, on the length, and on
the number of later tokens in each bucket. Such a model is trained on information that it lacks during
generation. `lsh_attention(causal=True)` computes that form, for comparison. In the module, the sets
depend only on the past, so that running token by token gives the same outputs.

Cost per head, for R rounds: time O(R T (log T + c (D+M+R))), memory O(R T (c+D+M)); short inputs are computed
as one masked softmax over the union in O(T^2). The state of causal attention grows up to R n_buckets c
tokens, which are all that later tokens may attend to, and a step reads the whole state. Bidirectional
attention has no step, since a new token may change every chunk.
Cannot: attend to another sequence, since queries and keys share one projection, or honour an `attn_mask`.
Equals softmax attention to the other tokens with unit keys: bidirectional without `same_bucket`, up to 2c
tokens; causal, up to c + 1 tokens of one bucket. More rounds approximate it better.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._options import GENERAL
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention, Projected
from unrolled.attention.reformer.hashing import (
    ABSENT,
    causal_lsh_attention,
    hash_buckets,
    lsh_attention,
    unit_keys,
)
from unrolled.ops.dense import Linear, is_plain, linear
from unrolled.ops.merge import average_and_lse
from unrolled.ops.options import check_finite, check_integers
from unrolled.ops.packing import length_buckets, put_tokens
from unrolled.ops.precision import accumulation_dtype, autocast_dtype, without_autocast
from unrolled.ops.random_features import Projection
from unrolled.ops.replay import chosen


class ReformerState(NamedTuple):
    """The tokens that later ones may attend to.

    The first R n_buckets c tokens are all kept. After that, tokens are dropped that are not among the last c
    of their bucket in any round.
    """

    k: Tensor  # [B,S,H,D]
    v: Tensor  # [B,S,H,M]
    buckets: Tensor  # [B,S,H,R]
    position: Tensor  # [B], valid tokens seen
    draw: Tensor  # [B], the number of redraws of the rotations


def causal_lsh_step(
    q: Tensor, v: Tensor, buckets: Tensor, state: ReformerState, *, window: int, scale: float = 1.0
) -> Tensor:
    """Run one token of `causal_lsh_attention`: `q [B,H,D]`, `v [B,H,M]`, `buckets [B,H,R]` to `[B,H,M]`."""
    if state.k.shape[1] == 0:
        return v
    same = state.buckets == buckets.unsqueeze(1)  # [B,S,H,R]
    later = same.flip(1).cumsum(1).flip(1)
    read = (same & (later <= window)).any(-1)  # [B,S,H]
    dtype = state.k.dtype
    with without_autocast(q.device):
        scores = scale * torch.einsum("bhd,bshd->bhs", q.to(dtype), state.k)
        scores = scores.masked_fill(~read.movedim(1, 2), -torch.inf).unsqueeze(2)
        o, lse = (x.squeeze(2) for x in average_and_lse(scores, state.v.transpose(1, 2)))
        return torch.where(lse == -torch.inf, v.to(dtype), o).to(v.dtype)


class HashQueries(NamedTuple):
    """Queries in fp32 `[...,H,D]`, if the heads are in half precision."""

    q: Tensor


class ReformerAttention(MultiHeadAttention[ReformerState, HashQueries | None]):
    """Multi-head Reformer attention; the module docstring defines its causal form.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; n_kv_heads must be n_heads, since queries and keys
            share one projection. The authors use no bias.
        chunk: c. Bidirectional: the number of tokens in a chunk. Causal: the number of earlier tokens of its
            own bucket that a query reads.
        n_buckets: an even number, or a sequence of its even factors. The paper uses 2 T / c.
        n_rounds: number R of hash rounds.
        same_bucket: attend only to the query's own bucket; causal attention always does.
        scale: factor of the scores.
        seed: seed of the random rotations; drawn like initial weights by default. `rotations.redraw()` draws
            new ones. The authors draw them at every update: `train.redraw_every=1`.

    Raises:
        ValueError: an odd number of buckets, fewer key than query heads, or a number out of range.
    """

    supports = GENERAL.but(cross=False, recurrence="growing", single_queries=False, reads_input=True)
    growing = dict.fromkeys(("k", "v", "buckets"), (1, "S"))

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        chunk: int = 64,
        n_buckets: int | Sequence[int] = 32,
        n_rounds: int = 2,
        same_bucket: bool = False,
        scale: float = 1.0,
        seed: int | None = None,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        if self.n_kv_heads != n_heads:
            raise ValueError(
                f"n_kv_heads is {self.n_kv_heads}, but must be n_heads = {n_heads}, since queries and keys "
                "share one projection"
            )
        self.factors = tuple(n_buckets) if isinstance(n_buckets, Sequence) else (n_buckets,)
        if not self.factors or any(type(n) is not int or n < 2 or n % 2 for n in self.factors):
            raise ValueError(f"n_buckets is {n_buckets!r}, but must be even, or a list of even factors")
        check_integers(1, chunk=chunk, n_rounds=n_rounds)
        check_finite(scale=scale)
        self.chunk, self.n_rounds, self.same_bucket, self.scale = chunk, n_rounds, same_bucket, scale
        self.n_buckets = math.prod(self.factors)
        self.qkv_proj = Linear(d_model, sum(self.widths[1:]), bias=self.qkv_proj.bias is not None)
        if self.short_conv is not None:
            self.supports = self.supports.but(reads_input=False)
        rows = n_rounds * sum(self.factors) // 2
        self.rotations = Projection(n_heads, rows, self.head_dim, "independent", seed)

    def read_input(self, x: Tensor) -> HashQueries | None:
        """Project half-precision queries in fp32 again, so that rounding does not change buckets.

        With `conv`, or with a hook or an adapter on `qkv_proj`, the rounded queries are hashed.
        """
        dtype = accumulation_dtype(x.dtype)
        exact = x.dtype == dtype and autocast_dtype(x.device) is None
        if exact or self.short_conv is not None or not is_plain(self.qkv_proj):
            return None
        width, bias = self.widths[0], self.qkv_proj.bias
        with torch.no_grad(), without_autocast(x.device):
            b = None if bias is None else bias[:width].to(dtype)
            q = linear(x.to(dtype), self.qkv_proj.weight[:width].to(dtype), b)
        return HashQueries(torch.unflatten(q, -1, (self.n_heads, self.head_dim)))

    def attend(self, heads: Heads[HashQueries | None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        (q, k, buckets), v = self._hashed(heads), heads.v
        if masks.cu_seqlens is None:
            return self._attend(q, k, v, buckets, masks.key_padding_mask)
        o = v.new_zeros(v.shape)
        for _, places, padding in length_buckets(masks.cu_seqlens, v.shape[1]):
            q_n, k_n, v_n, buckets_n = (x[0, places] for x in (q, k, v, buckets))
            o = put_tokens(o, places, padding, self._attend(q_n, k_n, v_n, buckets_n, padding))
        return o

    def init_heads(self, batch_size: int) -> ReformerState:
        """Make the state of `batch_size` sequences before their first token: no tokens."""
        like = self.out_weight.new_empty(batch_size, 0, self.n_heads, 0, dtype=self.state_dtype)
        k, v, buckets = (pad(like, (0, n)) for n in (self.head_dim, self.value_dim, self.n_rounds))
        draw = self.rotations.redraws.repeat(batch_size)
        return ReformerState(k, v, buckets.long(), torch.zeros_like(draw), draw)

    def prefill_heads(
        self, heads: Heads[HashQueries | None], state: ReformerState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, ReformerState]:
        """Append the new tokens to those of the state, and attend in parallel."""
        q, k, buckets = self._hashed(heads)
        B, T = buckets.shape[:2]
        new = torch.full((B,), T, device=q.device)
        if key_padding_mask is not None:
            buckets = buckets.masked_fill(key_padding_mask[:, :, None, None], ABSENT)
            new = (~key_padding_mask).sum(1)
        joined = self._joined(state, k, heads.v, buckets, new)
        old = q.new_zeros(*state.k.shape)
        o = self._attend(torch.cat([old, q], 1), joined.k, joined.v, joined.buckets, None)[:, old.shape[1] :]
        o = self.rotations.unless_redrawn(o.to(heads.v.dtype), state.draw)
        return o, self._readable(joined)

    def step_heads(
        self, heads: Heads[HashQueries | None], state: ReformerState
    ) -> tuple[Tensor, ReformerState]:
        """Attend from one token to those of the state, then append it."""
        q, k, buckets = self._hashed(heads)
        joined = self._joined(state, k.unsqueeze(1), heads.v.unsqueeze(1), buckets.unsqueeze(1), 1)
        o = causal_lsh_step(q, heads.v, buckets, state, window=self.chunk, scale=self.scale)
        return self.rotations.unless_redrawn(o, state.draw), self._readable(joined)

    def project(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Projected:
        """Project to queries, which also serve as keys, and to values."""
        q, v = self.qkv_proj(query).split_with_sizes(self.widths[1:], -1)
        q = q.unflatten(-1, (self.n_heads, self.head_dim))
        return q, q, v.unflatten(-1, (self.n_heads, self.value_dim))

    def _hashed(self, heads: Heads[HashQueries | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, in the accumulation dtype, and their buckets `[...,H,R]`."""
        q, positions = heads.q.to(accumulation_dtype(heads.q.dtype)), heads.positions
        wide = q if heads.inputs is None else heads.inputs.q
        if positions is not None:
            q, wide = self.rotate(q, positions), self.rotate(wide, positions)

        def choose() -> Tensor:
            with torch.no_grad(), without_autocast(q.device):
                return hash_buckets(self.rotations(wide).unflatten(-1, (self.n_rounds, -1)), self.factors)

        return q, unit_keys(q), chosen(choose, self.n_buckets)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, padding: Tensor | None) -> Tensor:
        if not self.causal:
            attend = partial(lsh_attention, chunk=self.chunk, same_bucket=self.same_bucket)
        else:
            attend = partial(causal_lsh_attention, n_buckets=self.n_buckets, window=self.chunk)
        return attend(q, k, v, buckets, key_padding_mask=padding, scale=self.scale)

    def _joined(
        self, state: ReformerState, k: Tensor, v: Tensor, buckets: Tensor, new: Tensor | int
    ) -> ReformerState:
        """Append tokens to the state."""
        new_tokens = (k.to(state.k.dtype), v.to(state.k.dtype), buckets)
        tokens = (torch.cat(pair, 1) for pair in zip(state[:3], new_tokens, strict=True))
        return ReformerState._make((*tokens, state.position + new, state.draw))

    def _readable(self, state: ReformerState) -> ReformerState:
        """Drop tokens that no later token can attend to, so that at most R n_buckets c remain."""
        S, most = state.k.shape[1], self.n_rounds * self.n_buckets * self.chunk
        if most >= S:
            return state
        order = state.buckets.movedim(1, -1).argsort(dim=-1, stable=True)  # [B,H,R,S]
        bucket = state.buckets.movedim(1, -1).gather(-1, order)
        further = pad(bucket[..., self.chunk :], (0, self.chunk), value=ABSENT)
        last = (bucket != further) & (bucket != ABSENT)
        last = last.gather(-1, order.argsort(-1)).any(2)  # among the last c of their bucket, in some round
        keep = last.byte().argsort(dim=-1, stable=True)[..., S - most :].movedim(-1, 1).unsqueeze(-1)
        k, v, buckets = (x.take_along_dim(keep, 1) for x in (state.k, state.v, state.buckets))
        return ReformerState(k, v, buckets, state.position, state.draw)
