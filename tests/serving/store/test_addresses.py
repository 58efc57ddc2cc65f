"""Addresses of stores, and what is said where none can be opened there."""

import builtins
import functools
import random
import resource
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from unrolled.serving.store import open_store
from unrolled.serving.store.memory import MemoryStore
from unrolled.serving.store.sqlite import SqliteStore

KEY = "a" * 64


def test_a_path_is_a_sqlite_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for address, file in (
        ("a.db", "a.db"),
        ("sqlite:b.db", "b.db"),
        ("sqlite:folder/c d.db", "folder/c d.db"),
        (f"{tmp_path}/e:f.db", "e:f.db"),
    ):
        store = open_store(address)
        assert type(store) is SqliteStore
        store.put(KEY, b"1")
        store.close()
        assert (tmp_path / file).is_file()
    assert type(open_store("memory:")) is MemoryStore


def test_no_folder_is_made_for_a_sqlite_file(tmp_path: Path) -> None:
    file = tmp_path / "none" / "states.sqlite"
    with pytest.raises(FileNotFoundError, match=f"{file} cannot be made: there is no folder {file.parent}"):
        open_store(str(file))
    assert not file.parent.exists()


@pytest.mark.parametrize(
    ("address", "options", "sentence"),
    [
        ("", {}, "the address of a store must not be empty"),
        ("sqlite:", {}, "the address of a store must not be empty"),
        ("memory:x", {}, "the address of a store in memory is memory:, not 'memory:x'"),
        (
            "http://a/b",
            {},
            "a store is memory:, a path, sqlite:PATH, s3://, gs://, file:// or redis://, not http://",
        ),
        ("memory:", {"state_bytes": 0}, "state_bytes must be at least 1, not 0"),
        ("memory:", {"ttl": 0.0}, "ttl must be from 0.001 to 1e9 seconds, not 0.0"),
        ("memory:", {"ttl": float("nan")}, "ttl must be from 0.001 to 1e9 seconds, not nan"),
        (
            "redis://127.0.0.1/0",
            {"state_bytes": 5},
            "state_bytes is for SQLite and memory; for Redis, set its own maxmemory",
        ),
        (
            "s3://b/p",
            {"state_bytes": 5, "ttl": 5.0},
            "state_bytes is not for object storage: set a lifecycle rule of the bucket",
        ),
        (
            "gs://b/p",
            {"ttl": 5.0},
            "ttl is not for object storage: set a lifecycle rule of the bucket",
        ),
    ],
)
def test_a_wrong_address_gets_one_sentence(address: str, options: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared
        open_store(address, **options)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("address", "library"),
    [
        ("s3://b/p", "obstore"),
        ("gs://b/p", "obstore"),
        ("file:///p", "obstore"),
        ("redis://127.0.0.1/0", "redis"),
    ],
)
def test_a_missing_library_is_named(address: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.split(".")[0] == library:
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match=rf"^a store .* needs {library}: run pip install '\.\[store\]' in a clone"
    ):
        open_store(address)


def make_text(file: Path) -> None:
    file.write_text("These are not the states that you look for. " * 100)


def make_other(file: Path) -> None:
    db = sqlite3.connect(file)
    db.execute("CREATE TABLE states(key, value)")
    db.close()


