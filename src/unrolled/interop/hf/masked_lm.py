"""`UnrolledForMaskedLM`: an encoder that fills gaps."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from unrolled.contract import IGNORED
from unrolled.interop.hf._model import UnrolledPreTrainedModel, encode, n_targets, refuse_others
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.models import Encoder


class UnrolledForMaskedLM(UnrolledPreTrainedModel):  # type: ignore[no-untyped-call]
    """An `Encoder` with output "masked" for transformers: pipelines, `Trainer`, `save_pretrained`."""

    model: Encoder

    _decodes = False

    @staticmethod
    def _make(config: UnrolledConfig) -> Encoder:
        return Encoder(config.encoder_config("masked"))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits of the token that belongs at each position.

        Args:
            input_ids: [B, T] long.
            attention_mask: [B, T]; 0 at padding.
            token_type_ids: [B, T] long, the `segments` of a model that has some; all 0 by default.
            global_attention_mask: [B, T], not 0 at global tokens; see `global_mask` of `Encoder.forward`.
            labels: [B, T] long; -100 and those at padding are ignored.
            return_dict: False for a tuple.
            num_items_in_batch: number of labels other than -100 in all batches of a step, to divide the
                summed loss by; in evaluation the share of those at padding is taken off it.
            others: what other models of transformers take; each None or False.

        Returns:
            `loss` where there are labels; `logits` [B, T, vocab_size].

        Raises:
            UnsupportedError: the mask says which position may see which, or one of `others` is asked for.
            ValueError: a mask or token is impossible, or there are segments that the model does not have.
        """
        refuse_others(others)
        logits, padding = encode(self.model, input_ids, attention_mask, token_type_ids, global_attention_mask)
        loss = None
        if labels is not None:
            if padding is not None:
                given, labels = labels, labels.masked_fill(padding, IGNORED)
                if not self.training:  # there all batches of a step need one divisor
                    num_items_in_batch = n_targets(num_items_in_batch, given, labels)
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return self._given(MaskedLMOutput(loss=loss, logits=logits), return_dict)
