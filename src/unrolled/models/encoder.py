"""The bidirectional transformer: classifies a sequence, labels its tokens, or predicts masked tokens."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from unrolled.contract import IGNORED, UnsupportedError
from unrolled.fields import Count, FromData, Size
from unrolled.models.blocks import Masks, activate, init_weights, make_norm
from unrolled.models.checks import check_ids
from unrolled.models.config import TransformerConfig, check_classes, check_one_input
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.heads import Categorical, embedding_of
from unrolled.models.reversible import make_stack
from unrolled.models.saving import RecomputingModel
from unrolled.ops.checks import check_input, shape, wrong
from unrolled.ops.dense import Layer, Linear
from unrolled.ops.dropout import Dropout
from unrolled.ops.masks import zero_padding
from unrolled.ops.precision import accumulation_dtype

Output = Literal["classification", "tokens", "masked", "hidden"]
HeadHidden = Literal["gelu", "gelu_tanh", "relu", "tanh"]
Pooling = Literal["mean", "first"]


@dataclass
class EncoderConfig(TransformerConfig):
    """An encoder's fields; see `TransformerConfig` for the rest.

    Attributes:
        vocab_size: number of token ids; None where the input is continuous.
        input_dim: width of a continuous input, which a linear layer maps to d_model; None for tokens.
        output: "classification" (one label for the sequence), "tokens" (one for each position), "masked" (the
            token that belongs at each position; see `mask_tokens`) or "hidden" (the hidden vector of each
            position: there is no output layer).
        n_classes: number of labels; None for "masked" and "hidden".
        pooling: the input of "classification": the "mean" over the valid positions, or the "first" of them.
        tie_embeddings: for "masked", use the embedding table as the output matrix.
        n_segments: number of segment ids, each with a vector that is added to the embeddings (BERT's two
            sentences); 0 for none.
        embedding_norm: normalise the sum of embeddings and positions before the first block.
        head_hidden: put a layer of d_model units with this activation before the output layer: "gelu",
            "gelu_tanh", "relu" or "tanh"; None for no such layer. For "masked", a norm follows it (BERT).
        output_bias: give the output layer a bias; by default it has one unless it is the embedding table.
    """

    vocab_size: Annotated[Size | None, FromData("vocab_size")] = None
    _: KW_ONLY
    input_dim: Size | None = None
    output: Output = "classification"
    n_classes: Annotated[Size | None, FromData("n_classes")] = None
    pooling: Pooling = "mean"
    tie_embeddings: bool = False
    n_segments: Count = 0
    embedding_norm: bool = False
    head_hidden: HeadHidden | None = None
    output_bias: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_input(self.vocab_size, self.input_dim)
        if self.output == "hidden":
            self._check_no_head()
        else:
            check_classes(self.output, self.vocab_size, self.n_classes)
        if self.tie_embeddings and self.output != "masked":
            raise ValueError(f"tie_embeddings is True, but must be False with output {self.output!r}")

    def _check_no_head(self) -> None:
        head = {"n_classes": self.n_classes, "head_hidden": self.head_hidden, "output_bias": self.output_bias}
        for name, value in head.items():
            if value is not None:
                raise wrong(name, repr(value), "None with output 'hidden', which has no output layer")


class HiddenLayer(Layer):
    """A layer between the last block and the output layer: norm(f(W h + b)), or without the norm.

    BERT's masked language model has one with a norm, and its pooler is one without (Devlin et al. 2019,
    arXiv 1810.04805, and its code).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert config.head_hidden is not None  # otherwise there is no such layer
        self.activation = config.head_hidden
        self.dense = Linear(config.d_model, config.d_model)
        self.norm = make_norm(config) if config.output == "masked" else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d_model] -> [..., d_model]."""
        return cast(Tensor, self.norm(activate(self.dense(hidden), self.activation)))


class Reading(TypedDict, total=False):
    """The masks and segments of `Encoder.forward`."""

    key_padding_mask: Tensor | None
    segments: Tensor | None
    global_mask: Tensor | None


class Encoder(RecomputingModel):
    """Embeddings, bidirectional blocks, and a linear output.

    `unrolled.models.blocks.init_weights` initialises the weights.
    """

    model_name = "encoder"
    config_type = EncoderConfig
    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        if config.vocab_size is None:
            assert config.input_dim is not None  # the config has checked it
            self.embedding: nn.Linear | nn.Embedding = nn.Linear(config.input_dim, config.d_model)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = PositionEmbedding.of(config)
        self.segments = nn.Embedding(config.n_segments, config.d_model) if config.n_segments else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.stack = make_stack(config, causal=False)
        self.head_hidden = nn.Identity() if config.head_hidden is None else HiddenLayer(config)
        self.head: Categorical | None = None
        if config.output != "hidden":
            n_outputs = config.vocab_size if config.output == "masked" else config.n_classes
            assert n_outputs is not None  # the config has checked it
            tied = embedding_of(self) if config.tie_embeddings else None
            self.head = Categorical(config.d_model, n_outputs, bias=config.output_bias, tied=tied)
        init_weights(self, config)

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of a batch.

        Args:
            x: token ids [B, T] long, or continuous inputs [B, T, input_dim].
            key_padding_mask: [B, T] bool, True at padding, which does not affect the other positions.
            segments: [B, T] long, the segment of each token, below n_segments; all 0 by default.
            global_mask: [B, T] bool, True at tokens that attend to all others and that all others attend to,
                such as those of a question; for layers of longformer attention, in place of their
                `global_tokens`.

        Returns:
            "classification": [B, n_classes]; "tokens": [B, T, n_classes]; "masked": [B, T, vocab_size];
            "hidden": [B, T, d_model].
        """
        hidden = self.hidden(x, key_padding_mask=key_padding_mask, segments=segments, global_mask=global_mask)
        return hidden if self.head is None else self.head(hidden)

    def loss(self, inputs: Tensor, targets: Tensor, **reading: Unpack[Reading]) -> Tensor:
        """Mean cross-entropy in nats, computed in at least fp32.

        Args:
            inputs: as `x` of `forward`.
            targets: [B] long for "classification", else [B, T]; -100 and those at padding are ignored.
            reading: `key_padding_mask`, `segments` and `global_mask`, as for `forward`.

        Raises:
            UnsupportedError: the output is "hidden".
        """
        if self.head is None:
            raise UnsupportedError("an encoder with output 'hidden' has no loss; use another output")
        padding = None if self.config.output == "classification" else reading.get("key_padding_mask")
        return self.head.loss(self.hidden(inputs, **reading), targets, padding)

    def hidden(self, x: Tensor, **reading: Unpack[Reading]) -> Tensor:
        """The input of the output layer: [B, d_model] for "classification", else [B, T, d_model].

        The arguments are those of `forward`.
        """
        y = self.encode(x, **reading)
        if self.config.output == "classification":
            y = self._pool(y, reading.get("key_padding_mask"))
        return cast(Tensor, self.head_hidden(y))

    def encode(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """The output of the last block, [B, T, d_model]; the arguments are those of `forward`."""
        if self.config.vocab_size is not None:
            check_ids("x", x, self.config.vocab_size, self.embedding.weight)
        else:
            check_input("x", x, ["B", "T", cast(int, self.config.input_dim)], self.embedding.weight)
            (x,) = zero_padding(key_padding_mask, x)  # NaN at padding would reach the embedding's gradient
        y = self.embedding(x).to(self.embedding.weight.dtype)  # autocast must not narrow the residual stream
        y = self.positions(y, key_padding_mask=key_padding_mask)
        y = self.dropout(self.embedding_norm(self._add_segments(y, segments)))
        masks: Masks = {"key_padding_mask": key_padding_mask, "global_mask": global_mask}
        return self.stack(y, recompute=self.recompute, **masks)

    def _add_segments(self, y: Tensor, segments: Tensor | None) -> Tensor:
        if self.segments is None:
            if segments is not None:
                raise ValueError("segments are given, but must be None for a model whose n_segments is 0")
            return y
        if segments is None:
            return y + self.segments.weight[0]
        if segments.shape != y.shape[:2]:
            raise ValueError(f"segments has shape {shape(segments)}, but must be {list(y.shape[:2])}")
        check_ids("segments", segments, self.config.n_segments, self.segments.weight)
        return y + cast(Tensor, self.segments(segments))

    def _pool(self, y: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """[B, T, d_model] -> [B, d_model]; 0 for a row without tokens."""
        if y.shape[1] == 0:
            return y.sum(dim=1)
        if key_padding_mask is None:
            return y.mean(dim=1) if self.config.pooling == "mean" else y[:, 0]
        valid = ~key_padding_mask
        if self.config.pooling == "mean":
            kept = y.masked_fill(key_padding_mask.unsqueeze(-1), 0)
            total = kept.sum(dim=1, dtype=accumulation_dtype(y.dtype))
            return (total / valid.sum(dim=1, keepdim=True).clamp(min=1)).to(y.dtype)
        first = y[torch.arange(y.shape[0], device=y.device), valid.int().argmax(dim=1)]
        return first.masked_fill(~valid.any(dim=1, keepdim=True), 0)


def mask_tokens(
    tokens: Tensor,
    *,
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Mask random tokens for masked language modelling (BERT, Devlin et al. 2019, arXiv 1810.04805, §3.1).

    Each token is selected with `probability`. Of the selected tokens, 80% become `mask_id`, 10% a random id
    below `vocab_size`, and 10% are unchanged.

    Args:
        tokens: ids of any shape, long; not modified.
        mask_id: the id of a masked token.
        vocab_size: number of ids that a random one is drawn from.
        probability: of being selected.
        generator: source of the random numbers, on the device of `tokens`.

    Returns:
        inputs and targets, both of the shape of `tokens`; targets are -100 where no token was selected.

    Raises:
        ValueError: `probability` is not between 0 and 1.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability is {probability}, but must be between 0 and 1")

    def uniform() -> Tensor:
        return torch.rand(tokens.shape, generator=generator, device=tokens.device)

    chosen = uniform() < probability
    fate = uniform()
    random = torch.randint(vocab_size, tokens.shape, generator=generator, device=tokens.device)
    inputs = torch.where(chosen & (fate < 0.8), mask_id, tokens)
    inputs = torch.where(chosen & (fate >= 0.9), random, inputs)
    return inputs, tokens.masked_fill(~chosen, IGNORED)
