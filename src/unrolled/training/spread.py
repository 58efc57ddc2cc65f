"""How a model is spread over processes: a copy on each (DDP), or each copy over several of them (FSDP2).

Training calls the methods of `Spread.model`, which add up gradients over the processes in the backward pass.
The loss of each process is already its share of the mean over all targets, so gradients are added, not
averaged.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor

from unrolled.training.config import TrainConfig
from unrolled.training.interfaces import Trainable
from unrolled.training.processes import Processes


class Spread:
    """A single process, which has the whole model; the base class of `Copies` and `Shards`.

    Attributes:
        model: the model whose methods training calls.
        sharded: whether a process has only a part of each weight.
    """

    sharded = False

    def __init__(self, model: Trainable) -> None:
        self.model = model

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context for all but the last pass of an update; gradients are sent only in the last.

        Both the forward and the backward pass belong inside the context.
        """
        return nullcontext()

    def whole(self, model: Trainable) -> Trainable | None:
        """Return `model` with all of its weights, to be saved, on the first process; None on the others.

        All processes call it.
        """
        return model


def spread(
    model: Trainable,
    averaged: Trainable | None,
    config: TrainConfig,
    processes: Processes,
    device: torch.device,
) -> Spread:
    """Spread a model, which is equal on all processes, over them.

    Args:
        model: the model; with `config.shard` above 1, it is sharded in place.
        averaged: a copy of the model with averages of its weights, if there is one; it is sharded in the same
            way.
        config: its `shard` and `bf16` are used.
        processes: the processes of the run.
        device: device of the model.

    Raises:
        UnsupportedError: this version of torch cannot shard the model.
    """
    if processes.alone:
        return Spread(model)
    if config.shard == 1:
        from unrolled.training._copies import Copies  # late, as below: one process needs neither

        return Copies(model, processes)
    from unrolled.training._shards import Shards

    return Shards(model, averaged, config, processes, device)


def local(x: Tensor) -> Tensor:
    """Return the part of a tensor that this process has."""
    return cast(Tensor, x.to_local()) if hasattr(x, "to_local") else x  # a DTensor, whose import takes long


def part_of(x: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this process has if the tensor is sharded as `like`."""
    if local(like) is like:
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return cast(Tensor, distribute_tensor(x.to(like.device), mesh, placements, src_data_rank=None))


def whole(x: Tensor) -> Tensor:
    """Gather a tensor from its parts on all processes, which all call this function."""
    return cast(Tensor, x.full_tensor()) if hasattr(x, "full_tensor") else x
