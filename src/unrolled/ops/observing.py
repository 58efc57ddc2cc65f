"""What watches or changes the computations of torch: tracing, transforms, autograd, modes and hooks."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.modules import module
from torch.utils._device import DeviceContext

HOOKS_OF_ALL = (
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
)
"""The hooks that are registered for all modules."""


def may_read(x: Tensor) -> bool:
    """Whether values of `x` can be read at no cost: on a CPU, neither traced nor transformed."""
    if x.device.type != "cpu" or isinstance(x, FakeTensor):
        return False
    return not torch.compiler.is_compiling() and not transforming()


def exporting() -> bool:
    """Whether torch.export is tracing; PyTorch 2.6 does not tell, so there it counts as not."""
    told: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
    return told()


def transforming() -> bool:
    """Whether a `torch.func` transform or forward-mode AD is active; they support plain operations only."""
    if torch.compiler.is_compiling():
        return False
    forward_mode: int = forward_ad._current_level
    return forward_mode >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def inferring(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, and no autograd, tracing or transform is active.

    Only then may a kernel run that is not a torch operator.
    """
    return not observed() and plain(tensors)


def observed() -> bool:
    """Whether tracing, a transform or a dispatch mode is active."""
    if torch.compiler.is_compiling() or transforming() or torch._C._get_tracing_state():
        return True
    # A default device is a mode too, but has no effect here.
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    others = (mode for mode in modes if type(mode) is not DeviceContext)
    return bool(torch._C._len_torch_dispatch_stack()) or next(others, None) is not None


def plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are exactly `Tensor` or `Parameter`, no subclass, and autograd does not record them."""
    recording = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if type(x) not in (Tensor, Parameter) or x.is_neg() or (recording and x.requires_grad):
            return False
    return True


def changed(modules: Iterable[nn.Module]) -> bool:
    """Whether a module has a hook or its own `forward` or `step`, or there are hooks of all modules."""
    return any(HOOKS_OF_ALL) or any(map(has_own_call, modules))


def has_own_call(module: nn.Module) -> bool:
    """Whether calling a module does more than its class: it has a hook, or its own `forward` or `step`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or {"forward", "step"} & vars(module).keys()
    )
