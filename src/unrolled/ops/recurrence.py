"""What recurrences of matrices share: packed sequences that run together, and one torch operator.

Their inputs are a NamedTuple: q `[B,T,H,D]`, k `[B,T,G,D]`, v `[B,T,G,M]`, other tensors `[B,T,...]` or None,
and last the state, with one row per sequence. Each form returns `o [B,T,H,M]` and the last state.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from unrolled.ops.masks import without_padding
from unrolled.ops.operators import register
from unrolled.ops.packing import length_buckets, put_tokens

Form = Callable[[Any], tuple[Tensor, Tensor]]


def run_packed(form: Form, inputs: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a form on each sequence; packed sequences of similar lengths run together, padded on the right."""
    if cu_seqlens is None:
        return form(inputs)
    *tokenwise, state = inputs
    o = inputs.v.new_zeros(*inputs.q.shape[:3], inputs.v.shape[3])
    after = torch.zeros_like(state)
    for rows, tokens, padding in length_buckets(cu_seqlens, inputs.q.shape[1]):
        part = (None if x is None else without_padding(x[0, tokens], padding) for x in tokenwise)
        o_part, state_part = form(inputs._make((*part, state[rows])))
        o, after = put_tokens(o, tokens, padding, o_part), after.index_copy(0, rows, state_part)
    return o, after


def register_recurrence(
    name: str,
    arguments: str,
    kind: Any,
    chosen: Callable[[Any], ModuleType],
    plain: Callable[[Any, Tensor | None], tuple[Tensor, Tensor]],
) -> Any:
    """Register an operator of `kind(inputs)` and `cu_seqlens`, and its gradients; return the operator.

    Args:
        name: its name.
        arguments: its arguments, the fields of `kind` and `cu_seqlens`, as `torch.library` writes them.
        kind: the NamedTuple of the inputs.
        chosen: returns the backend for some inputs, a module with `forward` and `backward`.
        plain: computes the results by differentiable operations.
    """
    n = len(kind._fields)

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = kind(*arguments[:n])
        o, state = chosen(inputs).forward(inputs, arguments[n])
        return o, state

    def backward(grad_o: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
        inputs = kind(*arguments[:n])
        found: list[Tensor] = chosen(inputs).backward(grad_o, grad_state, inputs, arguments[n])
        return found

    def like_outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
        q, _, v, *_, state, _ = arguments
        return v.new_empty(*q.shape[:3], v.shape[3]), state.new_empty(state.shape)

    def like_gradients(grad_o: Tensor, grad_state: Tensor, *arguments: Any) -> list[Tensor]:
        none = grad_o.new_empty(0).double()
        return [none if x is None else x.new_empty(x.shape) for x in arguments[:n]]

    return register(
        f"{name}({arguments}) -> (Tensor, Tensor)",
        f"{name}_backward(Tensor grad_o, Tensor grad_state, {arguments}) -> Tensor[]",
        forward,
        backward,
        lambda *arguments: plain(kind(*arguments[:n]), arguments[n]),
        like_outputs=like_outputs,
        like_gradients=like_gradients,
        n_inputs=n,
        n_tensors=n + 1,
        n_outputs=2,
    )
