"""Transformers made from a config, with any attention mechanism of `unrolled.attention`."""

from pathlib import Path

from unrolled.models.decoder import Decoder, DecoderConfig, DecoderState
from unrolled.models.encoder import Encoder, EncoderConfig, mask_tokens
from unrolled.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, EncoderDecoderState
from unrolled.models.luong_seq2seq import LuongSeq2Seq, LuongSeq2SeqConfig
from unrolled.models.non_local import NonLocalBlock
from unrolled.models.perceiver import Perceiver, PerceiverConfig, PerceiverIO, PerceiverIOConfig
from unrolled.models.perceiver_ar import PerceiverAR, PerceiverARConfig
from unrolled.models.recurrent_lm import RecurrentLM, RecurrentLMConfig, RecurrentLMState
from unrolled.models.rnn_seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig
from unrolled.models.saving import read_config
from unrolled.models.vit import ViT, ViTConfig

__all__ = [
    "KINDS",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderState",
    "LuongSeq2Seq",
    "LuongSeq2SeqConfig",
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
    "RecurrentLMState",
    "ViT",
    "ViTConfig",
    "load",
    "mask_tokens",
]

Model = (
    Decoder
    | Encoder
    | EncoderDecoder
    | LuongSeq2Seq
    | Perceiver
    | PerceiverIO
    | RNNSeq2Seq
    | RecurrentLM
    | ViT
)
KINDS: dict[str, type[Model]] = {
    m.model_name: m
    for m in (
        Decoder,
        Encoder,
        EncoderDecoder,
        LuongSeq2Seq,
        Perceiver,
        PerceiverAR,
        PerceiverIO,
        RNNSeq2Seq,
        RecurrentLM,
        ViT,
    )
}
"""Every kind of model, by the name that its folder and a run's settings call it."""


def load(path: str | Path) -> Model:
    """Read a model of any kind from the folder that its `save` wrote.

    Raises:
        ValueError: as `Decoder.load`, or the folder's model is of an unknown kind.
    """
    name = read_config(path)["model"]
    if name not in KINDS:
        raise ValueError(f"{path} holds a model of the kind {name!r}, wanted one of {sorted(KINDS)}")
    return KINDS[name].load(path)
