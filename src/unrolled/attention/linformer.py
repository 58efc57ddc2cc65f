r"""Linformer attention: keys and values projected along the sequence, from n positions to k slots.

    o_i = sum_s a_is (F V)_s        a_is = exp(q_i . (E K)_s / sqrt(D)) / sum_s' exp(q_i . (E K)_s' / sqrt(D))

E and F are learned matrices `[k, n]`, K `[S, D]` and V `[S, M]` the keys and values. A sequence of S < n
tokens uses the first S columns. Column j is for valid token j, so padding has no effect, wherever it is.

Wang, Li, Khabsa, Fang and Ma 2020, "Linformer: Self-Attention with Linear Complexity", arXiv 2006.04768,
eq. 7; section 4 for sharing and for the other projections. As there, E and F are applied to the outputs of
the linear layers of keys and values, biases included (in fairseq's code, to their input).

Cost per head: time O((T+S) k (D+M)), memory O((T+S) (D+M) + k n); k n parameters for each matrix.
Cannot: be causal (each slot mixes all positions, so no mask can remove the future), read more than n keys, or
honour an arbitrary `attn_mask`. In a short sequence each slot sums fewer tokens, and nothing rescales the
sums. With a projection by windows, `torch.export` exports a single length, since the length determines the
number of windows.
Equals softmax attention: for n valid keys, at k = n with the linear projection and the identity for E and F.

With `rotary`, queries and keys are rotated by their positions before the keys are projected.
"""

import math
from collections.abc import Sequence
from typing import Self, Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._options import BIDIRECTIONAL_ONLY
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.ops.checks import check_qkv
from unrolled.ops.chunks import cut
from unrolled.ops.options import check_choice, check_integers
from unrolled.ops.packing import valid_tokens_first
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.softmax import softmax_attention

SHARING = ("none", "headwise", "key-value", "layerwise")


class Projection(nn.Module):
    """Shortens sequences of up to n = `max_length` tokens to k = `rank` slots; short ones may fill fewer.

    Args:
        rank: number of slots k.
        max_length: length n of the longest sequence.
        n_heads: number of heads with their own parameters; by default all heads share them.

    Raises:
        ValueError: rank above max_length, or a size below 1.
    """

    def __init__(self, rank: int, max_length: int, n_heads: int | None = None):
        super().__init__()
        check_integers(1, rank=rank, max_length=max_length)
        if not rank <= max_length:
            raise ValueError(f"rank is {rank}, but must be between 1 and max_length = {max_length}")
        self.rank, self.max_length, self.n_heads = rank, max_length, n_heads

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Project `x [B,S,G,W]` to `[B,slots,G,W]`; padding `[B,S]` (True) comes last, with zeros in x."""
        raise NotImplementedError

    def empty_slots(self, padding: Tensor) -> Tensor | None:
        """Return which slots hold no token, `[B,slots]`; None if every slot depends on every token."""
        return None

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"rank={self.rank}, max_length={self.max_length}, n_heads={self.n_heads}"

    def _parameter(self, *size: int, bound: float) -> nn.Parameter:
        heads = () if self.n_heads is None else (self.n_heads,)
        return nn.Parameter(torch.empty(*heads, *size).uniform_(-bound, bound))


class LinearProjection(Projection):
    """One learned matrix `[k,n]`, or `[G,k,n]` with one per head.

    Entries are initialised uniformly with variance 1 / (n + k), as in the authors' code (Xavier with gain
    1/sqrt(2)).
    """

    def __init__(self, rank: int, max_length: int, n_heads: int | None = None):
        super().__init__(rank, max_length, n_heads)
        self.weight = self._parameter(rank, max_length, bound=math.sqrt(3 / (max_length + rank)))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Project `x [B,S,G,W]` to `[B,k,G,W]`."""
        weight = self.weight[..., : x.shape[1]]
        if self.n_heads is None:
            return (weight @ x.flatten(2)).reshape(x.shape[0], self.rank, *x.shape[2:])
        return torch.einsum("gks,bsgw->bkgw", weight, x)


