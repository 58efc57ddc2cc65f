r"""Multiplicative attention: the state of a decoder attends to an encoded sentence, or to a window of it.

    w_t = softmax_s(score(h_t, m_s))        c_t = sum_s w_t(s) m_s

    dot       h_t . m_s                         general   h_t . W_a m_s
    concat    v_a . tanh(W_a [h_t; m_s])        location  (W_a h_t)_s

h_t is the query, in the paper the decoder's state after step t; no score is scaled. Local attention attends
to a window around a position p_t only:

    local-m   p_t = t;  w_t as above, within |s - p_t| <= D
    local-p   p_t = S sigmoid(v_p . tanh(W_p h_t));  w_t of local-m, times exp(-(s - p_t)^2 / (2 (D/2)^2))

Positions are counted from 0, without padding; S is their number. The Gaussian is applied after the softmax,
so that the weights of local-p sum to less than 1.

Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", arXiv 1508.04025,
section 3.1, eq. 7 and 8, and section 3.2, eq. 9 and 10. The authors' code differs; its variants are the
score "query_concat", `FlooredPredictiveAttention` and `ScaledScoresAttention`.

Cost, for a memory of S vectors M wide: time O(T S M), memory O(T S), and for concat that of additive
attention; per query time O(S M); state O(S M). A window masks scores, and saves no time.
Cannot: be a layer of a decoder, since it does not attend within one sequence.
Equals softmax attention: with the score "dot", at scale 1. Local-m equals global attention where D >= S, and
so does local-p if sigma is also infinite.
"""

from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from unrolled.alignment.base import Alignment, MemoryState, additive_scores, softmax_inside
from unrolled.ops.options import at_least


class Score(nn.Module):
    """A score of projected queries and keys; by default, both projections are the identity."""

    def project_memory(self, memory: Tensor) -> Tensor:
        """Project a memory `[B,S,memory_dim]` to keys."""
        return memory

    def project_query(self, query: Tensor) -> Tensor:
        """Project queries `[B,T,query_dim]`."""
        return query

    def forward(self, query: Tensor, state: MemoryState) -> Tensor:
        """Score projected queries `[B,T,K]`: `[B,T,S]`; by default their products with the keys."""
        return query @ state.keys.mT


class DotScore(Score):
    """h . m, which have the same width.

    Raises:
        ValueError: the widths differ.
    """

    def __init__(self, query_dim: int, memory_dim: int):
        super().__init__()
        if query_dim != memory_dim:
            raise ValueError(
                f"query_dim is {query_dim} and memory_dim {memory_dim}, but must be equal for the score "
                "'dot': use 'general'"
            )


class GeneralScore(Score):
    """h . W_a m, with W_a m computed once."""

    def __init__(self, query_dim: int, memory_dim: int):
        super().__init__()
        self.key_proj = nn.Linear(memory_dim, query_dim, bias=False)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Return W_a m."""
        return self.key_proj(memory)  # type: ignore[no-any-return]


class ConcatScore(Score):
    """v_a . tanh(W_a [h; m]), which is additive attention without a bias.

    Args:
        query_dim, memory_dim: of the attention.
        attention_dim: the rows of W_a; `query_dim` by default.

    Raises:
        ValueError: attention_dim below 1.
    """

    def __init__(self, query_dim: int, memory_dim: int, attention_dim: int | None = None):
        super().__init__()
        width = query_dim if attention_dim is None else at_least(1, "attention_dim", attention_dim)
        self.query_proj = nn.Linear(query_dim, width, bias=False)
        self.key_proj = nn.Linear(memory_dim, width, bias=False)
        self.v = nn.Parameter(torch.empty(width).uniform_(-(width**-0.5), width**-0.5))

    def project_memory(self, memory: Tensor) -> Tensor:
        """Return the part of W_a [h; m] from m."""
        return self.key_proj(memory)  # type: ignore[no-any-return]

    def project_query(self, query: Tensor) -> Tensor:
        """Return the part of W_a [h; m] from h."""
        return self.query_proj(query)  # type: ignore[no-any-return]

    def forward(self, query: Tensor, state: MemoryState) -> Tensor:
        """Return the scores."""
        return additive_scores(query, state.keys, self.v.to(query.dtype))


class QueryConcatScore(ConcatScore):
    """v_a . tanh(m + W_a h), as in the authors' code, which does not project the memory."""

    def __init__(self, query_dim: int, memory_dim: int):
        super().__init__(query_dim, memory_dim, memory_dim)
        del self.key_proj

    def project_memory(self, memory: Tensor) -> Tensor:
        """Return the memory as it is."""
        return memory


