"""The delta rule by explicit matrices."""

import torch


def definition(q, k, v, beta, log_decay, state):
    """S_t = (I - b_t k_t k_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T with explicit matrices, o_t = S_t^T q_t."""
    (B, T, H, D), (G, M) = q.shape, v.shape[2:]
    outputs, S = [], state
    for t in range(T):
        rate, gates = beta[:, t, :, None, None], log_decay[:, t].exp().reshape(B, G, -1).expand(B, G, D)
        key, value = k[:, t, :, :, None], v[:, t, :, :, None]
        erased = torch.eye(D, dtype=q.dtype) - rate * key @ key.mT
        S = erased @ torch.diag_embed(gates) @ S + rate * key @ value.mT
        outputs.append((S.repeat_interleave(H // G, 1).mT @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, 1) if outputs else q.new_zeros(B, 0, H, M), S
