"""The transformer that predicts the next token: trained on whole sequences, run one token at a time."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from unrolled.fields import FromData, Size
from unrolled.models.blocks import init_weights
from unrolled.models.checks import check_layer_states
from unrolled.models.config import TransformerConfig
from unrolled.models.embeddings import PixelEmbedding, PositionEmbedding
from unrolled.models.heads import Categorical, LogisticMixture, embedding_of
from unrolled.models.language_model import LanguageModel, TokenMasks
from unrolled.models.reversible import make_stack
from unrolled.models.saving import RecomputingModel
from unrolled.models.stack import States
from unrolled.ops.dropout import Dropout
from unrolled.ops.options import check_batch_size
from unrolled.ops.sequence import check_slices, token_counts

Inputs = Literal["tokens", "pixels"]
Head = Literal["categorical", "logistic_mixture"]


@dataclass
class DecoderConfig(TransformerConfig):
    """The config of a decoder; see `TransformerConfig` for the other fields.

    Attributes:
        vocab_size: number of token ids, or of pixel levels.
        inputs: "tokens" (a vector for each id) or "pixels" (the level as a number in [-1, 1]).
        head: "categorical" (a logit for each id) or "logistic_mixture" (see `LogisticMixture`).
        n_mixtures: number of logistic distributions in the mixture.
        tie_embeddings: use the embedding table as the output matrix; requires inputs "tokens" and head
            "categorical".
        start_token: whether the id `vocab_size` is a learned start symbol, which is never predicted.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    _: KW_ONLY
    inputs: Inputs = "tokens"
    head: Head = "categorical"
    n_mixtures: Size = 10
    tie_embeddings: bool = False
    start_token: Annotated[bool, FromData("start_token")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs == "tokens" and self.head == "categorical":
            return
        kind = f"inputs {self.inputs!r} and head {self.head!r}"
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size is {self.vocab_size}, but must be at least 2 with {kind}")
        if self.tie_embeddings:
            raise ValueError(f"tie_embeddings is True, but must be False with {kind}")


class DecoderState(NamedTuple):
    """The state of a decoder after the tokens it has read."""

    position: Tensor  # [B] long, the number of valid tokens read so far
    layers: States  # the state of each layer's attention


class Decoder(LanguageModel[DecoderState], RecomputingModel):
    """Embeddings, causal blocks, and a distribution over the next token at every position.

    See `LanguageModel` for its methods. `unrolled.models.blocks.init_weights` initialises the weights.
    """

    model_name = "decoder"
    config_type = DecoderConfig
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.n_ids = config.vocab_size + config.start_token
        if config.inputs == "pixels":
            self.embedding = PixelEmbedding(config.vocab_size, config.d_model, start_token=config.start_token)
        else:
            self.embedding = nn.Embedding(self.n_ids, config.d_model)
        self.positions = PositionEmbedding.of(config)
        self.dropout = Dropout(config.dropout)
        self.stack = make_stack(config, causal=True)
        if config.head == "logistic_mixture":
            self.head = LogisticMixture(config.d_model, config.vocab_size, config.n_mixtures)
        else:
            tied = embedding_of(self) if config.tie_embeddings else None
            self.head = Categorical(config.d_model, config.vocab_size, tied=tied)
        init_weights(self, config)
        if isinstance(self.head, LogisticMixture):
            self.head.reset_bias()

    def init_state(self, batch_size: int) -> DecoderState:
        """The state before the first token, on the model's device.

        Raises:
            UnsupportedError: an attention mechanism of this model cannot run as a recurrence.
        """
        check_batch_size(batch_size)
        device = next(self.parameters()).device
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        return DecoderState(position, self.stack.init_state(batch_size))

    def check_state(self, state: DecoderState, rows: int) -> None:
        """Raise ValueError unless `state` is a `DecoderState` of that many rows; layers check their own."""
        check_layer_states(state, DecoderState, rows, self.config.n_layers, self.embedding.weight)

    def read_all(self, tokens: Tensor, **masks: Unpack[TokenMasks]) -> Tensor:
        """Read sequences `[B,T]`: `[B,T,d_model]`."""
        check_slices(tokens, masks.get("key_padding_mask"))
        x = self.positions(self.embedding(tokens), **masks)
        return self.stack(self.dropout(x), recompute=self.recompute, **masks)

    def read_some(
        self, tokens: Tensor, state: DecoderState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, DecoderState]:
        """Read tokens `[B,T]`, continuing from a state: `[B,T,d_model]` and the new state."""
        check_slices(tokens, key_padding_mask)
        x = self.positions(self.embedding(tokens), start=state.position, key_padding_mask=key_padding_mask)
        hidden, layers = self.stack.prefill(
            self.dropout(x), state.layers, key_padding_mask=key_padding_mask, recompute=self.recompute
        )
        _, read = token_counts(tokens, key_padding_mask)
        return hidden, DecoderState(state.position + read, layers)

    def read_one(self, token: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read a token `[B]`, continuing from a state: `[B,d_model]` and the new state."""
        x = self.positions.at(self.embedding(token), state.position)
        hidden, layers = self.stack.step(self.dropout(x), state.layers)
        return hidden, DecoderState(state.position + 1, layers)
