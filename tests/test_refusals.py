"""Every public verb names the argument that is wrong, says what it is, and what it must be."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from public_calls import Call, cell, mechanism, model
from small_models import FIELDS
from torch import Tensor

from unrolled import alignment, attention, recurrent
from unrolled.contract import UnsupportedError
from unrolled.generation import generate
from unrolled.ops.state import leaves, map_tensors

OWNERS = [
    *((mechanism, name) for name in [*attention.names(), *alignment.names()]),
    *((cell, name) for name in recurrent.names()),
    *((model, kind) for kind in FIELDS),
]
SAYS_WHAT_IT_MUST_BE = re.compile(r"\b(must|convert one|move one)\b")


def wrong(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield values that are invalid in place of `x`, with a description."""
    if not isinstance(x, Tensor):
        if name == "batch_size":
            yield from (("-1", -1), ("a list", [2]), ("a text", "2"), ("a fraction", 2.5))
        return
    yield from (("a list", x.tolist()), ("None", None), ("an array", x.numpy()), ("a text", "x"))
    yield "on meta", x.to("meta")
    yield "a scalar", x.flatten()[0]
    yield "of an axis more", x[None, None]
    yield "complex", x.to(torch.complex64)
    if x.is_floating_point():
        yield "of integers", x.long()
    elif x.dtype == torch.long:
        yield from (("of fractions", x.float()), ("negative", x - 100), ("out of range", x + 100))


def optional(function: Any, name: str) -> bool:
    taken = inspect.signature(getattr(function, "forward", function)).parameters
    return name in taken and taken[name].default is None


@pytest.mark.parametrize(("make", "name"), OWNERS, ids=[name for _, name in OWNERS])
def test_a_wrong_argument_is_refused_by_name(make: Any, name: str) -> None:
    torch.manual_seed(0)
    calls: dict[str, Call] = make(name)
    found = []
    for label, (function, arguments) in calls.items():
        if inspect.isclass(function):
            with pytest.raises(TypeError, match="no_such_option"):
                function(**arguments, no_such_option=1)
            continue
        if function is generate:
            continue  # tested with generation, where lists of prompts are valid
        with torch.no_grad():
            function(**arguments)
        has_weights = any(True for _ in getattr(function, "__self__", function).parameters())
        for argument, right in arguments.items():
            for what, value in wrong(argument, right):
                if value is None and optional(function, argument):
                    continue
                if what == "on meta" and not has_weights:
                    continue  # it may run on meta tensors
                case = f"{label}: {argument} is {what}"
                try:
                    with torch.no_grad():
                        function(**arguments | {argument: value})
                except (ValueError, TypeError, UnsupportedError) as error:
                    message = str(error)
                    if argument not in message or not SAYS_WHAT_IT_MUST_BE.search(message):
                        found.append(f"{case}: {message!r}")
                except Exception as error:
                    found.append(f"{case}: {type(error).__name__}: {error}")
                else:
                    found.append(f"{case}: was accepted")
    assert not found, "\n".join([f"{len(found)} calls", *found])


@pytest.mark.parametrize("kind", [kind for kind in FIELDS if f"{kind} step" in model(kind)])
def test_a_state_with_one_wrong_tensor_is_refused(kind: str) -> None:
    function, arguments = model(kind)[f"{kind} step"]
    state, found = arguments["state"], []
    count = len(leaves(state))
    changes: dict[str, Any] = {
        "None": lambda x: None,
        "a list": Tensor.tolist,
        "of another type": lambda x: x.to(torch.complex64),
        "of a row more": lambda x: torch.cat([x, x[:1]]),
        "of an axis more": lambda x: x[None],
    }
    for at in range(count):
        for what, change in changes.items():
            numbers = iter(range(count))
            spoiled = map_tensors(lambda x, c=change, n=numbers, a=at: c(x) if next(n) == a else x, state)
            try:
                function(**arguments | {"state": spoiled})
            except ValueError as error:
                if not str(error).startswith(("state", "memory")) or not SAYS_WHAT_IT_MUST_BE.search(
                    str(error)
                ):
                    found.append(f"tensor {at} is {what}: {str(error)!r}")
            except Exception as error:
                found.append(f"tensor {at} is {what}: {type(error).__name__}: {error}")
            else:
                found.append(f"tensor {at} is {what}: was accepted")
    assert not found, "\n".join(found)
