"""The transformer that predicts the next token: trained on whole sequences, run one token at a time."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from unrolled.contract import IGNORED
from unrolled.fields import FromData, Size
from unrolled.models.blocks import init_weights
from unrolled.models.checks import check_ids, check_layer_states, check_targets, check_token
from unrolled.models.config import TransformerConfig
from unrolled.models.embeddings import PixelEmbedding, PositionEmbedding
from unrolled.models.heads import Categorical, LogisticMixture, mean_nll
from unrolled.models.reversible import make_stack
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import check_key_padding_mask
from unrolled.ops.options import check_batch_size

Inputs = Literal["tokens", "pixels"]
Head = Literal["categorical", "logistic_mixture"]


@dataclass
class DecoderConfig(TransformerConfig):
    """A decoder's fields; see `TransformerConfig` for the rest.

    Attributes:
        vocab_size: number of token ids, or of levels of a pixel.
        inputs: "tokens" (a vector for each id) or "pixels" (the level as a number in [-1, 1]).
        head: "categorical" (a logit for each id) or "logistic_mixture" (see `LogisticMixture`).
        n_mixtures: logistics of the mixture.
        tie_embeddings: use the embedding table as the output matrix; for tokens and the categorical head.
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
    """What a decoder remembers of the tokens it has read."""

    position: Tensor  # [B] long, the valid tokens read so far
    layers: tuple[Any, ...]  # the state of each layer's attention


class Decoder(SavedModel):
    """Embeddings, causal blocks, and a distribution over the next token at every position.

    `forward` reads whole sequences; `prefill` and `step` give the same results from a state, which they never
    change, so that any way of cutting a sequence into calls is equal. Weights start as in
    `unrolled.models.blocks.init_weights`.

    Set `gradient_checkpointing` to True to keep only the input of each block for the backward pass.
    """

    model_name = "decoder"
    config_type = DecoderConfig
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.n_ids = config.vocab_size + config.start_token
        table = None
        if config.inputs == "pixels":
            self.embedding: nn.Embedding | PixelEmbedding = PixelEmbedding(
                config.vocab_size, config.d_model, start_token=config.start_token
            )
        else:
            self.embedding = table = nn.Embedding(self.n_ids, config.d_model)
        self.positions = PositionEmbedding.of(config)
        self.dropout = nn.Dropout(config.dropout)
        self.stack = make_stack(config, causal=True)
        self.head: Categorical | LogisticMixture
        if config.head == "logistic_mixture":
            self.head = LogisticMixture(config.d_model, config.vocab_size, config.n_mixtures)
        else:
            tied = table if config.tie_embeddings else None
            self.head = Categorical(config.d_model, config.vocab_size, tied=tied)
        init_weights(self, config)
        if isinstance(self.head, LogisticMixture):
            self.head.reset_bias()

    def forward(
        self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits of the token that follows each position, for whole sequences.

        Args:
            tokens: [B, T] long.
            key_padding_mask: [B, T] bool, True at padding (left, right or scattered), which changes nothing
                for the other positions.
            cu_seqlens: [N + 1] int32, the bounds of N sequences packed into the one row of `tokens` (B = 1).

        Returns:
            [B, T, vocab_size]; log-probabilities with the mixture head.
        """
        hidden = self._hidden(tokens, key_padding_mask, cu_seqlens)
        logits: Tensor = self.head(hidden)
        return logits

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mean -log p(target) in nats per token, computed in at least fp32; 0 if every target is ignored.

        Args:
            inputs: as `tokens` of `forward`.
            targets: [B, T] long, what follows each position; -100 and those at padding are ignored.
            key_padding_mask: as for `forward`.
            cu_seqlens: as for `forward`.
        """
        hidden = self._hidden(inputs, key_padding_mask, cu_seqlens)
        check_targets(targets, inputs.shape, self.config.vocab_size)
        if key_padding_mask is not None:
            targets = targets.masked_fill(key_padding_mask, IGNORED)
        return mean_nll(self.head.nll(hidden, targets), targets)

    def init_state(self, batch_size: int) -> DecoderState:
        """The state before the first token, on the model's device.

        Raises:
            UnsupportedError: an attention mechanism of this model cannot run as a recurrence.
        """
        check_batch_size(batch_size)
        device = next(self.parameters()).device
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        return DecoderState(position, self.stack.init_state(batch_size))

    def prefill(
        self, tokens: Tensor, state: DecoderState, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, DecoderState]:
        """Read several tokens [B, T] in parallel, after those that `state` has read.

        With a `key_padding_mask` [B, T], rows may bring different numbers of tokens: padding leaves its row's
        state as it is, and its logits mean nothing.

        Returns:
            logits [B, T, vocab_size] and the new state.
        """
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *tokens.shape)
        self._check_state(state, tokens.shape[0])
        x = self.positions(self.embedding(tokens), start=state.position, key_padding_mask=key_padding_mask)
        hidden, layers = self.stack.prefill(self.dropout(x), state.layers, key_padding_mask=key_padding_mask)
        read = tokens.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(dim=1)
        return self.head(hidden), DecoderState(state.position + read, layers)

    def step(self, token: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read one token [B] per row; return logits [B, vocab_size] and the new state.

        On a CPU, ids outside the vocabulary raise ValueError; elsewhere reading them would stall the queue.
        """
        check_token(token, self.n_ids, self.embedding.weight)
        self._check_state(state, token.shape[0])
        x = self.positions.at(self.embedding(token), state.position)
        hidden, layers = self.stack.step(self.dropout(x), state.layers)
        return self.head(hidden), DecoderState(state.position + 1, layers)

    def _hidden(self, tokens: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *tokens.shape)
        if cu_seqlens is not None and key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask was given with cu_seqlens, wanted one of them: packs have no padding"
            )
        x = self.positions(self.embedding(tokens), key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        recompute = self.gradient_checkpointing and self.training
        hidden: Tensor = self.stack(
            self.dropout(x), key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, recompute=recompute
        )
        return hidden

    def _check_state(self, state: DecoderState, batch_size: int) -> None:
        check_layer_states(state, DecoderState, batch_size, self.config.n_layers, self.embedding.weight)
