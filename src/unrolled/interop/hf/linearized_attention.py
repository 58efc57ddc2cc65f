"""A mechanism in place of an attention module of transformers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from unrolled.attention import load
from unrolled.attention.base import Masks, Projected
from unrolled.contract import UnsupportedError
from unrolled.interop.hf._cache_name import either
from unrolled.interop.hf._packing import refuse_packing
from unrolled.interop.hf.cache import StateLayer
from unrolled.interop.hf.families import AttentionParts, copy_projections
from unrolled.models.blocks import Attention
from unrolled.ops.masks import any_padding, causal_mask, without_padding
from unrolled.ops.options import option_names
from unrolled.ops.sequence import refuse

OF_THE_MODEL = (
    "d_model",
    "n_heads",
    "causal",
    "n_kv_heads",
    "head_dim",
    "value_dim",
    "bias",
    "rotary",
    "rotary_base",
    "rotary_dim",
    "qk_norm",
)
"""The options of mechanisms that the replaced module determines."""


class LinearizedAttention(nn.Module):
    """Attention of a transformers model by any mechanism, with the model's projections and positions.

        q, k, v = norm and rotate (x W_qkv)        y = mechanism(q, k, v) W_out

    Norms and rotation are those of the model. The signature is that of the replaced module: it returns the
    output, and None for the weights, since a mechanism need not have weights. For the same reason, there is
    no dropout on attention weights.

    Args:
        parts: the parts of the replaced module; its weights are copied.
        attention: name of the mechanism, one of `unrolled.attention.names()`.
        layer: index of this layer in the cache.
        options: options of the mechanism.

    Raises:
        ValueError: the mechanism or an option does not exist.
        UnsupportedError: the mechanism does not support the causal or bidirectional form that the model
            needs, or has projections of other shapes than softmax attention.
    """

    def __init__(self, parts: AttentionParts, attention: str, layer: int, options: dict[str, object]) -> None:
        super().__init__()
        self.mechanism = _build(parts, attention, options)
        self.layer = layer
        self.rotary = parts.rotary
        self.q_norm, self.k_norm, self.after = parts.q_norm, parts.k_norm, parts.after
        self.query_scale = parts.scaling * math.sqrt(parts.head_dim)  # mechanisms apply 1/sqrt(D) themselves
        if abs(self.query_scale - 1) < 1e-6:
            self.query_scale = 1.0

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **further: object,
    ) -> tuple[Tensor, None]:
        """Attend; with a cache, continue from its state, which is updated.

        Args:
            hidden_states: the input `[B,T,d_model]`; the output has the same shape.
            attention_mask: `[B,S]`, or transformers' mask `[B,1,T,S]`; None for no padding.
            cache: a cache whose entry of this layer is a `StateLayer`.
            position_embeddings: cosines and sines `[B,T,D]`, if the model has rotary positions.
            past_key_values: `cache`, by its name before transformers 5.24.
            further: other arguments of transformers' attention; not used.

        Raises:
            ValueError: the cache is of another kind.
            UnsupportedError: the mask is not a padding mask, the mechanism does not support padding, or
                sequences are packed.
        """
        refuse("a model of transformers, which counts positions itself,")
        refuse_packing("linearized attention", further)
        x, mechanism = hidden_states, self.mechanism
        given = either(cache, past_key_values)
        entry = None if given is None else self._entry(given)
        padding = padding_of(attention_mask, x.shape[1], causal=mechanism.causal)
        if padding is not None and not mechanism.supports.padding:
            raise UnsupportedError(
                f"{mechanism.name} attention does not support padding: use rows of equal length"
            )
        if padding is not None:
            x = without_padding(x, padding)
        projected = self._project(x, position_embeddings)
        if entry is None:
            masks = Masks(padding)
            o = mechanism.attend(mechanism.heads_of(projected, x, masks), masks)
        else:
            o = self._continue(x, projected, padding, entry)
        y = mechanism.merge_heads(o, x)
        return (y if self.after is None else self.after(y, x)), None

    def _continue(self, x: Tensor, projected: Projected, padding: Tensor | None, entry: StateLayer) -> Tensor:
        """Attend from the state of a cache, and replace the state by the next one."""
        mechanism, (B, T) = self.mechanism, x.shape[:2]
        state = mechanism.init_state(B) if entry.state is None else entry.state
        if T == 1 and padding is None:
            q, k, v = (heads[:, 0] for heads in projected)
            token = mechanism.heads_of((q, k, v), x[:, 0], state=state)
            o, state = mechanism.advance(token, state)
            o = o.unsqueeze(1)
        else:
            heads = mechanism.heads_of(projected, x, Masks(padding), state=state)
            o, state = mechanism.advance(heads, state, padding)
        entry.put(state, T)
        return o

    def _project(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Projected:
        m = self.mechanism
        counts = m.head_counts()
        q, k, v = m.qkv_proj(x).unflatten(-1, (sum(counts), m.head_dim)).split(counts, -2)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rotary:
            if position_embeddings is None:
                raise ValueError("position_embeddings is None, but must be (cos, sin) for rotary positions")
            q, k = _rotate(q, *position_embeddings), _rotate(k, *position_embeddings)
        return q if self.query_scale == 1 else q * self.query_scale, k, v

    def _entry(self, cache: Cache) -> StateLayer:
        entry = cache.layers[self.layer] if self.layer < len(cache.layers) else None
        if not isinstance(entry, StateLayer):
            raise ValueError(
                f"cache holds a {type(entry).__name__} for layer {self.layer}, but linearized "
                "attention needs a StateLayer: start with state_cache(model), or without a cache"
            )
        return entry


def padding_of(mask: object, length: int, *, causal: bool) -> Tensor | None:
    """Convert a mask of transformers to the padding of the last `length` keys: `[B,length]`, True = padding.

    Args:
        mask: None; or `[B,S]`, where True or 1 is a token; or `[B,1,T,S]`, either boolean, where True is
            attend, or of floating point and added to the scores.
        length: T.
        causal: whether the attention is causal.

    Returns:
        The padding; None if there is none, except while compiling, when the values are not known.

    Raises:
        UnsupportedError: the mask hides more than padding, as with packed sequences, or adds finite numbers.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        found = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise UnsupportedError(f"attention_mask is {found}, but must be [B, S] or [B, 1, T, S]")
    if mask.dim() == 2:
        tokens = mask.bool()
    else:
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.is_floating_point() and bool((mask[allowed] != 0).any()):
            raise UnsupportedError(
                "attention_mask adds finite numbers to the scores, which linearized attention cannot do: use "
                "0 for tokens, and -inf or the lowest number of the type for padding"
            )
        tokens = allowed[:, 0, -1]
        expected = tokens[:, None, None, :].expand(-1, 1, *allowed.shape[-2:])
        if causal:
            expected = expected & causal_mask(allowed.shape[-2], allowed.shape[-1], mask.device)
        if not torch.equal(allowed, expected.expand_as(allowed)):
            raise UnsupportedError(
                "attention_mask hides more than padding, as in packed sequences, which linearized attention "
                "cannot honour: put each sequence into a row of its own"
            )
    return any_padding(~tokens[:, -length:])


