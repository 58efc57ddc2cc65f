"""Booleans and numbers of a wrong type are refused by name: in every mechanism, every cell and every model."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import pytest

from unrolled import alignment, attention, recurrent
from unrolled.models import KINDS

WRONG = {bool: ["no", 1, "-"], int: [1.5, "x", True, math.nan], float: ["x", math.nan, True]}
NEEDED = {"n_heads": 2, "image_size": [8, 8], "patch_size": [4, 4]}  # 8 for all that is not here
ALSO = {
    "encoder": {"vocab_size": 8, "n_classes": 2},
    "perceiver": {"vocab_size": 8},
    "perceiver_io": {"vocab_size": 8, "n_classes": 2},
}


def numbers(made: Any) -> dict[str, type]:
    """Name the arguments that take booleans, integers or numbers, or None beside them."""
    own = [made] if is_dataclass(made) else [x for x in made.__mro__ if x.__module__.startswith("unrolled")]
    hints: dict[str, Any] = {}
    for each in own:
        taken = inspect.signature(each.__init__).parameters if "__init__" in each.__dict__ else ()
        found = get_type_hints(each if is_dataclass(each) else each.__init__) if taken else {}
        hints = {name: found[name] for name in taken if name in found} | hints
    kinds = {
        name: [x for x in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if x is not NoneType]
        for name, hint in hints.items()
    }
    return {name: kind for name, [kind, *others] in kinds.items() if kind in WRONG and not others}


def required(made: Any) -> dict[str, Any]:
    if is_dataclass(made):
        names = [name for name, x in inspect.signature(made).parameters.items() if x.default is x.empty]
    else:
        taken = inspect.signature(made.__init__).parameters.values()
        ordinary = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [x.name for x in taken if x.default is x.empty and x.kind in ordinary and x.name != "self"]
        names = [
            *names,
            *(x for x in ("d_model", "n_heads") if "d_model" in numbers(made) and x not in names),
        ]
    return {name: NEEDED.get(name, 8) for name in names}


def everything() -> Iterator[Any]:
    for name in attention.names():
        mechanism: Any = attention.load(name)
        one_way = {} if mechanism.supports.bidirectional else {"causal": True}
        yield name, mechanism, required(mechanism) | one_way
    for name in alignment.names():
        yield name, alignment.load(name), required(alignment.load(name))
    for name in recurrent.names():
        yield f"cell {name}", recurrent.load(name), required(recurrent.load(name))
    for name, kind in KINDS.items():
        yield f"model {name}", kind.config_type, required(kind.config_type) | ALSO.get(name, {})


CASES = [
    pytest.param(made, base, option, kind, id=f"{name}-{option}")
    for name, made, base in everything()
    for option, kind in numbers(made).items()
]


def test_the_table_has_them_all() -> None:
    found = {case.id for case in CASES}
    assert {"linear-causal", "linear-bias", "softmax-rotary", "hard-bias", "cell ntm-reach"} <= found
    assert {f"model decoder-{x.name}" for x in fields(KINDS["decoder"].config_type)} & found
    assert len(found) > 400


@pytest.mark.parametrize(("made", "base", "option", "kind"), CASES)
def test_a_wrong_type_is_refused_by_name(made: Any, base: dict[str, Any], option: str, kind: type) -> None:
    if option == "input_dim":
        base = {name: x for name, x in base.items() if name != "vocab_size"}  # one or the other
    for value in WRONG[kind]:
        with pytest.raises(ValueError, match=option):
            made(**base | {option: value})


@pytest.mark.parametrize("name", attention.names())
def test_an_unknown_option_is_refused_with_those_that_there_are(name: str) -> None:
    kind = attention.load(name)
    with pytest.raises(
        TypeError, match=rf"{kind.__name__} has no option 'nothing'; its options are .*n_heads.*bias"
    ):
        kind(16, 4, causal=kind.supports.causal, nothing=1)


def test_an_option_of_another_mechanism_is_refused() -> None:
    with pytest.raises(
        TypeError, match="LSTM has no option 'n_heads'; its options are input_size, hidden_size"
    ):
        recurrent.load("lstm")(4, 4, n_heads=2)
