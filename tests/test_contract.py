"""Every file in `attention/` keeps the contract, on every path that the kernels can take."""

import os
from contextlib import ExitStack

import pytest
import torch
from contract_parts import MARKS
from interpreted import prepare_each_module_once

from unrolled import attention
from unrolled.ops import native
from unrolled.ops.dispatch import prefer
from unrolled.testing import (
    Maker,
    check_compiles,
    check_dynamic_length,
    check_half_precision,
    check_padding_content,
    check_rejects_other_states,
    checks,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PATHS = ["triton"] if INTERPRETED else ["plain", *native.instruction_sets()]
NAMES = ["linear"] if INTERPRETED else attention.names()  # which has all that Triton does here, slowly
ONE_KERNEL_EACH = ("linear", "softmax", "window")  # the others reach these, or none
# No kernel changes what these find: padding is zeroed before any of them.
ON_ANY_PATH = (check_compiles, check_dynamic_length, check_padding_content, check_rejects_other_states)
SLOW = (check_half_precision,)  # runs once, but for the mechanisms that have a kernel of their own
if INTERPRETED:
    prepare_each_module_once()
CASES = [
    pytest.param(
        path,
        name,
        check,
        id=f"{path}-{name}-{check.__name__.removeprefix('check_')}",
        marks=MARKS.get(check, []),
    )
    for path in PATHS
    for name in NAMES
    for check in checks(attention.load(name).supports)
    if path == "plain" or check not in ON_ANY_PATH
    if path == PATHS[0] or name in ONE_KERNEL_EACH or (path == PATHS[1] and check not in SLOW)
]


@pytest.mark.parametrize(("path", "name", "check"), CASES)
def test_contract(path, name, check):
    """The plain form and Triton, interpreted, in fp64; native code, which has no fp64, in fp32."""
    mechanism = attention.load(name)
    on_native = path in native.instruction_sets()
    with ExitStack() as stack:
        stack.enter_context(prefer("native" if on_native else path))
        if on_native:
            stack.enter_context(native.use(path))
        make = Maker(mechanism, dtype=torch.float32 if on_native else torch.float64)
        check(make, make.supports)
