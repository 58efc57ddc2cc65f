"""Small decoders of every kind that a plan can run."""

import torch
from torch import nn

from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.feature_maps import FEATURE_MAPS
from unrolled.ops.processor import description

V, LENGTH = 71, 14


def linear(**options):
    return {"attention_options": {"linear": options}}


def of(name, **options):
    return {"attention": name, "attention_options": {name: options}, "positions": "none"}


MODELS = {
    "linear": {},
    "grouped heads": {"n_kv_heads": 2},
    "rms normaliser": linear(normalizer="rms"),
    "part of each head rotated": linear(rotary_dim=4, rotary_base=100.0),
    "learned positions": {"positions": "learned", "max_length": LENGTH},
    "sinusoidal positions": {"positions": "sinusoidal"},
    "axial positions": {"positions": "axial", "axial_shape": [4, 4]},
    "convolution": linear(conv=4),
    "gated linear": of("gated_linear", value_dim=6),
    "retention": of("retention", rotary=True, angles="closed"),
    "retention, grouped": of("retention", n_kv_heads=2, rotary=False),
    "delta rule": of("delta_net"),
    "delta rule, gated": of("delta_net", gated=True, conv=3, max_beta=2.0),
    "delta rule, shared keys": of("delta_net", gated=True, n_groups=2, rotary=True),
    "kda": of("kda"),
    "mamba": of("mamba", value_dim=12),
    "mamba, not convolved": of("mamba", conv=None, step_rank=3, head_dim=5),
    "mamba2": of("mamba2", n_groups=2, value_dim=6),
    "mamba2, not convolved": of("mamba2", conv=None),
    "rfa": of("rfa", n_features=5, rotary=True),
    "rfa, gated": of("rfa", gate=True, n_kv_heads=2, conv=2),
    "rfa, gated, arccos": of("rfa", gate=True, features="arccos", n_features=9),
    "rwkv4": of("rwkv4") | {"activation": "channel_mix"},
    "rwkv4, grouped": of("rwkv4", n_kv_heads=2, head_dim=7, conv=3),
    "channel mix, post-norm": {"activation": "channel_mix", "norm": "post"},
    "rwkv7": of("rwkv7", gate_rank=5) | {"d_model": 48, "n_heads": 3},
    "rwkv7, grouped": of("rwkv7", n_kv_heads=2, head_dim=7, value_dim=5, conv=3),
    "window": of("window", window=5, rotary=True),
    "window, grouped": of("window", window=1, n_kv_heads=1),
    "softmax": of("softmax", rotary=True, n_kv_heads=2),
    "softmax, gated": of("softmax", qk_norm="head", output_gate=True, value_dim=5),
    "softmax, convolved": of("softmax", qk_norm="all", conv=3),
    "hybrid": {
        "n_layers": 4,
        "attention": ["linear", "window", "delta_net", "softmax"],
        "attention_options": {"linear": {"conv": 4, "rotary": False}, "window": {"window": 3}},
    },
    "post-norm, swiglu": {"norm": "post", "norm_type": "rmsnorm", "activation": "swiglu"},
    "norm after, relu": {"norm": "res_post", "activation": "relu", "bias": False},
    "norm by layer, tanh": {"norm": ["pre", "post"], "activation": "gelu_tanh"},
    "no feed-forward layer": {"d_ff": 0},
    "odd widths": {"d_model": 30, "n_heads": 3, "d_ff": 37, "positions": "none"},
    "tied embeddings": {"tie_embeddings": True},
    "pixels": {"inputs": "pixels", "head": "logistic_mixture", "start_token": True},
} | {f"map {name}": linear(feature_map=name) | {"positions": "none"} for name in FEATURE_MAPS}


def decoder(**options):
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 80, "positions": "rotary"}
    model = Decoder(DecoderConfig(vocab_size=V, **(shape | options))).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def tokens(rows=3, length=LENGTH):
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(1))


def rounds_inputs_to_bf16() -> bool:
    """Whether the kernel for AVX-512 rounds the inputs of matrices in bf16, as `plan` documents."""
    flags = description().split()
    return "avx512_bf16" in flags and "amx_bf16" not in flags
