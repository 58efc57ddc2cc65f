"""Beam search for the most likely continuations.

A beam of size K holds the K most likely prefixes of one length. Each is extended by every token, and all
extensions are ranked by log p. Of the first K, the finished ones become hypotheses, of which the K with the
best scores are kept; the K most likely unfinished ones are the next beam. The score is

    score(Y) = log p(Y) / lp(|Y|),        lp(n) = ((5 + n) / 6)^alpha,

since log p alone favours short continuations; |Y| includes the stop (Wu et al. 2016, "Google's Neural Machine
Translation System", arXiv 1609.08144, eq. 14). `early_stopping` says when the search ends, once there are
K hypotheses. With b the most likely prefix, of n tokens, and N the maximum length of a continuation:

    True       at once
    False      if log p(b) / lp(n) is not above the worst score: b would not improve it by ending here
    "never"    if log p(b) / lp(N) is not above the worst score: no continuation of b can improve it

With K = 1 it is greedy decoding, except for "never"; with K as large as the number of prefixes, an exhaustive
search. It equals the beam search of Hugging Face transformers with two exceptions: there lp(n) is n^alpha, so
the results are the same only for a `length_penalty` of 0, and n-grams of the prompt count too.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from unrolled.generation._mode import drawing_mode
from unrolled.generation._ngrams import end_with, repeated
from unrolled.generation._stops import Stop, stop_sequences
from unrolled.ops.checks import check_tensor
from unrolled.ops.options import at_least, is_number
from unrolled.ops.state import select

MOST_BEAMS = 10_000

EarlyStopping = bool | Literal["never"]


class Steps(Protocol):
    """What `beam_search` needs of a model."""

    config: Any

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
            them; without one, all have `max_new_tokens`.

    Returns:
        for each row up to K hypotheses, best score first; none if no allowed continuation ends or reaches
        `max_new_tokens`.

    Raises:
        ValueError: an argument is out of range, or the logits are not a distribution.
    """
    check_tensor("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}, but must be [B, V]")
    B, V = logits.shape
    _check(beam_size, length_penalty, early_stopping, min_new_tokens, no_repeat_ngram_size)
    limits = _limits(max_new_tokens, min_new_tokens, B)
    stops = stop_sequences(stop, V)
    found: list[list[Hypothesis]] = [[] for _ in range(B)]
    if B == 0 or max(limits) == 0:
        return found

    def is_over(row: int, length: int, best: float) -> bool:
        """Whether a row is finished after so many tokens; `best` is the log p of the most likely prefix."""
        if len(found[row]) < beam_size or early_stopping is True:
            return len(found[row]) == beam_size
        reach = limits[row] if early_stopping == "never" else length
        return best / penalty(reach, length_penalty) <= found[row][-1].score

    with drawing_mode(model):
        device = logits.device
        rows = [row for row in range(B) if limits[row]]  # unfinished rows, in batch order
        K = 1  # prefixes per row: first the empty one, then beam_size
        ranked = beam_size * (1 + len({ids[-1] for ids in stops}))  # enough for beam_size unfinished ones
        if len(rows) < B:
            kept = torch.tensor(rows, device=device)
            logits, state = logits[kept], select(state, kept)
        tokens = torch.empty(len(rows), 1, 0, dtype=torch.long, device=device)
        log_probs = torch.zeros(len(rows), 1, dtype=torch.float64, device=device)  # -inf: no prefix here
        while True:
            n, length = len(rows), tokens.shape[2] + 1
            nothing = (log_probs == -torch.inf).unsqueeze(2)  # ignore logits after a missing prefix
            following = logits.double().log_softmax(-1).view(n, K, V).masked_fill(nothing, 0)
            if following.isnan().any():
                raise ValueError(
                    f"the logits of new token {length} hold NaN, infinity or nothing but minus infinity: "
                    "nothing is likeliest"
                )
            for ids in stops:
                if length - len(ids) < min_new_tokens:
                    following[..., ids[-1]].masked_fill_(end_with(tokens, ids[:-1]), -torch.inf)
            if no_repeat_ngram_size:
                following.masked_fill_(repeated(tokens, no_repeat_ngram_size, V), -torch.inf)

            following = (log_probs.unsqueeze(2) + following).flatten(1)
            log_probs, place = following.topk(min(ranked, K * V), dim=1)
            parents, token = place // V, place % V
            tokens = tokens.gather(1, parents.unsqueeze(2).expand(-1, -1, length - 1))
            tokens = torch.cat([tokens, token.unsqueeze(2)], dim=2)
            ended = torch.tensor([limits[row] == length for row in rows], device=device).unsqueeze(1)
            for ids in stops:
                ended = ended | end_with(tokens, ids)

            for i, k in (ended & (log_probs > -torch.inf))[:, :beam_size].nonzero().tolist():
                log_prob = log_probs[i, k].item()
                score = log_prob / penalty(length, length_penalty)
                found[rows[i]].append(Hypothesis(tokens[i, k].cpu(), log_prob, score))
            for row in rows:
                found[row] = sorted(found[row], key=lambda h: -h.score)[:beam_size]
            beam, chosen = log_probs.masked_fill(ended, -torch.inf).topk(min(beam_size, K * V), dim=1)
            going = [
                i
                for i, (row, best) in enumerate(zip(rows, beam[:, 0].tolist(), strict=True))
                if best > -torch.inf and not is_over(row, length, best)
            ]
            if not going:
                break
            kept = torch.tensor(going, device=device)
            at = kept.unsqueeze(1), chosen[kept]
            state = select(state, (K * at[0] + parents[at]).flatten())
            tokens, log_probs, rows, K = tokens[at], beam[kept], [rows[i] for i in going], beam.shape[1]
            logits, state = model.step(tokens[..., -1].flatten(), state)
    # Copies, made here, since a tensor of inference mode could be no input of training.
    return [[h._replace(tokens=h.tokens.clone()) for h in hypotheses] for hypotheses in found]


def _check(
    beam_size: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    min_new_tokens: int,
    no_repeat_ngram_size: int,
) -> None:
    """Reject options that are out of range for any model."""
    if at_least(1, "beam_size", beam_size) > MOST_BEAMS:
        raise ValueError(f"beam_size is {beam_size}, but must be at most {MOST_BEAMS}")
    if not (is_number(length_penalty) and length_penalty >= 0):
        raise ValueError(f"length_penalty is {length_penalty!r}, but must be a number of at least 0")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping is {early_stopping!r}, but must be True, False or 'never'")
    at_least(0, "min_new_tokens", min_new_tokens)
    at_least(0, "no_repeat_ngram_size", no_repeat_ngram_size)


def _limits(max_new_tokens: int | Sequence[int], min_new_tokens: int, rows: int) -> list[int]:
    """Return the maximum number of new tokens per row."""
    given = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens]
    limits = given if isinstance(max_new_tokens, Sequence) else given * rows
    if len(limits) != rows or any(type(limit) is not int or limit < 0 for limit in given):
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, but must be at least 0, one whole number or {rows} of them"
        )
    if given and min_new_tokens > min(given):
        raise ValueError(
            f"min_new_tokens is {min_new_tokens}, but must be at most max_new_tokens = {min(given)}"
        )
    return limits
