"""Transformers made from a config, with any attention mechanism of `unrolled.attention`."""

from pathlib import Path

from unrolled.models.decoder import Decoder, DecoderConfig, DecoderState
from unrolled.models.encoder import Encoder, EncoderConfig, mask_tokens
from unrolled.models.saving import read_config

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "Encoder",
    "EncoderConfig",
    "load",
    "mask_tokens",
]


def load(path: str | Path) -> Decoder | Encoder:
    """Read a model of any kind from the folder that its `save` wrote.

    Raises:
        ValueError: as `Decoder.load`, or the folder's model is of an unknown kind.
    """
    kinds: dict[str, type[Decoder] | type[Encoder]] = {m.model_name: m for m in (Decoder, Encoder)}
    name = read_config(path)["model"]
    if name not in kinds:
        raise ValueError(f"{path} holds a model of the kind {name!r}, wanted one of {sorted(kinds)}")
    return kinds[name].load(path)
