"""Recipes: settings that were found to train well together, under one name.

`model.recipe=small-lm` stands for the settings below, in all sections; those that a run sets itself win.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

# A character model of less than a million weights.
_SMALL = {"d_model": 128, "n_layers": 4, "n_heads": 4}
_TRAIN = {"optimizer": "muon", "lr": 4e-3, "batch_size": 8, "bf16": True}

RECIPES: dict[str, Sections] = {
    # Katharopoulos et al. 2020: linear attention in every layer, learned positions. The fields' own defaults.
    "classic": {},
    # Linear attention with a short convolution and, in every second layer, a window.
    "small-lm": {
        "data": {"length": 256},
        "model": {
            **_SMALL,
            "positions": "rotary",
            "attention": ["linear", "window"],
            "attention_options": {"linear": {"conv": 4, "rotary": False}, "window": {"window": 32}},
        },
        "train": _TRAIN,
    },
    # The gated delta rule with a short convolution.
    "best-lm": {
        "data": {"length": 256},
        "model": {
            **_SMALL,
            "positions": "none",
            "attention": ["delta_net"],
            "attention_options": {"delta_net": {"conv": 4, "gated": True}},
        },
        "train": _TRAIN,
    },
}
"""The settings of each recipe by section. `attention` is repeated over the layers."""


def apply(sections: Sections) -> dict[str, dict[str, Any]]:
    """Replace `model.recipe`, if there is one, by its settings.

    Raises:
        ValueError: there is no recipe of that name.
    """
    own = dict(sections["model"])
    name = own.pop("recipe", "classic")
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"model.recipe is {name!r}, but must be one of {', '.join(RECIPES)}")
    given = {**sections, "model": own}
    found = {section: _merged(RECIPES[name].get(section, {}), given[section]) for section in given}
    model = found["model"]
    if RECIPES[name] and "attention" not in own:
        pattern, n = model["attention"], model["n_layers"]
        model["attention"] = [pattern[i % len(pattern)] for i in range(n if isinstance(n, int) else 1)]
    elif isinstance(options := model.get("attention_options"), dict):
        # options of the recipe's mechanisms, which the run has replaced
        kept = [*own.get("attention_options", {}), *_names(model.get("attention"))]
        model["attention_options"] = {key: value for key, value in options.items() if key in kept}
    return found


def _merged(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings`, in which those of `own` replace or, where both are sections, complete them."""
    found = dict(deepcopy(settings))
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found


def _names(attention: Any) -> list[Any]:
    return attention if isinstance(attention, list) else [attention]
