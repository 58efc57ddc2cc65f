"""The output of commands: checks before overwriting, reports, progress, pictures that name their command."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import typer

from unrolled.extras import how_to_install

DEMO = {"made_by": "unrolled demo"}
"""The metadata of the demo's checkpoints."""


def check_demo(out: Path, force: bool) -> None:
    """Reject a folder that is neither empty nor a demo's; see `check_folder`."""
    from unrolled.folders import check_folder
    from unrolled.training import read_metadata

    def made_before() -> bool:
        try:
            return read_metadata(out / "last.safetensors") == DEMO
        except ValueError:
            return False

    check_folder(out, "a demo", made_before, force=force)


def software(command: str) -> dict[str, str]:
    """Return the PNG metadata that name the program, for matplotlib's `metadata`."""
    return {"Software": f"unrolled {command}"}


def drawn_by(file: Path, command: str) -> Callable[[], bool]:
    """Return a function that checks whether `file` is a picture made by this command."""
    said = f"tEXtSoftware\0unrolled {command}".encode()
    return lambda: said in file.read_bytes()[:1000]


def check_picture(file: Path, command: str, force: bool) -> None:
    """Reject a name without .png, and a file that this command did not make; see `check_file`."""
    from unrolled.folders import check_file

    if file.suffix.lower() != ".png":
        raise ValueError(f"--out is {str(file)!r}, but must end in .png")

    check_file(file, drawn_by(file, command), force=force)


def require_matplotlib() -> None:
    """Raise ValueError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"matplotlib is missing: {how_to_install('plot')}")


def can_plot() -> bool:
    """Return whether matplotlib is installed; if not, say on stderr that there are no plots."""
    if find_spec("matplotlib") is not None:
        return True
    typer.echo(f"no plots, because matplotlib is missing: {how_to_install('plot')}", err=True)
    return False


def check_report(folder: Path, name: str, keys: set[str], force: bool) -> None:
    """Reject a folder unless it is empty or has a report of this command, a JSON file with these keys."""
    from unrolled.folders import check_folder

    check_folder(folder, "a report of this command", lambda: is_report(folder / name, keys), force=force)


def write_files(out: Path, files: Mapping[str, bytes], optional: Collection[str] = ()) -> None:
    """Write files into a folder, each atomically, and remove the `optional` ones that are not written."""
    from unrolled.folders import writing_folder

    with writing_folder(out) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    for name in set(optional) - files.keys():
        (out / name).unlink(missing_ok=True)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; yield the function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def is_report(file: Path, keys: set[str]) -> bool:
    """Return whether a file holds a JSON object with these keys, as reports of commands do."""
    from unrolled.files import read_object

    return keys <= read_object(file).keys()
