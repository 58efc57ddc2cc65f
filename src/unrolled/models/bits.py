"""The loss of models that predict bits."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import IGNORED
from unrolled.ops.checks import check_tensor, shape, wrong
from unrolled.ops.observing import may_read
from unrolled.ops.precision import accumulated


def check_numbers(targets: Tensor, like: Tensor) -> None:
    """Require floating-point targets, one for each output.

    Raises:
        ValueError: the shapes differ, or the targets are integers.
    """
    check_tensor("targets", targets)
    if targets.shape != like.shape or not targets.is_floating_point():
        raise wrong("targets", targets, f"floating point {shape(like)}")


def bit_loss(logits: Tensor, targets: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Mean binary cross-entropy in nats per bit, computed in at least fp32; 0 if all targets are ignored.

    Args:
        logits: of any shape; p(bit = 1) = sigmoid(logit).
        targets: of that shape, floating point, from 0 to 1; -100 is ignored.
        key_padding_mask: bool, of that shape without its last axis; targets are ignored where it is True.

    Raises:
        ValueError: the targets have another shape, are integers or, on a CPU, are no probabilities.
    """
    check_numbers(targets, logits)
    counted = targets != IGNORED
    if key_padding_mask is not None:
        counted &= ~key_padding_mask.unsqueeze(-1)
    if may_read(targets) and not ((targets >= 0) & (targets <= 1) | ~counted).all():
        raise ValueError("targets holds other values than probabilities and -100: each must be from 0 to 1")
    asked = torch.where(counted, targets, 0)
    nats = F.binary_cross_entropy_with_logits(accumulated(logits), accumulated(asked), reduction="none")
    return torch.where(counted, nats, 0).sum() / counted.sum().clamp(min=1)
