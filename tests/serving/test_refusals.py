"""Wrong requests: OpenAI's error object with the right status, never a 500."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from serving.clients import client, error, events, post
from serving.fakes import FakeEngine, FakeStates, pixel_model, served

from unrolled.serving.jobs import EngineError, StoppingError, TimedOutError, TooLargeError
from unrolled.serving.protocol.completions import CompletionRequest

COMPLETIONS, CHAT, IMAGES = "/v1/completions", "/v1/chat/completions", "/v1/images/completions"
HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def talking(engine: Any = None, **changes: Any) -> Any:
    model = served(engine, **changes)
    model.text.chat_template = TEMPLATE
    return model


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": None}, "model", "model: input should be a valid string"),
        ({"prompts": "a"}, "prompts", "prompts is not a known field"),
        ({"prompt": 5}, "prompt", "prompt must be a text, a list of texts, token ids, or lists of token ids"),
        (
            {"prompt": ["a", 1]},
            "prompt",
            "prompt must be a text, a list of texts, token ids, or lists of token ids",
        ),
        (
            {"prompt": [True]},
            "prompt",
            "prompt must be a text, a list of texts, token ids, or lists of token ids",
        ),
        ({"prompt": [97, 256]}, "prompt", "prompt holds the id 256, but must hold ids of 0 to 255"),
        ({"prompt": [[97], [-1]]}, "prompt", "prompt holds the id -1, but must hold ids of 0 to 255"),
        (
            {"prompt": [10**5000 // 10**4900]},
            "prompt",
            "prompt holds too large a number, but must hold ids of 0 to 255",
        ),
        (
            {"prompt": ""},
            "prompt",
            "prompt is empty, but the model has no start symbol and there is no state",
        ),
        ({"prompt": ["a"] * 129}, "prompt", "prompt holds 129, but at most 128 are taken at once"),
        ({"prompt": ["a"] * 128, "n": 17}, "n", "n asks for 2176 continuations, but at most 2048 are made"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens: input should be greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens: input should be a valid integer"),
        ({"max_tokens": True}, "max_tokens", "max_tokens: input should be a valid integer"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "max_tokens and max_completion_tokens differ: give one of them",
        ),
        ({"temperature": "1"}, "temperature", "temperature: input should be a valid number"),
        ({"temperature": -1}, "temperature", "temperature: input should be greater than or equal to 0"),
        (
            {"repetition_penalty": 1e-320},
            "repetition_penalty",
            "repetition_penalty: input should be greater than or equal to 0.000001",
        ),
        ({"top_p": 0}, "top_p", "top_p: input should be greater than 0"),
        ({"top_k": -2}, "top_k", "top_k: input should be greater than or equal to -1"),
        ({"n": 129}, "n", "n: input should be less than or equal to 128"),
        ({"seed": 2**63}, "seed", "seed: input should be less than 9223372036854775808"),
        ({"stop": ""}, "stop", "stop must be a text of 1 to 1,000 characters, or a list of up to 16"),
        (
            {"stop": ["a"] * 17},
            "stop",
            "stop must be a text of 1 to 1,000 characters, or a list of up to 16",
        ),
        ({"logprobs": 21}, "logprobs", "logprobs: input should be less than or equal to 20"),
        ({"stream_options": {}}, "stream_options", "stream_options is given, but requires stream"),
        (
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "stream_options.x is not a known field",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "include_obfuscation is not supported, and must be left out or False",
        ),
        (
            {"frequency_penalty": 0.5},
            "frequency_penalty",
            "frequency_penalty is not supported, and must be left out or 0",
        ),
        (
            {"presence_penalty": -1},
            "presence_penalty",
            "presence_penalty is not supported, and must be left out or 0",
        ),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported, and must be left out or {}"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is not supported, and must be left out or n, 2"),
        ({"suffix": "a"}, "suffix", "suffix is not supported, and must be left out or ''"),
        ({"state": "x"}, "state", "state: string should match pattern '^[0-9a-f]{64}$'"),
    ],
)
def test_completions(body: dict[str, Any], param: str, message: str) -> None:
    answer = client().post(COMPLETIONS, json={"model": "book", "prompt": "a", **body})
    found = error(answer, 400)
    assert found["message"].startswith(message)
    assert (found["param"], found["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "messages is empty, but only a state can be continued without any"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages.0.role",
            "messages.0.role: input should be 'system', 'developer', 'user' or 'assistant'",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "messages.0.content must be a text, or a list of parts of the type text",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
            "messages.0.tool_calls",
            "tool_calls is not supported, and must be left out or []",
        ),
        ({"tools": [{}]}, "tools", "tools is not supported, and must be left out or []"),
        (
            {"tool_choice": "required"},
            "tool_choice",
            "tool_choice is not supported, and must be left out, 'none' or 'auto'",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "response_format.type",
            "response_format.type: input should be 'text'",
        ),
        (
            {"modalities": ["audio"]},
            "modalities",
            "modalities is not supported, and must be left out or ['text']",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is given, but requires logprobs"),
        ({"logprobs": 1}, "logprobs", "logprobs: input should be a valid boolean"),
        ({"prompt": "a"}, "prompt", "prompt is not a known field"),
    ],
)
def test_chat(body: dict[str, Any], param: str, message: str) -> None:
    answer = client(talking()).post(CHAT, json={"model": "book", "messages": HELLO, **body})
    found = error(answer, 400)
    assert found["message"].startswith(message)
    assert found["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"pixels": [16]}, "pixels", "pixels holds the id 16, but must hold ids of 0 to 15"),
        (
            {"pixels": [0] * 12},
            "pixels",
            "pixels and state have 12 levels, but an image of 3 x 4 is whole with 12",
        ),
        ({"rows": 0}, "rows", "rows: input should be greater than or equal to 1"),
        ({"prompt": "a"}, "prompt", "prompt is not a known field"),
        (
            {"response_format": "b64_png", "stream": True},
            "response_format",
            "response_format is b64_png, but a stream has pixels",
        ),
        (
            {"response_format": "b64_png", "state": "0" * 64},
            "response_format",
            "response_format is b64_png, but of a state only the new pixels are known",
        ),
        ({"model": "book"}, "model", "the model book writes text: ask /v1/completions"),
    ],
)
def test_images(body: dict[str, Any], param: str, message: str) -> None:
    found = error(client(pixel_model(), served()).post(IMAGES, json={"model": "digits", **body}), 400)
    assert found["message"].startswith(message)
    assert found["param"] == param


def test_models_that_cannot_do_it() -> None:
    http = client(served(), pixel_model())
    assert (
        error(http.post(CHAT, json={"model": "book", "messages": HELLO}), 400)["code"] == "no_chat_template"
    )
    assert error(http.post(CHAT, json={"model": "digits", "messages": HELLO}), 400)["param"] == "model"
    assert error(http.post(COMPLETIONS, json={"model": "digits", "prompt": [1]}), 400)["param"] == "model"
    assert error(http.post("/tokenize", json={"model": "digits", "prompt": "1"}), 400)["param"] == "model"
    assert error(http.post(COMPLETIONS, json={"model": "x"}), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{", "application/json", "the body is not JSON"),
        (b"", "application/json", "the body must be a JSON object, sent with content-type application/json"),
        (
            b"[]",
            "application/json",
            "the body must be a JSON object, sent with content-type application/json",
        ),
        (b"{}", "text/plain", "the body must be a JSON object, sent with content-type application/json"),
        (b"\xff\xfe{}", "application/json", "the body is not JSON"),
        (b"\x80", "application/json", "POST /v1/completions: There was an error parsing the body"),
        (b"[" * 100_000, "application/json", "POST /v1/completions: There was an error parsing the body"),
        (b"1" * 10_000, "application/json", "POST /v1/completions: There was an error parsing the body"),
        (
            b'{"model":"book","prompt":"a","temperature":NaN}',
            "application/json",
            "temperature: input should be a finite number",
        ),
        (b'{"model":"book","prompt":"\\ud800"}', "application/json", "prompt: 'utf-8' codec can't encode"),
        (b'{"model":"book","\\ud800":1}', "application/json", "the body must be a JSON object"),
    ],
)
def test_bodies_that_are_no_requests(content: bytes, kind: str, message: str) -> None:
    answer = client().post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert error(answer, 400)["message"].startswith(message)


def test_a_prompt_that_is_one_text_is_described_as_such() -> None:
    http = client()
    found = error(http.post("/tokenize", json={}), 400)
    assert (found["message"], found["code"]) == ("prompt is missing", "missing_field")
    found = error(http.post("/tokenize", json={"prompt": ["a"]}), 400)
    assert (found["message"], found["param"]) == ("prompt: input should be a valid string", "prompt")


def test_more_log_probabilities_of_prompts_than_memory_holds() -> None:
    engine = FakeEngine()
    http, body = client(served(engine)), {"model": "book", "echo": True, "max_tokens": 0}
    asked = body | {"prompt": ["a" * 40_000, "b" * 10_000], "logprobs": 20}
    found = error(http.post(COMPLETIONS, json=asked), 400)
    assert (found["param"], found["code"]) == ("logprobs", "too_large")
    assert "1050000 log probabilities of prompts, but at most 1000000" in found["message"]
    assert not engine.jobs
    assert http.post(COMPLETIONS, json=asked | {"echo": False}).status_code == 200


def test_characters_outside_the_vocabulary() -> None:
    from unrolled.data import Vocabulary
    from unrolled.serving.text import VocabularyText

    http = client(served(text=VocabularyText(Vocabulary("text", characters=list("abc"))), vocab_size=3))
    answer = http.post(COMPLETIONS, json={"model": "book", "prompt": "abd"})
    assert error(answer, 400)["message"].startswith("prompt: the text has 'd'")
    answer = http.post(COMPLETIONS, json={"model": "book", "prompt": "abc" * 5_000 + "d"})
    assert error(answer, 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "limit", "status"),
    [
        ("a" * 8, None, 200),
        ("a" * 8, 3, 200),
        ("a" * 8, 4, 400),
        ("a" * 10, None, 200),
        ("a" * 11, None, 400),
    ],
)
def test_learned_positions(prompt: str, limit: int | None, status: int) -> None:
    answer = client(served(n_positions=10)).post(
        COMPLETIONS, json={"model": "book", "prompt": prompt, "max_tokens": limit}
    )
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["usage"]["total_tokens"] == 11  # the last token has no position
    else:
        assert error(answer, 400)["code"] == "context_length_exceeded"


def test_learned_positions_count_those_of_a_state() -> None:
    http = client(served(n_positions=10))
    state = post(http, prompt="a" * 8, keep=True, max_tokens=2)["state"]
    answer = http.post(COMPLETIONS, json={"model": "book", "prompt": "b", "state": state})
    assert error(answer, 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("wrong", [[1.5] * 1_000, [[1.5]] * 1_000, [[1] * 999 + [1.5]]])
def test_one_wrong_item_of_a_long_list_is_reported(wrong: list[Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        CompletionRequest(model="book", prompt=wrong)
    assert raised.value.error_count() < 10
    message = "prompt must be a text, a list of texts, token ids, or lists of token ids"
    assert (
        error(client().post(COMPLETIONS, json={"model": "book", "prompt": wrong}), 400)["message"] == message
    )


def test_a_full_queue() -> None:
    http = client(served(FakeEngine(most=1)))
    answer = http.post(COMPLETIONS, json={"model": "book", "prompt": ["a", "b"]})
    assert error(answer, 429)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert post(http, prompt="a")  # the first job of the refused request was cancelled


@pytest.mark.parametrize(
    ("fails", "status", "code"),
    [
        (TimedOutError(), 504, "deadline_exceeded"),
        (StoppingError(), 503, "stopping"),
        (EngineError("no memory"), 500, "engine_error"),
    ],
)
def test_errors_of_the_engine(fails: Exception, status: int, code: str) -> None:
    engine = FakeEngine(fails=fails, block=2)
    http = client(talking(engine), pixel_model(FakeEngine(16, fails=fails)))
    for address, body in [
        (COMPLETIONS, {"model": "book", "prompt": "a"}),
        (CHAT, {"model": "book", "messages": HELLO}),
        (IMAGES, {"model": "digits"}),
    ]:
        body["temperature"] = 0  # random bytes may be no text yet
        assert error(http.post(address, json=body), status)["code"] == code
        *chunks, last = events(http.post(address, json={**body, "stream": True}).text)
        assert chunks
        assert last["error"]["code"] == code
    assert not engine.runs


def test_a_job_that_never_fits() -> None:
    class Small(FakeEngine):
        def submit(self, job: Any) -> Any:
            raise TooLargeError("8 GB of states, but there are 4")

    answer = client(served(Small())).post(COMPLETIONS, json={"model": "book", "prompt": "a"})
    assert error(answer, 400)["code"] == "too_large"


def test_a_deadline_before_the_first_chunk_is_a_status() -> None:
    http = client(served(FakeEngine(pause=0.05)), timeout=0.01)
    body = {"model": "book", "prompt": "a", "stream": True}
    assert error(http.post(COMPLETIONS, json=body), 504)["code"] == "deadline_exceeded"


def test_what_should_never_happen_is_an_error_object_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        def submit(self, job: Any) -> Any:
            raise ZeroDivisionError

    answer = client(served(Broken())).post(COMPLETIONS, json={"model": "book", "prompt": "a"})
    assert error(answer, 500)["message"] == "the server failed"
    assert "ZeroDivisionError" in caplog.text


def test_unknown_addresses_and_methods() -> None:
    http = client()
    assert error(http.get("/v1/nothing"), 404)["type"] == "invalid_request_error"
    answer = http.get(COMPLETIONS)
    assert error(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert http.post(f"/v1/states/{'0' * 64}").headers["allow"] == "GET, PUT, DELETE"
    assert http.post("/").headers["allow"] == "GET"


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("gzip", 415), ("br, GZIP", 415)])
def test_compressed_bodies(encoding: str, status: int) -> None:
    headers = {"content-encoding": encoding}
    answer = client().post(COMPLETIONS, json={"model": "book", "prompt": "a"}, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert error(answer, 415)["message"] == "content-encoding is not supported"


def test_large_bodies() -> None:
    states = FakeStates()
    http = client(body_bytes=1_000, upload_bytes=2_000, states=states)
    answer = http.post(COMPLETIONS, json={"model": "book", "prompt": "a" * 1_000})
    assert error(answer, 413)["code"] == "body_too_large"
    assert answer.headers["connection"] == "close"

    def parts() -> Any:
        for _ in range(11):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    assert error(http.post(COMPLETIONS, content=parts(), headers=headers), 413)
    assert error(http.put(f"/v1/states/{'0' * 64}", content=b"a" * 1_500), 400)["code"] == "damaged_state"
    assert error(http.put(f"/v1/states/{'0' * 64}", content=b"a" * 2_001), 413)
    assert error(http.get("/v1/none" + json.dumps("a" * 2_000)), 404)
