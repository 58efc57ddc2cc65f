r"""Sequence parallelism: processes hold the slices of one sequence, and attend as if each saw all of it.

    with sequence_parallel(group) as ranks:
        loss = model.loss(inputs_slice, targets_slice)  # rank r of P has the columns r T/P ... (r + 1) T/P
    loss.backward()

A recurrence needs of the earlier tokens only the state after them. So each rank computes what its slice does
to any state, its *summary*, exchanges it, and runs over its slice from the state before it. X is a state,
S_r what slice r makes of the empty one:

    Decayed       X -> exp(a_r) X + S_r           sums, with a decay per head or per feature
    Transformed   X -> M_r X + S_r                the delta rule: M_r is the rule on the identity, v = 0
    Shifted       X -> sums under a running maximum, to which both sides are scaled
    Latest        X -> the last R tokens of both  windows and short convolutions
    Appended      X -> both                       keys and values of softmax attention

A mechanism declares this in one method, `MultiHeadAttention.summarise`; all else is in the base class and
here. `scan` gathers the summaries of all ranks and folds them, or passes sums from rank to rank.
Its gradient goes back the same way: a reduce-scatter, or from the last rank to the first. Every rank takes
part in both, whether its own output depends on other ranks or not, so all must run the same calls in the same
order: forward and backward, with a mask on every rank or on none. Each rank back-propagates its own loss; the
gradients of the sum of these losses are the sums over the ranks.

The slices must be equally long. Positions count the tokens of the ranks before. A state passed to `prefill`
is that before the first rank's slice, the same on all ranks; the state returned is that after the last one's,
again the same on all. Gradients of gradients are not available.

A rank sends (P - 1) times its summary forward, and as much backward: with B rows, G key heads, R features, M
values and s bytes each, 2 (P-1) B G (RM+R+1) s for linear attention, whatever the length. Passed from rank to
rank it is at most 2 B G (RM+R) s, and in `prefill` the last rank also tells the others the state at the end.

Sun et al. 2024, "Linear Attention Sequence Parallelism" (arXiv 2404.02882) and LASP-2 (arXiv 2502.07563), for
gathered states, and gathered keys and values in hybrids; ZeCO (arXiv 2507.01004) for the pipelined scan.
"""

from unrolled.ops.sequence.conv import causal_conv
from unrolled.ops.sequence.ranks import (
    PIPELINE_FROM,
    Ranks,
    current,
    inside,
    refuse,
    sequence_parallel,
    token_counts,
    use,
)
from unrolled.ops.sequence.scan import scan
from unrolled.ops.sequence.summaries import (
    Appended,
    Decayed,
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
    "Fields",
    "Latest",
    "Ranks",
    "Shifted",
    "Summary",
    "Transformed",
    "causal_conv",
    "current",
    "inside",
    "last_tokens",
    "refuse",
    "scan",
    "sequence_parallel",
    "token_counts",
    "use",
]
