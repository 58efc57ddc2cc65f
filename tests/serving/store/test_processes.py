"""Two processes at one store, and a process that is killed while it writes."""

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from stores import on

from unrolled.serving.store import open_store
from unrolled.serving.store.sqlite import SqliteStore

SHARED = on("sqlite", "s3", "redis")
COMPETE = """
import hashlib, sys
from unrolled.serving.store import open_store
address, name, me, wins = sys.argv[1:]
store = open_store(address)
won = 0
while won < int(wins):
    at = store.pointer(name)
    new = hashlib.sha256(f"{at} {me}".encode()).hexdigest()
    store.put(new, new.encode() * 500)
    if store.swap(name, at, new):
        won += 1
        print(at, new)
store.close()
"""
WRITE = """
import hashlib, os, sys
from pathlib import Path
from unrolled.serving.store.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]), state_bytes=60_000_000, ttl=1000)
while True:
    value = os.urandom(135_000)
    key = hashlib.sha256(value).hexdigest()
    store.put(key, value)
    print(key, flush=True)
"""
OPEN = (
    "import sys; from unrolled.serving.store import open_store; open_store(sys.argv[1]).put('a' * 64, b'1')"
)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@SHARED
def test_two_processes_move_a_session_one_at_a_time(kind: str, address: str) -> None:
    name, wins = str(uuid.uuid4()), 15 if kind == "s3" else 200
    processes = [start(COMPETE, address, name, me, wins) for me in "ab"]
    printed = "".join(process.communicate(timeout=60)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    moves = dict(line.split() for line in printed.splitlines())
    assert len(moves) == 2 * wins  # nobody moved from where another did
    store, at = open_store(address), "None"
    for _ in range(2 * wins):
        at = moves[at]
        assert store.get(at) == at.encode() * 500
    assert store.pointer(name) == at
    store.close()


def test_nobody_writes_between_reading_a_session_and_moving_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "states.db")
    other = sqlite3.connect(tmp_path / "states.db", timeout=0, isolation_level=None)
    read = store._pointer

    def read_and_interfere(name: str) -> str | None:
        found = read(name)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO sessions VALUES (?, ?)", (name, "a" * 64))
        return found

    monkeypatch.setattr(store, "_pointer", read_and_interfere)
    assert store.swap("name", None, "b" * 64)
    other.close()
    store.close()


def test_a_put_that_is_interrupted_keeps_nothing_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(newest: str) -> None:
        raise KeyboardInterrupt

    store = SqliteStore(tmp_path / "states.db")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_drop_above_budget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put("a" * 64, b"1")
    assert store.get("a" * 64) is None
    store.put("b" * 64, b"2")
    assert store.get("b" * 64) == b"2"
    store.close()


def test_a_new_file_is_opened_by_several_processes_at_once(tmp_path: Path) -> None:
    processes = [start(OPEN, tmp_path / "states.db") for _ in range(8)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 8


@pytest.mark.parametrize("after", [1, 20, 75])
def test_a_killed_writer_loses_nothing(tmp_path: Path, after: int) -> None:
    process = start(WRITE, tmp_path / "states.db")
    assert process.stdout is not None
    first = [process.stdout.readline() for _ in range(after)]
    os.kill(process.pid, signal.SIGKILL)
    keys = "".join([*first, process.stdout.read()]).split()
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGKILL
    store = SqliteStore(tmp_path / "states.db")
    for key in keys:
        assert hashlib.sha256(store.get(key) or b"").hexdigest() == key
    store.put("a" * 64, b"and goes on")
    store.close()
    db = sqlite3.connect(tmp_path / "states.db")
    rows = db.execute("SELECT key, value FROM states").fetchall()
    assert len(keys) + 1 <= len(rows) <= len(keys) + 2  # one may have been written and not told
    assert all(hashlib.sha256(value).hexdigest() == key for key, value in rows if key != "a" * 64)
    assert (
        db.execute("SELECT bytes FROM total").fetchone()
        == db.execute("SELECT sum(bytes) FROM states").fetchone()
    )
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
