"""A field is checked strictly against its annotation, and refused in one sentence that says what it must be."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Len, Lt, MinLen

from unrolled.fields import Checked, Count, Fraction, Positive, Size, check_value

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (0, Size, "an integer of at least 1"),
        (True, Size, "an integer of at least 1"),
        (1.0, Size, "an integer of at least 1"),
        ("1", Size, "an integer of at least 1"),
        (None, Size, "an integer of at least 1"),
        (0, Size | None, "an integer of at least 1, or None"),
        (-1, Count, "an integer of at least 0"),
        (2**63, Size, "an integer of 64 bits"),
        (2**63, Size | None, "an integer of 64 bits"),
        (2**63, list[Size] | Literal["all"], "a list of integers of at least 1, or 'all'"),
        (4, Annotated[int, Ge(1), Le(3)], "an integer from 1 to 3"),
        (0, Positive, "a number above 0"),
        (NAN, Positive, "a number above 0"),
        (INF, Positive, "a number above 0"),
        (True, Positive, "a number above 0"),
        (10**400, Positive, "a number above 0"),
        (1, Fraction, "a number in [0, 1)"),
        (0, Annotated[float, Gt(0), Lt(1)], "a number in (0, 1)"),
        (0, Annotated[float, Gt(0), Le(1)], "a number in (0, 1]"),
        (2, Annotated[float, Ge(0), Le(1)], "a number from 0 to 1"),
        (2, Annotated[float, Le(1)], "a number of at most 1"),
        (1, Annotated[float, Lt(1)], "a number below 1"),
        (1, bool, "True or False"),
        (1, bool | None, "True or False, or None"),
        ("c", Literal["a", "b"], "one of 'a', 'b'"),
        (["a"], Literal["a", "b"], "one of 'a', 'b'"),
        (False, Literal[True], "True"),
        (3, str, "a string"),
        (3, str | Path | None, "a string, a path, or None; a name like 3.5 needs quotes"),
        ([], str | Path | None, "a string, a path, or None"),
        (3, str | list[str], "a string, or a list of strings"),
        ((1, 2), list[int], "a list of integers"),
        ([0], list[Size], "a list of integers of at least 1"),
        ([], Annotated[list[Size], MinLen(1)], "a list of 1 or more integers of at least 1"),
        ([1], Annotated[list[Size], Len(2, 3)], "a list of 2 to 3 integers of at least 1"),
        ((0.5,), tuple[Fraction, Fraction], "a list of 2 numbers in [0, 1)"),
        (3, dict[str, Any], "a dict"),
        ({"a": 3}, dict[str, dict[str, Any]], "a dict of dicts"),
        ({"a": {"b": 3}}, dict[str, dict[str, list[Any]]], "a dict of dicts of lists"),
    ],
)
def test_another_type_and_what_is_out_of_range_are_refused(value: Any, hint: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'x is {value!r}, but must be {expected}')}$"):
        check_value("x", value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, Size),
        (2**63 - 1, Size),
        (None, Size | None),
        (0, Fraction),
        (0.5, Fraction),
        (10**30, Positive),
        (Path("a"), str | Path | None),
        (["a"], str | list[str]),
        ({"a": {"b": object()}}, dict[str, dict[str, Any]]),
        ((0.0, 0.5), tuple[Fraction, Fraction]),
    ],
)
def test_what_fits_is_taken_as_it_is(value: Any, hint: Any) -> None:
    check_value("x", value, hint)


@dataclass
class Config(Checked):
    width: Size = 4
    part: Fraction = 0.5


@dataclass
class Wider(Config):
    width: Annotated[int, Ge(8)] = 8


def test_a_subclass_is_checked_by_its_own_annotations() -> None:
    assert Config(width=4).part == 0.5
    with pytest.raises(ValueError, match="width is 4, but must be an integer of at least 8"):
        Wider(width=4)
    with pytest.raises(ValueError, match=r"part is 1, but must be a number in \[0, 1\)"):
        Wider(part=1)


@pytest.mark.slow
def test_pydantic_is_imported_with_the_first_config_only() -> None:
    script = (
        "import sys, unrolled.models, unrolled.data, unrolled.training; assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
