"""What tests of the page share: a server, a headless Chromium, and what a person does with the page."""

import hashlib
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from unrolled.cli._page import make_server
from unrolled.generation import generate

CHARACTERS = sorted("\n abcdefghijklmnopqrstuvwxyzKINGWé")
WIDTHS = {"desktop": (1280, 900), "phone": (360, 740)}

IMAGE, TEXT, IDS = "8 × 8 pixels", "verse", "Token ids"

AXE_VERSION = "4.14.1"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"


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


def resize(browser: webdriver.Chrome, name: str) -> None:
    width, height = WIDTHS[name]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": name == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def assert_fits_and_is_accessible(browser: webdriver.Chrome, axe: str, name: str) -> None:
    """The page is no wider than the window, and axe finds nothing but minor faults."""
    across = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1] == WIDTHS[name][0]
    browser.execute_script(axe)
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    bad = [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"] if v["impact"] != "minor"]
    assert bad == []
    assert len(found["passes"]) > 20


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


def set_value(browser, name, value):
    browser.execute_script(
        "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
        "field.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def run(browser):
    """Press the button; give what the page made, by the name of the model."""
    browser.execute_script("window.unrolled.runs = {}")
    browser.find_element("id", "run").click()
    wait_for(
        browser,
        lambda _: (
            state(browser) == "ready"
            and browser.execute_script("return Object.keys(window.unrolled.runs).length")
        ),
    )
    return browser.execute_script("return window.unrolled.runs")


def greedy(model, prompt, count):
    with torch.no_grad():
        return generate(model, [prompt], count, temperature=0)[0].tolist()


def axe_source(folder: Path) -> str:
    """Return the source of axe-core, through npm once (unpacked in `folder`) and then from the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unrolled"
    path = cache / f"axe-core-{AXE_VERSION}.min.js"
    if not path.exists():
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
