r"""Attention free transformer (AFT): a weighted average per element, gated by the query.

    y_t = sigmoid(q_t) * sum_j exp(k_j + w_tj) * v_j / sum_j exp(k_j + w_tj)

All products are elementwise; queries are not compared with keys. Causal attention sums over j <= t,
bidirectional attention over all j. The bias w_tj weighs position j for position t:

    position_bias  w_tj                                      state
    "full"         a_t . b_j                                 all keys and values
    "local"        the same where |t - j| < window, else 0   sums, and the last window - 1 keys and values
    "simple"       0                                         sums
    "conv"         one per head and distance, in a window    sums, and the last window - 1 keys and values

Keys outside the window have bias 0 and still count. With "conv", all elements of a head share one key, and
w = gamma (c - mean(c)) / std(c) + beta over `window` positions. The window ends at t if causal, and is
centred on t otherwise. gamma and beta begin at 0.

Zhai et al. 2021, "An Attention Free Transformer", arXiv 2105.14103: eq. 2 (AFT-full), and section 3 for the
other three and for the factors a and b. These are drawn with a standard deviation of 0.01; the paper does
not say whether its number is a standard deviation or a variance.

Cost for d = n_heads head_dim elements: "full" time O(T^2 d), memory O(T^2 + T d log T); the others, for a
given window, time and memory O(T d). Per generated token: "full" O(T d), the others O(window d).
Cannot: weigh keys by the query. "full" and "local" have biases for `max_length` positions. "local" and "conv"
cannot read another sequence, since positions of two sequences have no distance. Only "full" takes an
`attn_mask`, with memory O(B T S d). `torch.export` exports a single length, since the length determines how
often the pairs of positions are halved.
Equals softmax attention: never. It is softmax attention with d heads one element wide and scores k_j + w_tj.
"""

import math
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._options import GENERAL
from unrolled.attention._packed import attend_packed
from unrolled.attention.aft.averages import Keys, OldSums, average_causal, average_reference, with_old
from unrolled.attention.aft.biases import BIASES, Sizes
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.masks import causal_mask, without_padding
from unrolled.ops.observing import may_read
from unrolled.ops.options import check_choice, check_integers
from unrolled.ops.packing import reorder, valid_first
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.state_checks import CONSTANT
from unrolled.ops.wkv.plain import LOWEST


class AFTState(NamedTuple):
    """The last W keys and values, sums over all older ones, and the number of tokens seen.

    The last min(W, position) keys are valid. W grows with "full" only.
    """

    k: Tensor  # [B,W,H,K]
    v: Tensor  # [B,W,H,M]
    k_max: Tensor  # [B,H,K], the maximum of the older keys
    sums: Tensor  # [B,H,2,M] of exp(k - k_max) v and of exp(k - k_max)
    position: Tensor  # [B]