class LocationScore(Score):
    """(W_a h)_s, with a row of W_a for each position, whatever the memory holds.

    Args:
        query_dim, memory_dim: of the attention.
        max_length: number of rows of W_a, the largest length of a memory.

    Raises:
        ValueError: max_length below 1.
    """

    def __init__(self, query_dim: int, memory_dim: int, max_length: int = 50):
        super().__init__()
        self.max_length = at_least(1, "max_length", max_length)
        self.place_proj = nn.Linear(query_dim, max_length, bias=False)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Return keys of width 0."""
        if memory.shape[1] > self.max_length:
            raise ValueError(
                f"memory has length {memory.shape[1]}, but must have at most max_length = {self.max_length} "
                "for the score 'location'"
            )
        return memory[..., :0]

    def project_query(self, query: Tensor) -> Tensor:
        """Return W_a h."""
        return self.place_proj(query)  # type: ignore[no-any-return]

    def forward(self, query: Tensor, state: MemoryState) -> Tensor:
        """Select the score of each position from `[B,T,max_length]`."""
        place = places(state.padding).unsqueeze(1).expand(-1, query.shape[1], -1)
        return query.gather(-1, place)


SCORES: dict[str, Callable[..., Score]] = {
    "dot": DotScore,
    "general": GeneralScore,
    "concat": ConcatScore,
    "query_concat": QueryConcatScore,
    "location": LocationScore,
}
"""Scores by name; each takes `query_dim`, `memory_dim` and its options."""


class ScoreOptions(TypedDict, total=False):
    """Options of `LuongAttention`, for the mechanisms that derive from it."""

    score: str
    attention_dim: int
    max_length: int


class LuongAttention(Alignment):
    """Global attention.

    Args:
        query_dim, memory_dim: see `Alignment`.
        score: a name in `SCORES`; "dot" needs query_dim = memory_dim.
        score_options: further arguments of the score: "concat" has `attention_dim`, "location" `max_length`
            (50 by default), beyond which `read` refuses a memory.

    Raises:
        ValueError: an unknown score, or widths that do not fit it.
    """

    def __init__(
        self, query_dim: int, memory_dim: int | None = None, *, score: str = "general", **score_options: int
    ):
        super().__init__(query_dim, memory_dim)
        if score not in SCORES:
            raise ValueError(f"score is {score!r}, but must be one of {', '.join(SCORES)}")
        self.score = SCORES[score](query_dim, self.memory_dim, **score_options)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Project by the score."""
        return self.score.project_memory(memory)

    def project_query(self, query: Tensor) -> Tensor:
        """Project by the score."""
        return self.score.project_query(query)

    def scores(self, query: Tensor, state: MemoryState) -> Tensor:
        """Return score(h_t, m_s) (section 3.1)."""
        return self.score(query, state)  # type: ignore[no-any-return]


class LocalMonotonicAttention(LuongAttention):
    """Local-m: query t attends to the positions within D of t, or of the last position if t is beyond it.

    Args:
        query_dim, memory_dim, score, score_options: see `LuongAttention`.
        window: D, at least 1.

    Raises:
        ValueError: window below 1; otherwise as `LuongAttention`.
    """

    def __init__(
        self,
        query_dim: int,
        memory_dim: int | None = None,
        *,
        window: int = 10,
        **score_options: Unpack[ScoreOptions],
    ):
        super().__init__(query_dim, memory_dim, **score_options)
        self.window = at_least(1, "window", window)

    def weigh(self, query: Tensor, state: MemoryState) -> Tensor:
        """Compute the softmax within the window."""
        t = state.position.unsqueeze(1) + torch.arange(query.shape[1], device=query.device)
        centre = torch.minimum(t, lengths(state.padding).unsqueeze(1) - 1)
        inside = in_window(state.padding, centre, self.window)
        return softmax_inside(self.scores(query, state), inside)


