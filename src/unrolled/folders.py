"""Atomic writes to folders, by one process at a time, without overwriting files of other origin."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from unrolled.files import read_object, system_errors

RUN_FILE = "run.yaml"
"""The file of a run that has all its settings."""

CONFIG_FILE = "config.json"
"""The file of a model that names its kind and has its config."""

WEIGHTS_FILE = "model.safetensors"
"""The file of a model's weights."""

PLAN_FILE = "plan.safetensors"
"""The file of the packed weights that `unrolled.decode` saves; a folder has it instead of `WEIGHTS_FILE`."""

MANIFEST_FILE = "manifest.json"
"""The file of an exported model that describes its graphs."""

TEMPLATE_FILE = "chat_template.jinja"
"""The file that says how the messages of a chat become one text, as in folders of transformers."""

CONVERTED, LINEARIZED = "unrolled", "unrolled-linearized"
"""The `model_type` of this library's models in folders of transformers, and that of linearized models."""

LOCK = ".lock"
STAGING = ".unrolled-staging"


def check_folder(folder: Path, content: str, made_before: Callable[[], bool], *, force: bool = False) -> None:
    """Reject a folder with content that the caller did not write. Hidden and temporary files do not count.

    Args:
        folder: the folder to write; it may be missing or empty.
        content: the content that is accepted, for the message.
        made_before: returns whether the folder holds this content; called if the folder is not empty.
        force: accept any content.

    Raises:
        ValueError: the folder holds anything else, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but must be a folder")
    _check_above(folder)
    if force or not contents(folder) or made_before():
        return
    raise ValueError(
        f"{folder} is not empty, but must be empty or hold {content}: name another folder, or write to this "
        "one with --force"
    )


def check_file(file: Path, made_before: Callable[[], bool] = lambda: False, *, force: bool = False) -> None:
    """Reject a file that exists and that the caller did not write.

    Raises:
        ValueError: there is such a file, or the path cannot be a file.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder, but must be a file")
    _check_above(file)
    if file.exists() and not force and not made_before():
        raise ValueError(
            f"{file} exists and is not from this command: name another file, or replace it with --force"
        )


def incomplete(folder: Path, kind: str, file_name: str) -> str:
    """Say in one sentence why a folder, which should be `kind`, lacks a file of a finished model."""
    begun = any((folder / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE, PLAN_FILE))
    if (folder / RUN_FILE).exists() and not begun:
        return (
            f"{folder} holds no model yet: its training has not been evaluated; repeat its command, "
            "or set a smaller train.eval_every"
        )
    if (otherwise := of_transformers(folder)) is not None:
        return otherwise
    if (folder / MANIFEST_FILE).exists():
        return (
            f"{folder} is not {kind} but an exported model, which `unrolled generate --engine onnx` runs, or "
            "`unrolled transcribe` if it is of speech"
        )
    if folder.is_dir():
        return f"{folder} is not {kind}: it has no {file_name}"
    return f"{folder} is not {kind}: it {'is a file' if folder.exists() else 'does not exist'}"


def of_transformers(folder: Path) -> str | None:
    """Say in one sentence how to use a folder that this library wrote for transformers; None for others."""
    kind = read_object(folder / CONFIG_FILE).get("model_type")
    if kind == CONVERTED:
        return f"{folder} holds a model of transformers: `unrolled convert {folder} OUT` converts it back"
    if kind == LINEARIZED:
        return (
            f"{folder} holds a linearized model of transformers: load it with "
            "unrolled.interop.hf.load_linearized"
        )
    return None


def contents(folder: Path) -> set[str]:
    """Return the names in a folder, without hidden and temporary files."""
    if not folder.is_dir():
        return set()
    return {x.name for x in folder.iterdir() if not x.name.startswith(".") and x.suffix != ".tmp"}


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock an existing folder against writes of other processes during the block.

    The lock is a lock of the operating system on the file `.lock`. It is released if the process dies; the
    file stays. The same thread may lock a folder again inside the block.

    Raises:
        ValueError: another process or thread holds the lock, or the folder cannot be written to.
    """
    from filelock import FileLock, Timeout  # late: it imports asyncio, which few commands need

    lock = FileLock(folder.resolve() / LOCK, blocking=False, is_singleton=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"{folder} is in use: another process is writing there") from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing_folder(folder: Path, earlier: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a staging folder whose files move to `folder` at the end, as in `replacing_files`.

    Args:
        folder: the folder to write.
        earlier: paths of files of its earlier content, relative to `folder`; those not written again are
            deleted at the end, and so are folders that this leaves empty.

    Raises:
        ValueError: another process is writing to `folder`, or it cannot be written to.
        OSError: a file cannot be written.
    """
    exists, is_run = folder.exists(), (folder / LOCK).exists()
    with held(folder) if exists else nullcontext():
        try:
            remove_staging(folder)
            with replacing_files(folder) as staging:
                yield staging
                left = {*earlier} - {file.relative_to(staging).as_posix() for file in staging.rglob("*")}
            for file in map(folder.joinpath, left):
                file.unlink(missing_ok=True)
                if file.parent != folder and not any(file.parent.iterdir()):
                    file.parent.rmdir()
        finally:
            if exists and not is_run:  # the lock of a run stays; others would only be in the way
                with suppress(OSError):
                    (folder / LOCK).unlink()


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield a staging folder; if the block succeeds, its files replace those in `folder`.

    Each replacement is atomic, and so is the creation of a new folder. If the process is killed inside the
    block, the old files stay, and so does the staging folder: in an existing folder until `remove_staging`,
    and beside a new one until a process with the same ID writes that folder.

    Raises:
        OSError: a file cannot be written, as on a full disk; `folder` is unchanged unless a replacement
            itself failed.
    """
    new = not folder.exists()
    # If the folder is new, another process may also be staging a folder of this name.
    staging = folder.with_name(f".{folder.name}.{os.getpid()}{STAGING}") if new else folder / STAGING
    with system_errors(folder):
        if new:  # a killed process may have had the same ID, as in a container
            shutil.rmtree(staging, ignore_errors=True)
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


def remove_staging(folder: Path) -> None:
    """Remove the staging folder of a killed process, in a folder that no other process writes to."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def _check_above(path: Path) -> None:
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written to: {above} is not a folder")


def _sync(staging: Path) -> None:
    mode = staging.stat().st_mode & 0o666  # the mode of the umask; safetensors makes its files private
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
    if os.name == "posix":  # on other systems, a folder cannot be opened, and a rename is durable
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
