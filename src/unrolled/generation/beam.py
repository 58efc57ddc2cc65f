"""Beam search: the likeliest continuations, kept several at a time.

A beam of size K holds the K likeliest beginnings of one length. Each is continued by every token, and of all
these the K likeliest are kept. One that ends with the stop symbol is finished and takes its place with it, so
that the search is over when K are finished. What is best among them is decided by

    score(Y) = log p(Y) / lp(|Y|),        lp(n) = ((5 + n) / 6)^alpha,

since log p alone favours short ones; |Y| counts the stop symbol (Wu et al. 2016, "Google's Neural Machine
Translation System", arXiv 1609.08144, eq. 14). The beam that shrinks is that of Bahdanau et al. 2015 (arXiv
1409.0473). With K = 1 it is greedy decoding; with K as large as the number of all beginnings, an exhaustive
search.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from unrolled.generation._mode import drawing_mode
from unrolled.ops.checks import check_tensor
from unrolled.ops.options import at_least, is_number
from unrolled.ops.state import select

MOST_BEAMS = 10_000
MORE_THAN_SOURCE = 50  # tokens that a translation may be longer than its source (Vaswani et al., section 6.1)


class Steps(Protocol):
    """What `beam_search` needs of a model."""

    config: Any

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one token per row [B]; return logits [B, V] and the next state."""


class Translates(Steps, Protocol):
    """What `translate` needs of a model; its `config` has `vocab_size`, the id of the start symbol."""

    def init_state(self, source: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Read the sources [B, S]; return the state before the first token of their translations."""


class Hypothesis(NamedTuple):
    """A continuation.

    Attributes:
        tokens: [T] int64 on the CPU, with the stop symbol, unless the length ran out.
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
    max_new_tokens: int | Sequence[int],
    stop: int | None = None,
) -> list[list[Hypothesis]]:
    """Search the likeliest continuations of each row.

    The model runs in evaluation mode without gradients, and is handed back in the mode it came in.

    Args:
        model: a `Decoder`, an `EncoderDecoder`, or anything else with `step`.
        logits: [B, V], of the first new token of each row.
        state: what the rows have read before it; not changed.
        beam_size: K, at least 1 and at most 10,000.
        length_penalty: alpha; 0 for none.
        max_new_tokens: the most tokens of a continuation, of all rows or one number for each.
        stop: the id of the symbol that ends a continuation; without one, all have `max_new_tokens`.

    Returns:
        for each row up to K hypotheses, those of the best score first.

    Raises:
        ValueError: an argument is out of range, or logits make no probabilities.
    """
    check_tensor("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}, but must be [B, V]")
    B, V = logits.shape
    limits = _check(beam_size, length_penalty, max_new_tokens, stop, B, V)
    found: list[list[Hypothesis]] = [[] for _ in range(B)]
    if B == 0 or max(limits) == 0:
        return found

    def finish(row: int, tokens: Tensor, log_prob: float) -> None:
        score = log_prob / penalty(len(tokens), length_penalty)
        found[row].append(Hypothesis(tokens.cpu(), log_prob, score))

    with drawing_mode(model):
        device = logits.device
        rows = [row for row in range(B) if limits[row]]  # those still searched, in the order of the batch
        K = 1  # beginnings per row: one, of no tokens, and from then on beam_size
        if len(rows) < B:
            kept = torch.tensor(rows, device=device)
            logits, state = logits[kept], select(state, kept)
        tokens = torch.empty(len(rows), 1, 0, dtype=torch.long, device=device)
        log_probs = torch.zeros(len(rows), 1, dtype=torch.float64, device=device)  # -inf: no beginning here
        while True:
            n, length = len(rows), tokens.shape[2] + 1
            nothing = (log_probs == -torch.inf).unsqueeze(2)  # whatever the model says after no beginning
            following = logits.double().log_softmax(-1).view(n, K, V).masked_fill(nothing, 0)
            if following.isnan().any():
                raise ValueError(
                    f"the logits of new token {length} hold NaN, infinity or nothing but minus infinity: "
                    "nothing is likeliest"
                )
            following = (log_probs.unsqueeze(2) + following).flatten(1)
            log_probs, place = following.topk(min(beam_size, K * V), dim=1)
            parents, token = place // V, place % V
            tokens = tokens.gather(1, parents.unsqueeze(2).expand(-1, -1, length - 1))
            tokens = torch.cat([tokens, token.unsqueeze(2)], dim=2)

            # On the CPU, since each beginning asks: is it one, has it ended, is there room?
            values, ended = log_probs.tolist(), (token == (-1 if stop is None else stop)).tolist()
            for i, row in enumerate(rows):
                room = beam_size - len(found[row])
                for k, log_prob in enumerate(values[i]):
                    if k >= room or log_prob == -torch.inf:
                        values[i][k] = -torch.inf
                    elif ended[i][k] or length == limits[row]:
                        finish(row, tokens[i, k], log_prob)
                        values[i][k] = -torch.inf
            log_probs = torch.tensor(values, dtype=torch.float64, device=device)
            going = [i for i in range(n) if max(values[i]) > -torch.inf]
            if not going:
                break
            beams = parents + K * torch.arange(n, device=device).unsqueeze(1)
            kept = torch.tensor(going, device=device)
            tokens, log_probs, rows = tokens[kept], log_probs[kept], [rows[i] for i in going]
            K = tokens.shape[1]
            state = select(state, beams[kept].flatten())
            logits, state = model.step(token[kept].flatten(), state)
    # Copies, made here, since a tensor of inference mode could be no input of training.
    free = [[h._replace(tokens=h.tokens.clone()) for h in hypotheses] for hypotheses in found]
    return [sorted(hypotheses, key=lambda h: -h.score) for hypotheses in free]


