"""A copy of the model on each process, by DDP, which sends gradients while the backward pass runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from unrolled.training.interfaces import Trainable
from unrolled.training.processes import Processes
from unrolled.training.spread import Spread


class Copies(Spread):
    """Trains a model that is equal on all processes.

    DDP hooks into `forward` only, so calls of other methods are passed through a `forward` (see `_Called`).
    DDP must know whether the loss leaves out a parameter, so it is made once the first loss is computed.
    """

    def __init__(self, model: Trainable, processes: Processes) -> None:
        super().__init__(cast(Trainable, _Methods(self._call)))
        self._module, self._processes = _Called(cast(nn.Module, model)), processes
        self._ddp: DistributedDataParallel | None = None
        self._waits = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up gradients without sending them."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def whole(self, model: Trainable) -> Trainable | None:
        """Return the model, on the first process."""
        return model if self._processes.first else None

    def _call(self, method: str, *inputs: object, **options: object) -> Any:
        call = partial(getattr(self._module.model, method), *inputs, **options)
        if not torch.is_grad_enabled():
            return call()
        if self._ddp is None:
            result = call()
            self._ddp = self._made(result)
            call = partial(lambda x: x, result)
        self._ddp.require_backward_grad_sync = not self._waits
        return self._ddp(call)

    def _made(self, result: object) -> DistributedDataParallel:
        trained = {id(x) for x in self._module.parameters() if x.requires_grad}
        unused = self._processes.sum([len(trained - _used(result))])[0] > 0
        unused |= any(getattr(module, "may_skip_parameters", False) for module in self._module.modules())
        # Buffers that training changes differ between the copies, as dropout does, so they are not broadcast.
        # Older versions of torch have another name for this option.
        names = signature(DistributedDataParallel).parameters.keys()
        own_buffers: dict[str, Any] = {max({"forward_sync_buffers", "broadcast_buffers"} & names): False}
        ddp = DistributedDataParallel(
            self._module,
            init_sync=False,  # the copies are equal already
            find_unused_parameters=unused,
            **own_buffers,
        )
        ddp.register_comm_hook(None, _add)
        return ddp


class _Called(nn.Module):
    """The model, with a `forward` that runs anything."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class _Methods:
    """Passes on calls of methods by their name."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)


def _used(result: object) -> set[int]:
    """Return the ids of the parameters from which tensors were computed."""
    found, seen = set(), set()
    left = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # a node that accumulates the gradient of a parameter
            found.add(id(node.variable))
        left += [following for following, _ in node.next_functions]
    return found


def _add(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP asks for this annotation
) -> torch.futures.Future[Tensor]:
    """Add up gradients over the processes; without this hook, DDP would average them."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Sequence[Tensor]] = cast(Any, work).get_future()
    return future.then(lambda done: done.value()[0])
