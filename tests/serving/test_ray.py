"""Two replicas by Ray Serve, in a network namespace with a loopback interface alone: `make test-ray`."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serving.processes import Server, completion, server, told

pytestmark = pytest.mark.ray

READY = 300  # seconds: Ray takes minutes on a busy machine
CLIENTS = 6


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ray")
    with server(folder / "log", "--replicas", 2, "--states", folder / "states.sqlite") as found:
        found.address(READY)
        yield found


@pytest.fixture
def http(started: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=started.address(1), timeout=60) as client:
        yield client


def replica(answer: httpx.Response) -> str:
    return answer.headers["x-replica"]


def replicas(started: Server) -> dict[str, str]:
    """The process of each listening replica: its id and its name for Ray."""
    names = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in names.stdout.splitlines()]
    children = {str(started.process.pid)}
    for _ in range(3):  # Ray's parts are children of the server, and replicas those of a part
        children |= {pid for pid, parent, _ in rows if parent in children}
    return {pid: args for pid, _, args in rows if pid in children and args.startswith("ray::ServeReplica")}


def listening() -> set[tuple[str, str]]:
    """Address and name of the process of each socket that listens."""
    found = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout
    return {(x.split()[3].rpartition(":")[0], re.findall(r'"([^"]+)"', x)[0]) for x in found.splitlines()}


def sessions(http: httpx.Client) -> list[str]:
    """Names of two sessions that different replicas answer."""
    found: dict[str, str] = {}
    for number in range(100):
        found.setdefault(replica(http.get("/health", headers={"x-session-id": str(number)})), str(number))
    assert len(found) == 2
    return list(found.values())


def stream(http: httpx.Client, session: str, stop: threading.Event) -> bool:
    """Read a stream that does not end by itself, until told to stop; return whether it lasted."""
    body = {"model": "text", "prompt": "a", "max_tokens": 10**7, "stream": True}
    headers = {"x-session-id": session}
    try:
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as running:
            assert running.status_code == 200, running.read()
            for _ in running.iter_lines():
                if stop.is_set():
                    return True
    except httpx.TransportError:
        pass
    return False


def test_a_session_goes_on_in_the_other_replica(http: httpx.Client) -> None:
    begun, turns = told(completion(http, "ROMEO:"))[1], {}
    for _ in range(200):
        answer = completion(http, "JULIET:", state=begun)
        turns[replica(answer)] = told(answer)
    assert len(turns) == 2
    assert len(set(turns.values())) == 1


def test_a_session_stays_at_its_replica(http: httpx.Client) -> None:
    for session in ("one", "two", "three"):
        headers = {"x-session-id": session}
        assert len({replica(http.get("/health", headers=headers)) for _ in range(20)}) == 1


def test_the_answers_have_one_request_id(http: httpx.Client) -> None:
    answer = http.get("/health", headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_a_foreign_name_is_refused(http: httpx.Client) -> None:
    assert http.get("/health", headers={"host": "example.org"}).status_code == 400


def test_only_ports_that_want_a_token_are_open_to_others(started: Server) -> None:
    grpc = pytest.importorskip("grpc")
    found = listening()
    assert {name for _, name in found} >= {"raylet", "gcs_server", "ray::ProxyActor"}
    others = {name for host, name in found if host not in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::1]")}
    assert others <= {"ray::ServeRepli"}
    ports = re.findall(
        r" \*:(\d+) .*ServeRepli", subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True).stdout
    )
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as error:
                ask(b"", timeout=10)
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_client_that_goes_away_frees_its_rows(http: httpx.Client) -> None:
    body = {"model": "text", "prompt": "a", "max_tokens": 100_000, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"x-session-id": "gone"}) as running:
        next(running.iter_lines())
    until = time.monotonic() + 5
    while "unrolled_rows 0.0" not in http.get("/metrics", headers={"x-session-id": "gone"}).text:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_kill_9_fails_only_what_runs(started: Server, http: httpx.Client) -> None:
    address, stop = started.address(1), threading.Event()
    victim = next(iter(replicas(started)))
    failed: list[tuple[float, str]] = []

    def talk(number: int) -> int:
        """Go on with a session until told to stop, trying again after an error; the state stays what it was."""
        turns, state = 0, None
        with httpx.Client(base_url=address, timeout=60) as client:
            while not stop.is_set():
                body: dict[str, Any] = {} if state is None else {"state": state}
                try:
                    answer = completion(client, "go on", seed=number, **body)
                except httpx.TransportError as error:
                    failed.append((time.monotonic(), repr(error)))
                    continue
                if answer.status_code == 500:
                    failed.append((time.monotonic(), answer.text))
                    continue
                _, state = told(answer)
                turns += 1
        return turns

    before = len(replicas(started))
    with ThreadPoolExecutor(CLIENTS + 2) as pool:
        streams = [pool.submit(stream, http, name, stop) for name in sessions(http)]
        talks = [pool.submit(talk, number) for number in range(CLIENTS)]
        time.sleep(2)
        killed = time.monotonic()
        os.kill(int(victim), signal.SIGKILL)
        while len(now := replicas(started)) < before or victim in now:
            assert time.monotonic() < killed + 120, now
            time.sleep(0.2)
        replaced = time.monotonic() - killed
        stop.set()
        turns = [talk.result() for talk in talks]
        whole = [stream.result() for stream in streams]
    print(f"{len(failed)} of {sum(turns)} requests failed; a new process after {replaced:.1f} s")
    assert len(failed) <= CLIENTS, failed
    assert sorted(whole) == [False, True]  # one of them ran on the replica that was killed
    assert min(turns) > 2
    assert all(when > killed for when, _ in failed)


def test_sigterm_ends_what_runs_and_exits_with_0(started: Server, http: httpx.Client) -> None:
    body = {"model": "text", "prompt": "a", "max_tokens": 3_000, "stream": True, "temperature": 0}
    processes = replicas(started)
    with http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        started.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert '"finish_reason":"length"' in "".join(rest)
    assert started.process.wait(60) == 0, started.log.read_text()
    assert processes
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
