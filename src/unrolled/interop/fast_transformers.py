"""Encoders of idiap's fast-transformers, parallel or recurrent, as stacks of blocks.

Katharopoulos, Vyas, Pappas and Fleuret 2020, "Transformers are RNNs", arXiv 2006.16236. This
module does not import the library, pytorch-fast-transformers 0.4.0.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign
from unrolled.interop.encoder_stack import check_alike, dropout_of, shape_of, stack_like
from unrolled.models.stack import Stack

KINDS = {
    "FullAttention": ("softmax", None),
    "RecurrentFullAttention": ("softmax", True),
    "LinearAttention": ("linear", False),
    "CausalLinearAttention": ("linear", True),
    "RecurrentLinearAttention": ("linear", True),
}
"""For each attention class there: the mechanism here, and whether it is causal (None: as the mask says)."""


def from_fast_transformers(encoder: Foreign, *, causal: bool) -> Stack:
    """Make a stack of post-norm blocks with the weights, dtype, device and mode of `encoder`.

    `forward(x [B,T,d_model], key_padding_mask=)` of the stack is the parallel encoder of fast-transformers,
    and `step(x [B,d_model], state)`, starting from `init_state(B)`, the recurrent one. fast-transformers adds
    1e-6 to the denominator of linear attention; the stack does not. In training, the stack has no dropout on
    attention weights or inside feed-forward layers.

    Args:
        encoder: a `TransformerEncoder` or a `RecurrentTransformerEncoder` with full attention, or with linear
            attention and the features elu(x) + 1.
        causal: whether position i attends to positions up to i only. fast-transformers has a class for causal
            linear attention, and uses a mask for causal full attention.

    Raises:
        ValueError: `encoder` is of another type, or `causal` does not match its attention.
        UnsupportedError: the attention, features, scale or activation is not supported, or the layers or
            their dropouts differ.
    """
    if type(encoder).__name__ not in ("TransformerEncoder", "RecurrentTransformerEncoder") or not (
        type(encoder).__module__.startswith("fast_transformers.")
    ):
        raise ValueError(
            f"encoder is a {type(encoder).__name__}, but must be an encoder of fast_transformers"
        )
    layers: list[Foreign] = list(encoder.layers)
    kinds = [type(layer.attention.inner_attention).__name__ for layer in layers]
    heads = [(x.attention.n_heads, norm.eps) for x in layers for norm in (x.norm1, x.norm2)]
    check_alike(kinds, heads, [shape_of(layer) for layer in layers])
    first = layers[0].attention
    return stack_like(
        encoder,
        _projections,
        causal=causal,
        n_heads=first.n_heads,
        norm="post",
        dropout=dropout_of(layer.dropout for layer in layers),
        attention=_mechanism(layers, kinds[0], causal),
        options={
            "head_dim": first.query_projection.out_features // first.n_heads,
            "value_dim": first.value_projection.out_features // first.n_heads,
        },
    )


def _projections(layer: Foreign) -> tuple[list[Foreign], Foreign]:
    theirs = layer.attention
    return [theirs.query_projection, theirs.key_projection, theirs.value_projection], theirs.out_projection


def _mechanism(layers: list[Foreign], kind: str, causal: bool) -> str:
    """Return the mechanism for the attention class `kind`, after checking the options of the layers."""
    if kind not in KINDS:
        raise UnsupportedError(f"encoder has {kind} attention, but must have one of {sorted(KINDS)}")
    mechanism, theirs_causal = KINDS[kind]
    if theirs_causal not in (None, causal):
        raise ValueError(f"causal is {causal}, but must be {theirs_causal}: encoder has {kind}")
    for layer in layers:
        inner = layer.attention.inner_attention
        if mechanism == "linear" and not _is_elu(inner.feature_map, layer.linear1.weight):
            raise UnsupportedError("encoder has linear attention with features other than elu(x) + 1")
        if mechanism == "softmax" and getattr(inner, "softmax_temp", None) is not None:
            raise UnsupportedError(
                f"encoder has softmax_temp {inner.softmax_temp}; None, which is 1/sqrt(D), is supported"
            )
    return mechanism


@torch.no_grad()
def _is_elu(feature_map: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> bool:
    """Test numerically whether the feature map, an anonymous function, is elu(x) + 1."""
    if type(feature_map).__name__ != "ActivationFunctionFeatureMap":
        return False
    x = torch.linspace(-3, 3, 100, device=like.device, dtype=like.dtype)
    return torch.allclose(feature_map(x), F.elu(x) + 1)
