"""Replace the attention of a pretrained transformer by another mechanism that keeps the projections.

This works for the models of transformers whose attention is in `families`: Llama (also Mistral, Qwen2 and
Qwen3), GPT-2, BERT and ViT classes.
"""

import copy
import json
from collections.abc import Callable
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from unrolled.contract import UnsupportedError
from unrolled.folders import LINEARIZED
from unrolled.interop.hf import digest
from unrolled.interop.hf._cache_name import CACHE, OLD
from unrolled.interop.hf._packing import refuse_restarts
from unrolled.interop.hf.cache import StateCache, StateLayer
from unrolled.interop.hf.families import FAMILIES, class_name, is_softmax_attention, parts_of
from unrolled.interop.hf.hub import folder_of
from unrolled.interop.hf.linearized_attention import LinearizedAttention
from unrolled.interop.hf.weights import attempt

Model = TypeVar("Model", bound=PreTrainedModel)
RECORD = "unrolled_attention"
ORIGINAL_TYPE = "linearized_model_type"
PADDING_ONLY = "unrolled"  # name under which this implementation of attention is registered in transformers


def linearize(
    model: Model, attention: str = "linear", layers: list[int] | None = None, **options: object
) -> Model:
    """Replace the softmax attention of a model of transformers by a mechanism, in place; return the model.

    The projections keep their weights, bit for bit, under other names, and the model keeps its positions.
    Other parameters of a mechanism, such as a learned feature map, are new and need training: see `transfer`.
    With "softmax", the outputs do not change. There is no dropout on attention weights.

    A causal model with a recurrent mechanism then generates from states, in a `StateCache`: a replaced layer
    has a `StateLayer`, any other layer the growing cache of transformers. `save_pretrained` records the
    replacement in the config; load such a model with `load_linearized`. The `model_type` in the file is
    unknown to transformers, so its Auto classes refuse the folder instead of making a softmax model.

    Args:
        model: a model with softmax attention in the layers to be replaced.
        attention: name of the mechanism, one of `unrolled.attention.names()`.
        layers: numbers of the layers to replace, counted from 0; by default all layers.
        options: options of the mechanism, such as `feature_map="hedgehog"`. They must be JSON-serialisable,
            since they are saved in the config.

    Raises:
        ValueError: the mechanism, an option or a layer does not exist.
        UnsupportedError: the model is of another kind, or the mechanism cannot replace softmax in it.
    """
    found = _attention_modules(model)
    chosen = _chosen(found, layers)
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(
            f"options must be JSON-serialisable, since they are saved in the model's config: {error}"
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
    # Do not rename parameters of older checkpoints: the modules of their new names no longer exist.
    vars(model)["_weight_conversions"] = []
    _prepare_masks(model)
    _prepare_cache(model)
    return model


def linearized_layers(model: nn.Module) -> dict[str, LinearizedAttention]:
    """Return the replaced attention modules of a model, by their names and in their order."""
    return {name: each for name, each in model.named_modules() if isinstance(each, LinearizedAttention)}


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that softmax attention did not have, such as feature maps, by name."""
    found = {}
    for name, module in linearized_layers(model).items():
        for own, parameter in module.mechanism.named_parameters():
            if not own.startswith(("qkv_proj.", "out_proj.")):
                found[f"{name}.mechanism.{own}"] = parameter
    return found


def state_cache(model: PreTrainedModel) -> StateCache:
    """Make an empty cache for a linearized model: states for replaced layers, keys and values for others."""
    layers = list(DynamicCache(config=model.config).layers)
    for module in linearized_layers(model).values():
        layers[module.layer] = StateLayer()
    return StateCache(layers)


def load_linearized(path: str | Path) -> PreTrainedModel:
    """Load a linearized model that `save_pretrained` wrote, in its original class and in eval mode.

    Args:
        path: the folder of the model, or its name on the hub.

    Raises:
        ValueError: there is no such model, it was not linearized, or a file is missing or damaged.
    """
    folder = _folder(path)
    values = read_config(folder)
    record = values.pop(RECORD, None)
    if not record:
        raise ValueError(f"{path} was not linearized: load it with from_pretrained")
    if not _is_record(record):
        raise ValueError(f"{RECORD} in the config of {path} is damaged")
    original = values.pop(ORIGINAL_TYPE, values["model_type"])
    if original not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path} has the type {original!r}, which transformers does not have")
    values["model_type"] = original
    config = attempt(path, lambda: transformers.CONFIG_MAPPING[original].from_dict(values))
    architecture = class_name(config.architectures)
    kind = getattr(transformers, architecture, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(f"{path} has the class {architecture!r}, which is no model of transformers")
    made = attempt(path, lambda: kind._from_config(config, dtype=config.dtype))  # type: ignore[no-untyped-call]
    model: PreTrainedModel = made
    for i, done in record.items():
        linearize(model, done["attention"], [int(i)], **done["options"])
    _load_weights(model, folder)
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.train(False)
    return model


def read_config(source: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a model of transformers.

    Raises:
        ValueError: there is no such file, or it is damaged.
    """
    values: dict[str, Any]
    values, _ = attempt(source, lambda: PreTrainedConfig.get_config_dict(source))
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(
            f"{source} cannot be read as a model of transformers: it has no config with a model_type"
        )
    return values


def _is_record(record: object) -> bool:
    """Whether it is what `linearize` has written: for each layer, the mechanism and its options."""
    return isinstance(record, dict) and all(
        layer.isdecimal()
        and isinstance(done, dict)
        and isinstance(done.get("attention"), str)
        and isinstance(done.get("options"), dict)
        for layer, done in record.items()
    )


def _attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the attention modules of all layers with their names, replaced or not."""
    if hasattr(model, "merge_and_unload"):
        raise UnsupportedError(
            f"{type(model).__name__} is a wrapper of peft: give what its merge_and_unload() returns, or its "
            "get_base_model() if no attention layer has an adapter"
        )
    found = [
        (name, module)
        for name, module in model.named_modules()
        if is_softmax_attention(module) or isinstance(module, LinearizedAttention)
    ]
    if not found or not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} has no attention to replace; it must be a model of transformers with "
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
    """Give the model its own copy of its config, since other models may share the object."""
    shared, own = model.config, copy.deepcopy(model.config)
    kind: type = type(own)
    own.__class__ = _recording(kind)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            setattr(module, "config", own)  # noqa: B010  # Module has no such attribute for mypy


class _Recording:
    """A mixin that makes the config of a linearized model write another model type to its file."""

    model_type: str

    def to_dict(self) -> dict[str, object]:
        values: dict[str, object] = super().to_dict()  # type: ignore[misc]  # of the other base class
        return values | {"model_type": LINEARIZED, ORIGINAL_TYPE: self.model_type}

    def __reduce__(self) -> tuple[object, ...]:  # pickle cannot find its class by name
        return _restored, (type(self).__bases__[1], self.__dict__)


@cache
def _recording(kind: type) -> type:
    return kind if issubclass(kind, _Recording) else type(kind.__name__, (_Recording, kind), {})


def _restored(kind: type[PreTrainedConfig], values: dict[str, object]) -> PreTrainedConfig:
    plain: type = kind
    config: PreTrainedConfig = kind.__new__(_recording(plain))
    config.__dict__.update(values)
    return config


def _prepare_masks(model: PreTrainedModel) -> None:
    """If no softmax attention is left, let transformers pass a padding mask instead of one of T x S pairs."""
    if any(is_softmax_attention(module) for module in model.modules()):
        return
    model.config._attn_implementation = PADDING_ONLY


def _no_softmax_left(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    raise UnsupportedError("all layers of this model were linearized: it has no softmax attention")


def _padding_mask(
    *,
    kv_length: int,
    mask_function: Callable[..., object] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **further: object,
) -> Tensor | None:
    """Return `[B,S]`, True at tokens, or None; transformers calls this function in place of its own."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        are = "may be" if torch.compiler.is_compiling() else "are"  # their values are not known then
        raise UnsupportedError(
            f"the position_ids {are} those of packed sequences, which linearized attention cannot honour: "
            "put each sequence into a row of its own, or pass attention_mask"
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:]


# At import, since a process that unpickles a linearized model does not call `linearize`. transformers passes
# no mask to an implementation that it does not know.
transformers.AttentionInterface.register(PADDING_ONLY, _no_softmax_left)
transformers.AttentionMaskInterface.register(PADDING_ONLY, _padding_mask)


def _prepare_cache(model: PreTrainedModel) -> None:
    """Let a causal model start with a `StateCache`."""
    if not all(module.mechanism.causal for module in linearized_layers(model).values()):
        return
    model._is_stateful = True  # a state cannot be rolled back, so no assisted decoding
    if not any(hook is _start_with_states for hook in model.base_model._forward_pre_hooks.values()):
        model.base_model.register_forward_pre_hook(_start_with_states, with_kwargs=True)


def _start_with_states(
    module: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Make an empty `StateCache` if there is no cache, and turn an empty cache of transformers into one."""
    if len(args) > _place_of_cache(type(module).forward):
        return None  # the cache is passed by position; the layers check it
    name = OLD if OLD in kwargs else CACHE  # transformers renames the old name later, in `forward`
    given, use_cache = kwargs.get(name), kwargs.get("use_cache")
    if use_cache is None:
        use_cache = module.config.use_cache and not module.training
    if given is None and use_cache:
        if kwargs.get("attention_mask") is None:  # with a cache, transformers does not look at positions
            refuse_restarts("linearized attention", kwargs.get("position_ids"))
        given = state_cache(module)
    elif type(given) is DynamicCache and given.get_seq_length() == 0:
        kind: type = StateCache
        given.__class__ = kind  # in place, since the caller passes the same object to the next call
        vars(given).update(vars(state_cache(module)))
    return args, {**kwargs, name: given, "use_cache": use_cache}


@cache
def _place_of_cache(forward: Callable[..., object]) -> int:
    """Return the number of arguments of a model's `forward` before the cache, without `self`."""
    return list(signature(forward).parameters).index(CACHE) - 1


def _folder(path: str | Path) -> Path:
    from huggingface_hub.errors import HFValidationError

    try:
        return folder_of(path)
    except HFValidationError as error:
        raise ValueError(f"{path} is neither a folder nor the name of a model on the hub") from error
    except Exception as error:  # an error of requests, the hub or the system
        raise ValueError(
            f"{path} is not a folder, and no model of that name could be fetched: {error}"
        ) from error


def _load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load a model from one or more safetensors files, which must hold exactly its tensors."""
    files = digest.weights_files(folder)
    if not files:
        raise ValueError(f"{folder} has no model.safetensors")
    digest.check(files)
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    own = model.state_dict()
    for name in sorted(own.keys() & found.keys()):
        if own[name].shape != found[name].shape:
            raise ValueError(
                f"{name} in {folder} has shape {list(found[name].shape)}, "
                f"but must have {list(own[name].shape)}"
            )
    missing, unknown = model.load_state_dict(found, strict=False)
    missing = [name for name in missing if name not in model.all_tied_weights_keys]
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold the tensors of this model: it lacks {missing[:3]} and has the unknown "
            f"{unknown[:3]}"
        )
    model.tie_weights()
