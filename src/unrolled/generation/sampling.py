"""From logits to tokens: plain functions on logits x [N, V], one row per sequence, p = softmax(x).

A filter returns logits of the same shape and type in which the excluded tokens are -inf. Each filter keeps
the most likely token of every row, so any chain of them leaves a token to sample. Among equal logits the
lower token id counts as more likely, so that results do not depend on how a sort breaks ties.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unrolled.decode.request import (
    check_min_p,
    check_repetition_penalty,
    check_temperature,
    check_top_k,
    check_top_p,
)
from unrolled.ops.checks import check_tensor, wrong


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens in `seen` less likely: x / penalty where x > 0, x * penalty elsewhere.

    Keskar et al. 2019 (CTRL, arXiv 1909.05858, section 4.1) divide every seen logit by the penalty, which
    makes a token with a negative logit more likely; multiplying negative logits is the usual fix.

    Args:
        logits: [N, V].
        seen: [N, V] bool, True where the token has occurred in the row's prompt or continuation.
        penalty: at least 1e-6; 1 changes nothing, above 1 discourages repetition, below 1 encourages it.

    Raises:
        ValueError: a penalty below 1e-6, or tensors of a wrong shape or type.
    """
    check_repetition_penalty(penalty)
    _check_logits(logits)
    check_tensor("seen", seen)
    if seen.dtype != torch.bool or seen.shape != logits.shape:
        raise wrong("seen", seen, f"bool {tuple(logits.shape)}, as logits")
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def temperature(logits: Tensor, value: float) -> Tensor:
    """Sharpen (below 1) or flatten (above 1) the distribution: (x - max x) / value, so p becomes p^(1/value).

    At 0, the limit, it is greedy decoding: only the most likely token remains.
    """
    check_temperature(value)
    _check_logits(logits)
    if value == 0:
        return top_k(logits, 1)
    shifted = logits - logits.amax(-1, keepdim=True)
    return (shifted / value).masked_fill(shifted == 0, 0)  # also where 1 / value is out of the type's range


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k most likely tokens, or all of them where k >= V (Fan et al. 2018, arXiv 1805.04833)."""
    check_top_k(k)
    _check_logits(logits)
    if k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k).values[..., -1:]
    above, equal = logits > kth, logits == kth
    room = k - above.sum(-1, keepdim=True)  # `topk` may pick any of several equal logits: take the lowest ids
    return _keep(logits, above | (equal & (equal.cumsum(-1) <= room)))


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the nucleus: the smallest set of most likely tokens whose probabilities sum to at least p.

    Holtzman et al. 2020, arXiv 1904.09751, equation 2. The token that crosses p is kept, so one always is.
    """
    check_top_p(p)
    _check_logits(logits)
    if p == 1:
        return logits  # a sum of probabilities may round to 1 before the last of them
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    mass_before = nn.functional.pad(probabilities.cumsum(-1)[..., :-1], (1, 0))
    return _keep(logits, torch.zeros_like(ids, dtype=torch.bool).scatter(-1, ids, mass_before < p))


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens at least p times as likely as the most likely one.

    Nguyen et al. 2024, arXiv 2407.01082. In logits: x >= max x + ln p.
    """
    check_min_p(p)
    _check_logits(logits)
    if p == 0:
        return logits
    return _keep(logits, logits >= logits.amax(-1, keepdim=True) + math.log(p))


def uniform(key: int, index: int) -> float:
    """Number `index` of the random stream `key`, in [0, 1): SplitMix64 started at the key.

    Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 17. The upper 53 bits
    of the result are taken as a fraction. `key` is any integer, read modulo 2^64.
    """
    x = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return float((x ^ x >> 31) >> 11) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[float]) -> Tensor:
    """Sample one token per row from softmax(logits), by inverting the cumulative distribution in float64.

    Each row takes one random number, so its sample depends neither on the other rows nor on the device of the
    logits.

    Args:
        logits: [N, V].
        draws: N numbers in [0, 1), as `uniform` makes.

    Returns:
        token ids [N] int64, on the device of the logits.

    Raises:
        ValueError: a row holds NaN or +inf, or nothing but -inf; or a draw is out of range.
    """
    _check_logits(logits)
    if len(draws) != logits.shape[0]:
        raise ValueError(f"draws has {len(draws)}, but must have one per row of logits {tuple(logits.shape)}")
    if not all(0 <= x < 1 for x in draws):
        raise ValueError(f"draws are {list(draws)}, but must be in [0, 1)")
    tokens = draw(logits, torch.tensor(draws, dtype=torch.float64, device="cpu"))
    for row, token in enumerate(tokens.tolist()):
        check_drawn(row, token, logits.shape[-1])
    return tokens


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Sample as `sample` does, with fp64 draws [N]; the token of a row without a distribution is V.

    Nothing is read on the CPU, so that a CUDA graph can hold this function; see `check_drawn`.
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    total = cumulative[..., -1:]
    threshold = total * draws.to(logits.device).unsqueeze(-1)
    # The first token whose cumulative mass is above the threshold: never one of probability 0.
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    return tokens.masked_fill(total.isnan(), logits.shape[-1]).squeeze(-1)


def check_drawn(row: int, token: int, vocab_size: int) -> None:
    """Raise ValueError if `draw` found no distribution in a row."""
    if token == vocab_size:
        raise ValueError(f"logits of row {row} hold NaN, +inf or only -inf, but must define a distribution")


def _check_logits(logits: Tensor) -> None:
    check_tensor("logits", logits)
    if logits.dim() < 1 or logits.shape[-1] < 1 or not logits.is_floating_point():
        raise wrong("logits", logits, "floating point [N, V] with V of at least 1")


def _keep(logits: Tensor, kept: Tensor) -> Tensor:
    return logits.masked_fill(~kept, -math.inf)
