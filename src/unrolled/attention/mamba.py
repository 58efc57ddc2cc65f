r"""Mamba: a selective scan, in which every channel has its own states, whose decays depend on the input.

    h_tn = exp(-d_t exp(A_n)) h_{t-1,n} + b_tn d_t x_t        o_t = sum_n c_tn h_tn + u x_t
    d_t = softplus(W_d r_t + s)        [r_t, b_t, c_t] = W_x x_t        y_t = W_o (o_t * silu(W_g z_t))

All operations but the sum are elementwise over channels: the inputs x, the step sizes d, the skip weights u,
the outputs o, and each of the D states h_n. Writers b and readers c, which take the places of keys and
queries, are numbers of a state, for all channels. z is the input of the layer, and x its projection after a
short convolution with silu (`conv`, 4 taps by default).

Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752,
algorithm 2 and section 3.4. As in their code, d multiplies b; eq. 4 has (1 - exp(-d exp(A))) / exp(A) in
place of d.

Cost for C = n_heads value_dim channels: in training time O(T C D) and memory O(T (C + D) + T C D / 64) with
the kernel; per generated token time, memory and state O(C D).
Cannot: run bidirectionally, read another sequence, or honour an arbitrary `attn_mask`.
Equals softmax attention: never.
"""

import math
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from unrolled.attention._decays import random_decay_biases
from unrolled.attention._options import ONE_WAY
from unrolled.attention._state import total_decay
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.dense import Linear
from unrolled.ops.options import check_integers
from unrolled.ops.precision import accumulated, finite_exp
from unrolled.ops.selective_scan import selective_scan, selective_scan_step
from unrolled.ops.sequence import DecayedEach


class MambaState(NamedTuple):
    """h `[B,C,D]`; its size never changes."""

    h: Tensor


class Mamba(MultiHeadAttention[MambaState, None]):
    """The layer of Mamba, which has no feed-forward layer beside it in the paper.

    Widths are those of the other mechanisms by default. In the paper there are twice as many channels as the
    model is wide, with 16 states each, and no biases: `n_heads=1, value_dim=2 * d_model, head_dim=16,
    bias=False`.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal. Each of the C = n_heads value_dim
            channels is scanned by itself, so the number of heads does not matter. `head_dim` is the number D
            of states of a channel, and `conv` is 4 by default.
        step_rank: width of r; d_model / 16, rounded up, by default.

    Raises:
        ValueError: n_kv_heads or step_rank out of range.
        UnsupportedError: bidirectional attention, or rotary positions.
    """

    supports = CAUSAL_RECURRENCE.but(sequence=True)
    one_way = ONE_WAY
    no_rotary = "there are no products to rotate, and its state forgets; use retention, which rotates"
    conv_activation = conv_bias = True

    def __init__(
        self, d_model: int, n_heads: int, *, step_rank: int | None = None, **common: Unpack[CommonOptions]
    ):
        if common.get("n_kv_heads") not in (None, n_heads):
            raise ValueError(
                f"n_kv_heads is {common['n_kv_heads']}, but must be n_heads = {n_heads}: mamba has no keys"
            )
        common.setdefault("conv", 4)
        super().__init__(d_model, n_heads, **common)
        self.step_rank = math.ceil(d_model / 16) if step_rank is None else step_rank
        check_integers(1, step_rank=self.step_rank)
        channels, states = n_heads * self.value_dim, self.head_dim
        self.select_proj = Linear(channels, self.step_rank + 2 * states, bias=False)
        self.step_proj = Linear(self.step_rank, channels)
        # Paces start from 1 to D, and step sizes are log-uniform, as published.
        self.log_pace = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(channels, 1))
        with torch.no_grad():
            self.step_proj.bias.copy_(random_decay_biases(channels))
        self.skip = nn.Parameter(torch.ones(channels))
        self.gate_proj = Linear(d_model, channels, bias=self.qkv_proj.bias is not None)

    def head_counts(self) -> tuple[int, int, int]:
        """Only values are projected: readers and writers are computed from them, after the convolution."""
        return 0, 0, self.n_heads

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Gate the channels, and project back."""
        return self.out_proj(o.flatten(-2) * silu(self.gate_proj(x)))  # type: ignore[no-any-return]

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Scan whole sequences."""
        return self._run(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> MambaState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        size = (batch_size, *self.log_pace.shape)
        return MambaState(self.out_weight.new_zeros(size, dtype=self.state_dtype))

    def prefill_heads(
        self, heads: Heads[None], state: MambaState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, MambaState]:
        """Scan whole sequences, from a state to a state."""
        o, h = self._run(heads, state.h, Masks(key_padding_mask))
        return o, MambaState(h)

    def summarise(self, heads: Heads[None], key_padding_mask: Tensor | None) -> DecayedEach:
        """Scan these tokens from zeros, and add up the decay over them."""
        x, d, a, b, c = self._selected(heads)
        _, own = selective_scan(x, d, a, b, c, key_padding_mask=key_padding_mask)
        return DecayedEach({"h": own}, total_decay(d, key_padding_mask).unsqueeze(-1) * a)

    def step_heads(self, heads: Heads[None], state: MambaState) -> tuple[Tensor, MambaState]:
        """Run one step of the recurrence."""
        selected = self._selected(heads)
        o, h = selective_scan_step(*selected, state.h)
        return self._skipped(heads, o, selected[0]), MambaState(h)

    def _run(self, heads: Heads[None], h: Tensor | None, masks: Masks) -> tuple[Tensor, Tensor]:
        selected = self._selected(heads)
        o, h = selective_scan(*selected, state=h, **masks.of_keys())
        return self._skipped(heads, o, selected[0]), h

    def _selected(self, heads: Heads[None]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return x, step sizes, rates, writers and readers, as `selective_scan` takes them."""
        x = heads.v.flatten(-2)
        if self.short_conv is None:
            x = silu(x)
        states = self.head_dim
        r, b, c = self.select_proj(x).split_with_sizes([self.step_rank, states, states], -1)
        return x, softplus(accumulated(self.step_proj(r))), -finite_exp(self.log_pace), b, c

    def _skipped(self, heads: Heads[None], o: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(o, x, self.skip.to(o.dtype)).view(heads.v.shape)