class AFT(MultiHeadAttention[AFTState, None]):
    """AFT-full, -local, -simple and -conv.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; n_kv_heads must be n_heads, and value_dim must be
            head_dim. Each of the n_heads head_dim elements is averaged by itself, so heads matter only for
            "conv" and for an `attn_mask` that differs between heads.
        position_bias: "full", "local", "simple" or "conv".
        window: "local": keys less than this far away have a bias (32 by default); "conv": width of the window
            (15 by default), odd unless causal.
        max_length: number of positions that "full" and "local" have biases for.
        bias_rank: width of the factors a and b of these biases.

    Raises:
        ValueError: an unknown position_bias, a window that this bias does not take, or sizes out of range.
        UnsupportedError: rotary positions.
    """

    supports = GENERAL.but(recurrence="growing", single_queries=False, dynamic_length=False)
    supports = supports.but(attn_mask=True, max_length=True, positions=True)
    no_rotary = "its biases encode positions, and there are no products to rotate"

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        position_bias: str = "full",
        window: int | None = None,
        max_length: int = 1024,
        bias_rank: int = 64,
        **common: Unpack[CommonOptions],
    ):
        check_choice("position_bias", position_bias, BIASES)
        self.position_bias = position_bias
        super().__init__(d_model, n_heads, **common)
        if self.n_kv_heads != n_heads or self.value_dim != self.head_dim:
            raise ValueError(
                f"n_kv_heads is {self.n_kv_heads} and value_dim {self.value_dim}, but must be {n_heads} and "
                f"{self.head_dim} like those of the queries, since aft works element by element"
            )
        kind = BIASES[position_bias]
        check_integers(1, max_length=max_length, bias_rank=bias_rank)
        if window is None:
            window = kind.default_window or 0
        elif kind.default_window is None:
            raise ValueError(f"window is {window}, but must be None for {position_bias!r}")
        else:
            check_integers(1, window=window)
        self.bias = kind(Sizes(n_heads, self.causal, window, max_length, bias_rank))
        self.window, self.max_length = self.bias.window, self.bias.max_length
        self.most_positions = self.max_length  # for `unrolled.models.limits`
        self.supports = self.supports.but(**kind.claims)
        self.grows = self.supports.recurrence == "growing"
        self.growing = {"k": (1, "W"), "v": (1, "W")} if self.grows else CONSTANT

    def head_widths(self) -> tuple[int, int, int]:
        """Widths per head of queries, keys and values."""
        return self.head_dim, 1 if BIASES[self.position_bias].one_key else self.head_dim, self.head_dim

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if masks.cu_seqlens is None:
            q, k, v, positions, *_ = heads
            return self._gated(q, v, self._attend(q, k, v, positions is not None, masks))
        if masks.attn_mask is not None:
            raise UnsupportedError("aft takes attn_mask or cu_seqlens, not both: put packing in attn_mask")
        return attend_packed(self.attend, heads, masks.cu_seqlens)

    def _gated(self, q: Tensor, v: Tensor, average: Tensor) -> Tensor:
        return (q.to(average.dtype).sigmoid() * average).to(v.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, itself: bool, masks: Masks) -> Tensor:
        """Compute the averages for each query, `[B,T,H,M]` in fp32 at least."""
        (B, T), S, padding = q.shape[:2], k.shape[1], masks.key_padding_mask
        dtype = accumulation_dtype(v.dtype)
        k, v = k.to(dtype), v.to(dtype)
        if padding is not None:
            k, v = without_padding(k, padding), without_padding(v, padding)
        place = torch.arange(S, device=k.device).expand(1, S)
        number = place if padding is None else (~padding).cumsum(1) - 1  # of a key among the valid ones
        self._check_length(number)
        # The index of each query's average: if causal, that of its last key among the valid ones, otherwise
        # its own position.
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
            if padding is not None:  # valid keys first, in their order
                order = valid_first(padding)
                valid = place < (~padding).sum(1, keepdim=True)
                keys = Keys(reorder(k, order), reorder(v, order), valid, place)
            average = self._average(keys, T)
            if padding is None and (T == S or not self.causal):
                return average
            average = reorder(average, rows.clamp(min=0).expand(B, -1))
            return average.masked_fill((rows < 0)[..., None, None], 0)

    def _average(self, keys: Keys, T: int) -> Tensor:
        if self.causal:
            return average_causal(keys, self.bias, self.window, self._empty_sums(keys.k, keys.v))[0]
        return self.bias.average(keys, T)

    def _masked(
        self, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, padding: Tensor | None, attn_mask: Tensor
    ) -> Tensor:
        """Compute the definition, with the biases of `rows [B,T]` and `keys [B,S]` and any mask."""
        T, S = rows.shape[1], k.shape[1]
        w = self.bias(rows[:, None], keys[:, None]).squeeze(1)
        if attn_mask.is_floating_point():
            attn_mask, added = attn_mask > -math.inf, attn_mask
            w = w + added.masked_fill(~attn_mask, 0)
        allowed = attn_mask if padding is None else attn_mask & ~padding[:, None, None]
        if self.causal:
            allowed = allowed & causal_mask(T, S, k.device)
        allowed = allowed & allowed.new_ones(1, 1, T, S)
        return average_reference(k, v, w, allowed)

    def init_heads(self, batch_size: int) -> AFTState:
        """Make the state of `batch_size` sequences before their first token: no keys, and empty sums."""
        like, (_, K, M) = self.out_weight, self.head_widths()
        W = 0 if self.grows else max(0, self.window - 1)
        v = like.new_zeros(batch_size, W, self.n_heads, M, dtype=self.state_dtype)
        k = v.new_zeros(batch_size, W, self.n_heads, K)
        return AFTState(k, v, *self._empty_sums(k, v), like.new_zeros(batch_size, dtype=torch.long))

    def _empty_sums(self, k: Tensor, v: Tensor) -> OldSums:
        (B, _, H, K), M = k.shape, v.shape[3]
        return OldSums(k.new_full((B, H, K), LOWEST), v.new_zeros(B, H, 2, M))

    def prefill_heads(
        self, heads: Heads[None], state: AFTState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, AFTState]:
        """Attend in parallel to the state and to the new tokens."""
        q, k, v, *_ = heads
        k, v = k.to(state.k.dtype), v.to(state.k.dtype)
        (B, T), W = q.shape[:2], state.k.shape[1]
        if T == 0:
            return self._gated(q, heads.v, v), state
        new = torch.arange(T, device=k.device).expand(B, T)
        rows, seen = new, torch.full((B,), T, device=k.device)
        if key_padding_mask is not None:
            k, v = without_padding(k, key_padding_mask), without_padding(v, key_padding_mask)
            order = valid_first(key_padding_mask)
            k, v = reorder(k, order), reorder(v, order)
            rows, seen = (~key_padding_mask).cumsum(1) - 1, (~key_padding_mask).sum(1)
        self._check_length((state.position + seen - 1).unsqueeze(1))
        valid = torch.cat([self._recent(state), new < seen.unsqueeze(1)], dim=1)
        positions = torch.arange(-W, T, device=k.device).unsqueeze(0)
        if self.max_length is not None:  # otherwise only distances matter, which are the same in all rows
            positions = state.position.unsqueeze(1) + positions
        keys = Keys(torch.cat([state.k, k], 1), torch.cat([state.v, v], 1), valid, positions)
        with without_autocast(q.device):
            old = OldSums(state.k_max, state.sums)
            average, after = average_causal(keys, self.bias, self.window, old, first=W)
        if key_padding_mask is not None:
            average = reorder(average, rows.clamp(min=0)).masked_fill((rows < 0)[..., None, None], 0)
        # The window of the next token has the last `kept` keys.
        kept = min(W + T, max(0, self.window - 1))
        left = (W + seen - kept).unsqueeze(1)
        recent = (left + torch.arange(kept, device=k.device)).clamp(min=0)
        k_max, sums = (reorder(x, left.clamp(0, x.shape[1] - 1)).squeeze(1) for x in after)
        state = AFTState(reorder(keys.k, recent), reorder(keys.v, recent), k_max, sums, state.position + seen)
        return self._gated(q, heads.v, average), state

    def step_heads(self, heads: Heads[None], state: AFTState) -> tuple[Tensor, AFTState]:
        """Average the sums, the keys in the window and the new key."""
        q, k, v = (x.unsqueeze(1) for x in heads[:3])
        k, v = k.to(state.k.dtype), v.to(state.k.dtype)
        self._check_length(state.position.unsqueeze(1))
        k_all, v_all = torch.cat([state.k, k], dim=1), torch.cat([state.v, v], dim=1)
        valid = pad(self._recent(state), (0, 1), value=True)
        k_max, sums, W = state.k_max, state.sums, state.k.shape[1]
        with without_autocast(q.device):
            positions = state.position.unsqueeze(1) + torch.arange(-W, 1, device=k.device)
            positions = positions.masked_fill(~valid, 0).unsqueeze(1)
            w = self.bias(state.position[:, None, None], positions).squeeze(1)
            seen = pad(valid, (1, 0), value=True)[:, None, None]
            w = pad(w, (1, 0))
            average = average_reference(*with_old(k_all, v_all, OldSums(k_max, sums)), w, seen)
            if self.window <= W + 1:  # the first key leaves the window and joins the sums
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
        """Return which keys of the state are valid `[B,W]`: the last ones, as many as were seen."""
        W = state.k.shape[1]
        return torch.arange(W, 0, -1, device=state.k.device) <= state.position.unsqueeze(1)

    def _check_length(self, positions: Tensor) -> None:
        """Require positions below `max_length`; where values cannot be read, indexing the biases fails."""
        if self.max_length is None or not may_read(positions) or positions.numel() == 0:
            return
        longest = int(positions.max()) + 1
        if longest > self.max_length:
            raise ValueError(
                f"the sequence is {longest} tokens long, but aft was made for max_length = {self.max_length}"
            )
