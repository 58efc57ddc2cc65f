"""What the mechanisms with the delta rule share: their state, and the rule over heads."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.attention._heads import of_every_head
from unrolled.attention._state import position_after
from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.ops.delta import delta_rule, operator
from unrolled.ops.head_scale import scale_heads
from unrolled.ops.sequence import Transformed

SMALLEST_SQUARE = 1e-6  # added to squared lengths, so that a vector close to 0 is not scaled up to length 1


class DeltaState(NamedTuple):
    """S `[B,G,D,M]`, and the number of tokens seen `[B]`; its size never changes."""

    kv: Tensor
    position: Tensor


class Rates(NamedTuple):
    """The learning rates b `[...,G]`, and the logarithm of the decays a, `[...,G]`, `[...,G,D]` or None."""

    beta: Tensor
    log_decay: Tensor | None


class DeltaRule(MultiHeadAttention[DeltaState, Rates]):
    """The delta rule over heads; a subclass defines `read_input`, which computes the rates and the decays.

    Keys are scaled to length 1, and queries to length 1 / sqrt(D). Before the scaling, silu is applied to
    both, unless a convolution has already applied it. Heads that share queries and keys still have a state
    each.
    """

    conv_activation = True

    def attend(self, heads: Heads[Rates], masks: Masks) -> Tensor:
        """Run over whole sequences."""
        return self._run(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> DeltaState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        like, sizes = self.out_weight, (self.n_kv_heads, self.head_dim, self.value_dim)
        kv = like.new_zeros(batch_size, *sizes, dtype=self.state_dtype)
        return DeltaState(kv, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads[Rates], state: DeltaState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, DeltaState]:
        """Run over whole sequences, from a state to a state."""
        o, kv = self._run(heads, state.kv, Masks(key_padding_mask))
        return o, DeltaState(kv, position_after(state.position, heads.q, key_padding_mask))

    def summarise(self, heads: Heads[Rates], key_padding_mask: Tensor | None) -> Transformed:
        """Compute A and B such that a state X becomes A X + B: run from the identity and from zeros."""
        _, k, v, beta, log_decay = self._rule(heads)
        v, state = beside_identity(v, k)
        _, kv = delta_rule(k, k, v, beta, log_decay=log_decay, state=state, key_padding_mask=key_padding_mask)
        return split_transition(kv)

    def step_heads(self, heads: Heads[Rates], state: DeltaState) -> tuple[Tensor, DeltaState]:
        """Run one step of the recurrence."""
        q, k, v, beta, log_decay = self._rule(heads)
        # The checks of `delta_rule_step` are skipped: they read the lengths of the keys, which are 1 here.
        o, kv = operator.delta_rule_step(q, k, v, beta, state.kv, log_decay)
        return o, DeltaState(kv, state.position + 1)

    def _run(self, heads: Heads[Rates], state: Tensor | None, masks: Masks) -> tuple[Tensor, Tensor]:
        q, k, v, beta, log_decay = self._rule(heads)
        return delta_rule(q, k, v, beta, log_decay=log_decay, state=state, **masks.of_keys())

    def _rule(self, heads: Heads[Rates]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the inputs of the rule: scaled q, k of length 1, v in at least fp32, and the rates."""
        q, k, v, positions, (beta, log_decay), _ = heads
        activation = self.short_conv is None
        q = scale_heads(q, self.head_dim**-0.5, SMALLEST_SQUARE, activation=activation)
        k = scale_heads(k, 1.0, SMALLEST_SQUARE, activation=activation)
        if k.shape[-2] < v.shape[-2]:
            q, k = of_every_head(q, self.n_heads), of_every_head(k, self.n_heads)
        if positions is not None:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        return q, k, v.to(q.dtype), beta, log_decay


def beside_identity(v: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Append zeros, D wide, to `v [B,T,G,M]`, and the identity to a state of zeros: `[B,G,D,M+D]`.

    After the tokens with keys `k [B,T,G,D]` and these values, the last D columns of the state are the matrix
    by which these tokens multiply any earlier state.
    """
    (B, _, G, D), M = k.shape, v.shape[3]
    eye = torch.eye(D, dtype=k.dtype, device=k.device).expand(B, G, D, D)
    return pad(v, (0, D)), pad(eye, (M, 0))


def split_transition(kv: Tensor) -> Transformed:
    """Split `[B,G,D,M+D]` into a state, the first M columns, and the matrix that multiplies a state."""
    return Transformed({"kv": kv[..., : -kv.shape[2]]}, kv[..., -kv.shape[2] :])
