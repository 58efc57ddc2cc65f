"""Bidirectional LSTMs as the LSTM operator of ONNX; torch's exporter would write a loop."""

import torch
from torch import Tensor, nn


class OnnxLSTM(nn.Module):
    """One bidirectional layer of `torch.nn.LSTM`, batch first, as the operator LSTM; for tracing only.

    The order of the gates is input, output, forget, cell in ONNX, and input, forget, cell, output in torch.
    """

    w: Tensor
    r: Tensor
    b: Tensor

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.hidden_size = lstm.hidden_size
        found = [[_gates(x) for x in weights] for weights in lstm.all_weights]  # w, r and two biases each
        w, r, *biases = (torch.stack(parts) for parts in zip(*found, strict=True))
        self.register_buffer("w", w)
        self.register_buffer("r", r)
        self.register_buffer("b", torch.cat(biases, 1))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """`[B,T,d]` -> `[B,T,2 hidden_size]`, the first output of `torch.nn.LSTM`."""
        B, T, _ = x.shape
        y = torch.onnx.ops.symbolic(
            "LSTM",
            (x.transpose(0, 1), self.w, self.r, self.b),
            {"hidden_size": self.hidden_size, "direction": "bidirectional"},
            dtype=x.dtype,
            shape=(T, 2, B, self.hidden_size),
        )
        return (y.permute(2, 0, 1, 3).flatten(2),)


def _gates(x: Tensor) -> Tensor:
    """Reorder the gates of a weight or a bias of torch, stacked along the first axis."""
    i, f, c, o = x.detach().chunk(4)
    return torch.cat([i, o, f, c])
