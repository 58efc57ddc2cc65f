"""What mechanisms with the delta rule share: their state, and its forms over heads."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from unrolled.attention._heads import of_every_head
from unrolled.attention._state import advance
from unrolled.attention.base import Heads, Masks, MultiHeadAttention
from unrolled.ops.delta import delta_rule, operator
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.sequence import Transformed


class DeltaState(NamedTuple):
    """S `[B,G,D,M]`, and the number of tokens seen `[B]`; its size never changes."""

    kv: Tensor
    position: Tensor


class Rates(NamedTuple):
    """The learning rates b `[...,G]`, and the logarithm of the decays a, `[...,G]`, `[...,G,D]` or None."""

    beta: Tensor
    log_decay: Tensor | None


class DeltaRule(MultiHeadAttention[DeltaState, Rates]):
    """The delta rule over heads; what derives from it defines `read_input`, the rates and the decays.

    Keys have length 1, and queries length 1 / sqrt(D). Before that comes silu, unless a convolution has
    applied it. Heads that share their queries and keys have a state each.
    """

    conv_activation = True

    def attend(self, heads: Heads[Rates], masks: Masks) -> Tensor:
        """Run over whole sequences."""
        return self._run(heads, None, masks)[0]

    def init_heads(self, batch_size: int) -> DeltaState:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        like, sizes = self.out_proj.weight, (self.n_kv_heads, self.head_dim, self.value_dim)
        kv = like.new_zeros(batch_size, *sizes, dtype=self.state_dtype)
        return DeltaState(kv, like.new_zeros(batch_size, dtype=torch.long))

    def prefill_heads(
        self, heads: Heads[Rates], state: DeltaState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, DeltaState]:
        """Run over whole sequences, from a state to a state."""
        o, kv = self._run(heads, state.kv, Masks(key_padding_mask))
        return o, DeltaState(kv, advance(state.position, heads.q, key_padding_mask))

    def summarise(self, heads: Heads[Rates], key_padding_mask: Tensor | None) -> Transformed:
        """Run from zeros; and from the identity, with values of zero, for what becomes of a state."""
        _, k, v, beta, log_decay = self._rule(heads)
        v, state = beside_identity(v, k)
        _, kv = delta_rule(k, k, v, beta, log_decay=log_decay, state=state, key_padding_mask=key_padding_mask)
        return split_transition(kv)

    def step_heads(self, heads: Heads[Rates], state: DeltaState) -> tuple[Tensor, DeltaState]:
        """Run one step of the recurrence."""
        q, k, v, beta, log_decay = self._rule(heads)
        # Without the checks of `delta_rule_step`, which reads the lengths of the keys: these have length 1.
        o, kv = operator.delta_rule_step(q, k, v, beta, state.kv, log_decay)
        return o, DeltaState(kv, state.position + 1)

    def _run(self, heads: Heads[Rates], state: Tensor | None, masks: Masks) -> tuple[Tensor, Tensor]:
        q, k, v, beta, log_decay = self._rule(heads)
        return delta_rule(q, k, v, beta, log_decay=log_decay, state=state, **masks.of_keys())

    def _rule(self, heads: Heads[Rates]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the inputs of the rule: scaled q, k of length 1, v in at least fp32, and the rates."""
        q, k, v, positions, (beta, log_decay), _ = heads
        if self.short_conv is None:
            q, k = _wide_silu(q), _wide_silu(k)
        q, k = _unit(q, self.head_dim**-0.5), _unit(k)
        if k.shape[-2] < v.shape[-2]:
            q, k = of_every_head(q, self.n_heads), of_every_head(k, self.n_heads)
        if positions is not None:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        return q, k, v.to(q.dtype), beta, log_decay


def beside_identity(v: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Append zeros, D wide, to `v [B,T,G,M]`, and the identity to a state of zeros: `[B,G,D,M+D]`.

    The last D columns of the state after `k [B,T,G,D]` and these values are then what became of the identity.
    """
    (B, _, G, D), M = k.shape, v.shape[3]
    eye = torch.eye(D, dtype=k.dtype, device=k.device).expand(B, G, D, D)
    return pad(v, (0, D)), pad(eye, (M, 0))


def split_transition(kv: Tensor) -> Transformed:
    """Return the first M columns of `[B,G,D,M+D]` as a state, and the others as what multiplies another."""
    return Transformed({"kv": kv[..., : -kv.shape[2]]}, kv[..., -kv.shape[2] :])


def random_log_paces(n: int) -> Tensor:
    """Draw logarithms of paces from 1 to 16, as Mamba-2 begins with."""
    return torch.empty(n).uniform_(1, 16).log()


def random_decay_biases(*sizes: int) -> Tensor:
    """Draw biases whose softplus is from 0.001 to 0.1, evenly in its logarithm, as Mamba-2 begins with."""
    return torch.empty(sizes).uniform_(math.log(1e-3), math.log(1e-1)).exp().expm1().log()


def _wide_silu(x: Tensor) -> Tensor:
    return silu(x.to(accumulation_dtype(x.dtype)))


def _unit(x: Tensor, length: float = 1.0) -> Tensor:
    """Scale x to a length, or shorter where it is close to 0."""
    x = x.to(accumulation_dtype(x.dtype))
    return x * ((x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * length)
