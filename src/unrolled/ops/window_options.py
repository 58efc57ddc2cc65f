"""How windows are written: one number or two sides, one dilation or one for each head."""

from collections.abc import Sequence


def window_sides(window: int | tuple[int, int], *, causal: bool) -> tuple[int, int]:
    """Turn `window` into `(left, right)`, the numbers of keys read before and after the token itself.

    A pair is taken as it is. One number w is w keys up to the token itself where causal, (w - 1, 0), and w/2
    on each side of it where not.

    Raises:
        ValueError: negative sides, a right side where causal, no key, or an odd number to halve.
    """
    if isinstance(window, int) and not isinstance(window, bool):
        if causal and window >= 1:
            return window - 1, 0
        if not causal and window >= 0 and window % 2 == 0:
            return window // 2, window // 2
        wanted = (
            "at least 1, the token itself" if causal else "even and not negative, half of it on each side"
        )
        raise ValueError(f"window is {window}, but must be {wanted}, or a pair (left, right)")
    pair = list(window) if isinstance(window, tuple | list) else []
    if len(pair) != 2 or not all(isinstance(side, int) and side >= 0 for side in pair):
        raise ValueError(f"window is {window}, but must be one number or (left, right), neither negative")
    if causal and pair[1]:
        raise ValueError(f"window is {window}, but a causal one must be (left, 0), with nothing ahead")
    return pair[0], pair[1]


def dilation_per_head(dilation: int | Sequence[int], n_heads: int) -> tuple[int, ...]:
    """Turn `dilation` into one for each head.

    Raises:
        ValueError: below 1, or another number of them.
    """
    given = [dilation] * n_heads if isinstance(dilation, int) else list(dilation)
    if len(given) != n_heads:
        raise ValueError(
            f"dilation has {len(given)} values, but must have one for each of n_heads = {n_heads}"
        )
    if not all(isinstance(d, int) and d >= 1 for d in given):
        raise ValueError(f"dilation is {dilation}, but must be at least 1")
    return tuple(given)
