"""The exact gradient of sequences that do not fit into memory, segment by segment.

A recurrence carries a state over the border between two segments: s_i = f(x_i, s_{i-1}). A first pass
computes the states at the borders and keeps nothing else. A second pass goes back from the last segment to
the first. It computes each segment again from the state before it, now with a graph, and back-propagates the
loss l_i of its tokens together with the gradient of the state after it:

    dL/ds_{i-1} = dl_i/ds_{i-1} + (ds_i/ds_{i-1})^T dL/ds_i

This is back-propagation through time (Werbos 1990) with checkpoints at the borders (Chen et al. 2016, arXiv
1604.06174). It costs a second forward pass of all segments but the last. It takes the memory of one segment,
however long the sequences are: the states are in a file (`KeptStates`). The second pass uses the dropout
masks and hash buckets of the first (`unrolled.ops.replay`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from unrolled.contract import IGNORED, Batch, UnsupportedError
from unrolled.ops.replay import Replay
from unrolled.ops.state import leaves, map_tensors
from unrolled.training._kept_states import KeptStates
from unrolled.training.spread import whole


@runtime_checkable
class Continues(Protocol):
    """A model whose loss can continue from a state, such as an `unrolled.models.LanguageModel`."""

    def init_state(self, batch_size: int, /) -> Any:
        """Return the state before the first token."""

    def read_some(self, tokens: Tensor, state: Any, key_padding_mask: Tensor | None, /) -> tuple[Tensor, Any]:
        """Read tokens `[B,T]` from a state; the second result is the new state."""

    def loss_from(
        self, inputs: Tensor, targets: Tensor, state: Any, *, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Return the mean loss over the targets of tokens that follow a state, and the new state."""


def check_continues(model: object) -> Any:
    """Return the state of a model after one token.

    Raises:
        UnsupportedError: the loss of the model cannot continue from a state.
    """
    if not isinstance(model, Continues):
        name = type(model).__name__
        raise UnsupportedError(
            f"{name} has no state to continue from: use segment=None, carry_state=False, sequence=1"
        )
    state = model.init_state(1)
    token = torch.zeros(1, 1, dtype=torch.long, device=next(iter(leaves(state).values())).device)
    with torch.no_grad():
        return model.loss_from(token, token, state, key_padding_mask=None)[1]


def empty_state(model: Continues, rows: int) -> Any:
    """Return the state of `rows` rows before their first token, in tensors that are not sharded."""
    with torch.no_grad():
        return map_tensors(whole, model.init_state(rows))


def pieces(batch: Batch, length: int) -> Iterator[Batch]:
    """Yield a batch itself or, if its sequences are packed, groups of them for segments of `length` tokens.

    A sequence that is longer than `length` is yielded alone. As many shorter sequences as fit into `length`
    are yielded together, packed.
    """
    if batch.cu_seqlens is None:
        yield batch
        return
    inputs, targets = batch.inputs.reshape(1, -1), batch.targets.reshape(1, -1)
    bounds: list[int] = batch.cu_seqlens.tolist()
    together = bounds[:1]
    for stop in bounds[1:]:
        if stop - together[0] > length and len(together) > 1:
            yield _piece(inputs, targets, together)
            together = together[-1:]
        together.append(stop)
        if stop - together[0] > length:
            yield _piece(inputs, targets, together)
            together = [stop]
    if len(together) > 1:
        yield _piece(inputs, targets, together)


def _piece(inputs: Tensor, targets: Tensor, bounds: list[int]) -> Batch:
    part = slice(bounds[0], bounds[-1])
    packed = torch.tensor(bounds, dtype=torch.int32) - bounds[0] if len(bounds) > 2 else None
    return Batch(inputs[:, part], targets[:, part], cu_seqlens=packed)


