"""The cost of one update, measured while it runs: memory of activations, bytes sent to other processes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unrolled.training._kept_states import KeptStates
from unrolled.training.checkpoint import TrainState
from unrolled.training.memory import PeakBytes


@dataclass
class Taken:
    """The cost of an update on this process.

    Attributes:
        activation_bytes: peak memory of the tensors made by the forward and backward passes, without the
            gradients of parameters and without temporary memory inside an operation.
        kept_bytes: bytes of the states between segments, which are on disk if they are large.
        sent_bytes: bytes sent to other processes. Collectives count as on a ring: with P processes and n
            bytes on each, an all-reduce sends 2 (P - 1) / P n, a reduce-scatter half of that, and an
            all-gather (P - 1) n.
    """

    activation_bytes: int = 0
    kept_bytes: int = 0
    sent_bytes: int = 0


@contextmanager
def watched(state: TrainState) -> Iterator[Taken]:
    """Measure the update in the block, and slow it down; the result is complete after the block."""
    taken, memory, sent = Taken(), PeakBytes(), _Sent()
    KeptStates.largest = 0

    def forget(x: Tensor) -> None:
        if x.grad is not None:
            memory.forget(x.grad)

    def passes_are_over(*_: object) -> None:
        taken.activation_bytes = taken.activation_bytes or memory.peak

    with ExitStack() as stack:
        for _, x in state.model.named_parameters():
            if x.requires_grad:
                hook = x.register_post_accumulate_grad_hook(forget)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        for optimizer in state.optimizers:  # before their steps, whose temporary tensors are not activations
            stack.callback(optimizer.register_step_pre_hook(passes_are_over).remove)
        if dist.is_available():
            stack.enter_context(sent)
        with memory:
            yield taken
    taken.kept_bytes, taken.sent_bytes = KeptStates.largest, round(sent.nbytes)


class _Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this process sends in collectives (see `Taken`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
            self.nbytes += _sent(name, args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    groups = [x for x in args if "ProcessGroup" in str(getattr(x, "_type", str)())]
    if name not in ("allreduce", "allgather", "reduce_scatter", "send") or not groups:
        return 0
    size = dist.ProcessGroup.unbox(groups[0]).size()
    sources = args[0] if name in ("allreduce", "send") else args[1]
    n = sum(x.nbytes for x in tree_leaves(sources) if isinstance(x, Tensor))
    share = (size - 1) / size
    return {"allreduce": 2 * share * n, "reduce_scatter": share * n, "allgather": (size - 1) * n, "send": n}[
        name
    ]
