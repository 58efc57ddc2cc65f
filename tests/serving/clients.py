"""A client of the app in this process, and what tests read from its answers."""

import json
import re
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from serving.fakes import FakeStates, served
from starlette.testclient import TestClient

from unrolled.serving.app import make_app
from unrolled.serving.model import Served
from unrolled.serving.settings import Settings


def client(*models: Served, states: FakeStates | None = None, **settings: Any) -> TestClient:
    """A client that holds every JSON answer against the description in /openapi.json."""
    models = models or (served(),)
    app, names = make_app(models, states or FakeStates(), Settings(**settings)), tuple(x.name for x in models)
    http = TestClient(app, base_url="http://localhost")
    http.event_hooks["response"].append(lambda answer: check_described(description(names), answer))
    return http


@cache
def description(names: tuple[str, ...]) -> dict[str, Any]:
    """The content of /openapi.json, which takes a third of a second to make; only the models' names change it."""
    return make_app([served(name=name) for name in names], FakeStates(), Settings()).openapi()


def check_described(document: dict[str, Any], answer: Any) -> None:
    answer.read()
    if answer.headers.get("content-type") != "application/json" or answer.request.url.path == "/openapi.json":
        return
    for template, operations in document["paths"].items():
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template))
        told = operations.get(answer.request.method.lower())
        if told and re.fullmatch(pattern, answer.request.url.path):
            status = str(answer.status_code)
            found = told["responses"].get(status) or told["responses"][f"{status[0]}XX"]
            schema = found["content"]["application/json"]["schema"]
            Draft202012Validator(schema | {"components": document["components"]}).validate(answer.json())


def post(http: TestClient, address: str = "/v1/completions", **body: Any) -> Any:
    """The answer to a request that must succeed."""
    answer = http.post(address, json={"model": "book", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(answer: Any, status: int) -> dict[str, Any]:
    """The error object of a response."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    found: dict[str, Any] = answer.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


def events(text: str) -> list[Any]:
    """The chunks of a stream, [DONE] as a string."""
    lines = text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    found = [line.removeprefix("data: ") for line in lines]
    return [x if x == "[DONE]" else json.loads(x) for x in found]


def streamed(http: TestClient, address: str = "/v1/completions", **body: Any) -> list[Any]:
    """The chunks of a stream that must begin."""
    answer = http.post(address, json={"model": "book", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)
