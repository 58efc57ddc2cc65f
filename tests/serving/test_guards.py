"""Who may ask, how often, and what is told of it: keys, rates, hosts, the page, logs and metrics."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from serving.clients import client, error, post
from serving.fakes import FakeEngine, FakeRun, pixel_model, served
from starlette.testclient import TestClient

from unrolled.serving.guards import Bodies
from unrolled.serving.jobs import Event, Job, TimedOutError
from unrolled.serving.logs import Logged, Record
from unrolled.serving.metrics import Metrics
from unrolled.serving.protocol.errors import ApiError
from unrolled.serving.settings import Settings, read_keys
from unrolled.serving.streams import EventStream


def test_keys_are_wanted_but_for_the_page_and_health() -> None:
    http = client(keys=("first", "second"))
    for headers in (
        {},
        {"Authorization": "Bearer third"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer"},
    ):
        for address in ("/v1/models", "/metrics", "/openapi.json", "/tokenizer_info", "/nothing"):
            answer = http.get(address, headers=headers)
            assert error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for address in ("/health", "/ready"):
        assert http.get(address).status_code == 200
    for address in ("/", "/page/page.js"):
        assert http.get(address).status_code == 200
    for key in ("first", "second"):
        assert http.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
    assert http.get("/v1/models", headers={"Authorization": b"Bearer \xff\xfe"}).status_code == 401


def test_the_engine_takes_turns_between_keys() -> None:
    engine = FakeEngine()
    http = client(served(engine), keys=("first", "second"))
    for key in ("second", "first"):
        http.headers["Authorization"] = f"Bearer {key}"
        post(http, prompt="a")
    assert [job.client for job in engine.jobs] == ["key 1", "key 0"]
    assert [job.owner for job in engine.jobs] == ["key 1", "key 0"]


def test_a_rate_is_kept_for_each_key() -> None:
    http = client(keys=("a", "b"), rate="2/minute")
    first, second = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    assert [http.get("/v1/models", headers=first).status_code for _ in range(3)] == [200, 200, 429]
    answer = http.get("/v1/models", headers=first)
    refused = error(answer, 429)
    assert (refused["code"], refused["message"]) == (
        "rate_limit_exceeded",
        "more than 2 requests in 60 seconds",
    )
    assert 1 <= int(answer.headers["retry-after"]) <= 61
    assert http.get("/v1/models", headers=second).status_code == 200
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("[localhost", 400),
    ],
)
def test_pages_of_other_names_cannot_ask_on_loopback(host: str, status: int) -> None:
    answer = client().get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 400:
        assert error(answer, 400)["param"] == "Host"


def test_pages_of_other_origins_cannot_ask_unless_named() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client().options("/v1/completions", headers=asked).headers
    http = client(origin="https://a.example", keys=("key",))
    allowed = http.options("/v1/completions", headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
    other = http.options("/v1/completions", headers={**asked, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_the_page_of_a_named_origin_may_do_all_and_read_all_answers() -> None:
    http = client(origin="https://a.example", keys=("key",))
    for method in ("GET", "POST", "PUT", "DELETE"):
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": method}
        assert http.options(f"/v1/states/{'0' * 64}", headers=asked).status_code == 200
    refused = http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    exposed = refused.headers["access-control-expose-headers"].split(", ")
    assert {"etag", "retry-after", "x-request-id"} <= set(exposed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "0.0.0.0"}, "host is 0.0.0.0, which other machines can reach, so keys are required"),
        ({"rate": "often"}, "rate is 'often', but must be one such as '600/minute'"),
        ({"rate": "600/minute;10/second"}, "rate is '600/minute;10/second', but must be one such as"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**fields)  # type: ignore[arg-type]
    assert Settings(host="0.0.0.0", keys=("a",))


@pytest.mark.parametrize("origin", ["https://a.example/", "https://a.example/page", "a.example", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"but must be such as 'https://example\.org', without a path"):
        Settings(origin=origin)


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n \t\n  two \n")
    assert read_keys(path) == ("one", "two")
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(path)
    for content in ("é\n".encode(), "a key in another encoding".encode("utf-16")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="keys holds a key that is not made of printable ASCII"):
            read_keys(path)


@pytest.mark.parametrize("address", ["/", "/page/index.html"])
def test_the_page_tells_nobody_where_it_is_and_is_what_it_says(address: str) -> None:
    headers = client().get(address).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")


def test_each_request_has_a_line_and_an_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    http = client()
    state = post(http, prompt="ab", keep=True)["state"]
    answer = http.post(
        "/v1/completions", json={"model": "book", "state": state}, headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    made = http.get("/v1/models/none?secret=1", headers={"x-request-id": "a b"})
    assert len(made.headers["x-request-id"]) == 32
    http.get("/nowhere")
    lines = [json.loads(x.message) for x in caplog.records if x.name == "unrolled.serving.requests"]
    told = [(x["id"][:6], x["route"], x["status"], x["read"], x["cached"], x["drawn"]) for x in lines[1:3]]
    expected = [
        ("mine-1", "/v1/completions", 200, 18, 18, 16),
        (made.headers["x-request-id"][:6], "/v1/models/{id}", 404, 0, 0, 0),
    ]
    assert told == expected
    assert lines[3]["route"] == "none"
    assert lines[0].keys() >= {"time", "client", "method", "seconds"}


def test_the_log_tells_the_address_of_a_client_whatever_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client(keys=("secret",)).get("/v1/models", headers={"Authorization": "Bearer secret"})
    [line] = [json.loads(x.message) for x in caplog.records if x.name == "unrolled.serving.requests"]
    assert line["client"] == "testclient"


def test_a_stream_that_is_cut_is_told_in_the_log_and_in_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    http = client(served(FakeEngine(fails=TimedOutError())))
    body = {"model": "book", "prompt": "a", "stream": True}
    assert "deadline_exceeded" in http.post("/v1/completions", json=body).text
    [line] = [json.loads(x.message) for x in caplog.records if x.name == "unrolled.serving.requests"]
    assert (line["status"], line["cut"]) == (200, "deadline_exceeded")
    assert 'unrolled_cut_streams_total{reason="deadline_exceeded"} 1.0' in http.get("/metrics").text


@pytest.mark.parametrize(("sent", "cut"), [(2, "client_closed"), (4, None)])
def test_a_stream_is_cut_unless_all_of_it_was_sent(sent: int, cut: str | None) -> None:
    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"number": 2}
        finally:
            closed.append(True)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def send(message: Any) -> None:
        messages.append(message)
        if len(messages) > sent:  # the start, two chunks, [DONE] and the end
            raise OSError("the connection was closed")

    async def answer() -> bool:
        await EventStream({"number": 1}, chunks())(scope, receive, send)
        return bool(closed)

    messages, closed, record = list[Any](), list[bool](), Record("id", "client")
    scope = {"type": "http", "headers": [], "state": {"record": record}}
    assert asyncio.run(answer()), "the jobs are given up"
    assert record.cut == cut


def test_no_second_answer_follows_one_that_has_begun() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        messages.append(message)

    messages = list[Any]()
    metrics = Metrics(lambda: 0, lambda: 0, {})
    scope = {"type": "http", "method": "GET", "headers": []}
    with pytest.raises(ZeroDivisionError):  # the server closes the connection
        asyncio.run(Logged(app, metrics)(scope, send, send))  # type: ignore[arg-type]
    assert [message["status"] for message in messages] == [200]


def test_metrics_count_what_was_done() -> None:
    http = client()
    state = post(http, prompt="ab", keep=True, n=1)["state"]
    post(http, prompt="c", state=state, n=2, max_tokens=8)
    http.get("/v1/models/none")
    text = http.get("/metrics").text
    for line in (
        'unrolled_requests_total{route="/v1/completions",status="200"} 2.0',
        'unrolled_requests_total{route="/v1/models/{id}",status="404"} 1.0',
        'unrolled_tokens_total{kind="read"} 3.0',
        'unrolled_tokens_total{kind="cached"} 18.0',
        'unrolled_tokens_total{kind="drawn"} 32.0',
        "unrolled_waiting 0.0",
        "unrolled_rows 0.0",
        'unrolled_state_bytes{of="kept"} 4.0',
        "unrolled_first_token_seconds_count 2.0",
    ):
        assert line in text.splitlines()
    assert "unrolled_block_seconds_count 6.0" in text


def test_metrics_are_of_all_models_at_this_moment() -> None:
    first, second = FakeEngine(), FakeEngine(16)
    http = client(served(first), pixel_model(second))
    first.waiting, second.waiting = 3, 1
    first.submit(Job([1], 1, keys=[0, 1]))
    second.submit(Job([1], 1, keys=[0, 1, 2]))
    first.prefix_bytes, second.prefix_bytes = 30, 12
    lines = http.get("/metrics").text.splitlines()
    assert "unrolled_waiting 4.0" in lines
    assert "unrolled_rows 5.0" in lines
    assert 'unrolled_state_bytes{of="running"} 5000.0' in lines
    assert 'unrolled_state_bytes{of="prefixes"} 42.0' in lines


def test_times_in_metrics_and_in_the_log_are_seconds_that_have_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    http, pause, blocks = client(served(FakeEngine(pause=0.005, block=1))), 0.005, 10
    began = time.monotonic()
    post(http, prompt="a", max_tokens=blocks)
    passed = time.monotonic() - began
    [line] = [json.loads(x.message) for x in caplog.records if x.name == "unrolled.serving.requests"]
    told = dict(x.split() for x in http.get("/metrics").text.splitlines() if "_seconds_sum " in x)
    first, between = (float(told[f"unrolled_{name}_seconds_sum"]) for name in ("first_token", "block"))
    assert first >= pause
    assert between >= (blocks - 1) * pause
    assert first + between <= line["seconds"] + 1e-4 <= passed + 2e-4


def test_a_prompt_that_was_not_read_does_not_count() -> None:
    class Late(FakeEngine):
        def submit(self, job: Job) -> FakeRun:
            run = super().submit(job)
            run.events = never  # type: ignore[method-assign]
            return run

    async def never() -> AsyncIterator[Event]:
        raise TimedOutError("it waited")
        yield

    http = client(served(Late()))
    assert http.post("/v1/completions", json={"model": "book", "prompt": "abc"}).status_code == 504
    assert 'unrolled_tokens_total{kind="read"} 0.0' in http.get("/metrics").text.splitlines()


Received = Callable[[], Awaitable[dict[str, Any]]]


async def ask(
    http: TestClient, method: str, path: str, receive: Received, sent: list[dict[str, Any]]
) -> None:
    """Ask without a connection; what a server would send is added to `sent`."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    scope |= {"method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await http.app(scope, receive, send)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "path"), [("PUT", f"/v1/states/{'0' * 64}"), ("POST", "/v1/completions")])
