"""`UnrolledForSequenceClassification`: an encoder that classifies a sequence."""

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from unrolled.interop.hf._encoder import EncoderModel
from unrolled.interop.hf._model import Count


class UnrolledForSequenceClassification(EncoderModel):  # type: ignore[no-untyped-call]
    """An `Encoder` with output "classification" for transformers: pipelines, `Trainer`, `save_pretrained`.

    The `labels` of `forward` are [B] long. For a `problem_type` of "regression", they are [B] or
    [B, n_classes]; for "multi_label_classification", [B, n_classes]; both are of floating point.
    """

    # The loss is a mean over the batch: False makes Trainer divide it by the number of accumulation steps.
    accepts_loss_kwargs = False

    _output, _output_type = "classification", SequenceClassifierOutput

    def _loss(self, logits: Tensor, labels: Tensor, padding: Tensor | None, n_items: Count) -> Tensor:
        loss: Tensor = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return loss
