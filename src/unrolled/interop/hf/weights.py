"""Import the weights of models of transformers into models of this library, with equal outputs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeVar, cast

from unrolled.contract import UnsupportedError
from unrolled.extras import how_to_install
from unrolled.folders import of_transformers
from unrolled.interop.copying import Foreign, refuse_adapters
from unrolled.interop.hf import bert, hybrid, mamba, mamba2, perceiver, rwkv
from unrolled.interop.hf.families import class_name
from unrolled.models import Decoder, Encoder, PerceiverIO

Loaded = TypeVar("Loaded")

FAMILIES: dict[str, Callable[..., Decoder | Encoder | PerceiverIO]] = {
    "bert": bert.from_bert,
    "roberta": bert.from_roberta,
    "longformer": bert.from_longformer,
    "big_bird": bert.from_big_bird,
    "nystromformer": bert.from_nystromformer,
    "mamba": mamba.from_mamba,
    "mamba2": mamba2.from_mamba2,
    "perceiver": perceiver.from_perceiver,
    "qwen3_next": hybrid.from_qwen,
    "qwen3_5_text": hybrid.from_qwen,
    "olmo_hybrid": hybrid.from_olmo_hybrid,
    "rwkv": rwkv.from_rwkv,
}
REFUSED = {
    "qwen3_5": "it reads images too; import its language model, `Qwen3_5ForCausalLM.from_pretrained(source)`",
    "qwen3_5_moe": "its feed-forward layers are mixtures of experts",
    "qwen3_5_moe_text": "its feed-forward layers are mixtures of experts",
}
"""Families that are related to one in `FAMILIES`, and why they cannot be imported."""


def import_weights(source: object, **attention_options: object) -> Decoder | Encoder | PerceiverIO:
    """Make a model that computes the same as a model of transformers, with a copy of its weights.

    BERT, RoBERTa, Longformer, BigBird and Nyströmformer become an `Encoder`. A `...Model` becomes an encoder
    with output "hidden"; `...ForMaskedLM`, `...ForSequenceClassification`, `...ForTokenClassification` and
    `...ForQuestionAnswering` become encoders with the corresponding outputs. Perceivers for masked language
    modelling, for text classification and for images with Fourier features become a `PerceiverIO`.
    `MambaForCausalLM`, `Mamba2ForCausalLM`, `RwkvForCausalLM` and `OlmoHybridForCausalLM`, and without
    experts also `Qwen3NextForCausalLM` and `Qwen3_5ForCausalLM`, become a `Decoder`. The copy has the dtype,
    device and mode of the original. It has no dropout on attention weights.

    Args:
        source: a model of transformers; or the folder or hub name of one, read from safetensors only.
        attention_options: options of the attention mechanism that replace those of the original, such as
            `global_tokens=[0, 5]` for Longformer; hybrids take none.

    Raises:
        ValueError: `source` is neither of these, or cannot be read.
        UnsupportedError: the class, the head or a setting of the model has no counterpart here, or a layer
            has an adapter.
        ImportError: transformers is not installed.
    """
    model = _load(source) if isinstance(source, str | Path) else source
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family is None:
        raise ValueError(
            f"source is a {type(model).__name__}, but must be a model of transformers, a folder or a hub name"
        )
    _refuse_relative(family)
    if family not in FAMILIES:
        raise UnsupportedError(
            f"weights of {family!r} models cannot be imported; those of {sorted(FAMILIES)} can"
        )
    refuse_adapters(cast(Foreign, model))
    return FAMILIES[family](model, attention_options)


def _refuse_relative(family: str) -> None:
    if family in REFUSED:
        raise UnsupportedError(f"weights of {family!r} models cannot be imported: {REFUSED[family]}")


def _load(source: str | Path) -> object:
    """Load a model of the class in its config."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ImportError(f"reading models needs transformers: {how_to_install('hf')}") from error
    if (otherwise := of_transformers(Path(source))) is not None:
        raise ValueError(otherwise)
    config = attempt(source, lambda: transformers.AutoConfig.from_pretrained(str(source)))
    named = class_name(config.architectures)
    _refuse_relative(config.model_type)
    if config.model_type not in FAMILIES or not hasattr(transformers, named):
        raise UnsupportedError(
            f"{source} holds a {config.model_type!r} model of the class {named!r}, but must be one of "
            f"{sorted(FAMILIES)}"
        )
    read = getattr(transformers, named).from_pretrained
    model: object
    model, found = attempt(source, lambda: read(str(source), use_safetensors=True, output_loading_info=True))
    # Transformers would initialise them at random. The pooler of a `...Model` is not copied.
    if missing := sorted(name for name in found["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(f"{source} lacks {len(missing)} tensors of a {named}, the first is {missing[0]!r}")
    return model


def attempt(source: str | Path, read: Callable[[], Loaded], what: str = "a model of transformers") -> Loaded:
    """Call `read`, a function of transformers.

    Raises:
        ValueError: it failed; for a damaged file, transformers raises errors of many types.
        ImportError: a library is not installed.
    """
    try:
        return read()
    except ImportError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{source} cannot be read as {what}: {reason}") from error
