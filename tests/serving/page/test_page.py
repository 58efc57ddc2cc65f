"""The page as a whole: it asks nobody else, breaks no policy, fits and is accessible, and says what is wrong."""

import json

import pytest
from browser import wait_for
from selenium.webdriver import Keys
from serving.page.stub import Handler

from unrolled.serving.page_files import PAGE, page_files

FORBIDDEN = [
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    " style=",
    " onclick=",
]


def test_a_key_is_asked_for_and_used(person, stub):
    stub.key = "secret"
    person.expected = ["401"]
    person.opens(until="failed")
    person["key"].send_keys("sécret–1", Keys.ENTER)
    person.waits_for_text("key-fault", "printable ASCII")  # a browser cannot send it
    person["key"].clear()
    person["key"].send_keys("wrong", Keys.ENTER)
    person.waits_for_text("key-fault", "The key is missing or wrong.")
    person["key"].send_keys("secret", Keys.ENTER)
    person.waits()
    assert not person["key-form"].is_displayed()
    person.writes("One evening")
    person.opens()  # for this tab the key is known
    assert len(person.rows()) == 1
    stored = person.browser.execute_script("return JSON.stringify(localStorage)")
    assert "secret" not in stored


def test_a_server_without_models_and_one_that_is_gone(person, stub):
    stub.models = []
    person.opens(until="failed")
    assert person["failure-text"].text == "The server has no model."
    stub.models = ["book"]
    person["try-again"].click()
    person.waits()
    person.browser.execute_script("window.fetch = () => Promise.reject(new TypeError('no network'))")
    person["text"].send_keys("One evening")
    person.presses()
    assert person["failure-text"].text == "The server does not answer."
    assert person.text() == "One evening"


def test_an_answer_of_another_server_is_named(person, monkeypatch):
    tell = Handler.tell
    monkeypatch.setattr(Handler, "tell", lambda self, value, status=200: self.answer(status, b"<html>"))
    person.opens(until="failed")
    assert person["failure-text"].text == "The answer is not that of this server."
    monkeypatch.setattr(Handler, "tell", tell)
    person.presses("try-again")


def test_what_the_model_wrote_and_the_focus_are_seen_in_forced_colours(person):
    features = [{"name": "forced-colors", "value": "active"}]
    person.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    person.opens("talker")
    person.writes("One evening")
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"

    def computed(selector, name):
        return person.browser.execute_script(style, selector, name)

    assert computed("#backing .typed", "color") == "rgba(0, 0, 0, 0)"  # the letters are not drawn twice
    assert computed("#backing .typed", "textDecorationLine") == "none"
    assert computed("#backing .written", "textDecorationLine") == "underline"
    assert computed("#backing .written", "textDecorationColor") != "rgba(0, 0, 0, 0)"
    assert (computed(".swatch", "borderTopWidth"), computed(".swatch", "borderBottomWidth")) == ("0px", "2px")
    for chosen, focus in ((".switch label", ".switch input"), ("#tree li", "#tree li")):
        assert computed(chosen, "outlineWidth") == "2px"
        person.browser.execute_script(f"document.querySelector({focus!r}).focus({{ focusVisible: true }})")
        assert computed(chosen, "outlineWidth") == "3px"


def test_the_policy_holds_and_no_request_leaves_the_host(person):
    person.opens()
    person.writes("One evening")
    person.opens("digits")
    person.presses("draw")
    asked = [json.loads(x["message"])["message"] for x in person.browser.get_log("performance")]
    urls = {x["params"]["request"]["url"] for x in asked if x["method"] == "Network.requestWillBeSent"}
    assert len(urls) > 12
    assert [url for url in urls if not url.startswith((person.address, "data:image", "blob:"))] == []
    assert [x for x in person.browser.get_log("browser") if "Policy" in x["message"]] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["wide", "phone"])
@pytest.mark.parametrize("view", ["text", "chat", "image"])
def test_it_fits_and_is_accessible(person, axe, view, size, theme, tmp_path):
    features = [
        {"name": "prefers-color-scheme", "value": theme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    person.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    person.resize(*size)
    person.opens({"text": "book", "chat": "talker", "image": "digits"}[view])
    if view == "chat":
        person.browser.execute_script("document.querySelector('input[value=chat]').click()")
    for text in ("One evening", " the sea"):
        if view == "image":
            person.presses("draw")
        else:
            person["text" if view == "text" else "message"].send_keys(text)
            person.presses()
    if view != "image":
        person.presses("again")  # a fork
    (tmp_path / f"{view}.png").write_bytes(person.browser.get_screenshot_as_png())
    across = person.browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1] == size[0]
    person.browser.execute_script(axe)
    found = person.browser.execute_async_script("axe.run().then(arguments[0])")
    bad = [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"] if v["impact"] != "minor"]
    assert bad == []
    assert len(found["passes"]) > 20


def test_everything_is_reached_by_the_tab_key_in_the_order_of_the_page(person):
    person.opens("talker")
    person.writes("One evening")
    seen = []
    person.browser.execute_script("document.getElementById('model').focus()")
    for _ in range(20):
        element = person.browser.switch_to.active_element
        seen.append(
            element.get_attribute("id") or element.get_attribute("role") or element.get_attribute("name")
        )
        element.send_keys(Keys.TAB)
    expected = "model view text go again back fresh treeitem download open remove"
    assert " ".join(seen[:11]) == expected
    assert "max_tokens" in seen


def test_the_status_is_said_once_and_not_for_each_token(person, stub):
    stub.pause = 0.005
    person.opens()
    person.browser.execute_script(
        "window.said = []; const status = document.getElementById('status');"
        "new MutationObserver(() => said.push(status.textContent)).observe(status, { childList: true, characterData: true, subtree: true })"
    )
    person.writes("One evening")
    wait_for(person.browser, lambda _: person["status"].text.startswith("64"))
    assert person.browser.execute_script("return said") == ["Writing.", "64 tokens written."]
    live = {x.get_attribute("id") for x in person.all("[aria-live], [role=status], [role=alert], [role=log]")}
    assert live == {"status", "draw-status", "pad-said", "kept", "failure", "lost", "key-fault"}


def test_files_hold_no_markup_from_elsewhere_and_no_inline_code():
    files = page_files()
    assert {"index.html", "page.js", "style.css", "icon.svg", "pad.js", "pictures.js"} <= set(files)
    assert set(files) >= {path.name for path in PAGE.iterdir()}
    for name, path in files.items():
        content = path.read_text(encoding="utf-8")
        assert [way for way in FORBIDDEN if way in content] == [], name


def test_an_error_is_seen_from_where_the_button_is_on_a_phone(person, stub):
    person.resize(360, 740)
    person.opens()
    person.sets("text", "One evening")
    person.browser.execute_script("document.getElementById('history').scrollIntoView()")
    stub.error_after = 0
    person.browser.execute_script("document.getElementById('go').click()")
    person.waits_for_text("failure", "The server is stopping.")
    place = "return document.getElementById('failure').getBoundingClientRect().toJSON()"
    box = person.browser.execute_script(place)
    assert 0 <= box["top"] < box["bottom"] <= 740
