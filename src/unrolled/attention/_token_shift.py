"""Attention whose projections read mixtures of a token with the one before it, as in RWKV."""

from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from unrolled.attention._heads import NO_MASKS
from unrolled.attention.base import Heads, Masks, MultiHeadAttention, Projected
from unrolled.ops.token_shift import mix_with_token_before

State = TypeVar("State")
Inputs = TypeVar("Inputs")


class Unmixed(NamedTuple):
    """The input in the place of queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


class TokenShiftAttention(MultiHeadAttention[State, Inputs]):
    """The base of mechanisms that mix each token with the one before it.

    A subclass sets `mix [n,d_model]`. The first three mixtures are the inputs of queries, keys and values.
    Its `read_input` gets all of them and the last token, and its state has a field `last` for that token.
    """

    mixes_input = True
    mix: nn.Parameter

    def project(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Projected:
        """Return the input three times: `heads_of` projects it, since only it knows the token before."""
        return Unmixed(query, query, query)

    def heads_of(
        self,
        projected: Projected,
        x: Tensor,
        masks: Masks = NO_MASKS,
        *,
        cross: bool = False,
        state: Any = None,
        **further: Tensor | None,
    ) -> Heads[Inputs]:
        """Mix every token with the one before it, project the mixtures, and read further inputs from them.

        Queries, keys and values of another module's projections are taken as they are.
        """
        inner = state if state is None or self.short_conv is None else state.heads
        last = None if inner is None else inner.last
        mixed, last = mix_with_token_before(x, self.mix, last, **masks.of_keys())
        if isinstance(projected, Unmixed):
            projected = super().project(*mixed[:3])
        return super().heads_of(projected, x, masks, cross=cross, state=state, mixed=mixed, last=last)
