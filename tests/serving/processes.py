"""`unrolled serve` as processes, for tests."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx

from unrolled import demo_models

ADDRESS = re.compile(r"^serving text at (http://127\.0\.0\.1:\d+)", re.MULTILINE)


class Server(NamedTuple):
    """A server that was started: `log` is its stderr."""

    process: subprocess.Popen[bytes]
    log: Path

    def address(self, seconds: float) -> str:
        """Wait until it answers."""
        until = time.monotonic() + seconds
        while (found := ADDRESS.search(self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, f"not ready after {seconds} s: {self.log.read_text()}"
            time.sleep(0.05)
        return found[1]


@contextmanager
def server(log: Path, *arguments: object) -> Iterator[Server]:
    """Start a server of the library's model of text at a free port."""
    command = [sys.executable, "-m", "unrolled", "serve", demo_models.path("text"), "--port", 0, *arguments]
    with log.open("wb") as stderr:
        process = subprocess.Popen(list(map(str, command)), stdout=stderr, stderr=stderr)
    try:
        yield Server(process, log)
    finally:
        process.kill()
        process.wait()


def completion(http: httpx.Client, prompt: str, **body: Any) -> httpx.Response:
    """Ask for 8 tokens and their state."""
    body = {"model": "text", "prompt": prompt, "max_tokens": 8, "seed": 1, "keep": True} | body
    return http.post("/v1/completions", json=body)


def told(answer: httpx.Response) -> tuple[str, str]:
    """The text and the state of an answer that must succeed."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"], found["state"]
