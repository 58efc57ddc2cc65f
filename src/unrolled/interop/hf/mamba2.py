"""Mamba-2: a decoder whose blocks have no feed-forward layer."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from unrolled.attention.mamba2 import Mamba2
from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, copy_tables, fill
from unrolled.models import Decoder, DecoderConfig


def from_mamba2(model: Foreign, options: Mapping[str, object]) -> Decoder:
    """Convert a Mamba-2 language model of transformers to a `Decoder`; see `import_weights`."""
    name, config = type(model).__name__, model.config
    if name != "Mamba2ForCausalLM":
        raise UnsupportedError(f"{name} has no counterpart here; use Mamba2ForCausalLM")
    low, high = config.time_step_limit
    if (low, high) != (0, float("inf")) or config.hidden_act != "silu":
        raise UnsupportedError(
            f"time_step_limit and hidden_act are {(low, high)} and {config.hidden_act!r}, but must be "
            "(0, inf) and 'silu'"
        )
    if not config.use_conv_bias:
        raise UnsupportedError("use_conv_bias is False, but must be True")
    backbone, table = model.backbone, model.backbone.embeddings.weight
    ours = Decoder(
        DecoderConfig(
            vocab_size=len(table),
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_heads,
            d_ff=0,
            attention="mamba2",
            attention_options={
                "mamba2": {
                    "n_groups": config.n_groups,
                    "head_dim": config.state_size,
                    "value_dim": config.head_dim,
                    "conv": config.conv_kernel,
                    "bias": config.use_bias,
                    "eps": config.layer_norm_epsilon,
                    **options,
                }
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
        copy_mixer(cast(Mamba2, block.attention), layer.mixer)
    return ours.train(model.training)


@torch.no_grad()
def copy_mixer(ours: Mamba2, theirs: Foreign) -> None:
    """Copy the weights and any biases of a `Mamba2Mixer` of the same sizes."""
    queries, keys, values = ours.widths

    def reordered(rows: Tensor) -> Tensor:
        """Change the order from values, keys, queries to queries, keys, values."""
        v, k, q = torch.split(rows, [values, keys, queries])
        return torch.cat([q, k, v])

    assert ours.short_conv is not None  # by the config above
    assert ours.short_conv.bias is not None
    sizes = [values, queries + keys + values, ours.n_heads]
    gate, qkv, step = theirs.in_proj.weight.split(sizes)
    fill(ours.gate_proj.weight, gate)
    fill(ours.qkv_proj.weight, reordered(qkv))
    fill(ours.step_proj.weight, step)
    fill(ours.step_proj.bias, theirs.dt_bias)
    if theirs.in_proj.bias is not None:
        gate, qkv, step = theirs.in_proj.bias.split(sizes)
        fill(ours.gate_proj.bias, gate)
        fill(ours.qkv_proj.bias, reordered(qkv))
        fill(ours.step_proj.bias, theirs.dt_bias + step)
    fill(ours.short_conv.weight, reordered(theirs.conv1d.weight.squeeze(1)))
    fill(ours.short_conv.bias, reordered(theirs.conv1d.bias))
    fill(ours.log_pace, theirs.A_log)
    fill(ours.skip, theirs.D)
    fill(ours.norm.weight, theirs.norm.weight.view_as(ours.norm.weight))
    copy_linear(ours.out_proj, theirs.out_proj)
