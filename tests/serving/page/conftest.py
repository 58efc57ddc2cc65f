"""The server's page in a headless Chromium, with a stand-in for the server. Run by `make test-web`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import axe_source, chromium
from selenium import webdriver
from serving.page.person import Person
from serving.page.stub import Stub, stub_server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.web)


@pytest.fixture(scope="session")
def _server() -> Iterator[tuple[str, Stub]]:
    with stub_server() as found:
        yield found


@pytest.fixture
def stub(_server: tuple[str, Stub]) -> Stub:
    """The stand-in, which knows nothing yet."""
    _server[1].reset()
    return _server[1]


@pytest.fixture(scope="session")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        folder = str(tmp_path_factory.mktemp("downloads"))
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": folder})
        driver.downloads = Path(folder)
        yield driver


@pytest.fixture
def person(_browser: webdriver.Chrome, _server: tuple[str, Stub], stub: Stub) -> Iterator[Person]:
    """A person in front of a browser that remembers nothing; no test may leave an error in its console."""
    address, _ = _server
    _browser.get(address + "page/icon.svg")
    _browser.execute_script("localStorage.clear(); sessionStorage.clear()")
    _browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for kind in ("browser", "performance"):
        _browser.get_log(kind)
    found = Person(_browser, address)
    found.resize(1280, 800)
    yield found
    errors = [x["message"] for x in _browser.get_log("browser") if x["level"] == "SEVERE"]
    assert [x for x in errors if not any(status in x for status in found.expected)] == []


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))
