"""The averages of RWKV-4 by a sequence and then by steps, for processes that interpret Triton's kernels."""

import torch

from unrolled.ops.wkv import wkv, wkv_step


def in_pieces(k, v, log_decay, bonus, *, state):
    """Average over all tokens but two, and then step by step."""
    begin, state = wkv(k[:, :-2], v[:, :-2], log_decay, bonus, state=state)
    os = [begin]
    for t in range(k.shape[1] - 2, k.shape[1]):
        o, state = wkv_step(k[:, t], v[:, t], log_decay, bonus, state)
        os.append(o.unsqueeze(1))
    return torch.cat(os, 1), state
