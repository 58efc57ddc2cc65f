"""Output of a run: a JSON-lines log, TensorBoard on request, and a progress bar."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unrolled.contract import UnsupportedError
from unrolled.extras import how_to_install
from unrolled.folders import replacing_files
from unrolled.ops.options import is_number

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


OnLine = Callable[[dict[str, Any]], object]


class RunLog:
    """A log of JSON lines with an `event` and a `step`; each line is flushed and passed to `on_line`."""

    def __init__(self, file: TextIO, board: "SummaryWriter | None", on_line: OnLine) -> None:
        self._file, self._board, self._on_line = file, board, on_line

    def write(self, event: str, step: int, **values: object) -> None:
        """Write one line. Numbers also go to TensorBoard, as `event/name`."""
        line = {"event": event, "step": step, **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._on_line(line)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{event}/{name}", value, step)
            self._board.flush()


class SilentLog(RunLog):
    """A log that writes nothing, for all processes but the first."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, step: int, **values: object) -> None:
        """Write nothing."""


@contextmanager
def open_log(
    path: Path,
    *,
    after: tuple[int, int] | None,
    tensorboard: bool = False,
    on_line: OnLine = lambda line: None,
) -> Iterator[RunLog]:
    """Open the log of a run that resumes, or of a new one (None).

    `after` is the step after which the run resumes, and the step of its last evaluation. Lines of later
    steps and evaluations, left by an earlier process, are dropped, since those run again. `on_line` is called
    with each line that is written.

    Raises:
        UnsupportedError: TensorBoard is requested but not installed.
    """
    board = None
    if tensorboard:
        folder, first = path.parent / "tensorboard", 0 if after is None else after[0] + 1
        board = summary_writer()(str(folder), purge_step=first)
    kept = []
    if after is not None:
        step, evaluated = after
        lines = read_log(path)
        kept = [x for x in lines if x["step"] <= (evaluated if x["event"] == "eval" else step)]
    with replacing_files(path.parent) as staging:
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (staging / path.name).write_text(text, encoding="utf-8")
    try:
        with path.open("a", encoding="utf-8") as file:
            yield RunLog(file, board, on_line)
    finally:
        if board is not None:
            board.close()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a log; an incomplete last line, left by a killed process, is skipped.

    Raises:
        ValueError: another line is damaged: not a JSON object, or without event, step or loss.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: line {number} is not JSON ({error})") from error
        if not _is_line(found):
            raise ValueError(f"{path} is damaged: line {number} is not an event at a step, with its loss")
        lines.append(found)
    return lines


def _is_line(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return False
    losses = {"train": ["loss"], "eval": ["loss", "best"]}.get(found["event"], [])
    has_loss = all(is_number(found.get(name)) for name in losses)
    return type(found.get("step")) is int and has_loss


def progress_bar(enabled: bool) -> Progress:
    """Make a bar on stderr that shows steps or seconds, loss, speed and time left."""
    return Progress(
        TextColumn("[bold]training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )


def summary_writer() -> "type[SummaryWriter]":
    """Return the class that writes for TensorBoard.

    Raises:
        UnsupportedError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            f"tensorboard=True needs the package tensorboard: {how_to_install('tensorboard')}"
        ) from error
    return SummaryWriter
