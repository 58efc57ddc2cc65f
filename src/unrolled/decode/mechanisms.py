"""The instructions of attention mechanisms: one function for each."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unrolled.attention.delta_net import DeltaNet
from unrolled.attention.gated_linear import GatedLinearAttention
from unrolled.attention.kda import KimiDeltaAttention
from unrolled.attention.linear import LinearAttention
from unrolled.attention.mamba import Mamba
from unrolled.attention.mamba2 import Mamba2
from unrolled.attention.retention import Retention, log_gamma
from unrolled.attention.rfa import RandomFeatureAttention
from unrolled.attention.rwkv4 import RWKV4
from unrolled.attention.rwkv7 import RWKV7, SMALLEST_SQUARE
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.attention.window import WindowAttention
from unrolled.contract import UnsupportedError
from unrolled.decode.builder import Builder
from unrolled.decode.feature_maps import features
from unrolled.decode.program import Heads, Value, require
from unrolled.ops.head_norm import HeadRMSNorm
from unrolled.ops.precision import finite_exp
from unrolled.ops.random_features import SMALLEST_DIVISOR

Layer = Any  # a module of a mechanism


def attention(builder: Builder, layer: Layer, x: Value, to: Value) -> Value:
    """Add the instructions of an attention layer from its input to its output.

    Raises:
        UnsupportedError: there are no instructions for this mechanism or for one of its options.
    """
    emit = _MECHANISMS.get(type(layer))
    if emit is None or not layer.causal:
        raise UnsupportedError(f"a plan cannot run {layer.name} attention")
    builder.begin_layer()
    if layer.mixes_input:
        inputs = mixtures(builder, x, layer.mix, part="last")
    else:
        inputs = _projected(builder, layer, x)
    o = emit(builder, layer, x, inputs)
    return builder.layer(o, layer.out_proj, to)


def _projected(builder: Builder, layer: Layer, x: Value) -> list[Value]:
    """Queries, keys and values of all heads, after the short convolution if there is one."""
    qkv = builder.layer(x, layer.qkv_proj)
    if getattr(layer, "qk_norm", None) is not None:
        q, k, _ = qkv.split(layer.widths)
        _norm_queries_and_keys(builder, layer, q, k)
    return _convolved(builder, layer, qkv)


def _convolved(builder: Builder, layer: Layer, qkv: Value) -> list[Value]:
    if (conv := layer.short_conv) is not None:
        builder.convolve(qkv, conv.weight)
        if conv.activation or conv.bias is not None:
            builder.apply("silu" if conv.activation else "identity", qkv, bias=conv.bias)
    return qkv.split(layer.widths)


def _norm_queries_and_keys(builder: Builder, layer: SoftmaxAttention, q: Value, k: Value) -> None:
    for y, norm in ((q, layer.q_norm), (k, layer.k_norm)):
        require(norm, nn.RMSNorm)
        heads = y.size // norm.weight.numel()
        builder.normalize(y, y, eps=norm.eps or 0.0, heads=heads, weight=norm.weight.repeat(heads))


def _heads(layer: Layer, features: int | None = None) -> Heads:
    queries, keys, _ = layer.head_counts()
    groups = layer.n_kv_heads
    width = layer.head_dim if features is None else features
    return Heads(layer.n_heads, groups, queries, keys, width, layer.value_dim)


def _rotation(builder: Builder, layer: Layer, width: int) -> Value:
    """The angles by which a layer rotates heads of this width."""
    dim = layer.rotary_dim or width
    last = max(1, dim - 2) if getattr(layer, "closed", False) else dim
    return builder.angles(layer.rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.double) / last))


def _rotate(builder: Builder, layer: Layer, q: Value, k: Value) -> None:
    if layer.rotary:
        angles = _rotation(builder, layer, layer.head_dim)
        builder.rotate(q, angles, layer.head_dim)
        builder.rotate(k, angles, layer.head_dim)


def _normed(builder: Builder, norm: Any, o: Value) -> Value:
    """Normalise each head."""
    require(norm, HeadRMSNorm)
    return builder.normalize(o, o, eps=norm.eps, heads=len(norm.weight), weight=norm.weight.flatten())


def _gated(builder: Builder, o: Value, gate: Value, function: str) -> Value:
    return builder.apply(function, gate, o, times=o)


def _linear(builder: Builder, layer: LinearAttention, x: Value, qkv: list[Value]) -> Value:
    (q, k, v), R = qkv, layer.feature_map.feature_dim
    q, k = features(builder, layer.feature_map, q, k)
    divisor = (q, k) if layer.normalize else None
    if layer.rotary:
        angles = _rotation(builder, layer, R)
        q, k = (builder.rotate(y, angles, R, builder.value(y.size)) for y in (q, k))
    o = builder.recur(_heads(layer, R), q, k, v, divisor=divisor)
    return o if layer.normalize else _normed(builder, layer.head_norm, o)


def _softmax(builder: Builder, layer: SoftmaxAttention, x: Value, qkv: list[Value]) -> Value:
    q, k, v = qkv
    _rotate(builder, layer, q, k)
    o = builder.attend(_heads(layer), q, k, v, window=None, scale=layer.head_dim**-0.5)
    if layer.gate_proj is not None:
        _gated(builder, o, builder.layer(x, layer.gate_proj), "sigmoid")
    return o


def _window(builder: Builder, layer: WindowAttention, x: Value, qkv: list[Value]) -> Value:
    if set(layer.dilation) != {1}:
        raise UnsupportedError(f"a plan cannot run windows with dilation {layer.dilation}; use dilation 1")
    q, k, v = qkv
    _rotate(builder, layer, q, k)
    window = layer.window_size[0] + 1
    return builder.attend(_heads(layer), q, k, v, window=window, scale=layer.head_dim**-0.5)


def _retention(builder: Builder, layer: Retention, x: Value, qkv: list[Value]) -> Value:
    q, k, v = qkv
    _rotate(builder, layer, q, k)
    gates = log_gamma(layer.n_kv_heads).exp()
    o = builder.recur(_heads(layer), q, k, v, gates=gates, scale=layer.head_dim**-0.5)
    return _gated(builder, _normed(builder, layer.head_norm, o), builder.layer(x, layer.gate_proj), "silu")


def _gated_linear(builder: Builder, layer: GatedLinearAttention, x: Value, qkv: list[Value]) -> Value:
    z = builder.layer(builder.layer(x, layer.decay_down), layer.decay_up)
    builder.apply("log_sigmoid", z, scale=1 / layer.temperature)
    gates = builder.apply("exponential", z)
    o = builder.recur(_heads(layer), *qkv, gates=gates, scale=layer.head_dim**-0.5)
    return _gated(builder, _normed(builder, layer.head_norm, o), builder.layer(x, layer.gate_proj), "silu")


def _delta(builder: Builder, layer: DeltaNet, x: Value, qkv: list[Value]) -> Value:
    rates = builder.apply("sigmoid", builder.layer(x, layer.beta_proj), scale=layer.max_beta)
    gates = None
    if layer.gated:
        pace = _rates(layer)
        gates = _decays(builder, builder.layer(x, layer.decay_proj), layer.decay_bias, pace)
    o = _delta_rule(builder, layer, qkv, rates, gates)
    if layer.gated:
        _gated(builder, o, builder.layer(x, layer.gate_proj), "silu")
    return o


def _kda(builder: Builder, layer: KimiDeltaAttention, x: Value, qkv: list[Value]) -> Value:
    rates = builder.apply("sigmoid", builder.layer(x, layer.beta_proj))
    z = builder.layer(builder.layer(x, layer.decay_down), layer.decay_up)
    pace = _rates(layer).repeat_interleave(layer.head_dim)
    o = _delta_rule(builder, layer, qkv, rates, _decays(builder, z, layer.decay_bias.flatten(), pace))
    gate = builder.layer(builder.layer(x, layer.gate_down), layer.gate_up)
    return _gated(builder, o, gate, "sigmoid")


def _rates(layer: Layer) -> Tensor:
    """-exp(A)."""
    return -finite_exp(layer.log_pace.detach().float())


def _decays(builder: Builder, z: Value, bias: Tensor, pace: Tensor) -> Value:
    """exp(pace softplus(z + bias))."""
    return builder.apply("exponential", builder.apply("softplus", z, bias=bias, weight=pace))


def _delta_rule(builder: Builder, layer: Layer, qkv: list[Value], rates: Value, gates: Value | None) -> Value:
    """The delta rule, with keys of length 1 and queries of length 1 / sqrt(D), then the output norm."""
    (q, k, v), D = qkv, layer.head_dim
    for y in (q, k):
        if layer.short_conv is None:
            builder.apply("silu", y)
        # x / sqrt(|x|^2 + 1e-6), written with the mean of the squares, as `normalize` computes it
        unit = torch.full((y.size,), D**-0.5, dtype=torch.float32)
        builder.normalize(y, y, eps=1e-6 / D, heads=y.size // D, weight=unit)
    _rotate(builder, layer, q, k)
    o = builder.recur(_heads(layer), q, k, v, gates=gates, rates=rates, scale=D**-0.5)
    return _normed(builder, layer.norm, o)


def _mamba(builder: Builder, layer: Mamba, x: Value, qkv: list[Value]) -> Value:
    v, rank, states = qkv[2], layer.step_rank, layer.head_dim
    if layer.short_conv is None:
        builder.apply("silu", v)
    r, b, c = builder.layer(v, layer.select_proj).split([rank, states, states])
    steps = builder.apply("softplus", builder.layer(r, layer.step_proj))
    o = builder.scan(v, steps, _rates(layer), b, c)
    builder.add(o, builder.apply("identity", v, weight=layer.skip), o)
    return _gated(builder, o, builder.layer(x, layer.gate_proj), "silu")


def _mamba2(builder: Builder, layer: Mamba2, x: Value, qkv: list[Value]) -> Value:
    q, k, v = qkv
    if layer.short_conv is None:
        for y in qkv:
            builder.apply("silu", y)
    steps = builder.apply("softplus", builder.layer(x, layer.step_proj))
    pace = _rates(layer)
    paced = builder.apply("identity", steps, builder.value(steps.size), weight=pace)
    written = builder.scale_heads(v, steps, builder.value(v.size))
    o = builder.recur(_heads(layer), q, k, written, gates=builder.apply("exponential", paced))
    builder.add(o, builder.apply("identity", v, weight=layer.skip.repeat_interleave(layer.value_dim)), o)
    return _normed(builder, layer.norm, _gated(builder, o, builder.layer(x, layer.gate_proj), "silu"))


def mixtures(builder: Builder, x: Value, mix: Tensor, *, part: str) -> list[Value]:
    """Mix a token with the one before it, which is the `part` of the layer's state, by each row of `mix`."""
    taps = torch.tensor([1.0, -1.0]).expand(x.size, 2)
    change = builder.convolve(x, taps, builder.value(x.size), part=part)
    mixed = []
    for each in mix.detach():
        y = builder.apply("identity", change, builder.value(x.size), weight=each)
        mixed.append(builder.add(y, x, y))
    return mixed


