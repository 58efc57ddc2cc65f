"""The base of recurrent layers: forward, prefill and step, from one step of a cell."""

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from unrolled.contract import CAUSAL_RECURRENCE, UnsupportedError
from unrolled.ops.checks import check_cu_seqlens, check_device, check_input, check_key_padding_mask
from unrolled.ops.observing import changed, may_read
from unrolled.ops.options import ChecksOptions, at_least
from unrolled.ops.packing import pad_packed, valid_tokens_first
from unrolled.ops.precision import accumulation_dtype, without_autocast
from unrolled.ops.sequence import refuse
from unrolled.ops.state_checks import CONSTANT, Growing, check_state

State = TypeVar("State", bound=tuple[object, ...])


class RecurrentLayer(ChecksOptions, nn.Module, Generic[State]):
    """Runs a cell over a sequence: `[B,T,input_size]` to `[B,T,hidden_size]`.

    A cell derives from this class and defines `init_state` and `advance`, one step from projected inputs.
    `project` computes what depends on the inputs alone, for all tokens at once; by default it applies
    `input_proj`, a linear layer of the cell. A cell whose steps run faster together overrides `scan`. A cell
    with a kernel from inputs to outputs overrides `fused`, which is tried first if no token is padding and
    `input_proj` is a plain linear layer without hooks. States and steps are in fp32 (fp64 for fp64 weights)
    for any type of the input. `torch.export` unrolls the loop over the steps, so an exported graph takes a
    single length.

    Args:
        input_size: width of the inputs.
        hidden_size: width of the outputs.

    Raises:
        ValueError: a size below 1.
    """

    supports = CAUSAL_RECURRENCE.but(dynamic_length=False)
    growing: Growing = CONSTANT
    input_proj: nn.Linear

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.input_size = at_least(1, "input_size", input_size)
        self.hidden_size = at_least(1, "hidden_size", hidden_size)

    def init_state(self, batch_size: int) -> State:
        """Make the state of `batch_size` sequences before their first token; most cells start at zeros."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """Compute what depends on the inputs `[...,input_size]` alone: `[...,P]`."""
        return self.input_proj(x)  # type: ignore[no-any-return]

    def advance(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one step: `inputs [B,P]`, in the dtype of the state, to `[B,hidden_size]` and the new state."""
        raise NotImplementedError

    def scan(self, inputs: Tensor, state: State, padding: Tensor | None) -> tuple[Tensor, State]:
        """Run all steps, `inputs [B,T,P]`: `[B,T,hidden_size]` and the last state.

        A step at padding (`[B,T]`, True) leaves the state of its row as it was; its output has no meaning.
        """
        return self._unroll(self.advance, inputs, state, padding)

    def _unroll(
        self,
        advance: Callable[[Tensor, State], tuple[Tensor, State]],
        inputs: Tensor,
        state: State,
        padding: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Run one step after the other; see `scan`."""
        outputs = []
        for t, now in enumerate(inputs.unbind(1)):
            y, after = advance(now, state)
            state = after if padding is None else keep(padding[:, t], state, after)
            outputs.append(y)
        if not outputs:  # an empty output that autograd can differentiate
            return nn.functional.pad(inputs[..., :0], (0, self.hidden_size)), state
        return torch.stack(outputs, 1), state

    def fused(self, x: Tensor, state: State) -> tuple[Tensor, State] | None:
        """Run `project` and `scan` without padding in one kernel; return None where there is no kernel."""
        return None

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Run over whole sequences from their beginning: `[B,T,input_size]` to `[B,T,hidden_size]`.

        Args:
            x: the sequences.
            key: refused, since a recurrent layer reads one sequence; the signature is that of attention.
            value: refused.
            key_padding_mask: `[B,T]`, True = padding, on any side.
            attn_mask: refused.
            cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row.

        Raises:
            ValueError: an argument of the wrong shape or type.
            UnsupportedError: a second sequence, or an `attn_mask`.
        """
        if key is not None or value is not None:
            raise UnsupportedError(
                f"{self._name} is recurrent, so it reads one sequence: to continue from a state use prefill, "
                "and pass a padding mask as key_padding_mask"
            )
        if attn_mask is not None:
            raise UnsupportedError(f"{self._name} is recurrent, so it takes no attn_mask")
        self._check_input("x", x, 3)
        # A pack becomes rows padded on the right. This padding has no effect on the tokens before it.
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise ValueError(
                    "key_padding_mask was given with cu_seqlens: packed sequences have no padding"
                )
            check_cu_seqlens(cu_seqlens, x, x)
            rows, padding = pad_packed(x, cu_seqlens)
            return self.forward(rows)[~padding].unsqueeze(0)
        if key_padding_mask is not None:
            self._check_padding(key_padding_mask, x)
            (rows,), _, back = valid_tokens_first(key_padding_mask, x)
            return back(self.forward(rows))
        y, _ = self.prefill(x, self.init_state(x.shape[0]))
        return y

    def prefill(
        self, x: Tensor, state: State, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run over `x [B,T,input_size]` from `state`: `[B,T,hidden_size]` and the new state.

        Padded tokens (`key_padding_mask [B,T]`, True = padding, on any side) do not affect the state of their
        row. `state` is not modified. To continue, call `prefill` or `step` with the new state.
        """
        self._check_input("x", x, 3)
        check_state(self, state, x.shape[0], self._weight)
        if key_padding_mask is not None:
            self._check_padding(key_padding_mask, x)
            if may_read(key_padding_mask) and not key_padding_mask.any():
                key_padding_mask = None
            else:
                x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0)
        if key_padding_mask is None and self._is_plain() and (done := self.fused(x, state)) is not None:
            return done
        inputs = self.project(x)
        with without_autocast(x.device):
            y, state = self.scan(inputs.to(self._state_dtype), state, key_padding_mask)
        return y.to(inputs.dtype), state

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one token `x_t [B,input_size]`: `[B,hidden_size]` and the new state; `state` stays as it is."""
        self._check_input("x_t", x_t, 2)
        check_state(self, state, x_t.shape[0], self._weight)
        inputs = self.project(x_t)
        with without_autocast(x_t.device):
            y, state = self.advance(inputs.to(self._state_dtype), state)
        return y.to(inputs.dtype), state

    def extra_repr(self) -> str:
        """Show the widths of inputs and outputs."""
        return f"{self.input_size}, {self.hidden_size}"

    def _check_padding(self, key_padding_mask: Tensor, x: Tensor) -> None:
        check_key_padding_mask(key_padding_mask, *x.shape[:2])
        check_device("key_padding_mask", key_padding_mask, self._weight)

    def _zeros(self, batch_size: int) -> Tensor:
        """Return zeros `[B,hidden_size]` in the dtype of the state."""
        return self._weight.new_zeros(batch_size, self.hidden_size, dtype=self._state_dtype)

    def _is_plain(self) -> bool:
        """Whether `input_proj` is just its weight and bias, without a hook, and not replaced or compiled."""
        if torch.compiler.is_compiling():
            return False
        layer = getattr(self, "input_proj", None)  # a cell may project in another way
        return type(layer) is nn.Linear and layer.bias is not None and not changed([layer])

    @property
    def _weight(self) -> Tensor:
        return next(self.parameters())

    @property
    def _state_dtype(self) -> torch.dtype:
        return accumulation_dtype(self._weight.dtype)

    @property
    def _name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def _check_input(self, name: str, x: Tensor, n_axes: int) -> None:
        refuse("a recurrent layer")
        check_input(name, x, [*("B", "T")[: n_axes - 1], self.input_size], self._weight)


def check_layer(name: str, layer: object) -> None:
    """Require a recurrent layer."""
    if not isinstance(layer, RecurrentLayer):
        raise ValueError(f"{name} is a {type(layer).__name__}, but must be a RecurrentLayer")


def uniform(module: nn.Module, size: int) -> None:
    """Draw every parameter of a module uniformly in +-1/sqrt(size), as torch's recurrent layers do."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))


def keep(rows: Tensor, old: Any, new: Any) -> Any:
    """Select the old state where `rows [B]` is True, and the new one elsewhere."""
    if isinstance(new, Tensor):
        return torch.where(rows.reshape(-1, *[1] * (new.dim() - 1)), old, new)
    parts = [keep(rows, a, b) for a, b in zip(old, new, strict=True)]
    return new._make(parts) if hasattr(new, "_make") else type(new)(parts)
