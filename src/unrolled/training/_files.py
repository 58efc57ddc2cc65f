"""Files that are whole or absent: written in a staging folder, synced, then renamed into place."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unrolled.files import system_errors

STAGING = ".unrolled-staging"


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield a staging folder; when the block ends well, each file in it replaces its namesake in `folder`.

    Each replacement is atomic, and a folder that did not exist appears whole. A process killed inside leaves
    the old files, and a staging folder that `remove_staging` removes. It is a folder, since what is called to
    write may make temporaries of its own.

    Raises:
        OSError: a file cannot be written, as on a full disk; `folder` is as it was, unless it was the
            replacing itself that failed.
    """
    new = not folder.exists()
    # Beside a folder that does not exist, others may stage another of that name.
    staging = folder.with_name(f".{folder.name}.{os.getpid()}{STAGING}") if new else folder / STAGING
    with system_errors(folder):
        staging.mkdir(parents=new)
        try:
            yield staging
            _sync(staging)
            if new:
                os.replace(staging, folder)  # noqa: PTH105 - the call that is atomic on every system
                _sync_folder(folder.parent)
            else:
                _move(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make the folder of a run, if there is none.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir {folder} cannot be written to: {error.strerror}") from error


def remove_staging(folder: Path) -> None:
    """Remove what a killed process left half-written in a folder that nobody else writes to."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def _sync(staging: Path) -> None:
    mode = staging.stat().st_mode & 0o666  # as the umask has it; safetensors makes its files private
    for file in sorted(staging.rglob("*")):
        if file.is_file():
            file.chmod(mode)
            with file.open("r+b") as written:
                os.fsync(written.fileno())


def _move(staging: Path, folder: Path) -> None:
    for file in sorted(staging.rglob("*")):
        target = folder / file.relative_to(staging)
        if file.is_dir():
            target.mkdir(exist_ok=True)
        else:
            os.replace(file, target)  # noqa: PTH105 - the call that is atomic on every system
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename is durable without
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