def translate(
    model: Translates,
    sources: Sequence[Tensor | Sequence[int]],
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_new_tokens: int | None = None,
    stop: int | None = None,
    batch_size: int = 32,
) -> list[Tensor]:
    """Translate each source by the best hypothesis of a beam search.

    Args:
        model: an encoder-decoder, such as an `EncoderDecoder`.
        sources: sequences of token ids, of any lengths but 0; with the end symbol, if the model was trained
            with it.
        beam_size: see `beam_search`.
        length_penalty: see `beam_search`.
        max_new_tokens: the most tokens of a translation; by default 50 more than its source has.
        stop: the id of the symbol that ends a translation.
        batch_size: sources searched at a time, those of about one length together.

    Returns:
        the tokens [T] of each translation, int64 on the CPU, with the stop symbol, unless the length ran out.

    Raises:
        ValueError: a source is empty or no sequence of ids, or as `beam_search`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be at least 1")
    _check(
        beam_size,
        length_penalty,
        0 if max_new_tokens is None else max_new_tokens,
        stop,
        1,
        model.config.vocab_size,
    )
    given = [_source(index, source) for index, source in enumerate(sources)]
    order = sorted(range(len(given)), key=lambda index: len(given[index]))
    translations: dict[int, Tensor] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        lengths = [len(given[index]) for index in chosen]
        limits = [n + MORE_THAN_SOURCE if max_new_tokens is None else max_new_tokens for n in lengths]
        with drawing_mode(model):
            logits, state = _begin(model, [given[index] for index in chosen])
        found = beam_search(
            model,
            logits,
            state,
            beam_size=beam_size,
            length_penalty=length_penalty,
            max_new_tokens=limits,
            stop=stop,
        )
        for index, hypotheses in zip(chosen, found, strict=True):
            translations[index] = hypotheses[0].tokens if hypotheses else torch.empty(0, dtype=torch.long)
    return [translations[index] for index in range(len(given))]


def _begin(model: Translates, sources: list[Tensor]) -> tuple[Tensor, Any]:
    """Read the sources and the start symbol: logits [B, V] of the first token, and the state."""
    device = next(model.parameters()).device if isinstance(model, nn.Module) else torch.device("cpu")
    lengths = torch.tensor([len(source) for source in sources], device=device)
    ids = nn.utils.rnn.pad_sequence(sources, batch_first=True).to(device)
    padding = torch.arange(ids.shape[1], device=device) >= lengths.unsqueeze(1)
    state = model.init_state(ids, key_padding_mask=padding if padding.any() else None)
    start = torch.full((len(sources),), int(model.config.vocab_size), device=device)
    return model.step(start, state)


def _check(
    beam_size: int,
    length_penalty: float,
    max_new_tokens: int | Sequence[int],
    stop: int | None,
    rows: int,
    V: int,
) -> list[int]:
    """Refuse what is out of range; return the most new tokens of each row."""
    if at_least(1, "beam_size", beam_size) > MOST_BEAMS:
        raise ValueError(f"beam_size is {beam_size}, but must be at most {MOST_BEAMS}")
    if not (is_number(length_penalty) and length_penalty >= 0):
        raise ValueError(f"length_penalty is {length_penalty!r}, but must be a number of at least 0")
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * rows
    if len(limits) != rows or any(type(limit) is not int or limit < 0 for limit in limits):
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, but must be at least 0, one whole number or {rows} of them"
        )
    if stop is not None and (type(stop) is not int or not 0 <= stop < V):
        raise ValueError(f"stop is {stop}, but must be an id in [0, {V})")
    return limits


def _source(index: int, source: Tensor | Sequence[int]) -> Tensor:
    ids = torch.as_tensor(source, device="cpu") if len(source) else torch.empty(0, dtype=torch.long)
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"sources[{index}] is {ids.dtype} of shape {list(ids.shape)}, but must be whole numbers [S]"
        )
    if not len(ids):
        raise ValueError(f"sources[{index}] is empty, but must have at least one token")
    return ids.long()
