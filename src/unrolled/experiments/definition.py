"""The definition of an experiment: its claim, its contenders and its expectations."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from unrolled.experiments.expressions import Expectation

LONGEST = 40  # characters of a value in the name of a folder
SMOKE = "smoke"
"""The scale of tests: two steps of every contender."""
SEED = "train.seed"
SPECTRUM = "spectrum"
"""The key of a further evaluation that names the layer whose attention matrices are measured."""
_TWO_STEPS = {"train.steps": 2, "train.seconds": None, "train.eval_batches": 1, "train.eval_every": 2}


@dataclass(frozen=True)
class Trial:
    """A run: a contender with a value of each swept setting, and a seed."""

    contender: str
    swept: Mapping[str, Any]
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings besides those of the contender: the swept values and the seed, unless it is swept."""
        return {**self.swept, SEED: self.swept.get(SEED, self.seed)}

    @property
    def folder(self) -> Path:
        """The run folder, relative to that of the experiment, such as "linear/lr=0.001,seed=0"."""
        parts = [f"{key.rpartition('.')[2]}={_as_name(value)}" for key, value in self.settings.items()]
        return Path(self.contender, ",".join(parts))


@dataclass(frozen=True)
class Experiment:
    """An experiment. Its fields are the keys of its file, except `name`, which is the name of the file.

    Attributes:
        claim: the claim of the paper, in one sentence.
        paper: the paper: authors and year, arXiv number, and the place in it.
        base: the settings of every run, as the sections of a file for `unrolled train`.
        contenders: for each contender by name, the settings that differ from `base`, such as
            `{model.attention: softmax}`, or a whole section, such as `model` for another kind of model.
        budget: minutes of one core, by scale.
        expect: comparisons of measured values; see `expressions.Expectation`.
        published: the result that the paper reports for each contender, as text.
        sweep: settings with several values. Each value is tried with the first seed, and the value with the
            lowest validation loss is used for the other seeds. Values of `train.seed` are restarts, of which
            only the best one counts.
        seeds: values of `train.seed`; the result is the mean over them.
        evaluate: further evaluations of the trained models, by name. Each has other settings of the data, or
            of the model if they fit the trained weights; or it has `spectrum`, the number of a layer,
            counted from 1, whose attention matrices are measured (`spectral_mass`) instead of the measures of
            the task.
        scales: for each scale by name, the settings, `seeds` and `sweep` that differ; by default, there is
            only the scale "full", without differences.
        horizontal: horizontal axis of the plot: "step" or "seconds" of training, or "evaluate" for the
            further evaluations.
        finding: what the results show, and why an expectation does not hold, as far as it is known.
    """

    name: str
    claim: str
    paper: str
    base: Mapping[str, Any]
    contenders: Mapping[str, Mapping[str, Any]]
    budget: Mapping[str, float]
    expect: tuple[str, ...] = ()
    published: Mapping[str, str] = field(default_factory=dict)
    sweep: Mapping[str, list[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    evaluate: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"full": {}})
    horizontal: str = "step"
    finding: str = ""

    def __post_init__(self) -> None:
        if SEED in self.sweep and len(self.seeds) > 1:
            raise ValueError(
                f"seeds of {self.name} is {list(self.seeds)}, but must be a single one where {SEED} is swept"
            )

    @property
    def expectations(self) -> list[Expectation]:
        """The parsed expectations."""
        return [Expectation.parse(text, self.contenders, self.evaluate) for text in self.expect]

    def at(self, scale: str) -> "Experiment":
        """Return the experiment at a scale, whose settings are merged into `base`.

        Raises:
            ValueError: the experiment has no such scale.
        """
        if scale == SMOKE:
            changes: dict[str, Any] = {"seeds": self.seeds[:1]} | _TWO_STEPS
            changes["sweep"] = {key: values[:1] for key, values in self.sweep.items()}
        elif scale in self.scales:
            changes = dict(self.scales[scale])
        else:
            raise ValueError(f"scale is {scale!r}, but must be one of {', '.join([*self.scales, SMOKE])}")
        own = {name: changes.pop(name) for name in ("seeds", "sweep") if name in changes}
        values = {x.name: getattr(self, x.name) for x in fields(self)} | own
        values["seeds"] = tuple(values["seeds"])
        values["contenders"] = {
            name: _not_overridden(settings, changes) for name, settings in self.contenders.items()
        }
        return Experiment(**values | {"base": merged(self.base, changes)})

    def values(self, trial: Trial) -> dict[str, Any]:
        """Return the settings of a run, by section."""
        found = merged(self.base, self.contenders[trial.contender])
        return merged(found, trial.settings)

    def sweeps(self, contender: str) -> Iterator[Trial]:
        """Yield the runs with the first seed, one for each choice of the swept settings."""
        for values in product(*self.sweep.values()):
            yield Trial(contender, dict(zip(self.sweep, values, strict=True)), self.seeds[0])


def _as_name(value: Any) -> str:
    """Write a setting as part of the name of a folder: in short, if it is long or has a separator."""
    text = str(value)
    if len(text) <= LONGEST and not not_in_names(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def not_in_names(text: str) -> bool:
    """Whether a text has characters that the names of folders cannot have."""
    return any(character in text for character in "/\\\0")


def _not_overridden(settings: Mapping[str, Any], scale: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings that a scale sets for all contenders, and set them in sections of their own."""
    kept = {key: value for key, value in settings.items() if key not in scale}
    for key, value in kept.items():
        if isinstance(value, Mapping) and "." not in key:  # a whole section, which replaces that of `base`
            prefix = f"{key}."
            of_scale = {x.removeprefix(prefix): y for x, y in scale.items() if x.startswith(prefix)}
            kept[key] = {**value, **of_scale}
    return kept


def merged(sections: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections in which settings such as `model.attention`, or whole sections, are replaced."""
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in sections.items()}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if name:
            found[section] = found.get(section, {}) | {name: value}
        else:
            found[section] = dict(value)
    return found
