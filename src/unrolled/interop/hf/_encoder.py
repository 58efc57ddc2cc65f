"""The base of the classes for transformers that hold an encoder with an output layer."""

from typing import Any, ClassVar

from torch import Tensor
from transformers.utils.generic import ModelOutput

from unrolled.interop.hf._model import Count, UnrolledPreTrainedModel, encode
from unrolled.interop.hf.config import UnrolledConfig
from unrolled.models import Encoder


class EncoderModel(UnrolledPreTrainedModel):  # type: ignore[no-untyped-call]
    """An `Encoder` with an output layer and a loss."""

    model: Encoder

    _decodes = False
    _output: ClassVar[str]
    _output_type: ClassVar[type[ModelOutput]]

    @classmethod
    def _make(cls, config: UnrolledConfig) -> Encoder:
        return Encoder(config.encoder_config(cls._output))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> ModelOutput | tuple[object, ...]:
        """Return the logits, and the loss if there are labels.

        Args:
            input_ids: [B, T] long.
            attention_mask: [B, T]; 0 at padding.
            token_type_ids: [B, T] long, the `segments`, for a model that has segments; all 0 by default.
            global_attention_mask: [B, T], nonzero at global tokens; see `global_mask` of `Encoder.forward`.
            labels: see the class.
            return_dict: False returns a tuple.
            others: `num_items_in_batch`, if the class takes it: the number of labels other than -100 in all
                batches of a step, by which the summed loss is divided; in evaluation, labels at padding are
                subtracted from it. Arguments of other models of transformers must be None or False.

        Returns:
            `loss` if there are labels; `logits` [B, n_classes], or [B, T, vocab_size] for masked tokens.

        Raises:
            UnsupportedError: the mask is a mask of query-key pairs, or one of `others` is given.
            ValueError: a mask or token is out of range, or segments are given to a model without segments.
        """
        n_items = others.pop("num_items_in_batch", None) if self.accepts_loss_kwargs else None
        self._refuse(others)
        logits, padding = encode(self.model, input_ids, attention_mask, token_type_ids, global_attention_mask)
        loss = None if labels is None else self._loss(logits, labels, padding, n_items)
        return self._returned(self._output_type(loss=loss, logits=logits), return_dict)

    def _loss(self, logits: Tensor, labels: Tensor, padding: Tensor | None, n_items: Count) -> Tensor:
        raise NotImplementedError
