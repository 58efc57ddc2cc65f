r"""A whole Transformer layer as a recurrent cell: linear attention and the feed-forward part.

    s_t = s_{t-1} + phi(k_t) v_t^T        z_t = z_{t-1} + phi(k_t)        q_t, k_t, v_t = W x_t + b
    y_t = f_l(phi(q_t)^T s_t / phi(q_t)^T z_t + x_t)                      phi(x) = elu(x) + 1

for each head. The outputs of all heads are joined and projected before x_t is added. f_l is the rest of a
post-norm Transformer layer: u = norm(.), then norm(u + W_2 relu(W_1 u)).

Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, eq. 16-20, with several heads; Vaswani
et al. 2017, arXiv 1706.03762, for f_l.

Cost, with N = hidden_size, H heads and f_l of width d_ff: time O(T (N^2 / H + N^2 + N d_ff)), in parallel
over the sequence; 4 N^2 + 2 N d_ff weights; per generated token time O(N^2 + N d_ff), state N^2 / H + N.
Cannot: have outputs of another width than its inputs, since both are added.
Equals softmax attention: never. It is the block of `unrolled.models` with attention "linear", norm "post" and
activation "relu".
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from unrolled.ops.feature_maps import Elu
from unrolled.ops.linear import LinearOptions, LinearState, linear_attention, linear_attention_step
from unrolled.ops.precision import apply
from unrolled.recurrent._layer import RecurrentLayer


class LinearAttentionState(NamedTuple):
    """The state after the last token: `s [B,H,D,D]` and `z [B,H,D]`, with D = hidden_size / H."""

    s: Tensor
    z: Tensor


class LinearAttentionCell(RecurrentLayer[LinearAttentionState]):
    """A post-norm Transformer layer of linear attention.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs, which must be the same.
        n_heads: number of heads, a divisor of `hidden_size`.
        d_ff: width of the feed-forward part; by default 4 hidden_size.

    Raises:
        ValueError: sizes that differ or that n_heads does not divide, or an option below 1.
    """

    supports = RecurrentLayer.supports.but(dynamic_length=True)

    def __init__(self, input_size: int, hidden_size: int, *, n_heads: int = 4, d_ff: int | None = None):
        super().__init__(input_size, hidden_size)
        if input_size != hidden_size:
            raise ValueError(
                f"hidden_size is {hidden_size}, but must be input_size = {input_size}: both are added"
            )
        if n_heads < 1 or hidden_size % n_heads:
            raise ValueError(f"n_heads is {n_heads}, but must divide hidden_size = {hidden_size}")
        d_ff = 4 * hidden_size if d_ff is None else d_ff
        if d_ff < 1:
            raise ValueError(f"d_ff is {d_ff}, but must be at least 1")
        self.n_heads, self.head_dim = n_heads, hidden_size // n_heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.up, self.down = nn.Linear(hidden_size, d_ff), nn.Linear(d_ff, hidden_size)
        self.ff_norm = nn.LayerNorm(hidden_size)
        self.phi = Elu(self.head_dim).phi

    def init_state(self, batch_size: int) -> LinearAttentionState:
        """Make zeros."""
        size = (batch_size, self.n_heads, self.head_dim)
        z = self._weight.new_zeros(size, dtype=self._state_dtype)
        return LinearAttentionState(z.new_zeros(*size, self.head_dim), z)

    def project(self, x: Tensor) -> Tensor:
        """Return q, k, v and x itself, `[...,4 hidden_size]`."""
        return torch.cat([self.qkv_proj(x), x], -1)

    def advance(self, inputs: Tensor, state: LinearAttentionState) -> tuple[Tensor, LinearAttentionState]:
        """Run one step (eq. 18-20)."""
        q, k, v, x = self._heads(inputs)
        o, after = linear_attention_step(self.phi(q), self.phi(k), v, LinearState(*state))
        return self._rest(o, x), LinearAttentionState(*after)

    def scan(
        self, inputs: Tensor, state: LinearAttentionState, padding: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Run all steps in parallel."""
        q, k, v, x = self._heads(inputs)
        options: LinearOptions = {"causal": True, "key_padding_mask": padding, "state": LinearState(*state)}
        o, after = linear_attention(self.phi(q), self.phi(k), v, return_state=True, **options)
        return self._rest(o, x), LinearAttentionState(*after)

    def _heads(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, x = inputs.chunk(4, -1)
        q, k, v = (part.reshape(*part.shape[:-1], self.n_heads, self.head_dim) for part in (q, k, v))
        return q, k, v, x

    def _rest(self, o: Tensor, x: Tensor) -> Tensor:
        """Project the concatenated heads `o`, add `x`, and apply f_l."""
        u = apply(self.attention_norm, x + apply(self.out_proj, o.flatten(-2)))
        return apply(self.ff_norm, u + apply(self.down, apply(self.up, u).relu()))
