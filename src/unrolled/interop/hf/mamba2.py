"""Mamba-2: a decoder whose blocks have no feed-forward layer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from unrolled.attention.mamba2 import Mamba2
from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, fill, require_class
from unrolled.interop.hf.mamba import decoder_of_mixers
from unrolled.models import Decoder


def from_mamba2(model: Foreign, options: Mapping[str, object]) -> Decoder:
    """Convert a Mamba-2 language model of transformers to a `Decoder`; see `import_weights`."""
    require_class(model, "Mamba2ForCausalLM")
    config = model.config
    low, high = config.time_step_limit
    if (low, high) != (0, float("inf")) or config.hidden_act != "silu":
        raise UnsupportedError(
            f"time_step_limit and hidden_act are {(low, high)} and {config.hidden_act!r}, but must be "
            "(0, inf) and 'silu'"
        )
    sizes = {
        "n_groups": config.n_groups,
        "head_dim": config.state_size,
        "value_dim": config.head_dim,
        "eps": config.layer_norm_epsilon,
    }
    return decoder_of_mixers(model, "mamba2", config.num_heads, {**sizes, **options}, copy_mixer)


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
