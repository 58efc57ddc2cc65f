"""/v1/chat/completions: what is answered, whole and in streams."""

from typing import Any

import pytest
from serving.clients import client, error, post, streamed
from serving.fakes import FakeEngine, FakeStates, served

from unrolled.data import Vocabulary
from unrolled.serving.text import VocabularyText

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = "/v1/chat/completions"
HELLO = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


def talking(engine: FakeEngine, template: str = TEMPLATE, end: str = "", **changes: Any) -> Any:
    text = VocabularyText(Vocabulary("text"))
    text.ends = [[ord(each)] for each in end]
    text.chat_template, text.special_tokens = template, {"bos_token": "<s>"}
    return served(engine, text=text, **changes)


def test_a_conversation_is_answered() -> None:
    engine = FakeEngine(script=list(b"hello"))
    found = post(client(talking(engine)), CHAT, messages=HELLO, max_tokens=5)
    assert bytes(engine.jobs[0].tokens) == b"<s>system: Be kind.\nuser: hi\nassistant:"
    assert found.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert found["object"] == "chat.completion"
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert found["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_choice_among_no_tools_is_accepted(choice: str) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": True, "tools": []}
    answer = client(talking(FakeEngine())).post(CHAT, json={"model": "book", "messages": HELLO, **fields})
    assert answer.status_code == 200


def test_a_stream_begins_with_the_role() -> None:
    engine = FakeEngine(script=list(b"hello"), block=2)
    options = {"max_tokens": 5, "stream_options": {"include_usage": True}, "n": 2}
    *chunks, last, done = streamed(client(talking(engine)), CHAT, messages=HELLO, **options)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    assert {x["object"] for x in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        parts = [x["choices"][0] for x in chunks if x["choices"][0]["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert [x["delta"]["content"] for x in parts[1:]] == ["he", "ll", "o"]
        assert [x["finish_reason"] for x in parts] == [None, None, None, "length"]


def test_symbols_of_the_tokenizer_that_the_model_lacks_are_refused() -> None:
    engine = FakeEngine()
    answer = client(talking(engine, vocab_size=116)).post(CHAT, json={"model": "book", "messages": HELLO})
    told = "messages holds the id 121, but must hold ids of 0 to 115"  # the y of system
    assert error(answer, 400)["message"] == told
    assert not engine.jobs


@pytest.mark.parametrize(("positions", "expected"), [(None, 1024), (100, 100 - 39 + 1)])
def test_without_a_limit_it_is_what_positions_allow(positions: int | None, expected: int) -> None:
    engine = FakeEngine(block=2_000)
    post(client(talking(engine, n_positions=positions)), CHAT, messages=HELLO)
    assert len(engine.jobs[0].tokens) == 39
    assert engine.jobs[0].limit == expected


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream: bool) -> None:
    engine = FakeEngine(script=[*"hé".encode()], block=2)
    options = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    http = client(talking(engine))
    if stream:
        parts = [x["choices"][0] for x in streamed(http, CHAT, **options)[:-1]]
        content = [y for x in parts if x["logprobs"] for y in x["logprobs"]["content"]]
    else:
        [choice] = post(http, CHAT, **options)["choices"]
        assert choice["logprobs"]["refusal"] is None
        content = choice["logprobs"]["content"]
    assert [x["token"] for x in content] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert [x["bytes"] for x in content] == [[104], [0xC3], [0xA9]]
    assert content[0]["top_logprobs"] == [{"token": "h", "logprob": -0.5, "bytes": [104]}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_its_state(stream: bool) -> None:
    engine, states = FakeEngine(script=list(b"yes")), FakeStates()
    http = client(talking(engine), states=states)
    options = {"messages": HELLO, "keep": True, "max_tokens": 3}
    found = streamed(http, CHAT, **options)[-2] if stream else post(http, CHAT, **options)
    assert found["choices"][0]["finish_reason"] == "length"
    assert [found["state"]] == list(states.kept)
    message = {"role": "user", "content": "why?"}
    onward = post(http, CHAT, messages=[message], state=found["state"], max_tokens=1)
    assert bytes(engine.jobs[1].tokens) == b"\nuser: why?\nassistant:"
    assert onward["usage"]["prompt_tokens_details"]["cached_tokens"] == 39 + 3
    post(http, CHAT, messages=[], state=found["state"], max_tokens=1)
    assert engine.jobs[2].tokens == []  # the answer itself goes on


TURNS = (
    "{% if messages[0].role != 'system' %}[system]Be useful.[end]\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(("script", "end"), [("yes", "[end]"), ("yes[", "end]"), ("yes [", "end]")])
def test_what_follows_a_state_is_what_follows_the_answer_in_the_whole_conversation(
    script: str, end: str
) -> None:
    engine = FakeEngine(script=list(script.encode()))
    http = client(talking(engine, TURNS, end="["))
    told = [{"role": "user", "content": "hi"}]
    found = post(http, CHAT, messages=told, keep=True, max_tokens=len(script))
    onward = [{"role": "user", "content": "why?"}]
    post(http, CHAT, messages=onward, state=found["state"], max_tokens=1)
    assert bytes(engine.jobs[1].tokens).decode() == f"{end}\n[user]why?[end]\n[assistant]"
    answer = [{"role": "assistant", "content": script.removesuffix("[")}]
    post(http, CHAT, messages=told + answer + onward, max_tokens=1)
    read = bytes(engine.jobs[0].tokens).decode() + script + bytes(engine.jobs[1].tokens).decode()
    assert bytes(engine.jobs[2].tokens).decode() == read


@pytest.mark.parametrize("script", ["you", "ok\n"])
def test_the_last_token_of_an_answer_that_was_cut_off_is_no_end(script: str) -> None:
    engine = FakeEngine(script=list(script.encode()))
    http = client(talking(engine, end="["))
    state = post(http, CHAT, messages=HELLO, keep=True, max_tokens=len(script))["state"]
    post(http, CHAT, messages=[{"role": "user", "content": "why?"}], state=state, max_tokens=1)
    assert bytes(engine.jobs[1].tokens) == b"\nuser: why?\nassistant:"


SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", [SYSTEM_FIRST, "{{ messages[-1].content }}"])
def test_messages_that_the_template_does_not_write_after_an_answer_are_refused(template: str) -> None:
    http = client(talking(FakeEngine(), template))
    state = post(http, CHAT, messages=HELLO, keep=True, max_tokens=1)["state"]
    answer = http.post(CHAT, json={"model": "book", "messages": HELLO, "state": state})
    told = "the chat template does not write these messages after an answer: send all messages"
    assert error(answer, 400)["message"] == told


def test_a_template_that_refuses() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('no system here') }}{% endif %}"
    answer = client(talking(FakeEngine(), template)).post(CHAT, json={"model": "book", "messages": HELLO})
    assert error(answer, 400)["message"] == "the chat template refuses these messages: no system here"
