"""Torch's distributed checkpoints (DCP), as a folder of safetensors files: one for each process that writes.

DCP's own format is not used, since its index is a pickle. Importing DCP takes long, so this module is only
imported to read or write such a folder.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from unrolled.contract import UnsupportedError
from unrolled.files import system_errors
from unrolled.training._sharded import Shapes
from unrolled.training.processes import ElsewhereError, Processes

try:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
except ImportError as error:
    raise UnsupportedError(
        "sharded checkpoints need torch 2.10 or newer; use shard=1, or a newer torch"
    ) from error


def write(folder: Path, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Write tensors: each process its parts of sharded tensors, and one process the tensors that all have.

    Raises:
        OSError: a file cannot be written, as on a full disk.
        ElsewhereError: another process could not write its files.
    """
    with system_errors(folder), _own_errors(processes):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        state_dict_saver.save(tensors, storage_writer=writer, process_group=processes.group)


def shapes(folder: Path) -> Shapes:
    """Return the shape and dtype of each tensor in a folder, by name."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (x.size, x.properties.dtype)
        for name, x in sorted(found.items())
        if isinstance(x, TensorStorageMetadata)
    }


def read(folder: Path, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Fill tensors, which may be sharded differently from those that were written."""
    with _own_errors(processes), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs no group
        reader = HuggingFaceStorageReader(str(folder))
        group = processes.group
        state_dict_loader.load(tensors, storage_reader=reader, process_group=group, no_dist=processes.alone)


@contextmanager
def _own_errors(processes: Processes) -> Iterator[None]:
    """Raise each of the errors that DCP gathers from all processes on the process where it occurred."""
    try:
        yield
    except CheckpointException as error:
        own = error.failures.get(processes.rank)
        raise (own[0] if own else ElsewhereError("another process of the run failed")) from error
