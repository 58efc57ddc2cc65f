"""What a slice of a sequence does to any state: the equations are in `unrolled.ops.sequence`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Self

import torch
from torch import Tensor

from unrolled.ops.packing import reorder, valid_first

Fields = Mapping[str, Tensor]
"""Parts of a state, by name."""


@dataclass(frozen=True)
class Summary:
    """What a slice does to a state.

    Attributes:
        own: the fields of the state after the slice, starting from the empty state.
        through: how the slice changes a state that was there before; its meaning depends on the kind.
    """

    own: Fields
    through: Tensor | None = None
    pipelined: ClassVar[bool] = False  # whether parts of the first field's columns can be sent one by one

    def after(self, state: Fields) -> Fields:
        """Return the state after the slice, given the state before it."""
        raise NotImplementedError

    def replaces(self, state: Fields) -> bool:
        """Whether the state after the slice is the same for any state before it."""
        return False

    @classmethod
    def after_all(cls, state: Fields, summaries: Sequence[Self]) -> Fields:
        """Return the state after several slices."""
        return reduce(lambda before, summary: summary.after(before), summaries, state)


class Decayed(Summary):
    """Sums with a decay: `through` is the log decay over the slice, `[B,G]`, or `[B,G,R]` per feature."""

    pipelined = True

    def after(self, state: Fields) -> Fields:
        """exp(a) X + S."""
        assert self.through is not None
        share = self.through.exp()
        return {name: _over(share, x) * x + self.own[name].to(x.dtype) for name, x in state.items()}


class DecayedEach(Decayed):
    """Sums with a decay for every number: `through` has the shape of the state, columns included."""

    pipelined = False


class Transformed(Summary):
    """A linear map of the rows: `through` is the matrix `[B,G,D,D]` by which the state is multiplied."""

    pipelined = True

    def after(self, state: Fields) -> Fields:
        """M X + S."""
        assert self.through is not None
        return {name: self.through @ x + self.own[name] for name, x in state.items()}


class Shifted(Summary):
    """Sums of terms divided by exp(m), where m, the last field, is the largest exponent so far.

    `through` is the log decay of the sums over the slice, in the shape of m; None for no decay. m counts as a
    constant in gradients.
    """

    def after(self, state: Fields) -> Fields:
        """exp(m_X + a - m) X + exp(m_S - m) S with m = max(m_X + a, m_S)."""
        *sums, top = state
        before = state[top] if self.through is None else state[top] + self.through
        m = torch.maximum(before, self.own[top]).detach()
        old, new = (before - m).exp(), (self.own[top] - m).exp()
        added = {name: _over(old, state[name]) * state[name] for name in sums}
        return {name: x + _over(new, x) * self.own[name] for name, x in added.items()} | {top: m}


class Latest(Summary):
    """The last R tokens, `[...,R,C]`, of which a slice gives at most R.

    `through [B]` is the number of the slice's own tokens that are valid, which come last; None if all are.
    """

    pipelined = True

    def replaces(self, state: Fields) -> bool:
        """Whether the slice has as many tokens as are kept."""
        return self.through is None and all(x.shape[-2] == self.own[n].shape[-2] for n, x in state.items())

    def after(self, state: Fields) -> Fields:
        """Drop the oldest tokens."""
        return {name: self._last(x, self.own[name].to(x.dtype)) for name, x in state.items()}

    def _last(self, before: Tensor, own: Tensor) -> Tensor:
        R, n = before.shape[-2], own.shape[-2]
        both = torch.cat([before, own], -2)
        if self.through is None:
            return both[..., n:, :]
        age, count = torch.arange(R - 1, -1, -1, device=own.device), self.through.unsqueeze(1)
        place = torch.where(age < count, R + n - 1 - age, R - 1 - age + count)  # [B,R]
        place = place.reshape(len(place), *[1] * (before.dim() - 3), R, 1)
        return both.gather(-2, place.expand(before.shape))


class Appended(Summary):
    """All tokens so far, `[...,P,C]`, or `[B,P]` for their padding."""

    def after(self, state: Fields) -> Fields:
        """Append the slice."""
        return self.after_all(state, [self])

    @classmethod
    def after_all(cls, state: Fields, summaries: Sequence[Self]) -> Fields:
        """Append all slices at once."""

        def joined(name: str, x: Tensor) -> Tensor:
            return torch.cat([x, *(summary.own[name].to(x.dtype) for summary in summaries)], x.dim() // 2)

        return {name: joined(name, x) for name, x in state.items()}


def last_tokens(x: Tensor, key_padding_mask: Tensor | None, n: int) -> tuple[Tensor, Tensor | None]:
    """Return the last n valid tokens of `x [B,T,...]`, n <= T, and their number `[B]`.

    Where a row has fewer than n valid tokens, the result `[B,n,...]` begins with other tokens. Without a mask
    all tokens are valid, and the number is None.
    """
    T = x.shape[1]
    if key_padding_mask is None:
        return x[:, T - n :], None
    count = (~key_padding_mask).sum(1)
    place = count.unsqueeze(1) - n + torch.arange(n, device=x.device)
    return reorder(x, valid_first(key_padding_mask).gather(1, place.clamp(min=0))), count.clamp(max=n)


def _over(factor: Tensor, x: Tensor) -> Tensor:
    """Append axes to a factor of the leading axes of x."""
    return factor.reshape(*factor.shape, *[1] * (x.dim() - factor.dim()))
