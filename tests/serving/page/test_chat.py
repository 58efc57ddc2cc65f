"""A conversation is a tree of turns; all turns of the current path are sent."""

from browser import wait_for
from serving.page.stub import MODELS, state_file

CHAT = "/v1/chat/completions"


def chatting(person):
    person.opens("talker")
    person.browser.execute_script("document.querySelector('input[value=chat]').click()")


def says(person, text):
    person["message"].send_keys(text)
    person.presses()


def turns(person):
    return [
        (turn.get_attribute("class"), turn.find_element("css selector", "p").text)
        for turn in person.all("#turns li")
    ]


def test_turns_fork_and_survive_a_reload(person, stub):
    chatting(person)
    says(person, "Where to?")
    says(person, "And in winter?")
    (_, asked), (role, answer), *_ = turns(person)
    assert (asked, role) == ("Where to?", "assistant")
    first, second = stub.bodies(CHAT)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"].strip() == answer
    assert "state" not in second
    assert "prompt" not in first
    person.presses("back")
    assert person["go-label"].text == "Fork here"
    assert len(turns(person)) == 2
    says(person, "And in summer?")
    assert [message["content"] for message in stub.bodies(CHAT)[2]["messages"][::2]] == [
        "Where to?",
        "And in summer?",
    ]
    before = turns(person)
    person.opens()  # the model and the view are remembered
    assert turns(person) == before
    assert len(person.rows()) == 3
    assert person["message"].is_displayed()
    assert not person["text"].is_displayed()


def test_a_message_that_was_not_answered_stays_in_the_field(person, stub):
    chatting(person)
    person.presses()
    assert person["failure-text"].text == "Type a message first."
    stub.error_after = 0
    says(person, "Where to?")
    assert person["message"].get_property("value") == "Where to?"
    assert turns(person) == []
    stub.error_after = None
    person.presses("try-again")
    assert len(turns(person)) == 2


def test_an_answer_that_reaches_the_limit_is_said_to_be_cut_off(person):
    chatting(person)
    says(person, "Where to?")
    assert person["status"].text.startswith("The answer was cut off at the limit of new tokens. ")


def test_a_draft_outlives_an_answer_that_is_written_again(person, stub):
    chatting(person)
    says(person, "Where to?")
    person["message"].send_keys("And in winter?")
    for stub.error_after in (None, 0):
        person.presses("again")
        assert person["message"].get_property("value") == "And in winter?"
        assert [text for role, text in turns(person) if role == "user"] == ["Where to?"]
    assert len(person.rows()) == 2


def test_a_new_conversation_is_not_moved_into_that_of_another_tab(person, stub):
    chatting(person)
    says(person, "Where to?")
    person.presses("fresh")
    person["message"].send_keys("Who are you?")
    person.hears_of("tree.current = tree.pieces[0].id")
    assert turns(person) == []
    person.presses()
    assert [message["content"] for message in stub.bodies(CHAT)[-1]["messages"]] == ["Who are you?"]


def test_a_conversation_goes_on_from_the_state_of_a_file(person, stub, tmp_path):
    chatting(person)
    digest, text = MODELS["talker"]["digest"], "You are a king. "
    key = stub.keep(digest, text)
    path = tmp_path / "king.safetensors"
    path.write_bytes(state_file(key, digest, text))
    person["file"].send_keys(str(path))
    person.waits_for_text("status", "is open")
    assert "king.safetensors: 4 tokens" in person["beginning"].text
    assert turns(person) == []
    says(person, "Where to?")
    says(person, "And then?")
    assert [role for role, _ in turns(person)] == ["user", "assistant"] * 2
    for body, count in zip(stub.bodies(CHAT), (1, 3), strict=True):
        assert (body["state"], len(body["messages"])) == (key, count)
    stub.states.clear()
    person.expected = ["404"]
    says(person, "Why?")
    wait_for(person.browser, lambda _: person["lost"].is_displayed())
    assert "Open the file again" in person["lost-text"].text
    said = turns(person)
    stub.keep(digest, text)
    person["file"].send_keys(str(path))
    person.waits_for_text("status", "is open")
    assert turns(person) == said
    assert person["message"].get_property("value") == "Why?"


def test_text_and_chat_of_a_model_have_histories_of_their_own(person):
    chatting(person)
    says(person, "Where to?")
    person.browser.execute_script("document.querySelector('input[value=text]').click()")
    assert person.rows() == []
    assert not person["message"].is_displayed()
    person.opens("book")  # which has no template for conversations
    assert not person["views"].is_displayed()


def test_a_message_outlives_a_reload(person):
    person.opens("talker")
    person.browser.find_element("css selector", "input[value=chat]").click()
    person["message"].send_keys("my words")
    person.opens()
    assert person["message"].get_property("value") == "my words"
