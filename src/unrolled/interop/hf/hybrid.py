"""Hybrids of a gated delta rule and softmax attention: Qwen3-Next, Qwen3.5 and OLMo-hybrid, all dense."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from unrolled.attention.delta_net import DeltaNet
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, copy_tables, fill
from unrolled.models import Decoder, DecoderConfig
from unrolled.models.blocks import Block
from unrolled.models.config import Norm

MECHANISMS = {"linear_attention": "delta_net", "full_attention": "softmax"}
Options = dict[str, object]


def from_qwen(model: Foreign, options: Mapping[str, object]) -> Decoder:
    """Convert a Qwen3-Next or Qwen3.5 language model of transformers to a `Decoder`; see `import_weights`."""
    _check(model, ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"), options)
    config = model.config
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            raise UnsupportedError(
                f"layer {number} is a mixture of experts, which has no counterpart here; only dense layers do"
            )
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    softmax = _rotation(config, share) | {
        "head_dim": _head_dim(config),
        "qk_norm": "head",
        "output_gate": True,
    }
    ours = _decoder(model, softmax, {"eps": config.rms_norm_eps}, "pre")
    for block, layer in _layers(ours, model):
        _copy_norm(block.attention_norm, 1 + layer.input_layernorm.weight)
        _copy_norm(block.ff_norm, 1 + layer.post_attention_layernorm.weight)
        if isinstance(block.attention, DeltaNet):
            copy_delta_net(block.attention, layer.linear_attn, layer.linear_attn.norm)
        else:
            copy_gated_attention(cast(SoftmaxAttention, block.attention), layer.self_attn)
    _copy_norm(ours.stack.norm, 1 + model.model.norm.weight)
    return ours.train(model.training)


def from_olmo_hybrid(model: Foreign, options: Mapping[str, object]) -> Decoder:
    """Convert an OLMo-hybrid language model of transformers to a `Decoder`; see `import_weights`."""
    _check(model, ("OlmoHybridForCausalLM",), options)
    softmax = _rotation(model.config, 1.0) | {"head_dim": _head_dim(model.config), "qk_norm": "all"}
    rates: Options = {"max_beta": 2.0 if model.config.linear_allow_neg_eigval else 1.0}
    ours = _decoder(model, softmax, rates, "res_post")
    for block, layer in _layers(ours, model):
        if isinstance(block.attention, DeltaNet):
            _copy_norm(block.attention_norm, layer.input_layernorm.weight)
            _copy_norm(block.ff_norm, layer.post_attention_layernorm.weight)
            copy_delta_net(block.attention, layer.linear_attn, layer.linear_attn.o_norm)
        else:
            _copy_norm(block.attention_norm, layer.post_attention_layernorm.weight)
            _copy_norm(block.ff_norm, layer.post_feedforward_layernorm.weight)
            copy_attention(cast(SoftmaxAttention, block.attention), layer.self_attn)
    _copy_norm(ours.stack.norm, model.model.norm.weight)
    return ours.train(model.training)


def _check(model: Foreign, names: tuple[str, ...], options: Mapping[str, object]) -> None:
    name, config = type(model).__name__, model.config
    if name not in names:
        raise UnsupportedError(f"{name} has no counterpart here; use {' or '.join(names)}")
    if options:
        raise UnsupportedError(
            f"the options {sorted(options)} were given, but must be left out: the model has two mechanisms"
        )
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act is {config.hidden_act!r}, but must be 'silu'")
    if unknown := set(config.layer_types) - MECHANISMS.keys():
        raise UnsupportedError(f"layer_types has {sorted(unknown)}, but must have only {list(MECHANISMS)}")


def _rotation(config: Foreign, share: float) -> Options:
    """Return the options of rotary positions that rotate a share of each head."""
    rope = config.rope_parameters
    if rope is None or rope.get("rope_theta") is None:
        return {"rotary": False}
    if rope["rope_type"] != "default":
        raise UnsupportedError(f"rope_type is {rope['rope_type']!r}, but must be 'default'")
    rotated = int(_head_dim(config) * share)
    return {"rotary": True, "rotary_base": float(rope["rope_theta"]), "rotary_dim": rotated}


def _head_dim(config: Foreign) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _decoder(model: Foreign, softmax: Options, delta_net: Options, of_softmax: Norm) -> Decoder:
    """Make a decoder with a model's sizes, embedding, feed-forward layers and output matrix."""
    config, table = model.config, model.model.embed_tokens.weight
    attention = [MECHANISMS[kind] for kind in config.layer_types]
    options = {
        "softmax": {"eps": config.rms_norm_eps, "bias": config.attention_bias, **softmax},
        "delta_net": {
            "gated": True,
            "n_heads": config.linear_num_value_heads,
            "n_kv_heads": None,
            "n_groups": config.linear_num_key_heads,
            "head_dim": config.linear_key_head_dim,
            "value_dim": config.linear_value_head_dim,
            "conv": config.linear_conv_kernel_dim,
            **delta_net,
        },
    }
    ours = Decoder(
        DecoderConfig(
            vocab_size=len(table),
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            d_ff=config.intermediate_size,
            attention=attention,
            attention_options={name: own for name, own in options.items() if name in attention},
            norm=[of_softmax if name == "softmax" else "pre" for name in attention],
            norm_type="rmsnorm",
            norm_eps=config.rms_norm_eps,
            activation="swiglu",
            bias=False,
            positions="none",
            tie_embeddings=model.lm_head.weight is table,
        )
    ).to(table)
    copy_tables(ours, table, model.lm_head.weight)
    for block, layer in _layers(ours, model):
        copy_linear(block.ff.up, layer.mlp.gate_proj, layer.mlp.up_proj)
        copy_linear(block.ff.down, layer.mlp.down_proj)
    return ours


