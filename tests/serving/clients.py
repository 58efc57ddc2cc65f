"""A client of the app in this process, and what tests read from its answers."""

import json
from typing import Any

from serving.fakes import FakeStates, served
from starlette.testclient import TestClient

from unrolled.serving.app import make_app
from unrolled.serving.model import Served
from unrolled.serving.settings import Settings


def client(*models: Served, states: FakeStates | None = None, **settings: Any) -> TestClient:
    app = make_app(models or [served()], states or FakeStates(), Settings(**settings))
    return TestClient(app, base_url="http://localhost")


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
