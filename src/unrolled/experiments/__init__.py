"""Experiments that check claims of papers, each a YAML file, and the results that come with the library.

`names()` lists the experiments, and `unrolled reproduce` runs them. A file of your own has the same form; its
keys are the attributes of `Experiment`.
"""

import json
from pathlib import Path
from typing import Any

from unrolled.experiments.definition import SMOKE, SPECTRUM, Experiment, Trial, merged
from unrolled.experiments.expressions import Mean, Verdict
from unrolled.experiments.reading import made_of
from unrolled.experiments.results import BESIDE, Figures, Results, Table

__all__ = [
    "BESIDE",
    "SMOKE",
    "SPECTRUM",
    "Experiment",
    "Figures",
    "Mean",
    "Results",
    "Table",
    "Trial",
    "Verdict",
    "made_of",
    "merged",
    "names",
    "obtained",
    "path",
]

_HERE = Path(__file__).parent


def names() -> list[str]:
    """List the experiments that come with the library."""
    return sorted(file.stem for file in _HERE.glob("*.yaml"))


def path(name: str) -> Path:
    """Return the file of an experiment that is given by its name, or by the .yaml file itself.

    Raises:
        ValueError: there is no experiment of this name, and it is not a .yaml file.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in names():
        raise ValueError(
            f"the experiment is {name!r}, but must be a .yaml file or one of {', '.join(names())}"
        )
    return _HERE / f"{name}.yaml"


def obtained(name: str) -> dict[str, Any] | None:
    """Return the results at the scale "full" that come with the library; None if there are none."""
    file = _HERE / "results" / f"{name}.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
