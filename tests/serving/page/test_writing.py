"""Text streams in, forks, and is still there after a reload; nothing that the server has kept is read twice."""

import json
import re

import pytest
from browser import state, wait_for
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import Select
from serving.page.stub import Handler

TEXT = "/v1/completions"


def test_tokens_are_shown_while_they_come(person, stub):
    stub.pause = 0.1
    person.opens()
    person["text"].send_keys("One evening", Keys.CONTROL, Keys.ENTER)
    person.waits("running")
    wait_for(person.browser, lambda _: len(person.text()) > len("One evening") + 10)
    early = person.text()
    assert person["text"].get_property("readOnly")
    assert person["status"].text == "Writing."
    assert person["tokens"].text.startswith("≈")
    person.waits()
    assert person.text().startswith(early)
    assert len(person.text()) > len(early)
    assert person["status"].text == "64 tokens written."
    assert person["tokens"].text == "66"
    assert person["bytes"].text == "135 kB"
    assert person["bytes-note"].text == "constant: never grows"
    assert "ms" in person["first"].text
    assert 4 < float(person["rate"].text) < 40  # two tokens every 100 ms, at the most


def test_a_continuation_sends_the_state_and_only_the_new_text(person, stub):
    person.opens()
    before = person.writes("One evening")
    after = person.writes(", then")
    first, second = stub.bodies(TEXT)
    assert first["prompt"] == "One evening"
    assert "state" not in first
    assert second["prompt"] == ", then"
    assert stub.states[second["state"]][1] == before
    assert after.startswith(f"{before}, then ")
    read = len(before.split()) + 1
    assert person["cached"].text == f"{read - 1} of {read}"
    person["text"].send_keys(Keys.ESCAPE)
    person.presses()
    assert stub.bodies(TEXT)[2]["prompt"] == ""
    assert len(person.rows()) == 3


def test_both_branches_of_a_fork_go_on(person, stub):
    person.opens()
    root = person.writes("One evening")
    left = person.writes(" the sea")
    person.presses("back")
    assert person.text() == root
    assert person["go-label"].text == "Fork here"
    right = person.writes(" the hill")
    assert person["go-label"].text == "Continue"
    assert [row.get_attribute("aria-level") for row in person.rows()] == ["1", "2", "2"]
    texts = {0: root, 1: left, 2: right}
    for i in (1, 2):
        person.rows()[i].click()
        assert person.text() == texts[i]
    right = person.writes(" again")  # the second branch goes on
    person.rows()[1].click()
    left = person.writes(" again")  # and so does the first
    for body, parent in zip(stub.bodies(TEXT)[3:], (texts[2], texts[1]), strict=True):
        assert body["prompt"] == " again"
        assert stub.states[body["state"]][1] == parent
    assert left.startswith(texts[1] + " again")
    assert right.startswith(texts[2] + " again")
    words = [row.find_element("css selector", ".words").text for row in person.rows()]
    assert [" ".join(word.split()[:2]) for word in words[1:4:2]] == ["the sea", "the hill"]
    assert all(word.startswith("again ") for word in words[2::2])
    assert [row.get_attribute("class") for row in person.rows()] == ["path", "path", "path", "", ""]


def test_a_change_further_up_forks_there(person, stub):
    person.opens()
    root = person.writes("One evening")
    whole = person.writes(" the sea")
    person.sets("text", whole[:-1])  # less by one letter: the last piece is not whole
    assert "branch after “One evening" in person["hint"].text
    changed = root + " nobody"
    person.sets("text", changed)
    assert person["go-label"].text == "Fork here"
    assert "branch after “One evening" in person["hint"].text
    person.presses()
    body = stub.bodies(TEXT)[-1]
    assert body["prompt"] == " nobody"
    assert stub.states[body["state"]][1] == root
    person.rows()[1].click()
    assert person.text() == whole  # what was there is not lost
    person.sets("text", "Another day")
    assert "new text" in person["hint"].text
    person.presses()
    assert "state" not in stub.bodies(TEXT)[-1]
    assert [row.get_attribute("aria-level") for row in person.rows()] == ["1", "2", "2", "1"]


def test_write_it_again_makes_a_sibling_from_the_same_beginning(person, stub):
    person.opens()
    person.writes("One evening")
    person.writes(" the sea")
    person.presses("again")
    *_, second, third = stub.bodies(TEXT)
    assert second == third
    assert [row.get_attribute("aria-level") for row in person.rows()] == ["1", "2", "2"]
    words = [row.find_element("css selector", ".words").text for row in person.rows()[1:]]
    assert all(word.startswith("… ") for word in words)  # they begin alike: shown is what the model wrote


