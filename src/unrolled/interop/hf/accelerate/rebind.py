"""Give one layer another forward: a copy of its own forward that calls other functions.

The layers of transformers call `causal_conv1d_fn` and so on as functions of their modelling file. Replacing
the functions there would change every model of the family; a copy of the forward changes only one layer.
"""

import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType

from torch import nn

Function = Callable[..., object]

_MARK = "_unrolled_forward"


def has_hooked_forward(layer: nn.Module) -> bool:
    """Whether the forward of a layer is neither its class's nor one from `set_forward`.

    An accelerated layer runs that of its class after unpickling.
    """
    forward = vars(layer).get("forward")
    of_class = forward is None or getattr(forward, "__func__", None) is type(layer).forward
    return not of_class and not _is_ours(forward)


def functions_called(forward: Function) -> dict[str, Function]:
    """Return the functions of its module that a forward may call, by name, also through decorators."""
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return {}
    scope, names = plain.__globals__, plain.__code__.co_names
    return {name: scope[name] for name in names if callable(scope.get(name))}


def rebound(forward: Function, functions: Mapping[str, Function]) -> FunctionType:
    """Copy a forward, with its decorators, so that it calls these functions by these names."""
    if not isinstance(forward, FunctionType):
        raise TypeError(f"forward is a {type(forward).__name__}, but must be a function")
    inner: Function | None = getattr(forward, "__wrapped__", None)
    if inner is None:
        scope = {**forward.__globals__, **functions}
        del scope["__name__"]  # torch.compile would look up the functions in the module of this name
        return _copied(forward, scope, forward.__closure__)
    new = rebound(inner, functions)
    cells = (CellType(new) if cell.cell_contents is inner else cell for cell in forward.__closure__ or ())
    copy = _copied(forward, forward.__globals__, tuple(cells))
    vars(copy)["__wrapped__"] = new
    return copy


def _copied(
    function: FunctionType, scope: dict[str, object], closure: tuple[CellType, ...] | None
) -> FunctionType:
    code = function.__code__.replace()  # a new code object, since torch.compile caches by code object
    copy = FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    vars(copy).update(vars(function))
    return copy


def set_forward(layer: nn.Module, forward: Function) -> None:
    """Let a layer run `forward` in place of the forward of its class."""
    setattr(forward, _MARK, True)
    vars(layer)["forward"] = MethodType(forward, layer)


def restore_forward(layer: nn.Module) -> None:
    """Let a layer run the forward of its class again if `set_forward` has replaced it."""
    if _is_ours(vars(layer).get("forward")):
        del vars(layer)["forward"]
    elif _is_ours(vars(layer).get("_old_forward")):  # below a hook of the package accelerate
        vars(layer)["_old_forward"] = MethodType(type(layer).forward, layer)


def _is_ours(forward: object) -> bool:
    """Whether `set_forward` has set this forward; a wrapper has the mark too, but is not a method."""
    return isinstance(forward, MethodType) and hasattr(forward, _MARK)
