"""A state holds the random features it was made with, so that a redraw makes it invalid."""

import pytest
import torch

from unrolled import attention


@pytest.mark.parametrize("name", ["performer", "rfa", "reformer"])
def test_a_state_from_before_a_redraw_is_refused(name):
    module = attention.load(name)(16, 4, causal=True).eval()
    x = torch.randn(2, 9, 16)
    _, state = module.prefill(x[:, :5], module.init_state(2))
    (module.rotations if name == "reformer" else module).redraw()
    for verb, tokens in (("step", x[:, 5]), ("prefill", x[:, 5:])):
        with pytest.raises(ValueError, match="state was made before a redraw"):
            getattr(module, verb)(tokens, state)
    module.step(x[:, 5], module.init_state(2))
