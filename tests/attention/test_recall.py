"""Reading another sequence query by query is attending to it, for every mechanism that says it can."""

import pytest
import torch

from unrolled import attention
from unrolled.attention.linear import LinearAttention
from unrolled.contract import UnsupportedError
from unrolled.ops.state import nbytes, select

OPTIONS = {"linformer": {"max_length": 16}, "topk": {"n_keys": 3}}
ABLE = [name for name in attention.names() if attention.load(name).supports.single_queries]


def make(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    module = attention.load(name)(8, 4, n_kv_heads=2, **OPTIONS.get(name, {}) | options).double()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return module


def draw(*sizes: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def padding(B: int, S: int) -> torch.Tensor:
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, S // 2 :] = True
    mask[1, 0] = True
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ABLE)
def test_reading_query_by_query_is_attending(name, masked):
    module = make(name)
    query, memory = draw(3, 5, 8).requires_grad_(), draw(3, 7, 8, seed=2).requires_grad_()
    mask = padding(3, 7) if masked else None
    expected = module(query, memory, key_padding_mask=mask)
    inputs = [query, memory, *module.parameters()]
    weight = draw(3, 5, 8, seed=3)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    for cuts in ([5], [1, 1, 1, 1, 1], [2, 3]):
        state = module.read(memory, key_padding_mask=mask)
        got = torch.cat([module.recall(part, state) for part in query.split(cuts, 1)], 1)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
        found = torch.autograd.grad((got * weight).sum(), inputs, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ABLE)
def test_what_was_read_can_be_reordered(name):
    module, memory, query = make(name), draw(2, 6, 8), draw(3, 1, 8, seed=2)
    rows = torch.tensor([1, 0, 1])
    state = select(module.read(memory), rows)
    torch.testing.assert_close(module.recall(query, state), module(query, memory[rows]), atol=1e-10, rtol=0)


def test_linear_attention_keeps_a_sum_of_constant_size():
    module = make("linear")
    assert nbytes(module.read(draw(2, 3, 8))) == nbytes(module.read(draw(2, 300, 8)))
    for options in ({"normalizer": "rms"}, {"feature_map": "hedgehog"}):
        module, query, memory = make("linear", **options), draw(2, 3, 8), draw(2, 6, 8, seed=2)
        torch.testing.assert_close(
            module.recall(query, module.read(memory)), module(query, memory), atol=1e-10, rtol=0
        )


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_weights_are_those_that_the_output_is_made_with(name):
    module, query, memory, mask = make(name), draw(3, 5, 8), draw(3, 7, 8, seed=2), padding(3, 7)
    weights = module.weights(query, memory, key_padding_mask=mask)
    assert weights.shape == (3, 4, 5, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 5, dtype=torch.float64))
    assert (weights.masked_select(mask[:, None, None].expand_as(weights)) == 0).all()
    values = module.project(query, memory)[2].repeat_interleave(2, 2)
    mean = torch.einsum("bhts,bshm->bthm", weights, values)
    torch.testing.assert_close(
        module.out_proj(mean.flatten(-2)), module(query, memory, key_padding_mask=mask), atol=1e-10, rtol=0
    )


def test_what_cannot_be_read_so_is_refused():
    memory = draw(1, 4, 8)
    with pytest.raises(UnsupportedError, match="nystromformer attention cannot read a memory query by query"):
        make("nystromformer").read(memory)
    with pytest.raises(UnsupportedError, match="linear attention cannot read a memory query by query"):
        make("linear", causal=True).read(memory)
    with pytest.raises(UnsupportedError, match="window attention cannot honour reading another sequence"):
        make("window", window=2).read(memory)
    with pytest.raises(UnsupportedError, match="topk attention has no weights to show"):
        make("topk").weights(memory, memory)
    with pytest.raises(UnsupportedError, match="linear attention has no weights"):
        LinearAttention(8, 4, normalizer="rms").double().weights(memory, memory)
    for name in ("softmax", "linear"):
        module = make(name)
        with pytest.raises(ValueError, match=r"key_padding_mask has shape \[1, 3\], but must be \[1, 4\]"):
            module.read(memory, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"memory has shape \[1, 4, 3\], but must be \[B, T, 8\]"):
            module.read(memory[..., :3])
