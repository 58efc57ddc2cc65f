"""The encoder-decoder transformer of Vaswani et al., with any attention mechanism.

    memory = encoder(source)                                      bidirectional self-attention
    p(y_t | y_<t, source) = softmax(W decoder(y_<t, memory))_t    causal self-attention, then cross-attention

Each sub-layer f is x <- norm(x + dropout(f(x))). A token's vector is its row of the table E times
sqrt(d_model), plus sinusoids, with dropout on the sum; W is the same table E. Vaswani et al. 2017, "Attention
Is All You Need", arXiv 1706.03762, sections 3.1 to 3.5 and 5.4. Reproducing their results needs a warm-up,
Adam with betas (0.9, 0.98) and eps 1e-9, and label smoothing (sections 5.3 and 5.4); see
`unrolled.training.optim.Schedule`.

With linear attention for all three attentions the decoder is an RNN: the size of its state does not depend on
the length of the source or of the target.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from unrolled.attention.base import MultiHeadAttention
from unrolled.fields import Fraction, FromData, Size
from unrolled.models.blocks import FeedForward, apply, make_norm, tie_layers
from unrolled.models.checks import check_ids, check_layer_states, check_parts, check_source
from unrolled.models.config import Activation, Mechanisms, Norms, Positions, TransformerConfig
from unrolled.models.cross import DecoderBlock
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.heads import Categorical, embedding_of
from unrolled.models.saving import RecomputingModel
from unrolled.models.stack import Stack, States
from unrolled.models.targets import shifted
from unrolled.ops.dropout import Dropout
from unrolled.ops.state import Parts

Value = TypeVar("Value")


@dataclass
class EncoderDecoderConfig(TransformerConfig):
    """An encoder-decoder's fields; see `TransformerConfig` for the rest.

    Encoder and decoder have `n_layers` each. `attention` is that of the encoder. Each of the three attentions
    is a name, or a list with one name per layer.

    Attributes:
        vocab_size: number of token ids, of the target and, by default, of the source.
        source_vocab_size: number of token ids of the source; None for `vocab_size`.
        decoder_attention: mechanism of the decoder's self-attention; None for `attention`.
        cross_attention: mechanism by which the decoder reads the source; None for `attention`.
        label_smoothing: the part of the target's probability that is spread evenly over all ids, in training.
        tie_embeddings: share one table between source, target and output.
        start_token: True: the id `vocab_size` begins every target, and is never predicted.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    _: KW_ONLY
    source_vocab_size: Annotated[Size | None, FromData("source_vocab_size")] = None
    attention: Mechanisms = "softmax"
    decoder_attention: Mechanisms | None = None
    cross_attention: Mechanisms | None = None
    norm: Norms = "post"
    activation: Activation = "relu"
    positions: Positions = "sinusoidal"
    dropout: Fraction = 0.1
    label_smoothing: Fraction = 0.0
    tie_embeddings: bool = True
    start_token: Literal[True] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"source_vocab_size is {self.source_vocab_size}, but must be vocab_size = {self.vocab_size} "
                "with tie_embeddings True"
            )
        if self.reversible:
            raise ValueError("reversible is True, but must be False: a decoder's blocks read the source too")
        self.side(self.attention), self.side(self.decoder_attention), self.side(self.cross_attention)

    @property
    def mechanisms(self) -> set[str]:
        """The names of all mechanisms."""
        given = (self.attention, self.decoder_attention, self.cross_attention)
        return {name for x in given for name in ([x] if isinstance(x, str) else x or ())}

    @property
    def cross_side(self) -> TransformerConfig:
        """The config of the attention to the source, which has no rotary positions."""
        side = self.side(self.cross_attention)
        if side.positions == "rotary":
            side.positions = "none"
            side.attention_options = _without_rotation(side.attention_options)
            side.layer_options = _without_rotation(side.layer_options)
        return side

    def side(self, mechanisms: Mechanisms | None) -> TransformerConfig:
        """The config of a stack with these mechanisms, by default the encoder's, and with their options."""
        mechanisms = self.attention if mechanisms is None else mechanisms
        values = {field.name: vars(self)[field.name] for field in fields(TransformerConfig)}
        named = [mechanisms] if isinstance(mechanisms, str) else mechanisms
        for options in ("attention_options", "layer_options"):
            values[options] = {name: x for name, x in values[options].items() if name in named}
        return TransformerConfig(**values | {"attention": mechanisms})


