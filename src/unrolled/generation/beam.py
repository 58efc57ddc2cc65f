"""Beam search for the most likely continuations.

A beam of size K holds the K most likely prefixes of one length. Each prefix is extended by every token, and
all extensions are ranked by log p. The finished ones among the first K become hypotheses, and the K
hypotheses with the best scores are kept. The K most likely unfinished extensions are the next beam. The score
of a hypothesis Y is

    score(Y) = log p(Y) / lp(|Y|),        lp(n) = ((5 + n) / 6)^alpha,

since log p alone favours short continuations; |Y| includes the stop (Wu et al. 2016, "Google's Neural Machine
Translation System", arXiv 1609.08144, eq. 14). `early_stopping` says when the search ends, once there are
K hypotheses. Let b be the most likely prefix, with n tokens, and N the maximum length of a continuation:

    True       at once
    False      if log p(b) / lp(n) is not above the worst score: b would not improve it by ending here
    "never"    if log p(b) / lp(N) is not above the worst score: no continuation of b can improve it

With K = 1, beam search is greedy decoding, except for "never". With K as large as the number of prefixes, it
is an exhaustive search. It equals the beam search of Hugging Face transformers, with two exceptions. There,
lp(n) is n^alpha, so the results are the same only for a `length_penalty` of 0. And there, n-grams of the
prompt count too.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from unrolled.contract import VocabularyConfig
from unrolled.decode.request import Stop, stop_sequences
from unrolled.generation._ngrams import end_with, repeated
from unrolled.models.mode import drawing_mode
from unrolled.ops.checks import check_tensor, wrong, wrong_shape
from unrolled.ops.options import at_least, is_number
from unrolled.ops.state import select

MOST_BEAMS = 10_000
MOST_PENALTY = 50  # lp is then below the largest number for up to a million tokens

EarlyStopping = bool | Literal["never"]


class BeamOptions(TypedDict, total=False):
    """Keyword arguments of `beam_search`, except `max_new_tokens`."""

    beam_size: int
    length_penalty: float
    early_stopping: EarlyStopping
    min_new_tokens: int
    no_repeat_ngram_size: int
    stop: Stop


class Steps(Protocol):
    """A model that `beam_search` can run."""

    @property
    def config(self) -> VocabularyConfig:
        """The config of the model."""

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one token per row [B]; return logits [B, V] and the next state."""


class Hypothesis(NamedTuple):
    """A continuation.

    Attributes:
        tokens: [T] int64 on the CPU, including the stop unless the maximum length was reached.
        log_prob: log p(Y), in nats.
        score: log p(Y) / lp(T).
    """

    tokens: Tensor
    log_prob: float
    score: float


def penalty(length: int, alpha: float) -> float:
    """lp(n) = ((5 + n) / 6)^alpha."""
    return float(((5 + length) / 6) ** alpha)