class Segments:
    """The rows of a batch, each one sequence, cut into segments of equal length; the last may be shorter.

    Args:
        model: the model that reads the segments.
        batch: `inputs` and `targets [B,T]` and perhaps a `key_padding_mask`, on the device of the model.
        length: number of tokens of a segment.
        running: makes the context in which the model runs, such as autocast.
    """

    def __init__(
        self,
        model: Continues,
        batch: Batch,
        length: int,
        running: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._model, self._length, self._running = model, length, running
        self._inputs, self._targets, self._padding = batch.inputs, batch.targets, batch.key_padding_mask

    def __len__(self) -> int:
        return max(1, math.ceil(self._inputs.shape[1] / self._length))

    def start(self) -> Any:
        """Return the state before the first token of the rows."""
        return empty_state(self._model, len(self._inputs))

    def loss(self, state: Any) -> Tensor:
        """Return the sum of the losses of the targets, in nats, continuing from `state`; without a graph."""
        losses = self._inputs.new_zeros(len(self), dtype=torch.float64)
        with torch.no_grad():
            for i in range(len(self)):
                losses[i], state = self._loss(i, state)
        return losses.sum()

    def add_gradient(
        self,
        scale: float,
        state: Any,
        accumulating: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        last: bool = True,
    ) -> tuple[Tensor, Any]:
        """Add the gradient of `scale` times the sum of the losses to the gradients of the parameters.

        Args:
            scale: factor of the losses, such as one over the number of targets.
            state: the state from which the rows continue; it gets no gradient.
            accumulating: makes a context for forward and backward passes that are not the last of an update.
            last: whether the last backward pass here is the last of an update.

        Returns:
            The scaled sum of the losses, and the state at the end, both without a graph.

        Raises:
            OSError: the disk has no room for the states.
        """
        final, replays = len(self) - 1, list[Replay]()
        losses = self._inputs.new_zeros(len(self), dtype=torch.float64)
        with closing(KeptStates()) as kept:
            with torch.no_grad():
                for i in range(final):
                    kept.push(state)
                    replays.append(Replay(self._inputs.device))
                    state = replays[i].first(self._read, i, state)
            end, gradients = state, list[Tensor | None]()
            for i in range(final, -1, -1):
                before = _detached(kept.pop(state) if i < final else state, requires_grad=i > 0)
                with nullcontext() if last and i == 0 else accumulating():
                    if i < final:
                        loss, after = replays[i].again(self._loss, i, before)
                    else:
                        loss, after = self._loss(i, before)
                        end = _detached(after)
                    _back_propagate(loss * scale, after, gradients)
                losses[i] = loss.detach() * scale
                gradients = [x.grad for x in leaves(before).values()]
        return losses.sum(), end

    def _read(self, i: int, state: Any) -> Any:
        """Return the state after segment i."""
        inputs, _, padding = self._segment(i)
        with self._running():
            return self._model.read_some(inputs, state, padding)[1]

    def _loss(self, i: int, state: Any) -> tuple[Tensor, Any]:
        """Return the sum of the losses of segment i, and the state after it."""
        inputs, targets, padding = self._segment(i)
        counted = targets != IGNORED
        if padding is not None:
            counted &= ~padding
        with self._running():
            loss, state = self._model.loss_from(inputs, targets, state, key_padding_mask=padding)
        return loss * counted.sum(), state

    def _segment(self, i: int) -> tuple[Tensor, Tensor, Tensor | None]:
        part = slice(i * self._length, (i + 1) * self._length)
        padding = None if self._padding is None else self._padding[:, part]
        return self._inputs[:, part], self._targets[:, part], padding


def _detached(state: Any, *, requires_grad: bool = False) -> Any:
    return map_tensors(lambda x: x.detach().requires_grad_(requires_grad and x.is_floating_point()), state)


def _back_propagate(loss: Tensor, state: Any, gradients: list[Tensor | None]) -> None:
    """Back-propagate a loss together with the gradients of the tensors of a state, where there are any."""
    roots, weights = [loss], list[Tensor | None]([None])
    for x, gradient in zip(leaves(state).values(), gradients, strict=bool(gradients)):
        if gradient is not None and x.requires_grad:
            roots.append(x)
            weights.append(gradient)
    torch.autograd.backward(roots, weights)
