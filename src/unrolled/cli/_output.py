"""What commands check before they overwrite, and pictures that record which command made them."""

from collections.abc import Callable
from pathlib import Path

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


def is_report(file: Path, keys: set[str]) -> bool:
    """Return whether a file is a JSON object with these keys, like a command's report."""
    import json

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and keys <= found.keys()
