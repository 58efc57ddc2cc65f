"""The history by keyboard and for a screen reader."""

import pytest
from selenium.webdriver import Keys


@pytest.fixture
def forked(person):
    """A beginning; two branches after it, of which the first has a second piece; and another text."""
    person.opens()
    person.sets("max_tokens", "2")
    root = person.writes("One evening")
    person.writes(" alpha")
    person.writes(" beta")
    person.sets("text", root)
    person.writes(" gamma")
    person.presses("fresh")
    person.writes("Delta")
    return person


def active(person):
    return person.browser.switch_to.active_element


def words(element):
    return element.find_element("css selector", ".words").text.split()[0]


def test_roles_and_places(forked):
    tree = forked["tree"]
    assert tree.get_attribute("role") == "tree"
    assert tree.accessible_name == "History"
    places = [
        [row.get_attribute(f"aria-{x}") for x in ("level", "posinset", "setsize", "expanded", "selected")]
        for row in forked.rows()
    ]
    assert places == [
        ["1", "1", "2", "true", "false"],
        ["2", "1", "3", None, "false"],
        ["2", "2", "3", None, "false"],
        ["2", "3", "3", None, "false"],
        ["1", "2", "2", None, "true"],
    ]
    assert [words(row) for row in forked.rows()] == ["One", "alpha", "beta", "gamma", "Delta"]
    name = forked.rows()[3].accessible_name
    assert name.startswith("Branch 2 of 2: gamma")
    assert name.endswith("3 tokens")
    assert forked.rows()[4].accessible_name.endswith("on the current path")
    assert [row.get_attribute("tabindex") for row in forked.rows()] == ["-1", "-1", "-1", "-1", "0"]


def test_keys_move_fold_and_choose(forked):
    forked.browser.execute_script("arguments[0].focus()", forked.rows()[4])
    seen = []
    down, up, left, right = Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_RIGHT
    for key in (Keys.HOME, right, down, down, left, Keys.END, up, "b", right):
        active(forked).send_keys(key)
        seen.append(words(active(forked)))
    assert seen == ["One", "alpha", "beta", "gamma", "One", "Delta", "gamma", "beta", "beta"]
    assert [row.get_attribute("tabindex") for row in forked.rows()] == ["-1", "-1", "0", "-1", "-1"]
    assert "Delta" in forked.text()  # moving alone changes nothing
    active(forked).send_keys(Keys.ENTER)
    assert forked.text().startswith("One evening")
    assert " beta" in forked.text()
    assert words(active(forked)) == "beta"  # the focus stays where it was
    assert forked["status"].text.startswith("Going on from here, after ")
    active(forked).send_keys(Keys.ARROW_LEFT)
    active(forked).send_keys(Keys.ARROW_LEFT)
    assert [words(row) for row in forked.rows()] == ["One", "Delta"]
    assert forked.rows()[0].get_attribute("aria-expanded") == "false"
    active(forked).send_keys(Keys.ARROW_RIGHT)
    assert len(forked.rows()) == 5


def test_a_long_text_does_not_march_to_the_right(person):
    person.opens()
    person.sets("max_tokens", "2")
    person.writes("One")
    for _ in range(4):
        person.presses()
    assert {row.get_attribute("aria-level") for row in person.rows()} == {"1"}
