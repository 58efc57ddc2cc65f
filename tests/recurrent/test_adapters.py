"""A part of a recurrent layer that was replaced by an adapter, or that has a hook, counts."""

import copy

import pytest
import torch
from torch import nn

from unrolled import recurrent


class Doubled(nn.Module):
    """Like an adapter written by hand, it has no `weight`."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


PARTS = [
    *(("linear_attention", part) for part in ("qkv_proj", "out_proj", "attention_norm", "up", "down")),
    *(("linear_attention", "ff_norm"), ("ntm", "input_proj"), ("ntm", "head_proj"), ("ntm", "out_proj")),
]


def run(module, x):
    y, state = module.prefill(x[:, :4], module.init_state(2))
    y_t, _ = module.step(x[:, 4], state)
    return torch.cat([y, y_t.unsqueeze(1)], 1)


@pytest.mark.parametrize("how", ["hook", "adapter", "weight_norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cell", "part"), PARTS)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_changed_part_counts(cell, part, dtype, how):
    torch.manual_seed(0)
    module = recurrent.load(cell)(8, 8).to(dtype)
    doubled, layer = copy.deepcopy(module), getattr(module, part)
    if how == "weight_norm":
        if isinstance(layer, nn.LayerNorm):
            pytest.skip("a norm has no norm of its rows")
        nn.utils.weight_norm(layer)  # it computes the weight in a hook
        layer.weight_g.data *= 2
        getattr(doubled, part).weight.data *= 2
    else:
        for parameter in getattr(doubled, part).parameters():
            parameter.data *= 2
        if how == "hook":
            layer.register_forward_hook(lambda layer, inputs, y: 2 * y)
        else:
            setattr(module, part, Doubled(layer))
    x = torch.randn(2, 5, 8, dtype=dtype)
    tolerance = {} if dtype != torch.bfloat16 else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(run(module, x), run(doubled, x), **tolerance)
