r"""Hard attention: one position of the memory is sampled, and only that is read; trained by REINFORCE.

    a_t = softmax_s(v_a . tanh(W_a h_t + U_a m_s))        s_t ~ a_t        c_t = m_{s_t}

In training s_t is sampled; in evaluation it is the most probable position. A sample has no gradient, so the
gradient of the expected log p(y|c) is estimated by the gradient of

    log p(y|c~) + lambda_r (log p(y|c~) - b) sum_t log a_t(s~_t) + lambda_e sum_t H[a_t],

in which the factor before the first sum is constant, and b is a moving average: 0.9 b + 0.1 log p(y|c~).
`reinforce_loss` is the negative of this expression. `StraightThroughAttention` instead uses the gradient of
soft attention (Bengio et al. 2013, arXiv 1308.3432). `GatedSoftAttention` is the paper's soft form, the
expectation:

    c_t = sigmoid(w_b . h_t + b_b) sum_s a_t(s) m_s        penalty: sum_s (1 - sum_t a_t(s))^2

Xu et al. 2015, "Show, Attend and Tell", arXiv 1502.03044, section 4.1 (hard) and 4.2 (soft). In addition, the
paper uses the expectation in place of the sample for half of the sequences; this is left to the caller.

Samples are a function of the state: `read` gives each row a seed. It depends on the seed of the module, on
the row, and on how often `read` has been called in training, a number that is saved with the weights.

Cost: that of additive attention.
Cannot: be a layer of a decoder, since it does not attend within one sequence; learn its weights by
back-propagation.
Equals softmax attention: never.
"""

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from unrolled.alignment.bahdanau import AdditiveOptions, BahdanauAttention
from unrolled.ops.precision import without_autocast


class HardState(NamedTuple):
    """A `MemoryState` with a `seed [B]` long, which determines the samples together with the position."""

    memory: Tensor
    keys: Tensor
    padding: Tensor
    position: Tensor
    seed: Tensor


class HardAttention(BahdanauAttention):
    """Reads the sampled position; the returned weights are 1 there and 0 elsewhere.

    Args:
        query_dim, memory_dim, additive: see `BahdanauAttention`.
        seed: seed of the samples.
    """

    differentiable = False
    begun: Tensor

    def __init__(
        self,
        query_dim: int,
        memory_dim: int | None = None,
        *,
        seed: int = 0,
        **additive: Unpack[AdditiveOptions],
    ):
        super().__init__(query_dim, memory_dim, **additive)
        self.seed = seed
        self.register_buffer("begun", torch.zeros((), dtype=torch.long))

    def read(self, memory: Tensor, *, key_padding_mask: Tensor | None = None) -> HardState:
        """Project a memory, and give each row a seed: in training a new one at each call."""
        state = super().read(memory, key_padding_mask=key_padding_mask)
        rows = torch.arange(len(memory), device=memory.device)
        seed = scrambled(scrambled(scrambled(torch.full_like(rows, self.seed)) + self.begun) + rows)
        if self.training:
            self.begun += 1
        return HardState(state.memory, state.keys, state.padding, state.position, seed)

    def _empty_state(self, like: Tensor) -> HardState:
        state = super()._empty_state(like)
        return HardState(state.memory, state.keys, state.padding, state.position, state.position)

    def probabilities(self, query: Tensor, state: HardState) -> Tensor:
        """Return the distributions a_t `[B,T,S]` from which queries `[B,T,query_dim]` sample."""
        projected = self.project_query(query)
        with without_autocast(query.device):
            return super().weigh(projected.to(state.memory.dtype), state)

    def weigh(self, query: Tensor, state: HardState) -> Tensor:
        """Return one-hot rows; all 0 in rows of padding only."""
        return self._glimpse(super().weigh(query, state).detach(), state)

    def _glimpse(self, weights: Tensor, state: HardState) -> Tensor:
        if not self.training:
            place = weights.argmax(-1)
        else:
            t = state.position.unsqueeze(1) + torch.arange(weights.shape[1], device=weights.device)
            place = drawn(weights, uniform(state.seed.unsqueeze(1), t))
        places = torch.arange(weights.shape[-1], device=weights.device)
        glimpse = (place.unsqueeze(-1) == places).to(weights.dtype)
        return glimpse * ~state.padding.all(-1)[:, None, None]


