"""Rounding to 4 bits that preserves the outputs of a matrix on a sample, rather than its weights.

Frantar, Ashkboos, Hoefler and Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", arXiv 2210.17323, algorithm 1: the weights are rounded input by input, and the
weights of the following inputs change so that they make up for the error as well as they can. Let H = X^T X
for the inputs X, and let U be upper triangular with U^T U = H^-1. Rounding the weights w_j of input j to q_j
changes the weights of the inputs i > j by -(w_j - q_j) U_ji / U_jj.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unrolled.decode.packing import GROUP, Rounding, fitted, in_steps
from unrolled.models import Decoder
from unrolled.models.checks import check_ids
from unrolled.models.mode import drawing_mode
from unrolled.ops.checks import shape

DAMPING = 0.01  # added to the diagonal of H, as a share of its mean


def roundings(model: Decoder, tokens: Tensor) -> dict[str, Rounding]:
    """Return how to round the matrices of a model, by the names of their layers, given a sample `[B, T]`."""
    return {name: partial(compensated, moments=H) for name, H in second_moments(model, tokens).items()}


def second_moments(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """Return H = X^T X / n of the inputs X `[n, in]` of all linear layers while the model reads `[B, T]`.

    If a layer runs on several inputs, as in RWKV-7 the one for queries, keys and values, H is their sum.
    """
    check_ids("sample", tokens, model.n_ids, model.embedding.weight)
    if not tokens.numel():
        raise ValueError(f"sample has shape {shape(tokens)}, but must have at least one token")
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            found[name] = found.get(name, 0) + x.T @ x / len(x)

        return hook

    with ExitStack() as stack, drawing_mode(model):
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                stack.callback(layer.register_forward_pre_hook(note(name)).remove)
        model(tokens)
    for name, H in found.items():
        if not H.isfinite().all():
            raise ValueError(f"the inputs of {name} on the sample are not all finite, but must be")
    return found


def compensated(w: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix `[out, in]` to 4 bits.

    Args:
        w: the matrix in fp32, with its inputs padded to whole groups.
        moments: H of its inputs, `[in, in]`, without the padding.

    Returns:
        whole numbers `[out, groups, 32]` from -8 to 7, and their scales `[out, groups, 1]`.
    """
    missing = w.shape[1] - len(moments)
    H = pad(moments, (0, missing, 0, missing))
    H.diagonal().add_(DAMPING * moments.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    left, parts, scales = w.double(), [], []
    for begin in range(0, w.shape[1], GROUP):
        group, own = left[:, :GROUP], U[begin : begin + GROUP, begin:]
        _, scale = fitted(group.float())
        rounded, errors = torch.empty_like(group), torch.empty_like(group)
        for j in range(GROUP):
            rounded[:, j] = in_steps(group[:, j], scale[:, 0]).clamp(-8, 7)
            errors[:, j] = (group[:, j] - rounded[:, j] * scale[:, 0]) / own[j, j]
            group = group - errors[:, j, None] * own[j, :GROUP]
        left = left[:, GROUP:] - errors @ own[:, GROUP:]
        parts.append(rounded.float())
        scales.append(scale)
    return torch.stack(parts, 1), torch.stack(scales, 1)
