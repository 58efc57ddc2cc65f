"""Checks of the options of a mechanism. Each failure is one sentence that names the option."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import torch

State = TypeVar("State")
BITS = 64  # of torch's largest integers


def check_integers(low: int, **sizes: object) -> None:
    """Require integers of at least `low`; bool does not count as one."""
    check_integers_only(**sizes)
    for name, n in sizes.items():
        if n < low:  # type: ignore[operator]
            raise ValueError(f"{name} is {n}, but must be at least {low}")


def check_integers_only(**sizes: object) -> None:
    """Require integers; bool does not count as one."""
    for name, n in sizes.items():
        if type(n) is not int:
            raise ValueError(f"{name} is {n!r}, but must be an integer")
        if n.bit_length() >= BITS:
            limit = f"below 2^{BITS - 1}" if n > 0 else f"above -2^{BITS - 1}"
            raise ValueError(f"{name} is {n}, but must be {limit}")


def at_least(low: int, name: str, size: int) -> int:
    """Return `size`, or raise ValueError naming it unless it is a whole number of at least `low`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < low:
        raise ValueError(f"{name} is {size!r}, but must be a whole number of at least {low}")
    check_integers_only(**{name: size})
    return size


def check_batch_size(batch_size: object) -> None:
    """Require a batch size: an integer of at least 0, or a `torch.SymInt`."""
    if not isinstance(batch_size, torch.SymInt):
        check_integers(0, batch_size=batch_size)


def check_finite(**numbers: object) -> None:
    """Require int or float, but neither infinity nor NaN."""
    for name, x in numbers.items():
        if type(x) not in (int, float) or not math.isfinite(x):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {x!r}, but must be a finite number")


def score_scale(scale: float | None, width: int) -> float:
    """Return the factor of scores of vectors of `width`: a given finite `scale`, or 1/sqrt(width).

    With a width of 0, all scores are 0, whatever the factor.
    """
    if scale is None:
        factor: float = max(width, 1) ** -0.5
        return factor
    check_finite(scale=scale)
    return scale


def check_above_zero(**numbers: object) -> None:
    """Require finite numbers above 0."""
    check_finite(**numbers)
    for name, x in numbers.items():
        if x <= 0:  # type: ignore[operator]
            raise ValueError(f"{name} is {x}, but must be above 0")


def is_number(x: object) -> bool:
    """Return whether `x` is a finite int or float; bool does not count as one."""
    try:
        return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    except OverflowError:  # an int beyond the largest float
        return False


def check_mapping(**options: object) -> None:
    """Require a mapping of names to values."""
    for name, given in options.items():
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} is {given!r}, but must map names to values")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Require one of several names."""
    if value not in list(choices):  # a list, since a value that cannot be hashed is not in it either
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}")


def check_booleans(**flags: object) -> None:
    """Require True or False."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r}, but must be True or False")


CHECKS: dict[type, Callable[..., None]] = {
    bool: check_booleans,
    int: check_integers_only,
    float: check_finite,
    Mapping: check_mapping,
}


class ChecksOptions:
    """A class whose constructors check the types of their simple arguments by the annotations.

    An argument annotated `window: int` accepts integers but not bool, `rotary: bool` accepts True and False,
    `scale: float` accepts numbers except NaN, and `options: Mapping` accepts mappings. With `| None`, None is
    accepted too. The constructor itself checks everything else, such as infinity. The argument of
    `init_state(batch_size)` is checked too.

    Raises:
        ValueError: an argument of another type.
        TypeError: an unknown option; the message lists the known ones.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _checking(cls.__init__)  # type: ignore[method-assign]
        init_state = cls.__dict__.get("init_state")
        if init_state is not None and "batch_size" in inspect.signature(init_state).parameters:
            cls.init_state = _of_a_batch(init_state)  # type: ignore[attr-defined]


def option_names(init: Callable[..., None]) -> list[str] | None:
    """Return the names of a constructor's arguments, without self; None if it accepts any."""
    hints, known = get_type_hints(init), list[str]()
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            known.append(parameter.name)
            continue
        hint = hints.get(parameter.name)
        if get_origin(hint) is not Unpack:  # not `**common: Unpack[SomeOptions]`
            return None
        known += get_type_hints(*get_args(hint))
    return known


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(init).parameters)[1:]  # without self

    @functools.cache
    def kinds() -> dict[str, tuple[type, ...]]:  # at the first call, when all annotated names are defined
        hints = get_type_hints(init)
        return {
            name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            for name, hint in hints.items()
        }

    options = functools.cache(lambda: option_names(init))

    @functools.wraps(init)
    def check(self: object, *args: object, **kwargs: object) -> None:
        known = options()
        if known is not None and (unknown := [name for name in kwargs if name not in known]):
            raise TypeError(
                f"{type(self).__name__} has no option {unknown[0]!r}; its options are {', '.join(known)}"
            )
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            _check_kind(name, value, kinds().get(name, ()))
        init(self, *args, **kwargs)

    return check


def _of_a_batch(init_state: Callable[..., State]) -> Callable[..., State]:
    @functools.wraps(init_state)
    def check(self: object, batch_size: int) -> State:
        check_batch_size(batch_size)
        return init_state(self, batch_size)

    return check


def _check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    kind, *others = kinds or (object,)
    kind = get_origin(kind) or kind
    if kind not in CHECKS or not set(others) <= {NoneType} or (others and value is None):
        return
    if kind is float and isinstance(value, float) and math.isinf(value):
        return
    CHECKS[kind](**{name: value})
