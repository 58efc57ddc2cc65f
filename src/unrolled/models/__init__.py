"""Models made from a config: transformers with any attention mechanism, recurrent models with any cell."""

from pathlib import Path

from unrolled.models.bilstm_transcriber import BiLSTMTranscriber, BiLSTMTranscriberConfig
from unrolled.models.decoder import Decoder, DecoderConfig, DecoderState
from unrolled.models.encoder import Encoder, EncoderConfig, mask_tokens
from unrolled.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, EncoderDecoderState
from unrolled.models.lstmn_seq2seq import (
    DeepLSTMNSeq2Seq,
    DeepLSTMNSeq2SeqConfig,
    LSTMNSeq2Seq,
    LSTMNSeq2SeqConfig,
)
from unrolled.models.luong_seq2seq import LuongSeq2Seq, LuongSeq2SeqConfig
from unrolled.models.memnn import MemNN, MemNNConfig
from unrolled.models.memory_network import MemN2N, MemN2NConfig
from unrolled.models.non_local import NonLocalBlock
from unrolled.models.ntm import NTMModel, NTMModelConfig, NTMNumbers
from unrolled.models.perceiver import Perceiver, PerceiverConfig, PerceiverIO, PerceiverIOConfig
from unrolled.models.perceiver_ar import PerceiverAR, PerceiverARConfig
from unrolled.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from unrolled.models.rnn_seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig
from unrolled.models.saving import SavedModel, read_config
from unrolled.models.segmenter import Segmenter, SegmenterConfig
from unrolled.models.transcriber import Transcriber, TranscriberConfig
from unrolled.models.vit import ViT, ViTConfig

__all__ = [
    "KINDS",
    "BiLSTMTranscriber",
    "BiLSTMTranscriberConfig",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "DeepLSTMNSeq2Seq",
    "DeepLSTMNSeq2SeqConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderState",
    "LSTMNSeq2Seq",
    "LSTMNSeq2SeqConfig",
    "LuongSeq2Seq",
    "LuongSeq2SeqConfig",
    "MemN2N",
    "MemN2NConfig",
    "MemNN",
    "MemNNConfig",
    "NTMModel",
    "NTMModelConfig",
    "NTMNumbers",
    "NonLocalBlock",
    "Perceiver",
    "PerceiverAR",
    "PerceiverARConfig",
    "PerceiverConfig",
    "PerceiverIO",
    "PerceiverIOConfig",
    "RNNSeq2Seq",
    "RNNSeq2SeqConfig",
    "RecurrentLM",
    "RecurrentLMConfig",
    "Segmenter",
    "SegmenterConfig",
    "Transcriber",
    "TranscriberConfig",
    "ViT",
    "ViTConfig",
    "load",
    "mask_tokens",
]

KINDS: dict[str, type[SavedModel]] = {
    model.model_name: model
    for _, model in sorted(globals().items())
    if isinstance(model, type) and issubclass(model, SavedModel) and model is not SavedModel
}
"""Every kind of model, by its name in `config.json` and in the settings of a run."""


def load(path: str | Path) -> SavedModel:
    """Read a model of any kind from the folder that its `save` wrote.

    Raises:
        ValueError: as `Decoder.load`, or the model is of an unknown kind.
    """
    name = str(read_config(path)["model"])
    if name not in KINDS:
        raise ValueError(
            f"{path} holds a model of kind {name!r}, but must hold one of {', '.join(sorted(KINDS))}"
        )
    return KINDS[name].load(path)
