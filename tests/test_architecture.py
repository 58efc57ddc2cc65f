"""Which way imports point: each room may import those above it in this list, never those below."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unrolled

PACKAGE = Path(unrolled.__file__).parent
ROOMS = [
    {"contract", "demo_models", "extras", "fields", "files", "registry", "threads"},
    {"folders"},
    {"ops"},
    {"alignment", "attention", "recurrent"},
    {"models"},
    {"decode"},
    {"data", "training", "generation"},
    {"interop"},
    {"bench", "experiments", "serving", "testing"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def imports(source: str) -> set[str]:
    """Rooms of the package that a module's source imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room they reach"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("unrolled.")}
    return found


def upward(room: str, source: str) -> set[str]:
    """Rooms that `source`, a file of `room`, imports although they are below it or beside it."""
    return {other for other in imports(source) if other != room and LEVEL[other] >= LEVEL[room]}


def test_the_check_can_fail():
    assert upward("ops", "from unrolled.attention import names") == {"attention"}
    assert upward("ops", "def late():\n    import unrolled.models.decoder") == {"models"}
    assert upward("data", "from unrolled import training") == {"training"}
    assert upward("models", "from unrolled.ops.state import select") == set()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_up(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return  # the package itself gathers names from the rooms
    assert room in LEVEL, f"{room} is not a room of the design"
    assert not upward(room, path.read_text())


def private(room: str, source: str) -> set[str]:
    """Private modules and names of other rooms that `source`, a file of `room`, imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unrolled."):
            parts = str(node.module).split(".")[1:]
            names = [*parts, *(alias.name for alias in node.names)]
            if parts[0] != room and any(name.startswith("_") for name in names):
                found.add(".".join(names))
    return found


def test_rooms_import_no_private_parts_of_others():
    assert private("models", "from unrolled.recurrent._lstm import x") == {"recurrent._lstm.x"}
    assert private("recurrent", "from unrolled.recurrent._lstm import x") == set()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert not private(room, path.read_text(encoding="utf-8")), path


def test_every_public_name_is_found():
    for name in unrolled.__all__:
        assert getattr(unrolled, name).__name__ == name
    assert set(unrolled.__all__) <= set(dir(unrolled))
    with pytest.raises(AttributeError, match="no attribute 'linear_atention'"):
        unrolled.linear_atention  # noqa: B018


def test_importing_needs_no_extra_and_takes_little_over_torch():
    script = """
import sys, time
import torch
began = time.process_time()
import unrolled
from unrolled import linear_attention
took = time.process_time() - began
extras = {"matplotlib", "sklearn", "tensorboard", "transformers", "onnx", "fastapi", "triton"} & set(sys.modules)
assert not extras, extras
print(took)
"""
    command = [sys.executable, "-c", script]
    assert float(subprocess.run(command, check=True, capture_output=True).stdout) < 0.3
