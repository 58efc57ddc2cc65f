"""The transcriber: speech to symbols by bidirectional blocks with any attention mechanism.

    z = subsampling(x)                      T frames of features to T / 4 vectors
    z <- block_L( ... block_1(z))           with rotary positions, or others added before the first block
    p_t = softmax(W norm(z)_t + b)          over the symbols and the blank

trained by CTC (`unrolled.models.ctc`), as the speech models of Katharopoulos et al. 2020 (arXiv
2006.16236, section 4.3), which have 9 layers and no subsampling.

Cost: that of the blocks for T / 4 tokens.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from unrolled.fields import Fraction, FromData, Size
from unrolled.models.blocks import init_weights
from unrolled.models.config import Positions, TransformerConfig
from unrolled.models.ctc import CTCModel
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.reversible import make_stack
from unrolled.models.saving import RecomputingModel
from unrolled.ops.dropout import Dropout


@dataclass(kw_only=True)
class TranscriberConfig(TransformerConfig):
    """A transcriber's fields; see `TransformerConfig` for the rest.

    Attributes:
        vocab_size: number of symbols; the id `vocab_size` is the blank.
        n_mels: features of a frame.
        max_length: number of learned positions, one for every 4 frames; it limits nothing else.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    n_mels: Annotated[Size, FromData("n_mels")]
    d_model: Size = 144
    n_heads: Size = 4
    positions: Positions = "rotary"
    max_length: Size = 1024
    dropout: Fraction = 0.1


class Transcriber(CTCModel, RecomputingModel):
    """Subsampling, positions, bidirectional blocks, and an output layer.

    `unrolled.models.blocks.init_weights` initialises the weights, except those of the convolutions, which
    have torch's initial values.
    """

    model_name = "transcriber"
    config_type = TranscriberConfig
    config: TranscriberConfig

    def __init__(self, config: TranscriberConfig) -> None:
        width = config.d_model
        super().__init__(
            config, vocab_size=config.vocab_size, n_mels=config.n_mels, d_model=width, hidden_size=width
        )
        self.positions = PositionEmbedding.of(config)
        self.dropout = Dropout(config.dropout)
        self.stack = make_stack(config, causal=False)
        init_weights(self, config)

    def encode(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Read frames `[B,T,d_model]`, with `padding [B,T]` if any: `[B,T,d_model]`."""
        y = self.dropout(self.positions(x, key_padding_mask=padding))
        return self.stack(y, recompute=self.recompute, key_padding_mask=padding)
