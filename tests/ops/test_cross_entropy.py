import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from unrolled.bench import memory
from unrolled.ops import cross_entropy
from unrolled.ops.cross_entropy import linear_cross_entropy

N, V, D = 13, 37, 6
NAMES = ("x", "weight", "bias")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces of rows, the last of them shorter, each in several parts."""
    monkeypatch.setattr(cross_entropy, "ROWS", 5)
    monkeypatch.setattr(cross_entropy, "LOGITS_IN_CACHE", 2 * V)


def arguments(dtype=torch.float64, *, bias=True, seed=0, ignored=4):
    g = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((N, D), (V, D), (V,)))
    target = torch.randint(V, (N,), generator=g)
    target[torch.randperm(N, generator=g)[:ignored]] = -100
    given = [y.to(dtype).requires_grad_() for y in (x, weight, b)]
    return *(given if bias else [*given[:2], None]), target


def definition(x, weight, bias, target, smoothing=0.0):
    """The equation, target by target."""
    logits = x @ weight.T + (0 if bias is None else bias)
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    asked = [i for i in range(len(x)) if target[i] != -100]
    total = sum((1 - smoothing) * log_p[i, target[i]] + smoothing * log_p[i].mean() for i in asked)
    return -total / max(1, len(asked))


def with_gradients(loss, inputs):
    return [loss.detach(), *torch.autograd.grad(3 * loss, [x for x in inputs if x is not None])]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_definition(bias, smoothing):
    *inputs, target = arguments(bias=bias)
    found = with_gradients(linear_cross_entropy(*inputs, target, smoothing=smoothing), inputs)
    expected = with_gradients(definition(*inputs, target, smoothing), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_it_is_torchs_own_function():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has it from 2.13 on")
    *inputs, target = arguments()
    x, weight, bias = inputs
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4, chunking_method=None)
    theirs = F.linear_cross_entropy(x, weight, target, linear_bias=bias, options=options)
    found = with_gradients(linear_cross_entropy(*inputs, target), inputs)
    torch.testing.assert_close(found, with_gradients(theirs, inputs), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, False),
        *((dtype, autocast) for dtype in (torch.bfloat16, torch.float16) for autocast in (False, True)),
    ],
)
def test_its_error_is_at_most_twice_that_of_all_logits_at_once(dtype, autocast):
    errors = []
    for form in (linear_cross_entropy, lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b).float(), t)):
        worst = torch.zeros(4)
        for seed in range(40):
            *inputs, target = arguments(torch.float32 if autocast else dtype, seed=seed)
            with torch.autocast("cpu", dtype=dtype if autocast else torch.bfloat16, enabled=autocast):
                loss = form(*inputs, target)
            found = with_gradients(loss, inputs)
            assert [y.dtype for y in found] == [torch.float32, *(y.dtype for y in inputs)]
            exact = [y.detach().double().requires_grad_() for y in inputs]
            expected = with_gradients(definition(*exact, target), exact)
            worst += torch.stack([(a - b).square().mean() for a, b in zip(found, expected, strict=True)])
        errors.append(worst.sqrt())
    assert (errors[0] <= 2 * errors[1]).all()


def test_a_weight_that_is_frozen_gets_no_gradient_and_the_others_do():
    for frozen in range(3):
        *inputs, target = arguments()
        expected = with_gradients(definition(*inputs, target), inputs)[1:]
        inputs[frozen].requires_grad_(False)
        linear_cross_entropy(*inputs, target).mul(3).backward()
        assert inputs[frozen].grad is None
        for i in {0, 1, 2} - {frozen}:
            torch.testing.assert_close(inputs[i].grad, expected[i])
    with torch.no_grad():
        loss = linear_cross_entropy(*arguments())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, definition(*arguments()).detach())


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    *inputs, target = arguments()
    loss = linear_cross_entropy(*inputs, target)
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_without_targets_the_loss_is_0_and_so_are_its_gradients():
    for rows in (N, 0):
        *inputs, target = arguments(ignored=N)
        inputs[0] = inputs[0].detach()[:rows].requires_grad_()
        found = with_gradients(linear_cross_entropy(*inputs, target[:rows]), inputs)
        assert all((y == 0).all() for y in found)


def test_what_stands_at_an_ignored_target_has_no_effect_on_the_loss():
    *inputs, target = arguments()
    expected = linear_cross_entropy(*inputs, target).detach()
    with torch.no_grad():
        inputs[0][target == -100] = float("nan")
    loss = linear_cross_entropy(*inputs, target)
    assert torch.equal(loss, expected)
    assert torch.autograd.grad(loss, inputs[0])[0].isfinite().all()


def test_axes_before_the_last_are_kept_apart():
    *inputs, target = arguments()
    folded = linear_cross_entropy(inputs[0][:12].view(3, 4, D), *inputs[1:], target[:12].view(3, 4))
    torch.testing.assert_close(folded, linear_cross_entropy(inputs[0][:12], *inputs[1:], target[:12]))


@pytest.mark.slow
def test_derivatives_of_any_order_and_transforms():
    *inputs, target = arguments()
    assert torch.autograd.gradgradcheck(lambda *xs: linear_cross_entropy(*xs, target, smoothing=0.1), inputs)
    found = torch.func.grad(linear_cross_entropy, argnums=(0, 1, 2))(*inputs, target)
    expected = torch.autograd.grad(definition(*inputs, target), inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.compilers
def test_it_compiles_and_its_operator_is_sound():
    *inputs, target = arguments(torch.float32)
    torch.library.opcheck(
        torch.ops.unrolled.linear_cross_entropy.default,
        (*inputs, target, torch.float32, 0.1, [True, True, True]),
    )
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            found = with_gradients(compiled(*inputs, target), inputs)
            expected = with_gradients(linear_cross_entropy(*inputs, target), inputs)
        torch.testing.assert_close(found, expected)


def test_it_never_holds_all_logits(monkeypatch):
    if not memory.CLEAR.exists():
        pytest.skip("only Linux tells the peak memory of a process")
    monkeypatch.undo()
    rows, levels = 8192, 4096
    x, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(levels, 8, requires_grad=True)
    target = torch.randint(levels, (rows,))
    linear_cross_entropy(x[:9], weight, None, target[:9]).backward()
    peak = memory.peak(lambda: linear_cross_entropy(x, weight, None, target).backward())
    assert peak < rows * levels * 4 / 3


def test_the_gradient_of_the_bias_is_summed_in_single_precision():
    x, weight, bias = torch.zeros(10, D), torch.zeros(V, D), torch.zeros(V, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(x, weight, bias, torch.zeros(10, dtype=torch.long)).backward()
    of_each = torch.tensor(1 / V, dtype=torch.bfloat16).float()
    torch.testing.assert_close(bias.grad[1:], of_each.expand(V - 1))


def test_autocast_does_not_round_double_precision():
    *inputs, target = arguments()
    expected = with_gradients(linear_cross_entropy(*inputs, target), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*inputs, target)
    assert all(map(torch.equal, with_gradients(loss, inputs), expected))


def test_there_may_be_a_single_row_without_a_batch():
    x, weight, bias, target = arguments()
    rows, targets = x.flatten(0, -2), target.flatten()
    found = linear_cross_entropy(rows[0], weight, bias, targets[0])
    torch.testing.assert_close(found, linear_cross_entropy(rows[:1], weight, bias, targets[:1]))
