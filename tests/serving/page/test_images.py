"""The upper rows of an image are drawn, and completions come in row by row."""

import pytest
from browser import wait_for
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import Select
from serving.page.stub import LEVELS, SIDE

IMAGES = "/v1/images/completions"


def labels(person):
    return [canvas.get_attribute("aria-label") for canvas in person.all("#made canvas")]


def test_eight_completions_of_what_a_pointer_has_drawn(person, stub):
    stub.pause = 0.1  # long enough to see the images incomplete on a slow machine
    person.opens("digits")
    person["clear"].click()
    ActionChains(person.browser).move_to_element_with_offset(
        person["pad"], -60, -80
    ).click_and_hold().move_by_offset(90, 20).release().perform()
    person["draw"].click()
    wait_for(person.browser, lambda _: any("75 %" in x or "88 %" in x for x in labels(person)))
    assert person["draw-label"].text == "Stop"
    person.waits()
    (body,) = stub.bodies(IMAGES)
    assert body["n"] == 8
    assert len(body["pixels"]) == 5 * SIDE
    assert max(body["pixels"]) == LEVELS - 1
    assert min(body["pixels"]) == 0
    assert labels(person) == [f"Completion {i + 1}, 100 % drawn" for i in range(8)]
    assert person["draw-status"].text == "8 of 8 images are complete, 192 pixels drawn."
    assert "min_p" not in body
    assert "max_tokens" not in body
    assert not person["max_tokens"].is_displayed()
    assert person["tokens"].text == "64"


def test_a_double_click_begins_a_run_and_does_not_stop_it(person, stub):
    stub.pause = 0.02
    person.opens("digits")
    ActionChains(person.browser).double_click(person["draw"]).perform()
    person.waits_for_text("draw-status", "8 of 8 images are complete")


@pytest.mark.parametrize("count", ["100", ""])
def test_a_number_of_images_that_cannot_be_drawn_is_refused(person, stub, count):
    person.opens("digits")
    person.sets("count", count)
    person["draw"].click()
    wait_for(person.browser, lambda _: person["failure"].is_displayed())
    assert "Completions: " in person["failure"].text
    assert stub.bodies(IMAGES) == []


def test_an_image_is_drawn_by_keyboard_alone_and_drawn_on(person, stub):
    person.opens("digits")
    person["clear"].send_keys(Keys.ENTER)
    person["pad"].send_keys(" ", Keys.SHIFT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    person["pad"].send_keys(Keys.NULL, Keys.CONTROL, Keys.ENTER)
    wait_for(person.browser, lambda _: stub.bodies(IMAGES))
    person.waits()
    first = stub.bodies(IMAGES)[0]["pixels"]
    assert first[2 * SIDE :].count(LEVELS - 1) >= 3
    button = person.all("#made button")[1]
    assert button.accessible_name == "Draw on from completion 2"
    button.send_keys(Keys.ENTER)
    assert person.browser.switch_to.active_element.get_attribute("id") == "pad"
    person.sets("rows", "7")
    person.presses("draw")
    second = stub.bodies(IMAGES)[1]["pixels"]
    assert second[: len(first)] == first
    assert len(second) == 7 * SIDE
    assert any(second[len(first) :])


def test_a_run_takes_no_focus_and_other_tabs_do_not_disturb_it(person, stub):
    person.opens("book")
    person.writes("One evening")
    Select(person["model"]).select_by_value("digits")
    stub.pause = 0.1
    person["count"].send_keys(Keys.CONTROL, Keys.ENTER)
    person.waits("running")
    size = person["bytes"].text
    person.hears_of("tree.pieces.pop()")
    assert not person["model"].is_enabled()
    assert person["bytes"].text == size
    person.waits()
    assert labels(person)[-1] == "Completion 8, 100 % drawn"
    assert person.browser.switch_to.active_element == person["count"]
    stub.pause = 0
    person.all("#made button")[0].send_keys(Keys.CONTROL, Keys.ENTER)
    wait_for(person.browser, lambda _: len(stub.bodies(IMAGES)) == 2)
    person.waits()
    assert person.browser.switch_to.active_element == person["draw"]  # that button is gone


def test_a_drawing_stays_while_another_model_is_used(person, stub):
    person.opens("digits")
    person["clear"].click()
    for model in ("book", "digits"):
        Select(person["model"]).select_by_value(model)
    person.presses("draw")
    assert not any(stub.bodies(IMAGES)[0]["pixels"])


def test_images_of_another_model_are_taken_away(person):
    person.opens("digits")
    person.presses("draw")
    for model in ("book", "digits"):
        Select(person["model"]).select_by_value(model)
    assert labels(person) == []
    assert person["no-made"].is_displayed()
    assert person["draw-status"].text == ""


def test_a_broken_stream_leaves_the_rows_that_came(person, stub):
    stub.breaks_after = 8
    person.opens("digits")
    person.presses("draw")
    assert "broke off" in person["failure-text"].text
    assert labels(person) == [f"Completion {i + 1}, 75 % drawn" for i in range(8)]
