r"""Perceiver and Perceiver IO: a few latent vectors attend to any number of inputs, then to each other.

    z = L                                                               N learned latents
    z <- z + attend(norm(z), norm(x)),  z <- z + ff(norm(z))            cross-attention to the inputs x
    z <- block_K( ... block_1(z))                                       the latents attend to each other

The Perceiver repeats the last two lines, and a linear layer classifies the mean of the latents. All
repetitions use the same blocks. The first cross-attention has its own weights; all later ones share one set.
Perceiver IO reads the inputs once, repeats the last line, and decodes the latents by one more cross-attention
from output queries, followed by a linear layer.

Jaegle et al. 2021, "Perceiver: General Perception with Iterative Attention", arXiv 2103.03206, section 3;
Jaegle et al. 2021, "Perceiver IO", arXiv 2107.14795, section 3.

Cost for S inputs and O outputs: time O(S N + K N^2) for each repetition, and O(O N) for the outputs.
Without positions the inputs are a set: their order has no effect.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal, TypedDict, Unpack

from torch import Tensor

from unrolled.fields import FromData, Size
from unrolled.models.config import check_classes
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.heads import Categorical, embedding_of
from unrolled.models.latents import CrossAttend, InputArray, LatentConfig, Latents, init_perceiver
from unrolled.models.saving import RecomputingModel
from unrolled.ops.checks import check_matches, shape

Output = Literal["classification", "tokens", "masked"]


@dataclass
class PerceiverConfig(LatentConfig):
    """A Perceiver's fields; see `LatentConfig` and `TransformerConfig` for the rest.

    Attributes:
        n_classes: number of labels.
        share_weights: share the weights of the iterations, except those of the first cross-attention.
    """

    _: KW_ONLY
    n_classes: Annotated[Size, FromData("n_classes")]
    share_weights: bool = True


@dataclass
class PerceiverIOConfig(LatentConfig):
    """A Perceiver IO's fields; see `LatentConfig` and `TransformerConfig` for the rest.

    Attributes:
        output: "classification" (one label for the inputs), "tokens" (one for each input) or "masked" (the
            token that belongs at each position; see `mask_tokens`): a learned query for each output, up to
            `max_length` of them.
        n_classes: number of labels; None for "masked".
        query_residual: add each output query to what it reads.
        tie_embeddings: for "masked", use the embedding table as the output matrix.
        output_bias: give the output layer a bias; by default it has one unless it is the embedding table.
        query_width: width of the output queries and of the input of the output layer; d_model by default.
        decoder_heads, decoder_width, decoder_value_width: `cross_heads`, `cross_width` and
            `cross_value_width` of the cross-attention that decodes the latents; the same by default.
    """

    _: KW_ONLY
    output: Output = "classification"
    n_classes: Annotated[Size | None, FromData("n_classes")] = None
    query_residual: bool = True
    tie_embeddings: bool = False
    output_bias: bool | None = None
    query_width: Size | None = None
    decoder_heads: Size | None = None
    decoder_width: Size | None = None
    decoder_value_width: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_classes(self.output, self.vocab_size, self.n_classes)
        width, name = self.query_width or self.d_model, "query_width" if self.query_width else "d_model"
        if self.tie_embeddings and (self.output != "masked" or self.array_width != width):
            raise ValueError(
                f"tie_embeddings is True, but must be False with output {self.output!r} and inputs "
                f"{self.array_width} wide: it needs output 'masked' and inputs as wide as {name} = {width}"
            )


class Perceiver(RecomputingModel):
    """Latents that read the inputs before each pass through their stack; their mean is classified.

    `unrolled.models.latents.init_perceiver` initialises the weights. The latents are drawn from a normal
    distribution of standard deviation 0.02, truncated at 2.
    """

    model_name = "perceiver"
    config_type = PerceiverConfig
    config: PerceiverConfig

    def __init__(self, config: PerceiverConfig) -> None:
        super().__init__(config)
        self.array = InputArray(config)
        self.latents = Latents(config, n_reads=config.n_iterations, shared=config.share_weights)
        self.head = Categorical(config.d_model, config.n_classes, bias=True)
        init_perceiver(self, config)

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits `[B, n_classes]` of a batch.

        Args:
            x: token ids `[B, S]` long, or continuous inputs `[B, S, input_dim]`; `[B, *axes, input_dim]` for
                those on a grid, which need not be of the config's size.
            key_padding_mask: `[B, S]` bool, True at inputs that are masked; the points of a grid are in
                row-major order. Positions skip masked tokens; the points of a grid keep their place.
        """
        return self.head(self.hidden(x, key_padding_mask=key_padding_mask))

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats, computed in at least fp32.

        Args:
            inputs: as `x` of `forward`.
            targets: `[B]` long; -100 is ignored.
            key_padding_mask: as for `forward`.
        """
        return self.head.loss(self.hidden(inputs, key_padding_mask=key_padding_mask), targets)

    def hidden(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The input of the output layer, `[B, d_model]`: the mean of the latents."""
        x = self.array(x, key_padding_mask=key_padding_mask)
        return self.latents(x, key_padding_mask, recompute=self.recompute).mean(dim=1)


