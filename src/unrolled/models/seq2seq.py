"""Shared by the recurrent encoder-decoders: config, loss, and the methods built on `encode` and `decode`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled import alignment
from unrolled.alignment.base import Alignment
from unrolled.contract import IGNORED
from unrolled.fields import Fraction, FromData, Size
from unrolled.models.checks import check_ids, check_source
from unrolled.models.config import ModelConfig
from unrolled.models.mode import evaluation_mode
from unrolled.models.saving import SavedModel
from unrolled.models.targets import shifted
from unrolled.ops.dropout import Dropout
from unrolled.ops.precision import accumulated
from unrolled.ops.sequence import refuse
from unrolled.ops.state_checks import CONSTANT, Growing, check_state

State = TypeVar("State", bound=tuple[object, ...])


@dataclass
class Seq2SeqConfig(ModelConfig):
    """The fields of a recurrent encoder-decoder.

    Attributes:
        vocab_size: number of ids of the target; the id `vocab_size` is the start symbol.
        source_vocab_size: number of ids of the source; None for `vocab_size`.
        d_model: width of the embeddings.
        hidden_size: width of the recurrent layers, of each direction.
        dropout: probability, for embeddings and for the input of the output layer.
        label_smoothing: the part of a target's probability that is spread evenly over all ids, in training.
        start_token: True, since every target begins with the start symbol, which is never predicted.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    source_vocab_size: Annotated[Size | None, FromData("source_vocab_size")] = None
    d_model: Size = 256
    hidden_size: Size = 512
    dropout: Fraction = 0.0
    label_smoothing: Fraction = 0.0
    start_token: Literal[True] = True


@dataclass
class AttentiveSeq2SeqConfig(Seq2SeqConfig):
    """The fields of an encoder-decoder whose attention is chosen by name; see `Seq2SeqConfig` for the others.

    Attributes:
        attention: name of an alignment (see `unrolled.alignment.names()`): "bahdanau", "luong", "cosine",
            "hard", or "fixed", the baseline without attention, which reads the encoder's last state only. A
            variant in the same file is named as in "luong.LocalPredictiveAttention". The `loss` does not
            train the choices of "hard"; it trains those of "hard.StraightThroughAttention".
        attention_options: the other arguments of that alignment.
    """

    attention: str = "bahdanau"
    attention_options: dict[str, Any] = field(default_factory=dict)


