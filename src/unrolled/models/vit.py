r"""Vision Transformer: classifies an image as a sequence of patches, by bidirectional blocks.

    z = [c; E x_1 + e; ... E x_N + e] + P        patches x_n of the image, as vectors, in row-major order
    z <- block_L( ... block_1(z))
    logits = W norm(z)_c + b

c is a learned class token, E and e a linear layer, P the positions. Instead of the class token, the mean of
the patches can be classified; then there is no c.

Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", arXiv 2010.11929, eq. 1-4. Boxes of a video in place
of patches: Arnab et al. 2021, "ViViT", arXiv 2103.15691, section 3.2 (tubelet embedding).

Cost: that of the blocks for N + 1 tokens, where N is the number of patches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from annotated_types import Len
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import UnsupportedError
from unrolled.fields import FromData, Size
from unrolled.models.blocks import INIT_STD, init_weights
from unrolled.models.config import Mechanisms, TransformerConfig
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.heads import Categorical
from unrolled.models.reversible import make_stack
from unrolled.models.saving import RecomputingModel
from unrolled.ops.checks import check_matches, check_tensor, shape, wrong
from unrolled.ops.dense import Layer, Linear
from unrolled.ops.dropout import Dropout

Pooling = Literal["class", "mean"]
Axes = Annotated[list[Size], Len(2, 3)]


@dataclass(kw_only=True)
class ViTConfig(TransformerConfig):
    """A Vision Transformer's fields; see `TransformerConfig` for the rest.

    Attributes:
        image_size: [height, width] of the images, or [time, height, width] of videos.
        patch_size: size of a patch on each axis, a divisor of the image's.
        channels: number of channels of a pixel.
        n_classes: number of labels.
        pooling: what is classified: the "class" token, or the "mean" of the patches.
        max_length: computed from the sizes: the number of tokens.
    """

    image_size: Axes
    patch_size: Axes
    n_classes: Annotated[Size, FromData("n_classes")]
    channels: Size = 3
    pooling: Pooling = "class"
    attention: Mechanisms = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.image_size) == len(self.patch_size)
        if not fits or any(n % p for n, p in zip(self.image_size, self.patch_size, strict=True)):
            raise ValueError(
                f"patch_size is {self.patch_size}, but must divide image_size = {self.image_size}"
            )
        if self.max_length not in (TransformerConfig.max_length, self.n_tokens):
            raise wrong("max_length", self.max_length, f"{self.n_tokens}, the number of tokens")
        self.max_length = self.n_tokens
        if self.positions == "axial" and math.prod(self.axial_shape or ()) < self.n_tokens:
            raise ValueError(
                f"axial_shape is {self.axial_shape}, but must have room for {self.n_tokens} tokens"
            )
        for layer, name in enumerate(self.layer_attention):
            if name == "spatiotemporal":
                self._check_spatiotemporal(layer)

    @property
    def grid(self) -> list[int]:
        """Number of patches along each axis."""
        return [n // p for n, p in zip(self.image_size, self.patch_size, strict=True)]

    @property
    def n_tokens(self) -> int:
        """Number of patches, plus the class token if there is one."""
        return math.prod(self.grid) + (self.pooling == "class")

    def _check_spatiotemporal(self, layer: int) -> None:
        """Require the shape of the image: the mechanism treats any sequence as a grid of its own shape."""
        given = self.options_of(layer).get("shape")
        if not isinstance(given, list | tuple) or list(given[-2:]) != self.grid[-2:]:
            raise ValueError(
                f"shape of the spatiotemporal attention of layer {layer} is {given}, but must end in "
                f"{self.grid[-2:]}, the patches of an image"
            )
        if self.pooling == "class":
            raise ValueError(
                "pooling is 'class', but must be 'mean' with spatiotemporal attention: a class token has no "
                "place in a grid"
            )


class PatchEmbedding(Layer):
    """Maps each patch of an image to a vector: a convolution with the patch as kernel and stride.

    The weight is the convolution's, `[d_model, channels, *patch_size]`, with its last axes flattened.

    Args:
        channels: number of channels of a pixel.
        patch_size: size of a patch on each axis.
        d_model: width of the vectors.
    """

    def __init__(self, channels: int, patch_size: Sequence[int], d_model: int) -> None:
        super().__init__()
        self.patch_size = tuple(patch_size)
        self.project = Linear(channels * math.prod(patch_size), d_model)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, channels, *image_size]` to `[B, patches, d_model]`, in row-major order."""
        n_axes = len(self.patch_size)
        split = [size for n, p in zip(x.shape[2:], self.patch_size, strict=True) for size in (n // p, p)]
        x = x.reshape(*x.shape[:2], *split)
        x = x.permute(0, *range(2, 2 + 2 * n_axes, 2), 1, *range(3, 3 + 2 * n_axes, 2))
        return cast(Tensor, self.project(x.flatten(1 + n_axes).flatten(1, n_axes)))


class ViT(RecomputingModel):
    """Patches, positions, bidirectional blocks, and a linear output.

    `unrolled.models.blocks.init_weights` initialises the weights; the class token is drawn like an embedding.
    """

    model_name = "vit"
    config_type = ViTConfig
    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.embedding = PatchEmbedding(config.channels, config.patch_size, config.d_model)
        self.class_token = None
        if config.pooling == "class":
            self.class_token = nn.Parameter(INIT_STD * torch.randn(config.d_model))
        self.positions = PositionEmbedding.of(config)
        self.dropout = Dropout(config.dropout)
        self.stack = make_stack(config, causal=False)
        self.head = Categorical(config.d_model, config.n_classes, bias=True)
        init_weights(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[B, n_classes]` of images `x [B, channels, *image_size]`, in floating point."""
        return self.head(self.hidden(x))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats, computed in at least fp32.

        Args:
            inputs: as `x` of `forward`.
            targets: `[B]` long; -100 is ignored.
        """
        return self.head.loss(self.hidden(inputs), targets)

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the output layer: `[B, d_model]`."""
        y = self.tokens(x)
        return y.mean(dim=1) if self.class_token is None else y[:, 0]

    def tokens(self, x: Tensor) -> Tensor:
        """The output of the last block: `[B, tokens, d_model]`, the class token first if there is one."""
        expected = [self.config.channels, *self.config.image_size]
        check_tensor("x", x)
        if not x.is_floating_point() or shape(x)[1:] != expected:
            sizes = ", ".join(map(str, expected))
            raise wrong("x", x, f"floating point [B, {sizes}]")
        check_matches("x", x, self.embedding.project.weight)
        y = self.embedding(x).to(self.embedding.project.weight.dtype)  # autocast must not narrow the stream
        if self.class_token is not None:
            y = torch.cat([self.class_token.expand(len(y), 1, -1), y], dim=1)
        return self.stack(self.dropout(self.positions(y)), recompute=self.recompute)

    @torch.no_grad()
    def resized(self, image_size: list[int]) -> "ViT":
        """Make a copy for images of another size with the same patch size: section 3.2 of the paper.

        Learned positions are interpolated between the centres of the patches, bicubically on two axes and
        trilinearly on three. The class token keeps its own.

        Raises:
            ValueError: as for the config.
            UnsupportedError: axial positions, whose tables are made for one grid.
        """
        if self.config.positions == "axial":
            raise UnsupportedError("axial positions cannot be interpolated; use learned or sinusoidal ones")
        name, n_places = "positions.table.weight", math.prod(self.config.grid)
        config = replace(self.config, image_size=image_size, max_length=TransformerConfig.max_length)
        model, weights = ViT(config).to(self.embedding.project.weight), self.state_dict()
        if name in weights:
            own, places = weights[name].split([len(weights[name]) - n_places, n_places])
            mode = "bicubic" if len(config.grid) == 2 else "trilinear"
            places = places.T.reshape(1, -1, *self.config.grid)
            places = F.interpolate(places, config.grid, mode=mode, align_corners=False)
            weights[name] = torch.cat([own, places[0].flatten(1).T])
        model.load_state_dict(weights)
        model.documents, model.gradient_checkpointing = dict(self.documents), self.gradient_checkpointing
        return model.train(self.training)