class Reading(TypedDict, total=False):
    """The options of `PerceiverIO.forward`."""

    queries: Tensor | None
    key_padding_mask: Tensor | None


class PerceiverIO(RecomputingModel):
    """Latents that read the inputs once, and output queries that read the latents after their last pass.

    The weights are initialised like those of the `Perceiver`.
    """

    model_name = "perceiver_io"
    config_type = PerceiverIOConfig
    config: PerceiverIOConfig

    def __init__(self, config: PerceiverIOConfig) -> None:
        super().__init__(config)
        self.array = InputArray(config)
        self.latents = Latents(config, n_reads=1, shared=True)
        one = config.output == "classification"
        self.query_width = config.query_width or config.d_model
        self.queries = PositionEmbedding("learned", self.query_width, 1 if one else config.max_length)
        self.decoder = CrossAttend(
            config,
            config.d_model,
            query_width=self.query_width,
            heads=config.decoder_heads,
            width=config.decoder_width,
            value_width=config.decoder_value_width,
            query_residual=config.query_residual,
        )
        n_outputs = config.vocab_size if config.output == "masked" else config.n_classes
        assert n_outputs is not None  # the config has checked it
        tied = embedding_of(self.array) if config.tie_embeddings else None
        self.head = Categorical(self.query_width, n_outputs, bias=config.output_bias, tied=tied)
        init_perceiver(self, config)

    def forward(
        self, x: Tensor, *, queries: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of a batch.

        Args:
            x: as for `Perceiver.forward`.
            queries: `[B, O, query_width]`, output queries in place of the learned ones.
            key_padding_mask: as for `Perceiver.forward`; with an output for each input, those at padding are
                meaningless.

        Returns:
            "classification": `[B, n_classes]`; "tokens": `[B, S, n_classes]`; "masked": `[B, S, vocab_size]`;
            with `queries`, for each of them: `[B, O, n_classes or vocab_size]`.
        """
        return self.head(self.hidden(x, queries=queries, key_padding_mask=key_padding_mask))

    def loss(self, inputs: Tensor, targets: Tensor, **reading: Unpack[Reading]) -> Tensor:
        """Mean cross-entropy in nats, computed in at least fp32.

        Args:
            inputs: as `x` of `forward`.
            targets: long, one for each output; -100 and, with an output for each input, those at padding are
                ignored.
            reading: `queries` and `key_padding_mask`, as for `forward`.
        """
        per_input = reading.get("queries") is None and self.config.output != "classification"
        padding = reading.get("key_padding_mask") if per_input else None
        return self.head.loss(self.hidden(inputs, **reading), targets, padding)

    def hidden(
        self, x: Tensor, *, queries: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """The input of the output layer: shaped like the result of `forward`, but query_width wide."""
        x = self.array(x, key_padding_mask=key_padding_mask)
        z = self.latents(x, key_padding_mask, recompute=self.recompute)
        (B, S), width = x.shape[:2], self.query_width
        one = queries is None and self.config.output == "classification"
        if one:
            queries = self.queries(z.new_zeros(B, 1, width))
        elif queries is None:
            # points of a grid keep their place
            counted = key_padding_mask if self.config.grid is None else None
            queries = self.queries(z.new_zeros(B, S, width), key_padding_mask=counted)
        elif queries.dim() != 3 or queries.shape[0] != B or queries.shape[2] != width:
            raise ValueError(f"queries has shape {shape(queries)}, but must be [{B}, O, {width}]")
        else:
            check_matches("queries", queries, self.latents.initial)
        y = self.decoder(queries, z)
        return y[:, 0] if one else y
