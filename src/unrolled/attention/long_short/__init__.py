r"""Long-short attention (Transformer-LS): a window per query, and landmarks that summarise all tokens.

    o_i = softmax([q_i K_i^T | q_i L_k^T] / sqrt(D)) [V_i ; L_v]        one softmax over both
    L_k = P^T K,  L_v = P^T V,  P = softmax over positions of X W_P     r landmarks, from the content

K_i, V_i are a window around query i. Bidirectional: the sequence is cut into segments of w queries, which
attend to the keys of their segment and w/2 keys on each side (rounded down, but at least 1). Causal: each
query attends to the last w keys, its own included, and to the landmarks of earlier chunks; each chunk of l
tokens has its own P and its own r landmarks.

DualLN is two layer norms over all heads: one for the keys and values of the window, one for those of the
landmarks. As in the authors' two implementations, bidirectional landmarks are pooled from normalised tokens,
and causal ones from raw tokens. Both are then normalised.

Zhu, Ping, Xiao, Shoeybi, Goldstein, Anandkumar and Catanzaro 2021, "Long-Short Transformer: Efficient
Transformers for Language and Vision", arXiv 2107.02192, section 3. As in the paper, tokens in the window also
contribute through their landmarks. Unlike in the paper, nothing before the beginning of the sequence is
attended to, and there are no relative positions: `rotary` rotates the queries and keys of the window.

Cost per head: bidirectional, time O(T (2w + r) (D + M)); causal, time O(T (w + T r / l) (D + M)), and a state
of O((w + l + T r / l) (D + M)), which is also the time per generated token; memory in both cases
O(T (D + M + r)).
Cannot: generate at a constant cost, since each chunk adds landmarks (it can with `rank=0`, without
landmarks); honour an arbitrary `attn_mask`; be exported by `torch.export` with a dynamic length, since the
length determines the numbers of segments and chunks. Cross-attention is only possible through landmarks, with
`window=None`.
Equals softmax attention: with `rank=0`, `dual_norm=False` and a window at least as long as the sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unrolled.attention._options import GENERAL
from unrolled.attention._packed import attend_packed
from unrolled.attention._parts import Part, attend_to_keys
from unrolled.attention.base import CommonOptions, Heads, Masks, MultiHeadAttention
from unrolled.attention.long_short.parts import (
    earlier_chunks,
    last,
    missing,
    normalised,
    padded,
    pool,
    segment_window,
)
from unrolled.ops.chunks import cut
from unrolled.ops.dense import Linear
from unrolled.ops.masks import without_padding
from unrolled.ops.merge import merge_softmax
from unrolled.ops.options import check_integers
from unrolled.ops.packing import reorder, valid_first
from unrolled.ops.state_checks import CONSTANT, Growing
from unrolled.ops.window import window_attention


class LongShortState(NamedTuple):
    """State of causal attention. The newest tokens come last; rows with few tokens begin with unused places.

    The last l to 2l - 1 tokens are also kept unpooled. When there would be 2l of them, only the last l are
    kept, and a slot for landmarks is added; one slot is always free.
    """

    landmark_k: Tensor  # [B,L,r,G,D]; row b has filled its first position[b] // l slots
    landmark_v: Tensor  # [B,L,r,G,M]
    window_k: Tensor  # [B,w,G,D], normalised and rotated
    window_v: Tensor  # [B,w,G,M], normalised
    chunk_k: Tensor  # [B,l..2l-1,G,D]
    chunk_v: Tensor  # [B,l..2l-1,G,M]
    chunk_logits: Tensor  # [B,l..2l-1,G,r]
    position: Tensor  # [B], valid tokens seen


class Pooling(NamedTuple):
    """Logits of P `[...,G,r]`."""

    logits: Tensor


def _reorder(heads: Heads[Pooling], places: Tensor, padding: Tensor) -> Heads[Pooling]:
    """Reorder the tokens, with zeros at padding."""
    q, k, v, logits = (
        reorder(without_padding(x, padding), places) for x in (heads.q, heads.k, heads.v, heads.inputs.logits)
    )
    positions = None if heads.positions is None else reorder(heads.positions, places)
    return Heads(q, k, v, positions, Pooling(logits))


class LongShortAttention(MultiHeadAttention[LongShortState, Pooling]):
    """Multi-head long-short attention.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`.
        window: w. Bidirectional: the queries are cut into segments of w, and each segment reads its own keys
            and those beside it; for 0, each query reads its own key only. Causal: the number of keys that a
            query reads, its own included; at least l with landmarks. None: landmarks only, which allows
            cross-attention, but not causal attention.
        rank: number r of landmarks, by default 32 for the sequence or, if causal, 1 for each chunk.
        chunk: number l of tokens in a chunk of causal attention.
        dual_norm: normalise keys and values, of window and landmarks; both must then have the same width.

    With `rotary`, queries and keys are rotated in the window; landmarks have no position.

    Raises:
        ValueError: a size is out of range, or does not fit another.
    """

    may_skip_parameters = True  # short sequences have no segment to pool
    supports = GENERAL.but(
        cross=False, recurrence="growing", single_queries=False, dynamic_length=False, reads_input=True
    )
    growing: Growing = {"landmark_k": (1, "n"), "landmark_v": (1, "n")} | dict.fromkeys(
        ("chunk_k", "chunk_v", "chunk_logits"), (1, "l")
    )

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        window: int | None = 64,
        rank: int | None = None,
        chunk: int = 16,
        dual_norm: bool = True,
        **common: Unpack[CommonOptions],
    ):
        if window is None:
            self.supports = self.supports.but(causal=False, cross=True, recurrence="none")
            self.one_way = "it must have a window to be causal"
        super().__init__(d_model, n_heads, **common)
        self.window, self.chunk = window, chunk
        self.rank = (1 if self.causal else 32) if rank is None else rank
        self._check_options(dual_norm)
        if self.rank == 0:
            self.supports = self.supports.but(recurrence="constant", reads_input=False)
            self.growing = CONSTANT
        width, G = self.n_kv_heads * self.head_dim, self.n_kv_heads
        self.pool_proj = Linear(d_model, G * self.rank) if self.rank else None
        self.window_norm = nn.LayerNorm(width) if dual_norm else None
        self.landmark_norm = nn.LayerNorm(width) if dual_norm and self.rank else None

    def _check_options(self, dual_norm: bool) -> None:
        window, rank, chunk = self.window, self.rank, self.chunk
        check_integers(0, rank=rank)
        check_integers(1, chunk=chunk)
        if window is None and rank == 0:
            raise ValueError("rank is 0, but must be at least 1 without a window")
        if window is None and self.rotary:
            raise ValueError("rotary is True, but must be False with window=None: landmarks have no position")
        if window is not None:
            check_integers(0, window=window)
            if self.causal and rank and window < chunk:
                raise ValueError(
                    f"window is {window}, but must be at least chunk = {chunk}, or some tokens of a chunk "
                    "could not be attended to"
                )
            if self.causal and window == 0:
                raise ValueError("window is 0, but must be at least 1 with causal=True")
        D, M = self.head_dim, self.value_dim
        if dual_norm and D != M:
            raise ValueError(f"value_dim is {M}, but must be head_dim = {D} with dual_norm")

    def read_input(self, x: Tensor) -> Pooling:
        """Compute the logits of P, `[...,G,r]`."""
        logits = x[..., :0] if self.pool_proj is None else self.pool_proj(x)
        return Pooling(logits.unflatten(-1, (self.n_kv_heads, self.rank)))

    def attend(self, heads: Heads[Pooling], masks: Masks) -> Tensor:
        """Attend in parallel."""
        if masks.cu_seqlens is not None:
            return attend_packed(self.attend, heads, masks.cu_seqlens)
        padding = masks.key_padding_mask
        if self.window is None:
            return self._landmarks(heads.q, heads.k, heads.v, heads.inputs.logits, padding)[0]
        if padding is None:
            return self._attend(heads, None)
        places = valid_first(padding)
        moved = _reorder(heads, places, padding)
        return reorder(self._attend(moved, reorder(padding, places)), places.argsort(1))

    def _attend(self, heads: Heads[Pooling], padding: Tensor | None) -> Tensor:
        """Attend in rows whose padding, if any, is on the right."""
        assert self.window is not None
        q, k, v, _, (logits,), _ = heads
        near_q, near_k = self._window_heads(heads)
        near_v = normalised(v, self.window_norm)
        if not self.causal:
            parts = [segment_window(near_q, near_k, near_v, self.window, padding)]
            if self.rank:
                parts.append(self._landmarks(q, k, v, logits, padding))
            return merge_softmax(parts)[0]
        parts = [window_attention(near_q, near_k, near_v, window_size=(self.window - 1, 0), return_lse=True)]
        if self.rank and q.shape[1] > self.chunk:
            n = -(-q.shape[1] // self.chunk)
            far_k, far_v = self._chunk_landmarks((k, v, logits), padding)
            o, lse = earlier_chunks(padded(q, 0, n * self.chunk - q.shape[1]), far_k, far_v)
            parts.append((o[:, : q.shape[1]], lse[:, : q.shape[1]]))
        o = merge_softmax(parts)[0]
        return o if padding is None else without_padding(o, padding)

    def _window_heads(self, heads: Heads[Pooling]) -> tuple[Tensor, Tensor]:
        """Return queries and keys for the window: the keys normalised, then both rotated."""
        return self.rotated(heads._replace(k=normalised(heads.k, self.window_norm)))

    def _landmarks(self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor, padding: Tensor | None) -> Part:
        """Attend to the landmarks of a whole sequence."""
        if padding is None:
            padding = k.new_zeros(k.shape[:2], dtype=torch.bool)
        pooled = (pool(logits, normalised(x, self.window_norm), padding) for x in (k, v))
        landmark_k, landmark_v = (normalised(x, self.landmark_norm).to(v.dtype) for x in pooled)
        nothing = padding.all(1, keepdim=True).expand(-1, self.rank)
        return attend_to_keys(q, landmark_k, landmark_v, nothing)

    def _chunk_landmarks(self, tokens: Sequence[Tensor], padding: Tensor | None) -> tuple[Tensor, ...]:
        """Make the landmarks `[B,n,r,G,D]` of all chunks of `k, v, logits`; unfinished ones are not used."""
        k, v, logits = (cut(x, self.chunk) for x in tokens)
        if padding is not None:
            padding = ~cut(~padding, self.chunk)
        return tuple(normalised(pool(logits, x, padding), self.landmark_norm).to(v.dtype) for x in (k, v))

    def init_heads(self, batch_size: int) -> LongShortState:
        """Make the state of `batch_size` sequences before their first token: zeros, one slot for landmarks.

        Without landmarks, no chunk is kept, and the size of the state is constant.
        """
        if self.window is None:
            return super().init_heads(batch_size)
        zero = self.out_weight.new_zeros((), dtype=self.state_dtype)
        B, G, l = batch_size, self.n_kv_heads, self.chunk if self.rank else 0  # noqa: E741 the paper's letter
        sizes = [(1, self.rank, G), (self.window, G), (l, G)]
        k_and_v = [zero.new_zeros(B, *size, x) for size in sizes for x in (self.head_dim, self.value_dim)]
        logits = zero.new_zeros(B, l, G, self.rank)
        position = torch.zeros(B, dtype=torch.long, device=zero.device)
        return LongShortState._make((*k_and_v, logits, position))

    def prefill_heads(
        self, heads: Heads[Pooling], state: LongShortState, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, LongShortState]:
        """Attend in parallel, continuing from a state."""
        self._check_state(state)
        assert self.window is not None
        (B, T), l, dtype = heads.q.shape[:2], self.chunk, state.window_k.dtype  # noqa: E741
        out_dtype, padding = heads.v.dtype, heads.q.new_zeros(B, T, dtype=torch.bool)
        if key_padding_mask is not None:
            padding = key_padding_mask
        places = valid_first(padding)
        q, k, v, positions, (logits,), _ = _reorder(heads, places, padding)
        padding, back = reorder(padding, places), places.argsort(1)
        q, k, v, logits = (x.to(dtype) for x in (q, k, v, logits))

        # Window: the keys in the state precede the new ones.
        near_q, near_k = self._window_heads(Heads(q, k, v, positions))
        near_k = torch.cat([state.window_k, near_k], 1)
        near_v = torch.cat([state.window_v, normalised(v, self.window_norm)], 1)
        hidden, size = torch.cat([missing(state.position, self.window), padding], 1), (self.window - 1, 0)
        near = window_attention(
            near_q, near_k, near_v, window_size=size, key_padding_mask=hidden, return_lse=True
        )
        parts = [near]

        # Landmarks: the unfinished chunk of the state precedes the new tokens.
        seen = (~padding).sum(1)
        window = [last(x, self.window + seen, self.window) for x in (near_k, near_v)]
        slots: Sequence[Tensor] = (state.landmark_k, state.landmark_v)
        chunk: Sequence[Tensor] = (state.chunk_k, state.chunk_v, state.chunk_logits)
        if self.rank:
            recent = [torch.cat([x[:, -l:], new], 1) for x, new in zip(chunk, (k, v, logits), strict=True)]
            hidden = torch.cat([missing(state.position % l, l), padding], 1)
            order = valid_first(hidden)
            landmarks = self._chunk_landmarks([reorder(x, order) for x in recent], reorder(hidden, order))
            parts.append(self._read_filled_slots(q, state))
            queries = padded(reorder(padded(q, l, 0), order), 0, -(T + l) % l)
            o, lse = earlier_chunks(queries, *landmarks)
            far_o, far_lse = (reorder(x[:, : T + l], order.argsort(1))[:, l:] for x in (o, lse))
            parts.append((far_o, far_lse))
            fed = (state.landmark_k.shape[1] - 1) * l + state.chunk_k.shape[1] - l + T
            slots = self._fill_slots(state, landmarks, state.position + seen, fed // l + 1)
            chunk = [padded(last(x, l + seen, l), fed % l, 0) for x in recent]
        o = without_padding(merge_softmax(parts)[0].to(out_dtype), padding)
        return reorder(o, back), LongShortState._make((*slots, *window, *chunk, state.position + seen))

    def step_heads(self, heads: Heads[Pooling], state: LongShortState) -> tuple[Tensor, LongShortState]:
        """Attend to the window and all landmarks; the last token of a chunk then adds landmarks."""
        self._check_state(state)
        assert self.window is not None
        l, dtype = self.chunk, state.window_k.dtype  # noqa: E741
        q, k, v, logits = (x.unsqueeze(1).to(dtype) for x in (heads.q, heads.k, heads.v, heads.inputs.logits))
        positions = None if heads.positions is None else heads.positions.unsqueeze(1)
        near_q, near_k = self._window_heads(Heads(q, k, v, positions))
        near_k = torch.cat([state.window_k[:, 1:], near_k], 1)
        near_v = torch.cat([state.window_v[:, 1:], normalised(v, self.window_norm)], 1)
        position = state.position + 1
        parts = [attend_to_keys(near_q, near_k, near_v, missing(position, self.window))]
        slots: Sequence[Tensor] = (state.landmark_k, state.landmark_v)
        chunk: Sequence[Tensor] = (state.chunk_k, state.chunk_v, state.chunk_logits)
        if self.rank:
            parts.append(self._read_filled_slots(q, state))
            chunk = [torch.cat([x, new], 1) for x, new in zip(chunk, (k, v, logits), strict=True)]
            landmarks = self._chunk_landmarks([x[:, -l:] for x in chunk], None)
            full = chunk[0].shape[1] == 2 * l
            slots = self._fill_slots(state, landmarks, position, state.landmark_k.shape[1] + full)
            chunk = [x[:, l:].clone() for x in chunk] if full else chunk
        o = merge_softmax(parts)[0].squeeze(1).to(heads.v.dtype)
        return o, LongShortState._make((*slots, near_k, near_v, *chunk, position))

    def _read_filled_slots(self, q: Tensor, state: LongShortState) -> Part:
        """Attend to the landmarks of the state."""
        slot = torch.arange(state.landmark_k.shape[1], device=q.device)
        empty = (slot >= (state.position // self.chunk).unsqueeze(1)).repeat_interleave(self.rank, 1)
        k, v = state.landmark_k.flatten(1, 2), state.landmark_v.flatten(1, 2)
        return attend_to_keys(q, k, v, empty)

    def _fill_slots(
        self, state: LongShortState, landmarks: tuple[Tensor, ...], position: Tensor, n: int
    ) -> tuple[Tensor, ...]:
        """Write landmarks `[B,n',r,G,D]`, from the first unfinished chunk on, into n slots."""
        slot = torch.arange(n, device=position.device)
        nth = slot - (state.position // self.chunk).unsqueeze(1)
        new = (nth >= 0) & (slot < (position // self.chunk).unsqueeze(1))
        return tuple(
            torch.where(
                new[..., None, None, None],
                reorder(x, nth.clamp(0, x.shape[1] - 1)),
                pad(old, (0, 0, 0, 0, 0, 0, 0, n - old.shape[1])),
            )
            for x, old in zip(landmarks, (state.landmark_k, state.landmark_v), strict=True)
        )

    def _check_state(self, state: LongShortState) -> None:
        """Require a valid number of unpooled tokens in the state, which `check_state` does not know."""
        least = self.chunk if self.rank else 0
        most = 2 * self.chunk - 1 if self.rank else 0
        for name in ("chunk_k", "chunk_v", "chunk_logits"):
            kept = getattr(state, name).shape[1]
            if not least <= kept <= most:
                raise ValueError(
                    f"state.{name} has {kept} tokens, but a module with chunk = {self.chunk} and "
                    f"rank = {self.rank} keeps {least} to {most}"
                )
