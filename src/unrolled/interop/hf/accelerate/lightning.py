"""The lightning attention of MiniMax in transformers, by the kernels of `linear_attention`.

    S_t = exp(-s) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t

with a constant s per head. This is linear attention with constant gates and without a normaliser. Qin et al.
2024 (arXiv 2401.04658), section 3.2; MiniMax 2025 (arXiv 2501.08313), section 2.2.
"""

from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import sigmoid

from unrolled.interop.hf._cache_name import either
from unrolled.interop.hf._packing import refuse_packing
from unrolled.ops.linear import LinearState, linear_attention
from unrolled.ops.precision import accumulation_dtype


class _Layer(Protocol):
    """The attributes of a layer that `forward` reads."""

    qkv_proj: nn.Module
    act_fn: nn.Module
    norm: nn.Module
    output_gate: nn.Module
    out_proj: nn.Module
    slope_rate: Tensor  # s [H,1,1]
    num_attention_heads: int
    layer_idx: int


class _Cache(Protocol):
    """The part of `MiniMaxCache` that keeps the states of linear layers."""

    def get_linear_cache(self, layer_idx: int) -> Tensor | None: ...

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None: ...


def is_lightning(layer: nn.Module) -> bool:
    """Whether a layer has the parts of lightning attention."""
    return all(hasattr(layer, part) for part in _Layer.__annotations__)


def forward(
    self: _Layer,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: Tensor | None = None,
    cache: _Cache | None = None,
    past_key_values: _Cache | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Run the layer on `hidden_states [B,T,E]`; return the output and the state `[B,H,D,D]`.

    The state is also written to the cache, in the dtype of the layer, as in transformers. Before 5.24,
    transformers calls the cache `past_key_values`.
    """
    refuse_packing("lightning attention", kwargs)
    heads = self.num_attention_heads
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask.unsqueeze(-1)).to(qkv.dtype)
    q, k, v = qkv.unflatten(-1, (heads, -1)).chunk(3, dim=-1)
    kept = either(cache, past_key_values)
    kv = None if kept is None else kept.get_linear_cache(self.layer_idx)
    dtype = accumulation_dtype(q.dtype)
    state = None if kv is None else LinearState(kv.to(dtype), kv.new_zeros(kv.shape[:3], dtype=dtype))
    log_decay = -self.slope_rate.float().flatten().expand(*q.shape[:3])
    o, (kv, _) = linear_attention(
        q, k, v, causal=True, normalize=False, log_decay=log_decay, state=state, return_state=True
    )
    o = self.norm(o.flatten(2))
    o = self.out_proj(sigmoid(self.output_gate(hidden_states)) * o)
    kv = kv.to(v.dtype)
    if kept is not None:
        kept.set_linear_cache(self.layer_idx, kv)
    return o, kv
