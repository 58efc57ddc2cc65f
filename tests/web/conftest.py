"""A page of small models, a server that only this machine can reach, and a headless Chromium.

Run by `make test-web`: it needs npm, chromium and chromium-driver.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from unrolled.cli.web import make_server
from unrolled.interop.web import write_site
from unrolled.models import Decoder, DecoderConfig

AXE_VERSION = "4.14.1"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
CHARACTERS = sorted("\n abcdefghijklmnopqrstuvwxyzKINGWé")
WIDTHS = {"desktop": (1280, 900), "phone": (360, 740)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.web)


def small_model(seed: int, **config: object) -> Decoder:
    """Make a model that is untrained, but sure of itself, and does not soon repeat one token."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(d_model=32, n_layers=2, n_heads=2, **config)).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 2:
                x.mul_(6)
        model.embedding.weight.mul_(0.3)  # so that positions count as well
        model.head.project.weight.mul_(3)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Decoder, Path]]:
    """Models and the folders they are saved in, by name."""
    image = {"vocab_size": 17, "start_token": True, "max_length": 64}
    text = {"vocab_size": len(CHARACTERS), "positions": "sinusoidal"}
    made = {
        "image-linear": small_model(0, **image),
        "text-linear": small_model(1, **text),
        "text-softmax": small_model(2, **text, attention="softmax"),
    }
    found = {}
    for name, model in made.items():
        run = tmp_path_factory.mktemp(name)
        model.save(run)
        kind = {"kind": "image", "shape": [8, 8]} if name.startswith("image") else {"kind": "text"}
        kind["characters"] = None if name.startswith("image") else CHARACTERS
        (run / "vocabulary.json").write_text(json.dumps(kind))
        found[name] = model, run
    return found


@pytest.fixture(scope="session")
def site(models: dict[str, tuple[Decoder, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page; not to be changed."""
    out = tmp_path_factory.mktemp("served") / "page"
    return write_site({name: run for name, (_, run) in models.items()}, out)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page in a folder, not at the root of the server; give its address."""
    with make_server(folder.parent) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@contextmanager
def chromium(*arguments: str) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options, webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
    )
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def _browser() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def browser(_browser: webdriver.Chrome) -> webdriver.Chrome:
    """A browser at desktop width, with empty logs."""
    resize(_browser, "desktop")
    _browser.execute_cdp_cmd("Network.clearBrowserCache", {})
    for kind in ("browser", "performance"):
        _browser.get_log(kind)
    return _browser


def resize(browser: webdriver.Chrome, name: str) -> None:
    width, height = WIDTHS[name]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": name == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def state(browser: webdriver.Chrome) -> str:
    return browser.execute_script("return document.body.dataset.state")


def wait_for(browser: webdriver.Chrome, condition: Callable[[webdriver.Chrome], object]) -> None:
    WebDriverWait(browser, 60, poll_frequency=0.05).until(condition)


def opened(browser: webdriver.Chrome, address: str, group: str | None = None) -> webdriver.Chrome:
    """Open the page and wait until its models, or those of another group, are there."""
    browser.get(address)
    wait_for(browser, lambda _: state(browser) != "loading")
    if group is not None:
        browser.find_element("css selector", f"input[value='{group}']").click()
        wait_for(browser, lambda _: state(browser) != "loading")
    assert state(browser) == "ready", browser.find_element("id", "failure").text
    return browser


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, through npm once and then from the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unrolled"
    path = cache / f"axe-core-{AXE_VERSION}.min.js"
    if not path.exists():
        folder = tmp_path_factory.mktemp("axe")
        subprocess.run(
            ["npm", "pack", f"axe-core@{AXE_VERSION}", "--pack-destination", str(folder)],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        with tarfile.open(next(folder.glob("*.tgz"))) as package:
            source = package.extractfile("package/axe.min.js")
            assert source is not None
            cache.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read())
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == AXE_SHA256
    return content.decode()
