"""Every file in `attention/` keeps the contract: one case per mechanism and check."""

import pytest

from unrolled import attention
from unrolled.testing import Maker, checks

CASES = [
    pytest.param(name, check, id=f"{name}-{check.__name__.removeprefix('check_')}")
    for name in attention.names()
    for check in checks(attention.load(name).supports)
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name, check):
    mechanism = attention.load(name)
    check(Maker(mechanism), mechanism.supports)
