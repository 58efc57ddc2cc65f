"""What the Makefile starts."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.checkout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["test-native", "test-neon"])
def test_no_more_compilers_run_at_a_time_than_there_are_cores(target: str) -> None:
    command = ["make", "--dry-run", target]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [count] = re.findall(r"cmake --build .* --parallel *(.*)", printed)
    assert int(count) >= 1
