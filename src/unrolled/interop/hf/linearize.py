"""A pretrained transformer with another attention: modules are swapped, projections kept.

The models are those of transformers whose attention `families` knows: Llama (also Mistral, Qwen2 and Qwen3),
GPT-2, BERT and ViT classes.
"""

import copy
import json
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from unrolled.contract import UnsupportedError
from unrolled.interop.hf import digest
from unrolled.interop.hf.cache import StateCache, StateLayer
from unrolled.interop.hf.families import FAMILIES, class_name, is_softmax_attention, parts_of
from unrolled.interop.hf.linearized_attention import LinearizedAttention

Model = TypeVar("Model", bound=PreTrainedModel)
RECORD = "unrolled_attention"
MODEL_TYPE, ORIGINAL_TYPE = "unrolled-linearized", "linearized_model_type"
PADDING_ONLY = "unrolled"  # our name among transformers' implementations of attention


def linearize(
    model: Model, attention: str = "linear", layers: list[int] | None = None, **options: Any
) -> Model:
    """Replace the softmax attention of a model of transformers by a mechanism, in place; return the model.

    The projections keep their weights, bit for bit, under other names, and the model keeps its positions. All
    else that a mechanism has, such as a learned feature map, is new, and is to be trained: see `transfer`.
    With "softmax" the outputs stay what they were. Dropout of attention weights falls away.

    A causal model with a recurrent mechanism then generates from states, in a `StateCache`: a layer that was
    replaced has a `StateLayer`, one that was kept the growing cache of transformers. `save_pretrained` writes
    into the config what was done; read it back by `load_linearized`. The `model_type` written is one that
    transformers does not know, so that its Auto classes refuse the folder rather than make a softmax model.

    Args:
        model: a model whose attention is softmax attention, or was so far, in the layers to be replaced.
        attention: a name in `unrolled.attention.names()`.
        layers: which layers, counted from 0; all of them by default.
        options: of the mechanism, such as `feature_map="hedgehog"`; they go into the config, so JSON must be
            able to say them.

    Raises:
        ValueError: an unknown mechanism, option or layer.
        UnsupportedError: a model of another kind, or a mechanism that cannot take softmax's place in it.
    """
    found = _attention_modules(model)
    chosen = _chosen(found, layers)
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(
            f"options go into the model's config, so JSON must be able to say them: {error}"
        ) from error
    swapped = {
        i: LinearizedAttention(parts_of(found[i][1]), attention, i, options).train(found[i][1].training)
        for i in chosen
    }
    for i, module in swapped.items():
        parent, _, name = found[i][0].rpartition(".")
        setattr(model.get_submodule(parent), name, module)
    _own_config(model)
    record = dict(getattr(model.config, RECORD, None) or {})
    record |= {str(i): {"attention": attention, "options": options} for i in chosen}
    setattr(model.config, RECORD, dict(sorted(record.items(), key=lambda item: int(item[0]))))
    saved: Any = model
    saved._weight_conversions = []  # none: names of older checkpoints would not be found when it is read
    _prepare_masks(model)
    _prepare_cache(model)
    return model


def linearized_layers(model: nn.Module) -> dict[str, LinearizedAttention]:
    """Return the replaced attention modules of a model, by their names and in their order."""
    return {name: each for name, each in model.named_modules() if isinstance(each, LinearizedAttention)}


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what the mechanisms have and softmax attention had not, such as feature maps, by name."""
    found = {}
    for name, module in linearized_layers(model).items():
        for own, parameter in module.mechanism.named_parameters():
            if not own.startswith(("qkv_proj.", "out_proj.")):
                found[f"{name}.mechanism.{own}"] = parameter
    return found


def state_cache(model: PreTrainedModel) -> StateCache:
    """Make an empty cache for a linearized model: states where layers were replaced, else keys and values."""
    layers: list[Any] = list(DynamicCache(config=model.config).layers)
    for module in linearized_layers(model).values():
        layers[module.layer] = StateLayer()
    return StateCache(layers)


def load_linearized(path: str | Path) -> Any:
    """Read a model that was linearized and saved by `save_pretrained`: the class it had, in eval mode.

    Args:
        path: its folder, or its name on the hub.

    Raises:
        ValueError: there is no such model, it was not linearized, or a file is missing or damaged.
    """
    folder = _folder(path)
    try:
        said, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the folder of a model of transformers: {error}") from error
    if "model_type" not in said:
        raise ValueError(f"{path} is not the folder of a model of transformers: it has no config of one")
    record = said.pop(RECORD, None)
    if not record:
        raise ValueError(f"{path} was not linearized: read it by from_pretrained")
    original = said.pop(ORIGINAL_TYPE, said["model_type"])
    if original not in CONFIG_MAPPING:
        raise ValueError(f"{path} is of the type {original!r}, which transformers has not")
    config = CONFIG_MAPPING[original].from_dict(said | {"model_type": original})
    architecture = class_name(config.architectures)
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ValueError(f"{path} is of the class {architecture!r}, which transformers has not")
    model = kind._from_config(config, dtype=config.dtype)
    for i, done in record.items():
        linearize(model, done["attention"], [int(i)], **done["options"])
    _load_weights(model, folder)
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name the attention of each layer in order, be it replaced or not."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if is_softmax_attention(module) or isinstance(module, LinearizedAttention)
    ]
    if not found or not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} has no attention to replace; it must be one of transformers with "
            f"{', '.join(FAMILIES)}"
        )
    return found


def _chosen(found: list[tuple[str, nn.Module]], layers: list[int] | None) -> list[int]:
    chosen = list(range(len(found))) if layers is None else list(layers)
    if not chosen or len(set(chosen)) != len(chosen) or any(i not in range(len(found)) for i in chosen):
        raise ValueError(f"layers is {layers}, but must be different numbers from 0 to {len(found) - 1}")
    for i in chosen:
        if isinstance(found[i][1], LinearizedAttention):
            raise ValueError(f"layer {i} was replaced before: name the others by layers=[...]")
    return chosen


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a config of its own: other models may have been made from the same object."""
    shared, own = model.config, copy.deepcopy(model.config)
    kind: Any = type(own)
    own.__class__ = _recording(kind)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if getattr(module, "config", None) is shared:
            module.config = own


