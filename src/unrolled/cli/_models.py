"""Loading the model of a run folder."""

from pathlib import Path
from typing import Any

from unrolled import data
from unrolled.cli.run_config import JOBS
from unrolled.decode import load_model, packed_form
from unrolled.decode.packing import Weights

CANNOT = {
    "tokens": "does not predict tokens",
    "translation": "does not translate",
    "transcription": "does not transcribe",
}


def load_for(task: data.Task, run_dir: Path) -> Any:
    """Load a model, which must be of a kind that can do the task.

    Raises:
        ValueError: as `unrolled.decode.load_model`, or the model is for another task.
    """
    model = load_model(run_dir)
    if model.model_name not in JOBS[task].kinds:
        raise ValueError(
            f"{run_dir} holds a model of the kind {model.model_name!r}, which {CANNOT[task]}; "
            f"the kind must be one of {', '.join(JOBS[task].kinds)}"
        )
    return model


def is_exported(folder: Path) -> bool:
    """Whether this is a folder of `unrolled export` rather than of a run."""
    return (folder / "manifest.json").exists() and not (folder / "config.json").exists()


def packed_as(folder: Path, weights: Weights | None) -> Weights | None:
    """Return the form of the packed weights in a folder, or None if its weights are not packed.

    Raises:
        ValueError: the weights are packed in a form other than `weights`.
    """
    found = packed_form(folder)
    if found is not None and weights not in (None, found):
        raise ValueError(f"--weights is {weights}, but {folder} holds weights in {found}")
    return found
