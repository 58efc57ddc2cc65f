"""Runs a function in several processes that share a process group, each with one thread."""

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The processes are forked from one that has imported what training needs. An optimiser imports torch._dynamo when it is
# made, and the modules of the tests import hypothesis and pytest: together 3 s of computing for each process.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("unrolled.training", "unrolled.training._shards", "unrolled.training._dcp"),
        *("unrolled.models", "unrolled.data", "unrolled.cli.run_config"),
        *("torch._dynamo", "hypothesis", "pytest", "filelock"),
    ]
)


def on(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """Return what `function(rank, *arguments)` returns on each process, or the exception that it raises.

    None for a process that was killed.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    children = [
        context.Process(target=_run, args=(rank, size, store.port, sender, function, arguments))
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
                found.append(None)
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
    rank: int, size: int, port: int, sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        store = dist.TCPStore("localhost", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found = function(rank, *arguments)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        found = error
    sender.send(found)
    sender.close()
    dist.destroy_process_group()
