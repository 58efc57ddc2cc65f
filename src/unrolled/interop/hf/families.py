"""The attention modules of transformers that can be replaced, and functions that return their parts.

Classes are identified by name, so that transformers' code for models that are not in use is never imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, fill, refuse_adapters


class PostNorm(nn.Module):
    """The layers after the output projection in BERT: LayerNorm(dropout(o) + x)."""

    def __init__(self, dropout: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.dropout, self.norm = dropout, norm

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """Add the attention's output o to its input x, and normalise: `[B,T,d_model]`."""
        return self.norm(self.dropout(o) + x)  # type: ignore[no-any-return]


class OutputDropout(nn.Module):
    """The layer after the output projection in GPT-2: dropout(o)."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """Apply dropout to o, `[B,T,d_model]`; x is not used."""
        return self.dropout(o)  # type: ignore[no-any-return]


@dataclass
class AttentionParts:
    """The parts of a module of softmax attention.

    Attributes:
        qkv: weights of the projections to queries `[H D, d_model]`, keys `[G D, d_model]` and values
            `[G D, d_model]`.
        qkv_bias: biases of these projections, or None.
        out: weight of the output projection, `[d_model, H D]`.
        out_bias: bias of the output projection, or None.
        n_heads: number H of query heads.
        n_kv_heads: number G of key and value heads.
        head_dim: width D of a head.
        causal: whether a token attends only to itself and the tokens before it.
        scaling: factor of the scores.
        rotary: whether queries and keys are rotated by the angles that the model passes to each layer.
        q_norm: norm of the queries `[B,T,H,D]` before the rotation, or None.
        k_norm: norm of the keys before the rotation, or None.
        after: module that is called with the output of the attention and its input, or None.
    """

    qkv: tuple[Tensor, Tensor, Tensor]
    qkv_bias: tuple[Tensor, Tensor, Tensor] | None
    out: Tensor
    out_bias: Tensor | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    causal: bool
    scaling: float
    rotary: bool = False
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    after: nn.Module | None = None


@torch.enable_grad()  # so that slices of frozen and of trained weights differ
def parts_of(module: nn.Module) -> AttentionParts:
    """Return the parts of an attention module; the tensors are not copied.

    Raises:
        UnsupportedError: the module has cross-attention, a sliding window or an adapter.
    """
    refuse_adapters(module)
    return FAMILIES[type(module).__name__](module)


def is_softmax_attention(module: nn.Module) -> bool:
    """Whether `parts_of` knows the class of a module."""
    return type(module).__name__ in FAMILIES and type(module).__module__.startswith("transformers.")


class _Projections(TypedDict):
    """The fields of `AttentionParts` that are projections."""

    qkv: tuple[Tensor, Tensor, Tensor]
    qkv_bias: tuple[Tensor, Tensor, Tensor] | None
    out: Tensor
    out_bias: Tensor | None


def _separate(q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear) -> _Projections:
    return {
        "qkv": (q.weight, k.weight, v.weight),
        "qkv_bias": None if q.bias is None else (q.bias, k.bias, v.bias),
        "out": out.weight,
        "out_bias": out.bias,
    }


def _llama(module: Foreign) -> AttentionParts:
    config = module.config
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if window:
        raise UnsupportedError(
            f"the attention has a sliding window of {window} tokens, which a mechanism in its place would "
            "ignore: load the model with sliding_window=None in its config"
        )
    return AttentionParts(
        **_separate(module.q_proj, module.k_proj, module.v_proj, module.o_proj),
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=module.head_dim,
        causal=module.is_causal,
        scaling=module.scaling,
        rotary=True,
        q_norm=getattr(module, "q_norm", None),
        k_norm=getattr(module, "k_norm", None),
    )


def _gpt2(module: Foreign) -> AttentionParts:
    _refuse_cross(module)
    q, k, v = module.c_attn.weight.T.split(module.embed_dim)  # a Conv1D keeps its weight as [in, out]
    q_bias, k_bias, v_bias = module.c_attn.bias.split(module.embed_dim)
    projections: _Projections = {
        "qkv": (q, k, v),
        "qkv_bias": (q_bias, k_bias, v_bias),
        "out": module.c_proj.weight.T,
        "out_bias": module.c_proj.bias,
    }
    return _equal_heads(module, projections, OutputDropout(module.resid_dropout))


def _bert(module: Foreign) -> AttentionParts:
    _refuse_cross(module)
    own, output = module.self, module.output
    projections = _separate(own.query, own.key, own.value, output.dense)
    return _equal_heads(own, projections, PostNorm(output.dropout, output.LayerNorm))


def _vit(module: Foreign) -> AttentionParts:
    return _equal_heads(module, _separate(module.q_proj, module.k_proj, module.v_proj, module.o_proj))


def _refuse_cross(module: Foreign) -> None:
    if module.is_cross_attention:
        raise UnsupportedError("the model has cross-attention to another sequence: use one without")


def _equal_heads(
    module: Foreign, projections: _Projections, after: nn.Module | None = None
) -> AttentionParts:
    """Return the parts of attention with equal numbers of query, key and value heads."""
    n_heads = module.num_heads if hasattr(module, "num_heads") else module.num_attention_heads
    return AttentionParts(
        **projections,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=module.head_dim if hasattr(module, "head_dim") else module.attention_head_size,
        causal=module.is_causal,
        scaling=module.scaling,
        after=after,
    )


FAMILIES: dict[str, Callable[[Foreign], AttentionParts]] = {
    "LlamaAttention": _llama,
    "MistralAttention": _llama,
    "Qwen2Attention": _llama,
    "Qwen3Attention": _llama,
    "GPT2Attention": _gpt2,
    "BertAttention": _bert,
    "ViTAttention": _vit,
}
"""Classes of attention modules in transformers, and the functions that return their parts."""


@torch.enable_grad()
def copy_projections(parts: AttentionParts, qkv_proj: nn.Linear, out_proj: nn.Linear) -> None:
    """Copy the weights into `qkv_proj` and `out_proj`, bit for bit.

    A missing bias is removed there too. Frozen weights stay frozen.
    """
    qkv_bias = None if parts.qkv_bias is None else torch.cat(parts.qkv_bias)
    for projection, weight, bias in (
        (qkv_proj, torch.cat(parts.qkv), qkv_bias),
        (out_proj, parts.out, parts.out_bias),
    ):
        fill(projection.weight, weight)
        projection.weight.requires_grad_(weight.requires_grad)
        if bias is None:
            projection.register_parameter("bias", None)
        else:
            fill(projection.bias, bias)
            projection.bias.requires_grad_(bias.requires_grad)


def class_name(architectures: object) -> str:
    """Return the first class name in a config's `architectures`; "" if there is none."""
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else ""
