"""The formulas agree with programs that count their operations and compute correct results."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from unrolled import linear_attention
from unrolled.bench import flops
from unrolled.models import Decoder, DecoderConfig
from unrolled.ops.delta import delta_rule
from unrolled.ops.dplr import dplr
from unrolled.ops.gla import diagonal_linear_attention

N, D, M = 5, 3, 2


class Counted(float):
    """A number that counts the operations it takes part in."""

    count = 0

    def __add__(self, other):
        Counted.count += 1
        return Counted(float(self) + float(other))

    def __sub__(self, other):
        return self + -float(other)

    def __mul__(self, other):
        Counted.count += 1
        return Counted(float(self) * float(other))

    def __truediv__(self, other):
        Counted.count += 1
        return Counted(float(self) / float(other))

    def exp(self):
        Counted.count += 1
        return Counted(math.exp(self))


def total(terms):
    result = Counted(0)
    for term in terms:
        result = result + term
    return result


def dot(a, b):
    return total(x * y for x, y in zip(a, b, strict=True))


def numbers(x):
    return [[Counted(value) for value in row] for row in x.tolist()]


def zeros(*sizes):
    if len(sizes) == 1:
        return [Counted(0)] * sizes[0]
    return [zeros(*sizes[1:]) for _ in range(sizes[0])]


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(N, D, generator=generator, dtype=torch.float64) for _ in range(2))
    v, grad_o = (torch.randn(N, M, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k, v, grad_o


def by_autograd(inputs, attention):
    *qkv, grad_o = inputs
    leaves = [x[None, :, None].clone().requires_grad_() for x in qkv]
    o = attention(*leaves)
    gradients = torch.autograd.grad(o, leaves, grad_o[None, :, None])
    return [x.detach()[0, :, 0] for x in (o, *gradients)]


def forward_linear(q, k, v, normalize=True):
    """Return o, and for each token the state S, z, the numerator and the divisor."""
    S, z, outputs, states = zeros(D, M), zeros(D), [], []
    for t in range(N):
        S = [[S[d][m] + k[t][d] * v[t][m] for m in range(M)] for d in range(D)]
        numerator = [dot(q[t], [S[d][m] for d in range(D)]) for m in range(M)]
        divisor = Counted(1)
        if normalize:
            z = [z[d] + k[t][d] for d in range(D)]
            divisor = dot(q[t], z)
            numerator = [x / divisor for x in numerator]
        outputs.append(numerator)
        states.append((S, z, divisor))
    return outputs, states


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention(inputs, normalize):
    Counted.count = 0
    o, _ = forward_linear(*map(numbers, inputs[:3]), normalize)
    assert flops.linear_attention(N, D, M, normalize=normalize) == Counted.count
    exact, *_ = by_autograd(inputs, lambda *x: linear_attention(*x, causal=True, normalize=normalize))
    torch.testing.assert_close(torch.tensor(o).double(), exact)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_of_linear_attention(inputs, normalize):
    q, k, v, grad_o = map(numbers, inputs)
    outputs, states = forward_linear(q, k, v, normalize)
    Counted.count = 0
    dS, dz = zeros(D, M), zeros(D)
    dq, dk, dv = [], [], []
    for t in reversed(range(N)):
        S, z, divisor = states[t]
        g = [grad_o[t][m] / divisor if normalize else grad_o[t][m] for m in range(M)]
        dS = [[dS[i][m] + q[t][i] * g[m] for m in range(M)] for i in range(D)]
        dq.insert(0, [dot(S[i], g) for i in range(D)])
        dk.insert(0, [dot(dS[i], v[t]) for i in range(D)])
        if normalize:
            d = Counted(-dot(grad_o[t], outputs[t])) / divisor
            dz = [dz[i] + q[t][i] * d for i in range(D)]
            dq[0] = [dq[0][i] + z[i] * d for i in range(D)]
            dk[0] = [dk[0][i] + dz[i] for i in range(D)]
        dv.insert(0, [dot(k[t], [dS[i][m] for i in range(D)]) for m in range(M)])
    assert flops.linear_attention_gradient(N, D, M, normalize=normalize) == Counted.count
    _, *exact = by_autograd(inputs, lambda *x: linear_attention(*x, causal=True, normalize=normalize))
    for found, expected in zip((dq, dk, dv), exact, strict=True):
        torch.testing.assert_close(torch.tensor(found).double(), expected)


def with_gates(inputs):
    """Return q, k, v, gates of every feature, and the gradient of the output."""
    q, k, v, grad_o = inputs
    return q, k / 2, v, (q + k) / 3, grad_o


def by_gates(inputs, attention):
    """Return what `by_autograd` does, with the gradient of the gates instead of their logarithms."""
    *given, gates, grad_o = inputs
    *found, of_gates = by_autograd((*given, gates.log(), grad_o), attention)
    return [*found, of_gates / gates]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours).double(), theirs)


def test_linear_attention_with_a_gate_for_every_feature(inputs):
    inputs = with_gates(inputs)
    q, k, v, a, g = map(numbers, inputs)
    Counted.count = 0
    S, o, kept = zeros(D, M), [], [zeros(D, M)]
    for t in range(N):
        S = [[a[t][d] * S[d][m] + k[t][d] * v[t][m] for m in range(M)] for d in range(D)]
        o.append([dot(q[t], [S[d][m] for d in range(D)]) for m in range(M)])
        kept.append(S)
    assert flops.gated_linear_attention(N, D, M, gradients=False) == Counted.count

    dS, found = zeros(D, M), []
    for t in reversed(range(N)):
        dq = [dot(kept[t + 1][d], g[t]) for d in range(D)]
        dS = [[dS[d][m] + q[t][d] * g[t][m] for m in range(M)] for d in range(D)]
        dk = [dot(dS[d], v[t]) for d in range(D)]
        dv = [dot(k[t], [dS[d][m] for d in range(D)]) for m in range(M)]
        da = [dot(dS[d], kept[t][d]) for d in range(D)]
        dS = [[a[t][d] * dS[d][m] for m in range(M)] for d in range(D)]
        found.insert(0, (dq, dk, dv, da))
    assert flops.gated_linear_attention(N, D, M, gradients=True) == Counted.count
    assert_equal([o, *zip(*found, strict=True)], by_gates(inputs, diagonal_linear_attention))


def test_the_delta_rule_and_its_gradient(inputs):
    q, k, v, gates, grad_o = with_gates(inputs)
    inputs = q, k, v, gates[:, :1], gates, grad_o
    q, k, v, beta, a, g = map(numbers, inputs)
    Counted.count = 0
    S, o, kept = zeros(D, M), [], []
    for t in range(N):
        before, S = S, [[a[t][d] * S[d][m] for m in range(M)] for d in range(D)]
        u = [v[t][m] + Counted(-dot(k[t], [S[d][m] for d in range(D)])) for m in range(M)]
        n = [beta[t][0] * x for x in u]
        kept.append((before, S, u, n))
        S = [[S[d][m] + k[t][d] * n[m] for m in range(M)] for d in range(D)]
        o.append([dot(q[t], [S[d][m] for d in range(D)]) for m in range(M)])
    assert flops.delta_rule(N, D, M) == Counted.count

    after = [*(before for before, *_ in kept[1:]), S]
    Counted.count = 0
    dS, found = zeros(D, M), []
    for t in reversed(range(N)):
        before, S, u, n = kept[t]
        dq = [dot(after[t][d], g[t]) for d in range(D)]
        dS = [[dS[d][m] + q[t][d] * g[t][m] for m in range(M)] for d in range(D)]
        dn = [dot(k[t], [dS[d][m] for d in range(D)]) for m in range(M)]
        dbeta, du = dot(dn, u), [beta[t][0] * x for x in dn]
        dk = [dot(dS[d], n) + Counted(-dot(S[d], du)) for d in range(D)]
        minus = [Counted(-x) for x in du]
        dS = [[dS[d][m] + k[t][d] * minus[m] for m in range(M)] for d in range(D)]
        da = [dot(dS[d], before[d]) for d in range(D)]
        dS = [[a[t][d] * dS[d][m] for m in range(M)] for d in range(D)]
        found.insert(0, (dq, dk, du, [dbeta], da))
    assert flops.delta_rule_gradient(N, D, M) == Counted.count

    def rule(q, k, v, beta, log_decay):
        return delta_rule(q, k, v, beta[..., 0], log_decay=log_decay)[0]

    assert_equal([o, *zip(*found, strict=True)], by_gates(inputs, rule))


def test_the_rule_of_rwkv7_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    sizes = (D, D, M, D, D, D, M)
    *given, grad_o = (torch.randn(N, size, generator=generator, dtype=torch.float64) for size in sizes)
    given[5] = -given[5].abs()
    q, k, v, a, b, _ = map(numbers, given)
    w, g = numbers(given[5].exp()), numbers(grad_o)

    Counted.count = 0
    S, o, kept = zeros(D, M), [], []
    for t in range(N):
        u = [dot(a[t], [S[d][m] for d in range(D)]) for m in range(M)]
        kept.append((S, u))
        S = [[w[t][d] * S[d][m] + b[t][d] * u[m] + k[t][d] * v[t][m] for m in range(M)] for d in range(D)]
        o.append([dot(q[t], [S[d][m] for d in range(D)]) for m in range(M)])
    kept.append((S, None))
    assert flops.dplr(N, D, M) == Counted.count

    Counted.count = 0
    dS, found = zeros(D, M), []
    for t in reversed(range(N)):
        (before, u), after = kept[t], kept[t + 1][0]
        dq = [dot(after[d], g[t]) for d in range(D)]
        dS = [[dS[d][m] + q[t][d] * g[t][m] for m in range(M)] for d in range(D)]
        dk, db = ([dot(dS[d], x) for d in range(D)] for x in (v[t], u))
        dv, du = ([dot(x, [dS[d][m] for d in range(D)]) for m in range(M)] for x in (k[t], b[t]))
        da, dw = [dot(before[d], du) for d in range(D)], [dot(dS[d], before[d]) for d in range(D)]
        dS = [[w[t][d] * dS[d][m] + a[t][d] * du[m] for m in range(M)] for d in range(D)]
        found.insert(0, (dq, dk, dv, da, db, dw))
    assert flops.dplr_gradient(N, D, M) == Counted.count

    leaves = [x[None, :, None].requires_grad_() for x in given]
    exact, _ = dplr(*leaves)
    torch.testing.assert_close(torch.tensor(o).double(), exact[0, :, 0])
    expected = [x[0, :, 0] for x in torch.autograd.grad(exact, leaves, grad_o[None, :, None])]
    expected[5] = expected[5] / given[5].exp()  # of w, not of log w
    for ours, theirs in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours).double(), theirs)


@pytest.mark.parametrize(("left", "right"), [(None, 0), (2, 0), (1, 2), (None, None), (9, 9)])
def test_softmax_attention_and_its_gradient(inputs, left, right):
    q, k, v, grad_o = map(numbers, inputs)
    read = [
        [j for j in range(N) if (left is None or j >= i - left) and (right is None or j <= i + right)]
        for i in range(N)
    ]
    pairs = sum(map(len, read))
    assert flops.pairs_within(N, left, right) == pairs
    scale = Counted(D**-0.5)

    Counted.count = 0
    kept, o = [], []
    for i in range(N):
        weights = {j: (dot(q[i], k[j]) * scale).exp() for j in read[i]}
        whole = total(weights.values())
        o.append([total(weights[j] * v[j][m] for j in read[i]) / whole for m in range(M)])
        kept.append((weights, whole))
    assert flops.softmax_attention(pairs, N, D, M) == Counted.count

    Counted.count = 0
    dq, dk, dv = zeros(N, D), zeros(N, D), zeros(N, M)
    for i, (weights, whole) in enumerate(kept):
        mean = dot(grad_o[i], o[i])
        for j in read[i]:
            p = weights[j] / whole
            ds = p * (dot(grad_o[i], v[j]) - mean) * scale
            dv[j] = [x + p * y for x, y in zip(dv[j], grad_o[i], strict=True)]
            dq[i] = [x + ds * y for x, y in zip(dq[i], k[j], strict=True)]
            dk[j] = [x + ds * y for x, y in zip(dk[j], q[i], strict=True)]
    assert flops.softmax_attention_gradient(pairs, N, D, M) == Counted.count

    mask = torch.zeros(N, N, dtype=torch.bool)
    for i, keys in enumerate(read):
        mask[i, keys] = True

    def attention(*qkv):
        heads = (x.transpose(1, 2) for x in qkv)
        return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)

    for found, expected in zip((o, dq, dk, dv), by_autograd(inputs, attention), strict=True):
        torch.testing.assert_close(torch.tensor(found).double(), expected)


def test_the_products_of_a_decoder():
    config = DecoderConfig(
        vocab_size=7, d_model=16, n_layers=3, n_heads=2, d_ff=40, attention="linear", positions="none"
    )
    model = Decoder(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 10, dtype=torch.long))
    by_linear = counter.get_flop_counts()["Global"]
    counted = sum(count for operation, count in by_linear.items() if operation is torch.ops.aten.addmm)
    head = by_linear[torch.ops.aten.mm]
    assert 10 * flops.decoder_matmuls(16, 40, 3, 7) == counted + head
