"""The selective scan of the first Mamba in transformers, by the kernels of `selective_scan`.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = (h_t C_t + D x_t) silu(z_t)

Gu and Dao 2023 (arXiv 2312.00752), algorithm 2. The functions have the names, arguments and results of those
in the modelling files of transformers, where the channel axis comes before the token axis: `[B,C,T]`.
"""

from torch import Tensor
from torch.nn.functional import silu

from unrolled.interop.hf._packing import refuse_packing
from unrolled.interop.hf.accelerate.ssd import step_sizes
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.selective_scan import operator
from unrolled.ops.selective_scan.plain import Inputs


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan whole sequences from a state of zeros.

    Args:
        hidden_states: x `[B,C,T]`.
        dt: step sizes `[B,C,T]`, before `delta_bias [C]` and softplus.
        A: `[C,N]`, negative.
        B: `[B,N,T]`.
        C: `[B,N,T]`.
        D: weights of the skip connection `[C]`.
        z: gates `[B,C,T]`, before SiLU.
        delta_bias: added to `dt`.
        delta_softplus: apply softplus to `dt`.
        return_last_state: also return the state after the last token, `[B,C,N]`.
        use_mambapy: ignored, as is `use_associative_scan`: they choose between ways to compute the same.
        use_associative_scan: ignored.
        kwargs: further arguments; those of packed sequences raise UnsupportedError.

    Returns:
        y `[B,C,T]` and, with `return_last_state`, the state in fp32 (fp64 for fp64 inputs).
    """
    refuse_packing("mamba_selective_scan", kwargs)
    x, sizes = hidden_states.mT, step_sizes(dt.mT, delta_bias, delta_softplus)
    dtype = accumulation_dtype(x.dtype, sizes.dtype, A.dtype, B.dtype, C.dtype)
    state = x.new_zeros(len(x), *A.shape, dtype=dtype)
    y, after = operator.selective_scan(Inputs(x, sizes, A, B.mT, C.mT, state), None)
    if D is not None:
        y = y.addcmul(x, D)
    if z is not None:
        y = y * silu(z.mT)
    return (y.mT, after) if return_last_state else y.mT


def mamba_selective_state_update(
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
    """Run one token, and update `state [B,C,N]` in place.

    Args:
        state: it is modified.
        hidden_states: x `[B,C]`.
        dt: step sizes `[B,C]`, before `dt_bias [C]` and softplus.
        A: `[C,N]`, negative.
        B: `[B,N]`.
        C: `[B,N]`.
        D: weights of the skip connection `[C]`.
        dt_bias: added to `dt`.
        dt_softplus: apply softplus to `dt`.
        z: gates `[B,C]`, before SiLU.
        kwargs: further arguments of the kernel for GPUs, ignored.

    Returns:
        y `[B,C]` in the dtype of `hidden_states`.
    """
    x, sizes, b, c = (y.unsqueeze(1) for y in (hidden_states, step_sizes(dt, dt_bias, dt_softplus), B, C))
    y, after = operator.selective_scan_step(Inputs(x, sizes, A, b, c, state))
    state.copy_(after)
    y = y.squeeze(1)
    if D is not None:
        y = y.addcmul(hidden_states, D)
    return (y if z is None else y * silu(z)).to(hidden_states.dtype)
