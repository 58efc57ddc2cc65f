"""Run models of transformers with linear-attention layers on this library's CPU kernels.

On a CPU, transformers computes the recurrences of such layers with reference code in Python. `accelerate`
replaces the functions of this code, layer by layer, by functions with the same arguments and results. `table`
lists the functions.
"""

from collections.abc import Iterable

from torch import nn

from unrolled.contract import UnsupportedError
from unrolled.interop.hf.accelerate import lightning
from unrolled.interop.hf.accelerate.rebind import (
    Function,
    functions_called,
    has_hooked_forward,
    rebound,
    restore_forward,
    set_forward,
)
from unrolled.interop.hf.accelerate.report import AccelerationReport, LayerReport
from unrolled.interop.hf.accelerate.table import REPLACEMENTS, why_kept

__all__ = ["AccelerationReport", "LayerReport", "accelerate", "restore"]


def accelerate(model: nn.Module) -> AccelerationReport:
    """Run the linear-attention layers of a model of transformers with this library's kernels, in place.

    Weights, configuration, caches and the class of the model stay the same, so it trains, generates and is
    saved as before, and other models are not affected. Logits and gradients change only by rounding. A copy
    by `copy.deepcopy` is accelerated too; an unpickled model is not. Softmax attention is not touched. Layers
    whose forward a hook has replaced stay as they are, accelerated or not.

    Args:
        model: a model with layers that call the functions in `table`, or with layers of lightning attention.

    Returns:
        A report of the layers that were found, of what was replaced in them, and of what was kept and why.

    Raises:
        UnsupportedError: there is nothing to replace.
    """
    found = [(layer, _examined(name, layer)) for name, layer in model.named_modules() if _calls(layer)]
    if not any(report.replaced for _, report in found):
        reasons = {reason for _, report in found for reason in report.kept.values()}
        because = "; ".join(sorted(reasons)) or f"no layer calls {', '.join(REPLACEMENTS)}"
        raise UnsupportedError(f"{type(model).__name__} has no layer to accelerate: {because}")
    forwards: dict[tuple[object, ...], Function] = {}  # layers of one kind share one, so it compiles once
    for layer, report in found:
        if report.replaced:
            key = (type(layer), *report.replaced)
            if key not in forwards:
                forwards[key] = _accelerated(layer, report.replaced)
            set_forward(layer, forwards[key])
        elif not has_hooked_forward(layer):
            restore_forward(layer)
    return AccelerationReport(type(model).__name__, tuple(report for _, report in found))


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every layer runs the code of transformers again."""
    for layer in model.modules():
        restore_forward(layer)


def _calls(layer: nn.Module) -> dict[str, Function]:
    """Return the functions of `table` that a layer calls, or its whole forward if that is replaced."""
    forward = type(layer).forward
    if lightning.is_lightning(layer):
        return {"forward": forward}
    called = functions_called(forward)
    return {name: function for name, function in called.items() if name in REPLACEMENTS}


def _examined(name: str, layer: nn.Module) -> LayerReport:
    """Report on what can be replaced in a layer."""
    called, kind = _calls(layer), type(layer).__name__
    if has_hooked_forward(layer):
        reasons = dict.fromkeys(called, "its forward is not that of its class, but of a hook")
        return LayerReport(name, kind, {}, reasons)
    if lightning.is_lightning(layer):
        return LayerReport(name, kind, {"forward": "linear_attention"}, {})
    kept = {each: reason for each in called if (reason := why_kept(each, called[each])) is not None}
    return LayerReport(name, kind, {each: REPLACEMENTS[each][1] for each in called if each not in kept}, kept)


def _accelerated(layer: nn.Module, names: Iterable[str]) -> Function:
    """Return the new forward of a layer, in which the functions of these names are replaced."""
    if lightning.is_lightning(layer):
        return lightning.forward
    return rebound(type(layer).forward, {name: REPLACEMENTS[name][0] for name in names})
