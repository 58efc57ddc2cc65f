"""Runs functions where Triton's kernels can run: on a GPU, or in Triton's interpreter.

Whether Triton interprets is decided when it is imported, which some other test may already have done: the
interpreter runs in a process of its own. Uninitialised memory holds NaN.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


@contextmanager
def interpreter() -> Iterator[Callable[..., tuple[Tensor, ...]]]:
    """Yield `run(function, *arguments)`, whose arguments and results are on the CPU."""
    if ON_GPU:
        yield _run_on_gpu
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _interpret) as pool:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.use_deterministic_algorithms(True)


def _run_on_gpu(function: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(True)  # which fills uninitialised memory with NaN
    try:
        return tuple(x.cpu() for x in function(*on_gpu(arguments)))
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(x: Any) -> Any:
    """Tensors, also inside of tuples, on the GPU with the same strides."""
    if isinstance(x, tuple):
        moved = (on_gpu(y) for y in x)
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    if not isinstance(x, Tensor):
        return x
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).cuda()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())
