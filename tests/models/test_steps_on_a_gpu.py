"""A step can be captured in a CUDA graph: it reads no value on the host, and nothing from another device.

Tensors on meta have no values, so reading one fails there as it does during a capture.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unrolled import attention
from unrolled.models.decoder import Decoder, DecoderConfig

CONSTANT = [name for name in attention.names() if attention.load(name).supports.recurrence == "constant"]


class OnlyMeta(TorchDispatchMode):
    """Fails where an operation reads or writes a tensor that is not on meta."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, results)):
            assert not isinstance(x, Tensor) or x.is_meta, operation
        return results


@pytest.mark.parametrize("name", CONSTANT)
def test_a_step_reads_nothing_on_the_host(name):
    config = DecoderConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2, attention=name, positions="none")
    with torch.device("meta"):
        model = Decoder(config).eval()
        token, state = torch.zeros(2, dtype=torch.long), model.init_state(2)
    with torch.inference_mode(), OnlyMeta():
        logits, _ = model.step(token, state)
    assert logits.shape == (2, 11)


@pytest.mark.parametrize(
    "fields", [{"positions": "learned"}, {"inputs": "pixels", "head": "logistic_mixture"}], ids=str
)
def test_models_run_on_meta(fields):
    config = DecoderConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2, **fields)
    tokens = torch.zeros(2, 5, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = Decoder(config).eval()
        assert model.loss(tokens, tokens).is_meta
        logits, _ = model.prefill(tokens, model.init_state(2))
    assert logits.shape == (2, 5, 11)


def test_the_guard_notices_a_value_that_is_read():
    x, on_cpu = torch.ones(2, device="meta"), torch.ones(2)
    with OnlyMeta():
        with pytest.raises(RuntimeError, match="meta"):
            x.max().item()
        with pytest.raises(AssertionError, match="_to_copy"):
            on_cpu.to("meta")
