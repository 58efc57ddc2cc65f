"""`unrolled serve`: a run is served and states outlive the process; wrong options."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from commands import error

from unrolled.cli.serve import _without_password
from unrolled.data import Vocabulary
from unrolled.models import Decoder, DecoderConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(256, d_model=16, n_layers=1, n_heads=2, max_length=32, positions="rotary"))
    path = tmp_path_factory.mktemp("runs") / "book"
    Vocabulary("text").attach(model).save(path)
    return path


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[str, str]]:
    """Run the command; yield the address and what it said before."""
    command = [sys.executable, "-m", "unrolled", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r" at (http\S+)", line):
                yield found[1], "".join(said)
                break
        else:
            raise AssertionError("".join(said))
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_run_is_served_and_its_states_outlive_the_process(folder: Path) -> None:
    body = {"model": "tale", "prompt": "Once", "temperature": 0, "max_tokens": 4}
    with serving(folder, "--name", "tale", "--rate", "1000/minute") as (address, said):
        assert f"states are kept in {folder / 'states.sqlite'}" in said
        assert "serving tale at http://127.0.0.1:" in said
        whole = httpx.post(f"{address}/v1/completions", json={**body, "max_tokens": 8}).json()
        first = httpx.post(f"{address}/v1/completions", json={**body, "keep": True}).json()
    with serving(folder, "--name", "tale", "--ttl", "30d", "--state-bytes", "1GB") as (address, _):
        body = {**body, "prompt": "", "state": first["state"]}
        rest = httpx.post(f"{address}/v1/completions", json=body).json()
    assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] == 7  # all but the last
    both = first["choices"][0]["text"] + rest["choices"][0]["text"]
    assert whole["choices"][0]["text"].replace("\ufffd", "") == both.replace("\ufffd", "")


# A thread of granian that is late, and an interpreter that is slow to go.
LATE = """
import asyncio, ctypes, sys, time
from unrolled.cli import main

class Slow:
    def __del__(self, sleep=ctypes.PyDLL(None).usleep):  # keeps the interpreter's lock
        sleep(600_000)

def late(self, *args, soon=asyncio.BaseEventLoop.call_soon_threadsafe, **options):
    handle = soon(self, *args, **options)
    if "shutdown_glue" in args[0].__qualname__:
        print("late", flush=True)
        time.sleep(0.3)
    return handle

asyncio.BaseEventLoop.call_soon_threadsafe = late
sys.slow = Slow()
main()
"""


@pytest.mark.slow
def test_a_late_thread_does_not_abort_the_process() -> None:
    command = [sys.executable, "-c", LATE, "serve", "--demo", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while " at http" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "late\n")


def test_no_password_is_shown() -> None:
    assert _without_password("rediss://user:s3cret@db:6379/0") == "rediss://db:6379/0"
    assert _without_password("redis://:a@c@db/0") == "redis://db/0"
    assert _without_password("redis://db/0?password=s3cret") == "redis://db/0"
    assert _without_password("runs/a@b/states.sqlite") == "runs/a@b/states.sqlite"
    assert _without_password("s3://bucket/a@b") == "s3://bucket/a@b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FOLDERS is missing: name the folder of a model, or serve the library's own with --demo"),
        (["FOLDER", "--demo"], "must be left out with --demo"),
        (["FOLDER", "FOLDER", "--name", "a"], "--name is a, but there are 2 models"),
        (["FOLDER", "FOLDER"], "models have the names"),
        (["FOLDER", "--memory", "much"], "--memory is much, but must be a size such as 4GB or 512MiB"),
        (["FOLDER", "--prefix-memory", "much"], "--prefix-memory is much, but must be a size"),
        (["FOLDER", "--state-memory", "0"], "--state-memory is 0, but must be a size"),
        (["FOLDER", "--ttl", "long"], "--ttl is long, but must be a time such as 30d, 12h, 15m or 90s"),
        (["FOLDER", "--host", "0.0.0.0"], "host is 0.0.0.0, which other machines can reach, so keys"),
        (["FOLDER", "--states", ""], "--states is empty, but must be an address"),
        (["FOLDER", "--rate", "often"], "rate is 'often', but must be one such as '600/minute'"),
        (["FOLDER", "--keys", "FOLDER/none"], "No such file"),
        (["FOLDER", "--states", "ftp://a"], "not ftp://"),
        (["FOLDER/none"], "none"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, folder: Path) -> None:
    given = [x.replace("FOLDER", str(folder)) for x in arguments]
    assert message in error("serve", *given)
