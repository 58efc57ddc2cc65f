"""The averages of RWKV-4 in transformers, by the kernels of `unrolled.ops.wkv`."""

import torch
from torch import Tensor

from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.wkv import empty_state, operator
from unrolled.ops.wkv.plain import Inputs


def rwkv_linear_attention(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
) -> tuple[Tensor, list[Tensor] | None]:
    """Average whole sequences or one token; the function of transformers has the same name.

    Args:
        time_decay: logarithms of the paces `[C]`.
        time_first: bonuses `[C]`.
        key: `[B,T,C]`.
        value: `[B,T,C]`.
        state: numerators, denominators and their common exponents, `[B,C]` each.
        return_state: return the state even if none was given.

    Returns:
        the averages `[B,T,C]`, and the new state or None.
    """
    dtype = accumulation_dtype(*(x.dtype for x in (time_decay, time_first, key, value)))
    if state is None:
        sums = empty_state(len(key), key.shape[2], key.new_empty(0, dtype=dtype))
    else:
        sums = torch.stack(state, dim=1).to(dtype)
    log_decay = -time_decay.to(dtype).exp()
    o, after = operator.wkv(Inputs(key, value, log_decay, time_first, sums), None, None)
    return o.to(key.dtype), list(after.unbind(1)) if return_state or state is not None else None
