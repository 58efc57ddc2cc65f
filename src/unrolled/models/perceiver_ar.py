r"""Perceiver AR: a decoder whose first block reads all tokens; the other blocks read only the last ones.

    z = block_1(x)_{T-N+1 .. T}          causal softmax attention of the last N positions to all T inputs
    z = block_l(z), l = 2 ..             causal attention of these N latents to each other
    p(x_{t+1} | x_{<= t}) from z_t       for the last N positions only

Hawthorne et al. 2022, "General-purpose, long-context autoregressive modeling with Perceiver AR", arXiv
2202.07765, section 3. The paper has one norm for queries and one for inputs; here they are one, since the
projections that follow absorb the difference. So with N >= T this is the `Decoder` with the same weights.

Cost: time O(T N + L N^2) for L blocks, where a decoder takes O(L T^2); the state of a sequence is the inputs'
keys and values in the first block, and in the others the state of their mechanism over the latents.

**Generation.** The first call of `prefill` turns the last N of its tokens into latents; the tokens before
these remain a prefix. Each later token is one more latent. Nothing is computed twice. A prompt of t tokens
and s more tokens, split into calls in any way, give the logits of one `forward` over all of them with
`n_latents = min(N, t) + s`. What a block keeps of earlier latents depends on its mechanism: softmax attention
keeps all of them, linear attention a state of constant size.
"""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Unpack, cast

import torch
from torch import Tensor

from unrolled.attention.base import Masks
from unrolled.attention.softmax import SoftmaxAttention
from unrolled.contract import IGNORED, UnsupportedError
from unrolled.fields import Fraction, Size
from unrolled.models.blocks import Block, apply, init_weights
from unrolled.models.checks import check_ids, check_targets
from unrolled.models.config import Mechanisms, TransformerConfig
from unrolled.models.decoder import Decoder, DecoderConfig, DecoderState
from unrolled.models.language_model import TokenMasks
from unrolled.ops.checks import check_key_padding_mask
from unrolled.ops.observing import may_read
from unrolled.ops.sequence import refuse
from unrolled.ops.softmax import KVCache, softmax_attention, softmax_prefill
from unrolled.ops.state_checks import check_state


@dataclass
class PerceiverARConfig(DecoderConfig):
    """A Perceiver AR's fields; see `DecoderConfig` and `TransformerConfig` for the rest.

    `n_layers` includes the first block, which reads the inputs. Its `attention` must be "softmax"; a list may
    give the other blocks another one.

    Attributes:
        n_latents: number N of last positions that become latents, and that are trained on.
        prefix_dropout: probability in training of masking an input before the latents.
    """

    _: KW_ONLY
    n_latents: Size = 256
    prefix_dropout: Fraction = 0.0
    attention: Mechanisms = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reversible:
            raise ValueError(
                "reversible is True, but must be False: the first block has fewer outputs than inputs"
            )
        if self.layer_attention[0] != "softmax":
            raise ValueError(
                f"attention begins with {self.layer_attention[0]!r}, but must begin with 'softmax' for the "
                f"block that reads the inputs, as in ['softmax', {self.layer_attention[-1]!r}]"
            )
        if (conv := self.options_of(0).get("conv")) is not None:
            raise ValueError(
                f"conv of the first block is {conv}, but must be None, since this block computes the last "
                "outputs only; give it to the other blocks by layer_options"
            )


class Reading(TokenMasks, total=False):
    """The options of `PerceiverAR.forward`."""

    n_latents: int | None