def _layers(ours: Decoder, model: Foreign) -> list[tuple[Block, Foreign]]:
    return list(zip(ours.stack.full_layers, model.model.layers, strict=True))


def _copy_norm(ours: nn.Module, weight: Tensor) -> None:
    fill(cast(nn.RMSNorm, ours).weight, weight)


@torch.no_grad()
def copy_delta_net(ours: DeltaNet, theirs: Foreign, norm: Foreign) -> None:
    """Copy a layer with the gated delta rule; its heads share the weights of `norm`."""
    q_k_v, gate, rate, decay = _projections(theirs)
    assert ours.short_conv is not None  # by the config above
    fill(ours.qkv_proj.weight, q_k_v)
    fill(ours.gate_proj.weight, gate)
    fill(ours.beta_proj.weight, rate)
    fill(ours.decay_proj.weight, decay)
    fill(ours.short_conv.weight, theirs.conv1d.weight.squeeze(1))
    fill(ours.log_pace, theirs.A_log)
    fill(ours.decay_bias, theirs.dt_bias)
    fill(ours.norm.weight, norm.weight.expand_as(ours.norm.weight))
    copy_linear(ours.out_proj, getattr(theirs, "o_proj", None) or theirs.out_proj)


def _projections(theirs: Foreign) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the projections to queries, keys and values, to output gates, to rates and to decays."""
    if hasattr(theirs, "in_proj_qkv"):  # Qwen3.5
        qkv, gate, rate, decay = theirs.in_proj_qkv, theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a
        return qkv.weight, gate.weight, rate.weight, decay.weight
    if hasattr(theirs, "q_proj"):  # OLMo-hybrid
        q_k_v = torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight])
        return q_k_v, theirs.g_proj.weight, theirs.b_proj.weight, theirs.a_proj.weight
    # Qwen3-Next: for each group of heads with one key: query, key, values and gates; rates and decays.
    groups = theirs.num_k_heads
    values = theirs.num_v_heads // groups * theirs.head_v_dim
    sizes = [theirs.head_k_dim, theirs.head_k_dim, values, values]
    parts = theirs.in_proj_qkvz.weight.unflatten(0, (groups, -1)).split(sizes, dim=1)
    q, k, v, gate = (part.flatten(0, 1) for part in parts)
    rates = theirs.in_proj_ba.weight.unflatten(0, (groups, 2, -1))
    return torch.cat([q, k, v]), gate, rates[:, 0].flatten(0, 1), rates[:, 1].flatten(0, 1)


@torch.no_grad()
def copy_attention(ours: SoftmaxAttention, theirs: Foreign) -> None:
    """Copy softmax attention with norms of all queries and of all keys."""
    for name in _names(theirs.q_proj):
        q, k, v = (getattr(part, name) for part in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        fill(getattr(ours.qkv_proj, name), torch.cat([_paired(ours, q), _paired(ours, k), v]))
    _copy_norm(ours.q_norm, _paired(ours, theirs.q_norm.weight))
    _copy_norm(ours.k_norm, _paired(ours, theirs.k_norm.weight))
    copy_linear(ours.out_proj, theirs.o_proj)


def _names(linear: Foreign) -> list[str]:
    return ["weight"] if linear.bias is None else ["weight", "bias"]


@torch.no_grad()
def copy_gated_attention(ours: SoftmaxAttention, theirs: Foreign) -> None:
    """Copy softmax attention whose query matrix also holds the gates: for each head, queries, then gates."""
    assert ours.gate_proj is not None  # by the config above
    for name in _names(theirs.q_proj):
        both = getattr(theirs.q_proj, name).unflatten(0, (ours.n_heads, 2, -1))
        q, gate = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
        k, v = getattr(theirs.k_proj, name), getattr(theirs.v_proj, name)
        fill(getattr(ours.qkv_proj, name), torch.cat([_paired(ours, q), _paired(ours, k), v]))
        fill(getattr(ours.gate_proj, name), gate)
    _copy_norm(ours.q_norm, _paired(ours, 1 + theirs.q_norm.weight))
    _copy_norm(ours.k_norm, _paired(ours, 1 + theirs.k_norm.weight))
    copy_linear(ours.out_proj, theirs.o_proj)


def _paired(ours: SoftmaxAttention, rows: Tensor) -> Tensor:
    """Reorder the R rotated rows of each head, whose pairs are (i, i + R/2) there and (2i, 2i + 1) here."""
    if not ours.rotary:
        return rows
    rotated = ours.rotary_dim or ours.head_dim
    order = torch.arange(ours.head_dim, device=rows.device)
    order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    return rows.view(-1, ours.head_dim, *rows.shape[1:])[:, order].flatten(0, 1)
