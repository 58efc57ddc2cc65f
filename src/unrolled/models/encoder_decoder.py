"""The transformer that reads one sequence and writes another: the one of the paper, with any attention.

    memory = encoder(source)                                      bidirectional self-attention
    p(y_t | y_<t, source) = softmax(W decoder(y_<t, memory))_t    causal self-attention, then cross-attention

Each sub-layer f is x <- norm(x + dropout(f(x))). Tokens are vectors of one table E, times sqrt(d_model), plus
sinusoids, with dropout on the sum, and W = E: Vaswani et al. 2017, "Attention Is All You Need", arXiv
1706.03762, sections 3.1 to 3.5 and 5.4. Training it to their figures wants a warm-up, Adam with betas (0.9,
0.98) and eps 1e-9, and label smoothing (section 5.3 and 5.4); see `unrolled.training.optim.Schedule`.

With linear attention in all three places the decoder is an RNN: its state is of one size, whatever the length
of the source and of what has been written.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from unrolled.attention.base import MultiHeadAttention
from unrolled.contract import IGNORED
from unrolled.fields import Fraction, FromData, Size
from unrolled.models.blocks import FeedForward, make_norm, tie_layers
from unrolled.models.checks import check_ids, check_layer_states, check_parts, check_token
from unrolled.models.config import Activation, Mechanisms, Norm, Positions, TransformerConfig
from unrolled.models.cross import DecoderBlock
from unrolled.models.embeddings import PositionEmbedding
from unrolled.models.heads import Categorical, mean_nll
from unrolled.models.saving import SavedModel
from unrolled.models.stack import Stack
from unrolled.models.targets import shifted
from unrolled.ops.checks import check_device, check_key_padding_mask, may_read


@dataclass
class EncoderDecoderConfig(TransformerConfig):
    """An encoder-decoder's fields; see `TransformerConfig` for the rest.

    `n_layers` is that of the encoder and that of the decoder. `attention` is the encoder's; a name or a list
    with one per layer, as all three.

    Attributes:
        vocab_size: number of token ids, of the target and, by default, of the source.
        source_vocab_size: number of token ids of the source; None for the same ids as the target's.
        decoder_attention: mechanism of the decoder's self-attention; None for that of the encoder.
        cross_attention: mechanism by which the decoder reads the source; None for that of the encoder.
        label_smoothing: how much of the target's probability 1 is spread evenly over all ids, in training.
        tie_embeddings: let source, target and output share one table.
        start_token: True: the id `vocab_size` begins every target, and is never predicted.
    """

    vocab_size: Annotated[Size, FromData("vocab_size")]
    _: KW_ONLY
    source_vocab_size: Annotated[Size | None, FromData("source_vocab_size")] = None
    attention: Mechanisms = "softmax"
    decoder_attention: Mechanisms | None = None
    cross_attention: Mechanisms | None = None
    norm: Norm = "post"
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
        named: set[str] = set()
        for given in (self.attention, self.decoder_attention, self.cross_attention):
            named |= {given} if isinstance(given, str) else set(given or ())
        return named

    @property
    def cross_side(self) -> TransformerConfig:
        """The config of the attention to the source. Between two sequences nothing is rotated."""
        rotary = {"positions": "none"} if self.positions == "rotary" else {}
        return self.side(self.cross_attention, **rotary)

    def side(self, mechanisms: Mechanisms | None, **changes: Any) -> TransformerConfig:
        """The config of a stack with these mechanisms, None for the encoder's, and with their options."""
        mechanisms = self.attention if mechanisms is None else mechanisms
        values = {field.name: vars(self)[field.name] for field in fields(TransformerConfig)}
        named = [mechanisms] if isinstance(mechanisms, str) else mechanisms
        for options in ("attention_options", "layer_options"):
            values[options] = {name: x for name, x in values[options].items() if name in named}
        return TransformerConfig(**values | {"attention": mechanisms} | changes)


