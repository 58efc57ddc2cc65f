"""`read` and `recall` beside what the contract checks: the size of the state, and refusals."""

import copy

import pytest
import torch
from agreement import normal

from unrolled import attention
from unrolled.attention.linear import LinearAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.state import nbytes


def make(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    module = attention.load(name)(8, 4, n_kv_heads=2, **options).double()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return module


def test_linear_attention_keeps_a_sum_of_constant_size():
    module = make("linear")
    assert nbytes(module.read(normal(2, 3, 8))) == nbytes(module.read(normal(2, 300, 8)))
    for options in ({"normalizer": "rms"}, {"feature_map": "hedgehog"}):
        module, query, memory = make("linear", **options), normal(2, 3, 8), normal(2, 6, 8, seed=2)
        torch.testing.assert_close(
            module.recall(query, module.read(memory)), module(query, memory), atol=1e-10, rtol=0
        )


def test_what_cannot_be_read_so_is_refused():
    memory = normal(1, 4, 8)
    with pytest.raises(UnsupportedError, match="nystromformer attention cannot read a memory query by query"):
        make("nystromformer").read(memory)
    with pytest.raises(UnsupportedError, match="linear attention cannot read a memory query by query"):
        make("linear", causal=True).read(memory)
    with pytest.raises(UnsupportedError, match="window attention does not support cross-attention"):
        make("window", window=2).read(memory)
    with pytest.raises(UnsupportedError, match="topk attention does not compute weights"):
        make("topk").weights(memory, memory)
    with pytest.raises(
        UnsupportedError, match="linear attention does not compute weights with these options; use"
    ):
        LinearAttention(8, 4, normalizer="rms").double().weights(memory, memory)
    for name in ("softmax", "linear"):
        module = make(name)
        with pytest.raises(ValueError, match=r"key_padding_mask has shape \[1, 3\], but must be \[1, 4\]"):
            module.read(memory, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"memory has shape \[1, 4, 3\], but must be \[B, T, 8\]"):
            module.read(memory[..., :3])


WEIGHING = [name for name in attention.names() if (x := attention.load(name).supports).cross and x.weights]


@pytest.mark.parametrize("name", WEIGHING)
def test_weights_of_a_memory_with_padding_are_those_of_its_other_rows(name):
    module, query, memory = make(name), normal(2, 3, 8), normal(2, 6, 8, seed=2)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = padding[1, :1] = True
    hostile = memory.masked_fill(padding.unsqueeze(-1), torch.nan)
    found = module.weights(query, hostile, key_padding_mask=padding)
    assert found.shape == (2, 4, 3, 6)
    for row, kept in enumerate(~padding):
        expected = module.weights(query[[row]], memory[[row]][:, kept])
        torch.testing.assert_close(found[[row]][..., kept], expected)
        assert (found[row][..., ~kept] == 0).all()
    _, _, v = module.project(query, memory)
    v = v.masked_fill(padding[..., None, None], 0).repeat_interleave(2, 2)  # a key head for two of queries
    o = torch.einsum("bhts,bshm->bthm", found, v).flatten(2)
    output = module(query, hostile, key_padding_mask=padding)
    torch.testing.assert_close(module.out_proj(o), output)


@pytest.mark.parametrize("first", [True, False])
def test_autocast_may_come_and_go(first):
    module, query, memory = make("softmax").float(), normal(2, 3, 8).float(), normal(2, 6, 8, seed=2).float()
    for enabled in (first, not first, first):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = module.recall(query, module.read(memory))
        torch.testing.assert_close(found.float(), module(query, memory), atol=0.1, rtol=0)


CROSS = [name for name in attention.names() if attention.load(name).supports.cross]


@pytest.mark.parametrize("name", CROSS)
def test_a_hook_on_the_projection_counts_in_cross_attention(name):
    options = {"max_length": 6} if name == "linformer" else {}
    torch.manual_seed(0)
    module = attention.load(name)(8, 4, **options).double().eval()
    doubled, query, memory = copy.deepcopy(module), normal(2, 3, 8), normal(2, 6, 8, seed=2)
    for parameter in doubled.qkv_proj.parameters():
        parameter.data *= 2
    before = module(query, memory)
    module.qkv_proj.register_forward_hook(lambda layer, inputs, y: 2 * y)
    assert not torch.equal(module(query, memory), before)
    torch.testing.assert_close(module(query, memory), doubled(query, memory))
