"""Recipes: settings that were found to train well together, under one name.

`model.recipe=small-lm` stands for the settings below, in all sections. Settings of the run override those of
the recipe. Each data set has a default recipe. All recipes but `classic` train in bf16 where the device
multiplies bf16 matrices faster than fp32 ones.
"""

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Sections = Mapping[str, Mapping[str, Any]]

# What most recipes have in common.
_SMALL = {"d_model": 128, "n_layers": 4, "n_heads": 4}

# Models this small see a text of a megabyte several times. Weight decay keeps them from learning it by heart;
# dropout slows them down.
_TEXT = {
    "steps": 3000,
    "optimizer": "muon",
    "lr": 4e-3,
    "weight_decay": 1.0,
    "batch_size": 8,
    "eval_every": 750,
}


def _for_text(**model: object) -> Sections:
    """Return a recipe for text with these settings of the model."""
    # The feed-forward layers of RWKV, which read the token before too, lower the loss.
    shared = {**_SMALL, "d_model": 192, "activation": "channel_mix"}
    return {"data": {"length": 256}, "model": {**shared, **model}, "train": _TEXT}


def _with_windows(mechanism: str, **options: object) -> Sections:
    """Return a recipe for text with a mechanism and, in every second layer, a window."""
    return _for_text(
        positions="rotary",
        attention=[mechanism, "window"],
        attention_options={mechanism: {"rotary": False, **options}, "window": {"window": 32}},
    )


RECIPES: dict[str, Sections] = {
    # Katharopoulos et al. 2020: linear attention in every layer, learned positions. The fields' own defaults.
    "classic": {},
    # RWKV-4, with biases in its attention.
    "rwkv-lm": _for_text(
        positions="rotary",  # of mechanisms that replace this one
        attention=["rwkv4"],
        attention_options={"rwkv4": {"rotary": False}},
    ),
    "small-lm": _with_windows("mamba2"),
    "best-lm": _with_windows("delta_net", conv=4, gated=True),
    # Linear attention and windows in turn; every pixel knows its row and its column.
    "pixels": {
        "model": {
            **_SMALL,
            "positions": "axial",
            "attention": ["linear", "window"],
            "attention_options": {"window": {"window": 64}},
        },
        "train": {"optimizer": "muon", "lr": 4e-3, "batch_size": 4, "weight_decay": 0.01},
    },
    # Windows of 0.3 seconds to each side and linear attention in turn; 19 passes over AN4.
    "speech": {
        "model": {
            "n_layers": 4,
            "positions": "rotary",
            "attention": ["window", "linear"],
            "attention_options": {"window": {"window": 16}},
        },
        "train": {"steps": 1100, "optimizer": "muon", "lr": 4e-3, "weight_decay": 0.05, "eval_every": 550},
    },
}
"""The settings of each recipe by section. `attention` is repeated over the layers."""


def names_for(kind: str) -> list[str]:
    """List the recipes for a kind of model."""
    others = {"decoder": [name for name in RECIPES if name != "speech"], "transcriber": ["classic", "speech"]}
    return others.get(kind, ["classic"])


def apply(
    name: str, sections: Sections, data_options: Collection[str], device: "torch.device"
) -> dict[str, dict[str, Any]]:
    """Complete the sections of a run by a recipe; it only sets `data` options that the data set has."""
    own = {key: value for key, value in sections["model"].items() if key != "recipe"}
    recipe = RECIPES[name]
    if "train" in recipe:
        from unrolled.ops.processor import multiplies_bf16

        recipe = {**recipe, "train": {"bf16": multiplies_bf16(device), **recipe["train"]}}
    settings = dict(recipe) | {"data": {k: v for k, v in recipe.get("data", {}).items() if k in data_options}}
    if isinstance(by_layer := own.get("layer_options"), dict) and "model" in settings:
        settings["model"] = _without(settings["model"], by_layer)
    given = {**sections, "model": own}
    found = {section: _merged(settings.get(section, {}), given[section]) for section in given}
    model = found["model"]
    if recipe and "attention" not in own:
        pattern, n = model["attention"], model["n_layers"]
        model["attention"] = [pattern[i % len(pattern)] for i in range(n if isinstance(n, int) else 1)]
    if recipe and "positions" not in own and model.get("positions") == "rotary":
        model["attention_options"] = _not_rotated(model)
    if isinstance(options := model.get("attention_options"), dict):
        # leave out the options of mechanisms that the run replaces, or has too few layers for
        attention = model.get("attention")
        kept = [
            *own.get("attention_options", {}),
            *(attention if isinstance(attention, list) else [attention]),
        ]
        model["attention_options"] = {key: value for key, value in options.items() if key in kept}
    return found


def _not_rotated(model: Mapping[str, Any]) -> Any:
    """Return the options of attention, with which mechanisms that cannot rotate need no rotary positions."""
    from unrolled import attention

    options, names = model.get("attention_options"), model.get("attention")
    if not isinstance(options, dict):
        return options
    chosen = [name for name in attention.names() if name in (names if isinstance(names, list) else [names])]
    unrotated = {name: {"rotary": False} for name in chosen if attention.load(name).no_rotary is not None}
    return _merged(unrotated, options)


def _without(model: Mapping[str, Any], by_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a model without the options of mechanisms that a run sets layer by layer."""
    options = deepcopy(model["attention_options"])
    for mechanism, its in by_layer.items():
        for key in its if isinstance(its, dict) else ():
            options.get(mechanism, {}).pop(key, None)
    return {**model, "attention_options": options}


def _merged(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` updated by `own`; where both have a section, the sections are merged too."""
    found = dict(deepcopy(settings))
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found
