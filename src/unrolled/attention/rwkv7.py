r"""RWKV-7: a state that decays and replaces values, at rates of their own for every channel.

    S_t = (diag(w_t) - (a_t * p_t) p_t^T) S_{t-1} + k_t v_t^T        o_t = S_t^T r_t
    log w_t = -exp(-1/2) sigmoid(d + W_2 tanh(W_1 x_t^w))            a_t = sigmoid(c + W_4 W_3 x_t^a)
    p_t = f_t * m / |f_t * m|        k_t = f_t * (1 + (a_t - 1) * n)        f_t = W_k x_t^k
    y_t = W_o ((norm_h(o_t) + (r_t . (k_t * u)) v_t) * W_6 sigmoid(W_5 x_t^g))

Every projection reads its own mixture of a token and the one before it, x_t^z = x_t + mu_z * (x_{t-1} - x_t)
for z = r, w, k, v, a, g, with zeros before the first token. norm_h is a layer norm of each head, and m, n and
u are learned per channel. It is the rule of `unrolled.ops.dplr`, where q is r, a is -p and b is a * p.

Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", arXiv 2503.14456, and the code of
its first author, `RWKV_x070_TMix_seq` in the package rwkv. In the published model, every layer but the first
adds a learned share of the first layer's values to its own values; here, layers are independent. With
`bias=False` this is the published first layer.

Cost per head, with values M wide: in training time O(T D M) and memory O(T (D+M)) on a CPU; in plain PyTorch,
with chunks of C = 32 tokens, or 64 for heads wider than 64, time O(T (C (C+D+M) + D (D+M))) and memory
O(T (C+D+M)); per generated token time, memory and state O(D M).
Cannot: attend in both directions or to another sequence, nor honour an `attn_mask`.
Equals softmax attention: never. With a = 0, w = 1 and n = 0 it is unnormalised linear attention.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from unrolled.attention._delta import beside_identity, split_transition
from unrolled.attention._heads import of_every_head
from unrolled.attention._options import ONE_WAY
from unrolled.attention._token_shift import TokenShiftAttention
from unrolled.attention.base import CommonOptions, Heads, Masks
from unrolled.contract import CAUSAL_RECURRENCE
from unrolled.ops.dense import Linear
from unrolled.ops.dplr import dplr, dplr_step
from unrolled.ops.head_scale import scale_heads
from unrolled.ops.options import check_above_zero, check_integers
from unrolled.ops.precision import accumulated, accumulation_dtype
from unrolled.ops.sequence import Transformed
from unrolled.ops.token_shift import initial_mixtures

MIXTURES = {"r": 0.2, "k": 0.7, "v": 0.7, "w": 0.9, "a": 0.9, "g": 0.2}
"""For each mixture, the exponent of its initial mu: channel c of d has mu = 1 - (c/d)^exponent."""
SMALLEST_SQUARE = 1e-24  # added to squared lengths, so that a vector of zeros stays one


class RWKV7State(NamedTuple):
    """S `[B,H,D,M]` and the last input `[B,1,d_model]`; its size never changes."""

    kv: Tensor
    last: Tensor


class Controls(NamedTuple):
    """What a token does to the state, besides its key and value."""

    log_decay: Tensor  # log w [...,H,D]
    rate: Tensor  # a [...,H,D]
    gate: Tensor  # of the output [...,H,M]
    last: Tensor  # the last input, for the state [B,1,d_model]


class Rule(NamedTuple):
    """The inputs of `unrolled.ops.dplr`, before the state."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    log_decay: Tensor


