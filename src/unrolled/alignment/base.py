"""The contract of an alignment: it reads a memory once, and then attends to it for each query."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unrolled.ops.checks import check_input, check_key_padding_mask, shape
from unrolled.ops.options import ChecksOptions, at_least
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.sequence import refuse
from unrolled.ops.softmax import softmax_or_zero
from unrolled.ops.state_checks import Growing, check_state

CHUNK = 2**22
"""Largest number of entries of a `[B,T,S,K]` tensor at a time: queries are split to stay below it."""


class MemoryState(NamedTuple):
    """A memory, its keys, its padding, and the number of queries so far."""

    memory: Tensor  # [B,S,memory_dim], 0 at padding
    keys: Tensor  # [B,S,K], projected once
    padding: Tensor  # [B,S] bool
    position: Tensor  # [B] long


class Alignment(ChecksOptions, nn.Module):
    """Attends to a memory with one query at a time, usually the state of a recurrent decoder.

        state = read(memory)                          projects the memory once
        context, weights, state = recall(query, state)

    A mechanism derives from this class and defines `scores`, which compares what `project_query` and
    `project_memory` return. A mechanism that computes more than a softmax of the scores overrides `weigh`.
    Padding of the memory is masked, on any side; a row that is all padding gives 0. Sums are computed in fp32
    (fp64 for fp64 weights); the outputs have the type of the query.

    Args:
        query_dim: width of the queries.
        memory_dim: width of the memory's vectors; `query_dim` by default.

    Raises:
        ValueError: a size below 1.
    """

    growing: Growing = dict.fromkeys(("memory", "keys", "padding"), (1, "S"))
    differentiable = True  # whether back-propagation trains the weights that it attends with

    def __init__(self, query_dim: int, memory_dim: int | None = None):
        super().__init__()
        self.query_dim = at_least(1, "query_dim", query_dim)
        self.memory_dim = query_dim if memory_dim is None else at_least(1, "memory_dim", memory_dim)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Project a memory `[B,S,memory_dim]` to keys `[B,S,K]`; by default the keys are the memory."""
        return memory

    def project_query(self, query: Tensor) -> Tensor:
        """Project queries `[B,T,query_dim]` for comparison with the keys; by default the identity."""
        return query

    def scores(self, query: Tensor, state: Any) -> Tensor:
        """Compare projected queries `[B,T,...]` with the keys: `[B,T,S]`, in the dtype of the state."""
        raise NotImplementedError

    def weigh(self, query: Tensor, state: Any) -> Tensor:
        """Compute the weights `[B,T,S]` of projected queries `[B,T,...]`: 0 at padding."""
        return softmax_inside(self.scores(query, state), ~state.padding.unsqueeze(1))

    def read(self, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Project a memory `[B,S,memory_dim]`, S at least 1, for any number of queries.

        Args:
            memory: the vectors to attend to.
            key_padding_mask: `[B,S]`, True = padding, on any side.

        Raises:
            ValueError: an argument of the wrong shape or type, or a memory of length 0.
        """
        self._check("memory", memory, ["B", "S", self.memory_dim])
        if memory.shape[1] == 0:
            raise ValueError(f"memory has shape {shape(memory)}, but its length S must be at least 1")
        if key_padding_mask is None:
            key_padding_mask = torch.zeros(memory.shape[:2], dtype=torch.bool, device=memory.device)
        check_key_padding_mask(key_padding_mask, *memory.shape[:2])
        if key_padding_mask.device != memory.device:
            where = key_padding_mask.device
            raise ValueError(f"memory is on {memory.device}, but must be on {where} like key_padding_mask")
        memory = memory.masked_fill(key_padding_mask.unsqueeze(-1), 0)
        keys = self.project_memory(memory)
        position = torch.zeros(len(memory), dtype=torch.long, device=memory.device)
        dtype = self._state_dtype(memory)
        return MemoryState(memory.to(dtype), keys.to(dtype), key_padding_mask, position)

    def recall(self, query: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Attend with T queries `[B,T,query_dim]` that do not depend on each other, in parallel.

        Returns:
            contexts `[B,T,memory_dim]`, weights `[B,T,S]` and the new state; `state` is not modified.

        Raises:
            ValueError: an argument of the wrong shape or type, or a state of other sizes.
        """
        self._check("query", query, ["B", "T", self.query_dim])
        weight = next(self.parameters(), query)
        check_state(self, state, len(query), weight, lambda: self._empty_state(weight))
        projected = self.project_query(query)
        with without_autocast(query.device):
            weights = self.weigh(projected.to(state.memory.dtype), state)
            context = weights @ state.memory
        after = state._replace(position=state.position + query.shape[1])
        return context.to(query.dtype), weights.to(query.dtype), after

    def forward(self, query: Tensor, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend with all queries `[B,T,query_dim]` to a memory `[B,S,memory_dim]`: `[B,T,memory_dim]`."""
        return self.recall(query, self.read(memory, key_padding_mask=key_padding_mask))[0]

    def _empty_state(self, like: Tensor) -> Any:
        """Make a state of no rows and no memory."""
        memory = like.new_empty(0, 0, self.memory_dim)
        padding, position = memory.new_empty(0, 0, dtype=torch.bool), memory.new_empty(0, dtype=torch.long)
        dtype = self._state_dtype(like)
        return MemoryState(memory.to(dtype), self.project_memory(memory).to(dtype), padding, position)

    def _state_dtype(self, like: Tensor) -> torch.dtype:
        weight = next(self.parameters(), None)
        return accumulation_dtype(like.dtype if weight is None else weight.dtype)

    def _check(self, name: str, x: Tensor, axes: list[str | int]) -> None:
        refuse("an alignment")
        check_input(name, x, axes, next(self.parameters(), None))


def softmax_inside(scores: Tensor, allowed: Tensor) -> Tensor:
    """Compute the softmax over the last axis where `allowed` (broadcast), and 0 elsewhere."""
    return softmax_or_zero(scores.masked_fill(~allowed, -torch.inf))


def additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """e_ts = v . tanh(q_t + k_s): `[B,T,K]`, `[B,S,K]` and `[K]` to `[B,T,S]`.

    The sums `[B,T,S,K]` are computed for as many queries at a time as `CHUNK` allows.
    """
    B, S, K = keys.shape
    at_once = max(1, CHUNK // max(1, B * S * K))
    parts = [torch.tanh(q.unsqueeze(2) + keys.unsqueeze(1)) @ v for q in torch.split(query, at_once, 1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
