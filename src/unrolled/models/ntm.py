r"""Recurrent layers, by default a Neural Turing Machine, with a linear output of bits or numbers.

    bits       p(bit_t = 1) = sigmoid(W h_t + b)        after each step
    numbers    y = W h_T + b                            after the last

with h the last layer's outputs. Graves, Wayne and Danihelka 2014, "Neural Turing Machines", arXiv 1410.5401,
section 4. Any other cell can be used instead; the paper compares with an LSTM.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import IGNORED, UnsupportedError
from unrolled.fields import FromData, Size
from unrolled.models.bits import bit_loss, check_numbers
from unrolled.models.cells import stack_of
from unrolled.models.config import ModelConfig
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import shape
from unrolled.ops.precision import accumulated
from unrolled.recurrent.ntm import NTM, NTMTrace


@dataclass(kw_only=True)
class NTMModelConfig(ModelConfig):
    """The fields of recurrent layers with a linear output.

    Attributes:
        input_size: channels of the inputs.
        output_size: number of bits or numbers to predict.
        cell: name of the recurrent layers in `unrolled.recurrent`.
        cell_options: their further arguments, such as `{"controller": "feedforward", "memory_size": 64}`.
        n_layers: number of layers.
        hidden_size: width of each layer's output.
    """

    input_size: Annotated[Size, FromData("input_size")]
    output_size: Annotated[Size, FromData("output_size")]
    cell: str = "ntm"
    cell_options: dict[str, Any] = field(default_factory=dict)
    n_layers: Size = 1
    hidden_size: Size = 100


class _Layers(SavedModel):
    """Recurrent layers and a linear output. Weights have the initial values of the layers.

    Raises:
        ValueError: there is no such cell, or it does not take one of its options.
    """

    config_type = NTMModelConfig
    config: NTMModelConfig

    def __init__(self, config: NTMModelConfig) -> None:
        super().__init__(config)
        widths = [config.input_size] + [config.hidden_size] * config.n_layers
        self.stack = stack_of(config.cell, config.cell_options, widths)
        self.head = nn.Linear(config.hidden_size, config.output_size)

    def hidden(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The input of the output layer: `[B,T,hidden_size]`."""
        return cast(Tensor, self.stack(x, key_padding_mask=key_padding_mask))

    @torch.no_grad()
    def trace(self, x: Tensor) -> NTMTrace:
        """The head weights of the first layer while it reads `x [B,T,input_size]`.

        Raises:
            UnsupportedError: the cell is not a Neural Turing Machine.
        """
        layer = self.stack.layers[0]
        if not isinstance(layer, NTM):
            raise UnsupportedError(f"the cell {self.config.cell!r} has no heads to trace; use cell='ntm'")
        return layer.trace(x)


class NTMModel(_Layers):
    """Predicts bits at every step, p(bit = 1) = sigmoid(logit)."""

    model_name = "ntm"

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits `[B,T,output_size]` after each step of `x [B,T,input_size]`.

        Steps at padding (`[B,T]`, True) are skipped; their logits are meaningless.
        """
        return cast(Tensor, self.head(self.hidden(x, key_padding_mask=key_padding_mask)))

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean binary cross-entropy in nats per bit; see `unrolled.models.bits.bit_loss`.

        Args:
            inputs: as `x` of `forward`.
            targets: `[B,T,output_size]`, floating point, from 0 to 1; -100 and those at padding are ignored.
            key_padding_mask: see `forward`.
        """
        return bit_loss(self(inputs, key_padding_mask=key_padding_mask), targets, key_padding_mask)

    @torch.no_grad()
    def wrong_bits(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Number of wrongly predicted bits in each row, `[B]`: a bit is 1 where p > 1/2.

        Raises:
            ValueError: the targets have another shape than the bits, or are integers.
        """
        logits = self(inputs)
        check_numbers(targets, logits)
        wrong = (logits > 0) != (targets > 0.5)
        return (wrong & (targets != IGNORED)).flatten(1).sum(1)


class NTMNumbers(_Layers):
    """Predicts numbers after the last step of a sequence."""

    model_name = "ntm_numbers"

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Numbers `[B,output_size]` after the last valid step of `x [B,T,input_size]`.

        Raises:
            ValueError: `x` has length 0.
        """
        hidden = self.hidden(x, key_padding_mask=key_padding_mask)
        if x.shape[1] == 0:
            raise ValueError(f"x has shape {shape(x)}, but must have at least one step")
        if key_padding_mask is None:
            last = hidden[:, -1]
        else:
            place = torch.arange(x.shape[1], device=x.device).masked_fill(key_padding_mask, 0).amax(1)
            last = hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)
        return cast(Tensor, self.head(last))

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean squared error, computed in at least fp32; 0 for no rows.

        Args:
            inputs: as `x` of `forward`.
            targets: floating point `[B]` where output_size is 1, else `[B,output_size]`.
            key_padding_mask: see `forward`.

        Raises:
            ValueError: an argument of the wrong shape or type.
        """
        numbers = self(inputs, key_padding_mask=key_padding_mask)
        if self.config.output_size == 1 and targets.dim() == 1:
            numbers = numbers.squeeze(1)
        check_numbers(targets, numbers)
        squares = F.mse_loss(accumulated(numbers), accumulated(targets), reduction="none")
        return squares.sum() / max(1, squares.numel())
