"""Every file in `recurrent/` keeps the contract."""

import pytest
from contract_parts import MARKS

from unrolled import recurrent
from unrolled.testing import CellMaker, checks

CASES = [
    pytest.param(
        name,
        check,
        id=f"{name}-{check.__name__.removeprefix('check_')}",
        marks=MARKS.get(check, []),
    )
    for name in recurrent.names()
    for check in checks(recurrent.load(name).supports)
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name, check):
    make = CellMaker(recurrent.load(name))
    check(make, make.supports)


def test_an_unknown_name_gets_the_valid_ones():
    with pytest.raises(ValueError, match=r"cell is 'lstn', but must be one of .*rnn"):
        recurrent.load("lstn")