def beam_search(
    model: Steps,
    logits: Tensor,
    state: Any,
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    early_stopping: EarlyStopping = False,
    max_new_tokens: int | Sequence[int],
    min_new_tokens: int = 0,
    no_repeat_ngram_size: int = 0,
    stop: Stop = None,
) -> list[list[Hypothesis]]:
    """Search the most likely continuations of each row.

    The model runs in evaluation mode without gradients; its mode is restored afterwards. Tokens excluded by
    `min_new_tokens` and `no_repeat_ngram_size` are not chosen; the probabilities of the others stay as they
    are.

    Args:
        model: a `Decoder`, an `EncoderDecoder`, or anything else with `step`.
        logits: [B, V], of the first new token of each row.
        state: the state of the rows before that token; not modified.
        beam_size: K, at least 1 and at most 10,000.
        length_penalty: alpha; 0 for none.
        early_stopping: when to end, once there are K hypotheses: True, False or "never", as above.
        max_new_tokens: maximum length of a continuation, for all rows or one per row.
        min_new_tokens: minimum length of a continuation before its stop.
        no_repeat_ngram_size: n-grams of this size occur at most once among the new tokens (Paulus et al.
            2017, arXiv 1705.04304, section 2.5); 0 disables.
        stop: one token id, or several, each an id or a sequence of ids. A continuation ends with the first of
            them; without a stop, all continuations have `max_new_tokens` tokens.

    Returns:
        for each row up to K hypotheses, best score first; none if no allowed continuation ends or reaches
        `max_new_tokens`.

    Raises:
        ValueError: an argument is out of range, or the logits are not a distribution.
    """
    check_tensor("logits", logits)
    if logits.dim() != 2:
        raise wrong_shape("logits", logits, "[B, V]")
    B, V = logits.shape
    search = _Search(
        V, beam_size, length_penalty, early_stopping, min_new_tokens, no_repeat_ngram_size,
        stop_sequences(stop, V), _limits(max_new_tokens, min_new_tokens, B), [[] for _ in range(B)],
    )  # fmt: skip
    search.check()
    if B == 0 or max(search.limits) == 0:
        return search.found
    with drawing_mode(model):
        device = logits.device
        rows = [row for row in range(B) if search.limits[row]]
        if len(rows) < B:
            kept = torch.tensor(rows, device=device)
            logits, state = logits[kept], select(state, kept)
        tokens = torch.empty(len(rows), 1, 0, dtype=torch.long, device=device)
        beam = _Beam(rows, tokens, torch.zeros(len(rows), 1, dtype=torch.float64, device=device))
        while True:
            ranked, parents = search.extend(beam, search.log_probs(beam, logits))
            ended = search.collect(ranked)
            going, chosen, log_probs = search.prune(ranked, ended)
            if not going:
                break
            kept = torch.tensor(going, device=device)
            at = kept.unsqueeze(1), chosen[kept]
            K = beam.tokens.shape[1]
            state = select(state, (K * at[0] + parents[at]).flatten())
            beam = _Beam([beam.rows[i] for i in going], ranked.tokens[at], log_probs[kept])
            logits, state = model.step(beam.tokens[..., -1].flatten(), state)
    # Clones, made outside inference mode: a tensor created inside could not be an input of training.
    return [[h._replace(tokens=h.tokens.clone()) for h in hypotheses] for hypotheses in search.found]


class _Beam(NamedTuple):
    """K prefixes for each of n unfinished rows."""

    rows: list[int]  # in batch order
    tokens: Tensor  # [n,K,L]
    log_probs: Tensor  # [n,K]; minus infinity for a missing prefix