def _projected_mixtures(builder: Builder, layer: RWKV4 | RWKV7, mixed: list[Value]) -> list[Value]:
    """Queries, and keys and values of every head, each projected from its own mixture."""
    parts = builder.layer_by_parts(mixed, layer.qkv_proj, layer.widths)
    qkv = builder.value(sum(layer.widths))
    for y, to in zip(parts, qkv.split(layer.widths), strict=True):
        builder.apply("identity", y, to)
    q, k, v = _convolved(builder, layer, qkv)
    return [q, *(_of_every_head(builder, layer, y) for y in (k, v))]


def _rwkv4(builder: Builder, layer: RWKV4, _: Value, mixed: list[Value]) -> Value:
    r, k, v = _projected_mixtures(builder, layer, mixed)
    o = builder.average(k, v, _rates(layer), layer.bonus)
    return _gated(builder, o, r, "sigmoid")


def _rwkv7(builder: Builder, layer: RWKV7, _: Value, mixed: list[Value]) -> Value:
    H, D = layer.n_heads, layer.head_dim
    r, f, v, w, a, g = _rwkv7_inputs(builder, layer, mixed)
    builder.apply("sigmoid", w, scale=-math.exp(-0.5))
    gates = builder.apply("exponential", w)
    builder.apply("sigmoid", a)
    # x / sqrt(|x|^2 + e), written with the mean of the squares, as `normalize` computes it
    p = builder.apply("identity", f, builder.value(H * D), weight=layer.erased.flatten())
    unit = torch.full((H * D,), D**-0.5, dtype=torch.float32)
    builder.normalize(p, p, eps=SMALLEST_SQUARE / D, heads=H, weight=unit)
    writer = builder.apply("identity", a, builder.value(H * D), times=p)
    # k = f (1 + (a - 1) n) = f (n a + (1 - n))
    n = layer.replaced.detach().float().flatten()
    k = builder.apply("identity", a, weight=n)
    builder.apply("identity", k, bias=1 - n, times=f)
    sizes = Heads(H, H, H, H, D, layer.value_dim)
    o = builder.recur(sizes, r, k, v, gates=gates, reader_and_writer=(p, writer))
    builder.normalize(
        o, o, eps=layer.eps, heads=H, weight=layer.norm_weight, bias=layer.norm_bias, centred=True
    )
    products = builder.apply("identity", k, times=r)
    own = builder.scale_heads(v, builder.linear_by_head(products, layer.bonus.unsqueeze(1), None))
    return _gated(builder, builder.add(o, own, o), g, "identity")


