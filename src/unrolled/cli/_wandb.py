"""Weights & Biases: the lines of a run's log, sent to a project."""

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unrolled.extras import how_to_install

if TYPE_CHECKING:
    from unrolled.cli.run_config import Run

ID_FILE = "wandb-id.txt"
"""The file in a run folder with the id of its run at Weights & Biases, which a resumed run continues."""


class Tracker:
    """Sends the settings and the log of a run to a project of Weights & Biases.

    Args:
        project: name of the project.
        run: the run of `unrolled train`.

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
        """Begin a run of the project; if `resumed`, continue that of an earlier call on the same folder.

        Raises:
            ValueError: Weights & Biases refuses the run, or cannot be reached.
        """
        file = self._run.run_dir / ID_FILE
        name = file.read_text() if resumed and file.exists() else uuid.uuid4().hex
        try:
            self._sent = self._wandb.init(
                project=self._project,
                id=name,
                name=self._run.run_dir.name,
                dir=self._run.run_dir,
                config=self._run.settings(),
                resume="allow",
            )
        except Exception as error:  # the base class of the library's own errors
            raise ValueError(f"--wandb: {error}") from error
        file.write_text(name)

    def send(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of the log, each under the name `event/name`."""
        numbers = {
            f"{line['event']}/{name}": x
            for name, x in line.items()
            if isinstance(x, int | float) and name != "step"
        }
        if numbers and self._sent is not None:
            self._sent.log(numbers, step=line["step"])

    def finish(self) -> None:
        """End the run of the project once everything has been sent."""
        if self._sent is not None:
            self._sent.finish()
