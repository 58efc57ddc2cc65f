"""Options of feature maps and kernels are refused when a mechanism is made."""

import pytest
from torch import nn

from unrolled import attention
from unrolled.ops.head_norm import HeadRMSNorm


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"feature_map": "elu", "feature_map_options": {"bogus": 1}}),
        ("linear", {"feature_map": "dpfp", "feature_map_options": {"nu": 1.5}}),
        ("linear", {"feature_map": "polynomial", "feature_map_options": {"offset": float("nan")}}),
        ("linear", {"feature_map": "cosformer", "feature_map_options": {"max_length": 0}}),
        ("similarity", {"similarity": "polynomial", "similarity_options": {"degree": 0.5}}),
        ("similarity", {"similarity": "rbf", "similarity_options": {"scale": -1.0}}),
        ("similarity", {"similarity_options": {"bogus": 1}}),
        ("linear", {"feature_map_options": ""}),
        ("performer", {"features": ["relu"]}),
        ("rfa", {"features": ["fourier"]}),
        ("linformer", {"projection": ["linear"]}),
        ("aft", {"position_bias": ["full"]}),
    ],
)
def test_options_of_maps_and_kernels_are_refused(name, options):
    with pytest.raises(ValueError, match=r"(but must|do not fit|does not fit)"):
        attention.load(name)(8, 2, **options)


@pytest.mark.parametrize("name", ["delta_net", "kda", "mamba2", "retention"])
def test_eps_reaches_the_norm_of_the_heads(name):
    layer = attention.load(name)(8, 2, causal=True, eps=0.25)
    assert [norm.eps for norm in layer.modules() if isinstance(norm, HeadRMSNorm)] == [0.25]


def test_eps_reaches_the_norms_of_queries_and_keys():
    layer = attention.load("softmax")(8, 2, qk_norm="head", eps=0.25)
    assert [norm.eps for norm in layer.modules() if isinstance(norm, nn.RMSNorm)] == [0.25, 0.25]


@pytest.mark.parametrize("name", attention.names())
def test_projections_have_no_bias_where_none_is_wanted(name):
    shape = {"shape": [1, 2, 2]} if name == "spatiotemporal" else {}
    layer = attention.load(name)(
        8, 2, causal=not attention.load(name).supports.bidirectional, bias=False, **shape
    )
    assert layer.qkv_proj.bias is None
    assert layer.out_proj.bias is None
