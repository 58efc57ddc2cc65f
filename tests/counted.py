"""The definition of every sparse mechanism: softmax attention in which each key counts a number of times."""

import torch
from torch import Tensor


def counted_attention(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """`q [B,T,H,D]`, `k [B,S,G,D]`, `v [B,S,G,M]`, `counts` like `[B,H,T,S]`: `o [B,T,H,M]`, `lse [B,T,H]`."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    nothing = ~(counts > 0).any(-1, keepdim=True)
    scores = scores + torch.where(nothing, 1, counts).to(q.dtype).log()
    o = torch.einsum("bhts,bshm->bthm", scores.softmax(-1).masked_fill(nothing, 0), v)
    lse = scores.logsumexp(-1).masked_fill(nothing.squeeze(-1), -torch.inf)
    return o, lse.transpose(1, 2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """A standard normal tensor of a generator of its own, that wants a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def assert_same(found: list[Tensor], expected: list[Tensor], inputs: list[Tensor]) -> None:
    """Fail unless outputs agree to 1e-12, and so do the gradients of `inputs` for one fixed random loss."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    sums = []
    for outputs in (found, expected):
        loss = torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(outputs):
            weights = draw(*x.shape, seed=100 + i).detach()
            loss = loss + (torch.where(x == -torch.inf, 0, x) * weights).sum()
        if not loss.requires_grad:
            return
        sums.append(
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        )
    for x, y in zip(*sums, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
