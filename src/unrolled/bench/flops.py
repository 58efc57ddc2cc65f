"""How many operations a function needs, independent of its implementation.

An operation is one addition, multiplication, division or exponential. A sum of n terms has n additions, as it
starts from 0. Not counted: recomputation to save memory, masked entries, the maximum that keeps a softmax in
range.
So an implementation cannot raise its share of the machine's limit by doing redundant work.
"""


def linear_attention(length: int, width: int, values: int, *, normalize: bool = True) -> int:
    """Causal linear attention of one head, as its recurrence does it (arXiv 2006.16236, eq. 18-20).

    Per token, S += k v^T and q^T S take 2 width * values each; z += k, q . z and the quotient take the rest.
    """
    return length * (4 * width * values + normalize * (3 * width + values))


def linear_attention_gradient(length: int, width: int, values: int, *, normalize: bool = True) -> int:
    """The gradients of `linear_attention` from its states, as in eq. 13-15 of the same paper.

    dq = S g + z d, dS += q g^T, dz += d q, dk = dS v + dz, dv = dS^T k, and the gradients of the quotient; g
    and d are the gradients of q^T S and q . z.
    """
    return length * (8 * width * values + normalize * (5 * width + 3 * values + 1))


def gated_linear_attention(length: int, width: int, values: int, *, gradients: bool) -> int:
    """Causal linear attention of one head with a gate for every feature and no divisor (arXiv 2312.06635).

    Beside linear attention, S <- diag(a) S takes width * values per token. With gradients, da = sum(dS * S)
    takes 2 width * values, and dS <- diag(a) dS half as much.
    """
    operations = linear_attention(length, width, values, normalize=False) + length * width * values
    if gradients:
        operations += linear_attention_gradient(length, width, values, normalize=False)
        operations += 3 * length * width * values
    return operations


def delta_rule(length: int, width: int, values: int) -> int:
    """The delta rule of one head with gates, as its recurrence does it (arXiv 2510.26692, eq. 1).

    Per token, S <- diag(a) S takes width * values; the products of u = v - S^T k, S += k n^T and q^T S take
    2 width * values each; the difference in u and n = b u take the rest.
    """
    return length * (7 * width * values + 2 * values)


def delta_rule_gradient(length: int, width: int, values: int) -> int:
    """The gradients of `delta_rule` from its states, and u and n.

    dq = S g, dS += q g^T, dn = dS^T k, dk = dS n, then with du = b dn and the state S before n was written
    dk -= S du, dS -= k du^T: 2 width * values each. da = sum(dS * S) takes as much, dS <- diag(a) dS half as
    much. The difference in dk, du and db = dn . u take the rest.
    """
    return length * (15 * width * values + width + 3 * values)


def dplr(length: int, width: int, values: int) -> int:
    """The rule of a diagonal plus low rank of one head, as its recurrence does it (arXiv 2503.14456).

    Per token, S <- diag(w) S takes width * values; the products of u = S^T a, S += b u^T, S += k v^T and
    q^T S take 2 width * values each.
    """
    return length * 9 * width * values


def dplr_gradient(length: int, width: int, values: int) -> int:
    """The gradients of `dplr` from its states, and u.

    dq = S g, dS += q g^T, dv = dS^T k, dk = dS v, du = dS^T b, db = dS u, then with the state S before the
    token da = S du and dS += a du^T: 2 width * values each. dw = sum(dS * S) takes as much,
    dS <- diag(w) dS half as much.
    """
    return length * 19 * width * values


def pairs_within(length: int, left: int | None, right: int | None) -> int:
    """Number of pairs of a query and a key, if query i reads keys i - left to i + right (None: all)."""

    def on_one_side(reach: int | None) -> int:  # sum over i of min(i, reach)
        reach = length - 1 if reach is None else min(reach, length - 1)
        return reach * (reach + 1) // 2 + (length - 1 - reach) * reach

    return length + on_one_side(left) + on_one_side(right)


def softmax_attention(pairs: int, length: int, width: int, values: int) -> int:
    """Softmax attention of one head: per pair q . k, its scaling, exp, and the sums of weights and values."""
    return pairs * (2 * width + 2 * values + 3) + length * values


def softmax_attention_gradient(pairs: int, length: int, width: int, values: int) -> int:
    """The gradients of `softmax_attention` from its exponentials and their sums.

    Per pair p = e / sum, dp = do . v, ds = scale p (dp - do . o), and the terms of dv, dq and dk.
    """
    return pairs * (4 * width + 4 * values + 4) + length * 2 * values


def of_head(
    function: str,
    length: int,
    width: int,
    gradients: bool,
    *,
    left: int | None = None,
    right: int | None = 0,
) -> int:
    """Attention of one head of this width, with its gradients or without.

    `function` is "linear", "linear, not normalised" or "softmax", which reads as in `pairs_within`.
    """
    if function == "softmax":
        sizes = (pairs_within(length, left, right), length, width, width)
        return softmax_attention(*sizes) + gradients * softmax_attention_gradient(*sizes)
    normalize = function == "linear"
    forward = linear_attention(length, width, width, normalize=normalize)
    return forward + gradients * linear_attention_gradient(length, width, width, normalize=normalize)


def decoder_matmuls(d_model: int, d_ff: int, n_layers: int, vocab_size: int) -> int:
    """The matrix products of one token in a decoder, without those of its attention."""
    per_layer = 4 * d_model * d_model + 2 * d_model * d_ff
    return 2 * (n_layers * per_layer + d_model * vocab_size)