def _rwkv7_inputs(builder: Builder, layer: RWKV7, mixed: list[Value]) -> list[Value]:
    """Project the mixtures: r, f and v of every head, and w, a and g."""
    projected = _projected_mixtures(builder, layer, mixed[:3])
    w, a, g = mixed[3:]
    w = builder.layer(builder.apply("tanh", builder.layer(w, layer.decay_down)), layer.decay_up)
    a = builder.layer(builder.layer(a, layer.rate_down), layer.rate_up)
    g = builder.layer(builder.apply("sigmoid", builder.layer(g, layer.gate_down)), layer.gate_up)
    return [*projected, w, a, g]


def _of_every_head(builder: Builder, layer: Layer, x: Value) -> Value:
    """Repeat the keys or values of each group for all of its heads."""
    H, G = layer.n_heads, layer.n_kv_heads
    if H == G:
        return x
    width, to = x.size // G, builder.value(x.size // G * H)
    for head in range(H):
        builder.apply("identity", x.part(head * G // H * width, width), to.part(head * width, width))
    return to


def _rfa(builder: Builder, layer: RandomFeatureAttention, x: Value, qkv: list[Value]) -> Value:
    q, k, v = qkv
    signed = layer.feature_map.features == "fourier"
    q, k = (_random_features(builder, layer, y) for y in (q, k))
    parts = {"draw": layer.feature_map.projection.redraws.reshape(1)}
    gates = rates = None
    if layer.gate_proj is None:
        parts["weight"] = torch.ones(1, layer.n_kv_heads, dtype=torch.float32)
    else:
        logits = builder.layer(x, layer.gate_proj)
        rates = builder.apply("identity", logits, builder.value(logits.size), scale=-1)
        gates, rates = (builder.apply("sigmoid", y) for y in (logits, rates))
    builder.keep_constant(**parts)
    return builder.recur(
        _heads(layer, layer.feature_map.feature_dim), q, k, v,
        gates=gates, rates=rates, averages=gates is not None,
        divisor=(q, k), least=SMALLEST_DIVISOR if signed else 0.0,
    )  # fmt: skip


def _random_features(builder: Builder, layer: RandomFeatureAttention, x: Value) -> Value:
    """phi(x) of each head, with the rows and the scale of its group."""
    phi, D = layer.feature_map, layer.head_dim
    heads, n = x.size // D, phi.projection.weight.shape[1]
    scale, rows = (
        y.detach().repeat_interleave(heads // len(y), 0) for y in (phi.scale, phi.projection.weight)
    )
    # x / |x|, written with the mean of the squares. With the smallest normal number as epsilon, zeros stay 0.
    tiny = torch.finfo(torch.float32).tiny
    builder.normalize(x, x, eps=tiny, heads=heads, weight=scale.flatten() * D**-0.5)
    if layer.rotary:
        builder.rotate(x, _rotation(builder, layer, D), D)
    wx = builder.linear_by_head(x, rows, None)
    if phi.features == "arccos":
        return builder.apply("relu", wx, scale=n**-0.5)
    return builder.features("waves", wx, n, phi.feature_dim, scale=n**-0.5)


_MECHANISMS: dict[type[nn.Module], Callable[[Builder, Any, Value, list[Value]], Value]] = {
    LinearAttention: _linear,
    SoftmaxAttention: _softmax,
    WindowAttention: _window,
    Retention: _retention,
    GatedLinearAttention: _gated_linear,
    DeltaNet: _delta,
    KimiDeltaAttention: _kda,
    Mamba: _mamba,
    Mamba2: _mamba2,
    RandomFeatureAttention: _rfa,
    RWKV4: _rwkv4,
    RWKV7: _rwkv7,
}
