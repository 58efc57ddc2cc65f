"""What stores drop: values that were not used for long, and the least recently used above a size."""

import random
import sqlite3
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from stores import on

from unrolled.serving.store import open_store
from unrolled.serving.store.memory import MemoryStore
from unrolled.serving.store.sqlite import MOST_DROPPED, SqliteStore

A, B, C, D = (letter * 64 for letter in "abcd")


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[object]:
    opened = []

    def open_with(state_bytes: int | None = None, ttl: float | None = None) -> MemoryStore | SqliteStore:
        if request.param == "memory":
            opened.append(MemoryStore(state_bytes, ttl, clock))
        else:
            opened.append(SqliteStore(tmp_path / "states.db", state_bytes, ttl, clock))
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


def put(store, clock, keys: str, size: int = 10) -> None:
    for letter in keys:
        clock.now += 100
        store.put(letter * 64, bytes(size))


def there(store) -> str:
    """Letters of the values that are there. Asking counts as use, so this ends a test."""
    return "".join(letter for letter in "abcdef" if store.touch(letter * 64))


def test_a_session_of_a_value_that_is_too_old_is_as_good_as_none(make, clock) -> None:
    store = make(ttl=600)
    put(store, clock, "ab")
    for name, key in (("x", A), ("y", B), ("z", C)):
        assert store.swap(name, None, key)
    assert store.delete(B)
    clock.now += 1000
    assert store.pointer("x") is None
    assert store.pointer("y") == B, "its value was deleted, and is not too old"
    assert store.pointer("z") == C, "it never had a value"
    assert not store.swap("x", A, B)
    assert store.swap("x", None, B)
    assert store.pointer("x") == B


def test_the_least_recently_used_is_dropped_first(make, clock) -> None:
    store = make(state_bytes=30)
    put(store, clock, "abc")
    clock.now += 100
    assert store.get(A) is not None
    clock.now += 100
    assert store.touch(B)
    put(store, clock, "d")
    assert there(store) == "abd"


def test_a_value_that_fits_exactly_drops_nothing(make, clock) -> None:
    store = make(state_bytes=30)
    put(store, clock, "abc")
    put(store, clock, "a")  # once more
    assert there(store) == "abc"


def test_replacing_a_value_counts_its_new_size(make, clock) -> None:
    store = make(state_bytes=30)
    put(store, clock, "ab")
    put(store, clock, "b", size=20)
    assert store.touch(A)
    put(store, clock, "b", size=1)
    put(store, clock, "c", size=19)
    assert there(store) == "abc"


def test_values_of_sessions_are_dropped_last(make, clock) -> None:
    store = make(state_bytes=30)
    put(store, clock, "ab")
    assert store.swap("one", None, A)
    assert store.swap("other", None, A)
    assert store.swap("other", A, None)  # still one session points to it
    put(store, clock, "cd")
    clock.now += 100
    assert store.get(A) is not None
    assert store.get(B) is None
    assert store.swap("one", A, C)
    put(store, clock, "e")  # in place of d
    put(store, clock, "f")  # in place of a
    assert there(store) == "cef"


def test_a_session_that_moves_on_frees_its_value(make, clock) -> None:
    store = make(state_bytes=20)
    put(store, clock, "ab")
    assert store.swap("one", None, A)
    assert store.swap("one", A, B)
    put(store, clock, "c")
    assert there(store) == "bc"


def test_a_session_protects_a_value_that_comes_later(make, clock) -> None:
    store = make(state_bytes=20)
    assert store.swap("one", None, A)
    put(store, clock, "abc")
    assert there(store) == "ac"


def test_where_all_belong_to_sessions_the_newest_value_stays(make, clock) -> None:
    store = make(state_bytes=20)
    put(store, clock, "ab")
    for key in (A, B):
        assert store.swap(key, None, key)
    put(store, clock, "c")
    assert there(store) == "bc"
    assert store.pointer(A) == A  # where the session was is still known


def test_a_value_larger_than_the_store_is_refused(make, clock) -> None:
    store = make(state_bytes=1000)
    put(store, clock, "a")
    with pytest.raises(ValueError, match=r"^the state has 1,001 bytes, but the store keeps 1,000 at most$"):
        store.put(B, bytes(1001))
    store.put(C, bytes(1000))
    assert there(store) == "c"


