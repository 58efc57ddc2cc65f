r"""Linear attention with a gate for every feature, chunk by chunk in plain PyTorch.

The state is passed between chunks of C tokens. Inside a chunk, the weight of key j for query i > j is

    W_ij = sum_r q_ir k_jr A_ijr        A_ijr = a_j+1,r ... a_ir        (and W_ii = q_i . k_i)

which is a product of matrices wherever A splits into a factor of i and a factor of j. At any point m between
j and i it does: A_ij = F_i E_j with F_i = a_m+1 ... a_i and E_j = a_j+1 ... a_m, neither of them above 1. So
a chunk is halved, its halves are halved, and so on down to single tokens. Exactly one of these cuts separates
each pair i > j, and W takes one product of matrices per cut. F and E of a block come from those of its
halves:

    F = [F_l, F_l,last F_r]        E = [E_l F_r,last, E_r]        a single token: F = a, E = 1

With F and E of the whole chunk, O = W V + (Q F) S and S' = F_last S + (K E)^T V.

Yang et al. 2023 (arXiv 2312.06635, section 4.3) cut once, into blocks of 16, and compute one exponential for
every pair and feature of the blocks on the diagonal. Here it is one exponential for every token and feature.

The sequence is processed in spans of chunks, one after the other, each short enough to stay in a CPU's cache.

Only the inputs are kept for the backward pass, which computes all of this again and goes through the cuts
from the widest to the narrowest. The gradient of the logarithm of a product of gates is added to that of each
gate in the product, so the gradients of the gates are sums. The shorter formula q_i * dq_i - k_i * dk_i
subtracts large equal parts and loses digits.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from unrolled.ops.chunks import join_chunks, scan, scan_back, split_chunks, sum_heads
from unrolled.ops.precision import accumulation_dtype, without_autocast

LONGEST = 64  # tokens in a chunk; a power of two
CACHED = 2**17  # elements of k that are processed at a time on a CPU


class Cut(NamedTuple):
    """Products of gates in each of the C/s blocks of s tokens, which lie to the left or right of a cut."""

    from_start: Tensor  # F [X,n,1,C/s,s,R]: of the gates up to and including i
    to_end: Tensor  # E [X,n,1,C/s,s,R]: of the gates after j

    def right(self, q: Tensor) -> Tensor:
        """Queries `[X,n,P,C,R]` right of the cuts, decayed since the cut: `[X,n,P,C/2s,s,R]`."""
        return self.halves(q)[1] * self.from_start[..., 1::2, :, :]

    def left(self, k: Tensor) -> Tensor:
        """Keys `[X,n,1,C,R]` left of the cuts, decayed until the cut: `[X,n,1,C/2s,s,R]`."""
        return self.halves(k)[0] * self.to_end[..., ::2, :, :]

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """View what lies left and right of the cuts: `[X,n,P,C,R]` -> twice `[X,n,P,C/2s,s,R]`."""
        n_blocks, s = self.from_start.shape[-3:-1]
        left, right = x.view(*x.shape[:3], n_blocks // 2, 2, s, x.shape[4]).unbind(4)
        return left, right


class Chunks(NamedTuple):
    """The inputs in chunks and in the accumulation dtype; see `ops.chunks`."""

    q: Tensor  # [X,n,P,C,R]
    k: Tensor  # [X,n,1,C,R]
    v: Tensor  # [X,n,1,C,M]
    decay: Tensor  # a [X,n,1,C,R]
    state: Tensor  # [X,1,1,R,M]


def forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,H,M]` and the state after the last key, for T = S, by differentiable operations."""
    outs = []
    for span in _spans(k):
        o, state = _forward_span(q[:, span], k[:, span], v[:, span], log_decay[:, span], state)
        outs.append(o)
    return torch.cat(outs, dim=1), state


