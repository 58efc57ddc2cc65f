"""Registration of an operation as a torch operator, with derivatives of any order.

`torch.compile` and `torch.export` see one node, and autograd one formula.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Computes = Callable[..., Sequence[Tensor]]
# The library of each operator. An operator is removed with its library, so a reload keeps them all.
_LIBRARIES: dict[str, torch.library.Library] = globals().get("_LIBRARIES", {})


def register(
    forward_schema: str,
    backward_schema: str,
    forward: Computes,
    backward: Computes,
    plain: Computes,
    *,
    like_outputs: Computes,
    like_gradients: Computes | None = None,
    n_inputs: int,
    n_tensors: int,
    n_outputs: int,
    saved_outputs: Sequence[int] = (),
    may_skip: Sequence[int] = (),
) -> Any:
    """Register an operator and its backward operator, and return the operator.

    Args:
        forward_schema: `NAME(inputs, other tensors, options) -> outputs`, as `torch.library` writes it.
        backward_schema: `NAME(output gradients, inputs, other tensors, saved outputs, options, booleans of
            may_skip) -> Tensor[]`.
        forward: computes the outputs, in any memory layout.
        backward: computes the gradients of all inputs; that of an absent input is ignored.
        plain: computes the outputs by differentiable operations, for gradients of gradients.
        like_outputs: returns empty tensors like those of `forward`, for the same arguments.
        like_gradients: returns empty tensors like those of `backward`, for the same arguments; by default,
            tensors like the inputs.
        n_inputs: number of inputs, which are the tensors that have gradients.
        n_tensors: number of inputs and other tensors.
        n_outputs: number of outputs that have gradients; they come first.
        saved_outputs: indices of the outputs that `backward` needs.
        may_skip: indices of the inputs whose gradients `backward` need not always compute. For each of these,
            it gets a boolean.
    """

    def like_inputs(*arguments: Tensor) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in arguments[n_outputs : n_outputs + n_inputs]]

    def contiguous_outputs(*arguments: object) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() for x in forward(*arguments))

    def contiguous_gradients(*arguments: object) -> list[Tensor]:
        return [x.contiguous() for x in backward(*arguments)]

    operator = _define(forward_schema, contiguous_outputs, like_outputs)
    backward_operator = _define(backward_schema, contiguous_gradients, like_gradients or like_inputs)

    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[n_tensors:]
        ctx.save_for_backward(*inputs[:n_tensors], *(output[i] for i in saved_outputs))

    def gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grads, tensors, options = grads[:n_outputs], ctx.saved_tensors, ctx.options
        inputs, others = tensors[:n_inputs], tensors[n_inputs:n_tensors]
        if torch.is_grad_enabled():  # create_graph=True
            found = differentiable_gradients(lambda *xs: plain(*xs, *others, *options), inputs, grads)
        else:
            wanted = (ctx.needs_input_grad[i] for i in may_skip)
            found = backward_operator(*grads, *tensors, *options, *wanted)
        needed = zip(inputs, ctx.needs_input_grad[:n_inputs], found, strict=True)
        of_inputs = (g if x is not None and needs else None for x, needs, g in needed)
        return *of_inputs, *(None for _ in (*others, *options))

    library = _LIBRARIES[forward_schema.partition("(")[0]]
    torch.library.register_autograd(operator, gradient, setup_context=setup_context, lib=library)
    return operator


def _define(schema: str, function: Computes, fake: Computes) -> Any:
    """Define an operator; one of `torch.library.custom_op` would import the compiler in its first call."""
    name, parenthesis, arguments = schema.partition("(")
    qualified = f"unrolled::{name}"
    _LIBRARIES.pop(name, None)  # in case the module is reloaded
    library = _LIBRARIES[name] = torch.library.Library("unrolled", "FRAGMENT")  # type: ignore[no-untyped-call]
    torch.library.define(qualified, parenthesis + arguments, lib=library, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, "CompositeExplicitAutograd", function, lib=library)
    torch.library.register_fake(qualified, fake, lib=library)
    return getattr(torch.ops.unrolled, name).default


def differentiable_gradients(
    run: Computes, inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Differentiate `run`, which consists of differentiable operations, so that the gradients have gradients.

    The gradients are taken with respect to aliases of the inputs. An input may itself be computed from
    another input, and autograd would add up both paths.
    """
    aliases = [None if x is None else x.view_as(x) for x in inputs]
    outputs = run(*aliases)
    required = [x for x in aliases if x is not None and x.requires_grad]
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if pairs:
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, required, gs, create_graph=True, materialize_grads=True))
    else:  # nothing was computed: a pack of no sequences, or queries without keys
        found = iter([torch.zeros_like(x) for x in required])
    return [next(found) if x is not None and x.requires_grad else None for x in aliases]


def gradients(run: Computes, inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    """Differentiate `run`, which consists of differentiable operations; this also works inside an operator.

    The gradient of an absent input is empty.
    """

    def of_present(*present: Tensor) -> tuple[Tensor, ...]:
        rest = iter(present)
        return tuple(run(*(None if x is None else next(rest) for x in inputs)))

    pull_back = torch.func.vjp(of_present, *(x for x in inputs if x is not None))[1]
    found = iter(pull_back(tuple(grads)))
    # Copies, as an operator may not return gradients that share memory.
    return [grads[0].new_empty(0) if x is None else next(found).clone() for x in inputs]
