"""Tests a wheel as a user gets it: in an environment of its own, away from the checkout, with no compiler.

The first thing that a newcomer types is run, then the tests.

    python .ci/test_wheel.py WHEEL [TESTS ...]

TESTS are folders and files of tests; all of them by default. Tests that read documents of the checkout are
marked `checkout` and left out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ["tests", "examples", "pyproject.toml"]  # the last for pytest's settings
KERNELS = "unrolled/ops/unrolled_native.library"
COMPILERS = ["cc", "c++", "gcc", "g++", "clang", "clang++", "cl", "clang-cl", "cmake"]
INSTALL = ["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "-c", str(ROOT / "constraints.txt")]
PYTEST = [
    "-m",
    "pytest",
    "-n",
    "2",
    "-rs",
    "-m",
    "not oracles and not ray and not serve and not store and not web and not checkout",
]
WITH_KERNELS = """
import sys, unrolled
from unrolled.ops import native
print(unrolled.__file__, native.missing() or native.instruction_sets(), sep="\\n")
sys.exit(str(native.available()) != sys.argv[1])
"""


def check_contents(wheel: Path) -> None:
    """Fail unless the wheel holds the files of the package, and besides them only the kernels."""
    package = ROOT / "src" / "unrolled"
    files = {x.relative_to(package.parent).as_posix() for x in package.rglob("*") if x.is_file()}
    expected = {x for x in files if "__pycache__" not in x and x != KERNELS}
    if has_kernels(wheel):
        expected.add(KERNELS)
    names = zipfile.ZipFile(wheel).namelist()
    found = {x for x in names if x.startswith("unrolled/") and not x.endswith("/")}
    if found != expected:
        sys.exit(f"{wheel.name} and src/unrolled differ in {sorted(found ^ expected)}")


def has_kernels(wheel: Path) -> bool:
    """Return whether a wheel is made for one platform, and so has to hold the kernels."""
    return not wheel.name.endswith("-any.whl")


def environment(scripts: Path) -> dict[str, str]:
    """Return variables under which no compiler is found, and two processes share the cores."""
    kept = {name: x for name, x in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH")}
    path = [str(scripts)]
    if sys.platform == "win32":
        path.append(str(Path(os.environ["SYSTEMROOT"], "System32")))  # libraries are looked for there too
    for name in COMPILERS:
        if found := shutil.which(name, path=os.pathsep.join(path)):
            sys.exit(f"there must be no compiler, but there is {found}")
    return kept | {"PATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Install and test, in a temporary folder."""
    wheel, tests = Path(sys.argv[1]).resolve(), sys.argv[2:] or ["tests"]
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        scripts = Path(folder, "venv", "Scripts" if sys.platform == "win32" else "bin")
        subprocess.run([sys.executable, "-m", "venv", str(scripts.parent)], check=True)
        commands = [
            [*INSTALL, f"{wheel}[dev]"],
            ["-c", WITH_KERNELS, str(has_kernels(wheel))],
            ["-m", "unrolled", "generate", "--demo", "--prompt", "ROMEO:"],
            [*PYTEST, *tests],
        ]
        for command in commands:
            done = subprocess.run([str(scripts / "python"), *command], cwd=folder, env=environment(scripts))
            if done.returncode:
                sys.exit(done.returncode)


if __name__ == "__main__":
    main()
