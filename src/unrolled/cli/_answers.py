"""What a model answers to a batch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unrolled.data import Batch


def answers(model: "nn.Module", batch: "Batch", device: "torch.device") -> "Tensor":
    """Return the outputs for a batch, on the CPU; `device` is that of the model."""
    masks = {}  # many models take none
    if batch.key_padding_mask is not None:
        masks["key_padding_mask"] = batch.key_padding_mask.to(device)
    found: Tensor = model(batch.inputs.to(device), **masks)
    return found.cpu()
