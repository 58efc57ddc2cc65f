"""Learned feature maps, with separate weights per head.

Each map here is for queries only or for keys only. `make_feature_map` combines two maps in a `QueryKeyMap`,
as keys have separate weights and may have fewer heads.
"""

import torch
from torch import Tensor, nn

from unrolled.ops.checks import check_device, shape
from unrolled.ops.feature_maps.base import FeatureMap
from unrolled.ops.feature_maps.elementwise import exp_of_key, exp_of_query
from unrolled.ops.precision import without_autocast


class PerHeadMap(FeatureMap):
    """A layer y_h = W_h x_h + b_h for each head h, from which derived maps compute features.

    Raises:
        ValueError: a size below 1.
    """

    not_decayed = ("bias",)

    def __init__(self, head_dim: int, n_heads: int, layer_dim: int, feature_dim: int):
        super().__init__(head_dim, feature_dim)
        if n_heads < 1 or layer_dim < 1:
            raise ValueError(
                f"n_heads is {n_heads} and the layer {layer_dim} wide, but both must be at least 1"
            )
        self.weight = nn.Parameter(torch.empty(n_heads, layer_dim, head_dim))
        self.bias = nn.Parameter(torch.zeros(n_heads, layer_dim))

    def layer(self, x: Tensor) -> Tensor:
        """Apply the layer in at least fp32: `[...,H,D]` -> `[...,H,layer_dim]`."""
        x = self._wide("x", x)
        check_device("x", x, self.weight)
        if x.shape[-2] != self.weight.shape[0]:
            raise ValueError(f"x has shape {shape(x)}, but this map has weights for {len(self.weight)} heads")
        with without_autocast(x.device):
            return torch.einsum("...hd,hrd->...hr", x, self.weight.to(x.dtype)) + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{super().extra_repr()}, n_heads={len(self.weight)}"


class T2R(PerHeadMap):
    """phi(x) = relu(W x + b), with W drawn as in `torch.nn.Linear`.

    T2R uses it to turn a trained transformer into an RNN (arXiv 2103.13076). A query or a key may map to 0,
    as with `Relu`.

    Args:
        head_dim: D.
        n_heads: heads of the queries, or of the keys, that it maps.
        feature_dim: R.
    """

    def __init__(self, head_dim: int, n_heads: int, feature_dim: int = 32):
        super().__init__(head_dim, n_heads, feature_dim, feature_dim)
        nn.init.uniform_(self.weight, -(head_dim**-0.5), head_dim**-0.5)
        nn.init.uniform_(self.bias, -(head_dim**-0.5), head_dim**-0.5)

    def phi(self, x: Tensor) -> Tensor:
        """Map `[...,H,D]` to `[...,H,R]`."""
        return self.layer(x).relu()


class Hedgehog(PerHeadMap):
    """phi(x) = [exp(Wx + b), exp(-Wx - b)], R = 2D, positive; W = I and b = 0 at first.

    In Hedgehog (arXiv 2402.04347), W and b are first trained to reproduce the weights of softmax. As with
    `Exp`, a factor per query cancels, and exponents are clamped to between -60 and 60.
    """

    def __init__(self, head_dim: int, n_heads: int):
        super().__init__(head_dim, n_heads, head_dim, 2 * head_dim)
        with torch.no_grad():
            self.weight.copy_(torch.eye(head_dim))

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries `[...,H,D]` to `[...,H,2D]`, at most 1."""
        return exp_of_query(self._signed(q))

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys `[...,G,D]` to `[...,G,2D]`."""
        return exp_of_key(self._signed(k))

    def _signed(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cat([y, -y], dim=-1)


class HedgehogSoftmax(Hedgehog):
    """phi(x) = [softmax(Wx + b), softmax(-Wx - b)]: Hedgehog with each half turned into probabilities.

    As in LoLCATs (arXiv 2410.10254). The denominators differ between keys, so the kernel is not that of
    `Hedgehog`: a long key weighs no more than a short one. One softmax over both halves would be yet another
    kernel.
    """

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries `[...,H,D]` to `[...,H,2D]`."""
        return self._probabilities(q)

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys `[...,G,D]` to `[...,G,2D]`."""
        return self._probabilities(k)

    def _probabilities(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)
