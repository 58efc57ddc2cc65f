"""Perceiver IO: for masked language modelling, for text, and for images with Fourier features."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from unrolled.contract import UnsupportedError
from unrolled.interop.copying import Foreign, copy_linear, copy_norm, fill
from unrolled.interop.hf.bert import ACTIVATIONS
from unrolled.models import PerceiverIO, PerceiverIOConfig
from unrolled.models.blocks import Block
from unrolled.models.latents import CrossAttend
from unrolled.models.stack import Stack

MASKED, TEXT = "PerceiverForMaskedLM", "PerceiverForSequenceClassification"
IMAGE = "PerceiverForImageClassificationFourier"


def from_perceiver(model: Foreign, options: Mapping[str, object]) -> PerceiverIO:
    """Convert a Perceiver of transformers to a `PerceiverIO`; see `import_weights`.

    The `PerceiverIO` takes images `[B, height, width, 3]`, channels last.
    """
    name, config = type(model).__name__, model.config
    if name not in (MASKED, TEXT, IMAGE):
        raise UnsupportedError(f"{name} has no counterpart here; use {MASKED}, {TEXT} or {IMAGE}")
    widening = {config.self_attention_widening_factor, config.cross_attention_widening_factor}
    if widening != {1} or not config.use_query_residual or config.hidden_act not in ACTIVATIONS:
        raise UnsupportedError(
            f"widening factors, use_query_residual and hidden_act are {sorted(widening)}, "
            f"{config.use_query_residual} and {config.hidden_act!r}, but must be 1, True and one of "
            f"{list(ACTIVATIONS)}"
        )
    perceiver = model.perceiver
    decoder = perceiver.decoder if name == MASKED else perceiver.decoder.decoder
    attends, reads = perceiver.encoder.self_attends, perceiver.encoder.cross_attention
    latents = perceiver.embeddings.latents
    ours = PerceiverIO(
        PerceiverIOConfig(
            d_model=config.d_latents,
            n_latents=config.num_latents,
            n_layers=len(attends),
            n_iterations=config.num_blocks,
            n_heads=config.num_self_attention_heads,
            attention_options={"softmax": {**_head_widths(attends[0].attention.self), **options}},
            activation=ACTIVATIONS[config.hidden_act],  # type: ignore[arg-type]
            cross_heads=config.num_cross_attention_heads,
            cross_width=reads.attention.self.qk_channels,
            cross_value_width=reads.attention.self.v_channels,
            query_width=decoder.num_channels,
            query_residual=decoder.decoding_cross_attention.attention.use_query_residual,
            decoder_heads=decoder.decoding_cross_attention.attention.self.num_heads,
            decoder_width=decoder.decoding_cross_attention.attention.self.qk_channels,
            decoder_value_width=decoder.decoding_cross_attention.attention.self.v_channels,
            **_inputs_and_outputs(name, config, perceiver),
        )
    ).to(latents)
    fill(ours.latents.initial, latents)
    (stack,) = ours.latents.stacks
    _copy_read(_read(ours), reads)
    for block, layer in zip(cast(Stack, stack).full_layers, attends, strict=True):
        _copy_block(block, layer)
    _copy_read(ours.decoder, decoder.decoding_cross_attention)
    assert ours.queries.table is not None  # output queries are learned
    fill(ours.queries.table.weight, decoder.output_position_encodings.position_embeddings)
    _copy_ends(ours, name, model, decoder)
    return ours.train(model.training)


def _inputs_and_outputs(name: str, config: Foreign, perceiver: Foreign) -> dict[str, Any]:
    if name == IMAGE:
        positions = perceiver.input_preprocessor.position_embeddings
        grid, bands = list(positions.max_resolution), positions.num_bands
        inputs = {"input_dim": 3, "grid": grid, "n_bands": bands, "positions": "none"}
    else:
        inputs = {
            "vocab_size": config.vocab_size,
            "input_width": config.d_model,
            "max_length": config.max_position_embeddings,
        }
    if name == MASKED:
        return {**inputs, "output": "masked", "tie_embeddings": True, "output_bias": True}
    return {**inputs, "n_classes": config.num_labels}


def _copy_ends(ours: PerceiverIO, name: str, model: Foreign, decoder: Foreign) -> None:
    """Copy the embeddings of the inputs, and the output layer."""
    text, array = model.perceiver.input_preprocessor, ours.array
    if name == IMAGE:
        _reorder_fourier_features(ours)
    elif array.embedding is not None and array.positions.table is not None:
        fill(array.embedding.weight, text.embeddings.weight)
        fill(array.positions.table.weight, text.position_embeddings.weight)
    if ours.head.project is not None:
        copy_linear(ours.head.project, decoder.final_layer)
    elif ours.head.bias is not None:
        fill(ours.head.bias, model.embedding_decoder.bias)


def _read(ours: PerceiverIO) -> CrossAttend:
    (read,) = ours.latents.reads
    return cast(CrossAttend, read)


@torch.no_grad()
def _reorder_fourier_features(ours: PerceiverIO) -> None:
    """Reorder features: transformers groups them as coordinates, sines and cosines, this library by axis."""
    axes, bands, channels = len(ours.config.grid or ()), ours.config.n_bands, ours.config.input_dim or 0
    sines = channels + axes
    order = list(range(channels))
    for axis in range(axes):
        for begin in (sines, sines + axes * bands):
            order += range(begin + axis * bands, begin + (axis + 1) * bands)
        order.append(channels + axis)
    read = _read(ours)
    for tensor in (*read.array_norm.parameters(), read.kv_proj.weight):
        tensor.copy_(tensor[..., order])


def _head_widths(attention: Foreign) -> dict[str, int]:
    heads = attention.num_heads
    return {"head_dim": attention.qk_channels // heads, "value_dim": attention.v_channels // heads}


def _copy_read(ours: CrossAttend, theirs: Foreign) -> None:
    attention = theirs.attention.self
    copy_norm(ours.query_norm, attention.layernorm1)
    copy_norm(ours.array_norm, attention.layernorm2)
    copy_linear(ours.q_proj, attention.query)
    copy_linear(ours.kv_proj, attention.key, attention.value)
    copy_linear(ours.out_proj, theirs.attention.output.dense)
    _copy_ff(ours, theirs)


def _copy_block(ours: Block, theirs: Foreign) -> None:
    attention = theirs.attention.self
    copy_norm(ours.attention_norm, attention.layernorm1)
    copy_linear(ours.attention.qkv_proj, attention.query, attention.key, attention.value)
    copy_linear(ours.attention.out_proj, theirs.attention.output.dense)
    _copy_ff(ours, theirs)


def _copy_ff(ours: Block | CrossAttend, theirs: Foreign) -> None:
    copy_norm(ours.ff_norm, theirs.layernorm)
    copy_linear(ours.ff.up, theirs.mlp.dense1)
    copy_linear(ours.ff.down, theirs.mlp.dense2)
