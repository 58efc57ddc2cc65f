"""Whatever goes wrong, the page says what."""

import json
import os
import shutil
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from browser import IDS, IMAGE, TEXT, opened, run, served, state, wait_for

from unrolled.cli import _page


@pytest.fixture
def copy(site, tmp_path):
    shutil.copytree(site, tmp_path / "page")
    return tmp_path / "page"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


MODEL = "models/image-linear"
GRAPH, MANIFEST = f"{MODEL}/plain.onnx", f"{MODEL}/manifest.json"
OTHERS = ["tokens", "position", "layers.7.kv"]
FAULTS = {
    "tampered": (GRAPH, flip, "plain.onnx is not the file that was exported"),
    "truncated": (GRAPH, lambda x: x.write_bytes(x.read_bytes()[:999]), "plain.onnx has 999 bytes where"),
    "missing": (GRAPH, Path.unlink, "plain.onnx is missing: the server answers 404"),
    "manifest": (MANIFEST, lambda x: x.write_text("{"), "manifest.json is damaged: it is not JSON"),
    "format": (MANIFEST, lambda x: change(x, version=2), "of the format unrolled-onnx 2"),
    "other model": (MANIFEST, lambda x: change(x, inputs=OTHERS), "plain.onnx has other inputs or outputs"),
    "vocabulary": (f"{MODEL}/vocabulary.json", flip, "vocabulary.json is not the file"),
    "runtime": ("runtime/ort-wasm-simd-threaded.wasm", flip, "wasm is not the file"),
    "no list": ("models.json", Path.unlink, "models.json is missing"),
    "empty list": ("models.json", lambda x: x.write_text("[]"), "models.json lists no model"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_reason_is_shown(browser, copy, fault):
    file, damage, reason = FAULTS[fault]
    damage(copy / file)
    with served(copy) as address:
        browser.get(address)
        wait_for(browser, lambda _: state(browser) != "loading")
        shown = browser.find_element("id", "failure")
        assert state(browser) == "failed"
        assert shown.is_displayed()
        assert shown.get_attribute("role") == "alert"
        assert reason in shown.text


def test_a_damaged_sibling_leaves_the_other_usable(browser, copy):
    flip(copy / "models/text-softmax/plain.onnx")
    with served(copy) as address:
        opened(browser, address)
        browser.find_element("css selector", "input[value='verse']").click()
        wait_for(browser, lambda _: state(browser) == "failed")
        assert "text-softmax/plain.onnx" in browser.find_element("id", "failure").text
        assert len(browser.find_elements("css selector", ".model")) == 1
        browser.find_element("id", "run").click()
        wait_for(browser, lambda _: browser.execute_script("return window.unrolled.runs['text-linear']"))


def test_what_failed_is_tried_again_when_it_is_chosen_again(browser, copy):
    graph = copy / "models/text-softmax/plain.onnx"
    content = graph.read_bytes()
    graph.unlink()
    with served(copy) as address:
        opened(browser, address)
        browser.find_element("css selector", f"input[value='{TEXT}']").click()
        wait_for(browser, lambda _: state(browser) == "failed")
        graph.write_bytes(content)
        for group in (IMAGE, TEXT):
            browser.find_element("css selector", f"input[value='{group}']").click()
            wait_for(browser, lambda _: state(browser) == "ready")
        assert len(browser.find_elements("css selector", ".model")) == 2


def test_the_page_stays_with_its_group_if_another_cannot_be_loaded(browser, copy):
    graphs = {path: path.read_bytes() for path in copy.glob("models/text-*/plain.onnx")}
    for path in graphs:
        path.unlink()
    with served(copy) as address:
        opened(browser, address)
        other = browser.find_element("css selector", f"input[value='{TEXT}']")
        other.click()
        wait_for(browser, lambda _: state(browser) == "failed")
        assert "plain.onnx is missing" in browser.find_element("id", "failure").text
        assert browser.find_element("css selector", "#groups :checked").get_attribute("value") == IMAGE
        assert set(run(browser)) == {"image-linear"}
        for path, content in graphs.items():
            path.write_bytes(content)
        other.click()
        wait_for(browser, lambda _: state(browser) == "ready")
        assert len(browser.find_elements("css selector", ".model")) == 2


def test_another_group_can_be_chosen_if_the_first_cannot_be_loaded(browser, copy):
    for path in (copy / GRAPH, *copy.glob("models/text-*/plain.onnx")):
        path.unlink()
    with served(copy) as address:
        browser.get(address)
        wait_for(browser, lambda _: state(browser) == "failed")
        for group, end in ((TEXT, "failed"), (IDS, "ready")):
            browser.find_element("css selector", f"label:has(input[value='{group}'])").click()
            wait_for(browser, lambda _, end=end: state(browser) == end)
        assert not browser.find_element("id", "failure").is_displayed()


def test_what_was_loaded_needs_no_server(browser, site):
    def choose(group):
        browser.find_element("css selector", f"input[value='{group}']").click()
        wait_for(browser, lambda _: state(browser) != "loading")
        assert state(browser) == "ready"

    with served(site) as address:
        opened(browser, address)
        browser.execute_script(
            "const bar = document.getElementById('progress'); window.seen = [];"
            "new MutationObserver(() => seen.push(bar.value)).observe(bar, { attributes: true })"
        )
        choose(TEXT)
        assert browser.execute_script("return Math.max(...seen)") == 1  # the runtime was there
    choose(IMAGE)


def test_a_page_that_was_exported_again_is_seen(browser, copy, monkeypatch):
    monkeypatch.setattr(_page._Quiet, "end_headers", SimpleHTTPRequestHandler.end_headers)  # no Cache-Control
    os.utime(copy / "models.json", (0, 0))  # so old that a browser does not ask for it again
    entries = json.loads((copy / "models.json").read_text())
    with served(copy) as address:
        opened(browser, address)
        (copy / "models.json").write_text(json.dumps([{**entries[0], "title": "New"}, *entries[1:]]))
        opened(browser, address)
        assert browser.find_element("css selector", ".model h2").text == "New"


def test_a_page_without_its_script_says_what_it_needs(browser, copy):
    (copy / "sampling.js").unlink()
    with served(copy) as address:
        browser.get(address)
        hint = browser.find_element("css selector", "#loading .hint")
        wait_for(browser, lambda _: hint.is_displayed())
        assert "web server" in hint.text


def test_a_browser_without_webassembly_gets_a_message(browser, address):
    without = browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "delete globalThis.WebAssembly"}
    )
    try:
        browser.get(address)
        wait_for(browser, lambda _: state(browser) == "failed")
        assert "no WebAssembly" in browser.find_element("id", "failure").text
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", without)
