"""The averages of RWKV-4 in plain PyTorch: a parallel scan over some tokens at a time.

The sums before and after token t are scaled by exp(-m) with m_t = max_{j <= t} (k_j + (t - j) d). They follow
S_t = exp(m_{t-1} - m_t + d) S_{t-1} + exp(k_t - m_t) [v_t, 1], in which no factor is above 1. If m_{t-1} + d
came first, its rounding would change the decay. Packed sequences of similar lengths run together, padded on
the right.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ops.masks import without_padding
from unrolled.ops.operators import gradients
from unrolled.ops.packing import length_buckets, put_tokens
from unrolled.ops.scan import linear_scan

CHUNK = 256
"""How many tokens are scanned at a time on a CPU, so that they stay in the cache."""
LARGE_CHUNK = 4096
"""The same on other devices, where many small operations take longer than a few large ones."""
LOWEST = -1e30
"""A number below every k, but finite, so that it can be subtracted from itself."""
FASTEST = -1e4
"""The lowest log decay that is computed with: of lower ones, the sum over a chunk would have no digits left
for k. Both forget the token before, unless keys of a channel are 10,000 apart."""


class Inputs(NamedTuple):
    """The inputs of the averages."""

    k: Tensor  # [B,T,C]
    v: Tensor  # [B,T,C]
    log_decay: Tensor  # [C]
    bonus: Tensor  # [C]
    state: Tensor  # [B,3,C], in the accumulation dtype


def supports(inputs: Inputs) -> bool:
    """Whether this form can run these inputs: always."""
    return True


def forward(inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `o [B,T,C]` and the state after the last token, of each sequence."""
    if cu_seqlens is None:
        return _scan(inputs, padding)
    k, v, log_decay, bonus, state = inputs
    o, after = torch.zeros_like(v), torch.zeros_like(state)
    for rows, tokens, missing in length_buckets(cu_seqlens, k.shape[1]):
        k_part, v_part = (without_padding(x[0, tokens], missing) for x in (k, v))
        o_part, state_part = _scan(Inputs(k_part, v_part, log_decay, bonus, state[rows]), missing)
        o, after = put_tokens(o, tokens, missing, o_part), after.index_copy(0, rows, state_part)
    return o, after


def backward(
    grad_o: Tensor, grad_state: Tensor, inputs: Inputs, padding: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """Compute the gradients of the inputs."""
    return gradients(lambda *xs: forward(Inputs(*xs), padding, cu_seqlens), inputs, (grad_o, grad_state))


def _scan(inputs: Inputs, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    k, v, log_decay, bonus = (x.to(inputs.state.dtype) for x in inputs[:4])
    log_decay = log_decay.clamp(min=FASTEST)
    state = torch.cat([inputs.state[:, :2], inputs.state[:, 2:].detach()], dim=1)
    valid = None if padding is None else ~padding.unsqueeze(-1)
    os, chunk = [v[:, :0]], CHUNK if k.is_cpu else LARGE_CHUNK
    for first in range(0, k.shape[1], chunk):
        piece = slice(first, first + chunk)
        counted = None if valid is None else valid[:, piece]
        o, state = _scan_piece(k[:, piece], v[:, piece], log_decay, bonus, state, counted)
        os.append(o)
    return torch.cat(os, dim=1).to(inputs.v.dtype), state


def _scan_piece(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Average over some tokens, of which all or those marked `valid [B,L,1]` count."""
    sums, first_top = state[:, :2], state[:, 2:].detach()
    tops = _tops(k.detach(), log_decay.detach(), first_top, valid)
    before, after = tops[:, :-1], tops[:, 1:]
    steps = log_decay.expand(k.shape[1], -1) if valid is None else log_decay * valid
    decays = (before - after + steps).exp().unsqueeze(2)
    weights = (k - after).exp()
    if valid is not None:
        weights = weights.masked_fill(~valid, 0)
    added = torch.stack([weights * v, weights], dim=2)
    begun = torch.cat([decays[:, :1] * sums.unsqueeze(1) + added[:, :1], added[:, 1:]], dim=1)
    all_sums = torch.cat([sums.unsqueeze(1), linear_scan(decays, begun)], dim=1)

    ahead = k - before + bonus
    peak = ahead.detach().clamp(min=0)
    own, kept = (ahead - peak).exp(), (-peak).exp()
    num, den = all_sums[:, :-1].unbind(2)
    o = (kept * num + own * v) / (kept * den + own)
    if valid is not None:
        o = o.masked_fill(~valid, 0)
    return o, torch.cat([all_sums[:, -1], tops[:, -1:]], dim=1)


def _tops(k: Tensor, log_decay: Tensor, first: Tensor, valid: Tensor | None) -> Tensor:
    """Compute m before each of the L tokens and after the last, `[B,L+1,C]`."""
    if valid is None:
        number = torch.arange(1, k.shape[1] + 1, device=k.device, dtype=k.dtype).view(1, -1, 1)
    else:
        number = valid.cumsum(1)
        k = k.masked_fill(~valid, LOWEST)
    decayed = log_decay * number  # since the beginning
    peaks = k - decayed
    if k.shape[1] > 1:  # ONNX, which exports single steps, has no cummax
        peaks = peaks.cummax(1).values
    return torch.cat([first, torch.maximum(peaks, first) + decayed], dim=1)
