"""Calls of the C++ library: a kernel without memory is an error of Python's, and leaves the process alive."""

import subprocess
import sys

import pytest
import torch

from unrolled.ops import native
from unrolled.ops.conv import causal_conv
from unrolled.ops.delta import delta_rule
from unrolled.ops.delta import native as delta
from unrolled.ops.dplr import native as dplr
from unrolled.ops.gla import native as gla
from unrolled.ops.linear import native as linear
from unrolled.ops.window import native as window

if not native.available():
    pytest.skip(str(native.missing()), allow_module_level=True)


def test_a_kernel_that_reports_no_memory_raises_memory_error(monkeypatch):
    monkeypatch.setattr(native, "_function", lambda name, instruction_set: lambda *structs: 1)
    with pytest.raises(MemoryError, match="the CPU kernel dense could not allocate its workspace"):
        native.call("dense", b"")


def test_kernels_of_other_sources_are_not_called(monkeypatch):
    monkeypatch.setattr(native, "code", lambda header: object())  # no header equals another
    with pytest.warns(UserWarning, match="built from other sources: install unrolled again; until then"):
        assert "built from other sources" in native._library.__wrapped__()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_a_process_out_of_memory_goes_on_after_a_memory_error():
    # One query reads 2**20 keys and their values, of which the kernel copies all to its workspace: 128 MiB.
    script = """
import re, resource
from pathlib import Path
import torch
from unrolled import window_attention

q, k, v = torch.ones(1, 1, 1, 16), torch.ones(1, 2**20, 1, 16), torch.ones(1, 2**20, 1, 16)
with torch.no_grad():
    window_attention(q, k[:, :9], v[:, :9], window_size=(8, 0), backend="native")
    in_use = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**26, resource.RLIM_INFINITY))
    try:
        window_attention(q, k, v, window_size=(-1, 0), backend="native")
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(window_attention(q, k, v, window_size=(-1, 0), backend="native").mean().item())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the CPU kernel window_forward could not allocate its workspace\n1.0\n"


@pytest.mark.parametrize("name", ["causal_conv", "delta_rule"])
def test_whether_there_are_kernels_is_constant_in_a_graph(name):
    x = torch.rand(1, 5, 2, 3)
    calls = {
        "causal_conv": lambda x: causal_conv(x[:, :, 0], x[0, :3, 0])[0],
        "delta_rule": lambda x: delta_rule(x, x / 2, x, x[..., 0])[0],
    }
    compiled = torch.compile(calls[name], fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), calls[name](x))


X = torch.rand(1, 1, 1, 2)
NOT_CAUSAL = linear.Options(None, causal=False, normalize=True)
WIDE, S = X.double(), torch.zeros(1, 1, 2, 2)
CALLS = {
    "linear": lambda: linear.forward(linear.Inputs(X, X, WIDE, None, None, None), NOT_CAUSAL),
    "a step of linear": lambda: linear.step(linear.Token(X[0], WIDE[0], X[0], S, S[..., 0], None), True),
    "gla": lambda: gla.forward(gla.Inputs(WIDE, X, X, -X, S), None),
    "delta": lambda: delta.forward(delta.Inputs(X, WIDE, X, X[..., 0], None, S), None),
    "dplr": lambda: dplr.forward(dplr.Inputs(X, X, X, WIDE, X, -X, S), None),
    "window": lambda: window.forward(window.Inputs(X, X, WIDE, None), window.Options(None, (1, 0), 1.0)),
}


@pytest.mark.parametrize("kernel", CALLS)
def test_inputs_of_two_dtypes_are_refused_by_a_kernel_that_reads_them_as_one(kernel):
    with pytest.raises(ValueError, match="but must have one dtype"):
        CALLS[kernel]()
