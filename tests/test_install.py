"""Nothing is on a package index yet, so every line that installs the library does so from a clone."""

import re
import tomllib

import pytest
from documents import ROOT

from unrolled.extras import how_to_install

pytestmark = pytest.mark.checkout

FROM_AN_INDEX = re.compile(r"\bunrolled\[\w|\b(?:pip|uv) (?:install|add) +(?:-\S+ +)*['\"]?unrolled\b")
FOLDERS = ["docs", "src", "examples", "benchmarks", ".ci"]
FILES = [
    *ROOT.glob("*.md"),
    *(file for folder in FOLDERS for kind in ("*.md", "*.py") for file in (ROOT / folder).rglob(kind)),
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGE = ROOT / "docs" / "guide" / "installation.md"


@pytest.mark.parametrize(
    "line",
    ["pip install unrolled", "pip install -U unrolled", "pip install 'unrolled[hf]'", "uv add unrolled"],
)
def test_the_check_can_fail(line: str) -> None:
    assert FROM_AN_INDEX.search(line)
    assert not FROM_AN_INDEX.search("pip install '.[hf]' in a clone of unrolled, which installs unrolled")


def test_no_file_installs_from_an_index() -> None:
    assert PAGE in FILES
    assert {
        str(x.relative_to(ROOT)) for x in FILES if FROM_AN_INDEX.search(x.read_text(encoding="utf-8"))
    } == set()


def test_messages_name_extras_that_exist() -> None:
    sources = "".join(x.read_text(encoding="utf-8") for x in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"how_to_install\('(\w+)'\)", sources))
    assert {"hf", "onnx", "plot"} <= named <= EXTRAS.keys()
    assert how_to_install("hf") == "run pip install '.[hf]' in a clone of unrolled"


def test_the_table_has_every_extra_with_its_libraries() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    table = {name: set(libraries.split(", ")) for name, libraries in rows}
    names = {extra: {re.split(r"[<>=;\[ ]", x)[0] for x in expected} for extra, expected in EXTRAS.items()}
    assert table == {
        extra: found - {"unrolled"} for extra, found in names.items() if extra not in ("dev", "docs")
    }
