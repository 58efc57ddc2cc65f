"""Time of gates per head and of the delta rule: forward and backward pass in C++, in fp32 on one thread.

python benchmarks/gated.py
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unrolled.ops.delta import delta_rule
from unrolled.ops.linear import linear_attention

SIZES = [
    (1, 4096, 8, 32),
    (1, 4096, 8, 64),
    (1, 4096, 8, 128),
    (8, 256, 4, 48),
]  # batch, tokens, heads, width
ROUNDS, WARM_UP = 24, 3


def linear(q: Tensor, k: Tensor, v: Tensor, _: Tensor, log_decay: Tensor) -> Tensor:
    """Attend with a gate per head, without a divisor."""
    return linear_attention(q, k, v, causal=True, normalize=False, log_decay=log_decay)


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, _: Tensor) -> Tensor:
    """Apply the delta rule without gates."""
    return delta_rule(q, k, v, beta)[0]


def gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """Apply the delta rule with a gate per head."""
    return delta_rule(q, k, v, beta, log_decay=log_decay)[0]


def measure(form: Callable[..., Tensor], B: int, T: int, H: int, D: int) -> None:
    """Print the median times of both passes."""
    q, k, v = (torch.randn(B, T, H, D) for _ in range(3))
    inputs = [q, normalize(k, dim=-1), v, torch.rand(B, T, H), -0.1 * torch.rand(B, T, H)]
    for x in inputs:
        x.requires_grad_()
    grad, times = torch.randn(B, T, H, D), []
    for _ in range(WARM_UP + ROUNDS):
        start = perf_counter()
        o = form(*inputs)
        middle = perf_counter()
        torch.autograd.grad(o, inputs, grad, allow_unused=True)
        times.append((middle - start, perf_counter() - middle))
    forward, backward = (1e3 * median(x) for x in zip(*times[WARM_UP:], strict=True))
    print(f"{form.__name__} {[B, T, H, D]}: forward {forward:.1f} ms, backward {backward:.1f} ms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for sizes in SIZES:
        for form in (linear, delta, gated_delta):
            measure(form, *sizes)
