"""The peers that `make bench` installs run and are correct, so that comparisons with them are fair."""

import pytest
import torch

from unrolled.bench import cases, peers, runner
from unrolled.bench.case import Settings
from unrolled.bench.machine import Limits

SETTINGS = Settings(seconds=0.0, quick=True)
LIMITS = Limits(flops=None, flops_missing="", copying=1e9, reading=1e9)


def statuses(case: str, size: int) -> dict[str, str]:
    rows = runner.run_problem(cases.find(case).problem(size, SETTINGS), SETTINGS, LIMITS)
    return {row.contender: row.status for row in rows if not row.ours and "bf16" not in row.contender}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_the_chunked_lines_take_any_length(length):
    leaves = [torch.rand(1, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    q, k, v = leaves
    weights = (q @ k.mT).tril()
    exact, found = weights @ v / weights.sum(-1, keepdim=True), peers.chunked(q, k, v)
    gradients = [torch.autograd.grad(o.square().sum(), leaves) for o in (found, exact)]
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(*gradients)


@pytest.mark.oracles
@pytest.mark.parametrize("case", ["linear-forward", "linear-training"])
def test_peers_of_linear_attention(case):
    found = statuses(case, 192)
    onnx = "ok" if case == "linear-forward" else "not measured"
    assert found.pop("ONNX Runtime, not normalised") == onnx
    assert len(found) == 4
    assert set(found.values()) == {"ok"}


@pytest.mark.oracles
@pytest.mark.parametrize(("case", "size"), [("step", 3), ("prompt", 5), ("training", 20)])
def test_peers_of_the_decoder_run_its_weights(case, size):
    found = statuses(case, size)
    llama_cpp = [found.pop(name) for name in list(found) if name.startswith("llama.cpp")]
    assert set(llama_cpp) <= {"missing", "not measured"}  # it is not installed, or heads are too small
    assert set(found.values()) == {"ok"}


@pytest.mark.oracles
def test_a_length_that_a_peer_cannot_take_is_named():
    assert statuses("linear-forward", 100)["fla naive chunk"] == "not measured"