class _Search(NamedTuple):
    """The options of a search, and the hypotheses found so far."""

    vocab_size: int
    beam_size: int
    length_penalty: float
    early_stopping: EarlyStopping
    min_new_tokens: int
    no_repeat_ngram_size: int
    stops: list[list[int]]
    limits: list[int]  # the maximum number of new tokens of each row
    found: list[list[Hypothesis]]  # of each row, best score first

    def check(self) -> None:
        """Reject options that are out of range for any model."""
        if at_least(1, "beam_size", self.beam_size) > MOST_BEAMS:
            raise ValueError(f"beam_size is {self.beam_size}, but must be at most {MOST_BEAMS}")
        if not (is_number(self.length_penalty) and 0 <= self.length_penalty <= MOST_PENALTY):
            raise ValueError(
                f"length_penalty is {self.length_penalty!r}, but must be a number from 0 to {MOST_PENALTY}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping is {self.early_stopping!r}, but must be True, False or 'never'")
        at_least(0, "no_repeat_ngram_size", self.no_repeat_ngram_size)

    def log_probs(self, beam: _Beam, logits: Tensor) -> Tensor:
        """Compute log p of each next token `[n,K,V]`; minus infinity for those not allowed."""
        n, K, L = beam.tokens.shape
        missing = (beam.log_probs == -torch.inf).unsqueeze(2)  # their logits are meaningless
        following = logits.double().log_softmax(-1).view(n, K, self.vocab_size).masked_fill(missing, 0)
        if following.isnan().any():
            raise ValueError(
                f"logits of new token {L + 1} hold NaN, +inf or only -inf, but must define a distribution"
            )
        for ids in self.stops:
            if L + 1 - len(ids) < self.min_new_tokens:
                following[..., ids[-1]].masked_fill_(end_with(beam.tokens, ids[:-1]), -torch.inf)
        if self.no_repeat_ngram_size:
            seen = repeated(beam.tokens, self.no_repeat_ngram_size, self.vocab_size)
            following.masked_fill_(seen, -torch.inf)
        return following

    def extend(self, beam: _Beam, following: Tensor) -> tuple[_Beam, Tensor]:
        """Return the most likely extensions, and the index of the prefix of each.

        Enough are returned that beam_size of them are unfinished: at most one extension of each prefix ends
        with each stop.
        """
        total = (beam.log_probs.unsqueeze(2) + following).flatten(1)
        most = self.beam_size * (1 + len({ids[-1] for ids in self.stops}))
        log_probs, place = total.topk(min(most, total.shape[1]), dim=1)
        parents, token = place // self.vocab_size, place % self.vocab_size
        tokens = beam.tokens.gather(1, parents.unsqueeze(2).expand(-1, -1, beam.tokens.shape[2]))
        return _Beam(beam.rows, torch.cat([tokens, token.unsqueeze(2)], dim=2), log_probs), parents

    def collect(self, ranked: _Beam) -> Tensor:
        """Make hypotheses of the finished extensions among the first beam_size; return which are finished."""
        length, device = ranked.tokens.shape[2], ranked.tokens.device
        ended = torch.tensor([self.limits[row] == length for row in ranked.rows], device=device).unsqueeze(1)
        for ids in self.stops:
            ended = ended | end_with(ranked.tokens, ids)
        for i, k in (ended & (ranked.log_probs > -torch.inf))[:, : self.beam_size].nonzero().tolist():
            log_prob = ranked.log_probs[i, k].item()
            score = log_prob / penalty(length, self.length_penalty)
            self.found[ranked.rows[i]].append(Hypothesis(ranked.tokens[i, k].cpu(), log_prob, score))
        for row in ranked.rows:
            self.found[row] = sorted(self.found[row], key=lambda h: -h.score)[: self.beam_size]
        return ended

    def prune(self, ranked: _Beam, ended: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """Return the rows that go on, and the indices and log p of the beam_size best unfinished prefixes."""
        unfinished = ranked.log_probs.masked_fill(ended, -torch.inf)
        log_probs, chosen = unfinished.topk(min(self.beam_size, unfinished.shape[1]), dim=1)
        length = ranked.tokens.shape[2]
        likeliest = enumerate(zip(ranked.rows, log_probs[:, 0].tolist(), strict=True))
        going = [i for i, (row, best) in likeliest if not self._is_over(row, length, best)]
        return going, chosen, log_probs

    def _is_over(self, row: int, length: int, best: float) -> bool:
        """Whether a row is finished after `length` tokens; `best` is log p of its most likely prefix."""
        if best == -torch.inf:
            return True
        if len(self.found[row]) < self.beam_size or self.early_stopping is True:
            return len(self.found[row]) == self.beam_size
        reach = self.limits[row] if self.early_stopping == "never" else length
        return best / penalty(reach, self.length_penalty) <= self.found[row][-1].score


def _limits(max_new_tokens: int | Sequence[int], min_new_tokens: int, rows: int) -> list[int]:
    """Return the maximum number of new tokens per row."""
    at_least(0, "min_new_tokens", min_new_tokens)
    given = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens]
    limits = given if isinstance(max_new_tokens, Sequence) else given * rows
    if len(limits) != rows or any(type(limit) is not int or limit < 0 for limit in given):
        raise wrong("max_new_tokens", max_new_tokens, f"a whole number of at least 0, or {rows} of them")
    if given and min_new_tokens > min(given):
        raise wrong("min_new_tokens", min_new_tokens, f"at most max_new_tokens = {min(given)}")
    return limits
