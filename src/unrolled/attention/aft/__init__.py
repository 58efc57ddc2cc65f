r"""Attention free transformer (AFT): a weighted average per element, gated by a query.

    y_t = sigmoid(q_t) * sum_j exp(k_j + w_tj) * v_j / sum_j exp(k_j + w_tj)

All products are element by element; queries never meet keys. Causal attention sums over j <= t, bidirectional
attention over all j. The biases w say how much position t wants of position j:

    position_bias  w_tj                                      state
    "full"         a_t . b_j                                 all keys and values
    "local"        the same where |t - j| < window, else 0   sums, and the last window - 1 keys and values
    "simple"       0                                         sums
    "conv"         one per head and distance, in a window    sums, and the last window - 1 keys and values

A bias of 0 outside the window keeps every key in sight. With "conv" a head has one key for all its values,
and w = gamma (c - mean(c)) / std(c) + beta over a window of `window` positions, which ends at t when causal
and is centred on t otherwise; gamma and beta begin at 0.

Zhai et al. 2021, "An Attention Free Transformer", arXiv 2105.14103: eq. 2 (AFT-full), and section 3 for the
other three and for the factors a and b, which are drawn with a standard deviation of 0.01.

Cost for d = n_heads head_dim elements: "full" time O(T^2 d), memory O(T^2 + T d log T); the others, for a
given window, time and memory O(T d). Per generated token: "full" O(T d), the others O(window d).
Cannot: attend by query and key together. "full" and "local" have biases for `max_length` positions. "local"
and "conv" cannot read another sequence, for two sequences have no distances. Only "full" takes an
`attn_mask`, at the price of memory O(B T S d). `torch.export` takes one length only, since how often pairs of
positions are halved depends on it.
Equals softmax attention: never. It is softmax attention with d heads one element wide and scores k_j + w_tj.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention.aft.averages import (
    LOWEST,
    Bias,
    ConvolutionBias,
    FactorizedBias,
    Keys,
    OldSums,
    average_bidirectional,
    average_causal,
    average_full,
    average_reference,
    with_old,
)
from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.checks import check_attn_mask, check_key_padding_mask, may_read, shape
from unrolled.ops.masks import causal_mask, without_padding
from unrolled.ops.options import check_integers
from unrolled.ops.packing import length_buckets
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.state_checks import CONSTANT

WINDOWS = {"local": 32, "conv": 15}
KINDS = ("full", "local", "simple", "conv")


class AFTState(NamedTuple):
    """The last W keys `[B,W,H,K]` and values `[B,W,H,M]`, of which the last min(W, position) count; sums over
    all older ones, `sums [B,H,2,M]` of exp(k - k_max) v and of exp(k - k_max), with their `k_max [B,H,K]`;
    and the number of tokens seen `[B]`. W grows with "full" only.
    """

    k: Tensor
    v: Tensor
    k_max: Tensor
    sums: Tensor
    position: Tensor


class AFT(MultiHeadAttention[AFTState, None]):
    """AFT-full, -local, -simple and -conv.

    Args:
        d_model, n_heads, causal, head_dim, bias: see `MultiHeadAttention`. But for "conv" and an `attn_mask`
            heads mean nothing: there are n_heads head_dim elements, each on its own.
        position_bias: "full", "local", "simple" or "conv".
        window: "local": keys less than this far away have a bias (32 by default); "conv": width of the window
            (15 by default), odd unless causal.
        max_length: number of positions that "full" and "local" have biases for.
        bias_rank: width of their factors a and b.
    """

    supports = Supports(
        causal=True,
        bidirectional=True,
        cross=True,
        padding=True,
        packing=True,
        recurrence="growing",
        attn_mask=True,
        dynamic_length=False,
        max_length=True,
        positions=True,
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        position_bias: str = "full",
        window: int | None = None,
        max_length: int = 1024,
        bias_rank: int = 64,
        **shared: Any,
    ):
        if position_bias not in KINDS:
            raise ValueError(f"position_bias is {position_bias!r}, but must be one of {', '.join(KINDS)}")
        self.position_bias = position_bias
        full, simple = position_bias == "full", position_bias == "simple"
        self.supports = self.supports.but(
            cross=full or simple,
            recurrence="growing" if full else "constant",
            attn_mask=full,
            max_length=position_bias in ("full", "local"),
        )
        self.growing = {"k": (1, "W"), "v": (1, "W")} if full else CONSTANT
        super().__init__(d_model, n_heads, **shared)
        if self.rotary:
            raise UnsupportedError(
                "aft has no products to rotate; its biases tell positions, so use rotary=False"
            )
        if self.n_kv_heads != n_heads or self.value_dim != self.head_dim:
            raise ValueError(
                f"n_kv_heads is {self.n_kv_heads} and value_dim {self.value_dim}, but aft works element by "
                f"element and wants as many as of the queries, {n_heads} and {self.head_dim}"
            )
        if window is not None and position_bias not in WINDOWS:
            raise ValueError(f"window is {window}, but {position_bias!r} has none; local and conv have")
        check_integers(1, max_length=max_length, bias_rank=bias_rank)
        if window is not None:
            check_integers(1, window=window)
        window = WINDOWS.get(position_bias, 0) if window is None else window
        self.max_length = max_length if position_bias in ("full", "local") else None
        self.bias: Bias | None = None
        if position_bias == "conv":
            if not self.causal and window % 2 == 0:
                raise ValueError(
                    f"window is {window}, but must be odd to be centred; causal windows need not be"
                )
            self.bias = ConvolutionBias(n_heads, window, window - 1 if self.causal else window // 2)
            window = window if self.causal else window // 2 + 1
        elif not simple:
            self.bias = FactorizedBias(max_length, bias_rank)
        self.window = max_length if full else window  # keys less than this far away have a bias

    def head_widths(self) -> tuple[int, int, int]:
        """Widths per head of queries, keys and values."""
        return self.head_dim, 1 if self.position_bias == "conv" else self.head_dim, self.head_dim

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        q, k, v, positions, _ = heads
        if masks.cu_seqlens is None:
            return self._gated(q, v, self._attend(q, k, v, positions is not None, masks))
        if masks.attn_mask is not None:
            raise UnsupportedError(
                "aft takes attn_mask or cu_seqlens, not both; put packing into the attn_mask"
            )
        o = v.new_zeros(q.shape)
        for _, tokens, padding in length_buckets(masks.cu_seqlens, q.shape[1]):
            q_part, k_part, v_part = (without_padding(x[0, tokens], padding) for x in (q, k, v))
            average = self._attend(q_part, k_part, v_part, True, Masks(key_padding_mask=padding))
            o[0, tokens[~padding]] = self._gated(q_part, v, average)[~padding]
        return o

    def _gated(self, q: Tensor, v: Tensor, average: Tensor) -> Tensor:
        return (q.to(average.dtype).sigmoid() * average).to(v.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, itself: bool, masks: Masks) -> Tensor:
        """The averages for each query, `[B,T,H,M]` in fp32 at least."""
        (B, T), S, padding = q.shape[:2], k.shape[1], masks.key_padding_mask
        dtype = accumulation_dtype(v.dtype)
        k, v = k.to(dtype), v.to(dtype)
        if padding is not None:
            check_key_padding_mask(padding, B, S)
            k, v = without_padding(k, padding), without_padding(v, padding)
        place = torch.arange(S, device=k.device).expand(1, S)
        number = place if padding is None else (~padding).cumsum(1) - 1  # of a key among those that count
        self._check_length(number)
        # The row of the averages that each query reads: those over the keys up to it, or at its own position.
        if self.causal:
            row = torch.arange(T, device=k.device) + S - T
            rows = torch.where(row < 0, -1, number[:, row.clamp(min=0)]) if S else row.new_full((1, T), -1)
        else:
            rows = number if itself else torch.arange(T, device=k.device).expand(1, T)
            self._check_length(rows)
        with without_autocast(q.device):
            if S == 0 or T == 0:
                return v.new_zeros(q.shape)
            if masks.attn_mask is not None:
                return self._masked(k, v, rows.clamp(min=0), number.clamp(min=0), padding, masks.attn_mask)
            keys = Keys(k, v, None, place)
            if padding is not None:  # those that count first, in their order
                order = padding.long().argsort(dim=1, stable=True)
                valid = place < (~padding).sum(1, keepdim=True)
                keys = Keys(_pick(k, order), _pick(v, order), valid, place)
            average = self._average(keys, T)
            if padding is None and (T == S or not self.causal):
                return average
            return _pick(average, rows.clamp(min=0).expand(B, -1)).masked_fill((rows < 0)[..., None, None], 0)

    def _average(self, keys: Keys, T: int) -> Tensor:
        if self.causal:
            return average_causal(keys, self.bias, self.window, self._nothing_old(keys.k, keys.v))[0]
        if self.bias is None:
            nothing = keys.k.new_zeros(1, 1, 1, 1)
            allowed = keys.k.new_ones(1, 1, dtype=torch.bool) if keys.valid is None else keys.valid
            average = average_reference(keys.k, keys.v, nothing, allowed[:, None, None])
            return average.expand(-1, T, -1, -1)
        if self.position_bias == "full":
            return average_full(keys, self.bias, torch.arange(T, device=keys.k.device).expand(1, T))
        return average_bidirectional(keys, self.bias, self.window)

    def _masked(
        self, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, padding: Tensor | None, attn_mask: Tensor
    ) -> Tensor:
        """By the definition, with the biases of `rows [B,T]` and `keys [B,S]` and any mask."""
        assert self.bias is not None  # only "full" takes an attn_mask
        (B, S), T = k.shape[:2], rows.shape[1]
        check_attn_mask(attn_mask, (B, self.n_heads, T, S))
        w = self.bias(rows[:, None], keys[:, None]).squeeze(1)
        if attn_mask.is_floating_point():
            attn_mask, added = attn_mask > -math.inf, attn_mask
            w = w + added.masked_fill(~attn_mask, 0)
        allowed = attn_mask if padding is None else attn_mask & ~padding[:, None, None]
        if self.causal:
            allowed = allowed & causal_mask(T, S, k.device)
        allowed = allowed & allowed.new_ones(1, 1, T, S)
        return average_reference(k, v, w, allowed)

    def init_state(self, batch_size: int) -> AFTState:
        """Make the state of `batch_size` sequences that have not begun: no keys, and sums over nothing."""
        like, (_, K, M) = self.out_proj.weight, self.head_widths()
        W = 0 if self.position_bias == "full" else max(0, self.window - 1)
        v = like.new_zeros(batch_size, W, self.n_heads, M, dtype=self.state_dtype)
        k = v.new_zeros(batch_size, W, self.n_heads, K)
        return AFTState(k, v, *self._nothing_old(k, v), like.new_zeros(batch_size, dtype=torch.long))

    def _nothing_old(self, k: Tensor, v: Tensor) -> OldSums:
        (B, _, H, K), M = k.shape, v.shape[3]
        return OldSums(k.new_full((B, H, K), LOWEST), v.new_zeros(B, H, 2, M))

    def prefill_heads(
        self, heads: Heads[None], state: AFTState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, AFTState]:
        """Attend in parallel to the state and to the new tokens."""
        q, k, v, _, _ = heads
        k, v = k.to(state.k.dtype), v.to(state.k.dtype)
        self._check_state(state, k, v)
        (B, T), W = q.shape[:2], state.k.shape[1]
        if T == 0:
            return self._gated(q, heads.v, v), state
        new = torch.arange(T, device=k.device).expand(B, T)
        rows, seen = new, torch.full((B,), T, device=k.device)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, B, T)
            k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
            order = key_padding_mask.long().argsort(dim=1, stable=True)
            k, v = _pick(k, order), _pick(v, order)
            rows, seen = (~key_padding_mask).cumsum(1) - 1, (~key_padding_mask).sum(1)
        self._check_length((state.position + seen - 1).unsqueeze(1))
        valid = torch.cat([self._recent(state), new < seen.unsqueeze(1)], dim=1)
        positions = torch.arange(-W, T, device=k.device).unsqueeze(0)
        if self.max_length is not None:  # else only distances matter, the same in all rows
            positions = state.position.unsqueeze(1) + positions
        keys = Keys(torch.cat([state.k, k], 1), torch.cat([state.v, v], 1), valid, positions)
        with without_autocast(q.device):
            old = OldSums(state.k_max, state.sums)
            average, after = average_causal(keys, self.bias, self.window, old, first=W)
        if key_padding_mask is not None:
            average = _pick(average, rows.clamp(min=0)).masked_fill((rows < 0)[..., None, None], 0)
        # The window of the next token begins where `kept` keys are left before the end of the new ones.
        kept = min(W + T, max(0, self.window - 1))
        left = (W + seen - kept).unsqueeze(1)
        recent = (left + torch.arange(kept, device=k.device)).clamp(min=0)
        k_max, sums = (_pick(x, left.clamp(min=0)).squeeze(1) for x in after)
        state = AFTState(_pick(keys.k, recent), _pick(keys.v, recent), k_max, sums, state.position + seen)
        return self._gated(q, heads.v, average), state

    def step_heads(self, heads: Heads[None], state: AFTState) -> tuple[Tensor, AFTState]:
        """Average the sums, the keys in the window and the new one."""
        q, k, v = (x.unsqueeze(1) for x in heads[:3])
        k, v = k.to(state.k.dtype), v.to(state.k.dtype)
        self._check_state(state, k, v)
        self._check_length(state.position.unsqueeze(1))
        k_all, v_all = torch.cat([state.k, k], dim=1), torch.cat([state.v, v], dim=1)
        valid = pad(self._recent(state), (0, 1), value=True)
        k_max, sums, W = state.k_max, state.sums, state.k.shape[1]
        with without_autocast(q.device):
            w = k.new_zeros(1, 1, 1, W + 1)
            if self.bias is not None:
                positions = state.position.unsqueeze(1) + torch.arange(-W, 1, device=k.device)
                positions = positions.masked_fill(~valid, 0).unsqueeze(1)
                w = self.bias(state.position[:, None, None], positions).squeeze(1)
            seen = pad(valid, (1, 0), value=True)[:, None, None]
            w = pad(w, (1, 0))
            average = average_reference(*with_old(k_all, v_all, OldSums(k_max, sums)), w, seen)
            if self.window <= W + 1:  # the first key leaves the window
                k_left = k_all[:, 0].masked_fill(~valid[:, :1, None], LOWEST)
                k_max = torch.maximum(k_max, k_left.detach())
                values = torch.stack([v_all[:, 0], torch.ones_like(v_all[:, 0])], dim=-2)
                values = values.masked_fill(~valid[:, :1, None, None], 0)
                sums = sums * (state.k_max - k_max).exp().unsqueeze(-2)
                sums = sums + (k_left - k_max).exp().unsqueeze(-2) * values
                k_all, v_all = k_all[:, 1:], v_all[:, 1:]
        state = AFTState(k_all, v_all, k_max, sums, state.position + 1)
        return self._gated(q, heads.v, average).squeeze(1), state

    def _recent(self, state: AFTState) -> Tensor:
        """Which of the state's keys count `[B,W]`: the last ones, as many as were seen."""
        W = state.k.shape[1]
        return torch.arange(W, 0, -1, device=state.k.device) <= state.position.unsqueeze(1)

    def _check_length(self, positions: Tensor) -> None:
        """Require positions below `max_length`; where they cannot be read, looking up their biases fails."""
        if self.max_length is None or not may_read(positions) or positions.numel() == 0:
            return
        longest = int(positions.max()) + 1
        if longest > self.max_length:
            raise ValueError(
                f"the sequence is {longest} tokens long, but aft was made for max_length = {self.max_length}"
            )

    def _check_state(self, state: AFTState, k: Tensor, v: Tensor) -> None:
        (B, _, H, K), M = k.shape, v.shape[3]
        W = state.k.shape[1] if self.position_bias == "full" else max(0, self.window - 1)
        wanted = ((B, W, H, K), (B, W, H, M), (B, H, K), (B, H, 2, M))
        for name, x, sizes in zip(AFTState._fields, state, wanted, strict=False):
            if x.shape != sizes or x.dtype != self.state_dtype:
                raise ValueError(
                    f"state.{name} is {x.dtype} of shape {shape(x)}, but these inputs want "
                    f"{self.state_dtype} {list(sizes)}"
                )


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """`x [B,L,...]` at `index [B,n]`, other places in each row: `[B,n,...]`."""
    return torch.take_along_dim(x, index.reshape(*index.shape, *[1] * (x.dim() - 2)), 1)