def test_what_is_typed_outlives_a_piece_that_is_written_again(person, stub):
    person.opens()
    first = person.writes("One evening")
    for stub.error_after in (None, 0):
        person["text"].send_keys(" my words")
        before = person.text()
        person.presses("again")
        assert person.text().endswith(" my words")
        assert (person.text() == before) == (stub.error_after == 0)
        person.sets("text", person.text().removesuffix(" my words"))
    assert person.text() != first
    person.sets("text", "No" + person.text())
    changed, sent = person.text(), len(stub.requests)
    person.presses("again")  # the new piece could not be shown with this text
    assert "changed further up" in person["failure-text"].text
    assert (person.text(), len(stub.requests)) == (changed, sent)
    person.rows()[-1].click()  # as the message says
    assert not person.text().startswith("No")
    person.presses("again")
    assert len(stub.requests) == sent + 1


def test_a_new_text_is_empty_when_it_is_chosen_again(person, stub):
    person.opens()
    person.writes("One evening")
    person.presses("fresh")
    person["text"].send_keys("Two")
    person.presses("fresh")
    assert person.text() == ""


def test_the_text_after_a_piece_outlives_the_removal_of_what_follows_the_piece(person, stub):
    person.opens()
    first = person.writes("One evening")
    person.writes(" the sea")
    person.presses("back")
    person["text"].send_keys(" mine")
    person.rows()[1].click()
    person["remove"].click()
    person.browser.switch_to.alert.accept()
    wait_for(person.browser, lambda _: person.text() == first + " mine")


def test_a_reload_keeps_the_tree_and_the_place_in_it(person, stub):
    person.opens()
    person.writes("One evening")
    person.writes(" the sea")
    person.presses("back")
    person.writes(" the hill")
    person.rows()[1].click()
    kept = person.text()
    person.opens()
    assert person.text() == kept
    assert [row.get_attribute("aria-selected") for row in person.rows()] == ["false", "true", "false"]
    person.writes(" and")
    assert stub.states[stub.bodies(TEXT)[-1]["state"]][1] == kept
    person.opens("softmax")  # another model has a history of its own
    assert person.rows() == []
    assert "8.19 kB more per token" in person["bytes-note"].text


def test_a_tree_of_another_tab_appears_in_this_one(person):
    person.opens()
    person.writes("One evening")
    first, other = person.browser.current_window_handle, None
    try:
        person.browser.switch_to.new_window("tab")
        other = person.browser.current_window_handle
        person.opens()
        person.writes(" the sea")
        person.browser.switch_to.window(first)
        wait_for(person.browser, lambda _: len(person.rows()) == 2)
        person["text"].send_keys(" and then")
        typed = person.text()
        person.browser.switch_to.window(other)
        person.writes(" the tide")
        person.browser.switch_to.window(first)
        wait_for(person.browser, lambda _: len(person.rows()) == 3)
        assert person.text() == typed  # what is typed here stays
        assert person.writes(" the hill").startswith(f"{typed} the hill")
        assert [row.get_attribute("aria-level") for row in person.rows()] == ["1", "2", "2", "2"]
    finally:
        person.browser.switch_to.window(other or first)
        if other:
            person.browser.close()
        person.browser.switch_to.window(first)


def test_a_piece_that_another_tab_removes_stays_as_typed_text(person):
    person.opens()
    root = person.writes("One evening")
    person.writes(" the sea")
    person["text"].send_keys(" my words")
    text = person.text()
    person.hears_of("tree.pieces.pop(); tree.current = null")
    assert person.text() == text
    assert [row.get_attribute("aria-selected") for row in person.rows()] == ["true"]
    assert f"reads {len(text) - len(root)} characters" in person["hint"].text


def test_a_stopped_text_is_kept_and_read_again_by_the_next_piece(person, stub):
    stub.pause = 0.02
    person.opens()
    root = person.writes("One evening")
    person.sets("max_tokens", "600")
    person["text"].send_keys(" the sea")
    person["go"].click()
    wait_for(person.browser, lambda _: len(person.text()) > len(root) + 20)
    person["settings"].find_element("css selector", "summary").send_keys(Keys.ESCAPE)  # wherever the focus is
    person.waits()
    stopped = person.text()
    assert person["status"].text.startswith("Stopped.")
    assert "the next piece reads this one again" in person["status"].text
    assert person.rows()[1].find_element("css selector", ".mark").text == "stopped"
    person.writes(" then")
    body = stub.bodies(TEXT)[-1]
    assert stub.states[body["state"]][1] == root
    assert root + body["prompt"] == stopped + " then"
    person.opens()
    assert len(person.rows()) == 3