def _build(parts: AttentionParts, attention: str, options: dict[str, object]) -> Attention:
    make: Callable[..., Attention] = load(attention)
    known = option_names(load(attention).__init__)
    assert known is not None
    for name, value in options.items():
        if name in OF_THE_MODEL:
            raise ValueError(f"{name} is {value!r}, but must be left out: the model keeps its own")
        if name not in known:
            others = ", ".join(option for option in known if option not in OF_THE_MODEL)
            raise ValueError(f"{attention} attention has no option {name!r}; its options are {others}")
    weight = parts.out
    try:
        mechanism = make(
            weight.shape[0],
            parts.n_heads,
            causal=parts.causal,
            n_kv_heads=parts.n_kv_heads,
            head_dim=parts.head_dim,
            **options | {"rotary": False},  # by default, retention sets it to True
        )
    except TypeError as error:
        raise ValueError(f"invalid options {options} for {attention} attention: {error}") from error
    expected = [sum(len(part) for part in parts.qkv), *parts.qkv[0].shape[1:]]
    if list(mechanism.qkv_proj.weight.shape) != expected:
        raise UnsupportedError(
            f"{attention} attention has projections of other shapes than softmax attention: use another"
        )
    mechanism.to(device=weight.device, dtype=weight.dtype)
    copy_projections(parts, mechanism.qkv_proj, mechanism.out_proj)
    return mechanism


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x_i, x_(i + D/2)) of `[B,T,H,D]`, as the Llama classes do."""
    left, right = x.chunk(2, -1)
    return x * cos.unsqueeze(-2) + torch.cat([-right, left], -1) * sin.unsqueeze(-2)
