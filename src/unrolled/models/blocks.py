"""The transformer block that the models are made of, and its parts."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from unrolled import attention
from unrolled.attention import MultiHeadAttention
from unrolled.contract import UnsupportedError
from unrolled.models.config import Activation, TransformerConfig
from unrolled.ops.checks import wrong
from unrolled.ops.dense import Layer, Linear
from unrolled.ops.dropout import Dropout
from unrolled.ops.observing import exporting, transforming
from unrolled.ops.replay import as_now
from unrolled.ops.sequence import inside
from unrolled.ops.state import Parts

INIT_STD = 0.02  # of every weight that starts random
Attention = MultiHeadAttention[Any, Any]  # of any mechanism, with a state of its own type
Result = TypeVar("Result")


class Masks(TypedDict, total=False):
    """The masks of a sequence; see `Stack.forward`."""

    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    global_mask: Tensor | None


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply "gelu", "gelu_tanh", "relu" or "tanh" elementwise."""
    if activation in ("relu", "tanh"):
        return x.relu() if activation == "relu" else x.tanh()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def apply(call: Callable[..., Result], *inputs: object, layer: nn.Module, recompute: bool) -> Result:
    """Call a function of a layer; with `recompute`, keep its inputs only, and run it again for the gradients.

    It runs again with the parameters and in the mode of the first run, even if `functional_call` or `eval`
    replaced them. Parameters changed in place are an error. The transforms of `torch.func` refuse
    checkpoints, so under them nothing is recomputed.
    """
    if not recompute or transforming():
        return call(*inputs)
    return cast(Result, checkpoint(_with_layer_as_now(layer, inside(call)), *inputs, use_reentrant=False))


def _with_layer_as_now(layer: nn.Module, call: Callable[..., Result]) -> Callable[..., Result]:
    if torch.compiler.is_compiling():
        return call
    context = as_now(layer)

    def run(*inputs: object) -> Result:
        with context():
            return call(*inputs)

    return run


