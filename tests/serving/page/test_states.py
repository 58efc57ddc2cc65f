"""States go to files and come back from them."""

import hashlib

from browser import wait_for
from selenium.webdriver import ActionChains
from serving.page.stub import MODELS, Handler, state_file, tokens


def opens_state(person, stub, path):
    """Open a state of the model "book" from a file, which is written to `path`."""
    digest = MODELS["book"]["digest"]
    path.write_bytes(state_file(stub.keep(digest, "One"), digest, "One"))
    person["file"].send_keys(str(path))
    person.waits_for_text("status", "is open")
    return path


def goes_on_without_it(person, stub, text):
    """Type something and let the model go on, after the server has lost the state."""
    stub.states.clear()
    person.expected = ["404"]
    person["text"].send_keys(text)
    person.presses()


def test_a_state_is_downloaded_and_opened_elsewhere(person, stub):
    person.opens()
    text = person.writes("One evening")
    person.presses("download")
    name = f"book-{len(tokens(text))}-tokens.safetensors"
    path = person.browser.downloads / name
    wait_for(person.browser, lambda _: path.exists())
    (key,) = stub.states
    assert path.read_bytes() == state_file(key, *stub.states[key])

    stub.states.clear()
    person.browser.execute_script("localStorage.clear()")
    person.opens()
    person["file"].send_keys(str(path))
    person.waits_for_text("status", f"{name} is open: a state of {len(tokens(text))} tokens.")
    assert ("PUT", f"/v1/states/{key}", {}) in stub.requests
    assert "whose text is unknown" in person["beginning"].text
    assert person.text() == ""
    written = person.writes(" the sea")
    assert written.startswith(" the sea ")
    assert stub.bodies("/v1/completions")[-1]["state"] == key
    assert person["cached"].text.startswith(f"{len(tokens(text))} of ")

    stub.states.clear()  # what came after the file can be read again once the file is open again
    person.expected = ["404"]
    person["go"].click()
    wait_for(person.browser, lambda _: person["lost"].is_displayed())
    person["reread"].click()
    wait_for(person.browser, lambda _: person["failure"].is_displayed())
    person.presses("back")
    assert "Open the file again" in person["lost-text"].text
    assert not person["reread"].is_displayed()
    person["file"].send_keys(str(path))
    person.waits_for_text("status", "is open")
    assert len(person.rows()) == 2  # the one that was known
    person.rows()[1].click()
    person.presses("reread")
    assert not person["lost"].is_displayed()
    body = stub.bodies("/v1/completions")[-1]
    assert (body["state"], body["prompt"]) == (key, written)


def test_a_double_click_downloads_a_state_once(person):
    person.opens()
    person.writes("One evening")
    person.browser.execute_script(
        "const { fetch } = window; window.asked = 0;"
        "window.fetch = (...given) => (window.asked += String(given[0]).includes('v1/states/'), fetch(...given));"
    )
    ActionChains(person.browser).double_click(person["download"]).perform()
    person.waits_for_text("status", "The state is saved as a file.")
    assert person.browser.execute_script("return window.asked") == 1


def test_files_that_are_no_state_of_the_model_are_refused(person, stub, tmp_path):
    person.opens()
    key = hashlib.sha256(b"x").hexdigest()
    foreign = state_file(key, MODELS["softmax"]["digest"], "One")
    contents = {
        "is not a state": b"hello, world, this is a text",
        "is not a state: it": b"",
        "of another model than book": foreign,
        "is not that of this id": state_file(key, MODELS["book"]["digest"], "One"),
    }
    person.expected = ["400"]
    for i, (reason, content) in enumerate(contents.items()):
        path = tmp_path / f"{i}.safetensors"
        path.write_bytes(content)
        person["file"].send_keys(str(path))
        person.waits_for_text("failure-text", reason)
    assert person.rows() == []


def test_an_upload_can_be_stopped_and_tried_again(person, stub, tmp_path):
    person.opens()
    digest = MODELS["book"]["digest"]
    path = tmp_path / "one.safetensors"
    path.write_bytes(state_file(stub.keep(digest, "One"), digest, "One"))
    person.browser.execute_script(
        "window.real = fetch;"
        "window.fetch = (path, { signal }) => new Promise((_, refuse) => signal.addEventListener('abort', () => refuse(signal.reason)))"
    )
    person["file"].send_keys(str(path))
    person.waits("running")
    assert not person["model"].is_enabled()  # the state is one of this model
    person.presses()
    assert person["status"].text == "Stopped."
    person.browser.execute_script("window.fetch = () => Promise.reject(new TypeError('no network'))")
    person["file"].send_keys(str(path))
    person.waits_for_text("failure-text", "does not answer")
    assert person["status"].text == ""
    person.browser.execute_script("window.fetch = window.real")
    person["try-again"].click()
    person.waits_for_text("status", "is open")
    assert len(person.rows()) == 1


def test_a_download_that_breaks_off_says_so(person, monkeypatch):
    person.opens()
    person.writes("One evening")
    person.expected = ["ERR_CONTENT_LENGTH_MISMATCH"]

    def cut(self, status, content=b"", kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) + 1))
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    monkeypatch.setattr(Handler, "answer", cut)
    person["download"].click()
    person.waits_for_text("failure-text", "The connection broke off.")


def test_a_long_name_of_a_file_fits_a_phone(person, stub, tmp_path):
    person.resize(360, 740)
    person.opens()
    path = opens_state(person, stub, tmp_path / f"{'book_of_the_sea_' * 8}.safetensors")
    goes_on_without_it(person, stub, " the sea")
    assert path.name in person["lost-text"].text
    across = person.browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert across == [360, 360]


def test_what_was_typed_stays_when_the_file_is_opened_again(person, stub, tmp_path):
    person.opens()
    path = opens_state(person, stub, tmp_path / "one.safetensors")
    goes_on_without_it(person, stub, " long paragraph")
    wait_for(person.browser, lambda _: person["lost"].is_displayed())
    opens_state(person, stub, path)
    assert not person["lost"].is_displayed()
    assert person["text"].get_property("value").endswith(" long paragraph")


def test_a_download_of_a_forgotten_state_says_so(person, stub):
    person.opens()
    text = person.writes("One evening")
    stub.states.clear()
    person.expected = ["404"]
    person["text"].send_keys(" then")
    person["download"].click()
    wait_for(person.browser, lambda _: person["lost"].is_displayed())
    assert person.text() == text + " then"
