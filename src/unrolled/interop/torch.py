"""A stack made from PyTorch's encoder, and PyTorch's `MultiheadAttention` with any mechanism."""

from typing import cast

from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign
from unrolled.interop.encoder_stack import check_alike, dropout_of, shape_of, stack_like
from unrolled.interop.torch_attention import MultiheadAttention
from unrolled.models.stack import Stack

__all__ = ["MultiheadAttention", "from_transformer_encoder"]


def from_transformer_encoder(
    encoder: nn.TransformerEncoder, *, causal: bool = False, attention: str = "softmax", **options: object
) -> Stack:
    """Make a stack of blocks with the weights, dtype, device and mode of `encoder`.

    The methods of the stack are those of `unrolled.models.stack.Stack`:
    `forward(x [B,T,d_model], key_padding_mask=)` and, if it is causal, `init_state`, `prefill` and `step`.
    With softmax attention, the stack computes the same as `encoder`, except that in training it has no
    dropout on attention weights or inside feed-forward layers. The batch is always the first axis, even if
    `encoder` has `batch_first=False`.

    Args:
        encoder: an encoder of equal `nn.TransformerEncoderLayer`s, pre- or post-norm, with relu or gelu, and
            with or without a last norm.
        causal: whether position i attends to positions up to i only, as in `encoder` with a causal mask.
        attention: the mechanism that takes over the projections.
        options: further arguments of the mechanism.

    Raises:
        ValueError: `encoder` is of another type.
        UnsupportedError: the layers or their dropouts differ, or the layers are of another type or have
            another activation.
    """
    if not isinstance(encoder, nn.TransformerEncoder):
        raise ValueError(f"encoder is a {type(encoder).__name__}, but must be a torch.nn.TransformerEncoder")
    layers = list(encoder.layers)
    parts = {type(layer) for layer in layers} | {type(layer.self_attn) for layer in layers}
    if parts != {nn.TransformerEncoderLayer, nn.MultiheadAttention}:
        raise UnsupportedError("encoder has layers of another type than torch.nn.TransformerEncoderLayer")
    equal = cast("list[nn.TransformerEncoderLayer]", layers)
    norms = ((x, norm) for x in equal for norm in (x.norm1, x.norm2))
    check_alike([(x.norm_first, norm.eps, x.self_attn.num_heads, *shape_of(x)) for x, norm in norms])
    return stack_like(
        encoder,
        lambda layer: ([_Packed(layer.self_attn)], layer.self_attn.out_proj),
        causal=causal,
        n_heads=equal[0].self_attn.num_heads,
        norm="pre" if equal[0].norm_first else "post",
        dropout=dropout_of(x for layer in equal for x in (layer.dropout1, layer.dropout2)),
        attention=attention,
        options=options,
    )


class _Packed(nn.Module):
    """The packed projection of PyTorch's attention, as a linear layer."""

    def __init__(self, attention: Foreign) -> None:
        super().__init__()
        self.weight: Tensor = attention.in_proj_weight
        self.bias: Tensor | None = attention.in_proj_bias
