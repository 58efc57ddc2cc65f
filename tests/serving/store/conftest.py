"""A store of each kind at an address of its own. S3 is moto's server; Redis is a redis-server without persistence."""

import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from stores import kinds

from unrolled.serving.store import Store, open_store


@pytest.fixture(params=kinds("memory", "sqlite", "file", "s3", "redis"))
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of store; tests that move sessions or share a store choose among them with `on`."""
    return request.param


@pytest.fixture
def address(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The address of an empty store."""
    match kind:
        case "memory":
            return "memory:"
        case "sqlite":
            return f"sqlite:{tmp_path}/states.db"
        case "file":
            return f"file://{tmp_path}/new"
        case "s3":
            return f"s3://{request.getfixturevalue('bucket')}/{uuid.uuid4()}"
        case _:
            return f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0"


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    opened = open_store(address)
    yield opened
    opened.close()


@pytest.fixture
def key() -> Callable[[object], str]:
    """Keys by any names, others in each test: all of them share one Redis."""
    test = uuid.uuid4()
    return lambda name: sha256(f"{test} {name}".encode()).hexdigest()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    place = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", place)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        urllib.request.urlopen(urllib.request.Request(f"{place}/bucket", method="PUT"), timeout=30).close()
        yield "bucket"
    server.stop()


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.fail("redis-server is missing: install Debian's package redis-server")
    port = free_port()
    options = f"--port {port} --bind 127.0.0.1 --appendonly no --maxmemory 256mb --daemonize no".split()
    folder = tmp_path_factory.mktemp("redis")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, *options, "--save", "", "--dir", folder], stdout=log, stderr=log)
    try:
        wait_for(f"redis://127.0.0.1:{port}/0")
        yield port
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(address: str) -> None:
    for _ in range(100):
        with suppress(OSError):
            open_store(address).close()
            return
        time.sleep(0.1)
    pytest.fail(f"{address} did not answer in 10 seconds")
