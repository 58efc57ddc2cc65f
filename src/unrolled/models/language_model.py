"""The contract of a language model: it predicts the next token everywhere, and runs as a recurrence."""

from typing import Any, Generic, TypedDict, TypeVar, Unpack

from torch import Tensor, nn

from unrolled.contract import IGNORED
from unrolled.models.checks import check_ids
from unrolled.models.embeddings import PixelEmbedding
from unrolled.models.heads import Head
from unrolled.models.saving import SavedModel
from unrolled.ops.options import check_integers

State = TypeVar("State")


class TokenMasks(TypedDict, total=False):
    """The masks of a batch of tokens; see `LanguageModel.forward`."""

    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None


class LanguageModel(SavedModel, Generic[State]):
    """Reads token ids, and predicts a distribution over the next token at every position.

    `forward` reads whole sequences. `prefill` and `step` continue from a state, which they never modify. The
    results are the same, however a sequence is split into calls. A model derives from this class, defines
    `init_state`, `read_all`, `read_some` and `read_one`, and makes `embedding` and `head`.
    """

    n_ids: int  # of the vocabulary, and the start symbol where there is one
    embedding: nn.Embedding | PixelEmbedding
    head: Head

    def init_state(self, batch_size: int) -> State:
        """The state before the first token, on the model's device."""
        raise NotImplementedError

    def read_all(self, tokens: Tensor, **masks: Unpack[TokenMasks]) -> Tensor:
        """Read sequences `[B,T]`: the input of the head, `[B,T,width]`."""
        raise NotImplementedError

    def read_some(
        self, tokens: Tensor, state: State, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Read tokens `[B,T]` from a state: the input of the head, `[B,T,width]`, and the new state."""
        raise NotImplementedError

    def read_one(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Read a token `[B]` from a state: the input of the head, `[B,width]`, and the new state."""
        raise NotImplementedError

    def check_state(self, state: State, rows: int) -> None:
        """Raise ValueError unless `state` is of this model with that many rows; layers check their own."""

    def forward(
        self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits of the token that follows each position, for whole sequences.

        Args:
            tokens: [B, T] long.
            key_padding_mask: [B, T] bool, True at padding (left, right or scattered), which does not change
                the other positions.
            cu_seqlens: [N + 1] int32, the bounds of N sequences packed into the one row of `tokens` (B = 1).

        Returns:
            [B, T, vocab_size]; log-probabilities with a mixture head.

        Raises:
            ValueError: ids outside the vocabulary, or an argument of the wrong shape or type.
            UnsupportedError: an attention of the model does not support a given mask.
        """
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        return self.head(self.read_all(tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens))

    def loss(self, inputs: Tensor, targets: Tensor, **masks: Unpack[TokenMasks]) -> Tensor:
        """Mean -log p(target) in nats per token, computed in at least fp32; 0 if every target is ignored.

        Args:
            inputs: as `tokens` of `forward`.
            targets: [B, T] long, what follows each position; -100 and those at padding are ignored.
            masks: `key_padding_mask` and `cu_seqlens`, as for `forward`.

        Raises:
            ValueError: as `forward`; targets of another shape or outside the vocabulary.
            UnsupportedError: as `forward`.
        """
        check_ids("inputs", inputs, self.n_ids, self.embedding.weight)
        return self.head.loss(self.read_all(inputs, **masks), targets, masks.get("key_padding_mask"))

    def predicted(self, targets: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Replace the targets `[B,T]` at padding, which the loss does not cover, by -100."""
        return targets if key_padding_mask is None else targets.masked_fill(key_padding_mask, IGNORED)

    def loss_from(
        self, inputs: Tensor, targets: Tensor, state: State, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the mean loss, as in `loss`, of a sequence that continues from `state`, and the new state.

        Args:
            inputs: [B, T] long.
            targets: [B, T] long, what follows each position; -100 and those at padding are ignored.
            state: as for `prefill`.
            key_padding_mask: [B, T] bool, True at padding, which leaves the state of its row unchanged.

        Raises:
            ValueError: as `loss`; a state of another model or batch.
            UnsupportedError: an attention of the model has no recurrent form, or does not support padding.
        """
        check_ids("inputs", inputs, self.n_ids, self.embedding.weight)
        self.check_state(state, inputs.shape[0])
        hidden, state = self.read_some(inputs, state, key_padding_mask)
        return self.head.loss(hidden, targets, key_padding_mask), state

    def prefill(
        self,
        tokens: Tensor,
        state: State,
        *,
        key_padding_mask: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> tuple[Tensor, State]:
        """Read several tokens [B, T] in parallel, after those that `state` has read.

        Args:
            tokens: [B, T] long.
            state: of this model, with B rows; it is not modified.
            key_padding_mask: [B, T] bool, True at padding, so rows may have different numbers of tokens.
                Padding leaves the state of its row unchanged, and its logits are meaningless.
            logits_to_keep: number of positions, at the end, whose logits are computed; all by default. With a
                large vocabulary, the logits of a long prompt take more memory than all else.

        Returns:
            logits [B, T, vocab_size], or [B, min(logits_to_keep, T), vocab_size], and the new state.

        Raises:
            ValueError: as `forward`; a state of another model or batch; `logits_to_keep` is below 1.
            UnsupportedError: an attention of the model has no recurrent form, or does not support padding.
        """
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        self.check_state(state, tokens.shape[0])
        if logits_to_keep is not None:
            check_integers(1, logits_to_keep=logits_to_keep)
        hidden, state = self.read_some(tokens, state, key_padding_mask)
        return self.head(hidden if logits_to_keep is None else hidden[:, -logits_to_keep:]), state

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token [B] per row; return logits [B, vocab_size] and the new state.

        On a CPU, ids outside the vocabulary raise ValueError; on other devices they are not checked, since
        reading them would stall the queue.
        """
        check_ids("token", token, self.n_ids, self.embedding.weight, "[B]")
        self.check_state(state, token.shape[0])
        hidden, state = self.read_one(token, state)
        return self.head(hidden), state


def keeping(model: object, n: int) -> dict[str, Any]:
    """Return `logits_to_keep` as an argument of `model.prefill`, unless the model is from elsewhere."""
    return {"logits_to_keep": n} if isinstance(model, LanguageModel) else {}
