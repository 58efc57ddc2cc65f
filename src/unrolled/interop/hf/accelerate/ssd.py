"""The state-space duality of Mamba-2 in transformers, by the kernels of `linear_attention`.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t + D x_t

For each head, A is a number, so this is linear attention without a normaliser, with queries C, keys B, values
dt x and log gates dt A. Dao and Gu 2024 (arXiv 2405.21060), section 5. The functions have the names,
arguments and results of those in the modelling files of transformers, where the state `[B,H,P,N]` is
transposed.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from unrolled.interop.hf._packing import refuse_packing
from unrolled.interop.hf.accelerate.groups import by_group, from_groups
from unrolled.ops.linear import operator
from unrolled.ops.linear.chunked import Inputs, Options


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan whole sequences.

    Args:
        hidden_states: x `[B,T,H,P]`.
        dt: step sizes `[B,T,H]`, before `dt_bias [H]` and softplus, then limited to `dt_limit`.
        A: `[H]`, negative.
        B: `[B,T,G,N]`; head h reads group h // (H/G).
        C: `[B,T,G,N]`.
        chunk_size: ignored; the kernel has its own.
        D: weights of the skip connection `[H]`.
        dt_bias: added to `dt`.
        initial_states: `[B,H,P,N]`, zeros by default.
        dt_softplus: apply softplus to `dt`.
        dt_limit: smallest and largest step size.
        return_final_states: also return the state after the last token, `[B,H,P,N]`.
        kwargs: further arguments; those of packed sequences raise UnsupportedError.

    Returns:
        y `[B,T,H,P]` in fp32 and, with `return_final_states`, the state in fp32.
    """
    refuse_packing("mamba2_chunk_scan", kwargs)
    x, (rows, _, H, P), (G, N) = hidden_states, hidden_states.shape, B.shape[2:]
    dt = step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
    keys = (by_group(each.float(), G).expand(-1, -1, H // G, -1) for each in (C, B))
    inputs = (by_group(each, G) for each in (x.float() * dt.unsqueeze(-1), (dt * A.float()).unsqueeze(-1)))
    (q, k), (v, log_decay) = keys, inputs
    state = None
    if initial_states is not None:
        state = initial_states.float().mT.reshape(rows * G, H // G, N, P)
        if torch.is_grad_enabled():  # transformers overwrites its state before the backward pass
            state = state.clone()
    zeros = k.new_zeros(len(k), H // G, N)
    o, after, _ = operator.linear_attention(
        Inputs(q, k, v, log_decay.squeeze(-1), state, None if state is None else zeros),
        Options(None, causal=True, normalize=False),
        None,
    )
    y = from_groups(o, G)
    if D is not None:
        y = y.addcmul(x.float(), D.float().unsqueeze(-1))
    return (y, after.reshape(rows, H, N, P).mT) if return_final_states else y


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: object,
) -> Tensor:
    """Run one token, and update `state [B,H,P,N]` in place.

    Args:
        state: the state in fp32; it is modified.
        hidden_states: x `[B,H,P]`.
        dt: `[B,H,P]`, the same for all P.
        A: `[H,P,N]`, the same for all P and N.
        B: `[B,G,N]`.
        C: `[B,G,N]`.
        D: `[H,P]`.
        dt_bias: `[H,P]`, the same for all P.
        dt_softplus: apply softplus to `dt`.
        z: gates `[B,H,P]`, before SiLU.
        kwargs: further arguments of the kernel for GPUs, ignored.

    Returns:
        y `[B,H,P]` in the dtype of `hidden_states`.
    """
    x, repeats = hidden_states.float(), state.shape[1] // B.shape[1]
    bias = None if dt_bias is None else dt_bias[:, 0]
    dt = step_sizes(dt[..., 0], bias, dt_softplus).float().unsqueeze(-1)
    key, query = (each.float().repeat_interleave(repeats, 1) for each in (B, C))
    state.mul_((dt * A[:, 0, :1]).exp().unsqueeze(-1))
    state.addcmul_((dt * x).unsqueeze(-1), key.unsqueeze(2))
    y = (state @ query.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        y = y.addcmul(x, D.float())
    y = y.to(hidden_states.dtype)
    return y if z is None else y * silu(z)


def step_sizes(dt: Tensor, bias: Tensor | None, through_softplus: bool) -> Tensor:
    """Add the bias and apply softplus, in the dtype of `dt`, as in transformers."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return softplus(dt) if through_softplus else dt
