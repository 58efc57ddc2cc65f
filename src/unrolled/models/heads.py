"""Output layers: a distribution over the levels of the next token or pixel."""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unrolled.contract import IGNORED
from unrolled.models.checks import check_targets
from unrolled.ops.cross_entropy import linear_cross_entropy
from unrolled.ops.dense import Layer, Linear, linear
from unrolled.ops.observing import changed
from unrolled.ops.precision import accumulated, without_autocast

MANY_LEVELS = 1024
"""With at least this many levels, a loss is computed in pieces and never holds all logits.

Time and peak memory of loss and gradients, in pieces and with all logits, for 2,048 targets and hidden
vectors 256 wide, on one thread of a Xeon: 28 ms and 7 MB instead of 30 ms and 23 MB at 1,024 levels; 208 ms
and 48 MB instead of 260 ms and 191 MB at 8,192; 1,460 ms and 259 MB instead of 1,670 ms and 1,181 MB at
50,257. At 512 levels, pieces take longer: 16.5 ms instead of 14.6 ms.
"""


def mean_nll(nll: Tensor, target: Tensor) -> Tensor:
    """Average `nll` [...] over the targets [...] that are not ignored; 0 if all are ignored."""
    return nll.sum() / (target != IGNORED).sum().clamp(min=1)


