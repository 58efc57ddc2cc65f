"""The contract of models that answer a question about a story of sentences."""

import torch
from torch import Tensor

from unrolled.models.checks import check_ids
from unrolled.models.saving import SavedModel
from unrolled.ops.checks import shape, wrong
from unrolled.ops.sequence import refuse


class StoryModel(SavedModel):
    """Reads a story and a question, and scores each word as the answer.

    A model derives from this class and defines `answer` and `weights`.
    """

    max_sentences: int | None  # None for any number
    n_words: int

    def answer(self, inputs: Tensor, padding: Tensor) -> Tensor:
        """Score the answers, `[B,vocab_size]`, for checked inputs and their padding."""
        raise NotImplementedError

    def weights(self, inputs: Tensor, padding: Tensor) -> Tensor:
        """Weight of each sentence in each hop, `[B,hops,M]`, for checked inputs and their padding."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits or scores of the answers, `[B,vocab_size]`.

        Args:
            inputs: word ids `[B,M+1,J]`: M sentences, the oldest first, and the question last.
            key_padding_mask: of the same shape, True at padding; a sentence of padding only does not count.

        Raises:
            ValueError: an argument of the wrong shape or type, no sentence, or more than `memory_size`.
        """
        return self.answer(inputs, self.padding_of(inputs, key_padding_mask))

    def attend(self, inputs: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Weight of each sentence in each hop, `[B,hops,M]`; arguments as for `forward`."""
        return self.weights(inputs, self.padding_of(inputs, key_padding_mask))

    def padding_of(self, inputs: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Check the arguments of `forward`; return the padding `[B,M+1,J]`, bool."""
        refuse("a model of stories")
        check_ids("inputs", inputs, self.n_words, next(self.parameters()), "[B, M + 1, J]")
        found, n_sentences = shape(inputs), inputs.shape[1] - 1
        if n_sentences < 1:
            raise ValueError(
                f"inputs has shape {found}, but must have at least one sentence before the question"
            )
        if found[2] < 1:
            raise ValueError(f"inputs has shape {found}, but sentences must have at least one word")
        if self.max_sentences is not None and n_sentences > self.max_sentences:
            most = f"memory_size = {self.max_sentences}"
            raise ValueError(f"inputs has {n_sentences} sentences, but must have at most {most}")
        if key_padding_mask is None:
            return torch.zeros_like(inputs, dtype=torch.bool)
        if key_padding_mask.shape != inputs.shape or key_padding_mask.dtype != torch.bool:
            raise wrong("key_padding_mask", key_padding_mask, f"torch.bool {found}")
        return key_padding_mask
