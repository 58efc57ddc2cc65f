"""Steps of a generator on CUDA: recorded as a CUDA graph, and replayed.

A step has many small kernels, and Python needs more time to launch them than a GPU to run them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unrolled.ops.observing import changed
from unrolled.ops.state import leaves, map_tensors

Advance = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]
"""From the last tokens `[N]`, random numbers `[N]`, the tokens seen and a state: the next tokens and state.

It may modify the tokens seen, and nothing else.
"""


class Memory(NamedTuple):
    """The arguments of an `Advance`, which a graph reads and writes."""

    tokens: Tensor
    draws: Tensor
    seen: Tensor
    state: Any


def recordable(model: object, device: torch.device) -> bool:
    """Whether the steps of a model can be recorded: not if they may run the user's code.

    Such code may read results on the CPU, which a graph cannot hold. After a failed recording, torch can no
    longer draw random numbers.
    """
    if device.type != "cuda" or not isinstance(model, nn.Module) or changed(model.modules()):
        return False
    known = (type(x).__module__.partition(".")[0] in ("torch", "unrolled") for x in model.modules())
    return all(known) and not torch.is_autocast_enabled("cuda")  # autocast caches converted weights


class Step:
    """A function that is called step by step, and replayed from a graph where `record` allows it.

    A graph reads and writes fixed memory. So it is recorded after a step that left the sizes of the state as
    they were, and dropped when the caller brings another state.
    """

    def __init__(self, advance: Advance, *, record: bool):
        self._advance, self._record = advance, record
        self._steady: object = None  # sizes of a state that a step has kept
        self._graph: torch.cuda.CUDAGraph | None = None
        self._memory: Memory | None = None  # of the graph

    def __call__(self, tokens: Tensor, draws: Tensor, seen: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Call the function. The tokens and the state that it returns change in the next call."""
        if self._memory is None or state is not self._memory.state:
            self._graph = self._memory = None
            if self._record and self._steady == _sizes(state):
                self._begin(tokens, draws, seen, state)
        if self._graph is None or self._memory is None:
            tokens, after = self._advance(tokens, draws, seen, state)
            if self._record:
                self._steady = sizes if (sizes := _sizes(after)) == _sizes(state) else None
            return tokens, after
        self._memory.tokens.copy_(tokens)
        self._memory.draws.copy_(draws)
        self._graph.replay()
        return self._memory.tokens, self._memory.state

    def drops_rows(self, ended: int, rows: int) -> bool:
        """Whether rows that have ended should be left out: for a graph only if they are half of all rows."""
        return ended > 0 if self._graph is None else 2 * ended >= rows

    def _advance_in_place(self, memory: Memory) -> None:
        tokens, after = self._advance(*memory)
        memory.tokens.copy_(tokens)
        _overwrite(memory.state, after)

    def _begin(self, tokens: Tensor, draws: Tensor, seen: Tensor, state: Any) -> None:
        """Record the function with memory of its own."""
        draws = draws.to(tokens.device, copy=True)
        memory = Memory(tokens.clone(), draws, seen, map_tensors(Tensor.clone, state))
        graph = torch.cuda.CUDAGraph()
        # torch's own stream for recording is shared by all threads, and stays on the first GPU that recorded.
        stream = torch.cuda.Stream(tokens.device)  # type: ignore[no-untyped-call]
        with (
            torch.cuda.device(tokens.device),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self._advance_in_place(memory)
        self._graph, self._memory = graph, memory


def _sizes(state: Any) -> object:
    return [(x.shape, x.dtype, x.device) for x in leaves(state).values()]


def _overwrite(state: Any, after: Any) -> None:
    """Copy a state over another one, with which it may share memory."""
    old = leaves(state).values()
    memory = {x.untyped_storage().data_ptr() for x in old}
    new = [x.clone() if x.untyped_storage().data_ptr() in memory else x for x in leaves(after).values()]
    for to, x in zip(old, new, strict=True):
        to.copy_(x)
