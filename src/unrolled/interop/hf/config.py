"""The config of this library's models for transformers: the same fields under the same names."""

from copy import deepcopy
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from unrolled.folders import CONVERTED
from unrolled.interop.hf._cache_name import CACHE
from unrolled.models import DecoderConfig, EncoderConfig
from unrolled.models.config import TransformerConfig

# Fields that follow from the class of the model: its output, and that its inputs are token ids.
BY_CLASS = ("output", "input_dim")
THEIRS = {f.name for f in fields(PreTrainedConfig)} | {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
}
"""Keys that transformers itself adds to any config, besides those that end in "_token_id"."""


class UnrolledConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """The config of a model of this library, for transformers.

    It takes every field of `DecoderConfig` and `EncoderConfig` by its own name, except `output` and
    `input_dim`, which follow from the class of the model. The names that transformers has for some fields
    work too: `hidden_size`, `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`,
    `intermediate_size`, `max_position_embeddings`, `tie_word_embeddings` and, for `n_classes`, `num_labels`.

        config = UnrolledConfig(vocab_size=65, d_model=128, attention="linear")

    Args:
        use_cache: the default of `use_cache` in a forward pass without labels.
        is_decoder: whether an `UnrolledModel` of this config is a decoder or an encoder; the other classes
            set it.
        given: these fields, and those that transformers adds to any config, such as `id2label`.

    Raises:
        ValueError: a field is unknown, given by two names, or out of range.
    """

    model_type = CONVERTED
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_ff",
        "tie_word_embeddings": "tie_embeddings",
        "n_classes": "num_labels",
        # Stored under the name that transformers has: there, `max_length` is the length to generate.
        "max_length": "max_position_embeddings",
    }
    max_length: int = TransformerConfig.max_length  # declared, since transformers would refuse it otherwise
    __eq__ = PreTrainedConfig.__eq__

    def __init__(self, *, use_cache: bool = True, is_decoder: bool = True, **given: Any) -> None:
        ours = _fields_of_both()
        values = {name: _default(field) for name, field in ours.items()}
        theirs: dict[str, Any] = {}
        seen: dict[str, str] = {}
        to_ours = {alias: name for alias, name in self.attribute_map.items() if name in ours}
        to_ours |= {"max_position_embeddings": "max_length", "n_classes": "num_labels"}
        for key, value in given.items():
            name = to_ours.get(key, key)
            if name in seen:
                raise ValueError(
                    f"{key} and {seen[name]} are the same field, but only one of them must be given"
                )
            seen[name] = key
            if name in ours:
                values[name] = value
            elif _is_theirs(name):
                theirs[name] = value
            else:
                near = get_close_matches(key, [*ours, *to_ours], n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(
                    f"{key} is not a field of UnrolledConfig: {hint}The fields are {', '.join(sorted(ours))}"
                )
        common = {f.name for f in fields(TransformerConfig)}
        checked = TransformerConfig(**{name: values[name] for name in common})
        if theirs.get("num_labels", ...) is None:
            del theirs["num_labels"]  # None stands for the default
        super().__init__(**theirs)
        self.use_cache = use_cache
        self.is_decoder = is_decoder
        for name, value in values.items():
            setattr(self, name, getattr(checked, name) if name in common else value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "UnrolledConfig":
        """Make a config from a dict that `save_pretrained` wrote, which has every field.

        Raises:
            ValueError: as the constructor, or a field is missing.
        """
        given = {cls.attribute_map.get(key, key) for key in config_dict}
        names = {cls.attribute_map.get(name, name) for name in _fields_of_both()}
        if missing := sorted(names - given):
            raise ValueError(f"config.json lacks the keys {missing}: it is not as it was saved")
        return super().from_dict(config_dict, **kwargs)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the config; see `PreTrainedConfig.save_pretrained`.

        Raises:
            ValueError: it has an attribute that `from_pretrained` would refuse.
        """
        known = {
            self.attribute_map.get(name, name) for name in (*_fields_of_both(), "use_cache", "is_decoder")
        }
        for key in self.to_dict():
            if self.attribute_map.get(key, key) not in known and not _is_theirs(key):
                raise ValueError(
                    f"the config has an attribute {key}, which is not a field of UnrolledConfig: delete it, "
                    "since the saved folder could not be loaded"
                )
        super().save_pretrained(save_directory, **kwargs)

    def decoder_config(self) -> DecoderConfig:
        """Return the config of the `Decoder` with these fields.

        Raises:
            ValueError: a field is out of range, or is set although only encoders have it.
        """
        return DecoderConfig(**self._of(DecoderConfig))

    def encoder_config(self, output: str) -> EncoderConfig:
        """Return the config of the `Encoder` with these fields and `output`.

        Args:
            output: "classification", "masked" or "hidden".

        Raises:
            ValueError: a field is out of range, or is set although only decoders have it.
        """
        values = self._of(EncoderConfig) | {"output": output}
        values["n_classes"] = self.num_labels if output == "classification" else None
        values["tie_embeddings"] = self.tie_embeddings and output == "masked"
        if output == "hidden":
            values |= {"head_hidden": None, "output_bias": None}
        return EncoderConfig(**values)

    def _of(self, kind: type[TransformerConfig]) -> dict[str, Any]:
        own = {f.name for f in fields(kind)}
        for name, field in _fields_of_both().items():
            if name not in own and (value := getattr(self, name)) != _default(field):
                model = "a decoder" if kind is DecoderConfig else "an encoder"
                raise ValueError(f"{name} is {value!r}, but {model} has no such field; leave it out")
        return {name: deepcopy(getattr(self, name)) for name in own - {*BY_CLASS}}


def _is_theirs(name: str) -> bool:
    """Whether transformers may add a key of this name to any config."""
    return name in THEIRS or name.endswith("_token_id") or name.startswith("_")


def _fields_of_both() -> dict[str, Field[object]]:
    """The fields of both configs by name, without `n_classes`, which transformers stores as `num_labels`."""
    found = {f.name: f for f in (*fields(EncoderConfig), *fields(DecoderConfig))}
    return {name: f for name, f in found.items() if name not in (*BY_CLASS, "n_classes")}


def _default(field: "Field[object]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
