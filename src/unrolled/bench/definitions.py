"""The functions that contenders must compute, written out in fp64: all pairs of a query and a key, by blocks.

Gradients come from autograd. Each block of queries is recomputed in the backward pass, so that memory stays
small at lengths where all weights together would not fit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

ROWS = 256  # queries per block


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax: bool,
    left: int | None = None,
    right: int | None = 0,
    normalize: bool = True,
) -> Tensor:
    """o_i = sum_j w_ij v_j / sum_j w_ij over j in [i - left, i + right], with w_ij = q_i . k_j or its exp.

    Args:
        q, k: `[B,N,H,D]`.
        v: `[B,N,H,M]`.
        softmax: w_ij = exp(q_i . k_j / sqrt(D)) instead of q_i . k_j.
        left, right: how far a query reads; None for all keys on that side. The default is causal.
        normalize: divide by the sum of the weights.
    """
    q, k, v = q.double(), k.double(), v.double()
    N, outputs = q.shape[1], []
    for first in range(0, N, ROWS):
        last = min(first + ROWS, N)
        low = 0 if left is None else max(0, first - left)
        high = N if right is None else min(N, last + right)
        i = torch.arange(first, last, device=q.device).unsqueeze(-1)
        j = torch.arange(low, high, device=q.device)
        read = torch.ones(last - first, high - low, dtype=torch.bool, device=q.device)
        if left is not None:
            read &= j >= i - left
        if right is not None:
            read &= j <= i + right
        block = q[:, first:last], k[:, low:high], v[:, low:high], read, softmax, normalize
        outputs.append(checkpoint(_block, *block, use_reentrant=False))
    return torch.cat(outputs, 1)


def _block(q: Tensor, k: Tensor, v: Tensor, read: Tensor, softmax: bool, normalize: bool) -> Tensor:
    weights = torch.einsum("bthd,bshd->bhts", q, k)
    if softmax:
        scores = (weights / q.shape[-1] ** 0.5).masked_fill(~read, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    else:
        weights = weights * read
    o = torch.einsum("bhts,bshm->bthm", weights, v)
    return o / weights.sum(-1).transpose(1, 2).unsqueeze(-1) if normalize else o


def gated(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Linear attention with a gate for every feature, all `[B,N,H,D]` (arXiv 2312.06635, §4.1).

    S <- diag(exp(log_decay_t)) S + k_t v_t^T;  o_t = S^T q_t
    """
    state, outs = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), []
    for t in range(q.shape[1]):
        state = log_decay[:, t].exp().unsqueeze(-1) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], state))
    return torch.stack(outs, dim=1)


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """The delta rule, with gates of every channel `[B,N,H,D]` or head `[B,N,H]` (arXiv 2510.26692, eq. 1).

    S <- diag(exp(log_decay_t)) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = S^T q_t
    """
    state, outs = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), []
    gates = log_decay.exp().reshape(*beta.shape, -1, 1)
    for t in range(q.shape[1]):
        state = gates[:, t] * state
        missing = v[:, t] - torch.einsum("bhd,bhdm->bhm", k[:, t], state)
        written = beta[:, t].unsqueeze(-1) * missing
        state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        outs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], state))
    return torch.stack(outs, dim=1)


def dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor) -> Tensor:
    """The rule of a diagonal plus low rank, all `[B,N,H,D]` (arXiv 2503.14456).

    S <- (diag(exp(log_decay_t)) + b_t a_t^T) S + k_t v_t^T;  o_t = S^T q_t
    """
    state, outs = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), []
    for t in range(q.shape[1]):
        read = torch.einsum("bhd,bhdm->bhm", a[:, t], state)
        kept = log_decay[:, t].exp().unsqueeze(-1) * state + b[:, t].unsqueeze(-1) * read.unsqueeze(-2)
        state = kept + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], state))
    return torch.stack(outs, dim=1)


def with_gradients(output: Tensor, inputs: Sequence[Tensor], grad_output: Tensor) -> list[Tensor]:
    """Return the output and the gradients of sum(output * grad_output) with respect to the inputs."""
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_output.to(output))]


def decoder(
    weights: Mapping[str, Tensor], tokens: Tensor, n_layers: int, n_heads: int, softmax: bool
) -> Tensor:
    """Logits `[B,N,V]` of a post-norm decoder with gelu and no positions, from the weights of our `Decoder`.

    x <- norm(x + attention(x));  x <- norm(x + W2 gelu(W1 x))    (Vaswani et al. 2017, arXiv 1706.03762, §3)
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    x = weights["embedding.weight"][tokens]
    for layer in range(n_layers):
        block = f"stack.blocks.{layer}"
        heads = linear(x, f"{block}.attention.qkv_proj").reshape(*tokens.shape, 3, n_heads, -1)
        q, k, v = heads.unbind(-3)
        if not softmax:
            q, k = F.elu(q) + 1, F.elu(k) + 1
        attended = attention(q, k, v, softmax=softmax).flatten(-2)
        x = norm(x + linear(attended, f"{block}.attention.out_proj"), f"{block}.attention_norm")
        y = linear(F.gelu(linear(x, f"{block}.ff.up")), f"{block}.ff.down")
        x = norm(x + y, f"{block}.ff_norm")
    return F.linear(x, weights["head.project.weight"])
