"""The results of the runs of an experiment: means, standard errors, and which expectations hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from unrolled.experiments.definition import SEED, Experiment, Trial
from unrolled.experiments.expressions import MEASURES, DivergedError, Mean, Verdict

Figures = Mapping[str, Any]
"""The figures of a run: the `MEASURES`, and under "evaluations" those of each further evaluation. A measure
that the run does not have is None or left out."""

Table = tuple[list[str], list[list[str]]]
"""A header and lines, as text."""

BESIDE = ("loss", "accuracy", "bleu", "spectral_mass")
"""The measures of further evaluations that are shown."""


@dataclass(frozen=True)
class Results:
    """The runs of an experiment, at one scale, that have ended.

    Attributes:
        experiment: the experiment at this scale.
        runs: the figures of the runs, by their folders; see `Trial.folder`.
    """

    experiment: Experiment
    runs: Mapping[Path, Figures]

    def figures(self, trial: Trial) -> Figures | None:
        """Return the figures of a run; None if it has not ended."""
        return self.runs.get(trial.folder)

    def best(self, contender: str) -> Trial | None:
        """Return the swept run of a contender with the lowest loss; None until all swept runs have ended."""
        tried = {trial.folder: trial for trial in self.experiment.sweeps(contender)}
        if not tried.keys() <= self.runs.keys():
            return None
        return tried[min(tried, key=lambda folder: _known(self.runs[folder]["loss"]))]

    def seeds(self, contender: str) -> list[Trial]:
        """List the runs of a contender with the best values of the swept settings, one for each seed.

        If training diverged at all values, there is only the one with the first seed.
        """
        best = self.best(contender)
        if best is None:
            return []
        if self.runs[best.folder]["loss"] is None:
            return [best]
        return [Trial(contender, best.swept, x) for x in self.experiment.seeds]

    def diverged(self, contender: str) -> bool:
        """Return whether training has diverged with the best values of the swept settings, at any seed."""
        ended = [self.figures(trial) for trial in self.seeds(contender)]
        return any(x is not None and x["loss"] is None for x in ended)

    def trials(self, contender: str) -> list[Trial]:
        """List all runs of a contender that are needed, as far as this is known."""
        tried = [*self.experiment.sweeps(contender), *self.seeds(contender)]
        return list({trial.folder: trial for trial in tried}.values())

    def mean(self, measure: str, contender: str, evaluation: str | None = None) -> Mean | None:
        """Average a measure over the seeds that have ended; None as in `values`."""
        found = self.values(measure, contender, evaluation)
        return None if found is None else Mean.of(found)

    def values(self, measure: str, contender: str, evaluation: str | None = None) -> list[float] | None:
        """List a measure of the seeds that have ended.

        None if none has ended, if one lacks the measure, or for times on different processors.
        """
        ended = [x for trial in self.seeds(contender) if (x := self.figures(trial)) is not None]
        if measure.startswith("seconds") and len({x.get("processor") for x in ended}) > 1:
            return None
        found: list[float] = []
        for figures in ended:
            of = figures if evaluation is None else figures["evaluations"][evaluation]
            if of.get(measure) is None:
                return None
            found.append(of[measure])
        return found or None

    def verdicts(self) -> list[Verdict]:
        """Judge the expectations.

        An expectation that needs a run that has not ended, or compares times on different processors, is not
        known yet.
        """
        return [x.judge(_Judge(self).values) for x in self.experiment.expectations]

    def table(self) -> Table:
        """Return the header and a line for each contender that has ended."""
        experiment = self.experiment

        def cell(measure: str, name: str) -> str:
            if measure == "loss" and self.diverged(name):
                return "diverged"
            return shown_as(measure, self.mean(measure, name))

        measures = [x for x in MEASURES if any(cell(x, name) for name in experiment.contenders)]
        header = ["contender", *(["published"] if experiment.published else []), *experiment.sweep]
        lines = []
        for name in experiment.contenders:
            best = self.best(name)
            if best is None:
                continue
            line = [name, *([experiment.published.get(name, "")] if experiment.published else [])]
            chosen = self.runs[best.folder]["loss"] is not None
            line += [_short(x) if chosen else "" for x in best.swept.values()]
            lines.append([*line, *(cell(x, name) for x in measures)])
        return [*header, *map(_words, measures), "seeds"], [
            [*line, str(sum(self.figures(x) is not None for x in self.seeds(line[0])))] for line in lines
        ]

    def evaluated(self) -> Table:
        """Return a header and a line for each further evaluation of each contender that has ended."""
        places = [(name, at) for name in self.experiment.contenders for at in self.experiment.evaluate]
        ended = [(name, at) for name, at in places if any(self.mean(x, name, at) for x in BESIDE)]
        measures = [x for x in BESIDE if any(self.mean(x, *place) for place in ended)]
        lines = [[*place, *(shown_as(x, self.mean(x, *place)) for x in measures)] for place in ended]
        return ["contender", "evaluation", *map(_words, measures)], lines

    def tried(self) -> Table:
        """Return a header and a line for each contender, with its loss at each choice of swept settings."""
        sweep, lines = self.experiment.sweep, []
        for name in self.experiment.contenders:
            ended = [self.figures(trial) for trial in self.experiment.sweeps(name)]
            if any(ended):
                lines.append([name, *map(_tried, ended)])
        choices = product(*([f"{key.rpartition('.')[2]} {_short(x)}" for x in sweep[key]] for key in sweep))
        return ["contender", *map(", ".join, choices)], lines

    def edges(self) -> list[str]:
        """Say for which contenders the best value of a setting is the largest or the smallest one tried."""
        best, said = {name: self.best(name) for name in self.experiment.contenders}, []
        for key, values in self.experiment.sweep.items():
            if key == SEED or len(values) == 1 or not all(isinstance(x, int | float) for x in values):
                continue
            for edge, word in ((max(values), "largest"), (min(values), "smallest")):
                names = [name for name, trial in best.items() if trial and trial.swept[key] == edge]
                if names:
                    said.append(f"The best {key} is the {word} one tried for {', '.join(names)}.")
        return said

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON values, for `results.json`."""
        experiment = self.experiment
        tables = {"table": self.table()}
        if experiment.evaluate:
            tables["evaluated"] = self.evaluated()
        if experiment.sweep:
            tables["tried"] = self.tried()
        return {
            "experiment": experiment.name,
            **{name: {"header": header, "lines": lines} for name, (header, lines) in tables.items()},
            "expectations": [_as_json(verdict) for verdict in self.verdicts()],
            **({"edges": edges} if (edges := self.edges()) else {}),
            "runs": {
                folder.as_posix(): {"settings": experiment.values(trial), **self.runs[folder]}
                for name in experiment.contenders
                for trial in self.trials(name)
                if (folder := trial.folder) in self.runs
            },
        }


