"""Experiments from the contents of their files, which are checked."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

from unrolled.experiments.definition import SEED, SMOKE, SPECTRUM, Experiment, merged, not_in_names
from unrolled.ops.options import at_least

_KINDS = {
    **dict.fromkeys(("base", "contenders", "budget", "published", "sweep", "evaluate", "scales"), dict),
    **dict.fromkeys(("expect", "seeds"), list),
    **dict.fromkeys(("claim", "paper", "horizontal", "finding"), str),
}


def made_of(values: Mapping[str, Any], source: Path) -> Experiment:
    """Make an experiment from the values in its file.

    Raises:
        ValueError: a key is unknown or missing, a value has another type, or an expectation is wrong.
    """
    _check_keys(values, source)
    _check_names(values, source)
    given = dict(values)
    given["published"] = {name: str(x) for name, x in values.get("published", {}).items()}
    given["contenders"] = {name: settings or {} for name, settings in values["contenders"].items()}
    given["scales"] = {name: settings or {} for name, settings in values.get("scales", {"full": {}}).items()}
    if given.get("horizontal", "step") not in ("step", "seconds", "evaluate"):
        raise ValueError(
            f"horizontal of {source} is {given['horizontal']!r}, but must be 'step', 'seconds' or 'evaluate'"
        )
    if given.get("horizontal") == "evaluate" and "evaluate" not in given:
        raise ValueError(f"horizontal of {source} is 'evaluate', but must not be without further evaluations")
    for part in ("contenders", "scales", "evaluate"):
        for name, settings in given.get(part, {}).items():
            _check_settings(f"{name} in {part} of {source}", settings, part)
    _check_varied(str(source), given)
    for name, settings in given["scales"].items():
        _check_varied(f"{name} in scales of {source}", settings)
    everywhere = set(given.get("sweep", {}))
    of_scales = {name: everywhere | set(x.get("sweep", {})) for name, x in given["scales"].items()}
    _check_free("base", source, given["base"], everywhere)
    for name, settings in given["scales"].items():
        _check_free(f"{name} in scales", source, settings, of_scales[name])
    for name, settings in given["contenders"].items():
        _check_free(f"{name} in contenders", source, settings, everywhere.union(*of_scales.values()))
    for name in ("expect", "seeds"):
        if name in given:
            given[name] = tuple(given[name])
    experiment = Experiment(source.stem, **given)
    try:
        experiment.expectations  # noqa: B018  # parses them
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    _check_distinct(experiment, source)
    return experiment


def _check_distinct(experiment: Experiment, source: Path) -> None:
    """Raise ValueError if a scale sets all that tells two contenders apart."""
    for scale in experiment.scales:
        at = experiment.at(scale)
        values = {name: merged(at.base, settings) for name, settings in at.contenders.items()}
        for one, other in combinations(values, 2):
            if values[one] == values[other] and experiment.contenders[one] != experiment.contenders[other]:
                raise ValueError(
                    f"{one} and {other} in contenders of {source} are the same at the scale {scale}, which "
                    "sets for all contenders what tells them apart"
                )


def _check_keys(values: Mapping[str, Any], source: Path) -> None:
    """Check which keys there are, and the kinds of their values."""
    known = {x.name for x in fields(Experiment)} - {"name"}
    if unknown := sorted(values.keys() - known, key=str):
        raise ValueError(
            f"{source} has the key {unknown[0]!r}, but must have some of {', '.join(sorted(known))}"
        )
    needed = {"claim", "paper", "base", "contenders", "budget"}
    if missing := sorted(needed - values.keys()):
        raise ValueError(f"{source} has no {missing[0]}, but must have {', '.join(sorted(needed))}")
    for name, kind in _KINDS.items():
        if name in values and (not isinstance(values[name], kind) or not values[name]):
            expected = {dict: "a mapping", list: "a list", str: "text"}[kind]
            raise ValueError(
                f"{name} of {source} is {values[name]!r}, but must be {expected} that is not empty"
                + ("" if name in needed else ", or left out")
            )
    if twice := _twice(values.get("expect", [])):
        raise ValueError(f"expect of {source} has {twice[0]!r} twice")
    for scale, minutes in values["budget"].items():
        if isinstance(minutes, bool) or not isinstance(minutes, int | float) or minutes < 0:
            raise ValueError(f"{scale} in budget of {source} is {minutes!r}, but must be a number of minutes")


def _twice(values: Sequence[Any]) -> list[Any]:
    """List the values that equal an earlier one; they need not be hashable."""
    return [x for i, x in enumerate(values) if x in values[:i]]


def _check_names(values: Mapping[str, Any], source: Path) -> None:
    """Check the names of contenders and the like, and that the sections of `base` are mappings."""
    for part in ("contenders", "scales", "evaluate", "budget"):
        if wrong := [name for name in values.get(part, {}) if not isinstance(name, str)]:
            raise ValueError(f"the name {wrong[0]!r} in {part} of {source} is not text: put it in quotes")
    for name in values["contenders"]:
        if "," in name:
            raise ValueError(
                f"the name {name!r} in contenders of {source} has a comma, which separates names in --only"
            )
    for part in ("contenders", "scales"):
        for name in values.get(part, {}):
            if not name or not_in_names(name) or name.startswith("."):
                why = "begins with a dot or has a slash" if name else "is empty"
                raise ValueError(f"the name {name!r} in {part} of {source} is that of a folder, but {why}")
        alike: dict[str, str] = {}
        for name in values.get(part, {}):
            if (other := alike.setdefault(name.casefold(), name)) != name:
                raise ValueError(
                    f"{other!r} and {name!r} in {part} of {source} differ in case only, and so would folders"
                )
    if SMOKE in values.get("scales", {}):
        raise ValueError(
            f"scales of {source} has {SMOKE!r}, but must not: that scale is two steps of every run"
        )
    if unknown := sorted(values.get("published", {}).keys() - values["contenders"].keys(), key=str):
        raise ValueError(f"published of {source} names {unknown[0]!r}, which is no contender")
    for section, settings in values["base"].items():
        if not isinstance(settings, dict):
            raise ValueError(f"{section} in base of {source} is {settings!r}, but must be a mapping")


def _check_free(what: str, source: Path, settings: Mapping[str, Any], swept: set[str]) -> None:
    """Raise ValueError if settings have the seed, or what is swept."""
    own = {*settings, *(f"{x}.{y}" for x, of in settings.items() if isinstance(of, dict) for y in of)}
    if twice := sorted(own & {SEED, *swept}):
        raise ValueError(f"{what} of {source} sets {twice[0]}, but must not: `seeds` or `sweep` sets it")


def _check_varied(what: str, given: Mapping[str, Any]) -> None:
    """Check `sweep` and `seeds`, if they are given."""
    sweep, seeds = given.get("sweep", {}), given.get("seeds", [0])
    if not isinstance(sweep, dict):
        raise ValueError(f"sweep of {what} is {sweep!r}, but must be a mapping")
    for key, values in sweep.items():
        section, _, name = str(key).partition(".")
        if section not in ("data", "model", "train") or not name:
            raise ValueError(f"sweep of {what} has {key!r}, but must have settings like train.lr")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{key} in sweep of {what} is {values!r}, but must be a list of values")
        if _twice(values):
            raise ValueError(f"{key} in sweep of {what} is {values!r}, but must not have a value twice")
    if not isinstance(seeds, list) or not seeds or any(type(x) is not int for x in seeds):
        raise ValueError(f"seeds of {what} is {seeds!r}, but must be a list of whole numbers")
    if _twice(seeds):
        raise ValueError(f"seeds of {what} is {seeds!r}, but must not have a seed twice")


def _check_settings(what: str, settings: object, part: str) -> None:
    if not isinstance(settings, dict):
        raise ValueError(f"{what} is {settings!r}, but must be a mapping of settings like model.attention")
    sections = ("data", "model") if part == "evaluate" else ("data", "model", "train")
    whole = {"contenders": sections, "scales": ("seeds", "sweep"), "evaluate": (SPECTRUM,)}[part]
    for key, value in settings.items():
        section, _, name = str(key).partition(".")
        if part == "contenders" and key in sections and not isinstance(value, dict):
            raise ValueError(f"{key} of {what} is {value!r}, but must be a mapping")
        if not (section in sections and name) and key not in whole:
            raise ValueError(
                f"{what} sets {key!r}, but must set parts of {', '.join(sections)}, like {sections[-1]}.seed"
                if part != "evaluate"
                else f"{what} sets {key!r}, but must set parts of data and model, like data.length, or "
                f"{SPECTRUM}"
            )
    if part == "evaluate" and not settings:
        raise ValueError(f"{what} is empty, but must change a setting of data or model, or have {SPECTRUM}")
    if part == "evaluate" and SPECTRUM in settings:
        at_least(1, f"{SPECTRUM} of {what}", settings[SPECTRUM])
