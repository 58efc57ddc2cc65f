"""The contract of a language model: it predicts the next token everywhere, and runs as a recurrence."""

from typing import Any, Generic, TypeVar

from torch import Tensor

from unrolled.contract import IGNORED
from unrolled.models.checks import check_ids, check_targets, check_token
from unrolled.models.heads import mean_nll
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import check_key_padding_mask

State = TypeVar("State")


class LanguageModel(SavedModel, Generic[State]):
    """Reads token ids, and gives a distribution over the next one at every position.

    `forward` reads whole sequences; `prefill` and `step` give the same results from a state, which they never
    change, however a sequence is cut into calls. A model derives from this class, defines `init_state`,
    `read_all`, `read_some` and `read_one`, and makes `embedding` and `head`.
    """

    config: Any
    n_ids: int  # of the vocabulary, and the start symbol where there is one
    embedding: Any
    head: Any

    def init_state(self, batch_size: int) -> State:
        """The state before the first token, on the model's device."""
        raise NotImplementedError

    def read_all(self, tokens: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Read sequences `[B,T]`: what the head takes, `[B,T,width]`."""
        raise NotImplementedError

    def read_some(
        self, tokens: Tensor, state: State, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Read tokens `[B,T]` from a state: what the head takes, `[B,T,width]`, and the new state."""
        raise NotImplementedError

    def read_one(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Read a token `[B]` from a state: what the head takes, `[B,width]`, and the new state."""
        raise NotImplementedError

    def check_state(self, state: Any, rows: int) -> None:
        """Raise ValueError unless `state` is one of this model for so many rows; by default, layers check."""

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
        """
        logits: Tensor = self.head(self._read_checked(tokens, key_padding_mask, cu_seqlens))
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
        hidden = self._read_checked(inputs, key_padding_mask, cu_seqlens)
        check_targets(targets, inputs.shape, self.config.vocab_size)
        if key_padding_mask is not None:
            targets = targets.masked_fill(key_padding_mask, IGNORED)
        return mean_nll(self.head.nll(hidden, targets), targets)

    def prefill(
        self, tokens: Tensor, state: State, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Read several tokens [B, T] in parallel, after those that `state` has read.

        With a `key_padding_mask` [B, T], rows may bring different numbers of tokens: padding leaves the state
        of its row as it is, and its logits mean nothing.

        Returns:
            logits [B, T, vocab_size] and the new state.
        """
        self._check_tokens(tokens, key_padding_mask)
        self.check_state(state, tokens.shape[0])
        hidden, state = self.read_some(tokens, state, key_padding_mask)
        return self.head(hidden), state

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token [B] per row; return logits [B, vocab_size] and the new state.

        On a CPU, ids outside the vocabulary raise ValueError; elsewhere reading them would stall the queue.
        """
        check_token(token, self.n_ids, self.embedding.weight)
        self.check_state(state, token.shape[0])
        hidden, state = self.read_one(token, state)
        return self.head(hidden), state

    def _read_checked(
        self, tokens: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        self._check_tokens(tokens, key_padding_mask)
        if cu_seqlens is not None and key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask was given with cu_seqlens, but packs have no padding: give one of them"
            )
        return self.read_all(tokens, key_padding_mask, cu_seqlens)

    def _check_tokens(self, tokens: Tensor, key_padding_mask: Tensor | None) -> None:
        check_ids("tokens", tokens, self.n_ids, self.embedding.weight)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *tokens.shape)