class EncoderDecoderState(NamedTuple):
    """What decoding needs: the source as each layer reads it, and what each layer remembers of the target."""

    position: Tensor  # [B] long, the target tokens read so far
    memory: tuple[Any, ...]  # see `MultiHeadAttention.read`; it never changes
    layers: tuple[Any, ...]  # the state of each layer's self-attention


class EncoderDecoder(SavedModel):
    """Reads a source and predicts its target, such as a sentence and its translation.

    Matrices start xavier-uniform, queries, keys and values each for itself, biases at 0 and vectors of tokens
    from N(0, 1 / d_model). Set `gradient_checkpointing` to True to keep only the input of each block for the
    backward pass.
    """

    model_name = "encoder_decoder"
    config_type = EncoderDecoderConfig
    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.n_source_ids = config.source_vocab_size or config.vocab_size
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.source_embedding: nn.Embedding | None = None
        if not config.tie_embeddings:
            self.source_embedding = nn.Embedding(self.n_source_ids, config.d_model)
        self.source_positions = PositionEmbedding.of(config)
        self.positions = PositionEmbedding.of(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(config.side(config.attention), causal=False)
        own, cross = config.side(config.decoder_attention), config.cross_side
        self.blocks = nn.ModuleList(DecoderBlock(own, cross, layer) for layer in range(config.n_layers))
        for part in ("attention", "cross"):
            tie_layers(getattr(block, part) for block in self.blocks)
        self.norm = make_norm(config) if config.norm == "pre" else nn.Identity()
        tied = self.embedding if config.tie_embeddings else None
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
        """Logits of the token that follows each of the target.

        Args:
            source: [B, S] long, at least one token in each row.
            target: [B, T] long, what the decoder reads: the start symbol, then the tokens so far.
            key_padding_mask: [B, S] bool, True at padding of the source, which changes nothing.
            global_mask: [B, S] bool, True at global tokens of the source; see `Encoder.forward`.

        Returns:
            [B, T, vocab_size].
        """
        memory = self.encode(source, key_padding_mask=key_padding_mask, global_mask=global_mask)
        logits: Tensor = self.head(self._hidden(memory, target, key_padding_mask))
        return logits

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats per target, computed in at least fp32.

        In training with label smoothing e, the target has the probability 1 - e + e / V and each other id
        e / V, as in torch; section 5.4 leaves open how e is spread. In evaluation it is plain.

        Args:
            inputs: the sources, as for `forward`.
            targets: [B, T] long, the tokens that follow the start symbol, the end symbol included; -100 at
                padding, which counts for nothing.
            key_padding_mask, global_mask: as for `forward`.
        """
        read = shifted(targets, inputs.shape[0], self.config.vocab_size)
        memory = self.encode(inputs, key_padding_mask=key_padding_mask, global_mask=global_mask)
        hidden = self._hidden(memory, read, key_padding_mask)
        logits = self.head(hidden)
        nll = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
            reduction="none",
        )
        return mean_nll(nll, targets)

    def encode(
        self,
        source: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """Read the source: [B, S] long -> [B, S, d_model].

        Raises:
            ValueError: a source has no token, or ids or mask are not as `forward` wants them.
        """
        table = self.source_embedding or self.embedding
        check_ids("source", source, self.n_source_ids, table.weight)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *source.shape)
            check_device("key_padding_mask", key_padding_mask, source, "the source is")
        empty = key_padding_mask is not None and may_read(source) and key_padding_mask.all(1).any()
        if source.shape[1] == 0 or empty:
            raise ValueError(
                f"source, of the shape {list(source.shape)}, has a row without any token, wanted one at least"
            )
        x = table(source).to(table.weight.dtype)  # autocast must not narrow the residual stream
        x = self.dropout(self.source_positions(x, key_padding_mask=key_padding_mask))
        recompute = self.gradient_checkpointing and self.training
        masks = {"key_padding_mask": key_padding_mask, "global_mask": global_mask}
        y: Tensor = self.encoder(x, recompute=recompute, **masks)
        return y

    def init_state(
        self,
        source: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> EncoderDecoderState:
        """Encode the source [B, S], and project it for each layer, once."""
        memory = self.encode(source, key_padding_mask=key_padding_mask, global_mask=global_mask)
        B = source.shape[0]
        read = tuple(block.cross.read(memory, key_padding_mask=key_padding_mask) for block in self._blocks())
        layers = tuple(block.attention.init_state(B) for block in self._blocks())
        return EncoderDecoderState(torch.zeros(B, dtype=torch.long, device=source.device), read, layers)

    def prefill(self, tokens: Tensor, state: EncoderDecoderState) -> tuple[Tensor, EncoderDecoderState]:
        """Read several tokens of the target [B, T], the start symbol first; logits [B, T, V] and the state.

        `state` is not changed.
        """
        check_ids("tokens", tokens, self.config.vocab_size + 1, self.embedding.weight)
        self._check_state(state, tokens.shape[0])
        x = self.dropout(self.positions(self.embedding(tokens), start=state.position))
        layers = []
        for block, memory, layer in zip(self._blocks(), state.memory, state.layers, strict=True):
            x, layer = block.prefill(x, memory, layer)
            layers.append(layer)
        position = state.position + tokens.shape[1]
        return self.head(self.norm(x)), EncoderDecoderState(position, state.memory, tuple(layers))

    def step(self, token: Tensor, state: EncoderDecoderState) -> tuple[Tensor, EncoderDecoderState]:
        """Read one token [B] of each target; return logits [B, V] and the new state.

        On a CPU, ids outside the vocabulary raise ValueError; elsewhere reading them would stall the queue.
        """
        check_token(token, self.config.vocab_size + 1, self.embedding.weight)
        self._check_state(state, token.shape[0])
        x = self.dropout(self.positions.at(self.embedding(token), state.position))
        layers = []
        for block, memory, layer in zip(self._blocks(), state.memory, state.layers, strict=True):
            x, layer = block.step(x, memory, layer)
            layers.append(layer)
        return self.head(self.norm(x)), EncoderDecoderState(state.position + 1, state.memory, tuple(layers))

    def attend(self, source: Tensor, target: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """How much of the source the last layer reads at each target token: [B, T, S], the mean of its heads.

        Raises:
            UnsupportedError: the cross-attention is no weighted mean; softmax and linear are.
        """
        memory = self.encode(source, key_padding_mask=key_padding_mask)
        x = self._embed(target, memory.shape[0])
        *others, last = self._blocks()
        for block in others:
            x = block(x, memory, key_padding_mask)
        return last.weights(x, memory, key_padding_mask).mean(1)

    def _hidden(self, memory: Tensor, target: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        x = self._embed(target, memory.shape[0])
        recompute = self.gradient_checkpointing and self.training
        for block in self._blocks():
            if recompute:
                x = checkpoint(block, x, memory, key_padding_mask, use_reentrant=False)
            else:
                x = block(x, memory, key_padding_mask)
        return cast(Tensor, self.norm(x))

    def _embed(self, target: Tensor, rows: int) -> Tensor:
        check_ids("target", target, self.config.vocab_size + 1, self.embedding.weight)
        if target.shape[0] != rows:
            raise ValueError(f"target has {target.shape[0]} rows, wanted {rows}, as the source has")
        x = self.embedding(target).to(self.embedding.weight.dtype)
        return cast(Tensor, self.dropout(self.positions(x)))

    def _blocks(self) -> Sequence[DecoderBlock]:
        return cast("list[DecoderBlock]", list(self.blocks))

    def _check_state(self, state: EncoderDecoderState, batch_size: int) -> None:
        check_layer_states(state, EncoderDecoderState, batch_size, len(self.blocks), self.embedding.weight)
        check_parts("state.memory", state.memory, len(self.blocks))


def init_xavier(model: nn.Module) -> None:
    """Draw matrices from U(-a, a), a = sqrt(6 / (inputs + outputs)), and embeddings from N(0, 1 / width).

    Glorot and Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks". What
    else an attention mechanism has starts as its file says.
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