def test_a_client_that_leaves_while_it_sends_is_no_failure(method: str, path: str) -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    sent: list[dict[str, Any]] = []
    asyncio.run(ask(client(), method, path, receive, sent))
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(("stream", "status"), [(False, 499), (True, 200)])
def test_a_client_that_leaves_while_it_is_answered_frees_its_rows(stream: bool, status: int) -> None:
    engine = FakeEngine(pause=0.001)
    http = client(served(engine))
    body = json.dumps({"model": "book", "prompt": "a", "stream": stream, "max_tokens": 100_000}).encode()
    messages, sent = [{"type": "http.request", "body": body, "more_body": False}], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while not engine.runs or (stream and len(sent) < 2):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def leave() -> int:
        await asyncio.wait_for(ask(http, "POST", "/v1/completions", receive, sent), 5)
        return len(engine.runs)

    assert asyncio.run(leave()) == 0
    assert sent[0]["status"] == status
    cut = 'unrolled_cut_streams_total{reason="client_closed"} 1.0' in http.get("/metrics").text
    assert cut == stream


def test_a_name_may_have_a_slash() -> None:
    http = client(served(name="org/book"))
    assert http.get("/v1/models/org/book").json()["id"] == "org/book"
    assert http.get("/v1/models/org%2Fbook").json()["id"] == "org/book"
    assert 'route="/v1/models/{id}"' in http.get("/metrics").text