def test_a_value_not_used_for_long_is_gone(make, clock) -> None:
    store = make(ttl=1000)
    put(store, clock, "abcd")
    clock.now += 900 - 300
    assert store.get(A) is not None  # used for the last time 1,000 - 100 s ago
    assert store.touch(B)
    clock.now += 600
    assert store.get(C) is None
    assert not store.touch(D)
    assert not store.delete(D)
    assert there(store) == "ab"


def test_put_drops_old_values_and_their_sessions(make, clock) -> None:
    store = make(ttl=1000)
    put(store, clock, "ab")
    assert store.swap("of a", None, A)
    assert store.swap("of c", None, C)
    clock.now += 1100
    store.put(C, b"")
    assert store.pointer("of a") is None
    assert store.pointer("of c") == C
    assert there(store) == "c"


@on("redis")
def test_redis_drops_what_is_not_used_for_seconds(address: str, key) -> None:
    store = open_store(address, ttl=1)
    store.put(key(0), b"1")
    store.put(key(1), b"1")
    assert store.swap(key("name"), None, key(0))
    for _ in range(3):
        time.sleep(0.5)
        assert store.get(key(0)) == b"1"
    assert store.get(key(1)) is None
    time.sleep(1.2)
    assert store.get(key(0)) is None
    store.put(key(2), b"1")
    assert store.pointer(key("name")) is None
    store.close()


@on("memory", "sqlite")
def test_an_opened_store_has_the_limits(address: str) -> None:
    store = open_store(address, state_bytes=10, ttl=0.001)
    with pytest.raises(ValueError, match="10 at most"):
        store.put(A, bytes(11))
    store.put(A, bytes(10))
    time.sleep(0.01)
    assert store.get(A) is None
    store.close()


def sums(path: Path) -> tuple[int, int]:
    db = sqlite3.connect(path)
    row = db.execute("SELECT (SELECT bytes FROM total), coalesce(sum(bytes), 0) FROM states").fetchone()
    db.close()
    return row


def test_the_total_is_that_of_the_values(tmp_path: Path, clock: Clock) -> None:
    store, draw = SqliteStore(tmp_path / "states.db", 5000, 5000, clock), random.Random(0)
    keys = [sha256(bytes([i])).hexdigest() for i in range(40)]
    for _ in range(400):
        clock.now += draw.choice([1, 100])
        key, name = draw.choice(keys), f"session {draw.randrange(5)}"
        store.put(key, bytes(draw.randrange(400)))
        store.delete(draw.choice(keys))
        store.swap(name, store.pointer(name), draw.choice([None, *keys]))
        total, real = sums(tmp_path / "states.db")
        assert total == real <= 5000
    db = sqlite3.connect(tmp_path / "states.db")
    wrong = (
        "SELECT count(*) FROM states WHERE pointed != EXISTS (SELECT 1 FROM sessions WHERE key = states.key)"
    )
    assert db.execute(wrong).fetchone() == (0,)
    assert db.execute("SELECT sum(pointed) FROM states").fetchone() > (0,)
    db.close()
    store.close()


def test_put_drops_a_bounded_number_of_rows(tmp_path: Path, clock: Clock) -> None:
    store = SqliteStore(tmp_path / "states.db", state_bytes=1000, now=clock)
    for i in range(1000):
        store.put(sha256(str(i).encode()).hexdigest(), b"1")
    store.put(A, bytes(900))
    assert sums(tmp_path / "states.db") == (1900 - MOST_DROPPED,) * 2
    for _ in range(20):
        store.put(A, bytes(900))
    assert sums(tmp_path / "states.db") == (1000, 1000)
    store.close()


def test_reading_a_value_often_writes_once_a_minute(tmp_path: Path, clock: Clock) -> None:
    store = SqliteStore(tmp_path / "states.db", now=clock)
    store.put(A, b"1")
    db = sqlite3.connect(tmp_path / "states.db")
    noted = []
    for _ in range(240):
        clock.now += 1
        assert store.get(A) == b"1"
        noted.append(db.execute("SELECT used FROM states").fetchone()[0])
    assert len(set(noted)) == 4
    assert all(clock.now - 240 + i + 1 - used <= 60 for i, used in enumerate(noted))
    db.close()
    store.close()


def test_a_value_that_is_put_again_is_used_again(make, clock) -> None:
    store = make(state_bytes=30, ttl=1000)
    put(store, clock, "abca", size=10)
    put(store, clock, "d")
    assert there(store) == "acd"
    clock.now += 600
    store.put(A, bytes(10))
    clock.now += 900
    assert store.get(A) is not None
