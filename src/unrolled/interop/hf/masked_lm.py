"""`UnrolledForMaskedLM`: an encoder that predicts masked tokens."""

from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from unrolled.interop.hf._encoder import EncoderModel
from unrolled.interop.hf._model import Count


class UnrolledForMaskedLM(EncoderModel):  # type: ignore[no-untyped-call]
    """An `Encoder` with output "masked" for transformers: pipelines, `Trainer`, `save_pretrained`.

    The `labels` of `forward` are [B, T] long; labels of -100 and labels at padding are ignored.
    """

    _output, _output_type = "masked", MaskedLMOutput

    def _loss(self, logits: Tensor, labels: Tensor, padding: Tensor | None, n_items: Count) -> Tensor:
        return self._token_loss(logits, labels, padding, n_items)