def test_models_are_described() -> None:
    http = client(served(), pixel_model(n_positions=12))
    found = http.get("/v1/models").json()
    assert (found["object"], [x["id"] for x in found["data"]]) == ("list", ["book", "digits"])
    book = http.get("/v1/models/book").json()
    assert book == found["data"][0]
    assert (book["object"], book["created"], book["owned_by"]) == ("model", 1_700_000_000, "unrolled")
    assert book["unrolled"] == {
        "digest": "ab" * 32,
        "kind": "text",
        "shape": None,
        "levels": None,
        "state_bytes": 1_000,
        "state_bytes_per_token": 10,
        "max_model_len": None,
        "chat": False,
        "mechanisms": ["linear"],
        "parameters": 10,
        "weights": "fp32",
    }
    digits = found["data"][1]["unrolled"]
    assert [digits[x] for x in ("kind", "shape", "levels", "max_model_len")] == ["image", [3, 4], 16, 12]
    with pytest.raises(ValueError, match="models have the names"):
        client(served(), served())


def test_tokens() -> None:
    http = client()
    body = {"model": "book", "prompt": "aé", "add_special_tokens": False, "return_token_strs": True}
    found = http.post("/tokenize", json=body).json()
    strings = ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert found == {"count": 3, "max_model_len": None, "tokens": [97, 195, 169], "token_strs": strings}
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "aé"}
    assert error(http.post("/detokenize", json={"tokens": [256]}), 400)["param"] == "tokens"
    assert http.get("/tokenizer_info").json()["vocab_size"] == 256
    assert error(http.get("/tokenizer_info?model=x"), 404)["code"] == "model_not_found"


