"""The contract of an attention mechanism over heads, and the module that projects to heads and back.

A mechanism is a class that derives from `MultiHeadAttention[State, Inputs]`. `State` is the type of its
recurrent state. `Inputs` is a NamedTuple of what the mechanism computes from its input in addition to
queries, keys and values, such as the logarithm of a decay. A mechanism without a state, or without such
inputs, has None in their place. CONTRIBUTING.md shows how to add a mechanism, step by step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from unrolled.attention._conv import ConvolvedState, ShortConvolution
from unrolled.attention._heads import MEMORY_GROWS, NO_MASKS, Heads, Inputs, Masks, Memory, Projected
from unrolled.attention._options import CommonOptions, check_rotation
from unrolled.attention._slices import attend_over, check_slice
from unrolled.contract import Supports, UnsupportedError
from unrolled.ops import sequence
from unrolled.ops.checks import check_attn_mask, check_cu_seqlens, check_input, shape
from unrolled.ops.dense import Linear, linear_part, weight_of
from unrolled.ops.masks import without_padding, zero_padding
from unrolled.ops.options import ChecksOptions, check_integers
from unrolled.ops.positions import ROTARY_BASE, rotary
from unrolled.ops.precision import accumulation_dtype
from unrolled.ops.state_checks import CONSTANT, Growing, check_state

__all__ = ["CommonOptions", "Heads", "Inputs", "Masks", "Memory", "MultiHeadAttention", "Projected"]

State = TypeVar("State")


class MultiHeadAttention(ChecksOptions, nn.Module, Generic[State, Inputs]):
    """Projects to heads, attends as the mechanism defines it, and projects back.

    A mechanism derives from this class, declares `supports` and defines `attend`. Depending on what it does,
    it also defines:

    - to run as a recurrence: `init_heads`, `prefill_heads` and `step_heads`, and `growing`, which says which
      fields of the state grow;
    - to run over a sequence whose slices are in several processes: `summarise`;
    - to compute more from its input than queries, keys and values: `read_input`;
    - to normalise or gate its output: `merge_heads`;
    - if it is only causal, only bidirectional or without rotary positions: `one_way` and `no_rotary`, which
      give the reason and say what to use instead.

    Args:
        d_model: width of the inputs and of the output.
        n_heads: number of query heads H.
        causal: position i attends only to positions up to i.
        n_kv_heads: number of key and value heads G, a divisor of H (grouped-query attention); H by default.
        head_dim: width D of queries and keys per head; d_model / H by default.
        value_dim: width M of values per head; D by default.
        bias: give the projections a bias.
        conv: number of taps W of a causal convolution over the projected queries, keys and values
            (`unrolled.ops.conv`), at least 2; None for none. It lets a recurrence compare a token with its
            neighbours. It requires causal attention that runs as a recurrence, and excludes `attn_mask`,
            cross-attention and `weights`.
        rotary: encode positions by rotating queries and keys; self-attention only.
        rotary_base: with `rotary`, pair i of a query or key is rotated by the angle
            position / base^(2i/rotary_dim); with a larger base, the angles grow more slowly.
        rotary_dim: with `rotary`, rotate only the first `rotary_dim` numbers of each query and key; an even
            number, by default D, which must then be even.

    Raises:
        ValueError: a size is not a multiple of another as required, or out of range.
        UnsupportedError: the mechanism does not support the given `causal`, `rotary` or `conv`.
    """

    supports: Supports  # of the class with its default options; an instance may have its own
    growing: Growing = CONSTANT
    one_way: str = "`unrolled list` shows which are"
    no_rotary: str | None = None
    rotates_features: bool = False  # whether rotary positions rotate features, and not queries and keys
    conv_activation: bool = False  # whether silu follows the convolution
    conv_bias: bool = False
    mixes_input: bool = False  # whether queries, keys and values depend on more than their own token

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
        conv: int | None = None,
        rotary: bool = False,
        rotary_base: float = ROTARY_BASE,
        rotary_dim: int | None = None,
    ):
        super().__init__()
        if not (self.supports.causal if causal else self.supports.bidirectional):
            direction = "causal" if causal else "bidirectional"
            raise UnsupportedError(f"{self.name} attention is not {direction}: {self.one_way}")
        if rotary and self.no_rotary is not None:
            raise UnsupportedError(f"{self.name} attention cannot use rotary positions: {self.no_rotary}")
        check_integers(1, d_model=d_model, n_heads=n_heads)
        if head_dim is None and d_model % n_heads:
            raise ValueError(f"d_model is {d_model}, but must be a multiple of n_heads = {n_heads}")
        self.d_model, self.n_heads, self.causal, self.rotary = d_model, n_heads, causal, rotary
        if rotary:
            self.supports = self.supports.but(positions=True, cross=False, single_queries=False)
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if self.n_kv_heads < 1 or n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads is {n_kv_heads}, but must divide n_heads = {n_heads}")
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        check_integers(1, head_dim=self.head_dim, value_dim=self.value_dim)
        check_rotation(rotary, rotary_base, rotary_dim, self.head_dim)
        if rotary and rotary_dim is None and self.head_dim % 2 and not self.rotates_features:
            raise ValueError(f"head_dim is {self.head_dim}, but must be even with rotary and no rotary_dim")
        self.rotary_base, self.rotary_dim = rotary_base, rotary_dim
        self.widths = [n * width for n, width in zip(self.head_counts(), self.head_widths(), strict=True)]
        self.qkv_proj = Linear(d_model, sum(self.widths), bias=bias)
        self.out_proj = Linear(n_heads * self.value_dim, d_model, bias=bias)
        self.short_conv = None if conv is None else self._make_conv(conv)

    # ---- what a mechanism defines, over heads

    def attend(self, heads: Heads[Inputs], masks: Masks) -> Tensor:
        """Attend in parallel: `[B,T,H,M]`."""
        raise NotImplementedError

    def init_heads(self, batch_size: int) -> State:
        """Make the state of `batch_size` sequences before their first token."""
        raise UnsupportedError(f"{self.name} attention has no recurrent form; call forward instead")

    def prefill_heads(
        self, heads: Heads[Inputs], state: State, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Attend causally to the state and to the new tokens: `[B,T,H,M]` and the new state."""
        raise NotImplementedError

    def step_heads(self, heads: Heads[Inputs], state: State) -> tuple[Tensor, State]:
        """Attend to the state and to one new token: `q [B,H,D]`, `k [B,G,D]`, `v [B,G,M]` to `[B,H,M]`."""
        raise NotImplementedError

    def summarise(self, heads: Heads[Inputs], key_padding_mask: Tensor | None) -> sequence.Summary:
        """Compute how these tokens change any state, for a sequence that several processes share.

        The summary has those fields of the state that depend on earlier tokens, except `position`.
        """
        raise NotImplementedError

    def read_input(self, x: Tensor) -> Inputs:
        """Compute what else the mechanism needs from the keys' input `[...,d_model]`; nothing by default."""
        return None  # type: ignore[return-value]

    def merge_heads(self, o: Tensor, x: Tensor) -> Tensor:
        """Project the outputs `o [...,H,M]` of the heads to `[...,d_model]`; `x` is the queries' input."""
        return self.out_proj(o.flatten(-2))  # type: ignore[no-any-return]

    def head_widths(self) -> tuple[int, int, int]:
        """Widths per head of queries, keys and values; the first two differ if they are never multiplied."""
        return self.head_dim, self.head_dim, self.value_dim

    def head_counts(self) -> tuple[int, int, int]:
        """Numbers of heads of queries, keys and values; where they differ, `attend` matches them."""
        return self.n_heads, self.n_kv_heads, self.n_kv_heads

    @classmethod
    def tie_layers(cls, layers: Sequence[Self]) -> None:
        """Share parameters between the layers of one model, given in order; by default, share none.

        A shared parameter is in the `state_dict` once, under the name of the first layer.
        """

    def pattern(self, length: int) -> Tensor:
        """Count how often query i of a sequence reads key j: `[H,length,length]`, int64, 0 = never.

        This defines a sparse mechanism: softmax attention in which key j counts that many times.
        """
        raise UnsupportedError(
            f"{self.name} attention has no sparse pattern that is known in advance; bigbird, longformer, "
            "sparse_transformer, spatiotemporal and window have one"
        )

    # ---- what a user calls

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
            query: what the queries are projected from.
            key: what the keys are projected from; the query itself by default.
            value: what the values are projected from; the key by default.
            key_padding_mask: `[B,S]`, True = padding.
            attn_mask: broadcastable to `[B,H,T,S]`, boolean with True = attend, or floating point, which is
                added to the scores, as in torch's `scaled_dot_product_attention`.
            cu_seqlens: int32 `[N+1]` offsets of N sequences packed into one row.

        Raises:
            ValueError: an argument of the wrong shape or type.
            UnsupportedError: the mechanism does not support a given mask, or cross-attention.
        """
        return self._forward(query, key, value, Masks(key_padding_mask, attn_mask, cu_seqlens))

    def _forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, masks: Masks, **further: Tensor | None
    ) -> Tensor:
        """Implement `forward`; a mechanism's own `forward` passes `further` on to its `read_input`."""
        query, key, value = self._checked(query, key, value, masks)
        x, cross = (query, False) if key is None else (key, key is not query)
        heads = self.heads_of(self.project(query, key, value), x, masks, cross=cross, **further)
        return self.merge_heads(self.attend_to_all(heads, masks), query)

    def init_state(self, batch_size: int) -> State:
        """Make the state of `batch_size` sequences before their first token.

        With `conv` it is a `ConvolvedState` around the state of the mechanism.
        """
        state = self.init_heads(batch_size)
        if self.short_conv is None:
            return state
        recent = self.short_conv.init_recent(batch_size, self.state_dtype)
        return ConvolvedState(state, recent)  # type: ignore[return-value]

    def prefill(
        self, x: Tensor, state: State, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run over `x [B,T,d_model]` in parallel, continuing from `state`: `[B,T,d_model]` and the new state.

        Padded tokens (`key_padding_mask [B,T]`, True = padding, on any side) do not affect the state of their
        row. `state` is not modified. To continue, call `prefill` or `step` with the new state.

        Raises:
            ValueError: an argument of the wrong shape or type, or a state of another layer or batch.
            UnsupportedError: the attention has no recurrent form, or is bidirectional, or takes no padding.
        """
        self._check_recurrent()
        self._check_input("x", x)
        check_state(self, state, x.shape[0], self.out_weight)
        masks = Masks(key_padding_mask)
        x = self._without_padding(x, masks)
        heads = self.heads_of(self.project(x), x, masks, state=state)
        o, state = self.advance(heads, state, key_padding_mask)
        return self.merge_heads(o, x), state

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one token `x_t [B,d_model]`: `[B,d_model]` and the new state. `state` is not modified.

        Raises:
            ValueError: an argument of the wrong shape or type, or a state of another layer or batch.
            UnsupportedError: the attention has no recurrent form, or is bidirectional.
        """
        self._check_recurrent()
        self._check_input("x_t", x_t, ("B",))
        check_state(self, state, x_t.shape[0], self.out_weight)
        heads = self.heads_of(self.project(x_t), x_t, state=state)
        o, state = self.advance(heads, state)
        return self.merge_heads(o, x_t), state

    def read(self, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Project `memory [B,S,d_model]` once, for queries that come later; return what `recall` takes.

        By default, `read` returns the keys and values; some mechanisms return a summary of constant size.

        Args:
            memory: what the queries will attend to.
            key_padding_mask: `[B,S]`, True = padding.

        Raises:
            ValueError: an argument of the wrong shape or type.
            UnsupportedError: the attention is causal, has rotary positions or no cross-attention, or the
                output of one query depends on other queries.
        """
        k, v = self._read(memory, key_padding_mask)
        if key_padding_mask is None:
            key_padding_mask = torch.zeros(memory.shape[:2], dtype=torch.bool, device=memory.device)
        return Memory(k, v, key_padding_mask)

    def recall(self, query: Tensor, memory: Any) -> Tensor:
        """Attend from `query [B,T,d_model]` to what `read` returned: `[B,T,d_model]`.

        The result equals that of `forward(query, key)`, where `key` is the sequence that was read, however
        the queries are split into calls.

        Raises:
            ValueError: an argument of the wrong shape or type, or a memory of another layer or batch.
        """
        sequence.refuse("a memory")
        self._check_input("query", query)
        weight = self.out_weight
        empty = partial(self.read, weight.new_empty(0, 0, self.d_model))
        check_state(self, memory, query.shape[0], weight, empty, name="memory", growing=MEMORY_GROWS)
        q, _, _ = self.project(query, query[:, :0])
        return self.merge_heads(self.recall_heads(q, memory), query)

    def recall_heads(self, q: Tensor, memory: Any) -> Tensor:
        """Attend from `q [B,T,H,D]` to what `read` returned: `[B,T,H,M]`."""
        k, v, padding = memory
        return self.attend(Heads(q, k, v), Masks(padding))

    def weights(self, query: Tensor, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the weight of position j of `memory [B,S,d_model]` for query i of `query [B,T,d_model]`.

        Returns:
            `[B,H,T,S]`.

        Raises:
            ValueError: an argument of the wrong shape or type.
            UnsupportedError: the output is not a weighted mean of the values, or `memory` cannot be read, or
                positions are rotary.
        """
        sequence.refuse("a memory")
        self._check_no_rotary()
        self._check_has_weights()
        self.refuse("cross", memory, "cross-attention")
        self._check_input("query", query)
        self._check_input("memory", memory)
        masks = Masks(key_padding_mask)
        memory = self._without_padding(memory, masks)
        return self.weights_of(Heads(*self.project(query, memory)), masks)

    # ---- the path from projections to heads, which modules with other projections share

    def project(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Projected:
        """Project `[...,d_model]` to queries, keys and values; without `key`, all three from `query`."""
        q_width, k_width, v_width = widths = self.head_widths()
        counts = self.head_counts()
        if key is None:
            qkv = self.qkv_proj(query)
            if q_width == k_width == v_width:  # one view, then the heads
                q, k, v = qkv.unflatten(-1, (sum(counts), q_width)).split_with_sizes(counts, -2)
                return q, k, v
            q, k, v = qkv.split_with_sizes(self.widths, -1)
        else:
            xs = (query, key, key if value is None else value)
            q, k, v = (linear_part(self.qkv_proj, self.widths, i, x) for i, x in enumerate(xs))
        q, k, v = (torch.unflatten(x, -1, sizes) for x, *sizes in zip((q, k, v), counts, widths, strict=True))
        return q, k, v

    def heads_of(
        self,
        projected: Projected,
        x: Tensor,
        masks: Masks = NO_MASKS,
        *,
        cross: bool = False,
        state: Any = None,
        **further: Any,
    ) -> Heads[Inputs]:
        """Combine queries, keys and values with positions and what the mechanism computes from the input.

        Args:
            projected: q, k and v, from `project` or from projections of another module.
            x: the input of the keys, `[B,S,d_model]`, or `[B,d_model]` in a step; 0 at padding.
            masks: as in `forward`, but not checked here.
            cross: the queries come from another sequence, so that positions are not used.
            state: the state to continue from; None at the beginning of the sequence.
            further: other arguments of `read_input`.

        Raises:
            UnsupportedError: in `sequence_parallel`, the mechanism cannot attend to slices, or not with these
                masks.
            ValueError: the slices of the processes differ in shape.
        """
        check_slice(self, x, masks, cross)
        positions = recent = None
        if self.short_conv is not None:
            projected, recent = self.short_conv(projected, masks, None if state is None else state.recent)
            state = None if state is None else state.heads
        if self.supports.positions and not cross:
            if x.dim() == 2:
                positions = state.position
            else:
                positions = self.positions_of(x, masks)
                positions = positions if state is None else state.position.unsqueeze(1) + positions
        return Heads(*projected, positions, self.read_input(x, **further), recent)

    def attend_to_all(self, heads: Heads[Inputs], masks: Masks) -> Tensor:
        """Attend in parallel, to the tokens of all processes if they share the sequence: `[B,T,H,M]`."""
        if (ranks := sequence.current()) is None:
            return self.attend(heads, masks)
        state = self.init_heads(heads.q.shape[0])
        return self.attend_over(ranks, heads, state, masks.key_padding_mask, to_end=False)[0]

    def advance(
        self, heads: Heads[Inputs], state: State, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Attend causally to the state and to the new tokens `heads`, which `heads_of` made with this state.

        Returns:
            `[B,T,H,M]` and the new state; for one token, `[B,H,M]`.
        """
        inner: State = state if heads.recent is None else state.heads  # type: ignore[attr-defined]
        if heads.q.dim() == 3:
            o, inner = self.step_heads(heads, inner)
        elif (ranks := sequence.current()) is not None:
            o, inner = self.attend_over(ranks, heads, inner, key_padding_mask)
        else:
            o, inner = self.prefill_heads(heads, inner, key_padding_mask)
        return o, inner if heads.recent is None else ConvolvedState(inner, heads.recent)  # type: ignore

    def attend_over(
        self,
        ranks: sequence.Ranks,
        heads: Heads[Inputs],
        state: State,
        key_padding_mask: Tensor | None,
        *,
        to_end: bool = True,
    ) -> tuple[Tensor, State]:
        """Attend causally to a state, to the slices of earlier ranks and to this rank's own slice.

        A mechanism that defines `summarise` need not define this.

        Returns:
            `[B,T,H,M]`, and the state after the slices of all ranks; without `to_end`, this state has no
            meaning.
        """
        return attend_over(self, ranks, heads, state, key_padding_mask, to_end=to_end)

    def positions_of(self, x: Tensor, masks: Masks = NO_MASKS) -> Tensor:
        """Return the position of each token of `x [B,T,d_model]` in its sequence, `[B,T]`."""
        found = sequence.positions_of(x, masks.key_padding_mask, masks.cu_seqlens)
        return found.expand(x.shape[:2])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys by their positions, as `rotary_base` and `rotary_dim` say."""
        return rotary(x, positions, base=self.rotary_base, dim=self.rotary_dim)

    def rotated(self, heads: Heads[Inputs]) -> tuple[Tensor, Tensor]:
        """Return queries and keys rotated by their positions, or as they are without `rotary`."""
        if not self.rotary or heads.positions is None:
            return heads.q, heads.k
        return self.rotate(heads.q, heads.positions), self.rotate(heads.k, heads.positions)

    def weights_of(self, heads: Heads[Inputs], masks: Masks) -> Tensor:
        """Compute the attention weights `[B,H,T,S]`.

        Raises:
            UnsupportedError: the output is not a weighted mean of the values.
        """
        self._check_has_weights()
        k = heads.k
        one_hot = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)  # their weighted mean is the weights
        v = one_hot.unsqueeze(1).expand(*k.shape[:3], -1)
        return self.attend(heads._replace(v=v), masks).transpose(1, 2)

    def refuse(self, capability: str, given: Tensor | None, what: str) -> None:
        """Raise UnsupportedError if an argument is given that the mechanism does not support."""
        if given is not None and not getattr(self.supports, capability):
            raise UnsupportedError(f"{self.name} attention does not support {what}; see `unrolled list`")

    @property
    def name(self) -> str:
        """The mechanism's name in the registry: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def out_weight(self) -> Tensor:
        """A weight with the dtype and on the device of this module, even if `out_proj` was replaced."""
        return weight_of(self.out_proj)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the sums in a state: fp32, or fp64 for fp64 weights."""
        return accumulation_dtype(self.out_weight.dtype)

    def _make_conv(self, taps: int) -> ShortConvolution:
        if self.supports.recurrence == "none" or not self.causal:
            raise UnsupportedError(
                f"conv is {taps}, but {self.name} attention has a convolution only where it runs as a "
                "recurrence, with causal=True"
            )
        if taps < 2:
            raise ValueError(f"conv is {taps}, but must be at least 2, or None")
        self.supports = self.supports.but(
            bidirectional=False, cross=False, single_queries=False, weights=False, attn_mask=False
        )
        return ShortConvolution(self.widths, taps, activation=self.conv_activation, bias=self.conv_bias)

    # ---- checks

    def _checked(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, masks: Masks
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Check the arguments of `forward`; return the inputs with zeros at padding."""
        self._check_input("query", query)
        if key is not None:
            self._check_no_rotary()
        self.refuse("cross", key, "cross-attention")
        if key is None:
            if value is not None:
                raise ValueError("value was given without key, but must be given together with it")
            return self._without_padding(query, masks), None, None
        self._check_input("key", key)
        self._check_input("value", key if value is None else value)
        if key.shape[0] != query.shape[0]:
            raise ValueError(f"key has shape {shape(key)}, but must have the {query.shape[0]} rows of query")
        if value is not None and value.shape != key.shape:
            raise ValueError(f"value has shape {shape(value)}, but must be {shape(key)} like key")
        masked = self._without_padding(key, masks, query)
        if masks.key_padding_mask is not None and value is not None:
            value = masked if value is key else without_padding(value, masks.key_padding_mask)
        return (masked if query is key else query), masked, value

    def _without_padding(self, x: Tensor, masks: Masks, query: Tensor | None = None) -> Tensor:
        """Check all masks against the keys' input `x [B,S,d_model]`, and return it with zeros at padding.

        Padding is zeroed before it meets any weight; otherwise the gradient of a weight might be 0 times NaN.
        """
        query = x if query is None else query
        key_padding_mask, attn_mask, cu_seqlens = masks
        self.refuse("padding", key_padding_mask, "key_padding_mask")
        self.refuse("packing", cu_seqlens, "cu_seqlens")
        self.refuse("attn_mask", attn_mask, "attn_mask")
        if cu_seqlens is not None and key_padding_mask is not None:
            raise ValueError("key_padding_mask was given with cu_seqlens: packed sequences have no padding")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, query, x)
        if attn_mask is not None:
            check_attn_mask(attn_mask, (x.shape[0], self.n_heads, query.shape[1], x.shape[1]))
        return zero_padding(key_padding_mask, x)[0]

    def _read(self, memory: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Check a memory; return its keys and values."""
        sequence.refuse("a memory")
        self.refuse("cross", memory, "cross-attention")
        if not self.supports.single_queries or self.causal or self.rotary:
            raise UnsupportedError(
                f"{self.name} attention cannot read a memory query by query; use softmax or linear, with "
                "causal=False and rotary=False"
            )
        self._check_input("memory", memory)
        memory = self._without_padding(memory, Masks(key_padding_mask))
        _, k, v = self.project(memory[:, :0], memory)
        return k, v

    def _check_no_rotary(self) -> None:
        if self.rotary:
            raise UnsupportedError("rotary positions are not defined between two sequences; use rotary=False")

    def _check_has_weights(self) -> None:
        if not self.supports.weights:
            options = " with these options" if type(self).supports.weights else ""
            raise UnsupportedError(
                f"{self.name} attention does not compute weights{options}; use softmax, or linear with its "
                "default options"
            )

    def _check_input(self, name: str, x: Tensor, axes: tuple[str, ...] = ("B", "T")) -> None:
        check_input(name, x, [*axes, self.d_model], weight_of(self.qkv_proj))

    def _check_recurrent(self) -> None:
        if self.supports.recurrence == "none":
            raise UnsupportedError(f"{self.name} attention has no recurrent form; call forward instead")
        if not self.causal:
            raise UnsupportedError("only causal attention runs as a recurrence; use causal=True")
