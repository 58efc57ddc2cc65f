"""Copies of the model that are each spread over several processes, by FSDP2.

On a mesh (replicate, shard) of processes, `fully_shard` makes each block a unit, and the rest of the model
another. The weights of a unit are gathered when it runs. The gradient of each backward pass is reduced at
once to the shard that the process keeps, so that accumulation never holds a whole gradient; it is summed over
the copies only in the last backward pass of an update. With bf16, weights are sent in bf16, and gradients are
added in fp32.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from unrolled.contract import UnsupportedError
from unrolled.models.blocks import ResidualBlock
from unrolled.models.reversible import ReversibleBlock
from unrolled.training.averaging import tensors_of
from unrolled.training.config import TrainConfig
from unrolled.training.interfaces import Trainable
from unrolled.training.processes import Processes
from unrolled.training.spread import Spread, whole

CALLED = ("loss", "loss_from", "read_some", "prefill", "last", "prefill_last")
"""Methods of models and blocks, other than `forward`, that training or evaluation may call."""


class Shards(Spread):
    """Trains a model of which each process has a part.

    Args and Raises: see `spread`.
    """

    sharded = True

    def __init__(
        self,
        model: Trainable,
        averaged: Trainable | None,
        config: TrainConfig,
        processes: Processes,
        device: torch.device,
    ) -> None:
        super().__init__(model)
        self._first = processes.first
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise UnsupportedError(f"shard is {config.shard}, which needs torch 2.10 or newer; use shard=1")
        empty = {name: torch.empty_like(x, device="meta") for name, x in tensors_of(model).items()}
        self._shell = remade(model, empty) if processes.first else None
        copies = processes.size // config.shard
        mesh = init_device_mesh(device.type, (copies, config.shard), mesh_dim_names=("replicate", "shard"))
        if config.bf16:  # autocast decides what runs in bf16, so FSDP2 casts no inputs
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        else:
            policy = MixedPrecisionPolicy()
        for each in (model, averaged):
            if each is not None:
                root = cast(nn.Module, each)
                for x in root.parameters():
                    x.data = x.data.contiguous()  # as FSDP2 requires
                for unit in [*units(root), root]:
                    fully_shard(unit, mesh=mesh if copies > 1 else mesh["shard"], mp_policy=policy)
                _prepare(root)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up gradients in the shards, without summing them over the copies."""
        model = cast(Any, self.model)
        model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)

    def whole(self, model: Trainable) -> Trainable | None:
        """Gather the weights of the model on the first process, in CPU memory."""
        full = {}
        for name, x in tensors_of(model).items():
            gathered = whole(x.detach())
            if self._first:
                full[name] = gathered.cpu()
        return None if self._shell is None else remade(self._shell, full)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model whose weights can be gathered one after the other.

    The list is empty, and the model is one unit, if blocks share weights, as those of Linformer can, or if
    the parts of a block run separately, as those of reversible blocks do.
    """
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    owners = Counter(id(x) for block in blocks for x in block.parameters())
    shared = any(count > 1 for count in owners.values()) or any(
        isinstance(value, nn.Module)  # of another block: it is no submodule of this one
        for block in blocks
        for module in block.modules()
        for value in vars(module).values()
    )
    apart = any(isinstance(block, ReversibleBlock) for block in blocks)
    return [] if shared or apart else list(blocks)


def remade(model: Trainable, tensors: Mapping[str, Tensor]) -> Trainable:
    """Copy a model, with `tensors` in place of its parameters and buffers; shared tensors stay shared."""
    memo: dict[int, object] = {}
    for name, x in tensors_of(model).items():
        is_parameter = isinstance(x, nn.Parameter)
        memo[id(x)] = nn.Parameter(tensors[name], x.requires_grad) if is_parameter else tensors[name]
    return copy.deepcopy(model, memo)


def _prepare(root: nn.Module) -> None:
    """Add gradients over processes instead of averaging them, and let more methods gather the weights."""

    # The warning forbids in-place changes of views that `forward` returns. No model makes such changes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for method in CALLED:
                if hasattr(module, method):
                    register_fsdp_forward_method(cast(nn.Module, module), method)
