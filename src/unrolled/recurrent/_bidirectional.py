"""A recurrent layer from the left and one from the right, side by side."""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from unrolled.contract import CAUSAL_RECURRENCE, UnsupportedError
from unrolled.recurrent._layer import RecurrentLayer, State, check_layer


class BidirectionalState(NamedTuple):
    """The last states of both directions: after the last valid token of each row, and after the first."""

    left_to_right: Any  # a state of that layer
    right_to_left: Any


class Bidirectional(RecurrentLayer[BidirectionalState]):
    """Reads a sequence from both sides: `[B,T,input_size]` to `[B,T,hidden_size]`, the sum of both widths.

        y_t = [left_to_right(x)_t; reversed(right_to_left(reversed(x)))_t]

    Schuster and Paliwal 1997, "Bidirectional recurrent neural networks". With two layers of one cell and
    size, this equals torch's layer of that cell with `bidirectional=True`. Every output depends on later
    tokens, so there is no state to continue from, and only `forward` and `read` can be called.

    Args:
        left_to_right: the layer that reads from the first token to the last, of any cell.
        right_to_left: the layer that reads from the last token to the first, of any cell with the same
            `input_size`.

    Raises:
        ValueError: one of the two is not a recurrent layer, or their input sizes differ.
        UnsupportedError: one of the two is bidirectional itself.
    """

    def __init__(self, left_to_right: RecurrentLayer[Any], right_to_left: RecurrentLayer[Any]):
        directions = {"left_to_right": left_to_right, "right_to_left": right_to_left}
        for name, layer in directions.items():
            check_layer(name, layer)
            if not layer.supports.causal:
                raise UnsupportedError(
                    f"{name} is a {type(layer).__name__}, which reads both ways already; "
                    "stack bidirectional layers with Stacked"
                )
        if left_to_right.input_size != right_to_left.input_size:
            raise ValueError(
                f"right_to_left has input_size {right_to_left.input_size}, but must have "
                f"{left_to_right.input_size}, that of left_to_right"
            )
        super().__init__(left_to_right.input_size, left_to_right.hidden_size + right_to_left.hidden_size)
        self.left_to_right, self.right_to_left = left_to_right, right_to_left
        dynamic = all(layer.supports.dynamic_length for layer in directions.values())
        both_ways = CAUSAL_RECURRENCE.but(causal=False, bidirectional=True, recurrence="none")
        self.supports = both_ways.but(dynamic_length=dynamic)

    def forward(self, x: Tensor, *others: Tensor | None, **masks: Tensor | None) -> Tensor:
        """Run both layers over whole sequences; see `RecurrentLayer.forward`."""
        forth = self.left_to_right(x, *others, **masks)
        padding, cu_seqlens = masks.get("key_padding_mask"), masks.get("cu_seqlens")
        padding = None if padding is None else padding.flip(1)
        cu_seqlens = None if cu_seqlens is None else x.shape[1] - cu_seqlens.flip(0)
        back = self.right_to_left(x.flip(1), key_padding_mask=padding, cu_seqlens=cu_seqlens)
        return torch.cat([forth, back.flip(1)], -1)

    def read(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> tuple[Tensor, BidirectionalState]:
        """Run as `forward` does, and also return the last states of both layers.

        Args:
            x: `[B,T,input_size]`.
            key_padding_mask: `[B,T]`, True = padding, on any side.

        Returns:
            `[B,T,hidden_size]`, and the last states of both layers.

        Raises:
            ValueError: an argument of the wrong shape or type.
        """
        forth, last = _run(self.left_to_right, x, key_padding_mask)
        mirrored = None if key_padding_mask is None else key_padding_mask.flip(1)
        back, first = _run(self.right_to_left, x.flip(1), mirrored)
        return torch.cat([forth, back.flip(1)], -1), BidirectionalState(last, first)

    def init_state(self, batch_size: int) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError(
            "a bidirectional layer reads later tokens too, so it has no state to continue from; "
            "use forward over whole sequences"
        )

    def prefill(
        self, x: Tensor, state: BidirectionalState, *, key_padding_mask: Tensor | None = None
    ) -> NoReturn:
        """Raise UnsupportedError."""
        self.init_state(0)

    def step(self, x_t: Tensor, state: BidirectionalState) -> NoReturn:
        """Raise UnsupportedError."""
        self.init_state(0)


def _run(layer: RecurrentLayer[State], x: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, State]:
    layer._check_input("x", x, 3)
    return layer.prefill(x, layer.init_state(len(x)), key_padding_mask=key_padding_mask)
