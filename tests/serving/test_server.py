"""The server as a process: slow clients, clients that go away, signals."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serving.clients import events
from serving.fakes import FakeEngine, FakeStates, served

from unrolled.serving.server import connections, serve
from unrolled.serving.settings import Settings

SCRIPT = Path(__file__).parent / "run_fake.py"
BODY = {"model": "book", "prompt": "a", "temperature": 0}


def started(pause: float, patience: float = 10, drain: float = 10) -> tuple[subprocess.Popen[str], str]:
    """Start a server that waits so long for headers and bodies."""
    command = [sys.executable, str(SCRIPT), *map(str, (pause, patience, patience, drain))]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:"), process.communicate(timeout=10)
    return process, address


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server."""
    process, address = started(pause=0.05, patience=0.6)
    with ending(process):
        yield address


def raw(address: str, content: bytes, drip: bytes = b"") -> tuple[float, bytes]:
    """Send bytes, then one a time; return what came back and when the connection was closed."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=0.2) as connection:
        connection.sendall(content)
        found = b""
        while time.monotonic() < began + 5:
            try:
                if not (new := connection.recv(10_000)):
                    return time.monotonic() - began, found
                found += new
                continue
            except TimeoutError:
                pass
            except ConnectionError:
                return time.monotonic() - began, found
            if drip:
                connection.sendall(drip)
    raise AssertionError(f"the connection stayed open after {found!r}")


@pytest.mark.slow
def test_slow_headers_and_bodies_are_closed(address: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    for content, drip in [(b"", b""), (head, b""), (head + b"x: ", b"a")]:
        took, found = raw(address, content, drip)
        assert 0.3 < took < 3
        assert found == b""
    head += b"content-type: application/json\r\n"
    for body in (b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"):
        took, found = raw(address, head + body)
        assert 0.3 < took < 3
        assert found.startswith(b"HTTP/1.1 408")
        assert b'"slow_body"' in found


@pytest.mark.slow
@pytest.mark.parametrize("size", [5_000_000, 19_000_000])
def test_a_client_that_sends_too_much_gets_an_answer(address: str, size: int) -> None:
    """Clients such as this one look for the answer once they have sent everything."""
    for declared in (True, False):
        connection = HTTPConnection(address.removeprefix("http://"))
        body: Any = bytes(size) if declared else iter([bytes(2**16)] * (size // 2**16))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().status == 413
        connection.close()


@pytest.mark.slow
def test_a_client_that_goes_away_frees_its_rows(address: str) -> None:
    with httpx.Client(base_url=address) as http:
        for stream in (True, False):
            try:
                with httpx.stream(
                    "POST",
                    f"{address}/v1/completions",
                    json={**BODY, "max_tokens": 10_000, "stream": stream},
                    timeout=0.5,
                ) as answer:
                    for _ in answer.iter_lines():
                        break
            except httpx.ReadTimeout:
                assert not stream
            until(lambda: "unrolled_rows 0.0" in http.get("/metrics").text, 0.5)


@pytest.mark.slow
def test_sigterm_ends_what_runs_whole_or_with_an_error() -> None:
    process, address = started(pause=0.05, drain=2)
    found: list[tuple[bool, int, httpx.Response]] = []

    def ask(stream: bool, count: int) -> None:
        body = {**BODY, "max_tokens": count, "stream": stream}
        found.append((stream, count, httpx.post(f"{address}/v1/completions", json=body, timeout=20)))

    asked = [(stream, count) for stream in (True, False) for count in (20, 10_000)]
    threads = [threading.Thread(target=ask, args=each) for each in asked]
    with ending(process):
        for thread in threads:
            thread.start()
        until(lambda: "unrolled_rows 4.0" in httpx.get(f"{address}/metrics").text)
        process.send_signal(signal.SIGTERM)
        until(lambda: refused(address))
        for thread in threads:
            thread.join()
        out, log = process.communicate(timeout=10)
    assert (process.returncode, out.strip()) == (0, "closed"), log
    assert len(found) == 4
    for stream, count, answer in found:
        if not stream:
            assert answer.status_code == (200 if count == 20 else 503)
        elif count == 20:
            *_, last, done = events(answer.text)
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        else:
            assert events(answer.text)[-1]["error"]["code"] == "stopping"


@pytest.mark.slow
def test_a_second_signal_ends_the_process() -> None:
    process, address = started(pause=0.05)
    body = {**BODY, "max_tokens": 10_000, "stream": True}
    with ending(process), httpx.stream("POST", f"{address}/v1/completions", json=body):
        process.send_signal(signal.SIGTERM)
        until(lambda: refused(address))
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 128 + signal.SIGINT


def test_more_connections_are_accepted_than_requests_can_wait() -> None:
    assert connections([served(FakeEngine(most=100))]) == 4096
    assert connections([served(FakeEngine(most=3000)), served(FakeEngine(most=3000))]) > 6000


def test_an_address_that_is_taken(address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
        serve([served()], FakeStates(), Settings(port=port))  # type: ignore[arg-type]


def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def refused(address: str) -> bool:
    try:
        httpx.get(f"{address}/health")
    except httpx.ConnectError:
        return True
    return False
