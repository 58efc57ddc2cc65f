r"""RWKV-4: a weighted average per channel, with weights that decay at the channel's own rate.

    o_t = (exp(k_t + u) v_t + sum_{j<t} w_tj v_j) / (exp(k_t + u) + sum_{j<t} w_tj)
    w_tj = exp(k_j - (t - 1 - j) exp(A))        y_t = W_o (sigmoid(r_t) * o_t)

All operations are elementwise; r, called receptance in the paper, is not compared with k. The pace exp(A) and
the bonus u of the token itself are learned per channel. The projections to r, k and v read their own mixtures
of a token and the one before it, x_t^z = x_t + mu_z * (x_{t-1} - x_t) for z = r, k, v, with zeros before the
first token.

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048, section 3.1, where mu is
1 - mu and the pace is w. The published model has no biases (`bias=False`), and its feed-forward layers are
those of the models here with `activation="channel_mix"`. It is AFT (`unrolled.attention.aft`) with biases
that fall linearly with the distance, at one slope per channel.

Cost for d = n_heads head_dim channels: in training time and memory O(T d); per generated token time, memory
and state O(d).
Cannot: weigh keys by the query, attend in both directions or to another sequence, nor honour an `attn_mask`.
Equals softmax attention with queries: never. It is a softmax per channel, over k_j - (t - 1 - j) exp(A) for
earlier tokens j, and k_t + u for the token itself.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._heads import of_every_head
from unrolled.attention._options import ONE_WAY
from unrolled.attention._state import total_decay
from unrolled.attention._token_shift import TokenShiftAttention
from unrolled.attention.base import CommonOptions, Heads, Masks
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.precision import finite_exp
from unrolled.ops.sequence import Shifted
from unrolled.ops.token_shift import initial_mixtures
from unrolled.ops.wkv import empty_state, wkv, wkv_step

MIXTURES = {"r": 0.5, "k": 1.0, "v": 1.0}
"""For each mixture, the exponent of its initial mu: channel c of d has mu = 1 - (c/d)^exponent."""


class RWKV4State(NamedTuple):
    """The state of `unrolled.ops.wkv`, num and den divided by exp(top), and the last input `[B,1,d_model]`.

    Its size never changes.
    """

    num: Tensor  # [B,H D]
    den: Tensor  # [B,H D]
    top: Tensor  # [B,H D]
    last: Tensor


class Last(NamedTuple):
    """The last input, for the state `[B,1,d_model]`."""

    last: Tensor


class RWKV4(TokenShiftAttention[RWKV4State, Last]):
    """The time mixing of RWKV-4.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`. `causal` must be True, and `value_dim` head_dim.
            Each of the n_heads head_dim channels is averaged by itself, so heads matter only if they share
            keys and values.

    Raises:
        ValueError: value_dim differs from head_dim.
        UnsupportedError: bidirectional attention, or rotary positions.
    """

    supports = CAUSAL_RECURRENCE.but(reads_input=True, sequence=True)
    one_way = ONE_WAY
    no_rotary = "there are no products to rotate, and its weights decay with the distance"
    not_decayed = ("mix",)

    def __init__(self, d_model: int, n_heads: int, **common: Unpack[CommonOptions]):
        super().__init__(d_model, n_heads, **common)
        if self.value_dim != self.head_dim:
            raise ValueError(
                f"value_dim is {self.value_dim}, but must be head_dim = {self.head_dim}, since rwkv4 works "
                "channel by channel"
            )
        # Initialised like the first layer of the published models: from long to short memories.
        channels = n_heads * self.head_dim
        self.mix = nn.Parameter(initial_mixtures(d_model, MIXTURES.values()))
        self.log_pace = nn.Parameter(-5 + 8 * torch.linspace(0, 1, channels) ** 0.7)  # A
        thirds = torch.arange(1, channels + 1) % 3 - 1
        self.bonus = nn.Parameter(math.log(0.3) + 0.5 * thirds)  # u

    def read_input(self, x: Tensor, mixed: Sequence[Tensor], last: Tensor) -> Last:  # type: ignore[override]
        """Hand on the last input."""
        return Last(last)

    def attend(self, heads: Heads[Last], masks: Masks) -> Tensor:
        """Average over whole sequences."""
        o, _ = wkv(*self._averaged(heads), **masks.of_keys())
        return self._gated(heads, o)

    def init_heads(self, batch_size: int) -> RWKV4State:
        """Make the state of `batch_size` sequences before their first token."""
        like = self.out_weight.new_empty(0, dtype=self.state_dtype)
        sums = empty_state(batch_size, self.n_heads * self.head_dim, like)
        return _state(sums, like.new_zeros(batch_size, 1, self.d_model))

    def prefill_heads(
        self, heads: Heads[Last], state: RWKV4State, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, RWKV4State]:
        """Average over whole sequences, from a state to a state."""
        sums = torch.stack(state[:3], dim=1)
        o, sums = wkv(*self._averaged(heads), state=sums, key_padding_mask=key_padding_mask)
        return self._gated(heads, o), _state(sums, heads.inputs.last)

    def summarise(self, heads: Heads[Last], key_padding_mask: Tensor | None) -> Shifted:
        """Sum over these tokens, and add up the decay over them."""
        k, v, log_decay, bonus = self._averaged(heads)
        _, sums = wkv(k, v, log_decay, bonus, key_padding_mask=key_padding_mask)
        num, den, top = sums.unbind(1)
        decay = total_decay(log_decay.expand(k.shape), key_padding_mask)
        return Shifted({"num": num, "den": den, "top": top}, decay)

    def step_heads(self, heads: Heads[Last], state: RWKV4State) -> tuple[Tensor, RWKV4State]:
        """Run one step of the recurrence."""
        o, sums = wkv_step(*self._averaged(heads), torch.stack(state[:3], dim=1))
        return self._gated(heads, o), _state(sums, heads.inputs.last)

    def _averaged(self, heads: Heads[Last]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys and values by channel, log decays and bonuses."""
        k, v = (of_every_head(x, self.n_heads).flatten(-2) for x in (heads.k, heads.v))
        return k, v, -finite_exp(self.log_pace), self.bonus

    def _gated(self, heads: Heads[Last], o: Tensor) -> Tensor:
        return heads.q.sigmoid() * o.view(heads.q.shape)


def _state(sums: Tensor, last: Tensor) -> RWKV4State:
    num, den, top = sums.unbind(1)
    return RWKV4State(num, den, top, last)
