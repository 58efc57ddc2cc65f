"""Runs a function in several processes that share a process group, each with one thread."""

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["unrolled.training._shards", "unrolled.training._dcp", "unrolled.models", "unrolled.data", "filelock"]
)


def on(
    size: int, folder: Path, function: Callable[..., Any], *arguments: Any, seconds: float = 120
) -> list[Any]:
    """Return what `function(rank, *arguments)` returns on each process, or the exception that it raises.

    `folder` is an existing one, in which the processes find each other.
    """
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    children = [
        context.Process(target=_run, args=(rank, size, str(meeting), sender, function, arguments))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for child, (_, sender) in zip(children, pipes, strict=True):
        child.start()
        sender.close()
    deadline = time.monotonic() + seconds
    found: list[Any] = []
    try:
        for receiver, _ in pipes:
            assert receiver.poll(max(0, deadline - time.monotonic())), "a process hangs"
            try:
                found.append(receiver.recv())
            except EOFError:
                found.append(None)  # it was killed
    finally:
        for child in children:
            child.join(max(0.1, deadline - time.monotonic()) if len(found) == size else 0.1)
            child.kill()
            child.join()
    return found


def results(*arguments: Any, **options: Any) -> list[Any]:
    """As `on`, where every process must succeed."""
    found = on(*arguments, **options)
    for x in found:
        assert not isinstance(x, BaseException), "".join(getattr(x, "__notes__", [str(x)]))
    return found


def _run(
    rank: int, size: int, meeting: str, sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        found = function(rank, *arguments)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        found = error
    sender.send(found)
    sender.close()
    dist.destroy_process_group()