def test_what_has_come_when_the_page_is_left_is_kept(person, stub):
    stub.pause = 0.02
    person.opens()
    person.sets("max_tokens", "600")  # six seconds
    person["text"].send_keys("One evening")
    person["go"].click()
    wait_for(person.browser, lambda _: len(person.text()) > 30)
    person.opens()
    assert len(person.rows()) == 1
    assert len(person.text()) > 30
    assert "kept no state here" in person["hint"].text
    assert person.rows()[0].find_element("css selector", ".mark").text == "stopped"


def test_what_has_come_is_kept_too_if_the_browser_keeps_the_page(person, stub):
    stub.pause = 0.02
    person.opens()
    person.sets("max_tokens", "100")
    person["text"].send_keys("One evening")
    person["go"].click()
    wait_for(person.browser, lambda _: len(person.text()) > 30)
    person.browser.execute_script("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    stored = (
        "return JSON.parse(Object.entries(localStorage).find(([key]) => /:.*:/.test(key))[1]).pieces"
        ".map((piece) => [piece.finish, piece.typed + piece.written])"
    )
    [[finish, early]] = person.browser.execute_script(stored)
    assert (finish, len(early) > 30) == ("stopped", True)
    person.waits()  # the page was shown again
    assert person.browser.execute_script(stored) == [["length", person.text()]]
    assert person.text().startswith(early)
    assert len(person.rows()) == 1


def test_a_history_that_cannot_be_stored_lasts_until_the_page_is_closed(person):
    person.opens()
    person.browser.execute_script("Storage.prototype.setItem = () => { throw new Error('full'); }")
    text = person.writes("One evening")
    assert "lost when the page is closed" in person["kept"].text
    for model in ("softmax", "book"):
        Select(person["model"]).select_by_value(model)
        assert len(person.rows()) == (model == "book")
    assert person.text() == text


def test_what_is_typed_after_a_piece_is_there_when_the_piece_is_chosen_again(person):
    person.opens()
    root = person.writes("One evening")
    whole = person.writes(" the sea")
    person["text"].send_keys(" my words")
    person.presses("back")
    assert person.text() == root
    person.presses("fresh")
    assert person.text() == ""
    person["text"].send_keys("Another day")
    for model in ("softmax", "book"):
        Select(person["model"]).select_by_value(model)
    assert person.text() == "Another day"
    person.rows()[1].click()
    assert person.text() == whole + " my words"
    person.presses()
    person.rows()[1].click()
    assert person.text() == whole  # what was typed is in the piece that follows now
    person.presses("fresh")
    assert person.text() == "Another day"


def test_a_double_click_begins_a_run_and_does_not_stop_it(person, stub):
    stub.pause = 0.02
    person.opens()
    person["text"].send_keys("One evening")
    ActionChains(person.browser).double_click(person["go"]).perform()
    person.waits_for_text("status", "64 tokens written.")


def test_a_piece_without_a_whole_character_is_kept(person, stub, monkeypatch):
    person.opens()
    text = person.writes("One evening")
    emit = Handler.emit
    monkeypatch.setattr(
        Handler,
        "emit",
        lambda self, x: emit(self, json.loads(re.sub('"text": "[^"]*"', '"text": ""', json.dumps(x)))),
    )
    person.sets("max_tokens", "1")
    person.presses()
    assert (len(person.rows()), person.text()) == (2, text)
    person.presses()
    assert stub.states[stub.bodies(TEXT)[-1]["state"]][1].startswith(text + " ")


def test_buttons_keep_the_focus_while_they_have_nothing_to_do(person, stub):
    person.opens()
    person.writes("One evening")
    person["again"].send_keys(Keys.ENTER)
    person.waits()
    wait_for(person.browser, lambda _: len(person.rows()) == 2)
    assert person.browser.switch_to.active_element == person["again"]
    person["back"].send_keys(Keys.ENTER)
    assert person["back"].get_attribute("aria-disabled") == "true"
    sent = len(stub.requests)
    person["again"].send_keys(Keys.ENTER)  # there is no piece to write again
    assert person.text() == ""
    assert len(stub.requests) == sent
    assert not person["failure"].is_displayed()