class RWKV7(TokenShiftAttention[RWKV7State, Controls]):
    """The time mixing of RWKV-7.

    Args:
        d_model, n_heads, common: see `MultiHeadAttention`; must be causal. Each of the H heads has a state.
            In the published models, heads are 64 wide, and each has its own keys and values.
        decay_rank, rate_rank, gate_rank: widths between the two matrices that compute w, a and the gate of
            the output.
        eps: added to the variance of the norm.

    Raises:
        ValueError: a rank or eps out of range.
        UnsupportedError: bidirectional attention, or rotary positions.
    """

    supports = CAUSAL_RECURRENCE.but(reads_input=True, sequence=True)
    one_way = ONE_WAY
    no_rotary = (
        "features that decay at different rates cannot be rotated into each other; use delta_net, which has "
        "one rate per head"
    )

    not_decayed = ("mix", "erased", "replaced", "bonus")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        decay_rank: int = 32,
        rate_rank: int = 32,
        gate_rank: int = 64,
        eps: float = 64e-5,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(d_model, n_heads, **common)
        check_integers(1, decay_rank=decay_rank, rate_rank=rate_rank, gate_rank=gate_rank)
        check_above_zero(eps=eps)
        self.eps = eps
        keys, values = n_heads * self.head_dim, n_heads * self.value_dim
        self.decay_down = Linear(d_model, decay_rank, bias=False)
        self.decay_up = Linear(decay_rank, keys)
        self.rate_down = Linear(d_model, rate_rank, bias=False)
        self.rate_up = Linear(rate_rank, keys)
        self.gate_down = Linear(d_model, gate_rank, bias=False)
        self.gate_up = Linear(gate_rank, values, bias=False)
        # Initialised like the first layer of the published models: the channels range from those that read
        # the token before to those that read this one, and from short to long memories.
        self.mix = nn.Parameter(initial_mixtures(d_model, MIXTURES.values()))
        with torch.no_grad():
            for up in (self.decay_up, self.rate_up):
                up.weight.zero_()
            self.decay_up.bias.copy_(-6.5 + 5 * torch.linspace(0, 1, keys) ** 0.85)
            self.rate_up.bias.zero_()
        self.erased = nn.Parameter(torch.full((n_heads, self.head_dim), 0.85))  # m
        self.replaced = nn.Parameter(torch.ones(n_heads, self.head_dim))  # n
        self.bonus = nn.Parameter(torch.zeros(n_heads, self.head_dim))  # u
        self.norm_weight = nn.Parameter(torch.ones(values))
        self.norm_bias = nn.Parameter(torch.zeros(values))

    def read_input(self, x: Tensor, mixed: Sequence[Tensor], last: Tensor) -> Controls:  # type: ignore[override]
        """Compute w, a and the gate from the last three mixtures, and hand on the last input."""
        dtype = accumulation_dtype(x.dtype)
        w, a, g = mixed[3:]
        decay = self.decay_up(self.decay_down(w).tanh()).to(dtype)
        rate = self.rate_up(self.rate_down(a)).to(dtype).sigmoid()
        gate = self.gate_up(self.gate_down(g).sigmoid())
        controls = (-math.exp(-0.5) * decay.sigmoid(), rate, gate)
        by_head = (torch.unflatten(x, -1, (self.n_heads, -1)) for x in controls)
        return Controls._make((*by_head, last))

    def attend(self, heads: Heads[Controls], masks: Masks) -> Tensor:
        """Run over whole sequences."""
        rule = self._rule(heads)
        o, _ = dplr(*rule, **masks.of_keys())
        return self._finished(o, heads, rule)

    def init_heads(self, batch_size: int) -> RWKV7State:
        """Make the state of `batch_size` sequences before their first token: zeros."""
        sizes = (self.n_heads, self.head_dim, self.value_dim)
        kv = self.out_weight.new_zeros(batch_size, *sizes, dtype=self.state_dtype)
        return RWKV7State(kv, kv.new_zeros(batch_size, 1, self.d_model))

    def prefill_heads(
        self, heads: Heads[Controls], state: RWKV7State, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, RWKV7State]:
        """Run over whole sequences, from a state to a state."""
        rule = self._rule(heads)
        o, kv = dplr(*rule, state=state.kv, key_padding_mask=key_padding_mask)
        return self._finished(o, heads, rule), RWKV7State(kv, heads.inputs.last)

    def summarise(self, heads: Heads[Controls], key_padding_mask: Tensor | None) -> Transformed:
        """Compute A and B such that a state X becomes A X + B: run from the identity and from zeros."""
        rule = self._rule(heads)
        v, state = beside_identity(rule.v, rule.k)
        _, kv = dplr(*rule._replace(v=v), state=state, key_padding_mask=key_padding_mask)
        return split_transition(kv)

    def step_heads(self, heads: Heads[Controls], state: RWKV7State) -> tuple[Tensor, RWKV7State]:
        """Run one step of the recurrence."""
        rule = self._rule(heads)
        o, kv = dplr_step(*rule, state.kv)
        return self._finished(o, heads, rule), RWKV7State(kv, heads.inputs.last)

    def _rule(self, heads: Heads[Controls]) -> Rule:
        """Compute the inputs of the rule in at least fp32."""
        q, f, v = (accumulated(x) for x in heads[:3])
        log_decay, rate, *_ = heads.inputs
        f, v = of_every_head(f, self.n_heads), of_every_head(v, self.n_heads)
        erased = scale_heads(f * self.erased.to(f.dtype), 1.0, SMALLEST_SQUARE)
        k = f * (1 + (rate - 1) * self.replaced.to(f.dtype))
        return Rule(q, k, v, -erased, rate * erased, log_decay)

    def _finished(self, o: Tensor, heads: Heads[Controls], rule: Rule) -> Tensor:
        """Normalise each head, add the token's own value, and gate."""
        flat = o.reshape(-1, self.n_heads * self.value_dim)
        weight, bias = self.norm_weight.to(o.dtype), self.norm_bias.to(o.dtype)
        normed = torch.group_norm(flat, self.n_heads, weight, bias, self.eps).view(o.shape)
        own = (rule.q * rule.k * self.bonus.to(o.dtype)).sum(-1, keepdim=True) * rule.v
        return ((normed + own) * heads.inputs.gate).to(self.mix.dtype)