class LocalPredictiveAttention(LuongAttention):
    """Local-p: each query predicts the centre of its window.

    Args:
        query_dim, memory_dim, score, score_options: see `LuongAttention`.
        window: D, at least 1.
        sigma: standard deviation of the Gaussian, D/2 by default; `math.inf` for none.

    Raises:
        ValueError: window below 1, or sigma not above 0; otherwise as `LuongAttention`.
    """

    def __init__(
        self,
        query_dim: int,
        memory_dim: int | None = None,
        *,
        window: int = 10,
        sigma: float | None = None,
        **score_options: Unpack[ScoreOptions],
    ):
        super().__init__(query_dim, memory_dim, **score_options)
        self.window = at_least(1, "window", window)
        self.sigma = window / 2 if sigma is None else sigma
        if not self.sigma > 0:
            raise ValueError(f"sigma is {sigma!r}, but must be above 0")
        self.place_proj = nn.Linear(query_dim, query_dim, bias=False)
        self.place_v = nn.Linear(query_dim, 1, bias=False)

    def project_query(self, query: Tensor) -> Tensor:
        """Project by the score, and append the logit of p_t / S."""
        place = self.place_v(torch.tanh(self.place_proj(query)))
        return torch.cat([super().project_query(query), place], -1)

    def predict(self, logit: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_t `[B,T]` (eq. 9) and the middle of the window, for memories of `length [B,1]`."""
        p = length * torch.sigmoid(logit)
        return p, p

    def weigh(self, query: Tensor, state: MemoryState) -> Tensor:
        """Compute the softmax within the window, times the Gaussian (eq. 10)."""
        query, inside, gaussian = self._look(query, state)
        return softmax_inside(self.scores(query, state), inside) * gaussian

    def _look(self, query: Tensor, state: MemoryState) -> tuple[Tensor, Tensor, Tensor]:
        query, logit = query[..., :-1], query[..., -1]
        p, centre = self.predict(logit, lengths(state.padding).unsqueeze(1).to(query.dtype))
        distance = places(state.padding).unsqueeze(1) - p.unsqueeze(-1)
        gaussian = torch.exp(-distance.square() / (2 * self.sigma**2))
        return query, in_window(state.padding, centre, self.window), gaussian


class FlooredPredictiveAttention(LocalPredictiveAttention):
    """Local-p of the authors' code: p_t = (S - 1) sigmoid(..), and the window is around its integer part."""

    def predict(self, logit: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_t and the middle of the window, which has no gradient."""
        p = (length - 1).clamp(min=0) * torch.sigmoid(logit)
        return p, p.floor()


class ScaledScoresAttention(FlooredPredictiveAttention):
    """An option of the authors' code: the Gaussian multiplies the scores, and the weights sum to 1."""

    def weigh(self, query: Tensor, state: MemoryState) -> Tensor:
        """Compute the softmax of score * gaussian within the window."""
        query, inside, gaussian = self._look(query, state)
        return softmax_inside(self.scores(query, state) * gaussian, inside)


def lengths(padding: Tensor) -> Tensor:
    """Count the positions that are not padding: `[B,S]` bool to `[B]`."""
    return (~padding).sum(-1)


def places(padding: Tensor) -> Tensor:
    """Number the positions from 0, without padding: `[B,S]`. The numbers at padding have no meaning."""
    return ((~padding).cumsum(-1) - 1).clamp(min=0)


def in_window(padding: Tensor, centre: Tensor, window: int) -> Tensor:
    """Return whether position s is within `window` of `centre [B,T]`, and not padding: `[B,T,S]`."""
    near = (places(padding).unsqueeze(1) - centre.unsqueeze(-1)).abs() <= window
    return near & ~padding.unsqueeze(1)