@pytest.mark.parametrize(
    ("fault", "reason"), [("breaks_after", "broke off"), ("error_after", "The server is stopping.")]
)
def test_a_broken_stream_leaves_what_came(person, stub, fault, reason):
    person.opens()
    setattr(stub, fault, 5)
    person["text"].send_keys("One evening")
    person.presses()
    assert reason in person["failure"].text
    assert person["failure"].get_attribute("role") == "alert"
    assert len(person.text().split()) == 2 + 10
    assert person.rows()[0].find_element("css selector", ".mark").text == "broke off"
    setattr(stub, fault, None)
    person.presses()
    assert not person["failure"].is_displayed()
    assert len(stub.bodies(TEXT)[-1]["prompt"].split()) == 12


def goes_on_from_a_forgotten_state(person, stub):
    """Ask to continue after " then", from a state that the server has forgotten."""
    stub.states.clear()
    person.expected = ["404"]
    person["text"].send_keys(" then")
    person["go"].click()
    wait_for(person.browser, lambda _: person["lost"].is_displayed())
    person.waits()


def test_a_state_that_the_server_has_forgotten_is_read_again_on_request(person, stub):
    person.opens()
    person.writes("One evening")
    text = person.writes(" the sea")
    goes_on_from_a_forgotten_state(person, stub)
    assert "no longer has the state" in person["lost-text"].text
    assert person.text() == text + " then"
    assert person.rows()[1].find_element("css selector", ".mark").text == "state gone"
    person.opens()  # and this is remembered
    assert person["lost"].is_displayed()
    person.presses("reread")
    body = stub.bodies(TEXT)[-1]
    assert (body["prompt"], body["max_tokens"], body["keep"]) == (text, 0, True)
    assert not person["lost"].is_displayed()
    assert person["status"].text == f"Read {len(text.split())} tokens again."
    person.writes(" then")
    assert stub.states[stub.bodies(TEXT)[-1]["state"]][1] == text
    assert len(person.rows()) == 3


def test_what_a_forgotten_state_held_up_goes_on_after_it(person, stub):
    person.opens()
    text = person.writes("One evening")
    goes_on_from_a_forgotten_state(person, stub)
    person["reread"].click()
    wait_for(person.browser, lambda _: state(person.browser) == "ready" and len(person.rows()) == 2)
    assert person.text().startswith(text + " then ")


def test_text_that_was_changed_meanwhile_is_not_sent(person, stub):
    person.opens()
    text = person.writes("One evening")
    goes_on_from_a_forgotten_state(person, stub)
    person["text"].send_keys(" came a storm")
    person.presses("reread")
    assert person.text() == text + " then came a storm"
    assert stub.bodies(TEXT)[-1]["prompt"] == text
    assert person["status"].text.startswith("Read ")


def test_a_request_that_fails_keeps_what_was_typed(person, stub):
    person.opens()
    text = person.writes("One evening")
    stub.key = "secret"
    person.expected = ["401"]
    person["text"].send_keys(" the sea")
    person.presses()
    assert person.text() == text + " the sea"
    assert len(person.rows()) == 1
    assert person["key-form"].is_displayed()
    assert person.browser.switch_to.active_element.get_attribute("id") == "key"
    person["key"].send_keys("secret", Keys.ENTER)
    wait_for(person.browser, lambda _: len(person.rows()) == 2)
    assert person.text().startswith(text + " the sea ")


def test_a_branch_can_be_removed(person):
    person.opens()
    root = person.writes("One evening")
    person.writes(" the sea")
    person.writes(" again")
    person.rows()[1].click()
    person["remove"].click()
    person.browser.switch_to.alert.dismiss()
    assert len(person.rows()) == 3
    person["remove"].click()
    person.browser.switch_to.alert.accept()
    assert len(person.rows()) == 1
    assert person.text() == root
    assert person["status"].text == "Removed 2 pieces."


def test_a_setting_out_of_range_is_named_and_nothing_is_sent(person, stub):
    person.opens()
    person["text"].send_keys("One evening")
    person.sets("top_p", "3")
    person.presses()
    assert person["failure-text"].text.startswith("Top p: ")
    assert stub.bodies(TEXT) == []
    for name, value in (("top_p", "0.9"), ("seed", "7"), ("temperature", "0"), ("max_tokens", "6")):
        person.sets(name, value)
    person.presses("try-again")
    body = stub.bodies(TEXT)[0]
    assert {name: body.get(name) for name in ("top_p", "seed", "temperature", "max_tokens", "top_k")} == {
        "top_p": 0.9, "seed": 7, "temperature": 0, "max_tokens": 6, "top_k": None,
    }  # fmt: skip
    person.opens()  # the settings are remembered
    assert person["seed"].get_property("value") == "7"


