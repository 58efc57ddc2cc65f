"""Torch's own attention: a stack made from its encoder, and its `MultiheadAttention` with any mechanism."""

from typing import Any, Literal

from torch import nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import copy_last_norm, copy_linear, copy_norms_and_feed_forward
from unrolled.interop.torch_attention import MultiheadAttention
from unrolled.models.config import TransformerConfig
from unrolled.models.stack import Stack

__all__ = ["MultiheadAttention", "from_transformer_encoder"]


def from_transformer_encoder(
    encoder: nn.TransformerEncoder, *, causal: bool = False, attention: str = "softmax", **options: Any
) -> Stack:
    """Make a stack of blocks with the weights, dtype, device and mode of `encoder`.

    Its methods are those of `unrolled.models.stack.Stack`: `forward(x [B,T,d_model], key_padding_mask=)`, and
    `init_state`, `prefill` and `step` if it is causal. With softmax attention it computes the same as
    `encoder`, except that in training it has no dropout on attention weights or inside feed-forward layers.
    The batch is always the first axis, whatever it is for `encoder`.

    Args:
        encoder: made of `nn.TransformerEncoderLayer`s that are alike; pre- or post-norm, relu or gelu, with
            or without a last norm.
        causal: position i attends to positions up to i only, as `encoder` does with a causal mask.
        attention: the mechanism that gets the projections.
        options: further arguments of the mechanism.

    Raises:
        ValueError: `encoder` is of another type.
        UnsupportedError: layers that differ, are of another type, or have another activation.
    """
    if not isinstance(encoder, nn.TransformerEncoder):
        raise ValueError(f"encoder is a {type(encoder).__name__}, but must be a torch.nn.TransformerEncoder")
    layers: list[Any] = list(encoder.layers)
    first = layers[0]
    parts = {type(layer) for layer in layers} | {type(layer.self_attn) for layer in layers}
    if parts != {nn.TransformerEncoderLayer, nn.MultiheadAttention}:
        raise UnsupportedError("encoder has layers of another type than torch.nn.TransformerEncoderLayer")
    if len({str(_shape_of(layer)) for layer in layers}) > 1:
        raise UnsupportedError("encoder has layers that differ in size or kind; a stack here has equal ones")
    like = first.linear1.weight
    stack = Stack(
        TransformerConfig(
            d_model=first.self_attn.embed_dim,
            n_layers=len(layers),
            n_heads=first.self_attn.num_heads,
            d_ff=first.linear1.out_features,
            attention=attention,
            attention_options={attention: options} if options else {},
            norm="pre" if first.norm_first else "post",
            norm_eps=first.norm1.eps,
            activation=_activation(first.activation),
            positions="none",
            dropout=first.dropout1.p,
        ),
        causal=causal,
        final_norm=False,
    ).to(like)
    for block, layer in zip(list[Any](stack.blocks), layers, strict=True):
        copy_linear(block.attention.qkv_proj, _Rows(layer.self_attn))
        copy_linear(block.attention.out_proj, layer.self_attn.out_proj)
        copy_norms_and_feed_forward(block, layer)
    if encoder.norm is not None:
        stack.norm = copy_last_norm(encoder.norm, like)
    return stack.train(encoder.training)


class _Rows:
    """The packed projection of torch's attention, as a linear layer."""

    def __init__(self, attention: Any) -> None:
        self.weight, self.bias = attention.in_proj_weight, attention.in_proj_bias


def _shape_of(layer: Any) -> tuple[Any, ...]:
    weights = [p.shape for p in layer.parameters()]
    return (
        layer.norm_first,
        layer.norm1.eps,
        _activation(layer.activation),
        layer.self_attn.num_heads,
        weights,
    )


def _activation(f: Any) -> Literal["gelu", "gelu_tanh", "relu"]:
    if f is F.relu or isinstance(f, nn.ReLU):
        return "relu"
    if f is F.gelu:
        return "gelu"
    if isinstance(f, nn.GELU):
        return "gelu" if f.approximate == "none" else "gelu_tanh"
    raise UnsupportedError(f"encoder has the activation {f!r}; relu and gelu are supported")