class PerceiverAR(Decoder):
    """A decoder that predicts after the last `n_latents` tokens; the module docstring defines it.

    Rows with padding are read as if their padding were on the left: outputs are aligned at the right.
    """

    model_name = "perceiver_ar"
    config_type = PerceiverARConfig
    config: PerceiverARConfig

    def __init__(self, config: PerceiverARConfig) -> None:
        super().__init__(config)
        self.stack.blocks[0] = ReadingBlock(config)
        init_weights(self.stack, config)

    def forward(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        n_latents: int | None = None,
    ) -> Tensor:
        """Logits of the token after each of the last n = min(n_latents, T) tokens.

        Args:
            tokens: [B, T] long.
            key_padding_mask: [B, T] bool, True at padding (left, right or scattered). A row's logits are
                those of its last n valid tokens; where it has fewer, the first logits are meaningless.
            cu_seqlens: not supported.
            n_latents: the config's by default.

        Returns:
            [B, n, vocab_size]; log-probabilities with the mixture head.

        Raises:
            ValueError: ids outside the vocabulary, or an argument of the wrong shape or type.
            UnsupportedError: packed sequences.
        """
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        return self.head(self._latents(tokens, key_padding_mask, cu_seqlens, n_latents))

    def loss(self, inputs: Tensor, targets: Tensor, **reading: Unpack[Reading]) -> Tensor:
        """Mean -log p(target) in nats over the last `n_latents` tokens of each row, in at least fp32.

        Args:
            inputs: as `tokens` of `forward`.
            targets: [B, T] long, what follows each position; -100, those at padding and those before the
                latents are ignored.
            reading: `key_padding_mask` and `n_latents`, as for `forward`.

        Raises:
            ValueError: as `forward`; targets of another shape or outside the vocabulary.
        """
        check_ids("inputs", inputs, self.n_ids, self.embedding.weight)
        hidden = self._latents(inputs, **reading)
        padding = reading.get("key_padding_mask")
        targets = check_targets(targets, inputs.shape, self.config.vocab_size, padding)
        if padding is not None:
            targets = targets.gather(1, _order(padding))
        return self.head.loss(hidden, targets[:, targets.shape[1] - hidden.shape[1] :])

    def predicted(self, targets: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Replace the targets `[B, T]` before the latents, which the loss does not cover, by -100."""
        n = self.config.n_latents
        if key_padding_mask is None:
            return torch.cat([torch.full_like(targets[:, :-n], IGNORED), targets[:, -n:]], dim=1)
        to_the_end = (~key_padding_mask).flip(1).cumsum(1).flip(1)  # valid tokens from each one on
        return targets.masked_fill(key_padding_mask | (to_the_end > n), IGNORED)

    def loss_from(self, *_: object, **__: object) -> tuple[Tensor, DecoderState]:
        """Not supported: the loss covers the last tokens of a sequence only."""
        raise UnsupportedError("PerceiverAR predicts at the end of a sequence only: it has no loss_from")

    def prefill(
        self,
        tokens: Tensor,
        state: DecoderState,
        *,
        key_padding_mask: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Read several tokens [B, T] in parallel, after those that `state` has read.

        With a `key_padding_mask` [B, T], rows may have different numbers of tokens, aligned at the right. The
        first tokens of all rows must be read in one call.

        Returns:
            logits [B, n, vocab_size] and the new state, where n is min(n_latents, T) in the first call, whose
            other tokens become the prefix, and T in any later one. With `logits_to_keep`, only the last of
            these logits.

        Raises:
            ValueError: as `LanguageModel.prefill`; on a CPU, some rows have read tokens, and others have not.
            UnsupportedError: as `LanguageModel.prefill`.
        """
        return super().prefill(
            tokens, state, key_padding_mask=key_padding_mask, logits_to_keep=logits_to_keep
        )

    def read_some(
        self, tokens: Tensor, state: DecoderState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, DecoderState]:
        """Read tokens `[B,T]` from a state: `[B,n,d_model]`, with the n of `prefill`, and the new state."""
        tokens, key_padding_mask = self._at_the_right(tokens, key_padding_mask)
        T = tokens.shape[1]
        inputs, reader = state.layers[0], self._reader.attention
        check_state(reader, inputs, tokens.shape[0], reader.out_weight)
        assert isinstance(inputs, KVCache)  # as just checked
        begun = inputs.past_k.shape[2] + inputs.recent_k.shape[2] > 0
        if begun and may_read(state.position):
            begun = _have_begun(state.position)
        n = T if begun else min(self.config.n_latents, T)
        x = self.positions(self.embedding(tokens), start=state.position, key_padding_mask=key_padding_mask)
        z, inputs = self._reader.prefill_last(self.dropout(x), n, inputs, key_padding_mask)
        padding = None if key_padding_mask is None else key_padding_mask[:, T - n :]
        hidden, latents = self.stack.prefill(z, state.layers[1:], key_padding_mask=padding, start=1)
        read = T if key_padding_mask is None else (~key_padding_mask).sum(dim=1)
        return hidden, DecoderState(state.position + read, (inputs, *latents))

    def _latents(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        n_latents: int | None = None,
    ) -> Tensor:
        if cu_seqlens is not None:
            raise UnsupportedError(
                "PerceiverAR predicts at the end of each row and cannot read cu_seqlens; use key_padding_mask"
            )
        n_latents = self.config.n_latents if n_latents is None else n_latents
        if n_latents < 1:
            raise ValueError(f"n_latents is {n_latents}, but must be at least 1")
        tokens, key_padding_mask = self._at_the_right(tokens, key_padding_mask)
        T = tokens.shape[1]
        n = min(n_latents, T)
        x = self.dropout(self.positions(self.embedding(tokens), key_padding_mask=key_padding_mask))
        hidden = None
        if self.training and self.config.prefix_dropout:
            hidden = torch.rand(x.shape[:2], device=x.device) < self.config.prefix_dropout
            hidden[:, T - n :] = False
        read = partial(self._reader.last, n=n, key_padding_mask=key_padding_mask, hidden=hidden)
        z = apply(read, x, layer=self._reader, recompute=self.recompute)
        padding = None if key_padding_mask is None else key_padding_mask[:, T - n :]
        return self.stack(z, key_padding_mask=padding, recompute=self.recompute, start=1)

    @property
    def _reader(self) -> "ReadingBlock":
        return cast(ReadingBlock, self.stack.blocks[0])

    def _at_the_right(self, tokens: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if key_padding_mask is None:
            return tokens, None
        check_key_padding_mask(key_padding_mask, *tokens.shape)
        order = _order(key_padding_mask)
        return tokens.gather(1, order), key_padding_mask.gather(1, order)


class ReadingBlock(Block):
    """A block of softmax attention that can compute the last outputs only."""

    attention: "ReadingAttention"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, 0, causal=True)
        self.attention = ReadingAttention(config.d_model, causal=True, **config.options_of(0))

    def last(self, x: Tensor, n: int, key_padding_mask: Tensor | None, hidden: Tensor | None) -> Tensor:
        """The last n outputs for `x` [B, T, d_model], with the inputs `hidden` [B, T] masked."""
        y = self.attention.last(self._read(x), n, key_padding_mask, hidden)
        return self._finish(x[:, x.shape[1] - n :], y)

    def prefill_last(
        self, x: Tensor, n: int, state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """The last n outputs of `prefill`, and the state after it."""
        y, state = self.attention.prefill_last(self._read(x), n, state, key_padding_mask)
        return self._finish(x[:, x.shape[1] - n :], y), state


class ReadingAttention(SoftmaxAttention):
    """Causal softmax attention that can compute the last positions only."""

    def last(self, x: Tensor, n: int, key_padding_mask: Tensor | None, hidden: Tensor | None) -> Tensor:
        """The last n outputs for `x` [B, T, d_model], with the inputs `hidden` [B, T] masked."""
        q, k, v = self._last_heads(x, n, self.positions_of(x, Masks(key_padding_mask)))
        padding = key_padding_mask if hidden is None else hidden
        if hidden is not None and key_padding_mask is not None:
            padding = hidden | key_padding_mask
        o = softmax_attention(q, k, v, causal=True, key_padding_mask=padding)
        return self.merge_heads(o, x[:, x.shape[1] - n :])

    def prefill_last(
        self, x: Tensor, n: int, state: KVCache, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """The last n outputs of `prefill`, and the state after it."""
        positions = state.position.unsqueeze(1) + self.positions_of(x, Masks(key_padding_mask))
        q, k, v = self._last_heads(x, n, positions)
        o, state = softmax_prefill(q, k, v, state, key_padding_mask=key_padding_mask)
        return self.merge_heads(o, x[:, x.shape[1] - n :]), state

    def _last_heads(self, x: Tensor, n: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        refuse("a Perceiver AR")
        start = x.shape[1] - n
        q, k, v = self.project(x[:, start:], x if start else None)
        if self.rotary:
            q, k = self.rotate(q, positions[:, start:]), self.rotate(k, positions)
        return q, k, v


def _have_begun(position: Tensor) -> bool:
    """Whether rows have read tokens: all of them, or none.

    Raises:
        ValueError: some have, and others have not: their first tokens would be latents without a prefix.
    """
    begun = position > 0
    if begun.any() and not begun.all():
        row = int((~begun).nonzero()[0])
        raise ValueError(
            f"state has read no token in row {row}, but some in others: a Perceiver AR must read the first "
            "tokens of all rows in one call"
        )
    return bool(begun.all())


def _order(key_padding_mask: Tensor) -> Tensor:
    """Columns [B, T] of the padding, then of the tokens in their order."""
    return key_padding_mask.long().argsort(dim=1, descending=True, stable=True)
