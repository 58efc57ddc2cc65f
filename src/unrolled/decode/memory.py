"""The memory of the states of a plan: its layout, room for more tokens, and a way back."""

from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.decode.program import KEY_BLOCK
from unrolled.ops import native

STATE_TYPES = [torch.long, torch.float32, torch.float32]


class PlanState(NamedTuple):
    """The state of a plan after the tokens it has read.

    Attributes:
        position: [B] long, the number of tokens read so far.
        fixed: [B, F] fp32, all that has a constant size: the sums of linear attention, windows, the last
            inputs of convolutions.
        cache: [B, S, C] fp32, the keys and values of softmax layers. In each row, the keys of a head lie
            together, [S / 16, D, 16], and so do its values, [S, M]; S is at least the number of tokens.
    """

    position: Tensor
    fixed: Tensor
    cache: Tensor


class Mark(NamedTuple):
    """A state of one sequence to which a plan can return after it has read more tokens in place.

    Attributes:
        state: the state; its cache is shared with the sequence, which only adds to it.
        block: the block of each part of the cache to which the next token is added.
    """

    state: PlanState
    block: list[Tensor]


class Layout(NamedTuple):
    """The sizes of a state.

    Attributes:
        fixed: floats of a sequence that do not depend on the number of tokens.
        cache: sizes of the parts of the cache of a sequence, in floats per token.
    """

    fixed: int
    cache: list[int]

    def empty(self, rows: int) -> PlanState:
        """The state before the first token."""
        return PlanState(
            torch.zeros(rows, dtype=torch.long, device="cpu"),
            native.floats(rows, self.fixed).zero_(),
            native.floats(rows, 0, sum(self.cache)),
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of the state of one sequence with room for that many tokens."""
        return 8 + 4 * (self.fixed + sum(self.cache) * _in_blocks(tokens))

    def check(self, state: object) -> None:
        """Raise ValueError unless it is a state of this layout."""
        if not isinstance(state, PlanState):
            raise ValueError(f"state is a {type(state).__name__}, but must be a PlanState, from this plan")
        position, fixed, cache = (x.shape for x in state)
        B = len(state.position)
        if position != (B,) or fixed != (B, self.fixed) or (cache[0], *cache[2:]) != (B, sum(self.cache)):
            found = [list(position), list(fixed), list(cache)]
            raise ValueError(f"state has the shapes {found}, but must be of this plan")
        types = [x.dtype for x in state]
        if types != STATE_TYPES or state.cache.shape[1] % KEY_BLOCK:
            raise ValueError(
                f"state has the types {types} and room for {cache[1]} tokens, but must have the types "
                f"{STATE_TYPES} and room for a multiple of {KEY_BLOCK}, as this plan makes it"
            )

    def grown(self, cache: Tensor, tokens: int) -> Tensor:
        """Return a cache with room for that many tokens."""
        _, capacity, width = cache.shape
        if not width or tokens <= capacity:
            return cache
        return self._resized(cache, max(tokens, 2 * capacity))

    def resized(self, state: PlanState, tokens: int) -> PlanState:
        """Return a copy of a state whose cache has room for that many tokens in all, and no more."""
        position, fixed, cache = state
        if len(position):
            tokens = max(tokens, int(position.max()))
        return PlanState(position.clone(), fixed.clone(), self._resized(cache, tokens))

    def mark(self, state: PlanState) -> Mark:
        """Note the state of one sequence, for `back`; no more of the cache is copied than one block."""
        noted = PlanState(state.position.clone(), state.fixed.clone(), state.cache)
        return Mark(noted, [x.clone() for x in self._block(noted)])

    def back(self, mark: Mark) -> PlanState:
        """Return a copy of the state that was noted, as it was then."""
        made = self.resized(mark.state, 0)
        for block, noted in zip(self._block(made), mark.block, strict=True):
            block.copy_(noted)
        return made

    def _resized(self, cache: Tensor, tokens: int) -> Tensor:
        """Return a copy of a cache with room for that many tokens, in whole blocks of keys."""
        B, capacity, width = cache.shape
        most = _in_blocks(tokens) if width else 0
        made, begin, kept = cache.new_zeros(B, most, width), 0, min(most, capacity)
        for size in self.cache:
            old = cache.view(B, capacity * width)[:, begin * capacity :][:, : size * kept]
            made.view(B, most * width)[:, begin * most :][:, : size * kept] = old
            begin += size
        return made

    def _block(self, state: PlanState) -> list[Tensor]:
        """Return the block of each part of the cache that is full in part, as views; none if all are full."""
        number, full = divmod(int(state.position), KEY_BLOCK)
        if not full:
            return []
        capacity, flat = state.cache.shape[1], state.cache.view(-1)
        begins = [sum(self.cache[:part]) * capacity for part in range(len(self.cache))]
        return [
            flat[begin + number * KEY_BLOCK * size :][: KEY_BLOCK * size]
            for begin, size in zip(begins, self.cache, strict=True)
        ]


def copied(state: PlanState) -> PlanState:
    """Copy a state into contiguous memory."""
    return PlanState(*(x.clone(memory_format=torch.contiguous_format) for x in state))


def _in_blocks(tokens: int) -> int:
    """Round a number of tokens up to whole blocks of keys."""
    return -(-tokens // KEY_BLOCK) * KEY_BLOCK
