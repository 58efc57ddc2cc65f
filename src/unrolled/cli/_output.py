"""What the commands that write share: `--force`, and pictures that say which command made them."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Force = Annotated[
    bool,
    typer.Option("--force", help="Write even where something else is; files of the same names are replaced."),
]


DEMO = {"made_by": "unrolled demo"}
"""What the checkpoints of the demo say of themselves."""


def check_demo(out: Path, force: bool) -> None:
    """Refuse a folder that is neither empty nor a demo's; see `check_folder`."""
    from unrolled.folders import check_folder
    from unrolled.training import read_metadata

    def made_before() -> bool:
        try:
            return read_metadata(out / "last.safetensors") == DEMO
        except ValueError:
            return False

    check_folder(out, "a demo", made_before, force=force)


def software(command: str) -> dict[str, str]:
    """Return what a PNG file says of the program that made it, for matplotlib's `metadata`."""
    return {"Software": f"unrolled {command}"}


def drawn_by(file: Path, command: str) -> Callable[[], bool]:
    """Return a function that tells whether `file` is a picture of this command."""
    said = f"tEXtSoftware\0unrolled {command}".encode()
    return lambda: said in file.read_bytes()[:1000]


def check_picture(file: Path, command: str, force: bool) -> None:
    """Refuse a name without .png, and a file that is no picture of this command; see `check_file`."""
    from unrolled.folders import check_file

    if file.suffix.lower() != ".png":
        raise ValueError(f"--out is {str(file)!r}, but must end in .png")

    check_file(file, drawn_by(file, command), force=force)


def is_report(file: Path, keys: set[str]) -> bool:
    """Return whether a file is a JSON object with these keys, as the report of a command is."""
    import json

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and keys <= found.keys()