def token_nll(logits: Tensor, target: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """-log p(target) in nats, at least fp32: logits [..., V] and [...] long -> [...]; 0 where ignored."""
    nll = F.cross_entropy(
        accumulated(logits).flatten(0, -2),
        target.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="none",
    )
    return nll.view_as(target)


class Head(Layer):
    """An output layer over `levels` outcomes."""

    levels: int

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities in at least fp32: [..., d_model] -> [..., levels]."""
        raise NotImplementedError

    def nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        """-log p(target) in nats, at least fp32: [..., d_model] and [...] long -> [...]; 0 where ignored."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Mean -log p(target) in nats of `targets` [...]; -100 and those at `padding` [...] are ignored."""
        return self.mean_loss(hidden, check_targets(targets, hidden.shape[:-1], self.levels, padding))

    def mean_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Average `nll` over the targets that are not ignored, which must be valid; 0 if all are ignored."""
        return mean_nll(self.nll(hidden, target), target)


def embedding_of(model: nn.Module) -> Callable[[], nn.Embedding]:
    """Make a function that returns `model.embedding`, and that a copy or pickle of the model copies too."""
    return partial(getattr, model, "embedding")


class Categorical(Head):
    """One logit per level: p(l) = softmax(W h + b)_l.

    Args:
        d_model: width of the hidden vectors.
        levels: number of outcomes.
        bias: add a bias b; None: add one unless the output is tied.
        tied: returns an embedding table, whose first `levels` rows are W. It is called each time, so that the
            output follows a model whose table is replaced.
    """

    def __init__(
        self,
        d_model: int,
        levels: int,
        *,
        bias: bool | None = False,
        tied: Callable[[], nn.Embedding] | None = None,
    ) -> None:
        super().__init__()
        self.levels = levels
        bias = tied is None if bias is None else bias
        self.project = Linear(d_model, levels, bias=bias) if tied is None else None
        self.bias = nn.Parameter(torch.zeros(levels)) if bias and tied is not None else None
        self.tied = tied

    @property
    def table(self) -> nn.Embedding:
        """The embedding table that is tied to the output."""
        assert self.tied is not None
        return self.tied()

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., d_model] -> [..., levels]."""
        if self.project is None:
            return linear(hidden, self.table.weight[: self.levels], self.bias)
        return cast(Tensor, self.project(hidden))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities in at least fp32: [..., d_model] -> [..., levels]."""
        return accumulated(self(hidden)).log_softmax(-1)

    def nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        """-log p(target) in nats, at least fp32: [..., d_model] and [...] long -> [...]; 0 where ignored."""
        return token_nll(self(hidden), target)

    def mean_loss(self, hidden: Tensor, target: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """Mean cross-entropy with label smoothing; with many levels, in pieces that fit the cache."""
        project = self.table if self.project is None else self.project
        if (
            self.levels >= MANY_LEVELS
            and type(project) in (Linear, nn.Embedding)
            and not changed((self, project))
        ):
            weight = project.weight[: self.levels]
            bias = self.bias if self.project is None else self.project.bias
            return linear_cross_entropy(hidden, weight, bias, target, smoothing=smoothing)
        return mean_nll(token_nll(self(hidden), target, smoothing=smoothing), target)


class LogisticMixture(Head):
    """A mixture of K logistic distributions, discretised to L levels of one channel.

    Level l is the interval of half-width h = 1 / (L - 1) around x = 2 l / (L - 1) - 1, and

        p(l) = sum_i pi_i [sigmoid((x + h - mu_i) / s_i) - sigmoid((x - h - mu_i) / s_i)],

    where the lowest level reaches down to -inf and the highest up to +inf, so that the levels sum to 1
    (PixelCNN++, Salimans et al. 2017, arXiv 1701.05517, eq. 2). A linear layer maps the hidden vector to log
    pi (up to the softmax), mu and log s; log s is clamped at -7 from below, as in the paper's code.

    Args:
        d_model: width of the hidden vectors.
        levels: L, at least 2.
        n_mixtures: K.
    """

    MIN_LOG_SCALE = -7.0

    def __init__(self, d_model: int, levels: int, n_mixtures: int) -> None:
        super().__init__()
        self.levels = levels
        self.project = Linear(d_model, 3 * n_mixtures)

    def reset_bias(self) -> None:
        """Spread the components evenly over the range, with equal weights and scales to match the spacing."""
        n_mixtures = self.project.out_features // 3
        with torch.no_grad():
            weight, mean, log_scale = self.project.bias.chunk(3)
            weight.zero_()
            mean.copy_((2 * torch.arange(n_mixtures) + 1) / n_mixtures - 1)
            log_scale.fill_(math.log(2 / n_mixtures))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `log_probs`: log-probabilities are logits too."""
        return self.log_probs(hidden)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all levels, in at least fp32: [..., d_model] -> [..., L].

        This needs memory for [..., L, K]; `nll` does not.
        """
        levels = torch.arange(self.levels, device=hidden.device)
        return self._log_prob(self._mixture(hidden).unsqueeze(-2), levels)

    def nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        """-log p(target) in nats, at least fp32: [..., d_model] and [...] long -> [...]; 0 where ignored."""
        ignored = target == IGNORED
        log_prob = self._log_prob(self._mixture(hidden), target.masked_fill(ignored, 0))
        return -log_prob.masked_fill(ignored, 0.0)

    def _mixture(self, hidden: Tensor) -> Tensor:
        """The parameters, in at least fp32: bf16 would round means by up to a quarter of a level of 256."""
        with without_autocast(hidden.device):
            return linear(*map(accumulated, (hidden, self.project.weight, self.project.bias)))

    def _log_prob(self, parameters: Tensor, level: Tensor) -> Tensor:
        """Log-probability of `level` [...] under `parameters` [..., 3 K], broadcast against each other.

        The probability of an inner level is a difference of sigmoids that can underflow. With d = 2 h / s, it
        is the product

            sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(-d)),    b = a + d,

        whose logarithm is a sum of terms that are each finite, with finite gradients.
        """
        weight, mean, log_scale = parameters.chunk(3, dim=-1)
        # In units of h the levels are integers, so their distance to a close mean is exact.
        span = self.levels - 1
        log_scale = log_scale.clamp(min=self.MIN_LOG_SCALE) + math.log(span)
        level = level.unsqueeze(-1)
        centred = (2 * level - span).to(mean.dtype) - span * mean
        inverse_scale = torch.exp(-log_scale)
        above_lower = -F.softplus((centred - 1) * inverse_scale)
        below_upper = -F.softplus(-(centred + 1) * inverse_scale)
        width = _log1mexp(math.log(2) - log_scale)
        # the outermost levels have no lower or upper bound
        first, last = level == 0, level == span
        log_mass = (
            above_lower.masked_fill(first, 0.0)
            + below_upper.masked_fill(last, 0.0)
            + width.expand_as(centred).masked_fill(first | last, 0.0)
        )
        return torch.logsumexp(weight.log_softmax(-1) + log_mass, dim=-1)


def _log1mexp(log_d: Tensor) -> Tensor:
    """log(1 - exp(-d)) for d = exp(log_d), as log d + log((1 - exp(-d)) / d): finite where d underflows."""
    d = log_d.exp().clamp(min=1e-15)  # for smaller d the second term rounds to 0
    return log_d + torch.log(-torch.expm1(-d) / d)
