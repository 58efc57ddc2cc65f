"""The recurrent language model: embeddings, layers of any cell of `unrolled.recurrent`, and a head."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, cast

from torch import Tensor, nn

from unrolled import recurrent
from unrolled.contract import IGNORED
from unrolled.fields import Fraction, FromData, Size
from unrolled.models.cells import stack_of
from unrolled.models.checks import check_ids, check_targets, check_token
from unrolled.models.config import ModelConfig
from unrolled.models.heads import Categorical, mean_nll
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import check_key_padding_mask
from unrolled.recurrent import StackedState


@dataclass
class RecurrentLMConfig(ModelConfig):
    """The fields of a recurrent language model.

    Attributes:
        vocab_size: number of token ids.
        cell: name of the cell, see `unrolled.recurrent.names()`.
        cell_options: further arguments that each layer is made with, as in `{"rank": 16}`.
        d_model: width of the embeddings, which the first layer reads.
        n_layers: number of layers.
        hidden_size: width of what a layer gives; None for `d_model`.
        dropout: probability, for the embeddings and for what each layer gives (Zaremba et al. 2014, arXiv
            1409.2329).
        tie_embeddings: use the embedding table as the output matrix; wants `hidden_size` = `d_model`.
        start_token: whether the id `vocab_size` is a learned start symbol, which is never predicted.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    _: KW_ONLY
    cell: str = "lstm"
    cell_options: dict[str, Any] = field(default_factory=dict)
    d_model: Size = 256
    n_layers: Size = 1
    hidden_size: Size | None = None
    dropout: Fraction = 0.0
    tie_embeddings: bool = False
    start_token: Annotated[bool, FromData("start_token")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cell not in recurrent.names():
            raise ValueError(f"cell is {self.cell!r}, but must be one of {', '.join(recurrent.names())}")
        if self.tie_embeddings and self.width != self.d_model:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but must be d_model = {self.d_model} to tie embeddings"
            )

    @property
    def width(self) -> int:
        """The width of what a layer gives, with the default filled in."""
        return self.d_model if self.hidden_size is None else self.hidden_size


class RecurrentLM(SavedModel):
    """Embeddings, recurrent layers on top of each other, and a distribution over the next token.

    `forward` reads whole sequences; `prefill` and `step` give the same results from a state, which they never
    change. The layers start as their cells do, and the embeddings normal, of variance 1, or where they are
    tied to the output 1 / d_model.
    """

    model_name = "recurrent_lm"
    config_type = RecurrentLMConfig
    config: RecurrentLMConfig

    def __init__(self, config: RecurrentLMConfig) -> None:
        super().__init__(config)
        self.n_ids = config.vocab_size + config.start_token
        self.embedding = nn.Embedding(self.n_ids, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        widths = [config.d_model, *[config.width] * config.n_layers]
        self.stack = stack_of(config.cell, config.cell_options, widths, dropout=config.dropout)
        tied = self.embedding if config.tie_embeddings else None
        self.head = Categorical(config.width, config.vocab_size, bias=tied is None, tied=tied)
        if tied is not None:
            nn.init.normal_(tied.weight, std=config.d_model**-0.5)

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
            [B, T, vocab_size].
        """
        return cast(Tensor, self.head(self._hidden(tokens, key_padding_mask, cu_seqlens)))

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

    def init_state(self, batch_size: int) -> StackedState:
        """The state before the first token, on the model's device."""
        return self.stack.init_state(batch_size)

    def prefill(
        self, tokens: Tensor, state: StackedState, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, StackedState]:
        """Read several tokens [B, T], after those that `state` has read.

        With a `key_padding_mask` [B, T], rows may bring different numbers of tokens: padding leaves its row's
        state as it is, and its logits mean nothing.

        Returns:
            logits [B, T, vocab_size] and the new state.
        """
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *tokens.shape)
        x = self.dropout(self.embedding(tokens))
        x, after = self.stack.prefill(x, state, key_padding_mask=key_padding_mask)
        return self.head(self.dropout(x)), after

    def step(self, token: Tensor, state: StackedState) -> tuple[Tensor, StackedState]:
        """Read one token [B] per row; return logits [B, vocab_size] and the new state.

        On a CPU, ids outside the vocabulary raise ValueError; elsewhere reading them would stall the queue.
        """
        check_token(token, self.n_ids, self.embedding.weight)
        x, after = self.stack.step(self.dropout(self.embedding(token)), state)
        return self.head(self.dropout(x)), after

    def _hidden(self, tokens: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *tokens.shape)
        x = self.dropout(self.embedding(tokens))
        y: Tensor = self.dropout(self.stack(x, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens))
        return y
