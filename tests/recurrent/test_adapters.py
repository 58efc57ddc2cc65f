"""A part of a recurrent layer that was replaced by an adapter, or that has a hook, counts."""

import copy

import pytest
import torch
from adapters import Doubled
from torch import nn

from unrolled import recurrent

LINEAR = [
    *(("linear_attention", part) for part in ("qkv_proj", "out_proj", "up", "down")),
    *(("ntm", part) for part in ("input_proj", "head_proj", "out_proj")),
]
NORMS = [("linear_attention", "attention_norm"), ("linear_attention", "ff_norm")]
CHANGES = [
    *((cell, part, how) for cell, part in LINEAR + NORMS for how in ("hook", "adapter")),
    *((cell, part, "weight_norm") for cell, part in LINEAR),
]


def run(module, x):
    y, state = module.prefill(x[:, :4], module.init_state(2))
    y_t, _ = module.step(x[:, 4], state)
    return torch.cat([y, y_t.unsqueeze(1)], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cell", "part", "how"), CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_changed_part_counts(cell, part, dtype, how):
    torch.manual_seed(0)
    module = recurrent.load(cell)(8, 8).to(dtype)
    doubled, layer = copy.deepcopy(module), getattr(module, part)
    if how == "weight_norm":
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