class _Judge:
    """The values for one expectation, whose times must come from one processor."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._processors: set[object] = set()

    def values(self, measure: str, contender: str, evaluation: str | None) -> list[float] | None:
        """List a measure of all seeds; None if it is not known yet, or not comparable with those before it.

        Raises:
            DivergedError: a run of the contender diverged.
        """
        if self._results.diverged(contender):
            raise DivergedError
        ended = [self._results.figures(trial) for trial in self._results.seeds(contender)]
        found = self._results.values(measure, contender, evaluation)
        if found is None or None in ended:
            return None
        if measure.startswith("seconds"):
            self._processors |= {x.get("processor") for x in ended if x is not None}
            if len(self._processors) > 1:
                return None
        return found


def _as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values: JSON has no NaN, which is a quotient by 0."""
    sides = verdict.sides and tuple(x if math.isfinite(x) else None for x in verdict.sides)
    return verdict._asdict() | {"sides": sides}


def shown_as(measure: str, value: Mean | None) -> str:
    """Return a figure with its standard error, as text."""
    if value is None:
        return ""
    mean, error = value
    if measure == "parameters":
        return f"{mean:,.0f}"
    if measure in ("accuracy", "error_rate", "iou"):
        return f"{mean:.1%}" + ("" if error is None else f" ± {error:.1%}")
    forms = {"seconds": ",.0f", "seconds_per_step": ".3g", "bleu": ".1f", "perplexity": ".1f"}
    form = forms.get(measure, ".3f")
    return f"{mean:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _tried(figures: Figures | None) -> str:
    """Return the loss of a run, as text; empty if it has not ended."""
    if figures is None:
        return ""
    return "diverged" if figures["loss"] is None else f"{figures['loss']:.3f}"


def _words(measure: str) -> str:
    """Return the name of a measure, as text."""
    return measure.replace("_", " ")


def _short(value: object) -> str:
    """Return the value of a setting, as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _known(loss: float | None) -> float:
    """Return a loss that can be compared: that of a run that diverged, None, counts as infinity."""
    return math.inf if loss is None else loss
