"""Mamba: a decoder whose blocks have no feed-forward layer."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from unrolled.attention.mamba import Mamba
from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, copy_tables, fill, require_class
from unrolled.models import Decoder, DecoderConfig


def from_mamba(model: Foreign, options: Mapping[str, object]) -> Decoder:
    """Convert a Mamba language model of transformers to a `Decoder`; see `import_weights`."""
    require_class(model, "MambaForCausalLM")
    config = model.config
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act is {config.hidden_act!r}, but must be 'silu'")
    sizes = {
        "head_dim": config.state_size,
        "value_dim": config.intermediate_size,
        "step_rank": config.time_step_rank,
    }
    return decoder_of_mixers(model, "mamba", 1, {**sizes, **options}, copy_mixer)


def decoder_of_mixers(
    model: Foreign,
    attention: str,
    n_heads: int,
    options: Mapping[str, object],
    copy: Callable[[Any, Foreign], None],
) -> Decoder:
    """Make a decoder of this attention from a Mamba or Mamba-2, and copy its mixers by `copy`."""
    config, backbone = model.config, model.backbone
    if not config.use_conv_bias:
        raise UnsupportedError("use_conv_bias is False, but must be True")
    if config.conv_kernel < 2:
        raise UnsupportedError(f"conv_kernel is {config.conv_kernel}, but must be at least 2")
    table = backbone.embeddings.weight
    ours = Decoder(
        DecoderConfig(
            vocab_size=len(table),
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=n_heads,
            d_ff=0,
            attention=attention,
            attention_options={
                attention: {"conv": config.conv_kernel, "bias": config.use_bias, **options},
            },
            norm_type="rmsnorm",
            norm_eps=config.layer_norm_epsilon,
            positions="none",
            tie_embeddings=model.lm_head.weight is table,
        )
    ).to(table)
    copy_tables(ours, table, model.lm_head.weight)
    fill(cast(Tensor, ours.stack.norm.weight), backbone.norm_f.weight)
    for block, layer in zip(ours.stack.layers, backbone.layers, strict=True):
        fill(cast(Tensor, block.attention_norm.weight), layer.norm.weight)
        copy(block.attention, layer.mixer)
    return ours.train(model.training)


@torch.no_grad()
def copy_mixer(ours: Mamba, theirs: Foreign) -> None:
    """Copy the weights and any biases of a `MambaMixer` of the same sizes."""
    assert ours.short_conv is not None  # by the config above
    assert ours.short_conv.bias is not None
    values, gate = theirs.in_proj.weight.chunk(2)
    fill(ours.qkv_proj.weight, values)
    fill(ours.gate_proj.weight, gate)
    if theirs.in_proj.bias is not None:
        values, gate = theirs.in_proj.bias.chunk(2)
        fill(ours.qkv_proj.bias, values)
        fill(ours.gate_proj.bias, gate)
    fill(ours.short_conv.weight, theirs.conv1d.weight.squeeze(1))
    fill(ours.short_conv.bias, theirs.conv1d.bias)
    copy_linear(ours.select_proj, theirs.x_proj)
    copy_linear(ours.step_proj, theirs.dt_proj)
    fill(ours.log_pace, theirs.A_log)
    fill(ours.skip, theirs.D)
    copy_linear(ours.out_proj, theirs.out_proj)
