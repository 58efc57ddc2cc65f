"""Loading the model of a run folder."""

from pathlib import Path
from typing import Any

from unrolled import data, models
from unrolled.cli.run_config import JOBS

CANNOT = {"tokens": "does not predict tokens", "translation": "does not translate"}


def load_for(task: data.Task, run_dir: Path) -> Any:
    """Load a model, which must be of a kind that can do the task.

    Raises:
        ValueError: as `unrolled.models.load`, or the model is for another task.
    """
    model = models.load(run_dir)
    if model.model_name not in JOBS[task].kinds:
        raise ValueError(
            f"{run_dir} holds a model of the kind {model.model_name!r}, which {CANNOT[task]}; "
            f"the kind must be one of {', '.join(JOBS[task].kinds)}"
        )
    return model