def backward(
    grad_o: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> list[Tensor]:
    """Compute the gradients of `q, k, v, log_decay, state`."""
    spans = _spans(k)
    before = [state]
    for span in spans[:-1]:
        before.append(_state_after(k[:, span], v[:, span], log_decay[:, span], before[-1]))
    by_span = []
    for span, state in zip(reversed(spans), reversed(before), strict=True):
        inputs = q[:, span], k[:, span], v[:, span], log_decay[:, span], state
        *gradients, grad_state = _backward_span(grad_o[:, span], grad_state, *inputs)
        by_span.append(gradients)
    return [*(torch.cat(parts[::-1], dim=1) for parts in zip(*by_span, strict=True)), grad_state]


def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `o [B,H,M]` and the new state from one token of each."""
    (B, H, R), G, dtype = q.shape, k.shape[1], state.dtype
    with without_autocast(q.device):
        key, value = k.to(dtype).unsqueeze(-1), v.to(dtype).unsqueeze(-2)
        state = state * log_decay.to(dtype).exp().unsqueeze(-1) + key * value
        o = q.to(dtype).reshape(B, G, H // G, R) @ state
    return o.flatten(1, 2).to(v.dtype), state


def _spans(k: Tensor) -> list[slice]:
    """Split the sequence into spans of whole chunks; on a CPU, each fits in the cache."""
    B, T, G, R = k.shape
    fitting = CACHED // max(1, B * G * R) if k.device.type == "cpu" else T
    length = max(LONGEST, fitting // LONGEST * LONGEST)
    return [slice(start, start + length) for start in range(0, max(T, 1), length)]


def _state_after(k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    with without_autocast(k.device):
        k, v, log_decay = (x.to(state.dtype) for x in (k, v, log_decay))
        passed = log_decay.flip(1).cumsum(1).flip(1)  # log of a_j ... a_T
        k = k * pad(passed[:, 1:], (0, 0, 0, 0, 0, 1)).exp()
        added: Tensor = torch.einsum("btgr,btgm->bgrm", k, v)
        return passed[:, 0].exp().unsqueeze(-1) * state + added


def _forward_span(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    (B, T, _, _), G = q.shape, k.shape[2]
    with without_autocast(q.device):
        x = _chunks(q, k, v, log_decay, state)
        weights, from_start, to_end = products(x.q, x.k, cuts_of(x.decay))
        S = scan(x.state, (x.k * to_end).mT @ x.v, from_start[..., -1:, :].mT)
        o = weights @ x.v + (x.q * from_start) @ S[:, :-1]
        # A view of S would keep the states of all chunks alive.
        return join_chunks(o, B, T, G).to(v.dtype), S[:, -1].reshape(state.shape).clone()


def _backward_span(
    grad_o: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, T, _, _), G = q.shape, k.shape[2]
    with without_autocast(q.device):
        x = _chunks(q, k, v, log_decay, state)
        g = split_chunks(grad_o.to(x.v.dtype), x.q.shape[1], x.q.shape[3], G)
        cuts = list(cuts_of(x.decay))
        weights, from_start, to_end = products(x.q, x.k, cuts)
        q_from_start, k_to_end, through = x.q * from_start, x.k * to_end, from_start[..., -1:, :].mT
        S = scan(x.state, k_to_end.mT @ x.v, through)[:, :-1]
        dS = scan_back(grad_state.reshape(x.state.shape), sum_heads(q_from_start.mT @ g), through)

        # The gradients through the states.
        dv = sum_heads(weights.mT @ g) + k_to_end @ dS[:, 1:]
        dq = (g @ S.mT) * from_start
        dk = (x.v @ dS[:, 1:].mT) * to_end
        d_from_start, d_to_end = sum_heads(x.q * dq), x.k * dk  # gradients of the logarithms
        d_from_start[..., -1, :] += (through * S * dS[:, 1:]).sum(-1)

        # The gradients through the weights, cut by cut.
        d_weights = g @ x.v.mT
        for cut in reversed(cuts[:-1]):
            s = cut.from_start.shape[-2]
            d_parted = _parted(d_weights, s)
            dq_right = (d_parted @ cut.left(x.k)) * cut.from_start[..., 1::2, :, :]
            dk_left = sum_heads(d_parted.mT @ cut.right(x.q)) * cut.to_end[..., ::2, :, :]
            cut.halves(dq)[1].add_(dq_right)
            cut.halves(dk)[0].add_(dk_left)
            (from_left, from_right), (to_left, _) = cut.halves(d_from_start), cut.halves(d_to_end)
            from_left[..., -1, :] += from_right.sum(-2)
            from_right[..., -1, :] += to_left.sum(-2)
            from_right.add_(sum_heads(cut.halves(x.q)[1] * dq_right))
            to_left.add_(cut.halves(x.k)[0] * dk_left)
        d_itself = d_weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq.addcmul_(d_itself, x.k)
        dk.add_(sum_heads(d_itself * x.q))
        return (
            join_chunks(dq, B, T, G).to(q.dtype),
            join_chunks(dk, B, T, G).to(k.dtype),
            join_chunks(dv, B, T, G).to(v.dtype),
            join_chunks(d_from_start, B, T, G).to(log_decay.dtype),
            dS[:, 0].reshape(state.shape).clone(),
        )


def _chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Chunks:
    (B, T, _, R), (_, _, G, M) = q.shape, v.shape
    n, C = chunk_sizes(T)
    dtype = accumulation_dtype(q.dtype)
    q, k, v, log_decay = (split_chunks(x.to(dtype), n, C, G) for x in (q, k, v, log_decay))
    return Chunks(q, k, v, log_decay.exp(), state.reshape(B * G, 1, 1, R, M))


def chunk_sizes(T: int, longest: int = LONGEST) -> tuple[int, int]:
    """Number of chunks, and number of tokens in each, a power of two."""
    C = min(longest, 1 << max(T - 1, 0).bit_length())
    return max(1, -(-T // C)), C


def cuts_of(decay: Tensor) -> Iterator[Cut]:
    """Products of the gates `[X,n,1,C,R]` in blocks of 1, 2, 4 ... C tokens."""
    cut = Cut(decay.unsqueeze(-2), torch.ones_like(decay).unsqueeze(-2))
    yield cut
    while cut.from_start.shape[-3] > 1:
        (l_from, r_from), (l_to, r_to) = ((x[..., ::2, :, :], x[..., 1::2, :, :]) for x in cut)
        from_start = torch.cat([l_from, l_from[..., -1:, :] * r_from], dim=-2)
        cut = Cut(from_start, torch.cat([l_to * r_from[..., -1:, :], r_to], dim=-2))
        yield cut


def products(q: Tensor, k: Tensor, cuts: Iterable[Cut]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute W `[X,n,P,C,C]` of queries and keys, and F and E of whole chunks, `[X,n,1,C,R]` each."""
    cuts = iter(cuts)
    cut = next(cuts)
    # Multiplying by E of a token, which is 1, makes W depend on the gates: torch.func.vmap may map over the
    # gates alone.
    weights = torch.diag_embed((q * k * cut.to_end.squeeze(-2)).sum(-1))
    for wider in cuts:
        _parted(weights, cut.to_end.shape[-2]).copy_(cut.right(q) @ cut.left(k).mT)
        cut = wider
    return weights, cut.from_start.squeeze(3), cut.to_end.squeeze(3)


def _parted(weights: Tensor, s: int) -> Tensor:
    """View the pairs separated by the cuts of blocks of 2s tokens: `[X,n,P,C,C]` -> `[X,n,P,C/2s,s,s]`."""
    n_blocks = weights.shape[-1] // (2 * s)
    blocks = weights.view(*weights.shape[:3], n_blocks, 2 * s, n_blocks, 2 * s).diagonal(dim1=3, dim2=5)
    return blocks[..., s:, :s, :].movedim(-1, 3)