def test_line_ends_of_other_systems_are_recognised(person, stub, monkeypatch):
    monkeypatch.setattr("serving.page.stub.WORDS", ["sea\r\n", "king\r"])
    person.opens()
    person.writes("One")
    assert "goes on from its state" in person["hint"].text
    backing = person["backing"].get_property("textContent")
    assert backing == person.text() + "\u200b"
    person.presses()
    assert stub.bodies(TEXT)[-1]["prompt"] == ""
    split = person.browser.execute_async_script(
        "const done = arguments[0];"
        "import(new URL('page/tree.js', location)).then(({ Tree }) => {"
        "  const tree = new Tree(); const { id } = tree.add({ parent: null, written: 'sea\\r' });"
        "  tree.add({ parent: id, written: '\\nking' });"
        "  done(['sea\\nking!', 'sea\\nX', 'sea'].map((text) => tree.split(text)).map(({ base, typed }) => [base?.written, typed])); })"
    )
    assert split == [["\nking", "!"], ["sea\r", "X"], [None, "sea"]]


def test_the_stored_tree_is_bounded(person):
    """The oldest ends go first, and never what is on the current path."""
    person.opens()
    made = person.browser.execute_async_script(
        "const done = arguments[0];"
        "import(new URL('page/tree.js', location)).then(({ Tree }) => {"
        "  const tree = new Tree(); const root = tree.add({ parent: null, written: 'root' });"
        "  for (let i = 0; i < 20; i++) tree.add({ parent: root.id, written: String(i).padStart(1000, '.') });"
        "  const none = tree.save(10).json; const { json, dropped } = tree.save(9000);"
        "  const again = Tree.of(json);"
        "  done([json, dropped, again.text(), Tree.of('{').pieces.size, Tree.of(json).current === tree.current, none, tree.pieces.size]); })"
    )
    json_text, dropped, text, of_nothing, same, none, size = made
    assert len(json_text) <= 9000
    assert text == "root" + "19".rjust(1000, ".")
    kept = [piece["written"].strip(".") for piece in json.loads(json_text)["pieces"]]
    assert kept == ["root", *(str(i) for i in range(dropped, 20))]
    assert of_nothing == 0
    assert same
    assert (none, size) == (None, 21)  # what is not stored is still shown


def test_line_ends_of_other_systems_are_no_change_of_the_text(person, stub, monkeypatch):
    monkeypatch.setattr("serving.page.stub.WORDS", ["sea\r\n"])
    person.opens()
    text = person.writes("One")
    person.sets("text", text[:-1])
    person.presses("again")
    assert not person["failure"].is_displayed()
    assert len(person.rows()) == 2


def test_what_is_typed_outlives_a_reload(person):
    person.opens("book")
    text = person.writes("One evening")
    person["text"].send_keys(" my words")
    person.opens()
    assert person.text() == text + " my words"
    person.presses("fresh")
    person.opens()
    assert person.text() == ""


def test_a_long_word_does_not_make_the_text_wider_than_its_box(person):
    person.resize(360, 740)
    person.opens()
    person.sets("text", "https://" + "x" * 100)
    widths = "const box = document.getElementById('editor'); return [box.scrollWidth, box.clientWidth]"
    across, room = person.browser.execute_script(widths)
    assert across == room


def test_characters_of_two_units_are_counted_and_cut_as_one(person):
    person.opens()
    said = "return JSON.stringify(document.querySelector(arguments[0]).textContent)"  # a half is escaped
    person.sets("text", "😀")
    person.sets("text", "x" * 59 + "😀😀")
    person.presses()
    assert person.browser.execute_script(said, ".words") == '"' + "x" * 59 + '😀…"'
    person.sets("text", person.text() + "😀")
    assert "It reads 1 character first." in person.browser.execute_script(said, "#hint")


def test_text_from_right_to_left_begins_at_the_right(person):
    person.opens()
    person.sets("text", "שלום\nOne")
    first = "const { firstChild } = document.getElementById('backing'); const range = document.createRange();"
    ends = "range.setStart(firstChild.firstChild, arguments[0]); range.setEnd(firstChild.firstChild, arguments[1]);"
    place = f"{first} {ends} return range.getBoundingClientRect().left"
    hebrew, latin = (person.browser.execute_script(place, *ends) for ends in ((0, 4), (5, 8)))
    assert hebrew > latin + 200
