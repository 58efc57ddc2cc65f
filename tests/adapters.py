"""An adapter around a layer, as users write them by hand."""

from torch import nn


class Doubled(nn.Module):
    """Doubles the output of a layer. It has no `weight`."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)
