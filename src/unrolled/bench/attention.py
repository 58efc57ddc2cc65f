"""Shared by the cases of attention functions: realistic inputs, and contenders made from functions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.bench import definitions, flops
from unrolled.bench.case import Contender, Definition, MissingError, NotMeasuredError, Settings, tolerance
from unrolled.ops import native

HEADS, WIDTH = 8, 64
COMPARE_ALL_UP_TO = 4096  # tokens; beyond, the first and the last head are compared
RESULTS = ("o", "dq", "dk", "dv")
DEVICES = {"native": "cpu", "triton": "cuda", "flex": "cuda"}
"""The device of each of our backends; backends that are not listed run on all devices."""
PASSES = ((False, "", "forward"), (True, "-training", "forward and backward"))
"""For cases that exist without and with gradients: gradients, suffix of the name, and description."""

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Inputs(NamedTuple):
    """q, k, v and the gradient of the output, all `[1,N,H,D]`; q and k are positive, as features are."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_o: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Round them."""
        return Inputs(*(x.to(dtype) for x in self))


def random_inputs(length: int, settings: Settings) -> Inputs:
    """Draw inputs: q and k are features elu(x) + 1 of normal numbers x; v and grad_o are normal."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, grad_o = (torch.randn(1, length, HEADS, WIDTH, generator=generator) for _ in range(4))
    positive = torch.nn.functional.elu
    return Inputs(*(x.to(settings.device) for x in (positive(q) + 1, positive(k) + 1, v, grad_o)))


def ours(
    backend: str,
    attention: Callable[..., Tensor],
    inputs: Inputs,
    *,
    gradients: bool,
    definition: str,
    suffix: str = "",
    threads: int | None = None,
) -> Contender:
    """Make a contender of one of our backends; see `contender`.

    Args:
        backend: passed to `attention`.
        attention: a function of q, k, v and `backend`.
        inputs, gradients, definition, threads: as for `contender`.
        suffix: follows the backend in the contender's name.
    """

    def load() -> Function:
        if backend == "native" and (why := native.missing()):
            raise MissingError(why)
        return partial(attention, backend=backend)

    return contender(
        f"unrolled {backend}{suffix}",
        load,
        inputs,
        gradients=gradients,
        definition=definition,
        ours=True,
        threads=threads,
        device=DEVICES.get(backend),
    )


def contender(
    name: str,
    load: Callable[[], Function],
    inputs: Inputs,
    *,
    gradients: bool,
    definition: str,
    ours: bool = False,
    heads_first: bool = False,
    threads: int | None = None,
    device: str | None = None,
) -> Contender:
    """Make a contender of a function of q, k and v.

    Args:
        name, definition, ours, threads: see `Contender`.
        load: imports the function.
        inputs: the arguments of the function.
        gradients: whether the job is forward and backward.
        heads_first: whether the function takes `[B,H,N,D]`.
        device: "cpu" or "cuda" if it runs only there.
    """

    def prepare() -> Callable[[], Sequence[Tensor]]:
        if device not in (None, inputs.q.device.type):
            absent = device == "cuda" and not torch.cuda.is_available()
            raise NotMeasuredError("no CUDA device" if absent else f"it runs on --device {device}")
        function = load()

        def arranged(x: Tensor) -> Tensor:
            return x.transpose(1, 2).contiguous() if heads_first else x

        *qkv, grad_o = (arranged(x) for x in inputs)
        if not gradients:

            def forward() -> list[Tensor]:
                with torch.inference_mode():
                    return [back(function(*qkv))]

            return forward
        leaves = [x.clone().requires_grad_() for x in qkv]

        def both() -> list[Tensor]:
            o = function(*leaves)
            return [back(x) for x in (o, *torch.autograd.grad(o, leaves, grad_o))]

        return both

    def back(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if heads_first else x

    return Contender(name, prepare, definition, ours, threads)


def define(
    inputs: Inputs,
    *,
    gradients: bool,
    softmax: bool,
    left: int | None = None,
    right: int | None = 0,
    normalize: bool = True,
) -> Definition:
    """Define attention of `inputs`, with the options of `definitions.attention`.

    The definition in fp64 takes quadratic time, so for long sequences it covers only the first and last head.
    """
    length = inputs.q.shape[1]
    function = "softmax" if softmax else "linear" if normalize else "linear, not normalised"
    operations = flops.of_head(function, length, WIDTH, gradients, left=left, right=right)
    heads = slice(None, None, HEADS - 1 if length > COMPARE_ALL_UP_TO else None)
    reach = length if left is None else min(length, left + 1 + (right or 0))

    def compared(x: Tensor) -> Tensor:
        return x[:, :, heads]

    def compute() -> list[Tensor]:
        *qkv, grad_o = map(compared, inputs)
        leaves = [x.double().requires_grad_(gradients) for x in qkv]
        o = definitions.attention(*leaves, softmax=softmax, left=left, right=right, normalize=normalize)
        return definitions.with_gradients(o, leaves, grad_o) if gradients else [o]

    return Definition(
        compute,
        RESULTS if gradients else RESULTS[:1],
        tolerance(inputs.q.dtype, reach + WIDTH),
        HEADS * operations,
        (2 if gradients else 1) * 4 * inputs.q.nbytes,
        compared,
    )
