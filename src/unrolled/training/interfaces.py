"""The interface of models that can be trained."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Trainable(Protocol):
    """A `torch.nn.Module` with a dataclass `config`, a `loss` and a `save`."""

    config: Any
    training: bool

    def loss(self, inputs: Tensor, targets: Tensor, /) -> Tensor:
        """Return the mean over the targets that are not -100, in nats."""

    def save(self, path: Path, /) -> None:
        """Write the weights, and everything that is needed to load them, to a folder."""

    # the rest is torch.nn.Module's

    def train(self, mode: bool = True) -> object:
        """Turn dropout on."""

    def eval(self) -> object:
        """Turn dropout off."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the model and every module in it."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once."""

    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Tensor]:
        """Return parameters and buffers by name."""


@runtime_checkable
class PredictsSome(Protocol):
    """A model whose loss covers some of the targets only."""

    def predicted(self, targets: Tensor, key_padding_mask: Tensor | None, /) -> Tensor:
        """Return the targets, with -100 in place of those that the loss does not cover."""


@runtime_checkable
class Recomputes(Protocol):
    """A model that can recompute activations in the backward pass."""

    gradient_checkpointing: bool


def device_of(model: Trainable) -> torch.device:
    """Return the device of the first parameter.

    Raises:
        ValueError: it is no module, or has no parameters.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, but must be a torch.nn.Module")
    for _, parameter in model.named_parameters():
        return parameter.device
    raise ValueError(f"model is a {type(model).__name__} without parameters, but must have at least one")
