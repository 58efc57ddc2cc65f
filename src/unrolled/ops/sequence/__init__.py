r"""Sequence parallelism: processes hold the slices of one sequence, and attend as if each saw all of it.

    with sequence_parallel(group) as ranks:
        loss = model.loss(inputs_slice, targets_slice)  # rank r of P has the columns r T/P ... (r+1) T/P - 1
    loss.backward()

A recurrence needs only the state after the earlier tokens, not these tokens. So each rank computes the
*summary* of its slice, which says what the slice does to any state. The ranks exchange their summaries, and
each rank runs over its slice from the state before it. Let X be a state, and S_r what slice r makes of the
empty state:

    Decayed       X -> exp(a_r) X + S_r           sums, with a decay per head or per feature
    DecayedEach   the same                        sums, with a decay for every number
    Transformed   X -> M_r X + S_r                the delta rule: M_r is the rule on the identity, v = 0
    Shifted       as Decayed, of sums divided by exp(m) for a running maximum m
    Latest        X -> the last R tokens of both  windows and short convolutions
    Appended      X -> both                       keys and values of softmax attention

A mechanism declares its summary in one method, `MultiHeadAttention.summarise`; everything else is in the base
class and in this package. `scan` gathers the summaries of all ranks and folds them, or passes sums from rank
to rank. Its gradients go back the same way: by a reduce-scatter, or from the last rank to the first. Every
rank takes part in the forward and in the backward pass, even if its own output does not depend on other
ranks. So all ranks must make the same calls in the same order, and either all or none pass a mask. Each rank
back-propagates its own loss. The sum of the ranks' gradients is the gradient of the sum of their losses.

The slices must be equally long. Positions also count the tokens of earlier ranks. A state passed to `prefill`
is the state before the first rank's slice, and must be the same on all ranks. The state returned is the state
after the last rank's slice, again the same on all ranks. Gradients of gradients are not available.

When summaries are gathered, a rank sends its summary (P - 1) times forward, and as much backward. For linear
attention with B rows, G key heads, R features, M values and s bytes per number, this is
2 (P-1) B G (RM+R+1) s bytes, whatever the length. When sums are passed from rank to rank, a rank sends at
most 2 B G (RM+R) s bytes, and in `prefill` the last rank also sends the final state to all others.

Sun et al. 2024, "Linear Attention Sequence Parallelism" (arXiv 2404.02882) and LASP-2 (arXiv 2502.07563), for
gathered states, and gathered keys and values in hybrids; ZeCO (arXiv 2507.01004) for the pipelined scan.
"""

from unrolled.ops.sequence.conv import causal_conv
from unrolled.ops.sequence.ranks import (
    PIPELINE_FROM,
    Ranks,
    check_slices,
    current,
    inside,
    positions_of,
    refuse,
    sequence_parallel,
    token_counts,
    use,
)
from unrolled.ops.sequence.scan import scan
from unrolled.ops.sequence.summaries import (
    Appended,
    Decayed,
    DecayedEach,
    Fields,
    Latest,
    Shifted,
    Summary,
    Transformed,
    last_tokens,
)

__all__ = [
    "PIPELINE_FROM",
    "Appended",
    "Decayed",
    "DecayedEach",
    "Fields",
    "Latest",
    "Ranks",
    "Shifted",
    "Summary",
    "Transformed",
    "causal_conv",
    "check_slices",
    "current",
    "inside",
    "last_tokens",
    "positions_of",
    "refuse",
    "scan",
    "sequence_parallel",
    "token_counts",
    "use",
]
