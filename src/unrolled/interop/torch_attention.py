"""PyTorch's `MultiheadAttention`, with any mechanism in place of softmax attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled import attention as mechanisms
from unrolled.attention.base import Masks, Projected
from unrolled.contract import UnsupportedError
from unrolled.ops.checks import check_attn_mask, check_key_padding_mask
from unrolled.ops.dense import Linear, linear
from unrolled.ops.masks import without_padding
from unrolled.ops.observing import may_read


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with any mechanism that takes the same queries, keys and values.

    The arguments, shapes, masks (True = masked) and the `state_dict` are torch's, and so are the outputs with
    `attention="softmax"`. Additional parameters of a mechanism are under `mechanism.` in the `state_dict`. A
    query with nothing to attend to gives zeros, not NaN.

    Inside PyTorch's encoder, this module disables the fast path, which supports softmax only. The encoder
    must be created with `enable_nested_tensor=False`.

    Args:
        embed_dim, num_heads, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            torch.
        dropout: must be 0: dropout on attention weights is not supported.
        attention: name of the mechanism.
        causal: make every call causal; for mechanisms that do not support `attn_mask`.
        options: further arguments of the mechanism.

    Raises:
        UnsupportedError: the mechanism does not support the arguments.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "softmax",
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if dropout:
            raise UnsupportedError(
                f"dropout is {dropout}, but must be 0: dropout on attention weights is not supported"
            )
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim, self.vdim, self.head_dim = kdim or embed_dim, vdim or embed_dim, embed_dim // num_heads
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        # If True, torch's encoder layer would compute softmax attention itself.
        self._qkv_same_embed_dim = False
        if options.get("qk_norm"):
            raise UnsupportedError(
                f"qk_norm is {options['qk_norm']!r}, but must be left out: torch's layer has no norms"
            )
        mechanism = mechanisms.load(attention)(embed_dim, num_heads, causal=causal, bias=bias, **options)
        if mechanism.qkv_proj.weight.shape != (3 * embed_dim, embed_dim) or mechanism.mixes_input:
            raise UnsupportedError(
                f"{attention!r} attention with these options has other projections than torch's"
            )
        self._make_parameters(bias, add_bias_kv)
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        # The projections are here, under torch's names, and not in the mechanism, so that a layer that
        # replaces `out_proj`, such as an adapter, is used.
        del mechanism.qkv_proj
        mechanism._modules["out_proj"] = nn.Identity()
        self.mechanism = mechanism
        self.to(device=device, dtype=dtype)
        self._check_extras()

    def _make_parameters(self, bias: bool, add_bias_kv: bool) -> None:
        d = self.embed_dim
        if self.kdim == self.vdim == d:
            self.in_proj_weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3 * d, d)))
            names: dict[str, int] = {}
        else:
            self.register_parameter("in_proj_weight", None)
            names = {"q": d, "k": self.kdim, "v": self.vdim}
        for name in "qkv":
            weight = nn.init.xavier_uniform_(torch.empty(d, names[name])) if names else None
            self.register_parameter(f"{name}_proj_weight", None if weight is None else nn.Parameter(weight))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d)) if bias else None
        for name in ("bias_k", "bias_v"):
            row = nn.init.xavier_normal_(torch.empty(1, 1, d)) if add_bias_kv else None
            self.register_parameter(name, None if row is None else nn.Parameter(row))

    def _check_extras(self) -> None:
        mechanism = self.mechanism
        if (self.bias_k is not None or self.add_zero_attn) and (
            mechanism.causal or mechanism.supports.positions or not mechanism.supports.cross
        ):
            raise UnsupportedError(
                f"{mechanism.name} attention with these options does not support keys without a position; "
                "use add_bias_kv=False and add_zero_attn=False"
            )
        if mechanism.supports.reads_input and self.kdim != self.embed_dim:
            raise UnsupportedError(f"{mechanism.name} attention also reads its input; use kdim = embed_dim")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`, like torch's `forward`: outputs, and weights or None.

        `is_causal` says that `attn_mask` is the causal mask; with `causal=True`, the mask is ignored. If
        `query is key`, the call is self-attention, and padding is masked in the queries too, so outputs at
        padding, which are meaningless in torch, differ. Every query attends to the keys added by
        `add_bias_kv` and `add_zero_attn`; torch masks these keys if `is_causal` is True and `need_weights` is
        False.

        Raises:
            ValueError: an input has another shape.
            UnsupportedError: the mechanism does not support the mask, other keys, or returning weights.
        """
        own = query is key
        packed = own and key is value
        if query.is_nested:
            raise UnsupportedError(
                "nested tensors are not supported; make TransformerEncoder with enable_nested_tensor=False"
            )
        batched = query.dim() == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        B, T, S = query.shape[0], query.shape[1], key.shape[1]
        self._check_sizes(query, key, value)
        padding = self._padding(key_padding_mask, B, S)
        if padding is not None:
            key = without_padding(key, padding)
            query, value = key if own else query, key if packed else without_padding(value, padding)
        masks = self._masks(padding, attn_mask, is_causal, (B, T, S))
        if not own:
            self.mechanism.refuse("cross", key, "a key that is another tensor than the query")
        projected = self._heads(query, key, value, packed)
        heads = self.mechanism.heads_of(projected, key, masks, cross=not own)
        y: Tensor = self.out_proj(
            self.mechanism.merge_heads(self.mechanism.attend_to_all(heads, masks), query)
        )
        y = y if batched and self.batch_first else y.transpose(0, 1) if batched else y[0]
        if not need_weights:
            return y, None
        if not self.mechanism.supports.weights:
            raise UnsupportedError(
                f"{self.mechanism.name} attention has no weights to return; use need_weights=False"
            )
        weights = self.mechanism.weights_of(heads, masks)
        weights = weights.mean(1) if average_attn_weights else weights
        return y, weights if batched else weights[0]

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if x.dim() != (3 if batched else 2):
            raise ValueError(f"an input has {x.dim()} axes, but all must have 3, or 2 if unbatched")
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _check_sizes(self, *inputs: Tensor) -> None:
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, x, width in zip(("query", "key", "value"), inputs, widths, strict=True):
            if x.shape[-1] != width or x.shape[0] != inputs[0].shape[0]:
                raise ValueError(
                    f"{name} has batch size {x.shape[0]} and width {x.shape[-1]}, "
                    f"but must have {inputs[0].shape[0]} and {width}"
                )
        if inputs[1].shape[1] != inputs[2].shape[1]:
            raise ValueError(
                f"value has length {inputs[2].shape[1]}, but must have key's, {inputs[1].shape[1]}"
            )

    def _heads(self, query: Tensor, key: Tensor, value: Tensor, packed: bool) -> Projected:
        """Project to `[B,T,H,D]`, with the additional keys and values of torch's module."""
        heads = list(self._projected(query, key, value, packed))
        for i, row in ((1, self.bias_k), (2, self.bias_v)):
            if row is not None:
                heads[i] = torch.cat([heads[i], row.expand(len(heads[i]), -1, -1)], dim=1)
            if self.add_zero_attn:
                heads[i] = F.pad(heads[i], (0, 0, 0, 1))
        q, k, v = (x.view(*x.shape[:2], self.num_heads, self.head_dim) for x in heads)
        return q, k, v

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, packed: bool) -> Sequence[Tensor]:
        if packed and self.in_proj_weight is not None:
            return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        if self.in_proj_weight is None:
            weights = [getattr(self, f"{name}_proj_weight") for name in "qkv"]
        else:
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
        return [linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _padding(self, mask: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Check a padding mask of torch, and convert it to bool (True = padding)."""
        self.mechanism.refuse("padding", mask, "key_padding_mask")
        if mask is None:
            return None
        padding = _as_padding(mask)
        check_key_padding_mask(padding, batch, length)
        return padding

    def _masks(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        sizes: tuple[int, int, int],
    ) -> Masks:
        """Convert an `attn_mask` of torch to True = attend; additional keys are never masked."""
        mechanism, (B, T, S) = self.mechanism, sizes
        further = (self.bias_k is not None) + self.add_zero_attn
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is True without attn_mask, but both must be given, as in torch")
        if is_causal and mechanism.causal:
            attn_mask = None
        if is_causal and attn_mask is not None and not mechanism.supports.attn_mask:
            raise UnsupportedError(
                f"{mechanism.name} attention does not support attn_mask; construct it with causal=True"
            )
        mechanism.refuse("attn_mask", attn_mask, "attn_mask")
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                if attn_mask.shape != (B * self.num_heads, T, S):
                    raise ValueError(
                        f"attn_mask has shape {list(attn_mask.shape)}, "
                        f"but must have {[B * self.num_heads, T, S]} or {[T, S]}"
                    )
                attn_mask = attn_mask.view(B, self.num_heads, T, S)
            check_attn_mask(attn_mask, (B, self.num_heads, T, S))
        # In torch, False and 0 leave a key unmasked.
        key_padding_mask, attn_mask = (
            F.pad(x, (0, further)) if x is not None and further else x for x in (key_padding_mask, attn_mask)
        )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        return Masks(key_padding_mask, attn_mask)


def _as_padding(mask: Tensor) -> Tensor:
    """Convert a boolean or additive padding mask of torch to bool (True = padding)."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"key_padding_mask is {mask.dtype}, but must be bool (True = padding) or floating")
    padding = mask == -torch.inf
    if may_read(mask) and bool((mask.masked_fill(padding, 0) != 0).any()):
        raise UnsupportedError(
            "key_padding_mask holds numbers other than 0 and -inf; add those to attn_mask instead"
        )
    return padding
