"""`UnrolledForSequenceClassification`: an encoder that labels a sequence."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from unrolled.interop.hf._model import UnrolledPreTrainedModel, encode, refuse_others
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.models import Encoder


class UnrolledForSequenceClassification(UnrolledPreTrainedModel):  # type: ignore[no-untyped-call]
    """An `Encoder` with output "classification" for transformers: pipelines, `Trainer`, `save_pretrained`."""

    # Trainer then divides the loss by the steps that it accumulates: this one is a mean over the batch.
    accepts_loss_kwargs = False

    model: Encoder

    _decodes = False

    @staticmethod
    def _make(config: UnrolledConfig) -> Encoder:
        return Encoder(config.encoder_config("classification"))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits of the labels.

        Args:
            input_ids: [B, T] long.
            attention_mask: [B, T]; 0 at padding.
            token_type_ids: [B, T] long, the `segments` of a model that has some; all 0 by default.
            global_attention_mask: [B, T], not 0 at global tokens; see `global_mask` of `Encoder.forward`.
            labels: [B] long; for a `problem_type` of "regression" [B] or [B, n_classes], for
                "multi_label_classification" [B, n_classes], both floating.
            return_dict: False for a tuple.
            others: what other models of transformers take; each None or False.

        Returns:
            `loss` where there are labels; `logits` [B, n_classes].

        Raises:
            UnsupportedError: the mask says which position may see which, or one of `others` is asked for.
            ValueError: a mask or token is impossible, or there are segments that the model does not have.
        """
        refuse_others(others)
        logits, _ = encode(self.model, input_ids, attention_mask, token_type_ids, global_attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return self._given(SequenceClassifierOutput(loss=loss, logits=logits), return_dict)
