"""Beam search in lists, as it is described: every beginning is read anew, and nothing is packed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unrolled.models import Decoder

Ids = tuple[int, ...]


def log_probs_of(model: Decoder, read: Sequence[int]) -> Callable[[Ids], Tensor]:
    """Return log p of each token after `read` and some new ones."""
    known: dict[Ids, Tensor] = {}

    def log_probs(ids: Ids) -> Tensor:
        if ids not in known:
            with torch.no_grad():
                known[ids] = model(torch.tensor([[*read, *ids]]))[0, -1].log_softmax(-1)
        return known[ids]

    return log_probs


def allowed(ids: Ids, stops: Sequence[Ids], least: int, ngram: int) -> bool:
    """Whether the last token may stand there: no n-gram comes twice, and no stop comes too early."""
    early = any(ids[-len(stop) :] == stop and len(ids) - len(stop) < least for stop in stops)
    grams = [ids[i : i + ngram] for i in range(len(ids) - ngram + 1)] if ngram else []
    return not early and grams[-1:] not in [[gram] for gram in grams[:-1]]


def described(
    log_probs: Callable[[Ids], Tensor],
    *,
    size: int,
    most: int,
    penalty: Callable[[int], float],
    early_stopping: bool | str = False,
    stops: Sequence[Ids] = (),
    least: int = 0,
    ngram: int = 0,
) -> list[tuple[float, float, Ids]]:
    """Find hypotheses: score, log p and tokens of each, the best first."""
    pool: list[tuple[float, float, Ids]] = []
    beam: dict[Ids, float] = {(): 0.0}
    for length in range(1, most + 1):
        following = {
            (*ids, token): log_p + x
            for ids, log_p in beam.items()
            for token, x in enumerate(log_probs(ids).tolist())
            if allowed((*ids, token), stops, least, ngram)
        }
        ranked = sorted(following, key=lambda ids: -following[ids])
        ended = {ids for ids in ranked if length == most or any(ids[-len(stop) :] == stop for stop in stops)}
        pool += [
            (following[ids] / penalty(length), following[ids], ids) for ids in ranked[:size] if ids in ended
        ]
        pool = sorted(pool, reverse=True)[:size]
        beam = {ids: following[ids] for ids in [ids for ids in ranked if ids not in ended][:size]}
        if not beam:
            break
        if len(pool) == size:
            reach = most if early_stopping == "never" else length
            if early_stopping is True or max(beam.values()) / penalty(reach) <= pool[-1][0]:
                break
    return pool
