"""The rule of a diagonal plus low rank, written as in its definition, for the tests."""

import torch
from torch import Tensor


def definition(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """S_t = (diag(w_t) + b_t a_t^T) S_{t-1} + k_t v_t^T and o_t = S_t^T q_t, head by head."""
    outs, S = [], state
    for t in range(q.shape[1]):
        transition = torch.diag_embed(log_decay[:, t].exp()) + torch.einsum("bhd,bhe->bhde", b[:, t], a[:, t])
        S = transition @ S + torch.einsum("bhd,bhm->bhdm", k[:, t], v[:, t])
        outs.append(torch.einsum("bhdm,bhd->bhm", S, q[:, t]))
    return torch.stack(outs, dim=1) if outs else v, S
