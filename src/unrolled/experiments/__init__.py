"""Experiments that reproduce claims of the sources: a YAML file each, and the results that were obtained.

`names()` lists them, and `unrolled reproduce` runs them. A file of your own has the same form; its keys are
the attributes of `Experiment`.
"""

import json
from pathlib import Path
from typing import Any

from unrolled.experiments.definition import SMOKE, SPECTRUM, Experiment, Trial, made_of, merged
from unrolled.experiments.results import BESIDE, Figures, Mean, Results, Table, Verdict

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
    """Return the file of an experiment, by its name, or the file itself.

    Raises:
        ValueError: there is neither.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in names():
        raise ValueError(
            f"the experiment is {name!r}, but must be a .yaml file or one of {', '.join(names())}"
        )
    return _HERE / f"{name}.yaml"


def obtained(name: str) -> dict[str, Any] | None:
    """Return the results of an experiment at the scale "full" that come with the library, if any do."""
    file = _HERE / "results" / f"{name}.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