def make_later(file: Path) -> None:
    SqliteStore(file).close()
    db = sqlite3.connect(file)
    db.execute("PRAGMA user_version = 2")
    db.close()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (make_text, "{file} is not a database, or a damaged one: file is not a database"),
        (make_other, "{file} is a database, but not one of states of this version"),
        (make_later, "{file} is a database, but not one of states of this version"),
    ],
)
def test_a_file_that_is_no_store_is_left_alone(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    file = tmp_path / "file"
    make(file)
    before = file.read_bytes()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared
        open_store(str(file))
    assert str(caught.value) == sentence.format(file=file)
    assert file.read_bytes() == before


def test_a_damaged_database_gets_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "states.db"
    store = SqliteStore(file)
    for letter in "abcdef":
        store.put(letter * 64, bytes(5000))
    store.close()
    content = bytearray(file.read_bytes())
    content[100:] = random.Random(0).randbytes(len(content) - 100)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a database, or a damaged one: "):
        SqliteStore(file).get(KEY)


def test_a_database_that_is_damaged_later_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "states.db"
    store = SqliteStore(file)
    for n in range(300):
        store.put(f"{n:064x}", bytes(5000))
    for part in tmp_path.iterdir():
        part.write_bytes(random.Random(0).randbytes(part.stat().st_size))
    with pytest.raises(OSError, match="cannot be read or written"):
        [store.get(f"{n:064x}") for n in range(300)]
    with pytest.raises(OSError, match="cannot be read or written"):
        store.put(KEY, b"")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file/states.db", "."):
        with pytest.raises(OSError, match=str(tmp_path)):
            open_store(str(tmp_path / path))


def test_a_full_disk_is_said_and_what_is_there_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "states.db"
    store = SqliteStore(file, now=iter(range(0, 100_000, 100)).__next__)
    store.put(KEY, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"^the states in {file} cannot be read or written: "):
            store.put("b" * 64, bytes(200_000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # not even that it was used
        assert store.get(KEY) == b"old"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    store.put("b" * 64, bytes(200_000))
    assert store.get("b" * 64) == bytes(200_000)
    store.close()


def test_a_file_that_another_process_opens_too_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that set the mode at the same time would wait for each other: SQLite gives an error to one of them."""
    busy = [True, True]

    class Busy(sqlite3.Connection):
        def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
            if "journal_mode" in statement and busy:
                busy.pop()
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error
            return super().execute(statement, *arguments)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Busy))
    store = SqliteStore(tmp_path / "states.db")
    store.put(KEY, b"1")
    assert not busy
    assert (tmp_path / "states.db-wal").is_file()
    store.close()


def test_a_value_larger_than_sqlite_takes_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "states.db")
    with pytest.raises(
        ValueError, match=r"^the state has 1,000,000,000 bytes, but the store keeps 999,999,000 at most$"
    ):
        store.put(KEY, bytes(10**9))  # zeros that are never touched take no memory
    store.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "states.db")
    store.close()
    with pytest.raises(OSError, match="closed database"):
        store.get(KEY)


@pytest.mark.store
def test_redis_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(
        OSError, match=r"^the states in Redis at 127\.0\.0\.1:9 cannot be read or written: "
    ) as caught:
        open_store("redis://me:secret@127.0.0.1:9/0")
    assert "secret" not in str(caught.value)


@pytest.mark.store
@pytest.mark.parametrize("address", ["redis://127.0.0.1:x/0", "redis:"])
def test_a_wrong_address_of_redis_gets_one_sentence(address: str) -> None:
    with pytest.raises(ValueError, match=r"^a store in Redis is redis://HOST:PORT/DB: "):
        open_store(address)


@pytest.mark.store
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=rf"^the states in file://{tmp_path}/file/new cannot be read or written: "
    ):
        open_store(f"file://{tmp_path}/file/new")


@pytest.mark.store
def test_a_bucket_that_does_not_answer_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"^the states in s3://absent/p cannot be read or written: .*$"):
        open_store("s3://absent/p").put(KEY, b"")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"^the states in s3://bucket/p cannot be read or written: .*$"):
        open_store(f"s3://{bucket}/p")


@pytest.mark.store
def test_a_damaged_session_gets_one_sentence(bucket: str) -> None:
    from obstore.store import from_url

    objects = from_url(f"s3://{bucket}/damaged")
    store = open_store(f"s3://{bucket}/damaged")
    assert store.swap("name", None, KEY)
    [[session]] = list(objects.list("sessions"))
    for content in (b"", b"[]", b"{}", b'{"state": 1}', b'{"state": "../a"}', b"\xff"):
        objects.put(session["path"], content)
        with pytest.raises(OSError, match=r"s3://bucket/damaged .*: the session 'name' is damaged$"):
            store.pointer("name")
