"""The page of the models that come with the library: half a digit is completed, and text is written."""

import pytest
from browser import greedy, opened, run, served, set_value

from unrolled import demo_models
from unrolled.cli._page import shipped_page
from unrolled.decode import load_model


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    page = shipped_page(tmp_path_factory.mktemp("served") / "page", runtime=None, force=False)
    with served(page) as found:
        yield found


def test_half_a_digit_is_completed_as_pytorch_completes_it(browser, address):
    opened(browser, address, "mnist")
    set_value(browser, "temperature", "0")
    set_value(browser, "rows", "14")
    result = run(browser)["digits"]
    assert len(result["prompt"]) == len(result["ids"]) == 14 * 28
    assert result["ids"] == greedy(load_model(demo_models.path("digits")), result["prompt"], 14 * 28)
    assert max(result["ids"]) > 128  # a stroke
    assert browser.find_element("css selector", ".time").text.endswith(" ms")


def test_text_is_what_pytorch_writes(browser, address):
    opened(browser, address, "tiny-shakespeare")
    set_value(browser, "prompt", "ROMEO:")
    set_value(browser, "temperature", "0")
    result = run(browser)["text"]
    assert len(result["ids"]) == 240
    assert result["ids"] == greedy(load_model(demo_models.path("text")), result["prompt"], 240)
