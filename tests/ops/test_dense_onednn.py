"""Linear layers by oneDNN, wherever the tests run: the choice of the processor is overruled."""

import time

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from unrolled.ops.dense import Linear, linear, onednn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Use oneDNN, and count the layers that it computes."""
    found, product = [], onednn.linear

    def count(*tensors):
        found.append(tensors)
        return product(*tensors)

    monkeypatch.setattr(onednn, "faster", lambda: True)
    monkeypatch.setattr(onednn, "linear", count)
    return found


def tensors(rows=(2, 50), inputs=80, outputs=96, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = ((*rows, inputs), (outputs, inputs), (outputs,), (*rows, outputs))
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]


def with_gradients(form, x, weight, bias, grad):
    y = form(x, weight, bias)
    return [y, *torch.autograd.grad(y, (x, weight, bias), grad)]


def exact(x, weight, bias):
    return x.double() @ weight.double().T + bias.double()


@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_and_gradients_are_as_exact_as_torchs(runs, transposed):
    x, weight, bias, grad = tensors()
    if transposed:  # in memory
        x, weight, grad = (y.detach().mT.contiguous().mT.requires_grad_() for y in (x, weight, grad))
    expected = with_gradients(exact, x, weight, bias, grad.double())
    found, torchs = (with_gradients(form, x, weight, bias, grad) for form in (linear, F.linear))
    assert len(runs) == 1
    for ours, theirs, y in zip(found, torchs, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert (ours - y).norm() <= 2 * (theirs - y).norm() + 1e-7 * y.norm()


def test_a_bias_may_have_any_stride(runs):
    x, weight, _, _ = tensors()
    for bias in (torch.randn(1).expand(96), torch.randn(192)[::2]):
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    assert len(runs) == 2


def test_rows_that_are_parts_of_longer_rows_take_hardly_longer(runs):
    """oneDNN would take 1,000 times as long: in the output for the weight, in the gradient for the input."""

    def seconds(x, weight):
        x, weight = (y.detach().requires_grad_() for y in (x, weight))
        began = time.process_time()
        linear(x, weight, None).sum().backward()
        return time.process_time() - began

    parts = [torch.randn(rows, 256)[:, :128] for rows in (2048, 128)]
    whole = [y.contiguous() for y in parts]
    seconds(*whole)
    assert min(seconds(*parts) for _ in range(3)) < 50 * min(seconds(*whole) for _ in range(3))
    assert len(runs) == 7


def test_only_the_gradients_that_are_asked_for_are_computed(runs):
    x, weight, bias, grad = tensors()
    for frozen in range(3):
        given = [y.detach().requires_grad_(i != frozen) for i, y in enumerate((x, weight, bias))]
        linear(*given).backward(grad)
        assert [y.grad is None for y in given] == [i == frozen for i in range(3)]
    assert not linear(x.detach(), weight.detach(), bias.detach()).requires_grad
    assert linear(x.detach(), weight, None).requires_grad
    assert len(runs) == 5


def test_gradients_have_gradients(runs):
    x, weight, bias, _ = tensors()

    def second(form):
        first = torch.autograd.grad(form(x, weight, bias).square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(y.square().sum() for y in first), (x, weight, bias))

    for found, expected in zip(second(linear), second(exact), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert runs


def test_the_same_call_gives_the_same_bits():
    given = tensors((700,))
    first = with_gradients(linear, *given)
    assert all(
        torch.equal(x, y)
        for _ in range(3)
        for x, y in zip(first, with_gradients(linear, *given), strict=True)
    )


# The flags of oneDNN include one for Intel's GPUs, which torch warns about.
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_torch_computes_all_that_is_unusual(runs):
    x, weight, bias, _ = tensors()
    linear(x[:, :31], weight, bias)  # few rows
    linear(*tensors(inputs=63)[:3])
    linear(*tensors(outputs=63)[:3])
    linear(*tensors(dtype=torch.float64)[:3])
    linear(*tensors(dtype=torch.bfloat16)[:3])
    linear(x.to("meta"), weight.to("meta"), bias.to("meta"))
    with torch.autocast("cpu"):
        linear(x, weight, bias)
    with torch.backends.mkldnn.flags(enabled=False):
        linear(x, weight, bias)
    torch.func.grad(lambda x: linear(x, weight, bias).sum())(x.detach())
    torch.compile(linear, backend="eager", fullgraph=True)(x, weight, bias)
    torch.export.export(Linear(80, 96), (x.detach(),))
    assert not runs
    linear(x, weight, bias)
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False), ("", False)],
)
def test_the_choice_is_by_the_vendor(text, expected, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(onednn, "description", lambda: text)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert onednn.faster.__wrapped__() == expected
