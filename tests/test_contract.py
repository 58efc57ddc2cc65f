"""Every file in `attention/` keeps the contract, on every path that the kernels can take."""

import os
from contextlib import ExitStack

import pytest

from unrolled import attention
from unrolled.ops.kernels import native
from unrolled.ops.kernels.door import prefer
from unrolled.testing import Maker, checks

CASES = [
    pytest.param(name, check, id=f"{name}-{check.__name__.removeprefix('check_')}")
    for name in attention.names()
    for check in checks(attention.load(name).supports)
]


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["triton"] if INTERPRETED else ["plain", *native.instruction_sets()])
def path(request):
    """The plain form and the native one on each instruction set of this machine, or Triton, interpreted."""
    with ExitStack() as stack:
        if request.param in native.instruction_sets():
            stack.enter_context(prefer("native"))
            stack.enter_context(native.use(request.param))
        else:
            stack.enter_context(prefer(request.param))
        yield


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name, check):
    mechanism = attention.load(name)
    check(Maker(mechanism), mechanism.supports)
