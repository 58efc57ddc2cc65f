"""The model of a run's folder, for the commands that use it."""

from pathlib import Path
from typing import Any

from unrolled import data, models
from unrolled.cli.run_config import JOBS

CANNOT = {"tokens": "predicts no tokens", "translation": "translates nothing"}


def load_for(task: data.Task, run_dir: Path) -> Any:
    """Read a model that does a task, of any such kind.

    Raises:
        ValueError: as `unrolled.models.load`, or the model does something else.
    """
    model = models.load(run_dir)
    if model.model_name not in JOBS[task].kinds:
        raise ValueError(
            f"{run_dir} holds a model of kind {model.model_name!r}, which {CANNOT[task]}, but must hold one "
            f"of {', '.join(JOBS[task].kinds)}"
        )
    return model
