"""What the tests of the kernels share; each of them asks for it."""

import interpreted
import pytest
import torch

from unrolled.ops import native


@pytest.fixture(params=native.instruction_sets(), scope="module")
def instruction_set(request):
    """Every instruction set that this machine can run."""
    with native.use(request.param):
        yield


@pytest.fixture
def poisoned_memory():
    """Fill uninitialised memory with NaN, so that a value that is not written shows up."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads():
    """Set the number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run():
    """`run(function, ...)` calls it where Triton's kernels can run; arguments and results are on the CPU."""
    with interpreted.interpreter() as run:
        yield run
