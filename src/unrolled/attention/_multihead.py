"""What multi-head mechanisms share: projections, the three verbs, and refusing what is not supported."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from unrolled.contract import Supports, UnsupportedError
from unrolled.ops.checks import check_cu_seqlens, check_device, check_key_padding_mask, shape
from unrolled.ops.dense import Linear
from unrolled.ops.masks import without_padding
from unrolled.ops.options import ChecksOptions
from unrolled.ops.positions import positions_from_cu_seqlens, positions_from_padding, rotary
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.state_checks import CONSTANT, Growing, check_state


class Heads(NamedTuple):
    """What a mechanism attends with: `q [B,T,H,D]`, `k [B,S,G,D]`, `v [B,S,G,M]`; in a step, without T and S.

    `positions [B,T]` is there if the module is `positional`, and `gates` is what `MultiHeadAttention.gates`
    made of the input.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor | None = None
    gates: Any = None

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Give q and k turned by their positions, where there are any."""
        if self.positions is None:
            return self.q, self.k
        return rotary(self.q, self.positions), rotary(self.k, self.positions)


class MemoryHeads(NamedTuple):
    """Another sequence, as queries read it one after another: see `MultiHeadAttention.read`."""

    k: Tensor  # [B,S,G,D]
    v: Tensor  # [B,S,G,M]
    padding: Tensor  # [B,S], True = padding
    gates: Any  # of the memory; () for none


MEMORY_GROWS: Growing = dict.fromkeys(MemoryHeads._fields, (1, "S"))
"""Every field of `MemoryHeads` is as long as the memory."""


class Masks(NamedTuple):
    """Which keys may be read; see `MultiHeadAttention.forward`. What a mechanism does not support is None."""

    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


class MultiHeadAttention(ChecksOptions, nn.Module):
    """Projects to heads, attends by the mechanism's own forms, and projects back.

    A mechanism derives from this class, declares `supports` and defines `attend`; one that can run as a
    recurrence also defines `init_state`, `prefill_heads` and `step_heads`. One that
    reads more from its input than queries, keys and values overrides `gates`, one whose output is normalised
    or gated `merge_heads`, and one that wants to know positions sets `positional`. One in which a query reads
    another sequence without regard to the other queries sets `independent_queries`,
    and one whose state grows says in `growing` which of its fields do.

    Args:
        d_model: width of the inputs and of the output.
        n_heads: number of query heads H.
        causal: position i sees positions up to i only.
        n_kv_heads: number of key and value heads G, a divisor of H (grouped-query attention); H by default.
        head_dim: width D of queries and keys per head; d_model / H by default.
        value_dim: width M of values per head; D by default.
        bias: give the projections a bias.
        rotary: encode positions by rotating queries and keys; self-attention only.

    Raises:
        ValueError: sizes that do not divide.
        UnsupportedError: the mechanism is not causal, or only causal.
    """

    supports: Supports  # of the class with its default options; an instance may state its own
    growing: Growing = CONSTANT
    independent_queries: ClassVar[bool] = False
    has_weights: bool = False  # whether an output is a weighted mean of values, with weights of q and k alone

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
        if not (self.supports.causal if causal else self.supports.bidirectional):
            wanted = "causal" if causal else "bidirectional"
            raise UnsupportedError(f"{self._name} attention is not {wanted}; `unrolled list` shows which are")
        if n_heads < 1 or (head_dim is None and d_model % n_heads):
            raise ValueError(f"d_model is {d_model}, but must be a multiple of n_heads = {n_heads}")
        self.d_model, self.n_heads, self.causal, self.rotary = d_model, n_heads, causal, rotary
        self.positional = rotary
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if self.n_kv_heads < 1 or n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads is {n_kv_heads}, but must divide n_heads = {n_heads}")
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        if self.head_dim < 1 or self.value_dim < 1:
            raise ValueError(f"head_dim is {head_dim} and value_dim {value_dim}, but both must be at least 1")
        q_width, k_width, v_width = self.head_widths()
        self._widths = [n_heads * q_width, self.n_kv_heads * k_width, self.n_kv_heads * v_width]
        self.qkv_proj = Linear(d_model, sum(self._widths), bias=bias)
        self.out_proj = Linear(n_heads * self.value_dim, d_model, bias=bias)

    def head_widths(self) -> tuple[int, int, int]:
        """Widths per head of queries, keys and values; those of the first two differ if they never meet."""
        return self.head_dim, self.head_dim, self.value_dim

    @classmethod
    def tie_layers(cls, layers: Sequence[Self]) -> None:
        """Let the layers of one model, in their order, share what they have in common: by default nothing.

        What is shared keeps the first layer's name in the `state_dict`, and has no other.
        """

    def attend(self, heads: Heads, masks: Masks) -> Tensor:
        """Attend in parallel: `[B,T,H,M]`."""
        raise NotImplementedError

    def prefill_heads(self, heads: Heads, state: Any, key_padding_mask: Tensor | None) -> tuple[Tensor, Any]:
        """Attend causally to the state and to the new tokens: `[B,T,H,M]` and the new state."""
        raise NotImplementedError

    def step_heads(self, heads: Heads, state: Any) -> tuple[Tensor, Any]:
        """Do the same for one token: `q [B,H,D]`, `k [B,G,D]`, `v [B,G,M]` to `[B,H,M]`."""
        raise NotImplementedError

    def pattern(self, length: int) -> Tensor:
        """Count how often query i of a sequence reads key j: `[H,length,length]`, int64, 0 = never.

        Of a sparse mechanism this is the definition: softmax attention in which key j counts that often.
        """
        raise UnsupportedError(f"{self._name} attention reads no fixed pattern of keys")

    def gates(self, x: Tensor) -> Any:
        """Read from the input of the keys `[...,d_model]` what is wanted besides; by default nothing."""
        return None

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Turn what the heads gave, `o [...,H,M]`, into the output; `x [...,d_model]` is the input."""
        return self.out_proj(o.flatten(-2))  # type: ignore[no-any-return]

    def init_state(self, batch_size: int) -> Any:
        """Make the state of `batch_size` sequences that have not begun."""
        raise UnsupportedError(f"{self._name} attention has no recurrent form; call forward instead")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Attend from `query [B,T,d_model]` to `key`, `value [B,S,d_model]`, or to itself: `[B,T,d_model]`.

        Args:
            query: what attends.
            key: what is attended to; the query itself by default.
            value: what is read; the key by default.
            key_padding_mask: `[B,S]`, True = padding.
            attn_mask: broadcastable to `[B,H,T,S]`, boolean with True = attend, or floating point, which is
                added to the scores, as in torch's `scaled_dot_product_attention`.
            cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row.

        Raises:
            ValueError: an argument of another shape or type.
            UnsupportedError: a mask, or a second sequence, that this mechanism cannot honour.
        """
        return self._forward(query, key, value, Masks(key_padding_mask, attn_mask, cu_seqlens))

    def _forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, masks: Masks, **further: Any
    ) -> Tensor:
        """Do what `forward` says; `further` is what a mechanism's own `forward` hands to its `gates`."""
        key_padding_mask, attn_mask, cu_seqlens = masks
        self._check_input("query", query)
        self._refuse("cross", key, "reading another sequence")
        self._refuse("padding", key_padding_mask, "key_padding_mask")
        self._refuse("packing", cu_seqlens, "cu_seqlens")
        self._refuse("attn_mask", attn_mask, "attn_mask")
        if key_padding_mask is not None and cu_seqlens is not None:
            raise ValueError(
                "key_padding_mask was given with cu_seqlens, but a pack has no padding: give one of them"
            )
        if key is None and value is not None:
            raise ValueError("value was given without key, but only a key says what the value belongs to")
        if key is not None:
            self._check_input("key", key)
            self._check_input("value", key if value is None else value)
            if key.shape[0] != query.shape[0]:
                raise ValueError(
                    f"key has shape {shape(key)}, but query {shape(query)} wants [{query.shape[0]}, S, ...]"
                )
            if value is not None and value.shape != key.shape:
                raise ValueError(f"value has shape {shape(value)}, but must be {shape(key)} like key")
        if self.rotary and key is not None:
            raise UnsupportedError(
                "rotary positions say nothing between two sequences; use rotary=False for cross-attention"
            )
        if key_padding_mask is not None:
            query, key, value = self._without_padding(query, key, value, key_padding_mask)
        q, k, v = self._project(query, key, value)
        positions = None
        if self.positional and key is None:
            positions = self._positions(query, key_padding_mask, cu_seqlens)
        heads = Heads(q, k, v, positions, self.gates(query if key is None else key, **further))
        o = self.attend(heads, masks)
        return self.merge_heads(o, query)

    def prefill(self, x: Tensor, state: Any, *, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Run over `x [B,T,d_model]` in parallel, continuing from `state`: `[B,T,d_model]` and the new state.

        Padded tokens (`key_padding_mask [B,T]`, True = padding, on any side) leave the state of their row as
        it was. `state` is not changed, and prefill may be called again on what follows.
        """
        self._check_recurrent()
        self._check_input("x", x)
        check_state(self, state, x.shape[0], self.out_proj.weight)
        self._refuse("padding", key_padding_mask, "key_padding_mask")
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *x.shape[:2])
            x = without_padding(x, key_padding_mask)
        positions = None
        if self.positional:
            positions = state.position.unsqueeze(1) + self._positions(x, key_padding_mask, None)
        heads = Heads(*self._project(x, None, None), positions, self.gates(x))
        o, state = self.prefill_heads(heads, state, key_padding_mask)
        return self.merge_heads(o, x), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Run one token `x_t [B,d_model]`: `[B,d_model]` and the new state. `state` is not changed."""
        self._check_recurrent()
        if not isinstance(x_t, Tensor):
            raise ValueError(f"x_t is a {type(x_t).__name__}, but must be a tensor [B, {self.d_model}]")
        if x_t.dim() != 2 or x_t.shape[-1] != self.d_model:
            raise ValueError(f"x_t has shape {shape(x_t)}, but must be [B, {self.d_model}]")
        self._check_dtype("x_t", x_t)
        check_state(self, state, x_t.shape[0], self.out_proj.weight)
        positions = state.position if self.positional else None
        heads = Heads(*self._project(x_t, None, None), positions, self.gates(x_t))
        o, state = self.step_heads(heads, state)
        return self.merge_heads(o, x_t), state

    def read(self, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Prepare `memory [B,S,d_model]` for queries that come one after another: its state for `recall`.

        By default its keys and values; a mechanism with a summary of constant size keeps that instead.

        Args:
            memory: what is attended to.
            key_padding_mask: `[B,S]`, True = padding.

        Raises:
            ValueError: an argument of another shape or type.
            UnsupportedError: what one query reads depends on other queries, or the attention is causal.
        """
        k, v, key_padding_mask, gates = self._read(memory, key_padding_mask)
        if key_padding_mask is None:
            key_padding_mask = torch.zeros(memory.shape[:2], dtype=torch.bool, device=memory.device)
        return MemoryHeads(k, v, key_padding_mask, () if gates is None else gates)

    def recall(self, query: Tensor, memory: Any) -> Tensor:
        """Attend from `query [B,T,d_model]` to what `read` has made of another sequence: `[B,T,d_model]`.

        Equal to `forward(query, that sequence)`, however the queries are cut into calls.
        """
        self._check_input("query", query)
        check_state(
            self,
            memory,
            query.shape[0],
            self.out_proj.weight,
            lambda: self.read(self.out_proj.weight.new_empty(0, 0, self.d_model)),
            name="memory",
            growing=MEMORY_GROWS,
        )
        q, _, _ = self._project(query, query[:, :0], None)
        o = self._recall(q, memory)
        return self.merge_heads(o, query)

    def weights(self, query: Tensor, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Weight of `memory [B,S,d_model]` at place j for query i of `query [B,T,d_model]`: `[B,H,T,S]`.

        Raises:
            UnsupportedError: the mechanism is no weighted mean.
        """
        if not self.has_weights:
            raise UnsupportedError(f"{self._name} attention has no weights to show; softmax and linear have")
        self._check_input("query", query)
        self._check_input("memory", memory)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *memory.shape[:2])
            memory = without_padding(memory, key_padding_mask)
        q, k, _ = self._project(query, memory, None)
        one_each = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)  # a mean of these shows its weights
        v = one_each.unsqueeze(1).expand(*k.shape[:3], -1)
        return self.attend(Heads(q, k, v), Masks(key_padding_mask)).transpose(1, 2)

    def _read(self, memory: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Any, Any]:
        """Check a memory; give its keys, values, mask and gates."""
        self._refuse("cross", memory, "reading another sequence")
        self._refuse("padding", key_padding_mask, "key_padding_mask")
        if not self.independent_queries or self.causal or self.rotary:
            raise UnsupportedError(
                f"{self._name} attention cannot read a memory query by query; use softmax or linear, with "
                "causal=False and rotary=False"
            )
        self._check_input("memory", memory)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, *memory.shape[:2])
            memory = without_padding(memory, key_padding_mask)
        _, k, v = self._project(memory[:, :0], memory, None)
        return k, v, key_padding_mask, self.gates(memory)

    def _recall(self, q: Tensor, memory: Any) -> Tensor:
        """Attend from `q [B,T,H,D]` to a memory that `read` has prepared: `[B,T,H,M]`."""
        k, v, padding, gates = memory
        heads = Heads(q, k, v, None, gates if isinstance(gates, Tensor) or gates else None)
        return self.attend(heads, Masks(padding))

    @staticmethod
    def _without_padding(
        query: Tensor, key: Tensor | None, value: Tensor | None, key_padding_mask: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Zero what stands at padding before a weight meets it: a gradient of 0 times NaN would be NaN."""
        read = query if key is None else key
        check_key_padding_mask(key_padding_mask, *read.shape[:2])
        hidden = without_padding(read, key_padding_mask)
        if key is None:
            return hidden, None, None
        if value is not None:
            value = hidden if value is key else without_padding(value, key_padding_mask)
        return (hidden if query is key else query), hidden, value

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        widths = self.head_widths()
        if key is None:
            qkv, heads = self.qkv_proj(query), (self.n_heads, self.n_kv_heads, self.n_kv_heads)
            if len(set(widths)) == 1:  # one view, then the heads
                q, k, v = qkv.unflatten(-1, (sum(heads), self.head_dim)).split_with_sizes(heads, -2)
                return q, k, v
            q, k, v = qkv.split_with_sizes(self._widths, -1)
        else:
            bias = self.qkv_proj.bias
            weights = torch.split(self.qkv_proj.weight, self._widths)
            biases = [None] * 3 if bias is None else torch.split(bias, self._widths)
            inputs = (query, key, key if value is None else value)
            q, k, v = (nn.functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        return (
            q.unflatten(-1, (self.n_heads, widths[0])),
            k.unflatten(-1, (self.n_kv_heads, widths[1])),
            v.unflatten(-1, (self.n_kv_heads, widths[2])),
        )

    def _positions(self, x: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        B, T = x.shape[:2]
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x, x)
            return positions_from_cu_seqlens(cu_seqlens, T)
        if key_padding_mask is not None:
            check_key_padding_mask(key_padding_mask, B, T)
            return positions_from_padding(key_padding_mask)
        return torch.arange(T, device=x.device).expand(B, T)

    @property
    def _state_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.out_proj.weight.dtype)

    @property
    def _name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def _check_input(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}, but must be a tensor [B, T, {self.d_model}]")
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"{name} has shape {shape(x)}, but must be [B, T, {self.d_model}]")
        self._check_dtype(name, x)

    def _check_dtype(self, name: str, x: Tensor) -> None:
        check_device(name, x, self.qkv_proj.weight)
        dtype = self.qkv_proj.weight.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"{name} is {x.dtype}, but the weights are {dtype}: convert one, or use autocast"
            )

    def _refuse(self, capability: str, given: Tensor | None, what: str) -> None:
        if given is not None and not getattr(self.supports, capability):
            raise UnsupportedError(
                f"{self._name} attention cannot honour {what}; `unrolled list` shows which can"
            )

    def _check_recurrent(self) -> None:
        if self.supports.recurrence == "none":
            raise UnsupportedError(f"{self._name} attention has no recurrent form; call forward instead")
        if not self.causal:
            raise UnsupportedError(
                "only causal attention runs as a recurrence; construct it with causal=True"
            )
