"""Our decoder's stack in pytorch-fast-transformers, with the same weights."""

from typing import Any

import torch

from unrolled.models import Decoder


def idiap_encoder(model: Decoder, *, recurrent: bool) -> Any:
    """Build the stack of a decoder in pytorch-fast-transformers, with the same weights."""
    from fast_transformers import builders

    config = model.config
    width = config.d_model // config.n_heads
    kind = builders.RecurrentEncoderBuilder if recurrent else builders.TransformerEncoderBuilder
    encoder = kind.from_kwargs(
        attention_type="causal-linear",
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        query_dimensions=width,
        value_dimensions=width,
        feed_forward_dimensions=config.ff_width,
        activation="gelu",
        dropout=0.0,
        final_normalization=False,
    ).get()
    encoder.to(next(model.parameters()).device)
    theirs = dict(encoder.named_parameters())
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.startswith("stack"):
                parts = [theirs[part] for part in idiap_names(name)]
                for part, value in zip(parts, x.chunk(len(parts)), strict=True):
                    part.copy_(value)
    return encoder


def idiap_names(name: str) -> list[str]:
    """Return the names of their parameters that correspond to one of ours."""
    _, _, layer, *path, kind = name.split(".")
    found = {
        "attention.qkv_proj": [f"attention.{x}_projection" for x in ("query", "key", "value")],
        "attention.out_proj": ["attention.out_projection"],
        "attention_norm": ["norm1"],
        "ff_norm": ["norm2"],
        "ff.up": ["linear1"],
        "ff.down": ["linear2"],
    }
    return [f"layers.{layer}.{x}.{kind}" for x in found[".".join(path)]]
