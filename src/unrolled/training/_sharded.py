"""The checkpoint of a sharded run, to which each process writes its part.

    last.json          the document of the checkpoint: which folder holds it, the SHA-256 of each file there
    last/a or last/b   the tensors, as safetensors files; see `_dcp`

The files are staged, and `last.json` is replaced once they are in place, so that it never names an incomplete
folder. Any number of processes can read them. Nothing is written in the background: a checkpoint is complete
only when all its parts are, and waiting for that during later steps would need a copy of the weights.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unrolled.files import file_digest
from unrolled.folders import STAGING, replacing_files
from unrolled.training.processes import Processes

DOCUMENT = "last.json"
FOLDER = "last"
Shapes = dict[str, tuple[torch.Size, torch.dtype]]


def save(
    run_dir: Path, tensors: dict[str, Tensor], document: Mapping[str, object], processes: Processes
) -> None:
    """Write a checkpoint, whose tensors may be sharded, replacing the one in `run_dir`.

    Raises:
        OSError: a file cannot be written, as on a full disk; the old checkpoint is unchanged.
    """
    from unrolled.training import _dcp

    with ExitStack() as stack:
        place = ""
        with processes.agreed():
            if processes.first:
                place = next_folder(run_dir)
                (stack.enter_context(replacing_files(run_dir)) / place).mkdir(parents=True)
        place = processes.from_first(place)
        staged = run_dir / STAGING / place
        with processes.agreed():
            _dcp.write(staged, tensors, processes)
        with processes.agreed():
            if processes.first:
                digests = {file.name: file_digest(file) for file in sorted(staged.iterdir())}
                text = json.dumps({"folder": place, "sha256": digests, **document})
                (run_dir / STAGING / DOCUMENT).write_text(text, encoding="utf-8")
                shutil.rmtree(run_dir / place, ignore_errors=True)  # left by a process that was killed
        with processes.agreed():
            stack.close()  # moves `last/` and then `last.json`, in the order of their names
        if processes.first:
            for old in (run_dir / FOLDER).iterdir():
                if old != run_dir / place:
                    shutil.rmtree(old, ignore_errors=True)


def remove(run_dir: Path) -> None:
    """Remove a sharded checkpoint, if there is one."""
    (run_dir / DOCUMENT).unlink(missing_ok=True)
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def read_document(run_dir: Path) -> dict[str, Any]:
    """Return the document of a checkpoint.

    Raises:
        ValueError: the document is damaged.
    """
    file = run_dir / DOCUMENT
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict) or not {"folder", "sha256", "progress"} <= document.keys():
        raise ValueError(f"{file} is JSON, but not a training checkpoint")
    return document


def shapes_of(run_dir: Path, document: Mapping[str, Any], processes: Processes) -> Shapes:
    """Check the files of a checkpoint, each on one process; return the shapes and dtypes of its tensors.

    Raises:
        ValueError: a file is missing or damaged.
    """
    folder = run_dir / document["folder"]
    with processes.agreed():
        from unrolled.training import _dcp

        for name, digest in sorted(document["sha256"].items())[processes.rank :: processes.size]:
            file = folder / name
            if not file.is_file():
                raise ValueError(f"{file} is missing: each process must see the whole folder of the run")
            if file_digest(file) != digest:
                raise ValueError(f"{file} was changed after it was saved: its SHA-256 differs")
    return _dcp.shapes(folder)


def load(
    run_dir: Path,
    document: Mapping[str, Any],
    shapes: Shapes,
    empty: Callable[[str, torch.Size, torch.dtype], Tensor],
    processes: Processes,
) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint into new tensors made by `empty`, which may be sharded differently."""
    from unrolled.training import _dcp

    tensors = {name: empty(name, *shape) for name, shape in shapes.items()}
    with processes.agreed():
        _dcp.read(run_dir / document["folder"], tensors, processes)
    return tensors


def next_folder(run_dir: Path) -> str:
    """Return the name of the folder for the next checkpoint: the one of the two that is not in use."""
    try:
        used = read_document(run_dir)["folder"]
    except ValueError:  # there is none, or a damaged one, which is replaced
        used = None
    return f"{FOLDER}/b" if used == f"{FOLDER}/a" else f"{FOLDER}/a"
