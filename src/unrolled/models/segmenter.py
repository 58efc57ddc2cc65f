"""The segmenter: bits at each place of a sequence of vectors, by bidirectional blocks with any attention.

    z = W x + b + positions
    z <- block_L( ... block_1(z))
    p(bit = 1) = sigmoid(U norm(z) + c)

In a video, a place is a patch of a frame, and its bits say which of its pixels belong to an object.
"""

from dataclasses import dataclass
from typing import Annotated, cast

from torch import Tensor, nn

from unrolled.fields import FromData, Size
from unrolled.models.bits import bit_loss
from unrolled.models.blocks import init_weights
from unrolled.models.config import TransformerConfig
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.reversible import make_stack
from unrolled.models.saving import RecomputingModel
from unrolled.ops.checks import check_input
from unrolled.ops.dropout import Dropout
from unrolled.ops.masks import zero_padding


@dataclass(kw_only=True)
class SegmenterConfig(TransformerConfig):
    """A segmenter's fields; see `TransformerConfig` for the rest.

    Attributes:
        input_size: width of the vectors.
        output_size: bits at each place.
    """

    input_size: Annotated[Size, FromData("input_size")]
    output_size: Annotated[Size, FromData("output_size")]


class Segmenter(RecomputingModel):
    """A linear layer, positions, bidirectional blocks, and a logit for each bit.

    `unrolled.models.blocks.init_weights` initialises the weights.
    """

    model_name = "segmenter"
    config_type = SegmenterConfig
    config: SegmenterConfig

    def __init__(self, config: SegmenterConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Linear(config.input_size, config.d_model)
        self.positions = PositionEmbedding.of(config)
        self.dropout = Dropout(config.dropout)
        self.stack = make_stack(config, causal=False)
        self.head = nn.Linear(config.d_model, config.output_size)
        init_weights(self, config)

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits `[B,T,output_size]` of the bits at each place of `x [B,T,input_size]`.

        Places at padding (`[B,T]`, True) are not read; their logits are meaningless.
        """
        check_input("x", x, ["B", "T", self.config.input_size], self.embedding.weight)
        (x,) = zero_padding(key_padding_mask, x)  # NaN at padding would reach the embedding's gradient
        y = self.embedding(x).to(self.embedding.weight.dtype)  # autocast must not narrow the residual stream
        embedded = self.positions(y, key_padding_mask=key_padding_mask)
        z = self.stack(self.dropout(embedded), recompute=self.recompute, key_padding_mask=key_padding_mask)
        return cast(Tensor, self.head(z))

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean binary cross-entropy in nats per bit; see `unrolled.models.bits.bit_loss`.

        Args:
            inputs: as `x` of `forward`.
            targets: `[B,T,output_size]`, floating point, from 0 to 1; -100 and those at padding are ignored.
            key_padding_mask: see `forward`.
        """
        return bit_loss(self(inputs, key_padding_mask=key_padding_mask), targets, key_padding_mask)
