r"""Sequences of bits in, bits out: recurrent layers, by default a Neural Turing Machine, and a logit per bit.

    p(bit_t = 1) = sigmoid(W h_t + b)        h the last layer's output

Graves, Wayne and Danihelka 2014, "Neural Turing Machines", arXiv 1410.5401, section 4. Any other cell can take
the place of theirs; an LSTM is what they compare with.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled import recurrent
from unrolled.contract import IGNORED, UnsupportedError
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import shape
from unrolled.recurrent.ntm import NTM, NTMTrace


@dataclass(kw_only=True)
class NTMModelConfig:
    """A model of bits. Every field is checked when the config is made.

    Attributes:
        n_inputs: channels of the inputs.
        n_bits: bits to predict at each step.
        cell: name of the recurrent layers in `unrolled.recurrent`.
        cell_options: their further arguments, such as `{"controller": "feedforward", "memory_size": 64}`.
        n_layers: number of layers.
        hidden_size: width of each layer's output.
    """

    n_inputs: int
    n_bits: int
    cell: str = "ntm"
    cell_options: dict[str, Any] = field(default_factory=dict)
    n_layers: int = 1
    hidden_size: int = 100

    def __post_init__(self) -> None:
        for name in ("n_inputs", "n_bits", "n_layers", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}, wanted an integer of at least 1")
        if not isinstance(self.cell_options, dict):
            raise ValueError(f"cell_options is {self.cell_options!r}, wanted a dict of options")


class NTMModel(SavedModel):
    """Recurrent layers and a linear output. All weights start as those of their layers.

    Raises:
        ValueError: there is no such cell, or it does not take one of its options.
    """

    model_name = "ntm"
    config_type = NTMModelConfig
    config: NTMModelConfig

    def __init__(self, config: NTMModelConfig) -> None:
        super().__init__(config)
        kind: Any = recurrent.load(config.cell)
        widths = [config.n_inputs] + [config.hidden_size] * config.n_layers
        try:
            self.layers = nn.ModuleList(
                kind(before, after, **config.cell_options)
                for before, after in zip(widths[:-1], widths[1:], strict=True)
            )
        except TypeError as error:  # an option that it does not take
            raise ValueError(f"cell_options does not fit: {error}") from error
        self.head = nn.Linear(config.hidden_size, config.n_bits)

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits `[B,T,n_bits]` of what follows each step of `x [B,T,n_inputs]`.

        Steps at padding (`[B,T]`, True) are not read; their logits mean nothing.
        """
        for layer in self.layers:
            x = layer(x, key_padding_mask=key_padding_mask)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean binary cross-entropy in nats per bit, computed in at least fp32.

        Args:
            inputs: as `x` of `forward`.
            targets: `[B,T,n_bits]`, floating point from 0 to 1; -100 is ignored.
            key_padding_mask: see `forward`.
        """
        logits = self(inputs, key_padding_mask=key_padding_mask)
        if targets.shape != logits.shape or not targets.is_floating_point():
            raise ValueError(
                f"targets is {targets.dtype} of the shape {shape(targets)}, "
                f"wanted floating point of the shape {shape(logits)}"
            )
        counted = targets != IGNORED
        dtype = torch.promote_types(logits.dtype, torch.float32)
        asked = torch.where(counted, targets, 0).to(dtype)
        nats = F.binary_cross_entropy_with_logits(logits.to(dtype), asked, reduction="none")
        return torch.where(counted, nats, 0).sum() / counted.sum().clamp(min=1)

    @torch.no_grad()
    def wrong_bits(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Bits of each row that are predicted wrongly, `[B]` long, with p > 1/2 for 1."""
        wrong = (self(inputs) > 0) != (targets > 0.5)
        return (wrong & (targets != IGNORED)).flatten(1).sum(1)

    @torch.no_grad()
    def trace(self, x: Tensor) -> NTMTrace:
        """Where the heads of the first layer were while it read `x [B,T,n_inputs]`.

        Raises:
            UnsupportedError: the cell is no Neural Turing Machine.
        """
        layer = self.layers[0]
        if not isinstance(layer, NTM):
            raise UnsupportedError(f"the cell {self.config.cell!r} has no heads; use cell='ntm'")
        return layer.trace(x)