def test_a_server_that_stops_is_not_ready() -> None:
    http = client()
    assert http.get("/ready").json() == {"status": "ready"}
    assert [http.head(path).status_code for path in ("/health", "/ready")] == [200, 200]
    http.app.state.service.ready = False  # type: ignore[attr-defined]
    assert error(http.get("/ready"), 503)["code"] == "stopping"
    assert http.get("/health").json() == {"status": "ok"}


def test_a_server_whose_engine_failed_is_not_healthy() -> None:
    engine = FakeEngine()
    http = client(served(engine))
    engine.alive = False
    assert "book does not run" in error(http.get("/health"), 503)["message"]


def test_openapi_names_the_models() -> None:
    http = client(served(), pixel_model())
    for _ in range(2):
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["CompletionRequest"]["properties"]["model"]["enum"] == ["book", "digits"]
        assert schemas["TokenizeRequest"]["properties"]["model"]["enum"] == ["book", "digits", None]


def test_requests_are_traced_where_opentelemetry_is_set_up() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    api.set_tracer_provider(provider)
    client().get("/v1/models/book", headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    [span] = exporter.get_finished_spans()
    assert span.name == "GET /v1/models/{id}"
    assert f"{span.context.trace_id:x}" == "a" * 32


@pytest.mark.parametrize(("size", "in_time"), [(10, False), (2 * 2**20, True)])
def test_a_body_may_take_a_second_longer_for_each_mebibyte(size: int, in_time: bool) -> None:
    parts = iter([b"x" * size, b"x"])

    async def receive() -> dict[str, Any]:
        part = next(parts)
        if len(part) == 1:
            await asyncio.sleep(0.5)
        return {"type": "http.request", "body": part, "more_body": len(part) > 1}

    async def send(message: Any) -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    settings = Settings(body_seconds=0.2)
    call = Bodies(app, settings)({"type": "http", "path": "/", "headers": []}, receive, send)
    if in_time:
        asyncio.run(call)
    else:
        with pytest.raises(ApiError) as raised:
            asyncio.run(call)
        assert raised.value.status_code == 408


def test_only_the_folder_of_the_page_is_open() -> None:
    http = client(keys=("first",))
    for address in ("/v1/models/page/fake", "/v1/models/a/page/", "/health/", "/page"):
        assert error(http.get(address), 401)["code"] == "invalid_api_key"
