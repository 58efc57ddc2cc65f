"""Weights & Biases: the lines of a run's log, sent to a project."""

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from unrolled.cli.run_config import Run

ID_FILE = "wandb-id.txt"
"""In the run folder: which run of the project goes on when this one is resumed."""


class Tracker:
    """A run of a project, which gets the settings and the lines of the log of one of ours.

    Args:
        project: its name.
        run: ours.

    Raises:
        ImportError: the library wandb is not installed.
    """

    def __init__(self, project: str, run: "Run") -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"--wandb needs the library wandb, which is missing: {how_to_install('wandb')}"
            ) from error
        self._wandb: Any = wandb
        self._project, self._run = project, run
        self._sent: Any = None

    def start(self, resumed: bool) -> None:
        """Begin a run of the project, or go on with that of an earlier call on the same folder."""
        file = self._run.run_dir / ID_FILE
        if not (resumed and file.exists()):
            file.write_text(uuid.uuid4().hex)
        self._sent = self._wandb.init(
            project=self._project,
            id=file.read_text(),
            name=self._run.run_dir.name,
            dir=self._run.run_dir,
            config=self._run.settings(),
            resume="allow",
        )

    def send(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line, as `event/name`."""
        numbers = {
            f"{line['event']}/{name}": x
            for name, x in line.items()
            if isinstance(x, int | float) and name != "step"
        }
        if numbers and self._sent is not None:
            self._sent.log(numbers, step=line["step"])

    def finish(self) -> None:
        """End it, once everything has been sent."""
        if self._sent is not None:
            self._sent.finish()
