"""Convert models to this library's classes for transformers and back, and load models of these classes."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from unrolled.contract import UnsupportedError
from unrolled.data import Vocabulary, byte_letters
from unrolled.files import read_object
from unrolled.folders import CONFIG_FILE, of_transformers
from unrolled.interop.copying import refuse_adapters
from unrolled.interop.hf._model import UnrolledPreTrainedModel
from unrolled.interop.hf.causal_lm import UnrolledForCausalLM
from unrolled.interop.hf.config import BY_CLASS, UnrolledConfig
from unrolled.interop.hf.families import class_name
from unrolled.interop.hf.masked_lm import UnrolledForMaskedLM
from unrolled.interop.hf.model import UnrolledModel
from unrolled.interop.hf.sequence_classification import UnrolledForSequenceClassification
from unrolled.models import Decoder, Encoder, PerceiverAR
from unrolled.models.saving import SavedModel

END = "<|end|>"
SETTINGS_FILE = "transformers.json"
"""The document of a converted model with its settings that only transformers uses."""
OF_LABELS = ("id2label", "label2id", "problem_type")
CLASSES = (UnrolledForCausalLM, UnrolledForMaskedLM, UnrolledForSequenceClassification, UnrolledModel)
ENCODERS = {
    "classification": UnrolledForSequenceClassification,
    "masked": UnrolledForMaskedLM,
    "hidden": UnrolledModel,
}


def to_transformers(model: SavedModel) -> UnrolledPreTrainedModel:
    """Make a model for transformers with a copy of the weights of a `Decoder` or `Encoder`.

    A model of `from_transformers` gets back its generation config, and its labels and their `problem_type`.

    Returns:
        An `UnrolledForCausalLM` for a decoder; for an encoder, an `UnrolledForSequenceClassification`,
        `UnrolledForMaskedLM` or `UnrolledModel`, depending on its output.

    Raises:
        UnsupportedError: `model` is another model, or an encoder of continuous inputs or with output
            "tokens".
    """
    if not isinstance(model, Decoder | Encoder) or isinstance(model, PerceiverAR):
        raise UnsupportedError(
            f"a {type(model).__name__} has no class for transformers; use a Decoder or an Encoder instead"
        )
    values = {name: value for name, value in asdict(model.config).items() if name not in BY_CLASS}
    kind: type[UnrolledPreTrainedModel] = UnrolledForCausalLM
    if isinstance(model, Encoder):
        if model.config.vocab_size is None or model.config.output not in ENCODERS:
            raise UnsupportedError(
                f"an encoder with input_dim {model.config.input_dim} and output {model.config.output!r} has "
                f"no class for transformers; use one of tokens, with output {' or '.join(ENCODERS)}, instead"
            )
        kind = ENCODERS[model.config.output]
    settings = cast("dict[str, dict[str, Any]]", model.documents.get(SETTINGS_FILE, {}))
    of_labels = settings.get("config", {})
    converted = kind(UnrolledConfig(**values, **of_labels, is_decoder=isinstance(model, Decoder)))
    converted.model = deepcopy(model)
    converted.model.documents.pop(SETTINGS_FILE, None)
    converted.config.dtype = next(model.parameters()).dtype
    converted.train(model.training)
    if "generation_config" in settings:
        converted.generation_config = GenerationConfig.from_dict(settings["generation_config"])
    return converted


def from_transformers(model: PreTrainedModel) -> Decoder | Encoder:
    """Make a `Decoder` or `Encoder` with a copy of the weights of one of the classes here for transformers.

    The generation config, or the labels, are kept among its `documents`.

    Raises:
        UnsupportedError: `model` is of another class, a decoder without its output layer, or has an adapter.
    """
    if not isinstance(model, UnrolledPreTrainedModel):
        raise UnsupportedError(
            f"a {type(model).__name__} holds no model of this library; use one of its own classes instead"
        )
    if isinstance(model, UnrolledModel) and model.config.is_decoder:
        raise UnsupportedError(
            "an UnrolledModel lacks its decoder's output layer; use an UnrolledForCausalLM instead"
        )
    refuse_adapters(model)
    converted = deepcopy(model.model)
    if isinstance(model, UnrolledForCausalLM):
        generation = json.loads(model.generation_config.to_json_string())
        converted.documents[SETTINGS_FILE] = {"generation_config": generation}
    elif isinstance(model, UnrolledForSequenceClassification):
        labels = {name: getattr(model.config, name) for name in OF_LABELS}
        converted.documents[SETTINGS_FILE] = {"config": labels}
    return converted


def is_saved_by_transformers(path: str | Path) -> bool:
    """Whether the folder `path` holds a model of transformers, of this library or not."""
    return "model_type" in read_object(Path(path) / CONFIG_FILE)


def load(path: str | Path) -> UnrolledPreTrainedModel:
    """Read a model of any of the classes here for transformers from a folder that `save_pretrained` wrote.

    Raises:
        ValueError: the folder holds no such model, or it is damaged.
    """
    values = read_object(Path(path) / CONFIG_FILE)
    if (found := values.get("model_type")) != UnrolledConfig.model_type:
        otherwise = f"{path} holds a model of type {found!r}, but must hold {UnrolledConfig.model_type!r}"
        raise ValueError(of_transformers(Path(path)) or otherwise)
    by_name = {kind.__name__: kind for kind in CLASSES}
    name = class_name(values.get("architectures"))
    if name not in by_name:
        raise ValueError(f"{path} holds a model of class {name!r}, but must hold one of {sorted(by_name)}")
    try:
        model: UnrolledPreTrainedModel = by_name[name].from_pretrained(path)
    except (ValueError, UnsupportedError, OSError, TypeError) as error:  # also those of transformers
        raise ValueError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    return model


def character_tokenizer(characters: Sequence[str] | None) -> PreTrainedTokenizerFast:
    """Make a tokenizer with the ids of a text data set, and one more id for padding and the end.

    Args:
        characters: the characters in the order of their ids; None for the bytes of UTF-8.

    Returns:
        A tokenizer that pads on the left, as generation needs. The symbol for padding and the end is
        "<|end|>". It is outside the model's vocabulary, and `UnrolledForCausalLM` treats it as padding, also
        where a text contains it: call the tokenizer with `split_special_tokens=True` to read its characters.
        There is no symbol for unknown characters: a character outside the vocabulary is an error.
    """
    if characters is None:
        tokenizer = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        size = 256
    else:
        ids = {character: i for i, character in enumerate(characters)}
        tokenizer = Tokenizer(models.WordLevel(ids))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        size = len(ids)
    made = _of_transformers(tokenizer, END)
    assert made.pad_token_id == size
    return made


def text_tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Convert the tokenizer that a model was trained with to a tokenizer of transformers.

    It pads on the left with the symbol that ends a document. If there is none, it pads with "<|end|>", which
    is outside the model's vocabulary.

    Args:
        vocabulary: a vocabulary of the kind "tokenizer".
    """
    tokenizer = vocabulary.text_tokenizer
    end = END if tokenizer.end is None else tokenizer.name(tokenizer.end)
    return _of_transformers(Tokenizer.from_str(tokenizer.to_json()), end)


def _of_transformers(tokenizer: Tokenizer, end: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
