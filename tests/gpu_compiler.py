"""Compiles Triton's kernels for a GPU that is not there, and reads what they need of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes that the smaller GPUs from Ampere on have for a program."""

BEGIN = """
import json, re, subprocess, sys, types
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from unrolled.ops.triton import launch as launches

capability, folder = int(sys.argv[1]), Path(sys.argv[2])
driver.set_active(types.SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", capability, 32),
))
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
needs = {}

def compile_only(kernel, grid, *arguments, **options):
    compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    found = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    registers, stack = (int(re.search(rf"{x}:(\\d+)", found.stdout)[1]) for x in ("REG", "STACK"))
    each = {
        "shared": compiled.metadata.shared, "registers": registers, "spilled": stack,
        "warps": compiled.metadata.num_warps,
    }
    needs.setdefault(compiled.metadata.name, []).append(each)

launches.launch = compile_only  # before any module takes it from there
launches.multiplies_from_memory = lambda device: 90 <= capability < 120
"""
END = "\nprint(json.dumps(needs))\n"


def needs(script: str, capability: int, folder: Path) -> dict[str, list[dict[str, int]]]:
    """Shared memory, registers and stack of every kernel that the script launches, by name."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + script + END, str(capability), str(folder)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def assert_fits(found: dict[str, list[dict[str, int]]], spilled: int = 0) -> None:
    """No kernel needs more shared memory than the smaller GPUs have, or spills more bytes of a thread's registers.

    The spilled bytes are compared for the latest Triton only, since older ones spill more.
    """
    import triton  # where there is none, tests are skipped

    latest = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    for name, variants in found.items():
        for each in variants:
            assert each["shared"] <= SMALLEST_SHARED_MEMORY, (name, each)
            assert each["spilled"] <= spilled or not latest, (name, each)
