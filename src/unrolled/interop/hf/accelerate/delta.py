"""The gated delta rules of transformers, by the kernels of `delta_rule`.

The functions have the arguments and results of those in the modelling files of transformers, with a gate for
each head, as in Qwen3-Next, or for each feature of the keys, as in Kimi-Linear. Unlike `delta_rule`, these
functions scale queries by 1 / sqrt(D), can normalise queries and keys, take fewer key heads than value heads,
and compute in fp32 whatever the dtype of the inputs.
"""

import torch
from torch import Tensor

from unrolled.interop.hf._packing import refuse_packing
from unrolled.interop.hf.accelerate.groups import by_group, from_groups
from unrolled.ops.delta import native, operator
from unrolled.ops.delta.chunked import Inputs
from unrolled.ops.dispatch import prefers
from unrolled.ops.observing import inferring

_EPSILON = 1e-6


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule over whole sequences.

    Args:
        query: `[B,T,G,D]`.
        key: `[B,T,G,D]`; value head h reads key head h // (H/G).
        value: `[B,T,H,M]`.
        g: natural logarithm of the gates `[B,T,H]`; or `[B,T,H,D]`, if there are H key heads too.
        beta: rates `[B,T,H]`.
        chunk_size: ignored; the kernel has its own.
        initial_state: `[B,H,D,M]`, zeros by default.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide queries and keys by sqrt(|x|^2 + 1e-6).
        kwargs: further arguments; those of packed sequences raise UnsupportedError.

    Returns:
        `o [B,T,H,M]` in the dtype of `query`, and the state in fp32 or None.
    """
    refuse_packing("the chunked delta rule", kwargs)
    (B, _, H, M), D = value.shape, key.shape[3]
    sizes = B, H, D, M
    state = key.new_zeros(sizes, dtype=torch.float32) if initial_state is None else initial_state.float()
    inputs = Inputs(query, key, value, beta, g, state)
    if use_qk_l2norm_in_kernel and _fits_kernel(inputs):
        o, after = _normalizing_kernel(inputs, g)
    else:
        q, k = _prepared(query, key, H, use_qk_l2norm_in_kernel)
        o, after = operator.delta_rule(inputs._replace(q=q, k=k, v=value.float()), None)
    return o.to(query.dtype), after if output_final_state else None


def recurrent_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Run one step of the rule if there is one token and a state, else run it over whole sequences."""
    refuse_packing("the recurrent delta rule", kwargs)
    if initial_state is None or value.shape[1] != 1:
        return chunk_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
    q, k = _prepared(query, key, value.shape[2], use_qk_l2norm_in_kernel)
    token = (q[:, 0], k[:, 0], value[:, 0].float(), beta[:, 0])
    o, after = operator.delta_rule_step(*token, initial_state.float(), g[:, 0])
    return o.to(query.dtype).unsqueeze(1), after if output_final_state else None


def _fits_kernel(inputs: Inputs) -> bool:
    """Whether the kernel that also normalises can run: on a CPU, without gradients, with a gate per head."""
    q, k, v, *_ = inputs
    fits = q.dtype == k.dtype == v.dtype and not inputs.by_feature
    return fits and inferring(*inputs) and prefers("native") and native.supports(q, v)


def _normalizing_kernel(inputs: Inputs, g: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rule on queries and keys that the kernel normalises when it reads them."""
    q, k, v, beta, _, state = inputs
    groups, scale = k.shape[2], k.shape[3] ** -0.5
    if groups == v.shape[2]:
        return native.forward(inputs, None, _EPSILON, scale)
    q, k = (by_group(x, groups).expand(-1, -1, v.shape[2] // groups, -1) for x in (q, k))
    beta, g = (by_group(x.unsqueeze(-1), groups).squeeze(-1) for x in (beta, g))
    rows = Inputs(q, k, by_group(v, groups), beta, g, state.reshape(len(q), -1, *state.shape[2:]))
    o, after = native.forward(rows, None, _EPSILON, scale)
    return from_groups(o, groups), after.reshape(state.shape)


def _prepared(query: Tensor, key: Tensor, heads: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Convert queries and keys to fp32, scale them, and repeat them to `heads` heads."""
    scale = query.shape[3] ** -0.5
    if normalize:
        return _normalized(query, heads, scale), _normalized(key, heads, 1.0)
    repeats = heads // key.shape[2]
    q, k = (x.float() if repeats == 1 else x.float().repeat_interleave(repeats, 2) for x in (query, key))
    return q * scale, k


def _normalized(x: Tensor, heads: int, scale: float) -> Tensor:
    """Return scale x / sqrt(|x|^2 + epsilon) for `x [B,T,G,D]`, in fp32, as `[B,T,heads,D]`.

    The product writes the repeated heads, which saves a copy.
    """
    x = x.float()
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = (length.square() + _EPSILON).rsqrt() * scale
    repeats = heads // x.shape[2]
    if repeats == 1:
        return x * factor
    return (x.unsqueeze(3) * factor.unsqueeze(3).expand(-1, -1, -1, repeats, -1)).flatten(2, 3)
