"""Fixtures of the data sets' tests, which use neither the user's files and settings nor a network."""

import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

REAL_DATA = os.environ.get("UNROLLED_DATA")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the user's data folders, and let only file:// addresses be opened."""
    monkeypatch.delenv("UNROLLED_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    urlopen = urllib.request.urlopen

    def no_network(url: str, **options: float) -> object:
        if not url.startswith("file:"):
            raise urllib.error.URLError("no network in tests")
        return urlopen(url, **options)

    monkeypatch.setattr(urllib.request, "urlopen", no_network)


@pytest.fixture
def real_data(request: pytest.FixtureRequest) -> str:
    """Return the folder of real files, for a test whose parameter is what it needs in there."""
    needed: str = request.param
    if REAL_DATA is None or not Path(REAL_DATA, needed).is_dir():
        pytest.skip(f"needs the real files: set UNROLLED_DATA to a folder that has {needed}/")
    return REAL_DATA
