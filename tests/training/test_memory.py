"""The memory that a process frees, in processes of their own, since the setting cannot be undone."""

import os
import subprocess
import sys

import pytest
import torch

from unrolled.training import memory

PROGRAM = """
import resource
import torch
from unrolled.training import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(keep_freed_memory())
for _ in range(5):  # until the heap has a place for it
    torch.ones(2**24)
before = faults()
for _ in range(5):
    torch.ones(2**24)
print(faults() - before)
"""


def run(**environment):
    """Whether memory is kept, and the page faults of five tensors of 64 MB, each freed before the next."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = found.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another C library")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise():
    kept, faults = run()
    if not kept:
        pytest.skip("the C library is not glibc")
    returned, faults_otherwise = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert not returned
    assert faults < faults_otherwise / 2


def test_the_memory_is_that_of_the_container_if_it_is_less(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", limit)
    whole = memory.machine_bytes()
    assert whole > 2**28
    limit.write_text("max\n")
    assert memory.machine_bytes() == whole
    limit.write_text(f"{2**60}\n")
    assert memory.machine_bytes() == whole
    limit.write_text("1000000\n")
    assert memory.machine_bytes() == 1_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_a_peak_that_the_system_does_not_report_is_none(monkeypatch, tmp_path):
    assert memory.peak_bytes(torch.device("cpu")) > 2**20
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    assert memory.peak_bytes(torch.device("cpu")) is None
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t5 kB\n")
    assert memory.peak_bytes(torch.device("cpu")) is None
    (tmp_path / "status").write_text("VmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    assert memory.peak_bytes(torch.device("cpu")) == 2**21
    assert memory.process_bytes("VmRSS") == 2**20


def test_what_is_changed_in_place_was_there_before():
    x = torch.zeros(1000)
    with memory.PeakBytes() as counted:
        x.add_(1)
        x.view(10, 100).mul_(2)
    assert counted.peak == 0