class FeedForward(Layer):
    """Two layers at each position: W2 f(W1 x), where swiglu's f is [g, u] -> silu(g) u (Shazeer 2020).

    With a `chunk`, that many positions are computed at a time (Kitaev et al. 2020, "Reformer", arXiv
    2001.04451, section 3). Activations of width d_ff then exist for one chunk only; the backward pass
    recomputes them. `torch.export` computes all positions at once, since chunks would fix their number.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Activation,
        chunk: int | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if d_ff == 0:
            raise wrong("d_ff", 0, "at least 1 in this model, whose blocks need a feed-forward layer")
        if activation == "channel_mix":
            raise wrong(
                "activation",
                repr(activation),
                "another one here: only a Decoder that is not reversible has it",
            )
        self.activation, self.chunk = activation, chunk
        self.up = Linear(d_model, 2 * d_ff if activation == "swiglu" else d_ff, bias=bias)
        self.down = Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., d_model]."""
        if self.chunk is None or exporting() or x.dim() < 3 or x.shape[-2] <= self.chunk:
            return self._whole(x)
        recompute = torch.is_grad_enabled()
        parts = torch.split(x, self.chunk, dim=-2)
        return torch.cat(
            [apply(self._whole, part, layer=self, recompute=recompute) for part in parts], dim=-2
        )

    def _whole(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = activate(x, self.activation)
        return cast(Tensor, self.down(x))


class ResidualBlock(Layer):
    """Sub-layers f, each added to the residual stream, with a norm of one kind.

    pre:         x <- x + f(norm(x))     (Xiong et al. 2020)
    post:        x <- norm(x + f(x))     (Vaswani et al. 2017; the linear transformer's paper)
    res_post:    x <- x + norm(f(x))     (Liu et al. 2021, Swin Transformer V2)
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.norm = config.norms[layer]
        self.dropout = Dropout(config.dropout)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return cast(Tensor, norm(x)) if self.norm == "pre" else x

    def _after(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        if self.norm == "pre":
            return x + self._dropped(y)
        if self.norm == "post":
            return cast(Tensor, norm(x + self._dropped(y)))
        return x + self._dropped(norm(y))

    def _dropped(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(x)) if self.dropout.training else x


class AttentionBlock(ResidualBlock):
    """Attention, added to the residual stream, without a feed-forward layer.

    The three methods differ only in how the attention is called.
    """

    def __init__(self, config: TransformerConfig, layer: int, *, causal: bool) -> None:
        super().__init__(config, layer)
        self.attention_norm = make_norm(config)
        self.attention: Attention = make_attention(config, layer, causal=causal)

    def forward(self, x: Tensor, **masks: Unpack[Masks]) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; the masks are those of `Stack.forward`."""
        return self._finish(x, self.attention(self._read(x), **masks))

    def init_state(self, batch_size: int) -> Parts:
        """Make the state of `batch_size` sequences before their first token."""
        return cast(Parts, self.attention.init_state(batch_size))

    def prefill(
        self, x: Tensor, state: Parts, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        """[B, T, d_model] -> [B, T, d_model], from a state to a state."""
        y, state = self.attention.prefill(self._read(x), state, key_padding_mask=key_padding_mask)
        return self._finish(x, y), state

    def step(self, x: Tensor, state: Parts) -> tuple[Tensor, Parts]:
        """[B, d_model] -> [B, d_model], from a state to a state."""
        y, state = self.attention.step(self._read(x), state)
        return self._finish(x, y), state

    def _read(self, x: Tensor) -> Tensor:
        """The input of the attention."""
        return self._before(x, self.attention_norm)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the block returns, given the output of its attention."""
        return self._after(x, attended, self.attention_norm)


class Block(AttentionBlock):
    """Attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, layer: int, *, causal: bool) -> None:
        super().__init__(config, layer, causal=causal)
        self.ff_norm = make_norm(config)
        self.ff = make_feed_forward(config)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x, norm = super()._finish(x, attended), self.ff_norm
        return self._after(x, self.ff(self._before(x, norm)), norm)


def make_attention(config: TransformerConfig, layer: int, *, causal: bool) -> Attention:
    """Make the attention module of one layer.

    Raises:
        UnsupportedError: the mechanism is not causal, or not bidirectional, as required.
        ValueError: it does not exist, or does not take one of its options.
    """
    name = config.layer_attention[layer]
    ability = "causal" if causal else "bidirectional"

    def able(name: str) -> bool:
        return bool(getattr(attention.load(name).supports, ability))

    if not able(name):
        others = [n for n in attention.names() if able(n)]
        raise UnsupportedError(f"{name!r} attention cannot be {ability}; use one of {others} instead")
    options = config.options_of(layer)
    where = "attention_options" if name in config.attention_options else "layer_options"
    if own := options.keys() & {"d_model", "causal"}:
        raise ValueError(f"{where}[{name!r}] does not fit: the model sets {min(own)} itself; leave it out")
    try:
        return attention.load(name)(config.d_model, causal=causal, **options)
    except TypeError as error:  # an unknown option
        raise ValueError(f"{where}[{name!r}] does not fit: {error}") from error


def tie_layers(layers: Iterable[Attention]) -> None:
    """Let the layers share the parameters that their mechanism shares within a model."""
    by_kind: dict[type[Attention], list[Attention]] = {}
    for layer in layers:
        by_kind.setdefault(type(layer), []).append(layer)
    for kind, alike in by_kind.items():
        kind.tie_layers(alike)


def make_feed_forward(config: TransformerConfig) -> FeedForward:
    """Make the feed-forward layer of the config."""
    return FeedForward(config.d_model, config.ff_width, config.activation, config.ff_chunk, bias=config.bias)


def make_norm(config: TransformerConfig, width: int | None = None) -> nn.Module:
    """Make the norm of the config over a last axis of `width`, by default d_model."""
    width = config.d_model if width is None else width
    if config.norm_type == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(width, eps=config.norm_eps)


def init_weights(model: nn.Module, config: TransformerConfig) -> None:
    """Draw linear layers and embedding tables from N(0, 0.02^2), with biases at 0, as in GPT-2.

    With pre-norm, the two layers of each block that write to the residual stream get a standard deviation of
    0.02 / sqrt(2 n_layers), so that the scale of the stream after the last block does not depend on the depth
    (Radford et al. 2019, §2.3). Other norms rescale what these layers write, so with them the two layers get
    0.02 too. In attention mechanisms only `qkv_proj` and `out_proj` are drawn; other parameters keep the
    initial values of the mechanism.
    """
    rescaled = {
        id(module)
        for block in model.modules()
        if isinstance(block, ResidualBlock) and block.norm != "pre"
        for module in block.modules()
    }
    residual_std = INIT_STD / math.sqrt(2 * config.n_layers)
    for name, module in model.named_modules():
        drawn_here = ".attention." not in name or name.endswith(("attention.qkv_proj", "attention.out_proj"))
        if not isinstance(module, nn.Linear | nn.Embedding) or not drawn_here:
            continue
        residual = name.endswith(("attention.out_proj", "ff.down")) and id(module) not in rescaled
        nn.init.normal_(module.weight, std=residual_std if residual else INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
