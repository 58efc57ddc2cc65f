"""A conversation is a tree of turns; all turns of the current path are sent."""

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


def test_text_and_chat_of_a_model_have_histories_of_their_own(person):
    chatting(person)
    says(person, "Where to?")
    person.browser.execute_script("document.querySelector('input[value=text]').click()")
    assert person.rows() == []
    assert not person["message"].is_displayed()
    person.opens("book")  # which has no template for conversations
    assert not person["views"].is_displayed()