class _Recording:
    """What a config of a linearized model says of itself in a file: that it is another type of model."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        said: dict[str, Any] = super().to_dict()  # type: ignore[misc]  # of the config beside this class
        return said | {"model_type": MODEL_TYPE, ORIGINAL_TYPE: self.model_type}

    def __reduce__(self) -> Any:  # its class has no name that pickle could find, as when a process is spawned
        return _restored, (type(self).__bases__[1], self.__dict__)


@cache
def _recording(kind: type[Any]) -> type[Any]:
    return kind if issubclass(kind, _Recording) else type(kind.__name__, (_Recording, kind), {})


def _restored(kind: Any, values: dict[str, Any]) -> Any:
    config = kind.__new__(_recording(kind))
    config.__dict__.update(values)
    return config


def _prepare_masks(model: PreTrainedModel) -> None:
    """Where no softmax attention is left, let transformers hand on a padding mask, linear in the length."""
    if any(is_softmax_attention(module) for module in model.modules()):
        return
    AttentionInterface.register(PADDING_ONLY, _no_softmax_left)
    AttentionMaskInterface.register(PADDING_ONLY, _padding_mask)
    model.config._attn_implementation = PADDING_ONLY


def _no_softmax_left(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("this model was linearized throughout, and has no softmax attention to compute")


def _padding_mask(
    *,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **further: Any,
) -> Tensor | None:
    """Give `[B,S]`, True = a token, or None; called by transformers in the place of a mask `[B,1,T,S]`."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise UnsupportedError(
            "the position_ids are those of packed sequences, which linearized attention cannot honour: give "
            "each sequence a row of its own, or pass attention_mask"
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def _prepare_cache(model: PreTrainedModel) -> None:
    """Let a causal model begin with a `StateCache`."""
    if not all(module.mechanism.causal for module in linearized_layers(model).values()):
        return
    model._is_stateful = True  # a state cannot be taken back, so no assisted decoding
    if not any(hook is _begin_with_states for hook in model.base_model._forward_pre_hooks.values()):
        model.base_model.register_forward_pre_hook(_begin_with_states, with_kwargs=True)


def _begin_with_states(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Replace an empty cache of transformers, or a missing one, by an empty `StateCache`."""
    if len(args) > _place_of_cache(module.__class__):
        return None  # the caller's own; the layers check it
    given, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
    if use_cache is None:
        use_cache = module.config.use_cache and not module.training
    if (given is None and use_cache) or (type(given) is DynamicCache and given.get_seq_length() == 0):
        given = state_cache(module)
    return args, {**kwargs, "past_key_values": given, "use_cache": use_cache}


@cache
def _place_of_cache(kind: type[Any]) -> int:
    """Tell how many arguments of a model's `forward` come before the cache, `self` not counted."""
    return list(signature(kind.forward).parameters).index("past_key_values") - 1


def _folder(path: str | Path) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"])
        )
    except HFValidationError as error:
        raise ValueError(f"{path} is neither a folder nor the name of a model on the hub") from error
    except Exception as error:  # of requests, of the hub or of the system: all mean that it is out of reach
        raise ValueError(
            f"{path} is no folder, and no model of that name could be fetched: {error}"
        ) from error


def _load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Fill a model from safetensors files, whole or in shards, in exactly its tensors."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no model.safetensors")
    digest.check(folder)
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    wanted = model.state_dict()
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name].shape != found[name].shape:
            raise ValueError(
                f"{name} in {folder} has shape {list(found[name].shape)}, "
                f"but must have {list(wanted[name].shape)}"
            )
    missing, unknown = model.load_state_dict(found, strict=False)
    missing = [name for name in missing if name not in model.all_tied_weights_keys]
    if missing or unknown:
        raise ValueError(
            f"{folder} has not the tensors of this model: lacks {missing[:3]}, has {unknown[:3]} besides"
        )
    model.tie_weights()
