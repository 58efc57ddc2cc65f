"""What the recurrent encoder-decoders share: config, loss, and the verbs, made of an encoder and one loop."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled import alignment
from unrolled.alignment.base import Alignment
from unrolled.contract import IGNORED
from unrolled.fields import Fraction, FromData, Size
from unrolled.models.checks import check_ids, check_token
from unrolled.models.config import ModelConfig
from unrolled.models.saving import SavedModel
from unrolled.models.targets import shifted
from unrolled.ops.checks import check_device, check_key_padding_mask, may_read
from unrolled.ops.state_checks import CONSTANT, Growing, check_state


@dataclass
class Seq2SeqConfig(ModelConfig):
    """The fields of a recurrent encoder-decoder.

    Attributes:
        vocab_size: number of ids of the target; the id `vocab_size` is the start symbol.
        source_vocab_size: number of ids of the source; None for as many as of the target.
        d_model: width of the embeddings.
        hidden_size: width of the recurrent layers, of each direction.
        dropout: probability, for embeddings and for what is read out.
        label_smoothing: the part of a target's probability that goes to all ids alike, in training.
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
            train where "hard" looks; it trains that of "hard.StraightThroughAttention".
        attention_options: the other arguments of that alignment.
    """

    attention: str = "bahdanau"
    attention_options: dict[str, Any] = field(default_factory=dict)


class Seq2Seq(SavedModel):
    """Reads a source sentence, then predicts each token of its translation from those before it.

    A model derives from this class and defines `encode` and `decode`; `growing` says which fields of their
    state are as long as the source, or grow.
    """

    config: Any
    growing: Growing = CONSTANT

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.n_ids = config.vocab_size + 1
        self.n_source_ids = config.source_vocab_size or config.vocab_size
        self.source_embedding = nn.Embedding(self.n_source_ids, config.d_model)
        self.target_embedding = nn.Embedding(self.n_ids, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def encode(self, source: Tensor, key_padding_mask: Tensor) -> Any:
        """Make the first state from `source [B,S]` and its padding `[B,S]`."""
        raise NotImplementedError

    def decode(self, tokens: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Read `tokens [B,T]`: what `logits` wants `[B,T,...]`, weights `[B,T,S]`, the new state."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """`[...,vocab_size]` of what `decode` returned first."""
        raise NotImplementedError

    def forward(self, source: Tensor, target: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits of the token that follows each position of the target.

        Args:
            source: `[B,S]` long, S at least 1.
            target: `[B,T]` long, what the decoder reads, beginning with the start symbol.
            key_padding_mask: `[B,S]` bool, True at padding of the source, on any side.

        Returns:
            `[B,T,vocab_size]`.

        Raises:
            ValueError: an argument of another shape or type, an unknown id, or an empty source sentence.
        """
        return self.prefill(target, self.init_state(source, key_padding_mask=key_padding_mask))[0]

    def loss(self, inputs: Tensor, targets: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Mean -log p(target) in nats per token, in at least fp32; 0 if every target is ignored.

        Args:
            inputs: the source, as of `forward`.
            targets: `[B,T]` long, the ids that are to follow, an end symbol included; -100 is ignored.
            key_padding_mask: as of `forward`.
        """
        state = self.init_state(inputs, key_padding_mask=key_padding_mask)
        hidden, _, _ = self.decode(shifted(targets, len(inputs), self.config.vocab_size), state)
        asked = targets != IGNORED
        logits = self.logits(hidden[asked])  # the widest layer, for what counts only
        smoothing = self.config.label_smoothing if self.training else 0.0
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = F.cross_entropy(logits.to(dtype), targets[asked], reduction="sum", label_smoothing=smoothing)
        return total / asked.sum().clamp(min=1)

    def init_state(self, source: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Read a source; return all that decoding needs, batch first. Arguments as of `forward`."""
        check_ids("source", source, self.n_source_ids, self.source_embedding.weight)
        if key_padding_mask is None:
            key_padding_mask = torch.zeros_like(source, dtype=torch.bool)
        check_key_padding_mask(key_padding_mask, *source.shape)
        check_device("key_padding_mask", key_padding_mask, source, "the source is")
        if source.shape[1] == 0:
            raise ValueError(f"source has shape {list(source.shape)}, wanted sentences of at least one token")
        if may_read(key_padding_mask) and bool(key_padding_mask.all(1).any()):
            row = int(key_padding_mask.all(1).nonzero()[0])
            raise ValueError(f"row {row} of source is nothing but padding, wanted at least one token")
        return self.encode(source, key_padding_mask)

    def prefill(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read several tokens `[B,T]` of the target: logits `[B,T,vocab_size]` and the new state."""
        check_ids("tokens", tokens, self.n_ids, self.target_embedding.weight)
        self._check_state(state, len(tokens))
        hidden, _, state = self.decode(tokens, state)
        return self.logits(hidden), state

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one token `[B]` of the target: logits `[B,vocab_size]` and the new state."""
        check_token(token, self.n_ids, self.target_embedding.weight)
        self._check_state(state, len(token))
        hidden, _, state = self.decode(token.unsqueeze(1), state)
        return self.logits(hidden.squeeze(1)), state

    def attend(self, source: Tensor, target: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """How much each place of the target reads each of the source: `[B,T,S]`; arguments as `forward`."""
        check_ids("target", target, self.n_ids, self.target_embedding.weight)
        state = self.init_state(source, key_padding_mask=key_padding_mask)
        self._check_state(state, len(target))
        return self.decode(target, state)[1]

    def _check_state(self, state: Any, rows: int) -> None:
        check_state(self, state, rows, self.target_embedding.weight, self._empty_state)

    def _empty_state(self) -> Any:
        """Read no source of one token."""
        source = torch.zeros(0, 1, dtype=torch.long, device=self.source_embedding.weight.device)
        with torch.no_grad():
            return self.encode(source, source.bool())


def make_attention(config: AttentiveSeq2SeqConfig, memory_dim: int) -> Alignment:
    """The attention that the config asks for, with queries `hidden_size` wide.

    Raises:
        ValueError: there is no such alignment, or it does not take one of its options.
    """
    mechanism = alignment.load(config.attention)
    try:
        return mechanism(config.hidden_size, memory_dim, **config.attention_options)
    except TypeError as error:
        raise ValueError(f"attention_options of {config.attention!r} does not fit: {error}") from error