class Seq2Seq(SavedModel, Generic[State]):
    """Reads a source sentence, then predicts each token of its translation from those before it.

    A model derives from this class, defines `encode` and `decode`, and makes the output layer `out`;
    `growing` says which fields of the state are as long as the source, or grow.
    """

    config: Seq2SeqConfig
    out: nn.Linear
    growing: Growing = CONSTANT

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.n_ids = config.vocab_size + 1
        self.n_source_ids = config.source_vocab_size or config.vocab_size
        self.source_embedding = nn.Embedding(self.n_source_ids, config.d_model)
        self.target_embedding = nn.Embedding(self.n_ids, config.d_model)
        self.dropout = Dropout(config.dropout)

    def encode(self, source: Tensor, key_padding_mask: Tensor) -> State:
        """Make the first state from `source [B,S]` and its padding `[B,S]`."""
        raise NotImplementedError

    def decode(self, tokens: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Read `tokens [B,T]`, T of at least 1: the input of `out`, weights `[B,T,S]`, the new state."""
        raise NotImplementedError

    def forward(self, source: Tensor, target: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits of the token that follows each position of the target.

        Args:
            source: `[B,S]` long, S at least 1.
            target: `[B,T]` long, the input of the decoder, beginning with the start symbol.
            key_padding_mask: `[B,S]` bool, True at padding of the source, on any side.

        Returns:
            `[B,T,vocab_size]`.

        Raises:
            ValueError: an argument of the wrong shape or type, an unknown id, or an empty source sentence.
        """
        return self.out(self._translated(source, target, key_padding_mask)[0])  # type: ignore[no-any-return]

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean -log p(target) in nats per token, in at least fp32; 0 if every target is ignored.

        Args:
            inputs: the source, as for `forward`.
            targets: `[B,T]` long, the ids to predict, an end symbol included; -100 is ignored.
            key_padding_mask: as for `forward`.
        """
        state = self.init_state(inputs, key_padding_mask=key_padding_mask)
        hidden, _, _ = self._decode(shifted(targets, len(inputs), self.config.vocab_size), state)
        asked = targets != IGNORED
        logits = accumulated(self.out(hidden[asked]))  # the widest layer, only where it is needed
        smoothing = self.config.label_smoothing if self.training else 0.0
        total = F.cross_entropy(logits, targets[asked], reduction="sum", label_smoothing=smoothing)
        return total / asked.sum().clamp(min=1)

    def init_state(self, source: Tensor, *, key_padding_mask: Tensor | None = None) -> State:
        """Read a source; return the state of decoding, batch first. Arguments as for `forward`."""
        refuse("a model of translation")
        check_source(source, key_padding_mask, self.n_source_ids, self.source_embedding.weight)
        if key_padding_mask is None:
            key_padding_mask = torch.zeros_like(source, dtype=torch.bool)
        return self.encode(source, key_padding_mask)

    def prefill(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read several tokens `[B,T]` of the target: logits `[B,T,vocab_size]` and the new state."""
        check_ids("tokens", tokens, self.n_ids, self.target_embedding.weight)
        self._check_state(state, len(tokens))
        hidden, _, state = self._decode(tokens, state)
        return self.out(hidden), state

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token `[B]` of the target: logits `[B,vocab_size]` and the new state."""
        check_ids("token", token, self.n_ids, self.target_embedding.weight, "[B]")
        self._check_state(state, len(token))
        hidden, _, state = self.decode(token.unsqueeze(1), state)
        return self.out(hidden.squeeze(1)), state

    def attend(self, source: Tensor, target: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Weight of each source token at each target token: `[B,T,S]`; arguments as for `forward`."""
        return self._translated(source, target, key_padding_mask)[1]

    def _translated(
        self, source: Tensor, target: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        """Read a source and its target from the beginning: as `decode`."""
        check_ids("target", target, self.n_ids, self.target_embedding.weight)
        state = self.init_state(source, key_padding_mask=key_padding_mask)
        if len(source) != len(target):
            raise ValueError(f"target has {len(target)} rows, but must have {len(source)}, as source has")
        return self._decode(target, state)

    def _decode(self, tokens: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Run `decode`; without a token, return empty outputs and the same state."""
        if tokens.shape[1]:
            return self.decode(tokens, state)
        start = tokens.new_full((len(tokens), 1), self.config.vocab_size)
        hidden, weights, _ = self.decode(start, state)
        return hidden[:, :0], weights[:, :0], state

    def _check_state(self, state: State, rows: int) -> None:
        check_state(self, state, rows, self.target_embedding.weight, self._empty_state)

    def _empty_state(self) -> State:
        """The state of no rows, with a source of one token."""
        source = torch.zeros(0, 1, dtype=torch.long, device=self.source_embedding.weight.device)
        with torch.no_grad(), evaluation_mode(self):  # in training, hard attention counts what it reads
            return self.encode(source, source.bool())


def make_attention(config: AttentiveSeq2SeqConfig, memory_dim: int) -> Alignment:
    """Make the attention of a config, with queries `hidden_size` wide.

    Raises:
        ValueError: there is no such alignment, or it does not take one of its options.
    """
    mechanism = alignment.load(config.attention)
    try:
        return mechanism(config.hidden_size, memory_dim, **config.attention_options)
    except TypeError as error:
        raise ValueError(f"attention_options of {config.attention!r} does not fit: {error}") from error
