"""The source of each row of a batch, from several sources with fixed weights.

Rows are counted through all batches, row g = step * batch_size + r, in blocks of K. After b blocks, source i
with the weight w_i has had floor(b K w_i) rows, and the source of the largest weight has had all other rows.
Within a block, the order of the sources is drawn from (seed, block). So (seed, g) alone determines the source
of a row, and how many rows this source has had before.
"""

from collections.abc import Sequence

import numpy as np

BLOCK = 4096  # K: a source whose weight is below 1 / K has no row in some blocks
MOST = 64  # maximum number of sources: with more, the count of the largest source could fall in a block


def drawn_sources(
    weights: Sequence[float], *, step: int, batch_size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each row of batch `step`, and how many rows that source has had before.

    Args:
        weights: positive weights of at most `MOST` sources; only their ratios count.
        step: number of the batch, from 0.
        batch_size: B.
        seed: seed of the run.

    Returns:
        The sources and the numbers of earlier rows, both int64 [B].
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    rows = np.arange(step * batch_size, (step + 1) * batch_size)
    sources, before = np.empty_like(rows), np.empty_like(rows)
    for block in np.unique(rows // BLOCK):
        chosen = rows // BLOCK == block
        began, ended = _counts(shares, int(block)), _counts(shares, int(block) + 1)
        order = np.repeat(np.arange(len(shares)), ended - began)
        order = np.random.default_rng((seed, int(block), 1)).permutation(order)
        ranks = np.empty_like(order)
        for source in range(len(shares)):
            own = order == source
            ranks[own] = began[source] + np.arange(own.sum())
        places = rows[chosen] % BLOCK
        sources[chosen], before[chosen] = order[places], ranks[places]
    return sources, before


def _counts(shares: np.ndarray, blocks: int) -> np.ndarray:
    """Return how many rows each source has had after `blocks` blocks."""
    counts: np.ndarray = np.floor(blocks * BLOCK * shares).astype(np.int64)
    most = int(shares.argmax())
    counts[most] += blocks * BLOCK - counts.sum()
    return counts
