"""The attention modules of transformers that can be replaced: what is read from each of their classes.

A class is known by its name, so that no modelling code of transformers is imported for models not in use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.contract import UnsupportedError


class PostNorm(nn.Module):
    """What follows the output projection in BERT: LayerNorm(dropout(o) + x)."""

    def __init__(self, dropout: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.dropout, self.norm = dropout, norm

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """Add what the attention gave, o, to its input x, and normalise: `[B,T,d_model]`."""
        return self.norm(self.dropout(o) + x)  # type: ignore[no-any-return]


class OutputDropout(nn.Module):
    """What follows the output projection in GPT-2: dropout(o)."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """Drop some of o, `[B,T,d_model]`; x is not used."""
        return self.dropout(o)  # type: ignore[no-any-return]


@dataclass
class AttentionParts:
    """What a module of softmax attention is made of.

    Attributes:
        qkv: weights of the projections to queries, keys and values, `[H D, d_model]`, `[G D, d_model]` twice.
        qkv_bias: their biases, or None.
        out: weight of the projection back, `[d_model, H D]`.
        out_bias: its bias, or None.
        n_heads: query heads H.
        n_kv_heads: key and value heads G.
        head_dim: width D of a head.
        causal: whether a token reads those before it only.
        scaling: factor of the scores.
        rotary: whether queries and keys are rotated by the angles that the model hands to each layer.
        q_norm: applied to queries `[B,T,H,D]` before they are rotated, or None.
        k_norm: the same for keys.
        after: called with the output and the input, or None.
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


def parts_of(module: nn.Module) -> AttentionParts:
    """Take a module of attention apart; the tensors are its own, not copies.

    Raises:
        UnsupportedError: it reads another sequence, or a sliding window.
    """
    return FAMILIES[type(module).__name__](module)


def is_softmax_attention(module: nn.Module) -> bool:
    """Tell whether `parts_of` knows the class of a module."""
    return type(module).__name__ in FAMILIES and type(module).__module__.startswith("transformers.")


def _separate(
    q: nn.Linear, k: nn.Linear, v: nn.Linear
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
    weights = (q.weight, k.weight, v.weight)
    return weights, None if q.bias is None else (q.bias, k.bias, v.bias)


def _llama(module: Any) -> AttentionParts:
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    if window:
        raise UnsupportedError(
            f"the attention reads a sliding window of {window} tokens, which a mechanism in its place would "
            "not: load the model with sliding_window=None in its config"
        )
    qkv, qkv_bias = _separate(module.q_proj, module.k_proj, module.v_proj)
    config = module.config
    return AttentionParts(
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=module.o_proj.weight,
        out_bias=module.o_proj.bias,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=module.head_dim,
        causal=module.is_causal,
        scaling=module.scaling,
        rotary=True,
        q_norm=getattr(module, "q_norm", None),
        k_norm=getattr(module, "k_norm", None),
    )


def _gpt2(module: Any) -> AttentionParts:
    if module.is_cross_attention:
        raise UnsupportedError("the model reads another sequence by cross-attention: take one without")
    q, k, v = module.c_attn.weight.T.split(module.embed_dim)  # a Conv1D keeps its weight as [in, out]
    q_bias, k_bias, v_bias = module.c_attn.bias.split(module.embed_dim)
    return AttentionParts(
        qkv=(q, k, v),
        qkv_bias=(q_bias, k_bias, v_bias),
        out=module.c_proj.weight.T,
        out_bias=module.c_proj.bias,
        n_heads=module.num_heads,
        n_kv_heads=module.num_heads,
        head_dim=module.head_dim,
        causal=module.is_causal,
        scaling=module.scaling,
        after=OutputDropout(module.resid_dropout),
    )


def _bert(module: Any) -> AttentionParts:
    if module.is_cross_attention:
        raise UnsupportedError("the model reads another sequence by cross-attention: take one without")
    own, output = module.self, module.output
    qkv, qkv_bias = _separate(own.query, own.key, own.value)
    return AttentionParts(
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=output.dense.weight,
        out_bias=output.dense.bias,
        n_heads=own.num_attention_heads,
        n_kv_heads=own.num_attention_heads,
        head_dim=own.attention_head_size,
        causal=own.is_causal,
        scaling=own.scaling,
        after=PostNorm(output.dropout, output.LayerNorm),
    )


def _vit(module: Any) -> AttentionParts:
    qkv, qkv_bias = _separate(module.q_proj, module.k_proj, module.v_proj)
    return AttentionParts(
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=module.o_proj.weight,
        out_bias=module.o_proj.bias,
        n_heads=module.num_attention_heads,
        n_kv_heads=module.num_attention_heads,
        head_dim=module.head_dim,
        causal=module.is_causal,
        scaling=module.scaling,
    )


FAMILIES: dict[str, Callable[[Any], AttentionParts]] = {
    "LlamaAttention": _llama,
    "MistralAttention": _llama,
    "Qwen2Attention": _llama,
    "Qwen3Attention": _llama,
    "GPT2Attention": _gpt2,
    "BertAttention": _bert,
    "ViTAttention": _vit,
}
"""Classes of attention modules in transformers, and how each is taken apart."""


def copy_projections(parts: AttentionParts, qkv_proj: nn.Linear, out_proj: nn.Linear) -> None:
    """Put the weights into two projections of ours, bit for bit; a bias that is not there is taken away."""
    with torch.no_grad():
        _fill(qkv_proj, torch.cat(parts.qkv), None if parts.qkv_bias is None else torch.cat(parts.qkv_bias))
        _fill(out_proj, parts.out, parts.out_bias)


def _fill(projection: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    projection.weight.copy_(weight)
    if bias is None:
        projection.register_parameter("bias", None)
    else:
        projection.bias.copy_(bias)


def class_name(architectures: Any) -> str:
    """Name the class that a config's `architectures` begins with; "" where it names none."""
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else ""
