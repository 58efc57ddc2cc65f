"""Stacks of blocks with the weights of encoders whose layers have the parameter names of PyTorch's layers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_last_norm, copy_linear, copy_norm, refuse_adapters
from unrolled.models.config import Norm, TransformerConfig
from unrolled.models.stack import Stack

Projections = Callable[[Foreign], tuple[Sequence[Foreign], Foreign]]
"""Returns the projections of a layer's attention: to queries, keys and values, and of the output."""


def stack_like(
    encoder: Foreign,
    projections: Projections,
    *,
    causal: bool,
    n_heads: int,
    norm: Norm,
    dropout: float,
    attention: str,
    options: dict[str, object],
) -> Stack:
    """Make a stack with the weights, dtype, device and mode of `encoder`, whose layers have equal sizes."""
    refuse_adapters(encoder)
    layers: list[Foreign] = list(encoder.layers)
    first = layers[0]
    like = first.linear1.weight
    stack = Stack(
        TransformerConfig(
            d_model=first.linear1.in_features,
            n_layers=len(layers),
            n_heads=n_heads,
            d_ff=first.linear1.out_features,
            attention=attention,
            attention_options={attention: options} if options else {},
            norm=norm,
            norm_eps=first.norm1.eps,
            activation=activation_of(first),
            positions="none",
            dropout=dropout,
        ),
        causal=causal,
        final_norm=False,
    ).to(like)
    for block, layer in zip(stack.full_layers, layers, strict=True):
        to_heads, back = projections(layer)
        copy_linear(block.attention.qkv_proj, *to_heads)
        copy_linear(block.attention.out_proj, back)
        copy_norm(block.attention_norm, layer.norm1)
        copy_norm(block.ff_norm, layer.norm2)
        copy_linear(block.ff.up, layer.linear1)
        copy_linear(block.ff.down, layer.linear2)
    if encoder.norm is not None:
        stack.norm = copy_last_norm(encoder.norm, like)
    return stack.train(encoder.training)


def check_alike(*properties: Sequence[object]) -> None:
    """Raise UnsupportedError unless all layers agree in each of these properties, given for each layer."""
    if any(len(set(values)) > 1 for values in properties):
        raise UnsupportedError("encoder has layers that differ in size or kind; a stack here has equal ones")


def dropout_of(dropouts: Iterable[nn.Dropout]) -> float:
    """The probability of dropouts, which must all have the same.

    Raises:
        UnsupportedError: they differ.
    """
    found = {x.p for x in dropouts}
    if len(found) > 1:
        raise UnsupportedError(f"encoder has dropouts of {sorted(found)}; a stack here has equal ones")
    return found.pop()


def shape_of(layer: Foreign) -> tuple[object, ...]:
    """The activation of a layer, and the shapes of its parameters."""
    return activation_of(layer), *(tuple(p.shape) for p in layer.parameters())


def activation_of(layer: Foreign) -> Literal["gelu", "gelu_tanh", "relu"]:
    """Name the activation of a layer.

    Raises:
        UnsupportedError: the activation is not supported.
    """
    f = layer.activation
    if f is F.relu or isinstance(f, nn.ReLU):
        return "relu"
    if f is F.gelu:
        return "gelu"
    if isinstance(f, nn.GELU):
        return "gelu" if f.approximate == "none" else "gelu_tanh"
    raise UnsupportedError(f"encoder has the activation {f!r}; relu and gelu are supported")
