"""Runs functions where Triton's kernels can run: on a GPU, or in Triton's interpreter.

Whether Triton interprets is decided when it is imported, which some other test may already have done: the
interpreter runs in a process of its own. Uninitialised memory holds NaN.
"""

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from unrolled.ops.dispatch import prefer
from unrolled.ops.triton.check import required

ON_GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Yield `run(function, *arguments)`, whose arguments and results, tensors or a bool, are on the CPU."""
    if ON_GPU:
        yield _run_on_gpu
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _interpret) as pool:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.use_deterministic_algorithms(True)
    prepare_each_module_once()


def prepare_each_module_once() -> None:
    """Halve the time of the interpreter, which patches Triton's language at each call within a kernel.

    It patches what the module of the called function imports. At the end of a kernel it restores only the
    kernel's own module, and patches that again when the next kernel begins.
    """
    from triton.runtime.interpreter import InterpretedFunction

    prepare_and_call, prepared = InterpretedFunction.__call__, set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if id(self.fn.__globals__) in prepared:
            return self.rewrite()(*arguments, **options)
        prepared.add(id(self.fn.__globals__))
        return prepare_and_call(self, *arguments, **options)

    InterpretedFunction.__call__ = call


def _run_on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    torch.use_deterministic_algorithms(True)  # which fills uninitialised memory with NaN
    try:
        with required():
            found = function(*on_gpu(arguments))
        return found if isinstance(found, bool) else tuple(x.cpu() for x in found)
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(x: Any) -> Any:
    """Tensors, also inside of tuples and dicts, on the GPU with the same strides."""
    if isinstance(x, tuple):
        moved = (on_gpu(y) for y in x)
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    if isinstance(x, dict):
        return {name: on_gpu(y) for name, y in x.items()}
    if not isinstance(x, Tensor):
        return x
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).cuda()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _imported(name: str) -> tuple[Tensor, ...]:
    return (torch.tensor(1),) if name in sys.modules else ()


def differentiate(
    form: Callable[..., tuple[Tensor, ...]],
    given: dict[str, Tensor | None],
    options: dict[str, Any],
    backend: str = "triton",
) -> tuple[Tensor, ...]:
    """Outputs, and the gradients of a sum of both that weighs every element differently.

    With the backend "exact", that of the plain form, everything is in fp64.
    """
    dtype = torch.float64 if backend == "exact" else None
    leaves = {name: None if x is None else x.to(dtype).detach().requires_grad_() for name, x in given.items()}
    with prefer("plain" if backend == "exact" else backend):
        outputs = form(**leaves, **options)
        generator = torch.Generator().manual_seed(0)
        # Numbers that bf16 has, so that they are the same in every type.
        weights = [torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in outputs]
        present = [x for x in leaves.values() if x is not None]
        pairs = [(x, w) for x, w in zip(outputs, weights, strict=True) if x.requires_grad]
        none = sum(x.double().sum() for x in present)  # a pack of no sequences has a gradient too
        pairs.append((none, torch.zeros_like(none)))
        found = torch.autograd.grad(
            [x for x, _ in pairs], present, [w for _, w in pairs], materialize_grads=True
        )
    return (*(x.detach() for x in outputs), *found)


def assert_as_exact_as_plain(
    names: Sequence[str],
    found: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor | None],
    times: float = 2,
    rounded_factors: bool = False,
) -> None:
    """Largest error of each result at most `times` the largest of the plain form in the same type.

    The plain form may be exact by luck, and some results are differences of terms that are about 1, like
    the inputs: 16 units in the last place of 1 plus the largest value in fp32 are always allowed, and to a
    number of 16 bits `times` the largest error of rounding it. Kernels with `rounded_factors` also round
    intermediate results before they multiply them: they are allowed the error of rounding the largest number.
    """
    for name, x, y, z in zip(names, found, plain, exact, strict=True):
        assert x.shape == y.shape, name
        assert x.dtype == y.dtype, name
        assert x.is_contiguous(), name
        if z is not None and z.numel():
            allowed = times * (y - z).abs().max()
            if x.dtype != torch.float32:
                size = z.abs().max() if rounded_factors else z.abs()
                allowed = allowed.maximum(times * torch.finfo(x.dtype).eps / 2 * size)
            allowed = allowed + 16 * torch.finfo(torch.float32).eps * (1 + z.abs().max())
            excess = ((x - z).abs() - allowed).max()
            assert excess <= 0, f"{name}: {excess:g} above what is allowed"


def check(
    run: Callable[..., tuple[Tensor, ...]],
    form: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    given: dict[str, Tensor | None],
    times: float = 2,
    rounded_factors: bool = False,
    **options: Any,
) -> None:
    """The kernels must be about as exact as the plain form, which is measured against the definition in fp64."""
    found = run(differentiate, form, given, options)
    assert run(_imported, f"{form.__module__}.triton_kernels")  # by the first call of a kernel
    plain = differentiate(form, given, options, "plain")
    exact = differentiate(reference, given, options, "exact")
    names = ["the output", "the state", *(f"d{name}" for name, x in given.items() if x is not None)]
    assert_as_exact_as_plain(names, found, plain, exact, times, rounded_factors)