def _without_rotation(options: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
    """Leave out the options of rotary positions."""
    of_rotation = ("rotary_base", "rotary_dim")
    return {
        mechanism: {name: x for name, x in own.items() if name not in of_rotation}
        for mechanism, own in options.items()
    }


class EncoderDecoderState(NamedTuple):
    """The state of decoding: the source as projected for each layer, and each layer's state of the target."""

    position: Tensor  # [B] long, the target tokens read so far
    memory: States  # of each layer, see `DecoderBlock.read`; it never changes
    layers: States  # the state of each layer's self-attention


class SourceMasks(TypedDict, total=False):
    """The masks of the source; see `EncoderDecoder.forward`."""

    key_padding_mask: Tensor | None
    global_mask: Tensor | None


Verb = Callable[[Tensor, Parts, Parts], tuple[Tensor, Parts]]  # `prefill` or `step` of a block


class EncoderDecoder(RecomputingModel):
    """Reads a source and predicts its target, such as a sentence and its translation.

    Matrices are initialised Xavier-uniform (queries, keys and values separately), biases to 0, and token
    vectors from N(0, 1 / d_model).
    """

    model_name = "encoder_decoder"
    config_type = EncoderDecoderConfig
    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config)
        self.n_source_ids = config.source_vocab_size or config.vocab_size
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.source_embedding: nn.Embedding | None = None
        if not config.tie_embeddings:
            self.source_embedding = nn.Embedding(self.n_source_ids, config.d_model)
        self.source_positions = PositionEmbedding.of(config)
        self.positions = PositionEmbedding.of(config)
        self.dropout = Dropout(config.dropout)
        self.encoder = Stack(config.side(config.attention), causal=False)
        own, cross = config.side(config.decoder_attention), config.cross_side
        self.blocks = nn.ModuleList(DecoderBlock(own, cross, layer) for layer in range(config.n_layers))
        for part in ("attention", "cross"):
            tie_layers(getattr(block, part) for block in self.blocks)
        self.norm = make_norm(config) if config.norms[-1] != "post" else nn.Identity()
        tied = embedding_of(self) if config.tie_embeddings else None
        self.head = Categorical(config.d_model, config.vocab_size, tied=tied)
        init_xavier(self)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token that follows each token of the target.

        Args:
            source: [B, S] long, at least one token in each row.
            target: [B, T] long, the input of the decoder: the start symbol, then the tokens so far.
            key_padding_mask: [B, S] bool, True at padding of the source, which is masked.
            global_mask: [B, S] bool, True at global tokens of the source; see `Encoder.forward`.

        Returns:
            [B, T, vocab_size].
        """
        memory = self.encode(source, key_padding_mask=key_padding_mask, global_mask=global_mask)
        return self.head(self._hidden(memory, target, key_padding_mask))

    def loss(self, inputs: Tensor, targets: Tensor, **masks: Unpack[SourceMasks]) -> Tensor:
        """Mean cross-entropy in nats per target, computed in at least fp32.

        In training with label smoothing e, the target has the probability 1 - e + e / V and each other id
        e / V, as in torch; section 5.4 leaves open how e is spread. Evaluation has no label smoothing.

        Args:
            inputs: the sources, as for `forward`.
            targets: [B, T] long, the tokens that follow the start symbol, the end symbol included; -100 at
                padding, which is ignored.
            masks: `key_padding_mask` and `global_mask`, as for `forward`.
        """
        read = shifted(targets, inputs.shape[0], self.config.vocab_size)
        hidden = self._hidden(self.encode(inputs, **masks), read, masks.get("key_padding_mask"))
        smoothing = self.config.label_smoothing if self.training else 0.0
        return self.head.mean_loss(hidden, targets, smoothing=smoothing)

    def encode(self, source: Tensor, **masks: Unpack[SourceMasks]) -> Tensor:
        """Read the source: [B, S] long -> [B, S, d_model]; the masks are those of `forward`.

        Raises:
            ValueError: a source without a token, an unknown id, or a mask of another shape or type.
        """
        table, padding = self.source_embedding or self.embedding, masks.get("key_padding_mask")
        check_source(source, padding, self.n_source_ids, table.weight)
        x = table(source).to(table.weight.dtype)  # autocast must not narrow the residual stream
        x = self.dropout(self.source_positions(x, key_padding_mask=padding))
        return self.encoder(x, recompute=self.recompute, **masks)

    def init_state(
        self, source: Tensor, *, key_padding_mask: Tensor | None = None, global_mask: Tensor | None = None
    ) -> EncoderDecoderState:
        """Encode the source [B, S], and project it once for each layer; the masks are those of `forward`."""
        memory = self.encode(source, key_padding_mask=key_padding_mask, global_mask=global_mask)
        B = source.shape[0]
        read = tuple(block.read(memory, key_padding_mask) for block in self._blocks())
        layers = tuple(block.attention.init_state(B) for block in self._blocks())
        return EncoderDecoderState(torch.zeros(B, dtype=torch.long, device=source.device), read, layers)

    def prefill(self, tokens: Tensor, state: EncoderDecoderState) -> tuple[Tensor, EncoderDecoderState]:
        """Read several tokens of the target [B, T], the start symbol first; logits [B, T, V] and the state.

        `state` is not modified.
        """
        check_ids("tokens", tokens, self.config.vocab_size + 1, self.embedding.weight)
        self._check_state(state, tokens.shape[0])
        x = self.dropout(self.positions(self.embedding(tokens), start=state.position))
        return self._advance(x, [block.prefill for block in self._blocks()], state, tokens.shape[1])

    def step(self, token: Tensor, state: EncoderDecoderState) -> tuple[Tensor, EncoderDecoderState]:
        """Read one token [B] of each target; return logits [B, V] and the new state.

        On a CPU, ids outside the vocabulary raise ValueError; on other devices they are not checked, since
        reading them would stall the queue.
        """
        check_ids("token", token, self.config.vocab_size + 1, self.embedding.weight, "[B]")
        self._check_state(state, token.shape[0])
        x = self.dropout(self.positions.at(self.embedding(token), state.position))
        return self._advance(x, [block.step for block in self._blocks()], state, 1)

    def attend(self, source: Tensor, target: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Weights of the source tokens in the last layer at each target token: [B, T, S], mean of the heads.

        Raises:
            UnsupportedError: the cross-attention does not compute weights; softmax and linear do.
        """
        memory = self.encode(source, key_padding_mask=key_padding_mask)
        x = self._embed(target, memory.shape[0])
        *others, last = self._blocks()
        for block in others:
            x = block(x, memory, key_padding_mask)
        return last.weights(x, memory, key_padding_mask).mean(1)

    def _advance(
        self, x: Tensor, verbs: list[Verb], state: EncoderDecoderState, n_tokens: int
    ) -> tuple[Tensor, EncoderDecoderState]:
        """Run `prefill` or `step` of each block: the logits, and the state after `n_tokens` more tokens."""
        layers = []
        for verb, memory, layer in zip(verbs, state.memory, state.layers, strict=True):
            x, layer = verb(x, memory, layer)
            layers.append(layer)
        after = EncoderDecoderState(state.position + n_tokens, state.memory, tuple(layers))
        return self.head(self.norm(x)), after

    def _hidden(self, memory: Tensor, target: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        x = self._embed(target, memory.shape[0])
        for block in self._blocks():
            x = apply(block, x, memory, key_padding_mask, layer=block, recompute=self.recompute)
        return cast(Tensor, self.norm(x))

    def _embed(self, target: Tensor, rows: int) -> Tensor:
        check_ids("target", target, self.config.vocab_size + 1, self.embedding.weight)
        if target.shape[0] != rows:
            raise ValueError(f"target has {target.shape[0]} rows, but must have {rows}, as the source has")
        x = self.embedding(target).to(self.embedding.weight.dtype)
        return cast(Tensor, self.dropout(self.positions(x)))

    def _blocks(self) -> Sequence[DecoderBlock]:
        return cast("list[DecoderBlock]", list(self.blocks))

    def _check_state(self, state: EncoderDecoderState, batch_size: int) -> None:
        check_layer_states(state, EncoderDecoderState, batch_size, len(self.blocks), self.embedding.weight)
        check_parts("state.memory", state.memory, len(self.blocks))


def init_xavier(model: nn.Module) -> None:
    """Draw matrices from U(-a, a), a = sqrt(6 / (inputs + outputs)), and embeddings from N(0, 1 / width).

    Glorot and Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks". Other
    parameters of an attention mechanism keep the initial values of the mechanism.
    """

    def draw(*weights: Tensor, bias: Tensor | None = None) -> None:
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if bias is not None:
            nn.init.zeros_(bias)

    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            queries_are_keys = module.qkv_proj.out_features != sum(module.widths)
            widths = module.widths[1:] if queries_are_keys else module.widths
            draw(*torch.split(module.qkv_proj.weight, widths), bias=module.qkv_proj.bias)
            draw(module.out_proj.weight, bias=module.out_proj.bias)
        elif isinstance(module, FeedForward):
            draw(*torch.split(module.up.weight, module.down.in_features), bias=module.up.bias)
            draw(module.down.weight, bias=module.down.bias)
        elif isinstance(module, Categorical) and module.project is not None:
            draw(module.project.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.embedding_dim))