class StraightThroughAttention(HardAttention):
    """Hard attention whose backward pass is that of soft attention."""

    differentiable = True

    def weigh(self, query: Tensor, state: HardState) -> Tensor:
        """Return one-hot rows with the gradient of the probabilities."""
        weights = BahdanauAttention.weigh(self, query, state)
        return self._glimpse(weights.detach(), state) + (weights - weights.detach())


class GatedSoftAttention(BahdanauAttention):
    """The expectation, times a gate; the arguments are those of `BahdanauAttention`."""

    def __init__(self, query_dim: int, memory_dim: int | None = None, **additive: Unpack[AdditiveOptions]):
        super().__init__(query_dim, memory_dim, **additive)
        self.gate_proj = nn.Linear(query_dim, 1)

    def recall(self, query: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Attend as additive attention does, and gate the contexts; the weights are those before the gate."""
        context, weights, state = super().recall(query, state)
        return context * torch.sigmoid(self.gate_proj(query)).to(context.dtype), weights, state


def reinforce_loss(
    probabilities: Tensor,
    glimpse: Tensor,
    log_likelihood: Tensor,
    baseline: Tensor | float,
    *,
    reward_weight: float = 1.0,
    entropy_weight: float = 0.0,
    target_padding_mask: Tensor | None = None,
) -> Tensor:
    """Return the negative of the expression above, averaged over the rows; its gradient is the estimate.

    Args:
        probabilities: a `[B,T,S]`, from `HardAttention.probabilities`.
        glimpse: the samples `[B,T,S]`, one-hot.
        log_likelihood: log p(y|c~) of each row `[B]`, in nats.
        baseline: b, a number or `[B]`.
        reward_weight: lambda_r.
        entropy_weight: lambda_e.
        target_padding_mask: `[B,T]`, True where a query is padding, whose glimpse is ignored.

    Returns:
        the loss, a number in nats.
    """
    tiny = torch.finfo(probabilities.dtype).tiny
    logs = probabilities.clamp(min=tiny).log()
    chosen, entropy = (glimpse * logs).sum(-1), -(probabilities * logs).sum(-1)
    if target_padding_mask is not None:
        chosen, entropy = (x.masked_fill(target_padding_mask, 0) for x in (chosen, entropy))
    advantage = (log_likelihood - baseline).detach()
    per_row = log_likelihood + reward_weight * advantage * chosen.sum(1) + entropy_weight * entropy.sum(1)
    return -per_row.mean()


def moving_baseline(baseline: Tensor | float, log_likelihood: Tensor, momentum: float = 0.9) -> Tensor:
    """Return b after a batch: momentum b + (1 - momentum) mean(log_likelihood), without a gradient."""
    return momentum * baseline + (1 - momentum) * log_likelihood.detach().mean()


def coverage_penalty(weights: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Return sum_s (1 - sum_t w_t(s))^2 over valid s of weights `[B,T,S]`, averaged over the rows."""
    missing = (1 - weights.sum(1)).square()
    if key_padding_mask is not None:
        missing = missing.masked_fill(key_padding_mask, 0)
    return missing.sum(-1).mean()


def drawn(weights: Tensor, u: Tensor) -> Tensor:
    """Sample from `weights [...,S]` by `u [...]` in [0,1): the first position whose running sum exceeds u."""
    sums = weights.to(torch.float64).cumsum(-1)
    below = sums <= u.unsqueeze(-1) * sums[..., -1:]
    return below.sum(-1).clamp(max=weights.shape[-1] - 1)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Return numbers in [0,1) in fp64, each a function of its seed and counter (long, broadcast)."""
    bits = scrambled(scrambled(seed) + counter)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def scrambled(x: Tensor) -> Tensor:
    """Map 64-bit integers one to one to pseudorandom ones (the output function of SplitMix64)."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15: products and sums are modulo 2^64
    x = (x ^ _shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, n: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (x >> n) & ((1 << (64 - n)) - 1)
