"""Parts of the Perceiver and Perceiver IO: an input array, cross-attention, and latents that read it."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from unrolled.fields import FromData, Size
from unrolled.models.blocks import INIT_STD, FeedForward, apply, init_weights, make_norm
from unrolled.models.checks import check_ids
from unrolled.models.config import Mechanisms, Sizes, TransformerConfig, check_one_input
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.reversible import make_stack
from unrolled.ops.checks import check_input, check_matches, wrong
from unrolled.ops.dense import Layer, Linear
from unrolled.ops.dropout import Dropout
from unrolled.ops.masks import zero_padding
from unrolled.ops.positions import fourier_features, grid_positions
from unrolled.ops.softmax import softmax_attention


@dataclass
class LatentConfig(TransformerConfig):
    """The fields shared by the Perceivers; see `TransformerConfig` for the rest.

    `d_model`, `n_layers`, `n_heads`, `attention` and so on describe the stack of blocks in which the latents
    attend to each other. `d_ff` is d_model by default, as in the paper. Blocks are pre-norm, and `positions`
    are those of the inputs, which may not be rotary.

    Attributes:
        vocab_size: number of token ids; None where the input is continuous.
        input_dim: width of a continuous input, which is read without an embedding; None for tokens.
        input_width: width of the vector for each token; d_model by default.
        grid: for continuous inputs on a grid, the number of points along each axis: `n_bands` Fourier
            features per axis are appended to each input (see `fourier_features`), with `positions="none"`.
        n_bands: number of frequencies per axis of the grid.
        n_latents: number of latents.
        n_iterations: number of times that the latents pass through their stack.
        cross_heads: heads of each cross-attention.
        cross_width: width of the queries, keys and values of each cross-attention, over all heads; by default
            the smaller of the widths of the latents and of the inputs.
        cross_value_width: width of the values of each cross-attention, if it differs from `cross_width`.
    """

    vocab_size: Annotated[Size | None, FromData("vocab_size")] = None
    _: KW_ONLY
    input_dim: Size | None = None
    input_width: Size | None = None
    grid: Sizes | None = None
    n_bands: Size = 64
    n_latents: Size = 128
    n_iterations: Size = 1
    cross_heads: Size = 1
    cross_width: Size | None = None
    cross_value_width: Size | None = None
    attention: Mechanisms = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_input(self.vocab_size, self.input_dim)
        if self.norm != "pre":
            raise ValueError(f"norm is {self.norm!r}, but must be 'pre' in a Perceiver")
        if self.positions == "rotary":
            raise ValueError("positions is 'rotary', but must be another kind: latents have no positions")
        if self.input_width is not None and self.vocab_size is None:
            raise wrong("input_width", self.input_width, "None: continuous inputs have input_dim")
        if self.positions == "sinusoidal" and self.array_width % 2:
            raise wrong("the width of the inputs", self.array_width, "even with positions 'sinusoidal'")
        if self.grid is not None and (self.input_dim is None or self.positions != "none"):
            raise ValueError(
                f"grid is {self.grid}, but must be None with vocab_size {self.vocab_size} and positions "
                f"{self.positions!r}: a grid gives positions to continuous inputs that have no others"
            )

    @property
    def ff_width(self) -> int:
        """The width of the feed-forward layers, with the default filled in."""
        return self.d_model if self.d_ff is None else self.d_ff

    @property
    def array_width(self) -> int:
        """The width of the inputs of the cross-attentions."""
        if self.input_dim is None:
            return self.d_model if self.input_width is None else self.input_width
        return self.input_dim + len(self.grid or ()) * (2 * self.n_bands + 1)

    @property
    def positions_width(self) -> int:
        """The width of the inputs, to which the positions are added."""
        return self.array_width


class InputArray(Layer):
    """Tokens or continuous inputs, with their positions, as the array `[B, S, array_width]` to be read."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding | None = None
        if config.vocab_size is not None:
            self.embedding = nn.Embedding(config.vocab_size, config.array_width)
        self.positions = PositionEmbedding.of(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """`[B, S]` ids, `[B, S, input_dim]` or `[B, *axes, input_dim]` -> `[B, S, array_width]`."""
        if self.embedding is not None:
            check_ids("x", x, self.embedding.num_embeddings, self.embedding.weight)
            x = self.embedding(x)
        else:
            x = self._continuous(x)
        (x,) = zero_padding(key_padding_mask, x)  # no stack reads the array and would do it
        return cast(Tensor, self.dropout(self.positions(x, key_padding_mask=key_padding_mask)))

    def _continuous(self, x: Tensor) -> Tensor:
        grid, width = self.config.grid, cast(int, self.config.input_dim)
        places = ["T"] if grid is None else [f"X{i}" for i in range(1, len(grid) + 1)]
        check_input("x", x, ["B", *places, width], None)
        if grid is not None:
            points = grid_positions(x.shape[1:-1], device=x.device)
            features = fourier_features(points, self.config.n_bands, grid, dtype=x.dtype)
            x = torch.cat([x, features.expand(*x.shape[:-1], -1)], dim=-1)
        return x.flatten(1, -2)


class CrossAttend(Layer):
    """Softmax attention from queries to an array, then a feed-forward layer (pre-norm).

        z <- z + W_o attend(W_q norm(z), W_kv norm(x))        z <- z + ff(norm(z))

    Without `query_residual` the first line does not add z: the outputs are of another kind than the queries,
    such as pixels read at positions (Perceiver IO, section 3.2).

    Args:
        config: the other options, and the default sizes.
        array_width: width of the array.
        query_width: width of the queries and of the output; d_model by default.
        heads: `cross_heads` by default.
        width: width of queries and keys over all heads; by default `cross_width` or, if that is None, the
            smaller of `array_width` and `query_width`.
        value_width: width of values over all heads; by default `cross_value_width` or, if that is None,
            `width`.
        query_residual: add the queries z to the output of the attention.
    """

    def __init__(
        self,
        config: LatentConfig,
        array_width: int,
        *,
        query_width: int | None = None,
        heads: int | None = None,
        width: int | None = None,
        value_width: int | None = None,
        query_residual: bool = True,
    ) -> None:
        super().__init__()
        query_width = query_width or config.d_model
        width = width or config.cross_width or min(array_width, query_width)
        value_width = value_width or config.cross_value_width or width
        self.heads, self.query_residual = heads or config.cross_heads, query_residual
        for size in (width, value_width):
            if size % self.heads:
                name = "cross_heads" if heads is None else "decoder_heads"
                raise wrong(name, self.heads, f"a divisor of the cross-attention's width {size}")
        self.query_norm = make_norm(config, query_width)
        self.array_norm = make_norm(config, array_width)
        self.q_proj = Linear(query_width, width, bias=config.bias)
        self.kv_proj = Linear(array_width, width + value_width, bias=config.bias)
        self.out_proj = Linear(value_width, query_width, bias=config.bias)
        self.ff_norm = make_norm(config, query_width)
        ff_width = query_width if config.d_ff is None else config.d_ff
        self.ff = FeedForward(query_width, ff_width, config.activation, config.ff_chunk, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, z: Tensor, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend from `z [B, N, query_width]` to valid inputs `x [B, S, array_width]`: shaped like `z`."""
        q = self.q_proj(self.query_norm(z))
        widths = [self.q_proj.out_features, self.out_proj.in_features]
        k, v = self.kv_proj(self.array_norm(x)).split(widths, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, y.shape[-1] // self.heads)) for y in (q, k, v))
        o = softmax_attention(q, k, v, key_padding_mask=key_padding_mask)
        y = self.dropout(self.out_proj(o.flatten(-2)))
        y = z + y if self.query_residual else y
        return cast(Tensor, y + self.dropout(self.ff(self.ff_norm(y))))


def init_perceiver(model: nn.Module, config: LatentConfig) -> None:
    """Draw the weights as `init_weights` does, and those of cross-attentions from N(0, 1 / layer inputs).

    An array may be only a few numbers wide. With a standard deviation of 0.02 the latents would receive so
    little signal that training begins with a long plateau.
    """
    init_weights(model, config)
    for read in model.modules():
        if isinstance(read, CrossAttend):
            for layer in (read.q_proj, read.kv_proj, read.out_proj):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)


class Latents(Layer):
    """Learned latents that read an array before each of their first `n_reads` passes through the stack.

    With `shared` weights there is one stack, and one cross-attention for all reads after the first.
    """

    def __init__(self, config: LatentConfig, *, n_reads: int, shared: bool) -> None:
        super().__init__()
        self.n_iterations, self.n_reads = config.n_iterations, n_reads
        self.initial = nn.Parameter(torch.empty(config.n_latents, config.d_model))
        nn.init.trunc_normal_(self.initial, std=INIT_STD, a=-2, b=2)
        n_modules = min(n_reads, 2) if shared else n_reads
        self.reads = nn.ModuleList(CrossAttend(config, config.array_width) for _ in range(n_modules))
        n_stacks = 1 if shared else config.n_iterations
        stacks = (make_stack(config, causal=False, final_norm=False) for _ in range(n_stacks))
        self.stacks = nn.ModuleList(stacks)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None, *, recompute: bool = False) -> Tensor:
        """Read `x [B, S, array_width]`: `[B, n_latents, d_model]`."""
        check_matches("x", x, self.initial)
        z = self.initial.expand(x.shape[0], -1, -1)
        for i in range(self.n_iterations):
            if i < self.n_reads:
                read = self.reads[min(i, len(self.reads) - 1)]
                z = apply(read, z, x, key_padding_mask, layer=read, recompute=recompute)
            z = self.stacks[min(i, len(self.stacks) - 1)](z, recompute=recompute)
        return z
