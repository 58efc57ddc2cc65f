"""Miscompiled kernels are detected at first use and replaced by the plain form."""

import subprocess
import sys
import warnings

import pytest
import torch

from unrolled.contract import UnsupportedError
from unrolled.ops.linear import chunked as linear_chunked
from unrolled.ops.linear import packed as linear_packed
from unrolled.ops.linear import triton as linear_triton
from unrolled.ops.linear.chunked import Inputs, Options, OutputGradients, Token
from unrolled.ops.linear.triton_check import example
from unrolled.ops.triton import check
from unrolled.ops.triton.check import Call, known_fault, mistake

HOPPER, B300, AMPERE = (9, 0), (10, 3), (8, 0)
PLAIN = {"forward": linear_packed.forward, "backward": linear_packed.backward, "step": linear_chunked.step}


def call(kind="forward", *, dtype=torch.float32, R=5, M=7, gated=True, causal=True, normalize=True):
    others = 2, causal, normalize
    return Call("linear attention", kind, torch.device("cpu"), dtype, (R, M), gated, others)


@pytest.mark.parametrize(
    ("kind", "gated", "width", "capability", "triton", "fault"),
    [
        ("backward", True, 16, HOPPER, (3, 3, 1), None),
        ("backward", True, 16, HOPPER, (3, 4, 0), "gradients of gates"),
        ("backward", True, 16, HOPPER, (3, 7, 0), "gradients of gates"),
        ("backward", True, 16, HOPPER, (3, 7, 1), None),
        ("backward", False, 16, HOPPER, (3, 5, 0), None),
        ("forward", True, 16, HOPPER, (3, 5, 0), None),
        ("backward", True, 16, AMPERE, (3, 5, 0), None),
        ("forward", False, 17, HOPPER, (3, 5, 1), None),
        ("forward", False, 17, HOPPER, (3, 7, 1), "beyond shared memory"),
        ("forward", False, 16, HOPPER, (3, 7, 1), None),
        ("forward", False, 17, HOPPER, (3, 8, 0), None),
        ("step", False, 64, HOPPER, (3, 7, 1), None),
        ("forward", False, 16, B300, (3, 8, 0), "sums of products"),
        ("forward", False, 16, B300, (3, 9, 0), None),
    ],
)
def test_known_faults(kind, gated, width, capability, triton, fault):
    found = known_fault(call(kind, gated=gated, R=width, M=8), capability, triton)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flags", [(True, True, True), (False, True, False), (False, False, True)])
def test_correct_kernels_pass_and_each_wrong_result_is_found(kind, dtype, flags):
    causal, gated, normalize = flags
    asked = call(
        kind, dtype=dtype, R=40, M=33, gated=gated, causal=causal or kind == "step", normalize=normalize
    )
    assert mistake(asked, PLAIN[kind], example) is None
    for at, name in enumerate(example(asked).expected):

        def miscompiled(*arguments, at=at):
            results = [x.contiguous().clone() for x in PLAIN[kind](*arguments)]
            if results[at].numel():
                results[at].view(-1)[-1] = torch.nan if at % 2 else 2 * results[at].abs().max()
            return tuple(results)

        absent = (name.endswith("log_decay") and not gated) or (name == "the divisor" and not normalize)
        found = mistake(asked, miscompiled, example)
        assert found is None if absent else found.startswith(f"makes a mistake in {name}, off by")


def test_a_gradient_that_is_zero_but_for_rounding_is_no_mistake():
    # One feature that divides itself: the output does not depend on q.
    assert mistake(call("backward", dtype=torch.bfloat16, R=1, M=8), PLAIN["backward"], example) is None


def test_a_kernel_that_raises_is_a_mistake_unless_memory_runs_out():
    def fails(*arguments):
        raise AssertionError("operand does not dominate this use")

    assert mistake(call(), fails, example) == "fails with AssertionError: operand does not dominate this use"

    def full(*arguments):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        mistake(call(), full, example)


