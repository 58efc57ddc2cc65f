"""What softmax attention takes besides the common options: norms of queries and keys, and an output gate."""

import math

import pytest
import torch
from contract_parts import check_uncompiled
from torch import nn

from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.interop.torch import MultiheadAttention
from unrolled.testing import Maker, check_dynamic_length


@pytest.mark.slow
def test_a_norm_of_each_head_and_a_gate_keep_the_contract():
    make = Maker(SoftmaxAttention, {"qk_norm": "head", "output_gate": True})
    check_uncompiled(make, check_dynamic_length)  # which is slow, and the same code as by default


@pytest.mark.compilers
def test_it_compiles_with_norms_and_a_gate():
    module, x = made(qk_norm="all", output_gate=True), torch.randn(2, 7, 12, dtype=torch.float64)
    torch.compiler.reset()  # other modules share the code of `forward`
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))


def made(**options):
    torch.manual_seed(0)
    module = SoftmaxAttention(12, 4, n_kv_heads=2, head_dim=6, value_dim=5, causal=True, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("qk_norm", ["head", "all"])
def test_the_module_is_its_formulas(qk_norm):
    module, x = made(qk_norm=qk_norm, output_gate=True, eps=0.1), torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = module.qkv_proj(x).split([24, 12, 10], -1)
    if qk_norm == "head":
        q, k = q.unflatten(-1, (4, 6)), k.unflatten(-1, (2, 6))
    q = q / (q.square().mean(-1, keepdim=True) + 0.1).sqrt() * module.q_norm.weight
    k = k / (k.square().mean(-1, keepdim=True) + 0.1).sqrt() * module.k_norm.weight
    q, k, v = (y.reshape(2, 7, -1, n).transpose(1, 2) for y, n in ((q, 6), (k, 6), (v, 5)))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    o = ((q @ k.mT) / math.sqrt(6)).masked_fill(future, -math.inf).softmax(-1) @ v
    expected = module.out_proj(o.transpose(1, 2).flatten(2) * module.gate_proj(x).sigmoid())
    torch.testing.assert_close(module(x), expected)


def test_the_norm_makes_the_scale_of_queries_and_keys_irrelevant():
    module, x = made(qk_norm="head", eps=1e-12), torch.randn(1, 5, 12, dtype=torch.float64)
    before = module(x)
    with torch.no_grad():
        module.qkv_proj.weight[:36] *= 100
        module.qkv_proj.bias[:36] *= 100
    torch.testing.assert_close(module(x), before)


def test_a_memory_is_read_through_the_norms():
    torch.manual_seed(0)
    module = SoftmaxAttention(8, 2, qk_norm="all", output_gate=True).double()
    x, memory = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(module.recall(x, module.read(memory)), module(x, memory))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": "layer"}, "qk_norm is 'layer', but must be 'head', 'all' or None"),
        ({"eps": 0.0}, "eps is 0.0, but must be above 0"),
        ({"output_gate": 1}, "output_gate is 1, but must be True or False"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(8, 2, **options)


def test_torchs_layer_has_no_norms():
    with pytest.raises(UnsupportedError, match="qk_norm is 'head', but must be left out"):
        MultiheadAttention(8, 2, attention="softmax", qk_norm="head")
