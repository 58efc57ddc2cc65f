"""The contract of a mechanism with options of its own, in two tests: compiling takes as long as all the rest."""

import pytest

from unrolled.testing import check_compiles, check_dynamic_length, checks

MARKS = {check_compiles: [pytest.mark.compilers], check_dynamic_length: [pytest.mark.slow]}
"""The marks of checks that take long."""


def check_uncompiled(make, *left_out):
    """Run all checks that the claims require, but for compilation and those left out."""
    for check in checks(make.supports):
        if check not in (check_compiles, *left_out):
            check(make, make.supports)


def check_compiled(make):
    check_compiles(make, make.supports)


in_two_parts = pytest.mark.parametrize(
    "check_part",
    [
        pytest.param(check_uncompiled, id="uncompiled"),
        pytest.param(check_compiled, id="compiled", marks=pytest.mark.compilers),
    ],
)
