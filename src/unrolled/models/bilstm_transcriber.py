"""Speech to symbols by bidirectional LSTMs, for comparison with the attention of `transcriber`.

    z = subsampling(x)                                    T frames of features to T / 4 vectors
    z <- [LSTM(norm(z)); LSTM(norm(z)) right to left]     n_layers times
    p_t = softmax(W z_t + b)                              over the symbols and the blank

Without the layer norms, the model predicts only blanks for a long part of the training.

Graves et al. 2013, "Speech recognition with deep recurrent neural networks", arXiv 1303.5778, section 2, with
torch's LSTM; trained by CTC (`unrolled.models.ctc`).
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from unrolled.fields import Fraction, FromData, Size
from unrolled.models.cells import run_lstm
from unrolled.models.config import ModelConfig
from unrolled.models.ctc import CTCModel
from unrolled.ops.dropout import Dropout


@dataclass
class BiLSTMTranscriberConfig(ModelConfig):
    """The fields of a transcriber of LSTMs.

    Attributes:
        vocab_size: number of symbols; the id `vocab_size` is the blank.
        n_mels: features of a frame.
        d_model: width of the subsampled frames.
        hidden_size: width of each direction.
        n_layers: number of layers.
        dropout: probability, for the input of each layer and for the output of the last.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    n_mels: Annotated[Size, FromData("n_mels")]
    d_model: Size = 144
    hidden_size: Size = 160
    n_layers: Size = 3
    dropout: Fraction = 0.1


class BiLSTMTranscriber(CTCModel):
    """Subsampling, bidirectional LSTMs, and an output layer. Weights have torch's initial values."""

    model_name = "bilstm_transcriber"
    config_type = BiLSTMTranscriberConfig
    config: BiLSTMTranscriberConfig

    def __init__(self, config: BiLSTMTranscriberConfig) -> None:
        super().__init__(
            config,
            vocab_size=config.vocab_size,
            n_mels=config.n_mels,
            d_model=config.d_model,
            hidden_size=2 * config.hidden_size,
        )
        widths = [config.d_model, *[2 * config.hidden_size] * (config.n_layers - 1)]
        self.layers = nn.ModuleList(
            nn.LSTM(width, config.hidden_size, bidirectional=True, batch_first=True) for width in widths
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.dropout = Dropout(config.dropout)

    def encode(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Read frames `[B,T,d_model]`, with `padding [B,T]` if any: `[B,T,2 hidden_size]`."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = self.dropout(norm(x))
            x = run_lstm(layer, x)[0] if padding is None or not len(x) else _valid_frames(layer, x, padding)
        dropped: Tensor = self.dropout(x)
        return dropped


def _valid_frames(layer: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    """Run a layer on the valid frames of each row of `x [B,T,d]`; its output is 0 at padding."""
    lengths = (~padding).sum(1).clamp(min=1).cpu()  # a row without frames reads one of zeros
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, _ = pad_packed_sequence(run_lstm(layer, packed)[0], batch_first=True, total_length=padding.shape[1])
    return y
