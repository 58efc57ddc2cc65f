"""Recurrent layers on top of each other."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from unrolled.contract import CAUSAL_RECURRENCE, Supports
from unrolled.ops.dropout import Dropout
from unrolled.recurrent._layer import RecurrentLayer, check_layer


class StackedState(NamedTuple):
    """The state of each layer, the lowest first."""

    layers: tuple[tuple[object, ...], ...]


class Stacked(RecurrentLayer[StackedState]):
    """Recurrent layers, each of which reads the outputs of the one below.

        y_0 = x        y_l = layer_l(dropout(y_(l-1))), without dropout for l = 1

    With layers of one cell and size, this equals torch's layer of that cell with `num_layers` and `dropout`.
    Only methods that all layers support can be called: with a `Bidirectional` layer, only `forward`.

    Args:
        layers: at least one, of any cells; the `hidden_size` of each is the `input_size` of the next.
        dropout: probability of zeroing a number between two layers, in training.

    Raises:
        ValueError: no layer, widths that do not fit, or a dropout outside [0, 1).
    """

    def __init__(self, layers: Sequence[RecurrentLayer[Any]], *, dropout: float = 0.0):
        if not isinstance(layers, Sequence):
            raise ValueError(f"layers is {layers!r}, but must be a sequence of recurrent layers")
        if not layers:
            raise ValueError("layers is empty, but must have at least one layer")
        for i, layer in enumerate(layers):
            check_layer(f"layers[{i}]", layer)
            if i and layer.input_size != layers[i - 1].hidden_size:
                raise ValueError(
                    f"layers[{i}] has input_size {layer.input_size}, but must have "
                    f"{layers[i - 1].hidden_size}, the hidden_size of the layer before"
                )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, but must be a probability in [0, 1)")
        super().__init__(layers[0].input_size, layers[-1].hidden_size)
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)
        self.supports = _shared([layer.supports for layer in layers])

    def init_state(self, batch_size: int) -> StackedState:
        """Make the states of the layers for `batch_size` sequences before their first token."""
        return StackedState(tuple(layer.init_state(batch_size) for layer in self._layers()))

    def forward(self, x: Tensor, *others: Tensor | None, **masks: Tensor | None) -> Tensor:
        """Run all layers over whole sequences; see `RecurrentLayer.forward`."""
        for i, layer in enumerate(self._layers()):
            x = layer(self.dropout(x) if i else x, *others, **masks)
        return x

    def prefill(
        self, x: Tensor, state: StackedState, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, StackedState]:
        """Run all layers over `x [B,T,input_size]` from `state`; see `RecurrentLayer.prefill`."""
        after = []
        for i, (layer, before) in enumerate(zip(self._layers(), self._states(state), strict=True)):
            x, now = layer.prefill(self.dropout(x) if i else x, before, key_padding_mask=key_padding_mask)
            after.append(now)
        return x, StackedState(tuple(after))

    def step(self, x_t: Tensor, state: StackedState) -> tuple[Tensor, StackedState]:
        """Run one token `x_t [B,input_size]` through all layers: `[B,hidden_size]` and the new state."""
        after = []
        for i, (layer, before) in enumerate(zip(self._layers(), self._states(state), strict=True)):
            x_t, now = layer.step(self.dropout(x_t) if i else x_t, before)
            after.append(now)
        return x_t, StackedState(tuple(after))

    def _layers(self) -> list[RecurrentLayer[Any]]:
        return cast("list[RecurrentLayer[Any]]", list(self.layers))

    def _states(self, state: StackedState) -> tuple[tuple[object, ...], ...]:
        """Check the number of states; each layer checks its own."""
        if self.supports.recurrence == "none":
            self.init_state(0)  # raises, and says why
        n = len(self.layers)
        if not isinstance(state, StackedState) or len(state.layers) != n:
            kind = type(state).__name__
            found = f"{kind} of {len(state.layers)} layers" if isinstance(state, StackedState) else kind
            raise ValueError(
                f"state is a {found}, but must be a StackedState of {n} layers, "
                "from init_state or prefill of this stack"
            )
        return state.layers


def _shared(claims: list[Supports]) -> Supports:
    """Return the claims of a stack of layers with these claims."""
    causal = all(claim.causal for claim in claims)
    found = {claim.recurrence for claim in claims}
    recurrence = "none" if not causal else "growing" if "growing" in found else "constant"
    dynamic = all(claim.dynamic_length for claim in claims)
    shared = CAUSAL_RECURRENCE.but(causal=causal, bidirectional=not causal)
    return shared.but(recurrence=recurrence, dynamic_length=dynamic)
