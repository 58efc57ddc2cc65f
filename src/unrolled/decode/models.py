"""The instructions of a decoder: embeddings, blocks and head."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from unrolled.contract import UnsupportedError
from unrolled.decode.builder import Builder
from unrolled.decode.calibration import roundings
from unrolled.decode.mechanisms import attention, mixtures
from unrolled.decode.packing import Weights
from unrolled.decode.program import Program, Value, require
from unrolled.models import Decoder
from unrolled.models.blocks import AttentionBlock, Block, FeedForward
from unrolled.models.channel_mix import ChannelMix, MixingBlock
from unrolled.models.embeddings import PixelEmbedding, PositionEmbedding
from unrolled.models.heads import Categorical, LogisticMixture
from unrolled.models.stack import Stack
from unrolled.ops import native
from unrolled.ops.dropout import Dropout
from unrolled.ops.observing import changed

HEAD_WEIGHTS: Weights = "int8"  # the form with the fewest bits for the head; see `unrolled.decode.packing`
MOST_GRID_POINTS = 1 << 16  # the most points of axial positions whose vectors are computed beforehand


def program(
    model: nn.Module,
    weights: Weights,
    given: Mapping[str, Mapping[str, Tensor]] | None = None,
    sample: Tensor | None = None,
) -> Program:
    """Make the program of a model, with weights in this form.

    Args:
        model: a `Decoder`.
        weights: the form of its matrices.
        given: the matrices, already packed; see `Builder`.
        sample: tokens `[B, T]` to round matrices to 4 bits by; see `unrolled.decode.calibration`.

    Raises:
        UnsupportedError: the model, or a part of it, has no instructions.
        ValueError: `given` lacks a matrix that is needed, or holds one that is not.
    """
    require(model, Decoder)
    model = cast(Decoder, model)
    require(model.stack, Stack)
    if given is None:
        _check_plain(model)
    builder = Builder(weights, model, given, None if sample is None else roundings(model, sample))
    x = builder.value(model.config.d_model)
    _embed(builder, model, x)
    for block in model.stack.layers:
        _block(builder, block, x)
    if not isinstance(model.stack.norm, nn.Identity):
        _norm(builder, model.stack.norm, x, x)
    head = len(builder.instructions)
    logits = _head(builder, model.head, x)
    if unknown := sorted((given or {}).keys() - builder.packed.keys()):
        raise ValueError(f"{unknown[0]} is packed, but the model has no such matrix")
    return builder.finish(head, x, logits)


def _check_plain(model: nn.Module) -> None:
    """Require weights that fp32 holds, and modules that do only what their class says."""
    for name, x in model.named_parameters():
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(f"a plan cannot run {name}, which is {x.dtype} on {x.device}")
    for name, module in model.named_modules():
        if changed([module]):
            raise UnsupportedError(
                f"a plan cannot run {name or 'the model'}, which has hooks or a forward of its own"
            )


def _embed(builder: Builder, model: Decoder, x: Value) -> None:
    embedding = model.embedding
    require(embedding, PixelEmbedding, nn.Embedding)
    require(model.dropout, Dropout)
    ids = torch.arange(model.n_ids, device="cpu")
    if type(embedding) is not nn.Embedding:
        table = embedding(ids)
    elif embedding.max_norm is None:
        table = embedding.weight
    else:  # a lookup would scale the rows of the model's own weight
        weight, (limit, order) = embedding.weight.detach().clone(), (embedding.max_norm, embedding.norm_type)
        table = nn.functional.embedding(ids, weight, max_norm=limit, norm_type=order)
    builder.embed(table, x)
    _positions(builder, model.positions, x)


def _positions(builder: Builder, positions: PositionEmbedding, x: Value) -> None:
    require(positions, PositionEmbedding)
    if positions.kind == "sinusoidal":
        frequencies = 10000.0 ** -(torch.arange(0, x.size, 2, dtype=torch.double) / x.size)
        builder.add_sinusoids(frequencies, math.sqrt(x.size), x)
    if positions.kind in ("learned", "axial"):
        n = positions.max_length
        if n > MOST_GRID_POINTS and positions.kind == "axial":
            raise UnsupportedError(
                f"a plan cannot run axial positions with {n} points, more than {MOST_GRID_POINTS}"
            )
        builder.limit_positions(n)
        zeros, places = native.floats(n, x.size).zero_(), torch.arange(n, device="cpu")
        builder.add_positions(positions.at(zeros, places), x)


def _block(builder: Builder, block: AttentionBlock, x: Value) -> None:
    require(block, AttentionBlock, Block, MixingBlock)
    require(block.dropout, Dropout)
    _sublayer(
        builder, block.norm, block.attention_norm, x, lambda y, to: attention(builder, block.attention, y, to)
    )
    if isinstance(block, Block):
        _sublayer(
            builder, block.norm, block.ff_norm, x, lambda y, to: _feed_forward(builder, block.ff, y, to)
        )
    elif isinstance(block, MixingBlock):
        _sublayer(builder, block.norm, block.ff_norm, x, lambda y, to: _channel_mix(builder, block.ff, y, to))


def _sublayer(builder: Builder, kind: str, norm: nn.Module, x: Value, layer: Any) -> None:
    """Add what a layer computes to the residual stream x, with the norm where it belongs."""
    with builder.scope():
        added = builder.value(x.size)
        layer(_norm(builder, norm, x, builder.value(x.size)) if kind == "pre" else x, added)
        if kind == "res_post":
            _norm(builder, norm, added, added)
        builder.add(x, added, x)
        if kind == "post":
            _norm(builder, norm, x, x)


def _feed_forward(builder: Builder, ff: FeedForward, x: Value, to: Value) -> Value:
    require(ff, FeedForward)
    up = builder.layer(x, ff.up)
    if ff.activation == "swiglu":
        gate, up = up.split([up.size // 2] * 2)
        builder.apply("silu", gate, times=up)
        return builder.layer(gate, ff.down, to)
    builder.apply(ff.activation, up)
    return builder.layer(up, ff.down, to)


def _channel_mix(builder: Builder, ff: ChannelMix, x: Value, to: Value) -> Value:
    require(ff, ChannelMix)
    k, r = mixtures(builder, x, ff.mix, part="previous")
    up = builder.apply("squared_relu", builder.layer(k, ff.up))
    return builder.apply("sigmoid", builder.layer(r, ff.gate), to, times=builder.layer(up, ff.down))


def _norm(builder: Builder, norm: Any, x: Value, to: Value) -> Value:
    require(norm, nn.LayerNorm, nn.RMSNorm)
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    bias: Tensor | None = getattr(norm, "bias", None)
    return builder.normalize(
        x, to, eps=eps, weight=norm.weight, bias=bias, centred=type(norm) is nn.LayerNorm
    )


def _head(builder: Builder, head: Any, x: Value) -> Value:
    if type(head) is LogisticMixture:
        parameters = builder.layer(x, head.project, least=HEAD_WEIGHTS)
        return builder.mixture(parameters, head.levels, parameters.size // 3, head.MIN_LOG_SCALE)
    require(head, Categorical)
    if head.project is not None:
        return builder.layer(x, head.project, least=HEAD_WEIGHTS)
    weight = head.table.weight[: head.levels].to(builder.table_dtype)  # one table, rounded once
    return builder.linear(x, weight, head.bias, name=builder.names[head], least=HEAD_WEIGHTS)
