"""Copy the weights of layers of other libraries into layers of this library."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.models import Decoder
from unrolled.models.heads import Categorical


class Foreign(Protocol):
    """An object of another library; only the names of some of its attributes are known."""

    def __getattr__(self, name: str) -> Any:
        """An attribute."""


def refuse_adapters(model: Foreign) -> None:
    """Check that no layer has an adapter of peft, such as LoRA, which a copy of the weights would lack.

    Raises:
        UnsupportedError: a layer has an adapter.
    """
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer"):
            raise UnsupportedError(
                f"{type(model).__name__} has an adapter in {name}, which would be lost: merge it into the "
                "weights first, with merge_and_unload() of peft"
            )


@torch.no_grad()
def require_class(model: Foreign, name: str) -> None:
    """Raise UnsupportedError unless a model is of the class of this name."""
    if (found := type(model).__name__) != name:
        raise UnsupportedError(f"{found} has no counterpart here; use {name}")


def copy_linear(ours: nn.Linear, *theirs: Foreign) -> None:
    """Copy linear layers with the same input into one layer, stacked by rows; a missing bias is 0.

    Raises:
        ValueError: the sizes of `theirs` do not add up to that of `ours`.
    """
    fill(ours.weight, torch.cat([layer.weight for layer in theirs]))
    if ours.bias is not None:
        biases = [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            for layer in theirs
        ]
        fill(ours.bias, torch.cat(biases))


def copy_norm(ours: Foreign, theirs: Foreign) -> None:
    """Copy a layer norm; a missing weight is 1 and a missing bias 0."""
    fill(ours.weight, torch.ones_like(ours.weight) if theirs.weight is None else theirs.weight)
    fill(ours.bias, torch.zeros_like(ours.bias) if theirs.bias is None else theirs.bias)


def copy_last_norm(norm: object, like: Tensor) -> nn.LayerNorm:
    """Copy the norm that some encoders, even post-norm ones, have after their last block.

    Args:
        norm: the norm to copy.
        like: a tensor with the dtype and device of the copy.

    Raises:
        UnsupportedError: `norm` is not a layer norm.
    """
    if not isinstance(norm, nn.LayerNorm):
        raise UnsupportedError(f"the last norm is a {type(norm).__name__}; a torch.nn.LayerNorm is supported")
    ours = nn.LayerNorm(norm.normalized_shape, eps=norm.eps).to(like)
    copy_norm(ours, norm)
    return ours


def copy_tables(ours: Decoder, embedding: Tensor, output: Tensor) -> None:
    """Copy the embeddings and, if they are not tied to it, the matrix of the output layer.

    Raises:
        ValueError: the shapes differ.
    """
    fill(ours.embedding.weight, embedding)
    if isinstance(ours.head, Categorical) and ours.head.project is not None:
        fill(ours.head.project.weight, output)


@torch.no_grad()
def fill(ours: Tensor, theirs: Tensor) -> None:
    """Copy the tensor `theirs` into `ours`.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"the weights have shape {list(theirs.shape)}, but must have {list(ours.shape)}")
    ours.copy_(theirs)
