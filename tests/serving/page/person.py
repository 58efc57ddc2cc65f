"""What a person does with the server's page."""

from browser import state, wait_for
from selenium import webdriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select


class Person:
    """Someone in front of the page."""

    def __init__(self, browser: webdriver.Chrome, address: str) -> None:
        self.browser, self.address = browser, address
        self.expected: list[str] = []  # parts of console messages that a test brings about

    def opens(self, model: str | None = None, *, until: str = "ready") -> None:
        self.browser.get(self.address)
        self.waits(until)
        if model is not None:
            Select(self["model"]).select_by_value(model)

    def __getitem__(self, name: str) -> WebElement:
        return self.browser.find_element("id", name)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements("css selector", selector)

    def waits(self, until: str = "ready") -> None:
        wait_for(self.browser, lambda _: state(self.browser) == until)

    def waits_for_text(self, name: str, text: str) -> None:
        wait_for(self.browser, lambda _: text in self[name].text)

    def sets(self, name: str, value: str) -> None:
        self.browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', { bubbles: true }))",
            self[name],
            value,
        )

    def presses(self, name: str = "go") -> None:
        """Press a button, and wait for what it begins to end."""
        self[name].click()
        self.waits()

    def text(self) -> str:
        return self["text"].get_property("value")

    def rows(self) -> list[WebElement]:
        return self.all("#tree [role=treeitem]")

    def writes(self, text: str) -> str:
        """Type something, let the model go on, and give all of the text."""
        self["text"].send_keys(text)
        self.presses()
        return self.text()

    def hears_of(self, tree: str) -> None:
        """Another tab has changed the stored tree with this piece of JavaScript."""
        self.browser.execute_script(
            "const key = Object.keys(localStorage).find((key) => key.startsWith('unrolled:') && key.split(':').length === 3);"
            f"const tree = JSON.parse(localStorage.getItem(key)); {tree};"
            "localStorage.setItem(key, JSON.stringify(tree)); dispatchEvent(new StorageEvent('storage', { key }))"
        )

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
