"""The intersection over union of predicted and true bits, the usual measure for masks of objects."""

from typing import TYPE_CHECKING

from unrolled.cli._answers import answers

if TYPE_CHECKING:
    from torch import nn

    from unrolled.data import BaseDataset


def intersection_over_union(model: "nn.Module", dataset: "BaseDataset", batch_size: int) -> float | None:
    """Return the intersection over union of predicted and true bits.

    This is the number of bits that are 1 and predicted as 1, divided by the number of bits that are 1 or
    predicted as 1, over all targets of the validation split; None if no bit is 1 or predicted as 1.
    """
    import torch

    from unrolled.contract import IGNORED

    device = next(model.parameters()).device
    both = either = 0
    with torch.inference_mode():
        for batch in dataset.eval_batches(batch_size):
            asked = batch.targets != IGNORED
            found, wanted = answers(model, batch, device)[asked] > 0, batch.targets[asked] > 0
            both += int((found & wanted).sum())
            either += int((found | wanted).sum())
    return both / either if either else None
