"""What the loop asks of a model and of a data set; any object of this shape can be trained."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn


class Batch(Protocol):
    """Rows to read, and what to predict of them, in the shapes that the model's loss wants.

    A batch with padding has a `key_padding_mask` too, True = padding, which the loss takes by that name.
    """

    @property
    def inputs(self) -> Tensor:
        """What the model reads."""
        ...

    @property
    def targets(self) -> Tensor:
        """What it is to predict; -100 where nothing."""
        ...


class TrainingData(Protocol):
    """A data set whose order is a pure function of the step, so that nothing need be saved to resume it."""

    def batch(self, split: Literal["train", "val"], *, step: int, batch_size: int, seed: int) -> Batch:
        """Return the batch of one step."""
        ...

    def eval_batches(self, batch_size: int, /) -> Iterable[Batch]:
        """Yield the whole validation split in order, each example once."""
        ...


class Trainable(Protocol):
    """A `torch.nn.Module` with a dataclass `config`, a `loss` and a `save`."""

    config: Any
    training: bool

    def loss(self, inputs: Tensor, targets: Tensor, /) -> Tensor:
        """Return the mean over the targets that are not -100, in nats."""
        ...

    def save(self, path: Path, /) -> None:
        """Write the weights and all that is needed to load them into a folder."""
        ...

    # the rest is torch.nn.Module's

    def train(self, mode: bool = True) -> Any:
        """Turn dropout on."""
        ...

    def eval(self) -> Any:
        """Turn dropout off."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Yield the model and every module in it."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once."""
        ...

    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Any]:
        """Return parameters and buffers by name."""
        ...