@pytest.fixture
def compiled(monkeypatch):
    """As on a GPU: kernels are compiled, and nothing has been checked."""
    monkeypatch.setattr(check, "compiled_for", lambda device: (AMPERE, (3, 9, 0)))
    monkeypatch.setattr(check, "_faults", {})
    monkeypatch.setattr(check, "_warned", set())


def calls(T=9):
    """One call of each kind: the arguments that all forms take."""
    q, k, v = torch.rand(1, T, 2, 5), torch.rand(1, T, 2, 5), torch.rand(1, T, 2, 7)
    inputs = Inputs(q, k, v, -torch.rand(1, T, 2), torch.rand(1, 2, 5, 7), torch.rand(1, 2, 5))
    options = Options(None, causal=True, normalize=True)
    den = linear_packed.forward(inputs, options).den
    grads = OutputGradients(torch.rand(1, T, 2, 7), torch.rand(1, 2, 5, 7), torch.rand(1, 2, 5))
    return {
        "forward": (inputs, options),
        "backward": (grads, inputs, den, options),
        "step": (Token(q[:, 0], k[:, 0], v[:, 0], *inputs[4:], inputs.log_decay[:, 0]), True),
    }


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("right", [True, False])
def test_the_plain_form_replaces_a_miscompiled_one_with_one_warning(monkeypatch, compiled, kind, right):
    runs = []

    def kernels(*arguments):
        runs.append(arguments)
        return tuple(x if right else x + 1e3 for x in PLAIN[kind](*arguments))

    monkeypatch.setattr(linear_triton, f"_{kind}", kernels)
    arguments = calls()[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = getattr(linear_triton, kind)(*arguments)
            for x, y in zip(found, PLAIN[kind](*arguments), strict=True):
                assert torch.equal(x, y)
    assert len(runs) == (4 if right else 1)  # one of them was the check
    assert [str(w.message).partition(" in the")[0] for w in caught] == (
        [] if right else ["linear attention runs in plain PyTorch on cpu, as Triton 3.9.0 makes a mistake"]
    )


def test_kernels_that_are_required_are_never_replaced(monkeypatch, compiled):
    monkeypatch.setattr(linear_triton, "_step", lambda *_: [x + 1 for x in linear_chunked.step(*_)])
    for _ in range(2):
        with (
            check.required(),
            pytest.raises(UnsupportedError, match="cannot be used on cpu, as Triton"),
        ):
            linear_triton.step(*calls()["step"])
    with pytest.warns(UserWarning, match="runs in plain PyTorch"):
        linear_triton.step(*calls()["step"])


def test_known_faults_count_while_a_graph_is_recorded_but_nothing_runs(monkeypatch, compiled):
    monkeypatch.setattr(check, "recording", lambda device: True)
    assert check.trusted(call(), None, None)
    assert not check._faults  # so the next use checks it
    monkeypatch.setattr(check, "compiled_for", lambda device: (HOPPER, (3, 7, 1)))
    with pytest.warns(UserWarning, match="beyond shared memory"):
        assert not check.trusted(call(R=64), None, None)


def test_nothing_is_checked_where_nothing_is_compiled():
    assert check.compiled_for(torch.device("cpu")) is None


@pytest.mark.slow
def test_looking_up_a_verdict_takes_microseconds():
    script = (
        "import timeit, torch\n"
        "from unrolled.ops.linear.triton_check import described, example\n"
        "from unrolled.ops.triton import check\n"
        "from unrolled.ops.linear.chunked import Inputs\n"
        "inputs = Inputs(*(torch.rand(1, 2, 5) for _ in range(3)), None, None, None)\n"
        "check._faults[described('step', inputs, True, True)] = None\n"
        "look = lambda: check.trusted(described('step', inputs, True, True), None, example)\n"
        "print(min(timeit.repeat(look, number=1000, repeat=20)) / 1000)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 2e-5