class WindowProjection(Projection):
    """Each slot summarises its own window of n/k tokens. Windows without tokens make no slots.

    Raises:
        ValueError: max_length is not a multiple of rank.
    """

    def __init__(self, rank: int, max_length: int, n_heads: int | None = None):
        super().__init__(rank, max_length, n_heads)
        if max_length % rank:
            raise ValueError(f"max_length is {max_length}, but must be a multiple of rank = {rank}")
        self.window = max_length // rank

    def empty_slots(self, padding: Tensor) -> Tensor | None:
        """Return the slots whose first token is padding."""
        return padding[:, :: self.window]

    def _present(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return whether each place of each window has a token, `[B,slots,window,1,1]`."""
        present = x.new_ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding
        return cut(present, self.window)[..., None, None]


class MeanPooling(WindowProjection):
    """The mean of the tokens in each window. It has no parameters."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Project `x [B,S,G,W]` to `[B,slots,G,W]`."""
        count = self._present(x, padding).sum(2).clamp(min=1)
        total = cut(x, self.window).sum(2, dtype=accumulation_dtype(x.dtype))  # a sum may overflow fp16
        return (total / count).to(x.dtype)


class MaxPooling(WindowProjection):
    """The largest value of each coordinate in each window. It has no parameters."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Project `x [B,S,G,W]` to `[B,slots,G,W]`."""
        lowest = torch.finfo(x.dtype).min
        return cut(x, self.window).masked_fill(~self._present(x, padding), lowest).amax(2)


class Convolution(WindowProjection):
    """A convolution along the sequence whose kernel `[n/k]`, or `[G,n/k]`, is as wide as its stride."""

    def __init__(self, rank: int, max_length: int, n_heads: int | None = None):
        super().__init__(rank, max_length, n_heads)
        self.weight = self._parameter(self.window, bound=self.window**-0.5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Project `x [B,S,G,W]` to `[B,slots,G,W]`."""
        kernel = self.weight if self.n_heads is not None else self.weight.expand(x.shape[2], -1)
        return torch.einsum("bsngw,gn->bsgw", cut(x, self.window), kernel)


PROJECTIONS: dict[str, type[Projection]] = {
    "linear": LinearProjection,
    "mean": MeanPooling,
    "max": MaxPooling,
    "convolution": Convolution,
}


def linformer_reference(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor) -> Tensor:
    """One head by the equation: `q [T,D]`, `k [S,D]`, `v [S,M]`, `E, F [k,S]` to `[T,M]`."""
    scores = q @ (E @ k).mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ (F @ v)


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    project_k: Projection,
    project_v: Projection,
    *,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attend from `q [B,T,H,D]` to the slots of `k [B,S,G,D]` and `v [B,S,G,M]`: `[B,T,H,M]`.

    Args:
        q, k, v: as for `softmax_attention`.
        project_k, project_v: the projections E and F, of the same class; they may be the same object.
        key_padding_mask: `[B,S]`, True = padding.

    Raises:
        ValueError: more keys than the projections take, or an argument of the wrong shape or type.
    """
    check_qkv(q, k, v, key_padding_mask)
    for projection in (project_k, project_v):
        if k.shape[1] > projection.max_length:
            raise ValueError(f"k has length {k.shape[1]}, but max_length is {projection.max_length}")
    padding, empty = None, None
    if key_padding_mask is not None:
        (k, v), padding, _ = valid_tokens_first(key_padding_mask, k, v)
        empty = project_k.empty_slots(padding)
    return softmax_attention(q, project_k(k, padding), project_v(v, padding), key_padding_mask=empty)


class LinformerAttention(MultiHeadAttention[None, None]):
    """Multi-head Linformer attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        rank: number of slots k; 256 by default, or max_length if that is less.
        max_length: length n of the longest sequence of keys; 1024 by default.
        projection: "linear", "mean", "max" or "convolution", or a `Projection` shared with other layers.
        sharing: which projections are shared (section 4 of the paper). "none": each key/value head has its
            own E and F. "headwise": all heads share E and F. "key-value": the same, and E = F. "layerwise":
            as "key-value", and all layers share E. The layers of a model do so automatically; outside of a
            model, pass one `Projection` object to all layers.

    Raises:
        ValueError: a rank larger than max_length, or a projection that does not fit the other arguments.
        UnsupportedError: causal attention.
    """

    supports = BIDIRECTIONAL_ONLY.but(single_queries=True, max_length=True)
    one_way = "each slot mixes all positions; use linear attention or Perceiver AR"
    projection: Projection
    value_projection: Projection | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        rank: int | None = None,
        max_length: int | None = None,
        projection: str | Projection = "linear",
        sharing: str = "headwise",
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_choice("sharing", sharing, SHARING)
        self.sharing = sharing
        linear = projection == "linear" or isinstance(projection, LinearProjection)
        self.supports = self.supports.but(dynamic_length=linear)
        self.value_projection = None
        if isinstance(projection, Projection):
            self._check_given(projection, rank, max_length)
            self.projection = projection
            return
        if not isinstance(projection, str) or projection not in PROJECTIONS:
            raise ValueError(
                f"projection is {projection!r}, but must be one of {', '.join(PROJECTIONS)}, or a Projection"
            )
        n = 1024 if max_length is None else max_length
        check_integers(1, max_length=n)
        sizes = (min(256, n) if rank is None else rank, n, self.n_kv_heads if sharing == "none" else None)
        self.projection = PROJECTIONS[projection](*sizes)
        if sharing in ("none", "headwise"):
            self.value_projection = PROJECTIONS[projection](*sizes)

    @classmethod
    def tie_layers(cls, layers: Sequence[Self]) -> None:
        """Give all layers with sharing "layerwise" the projection of the first, once in the `state_dict`.

        Raises:
            ValueError: their projections differ.
        """
        sharing = [layer for layer in layers if layer.sharing == "layerwise"]
        for layer in sharing[1:]:
            first = sharing[0]
            if str(layer.projection) != str(first.projection):
                raise ValueError(
                    f"sharing is 'layerwise', but one layer's projection is {layer.projection} and the "
                    f"first one's {first.projection}"
                )
            del layer.projection
            layer.__dict__["projection"] = first.projection  # not as a sub-module of this layer too

    def attend(self, heads: Heads[None], masks: Masks) -> Tensor:
        """Attend in parallel."""
        (q, k), padding = self.rotated(heads), masks.key_padding_mask
        project_v = self.projection if self.value_projection is None else self.value_projection
        return linformer_attention(q, k, heads.v, self.projection, project_v, key_padding_mask=padding)

    def _check_given(self, projection: Projection, rank: int | None, max_length: int | None) -> None:
        if self.sharing != "layerwise":
            raise ValueError(
                f"sharing is {self.sharing!r}, but must be 'layerwise' for a projection object, which serves "
                "keys, values and layers"
            )
        for name, given in (("rank", rank), ("max_length", max_length)):
            if given not in (None, getattr(projection, name)):
                raise ValueError(f"{name} is {given}, but the projection has {getattr(projection, name)}")
        if projection.n_heads not in (None, self.n_kv_heads):
            raise ValueError(
                f"projection is for {projection.n_heads} heads, but keys and values have {self.n_kv_heads}"
            )
