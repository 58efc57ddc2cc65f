"""Files that are whole or absent: written in a staging folder, synced, then renamed into place."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STAGING = ".unrolled-staging"


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield a staging folder; when the block ends well, each file in it replaces its namesake in `folder`.

    Each replacement is atomic. A process killed inside leaves the old files, and a staging folder that
    `prepare_folder` removes. It is a folder, since what is called to write may make temporaries of its own.
    """
    staging = folder / STAGING
    staging.mkdir()
    try:
        yield staging
        mode = staging.stat().st_mode & 0o666  # as the umask has it; safetensors makes its files private
        for file in sorted(staging.iterdir()):
            file.chmod(mode)
            with file.open("r+b") as written:
                os.fsync(written.fileno())
            os.replace(file, folder / file.name)  # noqa: PTH105 - the call that is atomic on every system
        _sync_folder(folder)
    finally:
        shutil.rmtree(staging)


def prepare_folder(folder: Path) -> None:
    """Make a folder, prove that it can be written to, and remove what a killed process left half-written.

    Raises:
        ValueError: the folder cannot be made or written to.
    """
    staging = folder / STAGING
    try:
        staging.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging)
    except OSError as error:
        raise ValueError(f"run_dir {folder} cannot be written to: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename is durable without
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
