"""The recurrent language model: embeddings, layers of any cell of `unrolled.recurrent`, and a head."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Unpack, cast

from torch import Tensor, nn

from unrolled import recurrent
from unrolled.fields import Fraction, FromData, Size
from unrolled.models.cells import stack_of
from unrolled.models.config import ModelConfig
from unrolled.models.heads import Categorical, embedding_of
from unrolled.models.language_model import LanguageModel, TokenMasks
from unrolled.ops.checks import wrong
from unrolled.ops.dropout import Dropout
from unrolled.recurrent import StackedState


@dataclass
class RecurrentLMConfig(ModelConfig):
    """The fields of a recurrent language model.

    Attributes:
        vocab_size: number of token ids.
        cell: name of the cell, see `unrolled.recurrent.names()`.
        cell_options: further arguments of each layer, as in `{"rank": 16}`.
        d_model: width of the embeddings, the input of the first layer.
        n_layers: number of layers.
        hidden_size: width of each layer's output; None for `d_model`.
        dropout: probability, for the embeddings and for each layer's output (Zaremba et al. 2014, arXiv
            1409.2329).
        tie_embeddings: use the embedding table as the output matrix; requires `hidden_size` = `d_model`.
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
            raise wrong("hidden_size", self.hidden_size, f"d_model = {self.d_model} to tie embeddings")

    @property
    def width(self) -> int:
        """The width of each layer's output, with the default filled in."""
        return self.d_model if self.hidden_size is None else self.hidden_size


class RecurrentLM(LanguageModel[StackedState]):
    """Embeddings, stacked recurrent layers, and a distribution over the next token.

    See `LanguageModel` for its methods. Layers have the initial values of their cells; embeddings start from
    N(0, 1), or from N(0, 1 / d_model) where they are tied to the output.
    """

    model_name = "recurrent_lm"
    config_type = RecurrentLMConfig
    config: RecurrentLMConfig

    def __init__(self, config: RecurrentLMConfig) -> None:
        super().__init__(config)
        self.n_ids = config.vocab_size + config.start_token
        self.embedding = nn.Embedding(self.n_ids, config.d_model)
        self.dropout = Dropout(config.dropout)
        widths = [config.d_model, *[config.width] * config.n_layers]
        self.stack = stack_of(config.cell, config.cell_options, widths, dropout=config.dropout)
        tied = embedding_of(self) if config.tie_embeddings else None
        self.head = Categorical(config.width, config.vocab_size, bias=None, tied=tied)
        if config.tie_embeddings:
            nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)

    def init_state(self, batch_size: int) -> StackedState:
        """The state before the first token, on the model's device."""
        return self.stack.init_state(batch_size)

    def read_all(self, tokens: Tensor, **masks: Unpack[TokenMasks]) -> Tensor:
        """Read sequences `[B,T]`: `[B,T,width]`."""
        return cast(Tensor, self.dropout(self.stack(self.dropout(self.embedding(tokens)), **masks)))

    def read_some(
        self, tokens: Tensor, state: StackedState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, StackedState]:
        """Read tokens `[B,T]` from a state: `[B,T,width]` and the new state."""
        x = self.dropout(self.embedding(tokens))
        x, after = self.stack.prefill(x, state, key_padding_mask=key_padding_mask)
        return self.dropout(x), after

    def read_one(self, token: Tensor, state: StackedState) -> tuple[Tensor, StackedState]:
        """Read a token `[B]` from a state: `[B,width]` and the new state."""
        x, after = self.stack.step(self.dropout(self.embedding(token)), state)
        return self.dropout(x), after
