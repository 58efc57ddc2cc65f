"""Linear attention, slow and plainly right: what the contract suite is tried on, whole and broken."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from unrolled.contract import Supports, UnsupportedError
from unrolled.ops import sequence


class PlainState(NamedTuple):
    kv: Tensor
    k_sum: Tensor


class PlainLinear(nn.Module):
    """o_i = sum_j (phi(q_i).phi(k_j)) v_j / sum_j phi(q_i).phi(k_j), with phi = elu + 1."""

    supports: ClassVar[Supports] = Supports(
        causal=True,
        bidirectional=True,
        cross=True,
        padding=True,
        packing=True,
        recurrence="constant",
        attn_mask=True,
    )
    state_type: ClassVar[type] = PlainState

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        causal: bool = False,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        rotary: bool = False,
    ):
        super().__init__()
        if rotary:
            raise UnsupportedError("rotary is not implemented here; add positions to the input")
        self.refuse(causal=causal, bidirectional=not causal)
        self.d_model, self.n_heads, self.causal = d_model, n_heads, causal
        self.n_kv_heads = n_kv_heads or n_heads
        if n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {n_heads} is no multiple of n_kv_heads {n_kv_heads}")
        self.head_dim = head_dim or d_model // n_heads
        self.value_dim = value_dim or self.head_dim
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, self.n_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, self.n_kv_heads * self.value_dim, bias=bias)
        self.out_proj = nn.Linear(n_heads * self.value_dim, d_model, bias=bias)

    # ---- the three verbs

    def forward(self, query, key=None, value=None, *, key_padding_mask=None, attn_mask=None, cu_seqlens=None):
        self.refuse(
            cross=key is not None,
            padding=key_padding_mask is not None,
            attn_mask=attn_mask is not None,
            packing=cu_seqlens is not None,
        )
        own = key is None
        key = query if own else key
        value = key if value is None else value
        self.check_sequences(query, key, value)
        B, T, S = *query.shape[:2], key.shape[1]
        allowed = torch.ones(B, 1, T, S, dtype=torch.bool)
        if self.causal:
            allowed = allowed.tril(S - T)
        if key_padding_mask is not None:
            self.check_mask("key_padding_mask", key_padding_mask, (B, S))
            key, value = self.hide(key, key_padding_mask), self.hide(value, key_padding_mask)
            query = key if own else query
            allowed = allowed & ~key_padding_mask[:, None, None]
        if attn_mask is not None:
            self.check_mask("attn_mask", attn_mask, (*attn_mask.shape[:-2], T, S))
            allowed = allowed & attn_mask
        if cu_seqlens is not None:
            self.check_packing(cu_seqlens, B, T)
            owner = self.owners(cu_seqlens, T)
            allowed = allowed & (owner[:, None] == owner)
        q, k, v = self.project(query, key, value)
        return self.merge(*self.attend(q, k, v, allowed), query.dtype)

    def init_state(self, batch_size):
        self.refuse(recurrence=True)
        dtype = torch.promote_types(self.q_proj.weight.dtype, torch.float32)
        kv = torch.zeros(batch_size, self.n_kv_heads, self.head_dim, self.value_dim, dtype=dtype)
        return PlainState(kv, kv.new_zeros(batch_size, self.n_kv_heads, self.head_dim))

    def prefill(self, x, state, *, key_padding_mask=None):
        self.refuse(recurrence=True, padding=key_padding_mask is not None)
        self.check_state(x, state)
        self.check_sequences(x, x, x)
        B, T = x.shape[:2]
        allowed = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
        if key_padding_mask is not None:
            self.check_mask("key_padding_mask", key_padding_mask, (B, T))
            x = self.hide(x, key_padding_mask)
        q, k, v = self.project(x, x, x)
        if key_padding_mask is not None:
            allowed = allowed & ~key_padding_mask[:, None, None]
            k = k.masked_fill(key_padding_mask[:, :, None, None], 0)
        num, den = self.attend(q, k, v, allowed)
        num = num + torch.einsum("bthd,bhdm->bthm", q, self.grouped(state.kv, 1))
        den = den + torch.einsum("bthd,bhd->bth", q, self.grouped(state.k_sum, 1))
        kv = state.kv + torch.einsum("bthd,bthm->bhdm", k, v)
        return self.merge(num, den, x.dtype), PlainState(kv, state.k_sum + k.sum(1))

    def step(self, x_t, state):
        self.refuse(recurrence=True)
        if x_t.dim() != 2:
            raise ValueError(f"x_t has shape {list(x_t.shape)}, should be [B, {self.d_model}]")
        y, state = self.prefill(x_t[:, None], state)
        return y[:, 0], state

    # ---- the parts, which the broken mechanisms override one at a time

    def hide(self, x, padding):
        return x.masked_fill(padding[:, :, None], 0)

    def project(self, query, key, value):
        q, k = self.phi(self.q_proj(query)), self.phi(self.k_proj(key))
        return (
            self.split(q, self.n_heads),
            self.split(k, self.n_kv_heads),
            self.split(self.v_proj(value), self.n_kv_heads),
        )

    def phi(self, x):
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())

    def split(self, x, heads):
        x = x.unflatten(-1, (heads, -1))
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def grouped(self, x, dim):
        return x.repeat_interleave(self.n_heads // self.n_kv_heads, dim)

    def attend(self, q, k, v, allowed):
        weights = torch.einsum("bthd,bshd->bhts", q, self.grouped(k, 2)).masked_fill(~allowed, 0)
        return torch.einsum("bhts,bshm->bthm", weights, self.grouped(v, 2)), weights.sum(3).transpose(1, 2)

    def owners(self, cu_seqlens, length):
        return torch.bucketize(torch.arange(length), cu_seqlens[1:], right=True)

    def merge(self, num, den, dtype):
        out = num / den.masked_fill(den == 0, 1)[..., None]
        return self.out_proj(out.flatten(2).to(self.out_proj.weight.dtype)).to(dtype)

    # ---- what is refused

    def refuse(self, **asked):
        """Raise for every capability that is asked for and not claimed."""
        for name, expected in asked.items():
            claimed = getattr(self.supports, name) not in (False, "none")
            if name == "recurrence":
                claimed = claimed and self.causal
            if expected and not claimed:
                raise UnsupportedError(f"{name} is not supported here; use another mechanism")

    def refuse_slices(self):
        sequence.refuse("plain linear attention")

    def check_sequences(self, query, key, value):
        self.refuse_slices()
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[-1] != self.d_model or x.shape[0] != query.shape[0]:
                raise ValueError(f"{name} has shape {list(x.shape)}, should be [B, T, {self.d_model}]")
        if value.shape[1] != key.shape[1]:
            raise ValueError(f"value has length {value.shape[1]}, should be {key.shape[1]}")

    def check_mask(self, name, mask, shape):
        if mask.shape != shape or mask.dtype != torch.bool:
            raise ValueError(f"{name} is {list(mask.shape)} {mask.dtype}, should be {list(shape)} bool")

    def check_packing(self, cu_seqlens, batch, length):
        bounds = cu_seqlens.tolist()
        right_type = cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32
        if not right_type or batch != 1 or bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, length):
            raise ValueError(
                f"cu_seqlens {bounds} does not divide a sequence of {length} in a batch of {batch}"
            )

    def check_state(self, x, state):
        if not isinstance(state, self.state_type):
            raise ValueError(f"state is a {type(state).__name__}, should be a {self.state_type.__name__}")
        like = PlainLinear.init_state(self, x.shape[0])
        for name, expected in like._asdict().items():
            self.check_part(name, getattr(state, name), expected)

    def check_part(self, name, part, expected):
        if not isinstance(part, Tensor) or (part.dtype, part.device) != (expected.dtype, expected.device):
            raise ValueError(f"state.{name} is {part}, should be a tensor of {expected.dtype}")
        if part.shape != expected.shape:
            raise ValueError(f"state.{name} has shape {list(part.shape)}, should be {list(expected.shape)}")
