"""RWKV-4: a decoder whose attention and feed-forward layers mix each token with the one before it."""

from collections.abc import Mapping
from typing import cast

import torch
from torch.nn.functional import layer_norm

from unrolled.attention.rwkv4 import RWKV4
from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, copy_norm, copy_tables, fill, require_class
from unrolled.models import Decoder, DecoderConfig
from unrolled.models.channel_mix import MixingBlock


@torch.no_grad()
def from_rwkv(model: Foreign, options: Mapping[str, object]) -> Decoder:
    """Convert an RWKV-4 language model of transformers to a `Decoder`; see `import_weights`."""
    require_class(model, "RwkvForCausalLM")
    config, backbone = model.config, model.rwkv
    if config.layer_norm_epsilon != backbone.ln_out.eps:
        raise UnsupportedError(
            f"layer_norm_epsilon is {config.layer_norm_epsilon}, but must be {backbone.ln_out.eps}, as in "
            "the last norm"
        )
    if model.head.weight is backbone.embeddings.weight:
        raise UnsupportedError(
            "tie_word_embeddings is True, but must be False: the embeddings are normalised"
        )
    norm, table = backbone.blocks[0].pre_ln, backbone.embeddings.weight
    table = layer_norm(table, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    ours = Decoder(
        DecoderConfig(
            vocab_size=len(table),
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=1,
            d_ff=config.intermediate_size,
            attention="rwkv4",
            attention_options={
                "rwkv4": {"head_dim": config.attention_hidden_size, "bias": False, **options},
            },
            activation="channel_mix",
            norm_eps=config.layer_norm_epsilon,
            positions="none",
        )
    ).to(table)
    copy_tables(ours, table, model.head.weight)
    copy_norm(cast(Foreign, ours.stack.norm), backbone.ln_out)
    for number, (block, layer) in enumerate(zip(ours.stack.layers, backbone.blocks, strict=True)):
        # In evaluation, transformers halves the residual stream after every `rescale_every` layers.
        halved = backbone.layers_are_rescaled and config.rescale_every > 0
        copy_block(
            cast(MixingBlock, block), layer, 2.0 ** (number // config.rescale_every) if halved else 1.0
        )
    return ours.train(model.training)


@torch.no_grad()
def copy_block(ours: MixingBlock, theirs: Foreign, scale: float) -> None:
    """Copy an `RwkvBlock`, whose output matrices were divided by `scale`."""
    attention, mixing = theirs.attention, theirs.feed_forward
    copy_norm(cast(Foreign, ours.attention_norm), theirs.ln1)
    copy_norm(cast(Foreign, ours.ff_norm), theirs.ln2)
    layer = cast(RWKV4, ours.attention)
    copy_linear(layer.qkv_proj, attention.receptance, attention.key, attention.value)
    fill(layer.out_proj.weight, scale * attention.output.weight)
    fill(layer.mix, _mixtures(attention, "receptance", "key", "value"))
    fill(layer.log_pace, attention.time_decay)
    fill(layer.bonus, attention.time_first)
    copy_linear(ours.ff.up, mixing.key)
    copy_linear(ours.ff.gate, mixing.receptance)
    fill(ours.ff.down.weight, scale * mixing.value.weight)
    fill(ours.ff.mix, _mixtures(mixing, "key", "receptance"))


def _mixtures(theirs: Foreign, *names: str) -> torch.Tensor:
    """Return the shares of the token before; those in transformers are of the token itself."""
    return torch.stack([1 - getattr(theirs, f"time_mix_{name}").flatten() for name in names])
