r"""Cross-entropy of a linear layer over many outcomes, without all its logits in memory.

    loss = -1/n sum_i [(1 - e) log p_i(y_i) + e/V sum_l log p_i(l)],        p_i = softmax(W x_i + b)

The sum over i runs over the n targets y_i that are not ignored, and the sum over l over all V outcomes. e is
the label smoothing of Szegedy et al. 2015 (arXiv 1512.00567, eq. 2 with u = 1/V). The gradient of the logits
is (p_i - (1 - e) 1[l = y_i] - e/V) / n.

The forward pass computes the logits of `ROWS` rows at a time and immediately turns them into their part of
the gradients of x, W and b. The backward pass only scales these gradients. This needs no more matrix products
than keeping all logits, and less time, since the logits stay in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import IGNORED
from unrolled.ops.dense import linear
from unrolled.ops.observing import transforming
from unrolled.ops.operators import register
from unrolled.ops.precision import accumulation_dtype, autocast_dtype, without_autocast

ROWS = 512  # rows whose logits are in memory; with fewer rows, adding to the gradient of W takes longer
LOGITS_IN_CACHE = 2**20


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy in nats (equation above), with derivatives of any order.

    Args:
        x: hidden vectors `[..., in]`.
        weight: W `[V, in]`.
        bias: b `[V]`, or None.
        target: y `[...]` long; -100 is ignored.
        smoothing: e.

    Returns:
        a scalar in at least fp32; 0 if every target is ignored. Under autocast, products run in its dtype.
    """
    cast = autocast_dtype(x.device)
    dtype = x.dtype if cast is None or x.dtype == torch.float64 else cast
    x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    if transforming():
        return _plain(x, weight, bias, target, dtype, smoothing)[0]
    recording = torch.is_grad_enabled()
    wanted = [recording and y is not None and y.requires_grad for y in (x, weight, bias)]
    loss: Tensor = _operator(x, weight, bias, target, dtype, smoothing, wanted)[0]
    return loss


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    smoothing: float,
    *_: object,
) -> tuple[Tensor]:
    """Compute the loss with all logits at once."""
    with without_autocast(x.device):
        logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        logits = logits.to(accumulation_dtype(dtype))
        total = F.cross_entropy(
            logits, target, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
        )
        return (total / _count(target),)


def _count(target: Tensor) -> Tensor:
    return (target != IGNORED).sum().clamp(min=1)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    smoothing: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss and, where wanted, n times its gradients."""
    nll = x.new_zeros(len(x), dtype=accumulation_dtype(dtype))
    gradients = _like_gradients(x, weight, dtype, wanted)
    for gradient in gradients:
        gradient.zero_()
    d_x, d_weight, d_bias = gradients
    with without_autocast(x.device):
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        for first in range(0, len(x), ROWS):
            rows = slice(first, first + ROWS)
            logits = linear(x[rows], weight, bias)
            _losses(logits, target[rows], smoothing, nll[rows], any(wanted))
            if wanted[0]:
                d_x[rows] = linear(logits, weight.mT)
            if wanted[1] and dtype == d_weight.dtype:
                d_weight.addmm_(logits.mT, x[rows])
            elif wanted[1]:
                d_weight += logits.mT @ x[rows]
            if wanted[2]:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
    return nll.sum() / _count(target), d_x, d_weight, d_bias


def _losses(logits: Tensor, target: Tensor, smoothing: float, nll: Tensor, gradients: bool) -> None:
    """Write the loss of each row to `nll` and, if asked, overwrite the logits with its gradient.

    The rows are processed a few at a time, so that they stay in the cache. The largest probability p belongs
    to the largest logit z, so log p_y = z_y - z + log p, and every logit is exponentiated once.
    """
    few = max(1, LOGITS_IN_CACHE // logits.shape[-1]) if logits.is_cpu else ROWS
    parts = (torch.split(x, few) for x in (logits, target.unsqueeze(-1), nll.unsqueeze(-1)))
    for x, y, loss in zip(*parts, strict=True):
        ignored = y == IGNORED
        index = y.masked_fill(ignored, 0)
        z = x.to(nll.dtype)
        p, top = z.softmax(-1), z.amax(-1, keepdim=True)
        loss += top - (1 - smoothing) * z.gather(-1, index) - p.amax(-1, keepdim=True).log()
        if smoothing:
            loss -= smoothing * z.mean(-1, keepdim=True)
        loss.masked_fill_(ignored, 0)
        if gradients:
            p.scatter_add_(-1, index, p.new_full(index.shape, smoothing - 1))
            if smoothing:
                p -= smoothing / x.shape[-1]
            x.copy_(p.masked_fill_(ignored, 0))


def _like_gradients(
    x: Tensor, weight: Tensor, dtype: torch.dtype, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients; those of W and b are sums over rows, so they are in at least fp32."""
    exact = accumulation_dtype(dtype)
    return (
        x.new_empty(x.shape if wanted[0] else 0, dtype=dtype),
        weight.new_empty(weight.shape if wanted[1] else 0, dtype=exact),
        weight.new_empty(len(weight) if wanted[2] else 0, dtype=exact),
    )


def _like_outputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    smoothing: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    return x.new_empty((), dtype=accumulation_dtype(dtype)), *_like_gradients(x, weight, dtype, wanted)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *saved: Tensor
) -> list[Tensor]:
    """Scale the gradients that the forward pass computed, which come first in `saved`."""
    factor, inputs = grad / _count(target), (x, weight, weight if bias is None else bias)
    return [(gradient * factor).to(like.dtype) for gradient, like in zip(saved[:3], inputs, strict=True)]


def _like_scaled(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *saved: Tensor
) -> list[Tensor]:
    inputs = (x, weight, weight if bias is None else bias)
    return [like.new_empty(gradient.shape) for gradient, like in zip(saved[:3], inputs, strict=True)]


_operator = register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target,"
    " ScalarType dtype, float smoothing, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor target,"
    " Tensor d_x, Tensor d_weight, Tensor d_bias,"
    " ScalarType dtype, float smoothing, bool[] wanted) -> Tensor[]",
    _forward,
    _backward,
    _plain,
    like_outputs=_like_outputs,
    like_gradients=_like_scaled,
    n_inputs=3,
    n_tensors=4,
    n_outputs=1,
    saved_outputs=[1, 2, 3],
)
