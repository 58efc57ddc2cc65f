"""The model of a run's folder, for the commands that draw from it."""

from pathlib import Path

from unrolled import models
from unrolled.models import Decoder


def load_decoder(run_dir: Path) -> Decoder:
    """Read a model that predicts the next token, of any such kind.

    Raises:
        ValueError: as `unrolled.models.load`, or the model does something else.
    """
    model = models.load(run_dir)
    if not isinstance(model, Decoder):
        raise ValueError(
            f"{run_dir} holds a model of the kind {model.model_name!r}, which predicts no tokens"
        )
    return model
