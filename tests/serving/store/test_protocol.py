"""What every store does, whatever keeps the values."""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import on

from unrolled.contract import UnsupportedError
from unrolled.serving.store import Store, open_store

KEY = "ab" * 32
MOVING = on("memory", "sqlite", "s3", "redis")
LASTING = on("sqlite", "file", "s3", "redis")
ONLY_FILES = on("file")

Key = Callable[[object], str]


@pytest.mark.parametrize("size", [0, 1, 135_000, 6_000_000])
def test_a_value_is_kept_until_it_is_deleted(store: Store, key: Key, size: int) -> None:
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert store.get(key(0)) is None
    assert not store.touch(key(0))
    assert not store.delete(key(0))
    store.put(key(0), value)
    assert store.get(key(0)) == value
    assert store.touch(key(0))
    assert store.get(key(1)) is None
    assert store.delete(key(0))
    assert not store.delete(key(0))
    assert store.get(key(0)) is None


def test_what_is_read_are_bytes(store: Store, key: Key) -> None:
    store.put(key(0), b"one")
    assert type(store.get(key(0))) is bytes


def test_a_second_put_replaces_the_value(store: Store, key: Key) -> None:
    for value in (b"short", b"much longer than the first", b""):
        store.put(key(0), value)
        assert store.get(key(0)) == value


@LASTING
def test_values_and_sessions_outlast_the_store(address: str, store: Store, key: Key) -> None:
    name = str(uuid.uuid4())
    store.put(key(0), b"value")
    assert store.swap(name, None, key(0))
    again = open_store(address)
    assert again.get(key(0)) == b"value"
    assert again.pointer(name) == key(0)
    again.close()


@pytest.mark.parametrize("name", ["a", "../../etc/passwd", "Übung/β 猫\n\0", "n" * 512, "%2F", " "])
def test_sessions_have_any_name(store: Store, key: Key, name: str) -> None:
    name = (name + str(uuid.uuid4()))[-512:]
    assert store.pointer(name) is None
    assert store.swap(name, None, key(0))
    assert store.pointer(name) == key(0)
    assert store.pointer(name[:-1]) is None


@MOVING
def test_a_session_moves_only_from_where_it_is_expected(store: Store, key: Key) -> None:
    name = str(uuid.uuid4())
    assert store.swap(name, None, None)
    assert not store.swap(name, key(0), key(1))
    assert store.swap(name, None, key(0))
    assert not store.swap(name, None, key(1))
    assert not store.swap(name, None, None)
    assert not store.swap(name, key(1), None)
    assert store.swap(name, key(0), key(0))
    assert store.swap(name, key(0), key(1))
    assert store.swap(name, key(1), None)
    assert store.pointer(name) is None
    assert not store.swap(name, key(1), key(2))
    assert store.swap(name, None, key(2))
    assert store.pointer(name) == key(2)


@ONLY_FILES
def test_a_folder_of_files_says_that_sessions_cannot_move(store: Store, key: Key) -> None:
    assert store.swap("session", None, key(0))
    assert not store.swap("session", None, key(1))
    assert not store.swap("session", key(1), key(2))
    with pytest.raises(
        UnsupportedError, match=r"^file:.* has no conditional update, .* SQLite file, S3 or Redis$"
    ):
        store.swap("session", key(0), key(1))
    assert store.pointer("session") == key(0)


@ONLY_FILES
def test_a_file_that_another_process_deletes_is_gone(
    store: Store, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_there", lambda path: True)
    assert not store.delete(key(0))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.binary(max_size=9)),
        st.tuples(st.sampled_from(["get", "touch", "delete"]), st.integers(0, 2)),
        st.tuples(st.just("pointer"), st.integers(0, 1)),
        st.tuples(st.just("swap"), st.integers(0, 1), *[st.one_of(st.none(), st.integers(0, 2))] * 2),
    ),
    max_size=30,
)


@MOVING
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_a_store_is_two_dictionaries(store: Store, key: Key, operations: list[tuple]) -> None:
    example = uuid.uuid4()  # the store is that of the examples before
    values: dict[str, bytes] = {}
    sessions: dict[str, str] = {}

    def named(number: int | None) -> str | None:
        return None if number is None else key(f"{example} {number}")

    for operation, first, *rest in operations:
        name, of = f"{example} {first}", named(first)
        match operation:
            case "put":
                store.put(of, rest[0])
                values[of] = rest[0]
            case "get":
                assert store.get(of) == values.get(of)
            case "touch":
                assert store.touch(of) == (of in values)
            case "delete":
                assert store.delete(of) == (values.pop(of, None) is not None)
            case "pointer":
                assert store.pointer(name) == sessions.get(name)
            case _:
                expected, new = map(named, rest)
                moved = sessions.get(name) == expected
                assert store.swap(name, expected, new) == moved
                if moved and new is not None:
                    sessions[name] = new
                elif moved:
                    sessions.pop(name, None)


@MOVING
def test_one_of_several_threads_moves_a_session(store: Store, key: Key) -> None:
    name, rounds, threads = str(uuid.uuid4()), 10, 6
    start = threading.Barrier(threads)

    def compete(me: int) -> list[bool]:
        won, at = [], None
        for turn in range(rounds):
            start.wait(timeout=60)
            won.append(store.swap(name, at, key((turn, me))))
            start.wait(timeout=60)
            at = store.pointer(name)
        return won

    with ThreadPoolExecutor(threads) as pool:
        won = list(pool.map(compete, range(threads)))
    assert [sum(turn) for turn in zip(*won, strict=True)] == [1] * rounds


def test_threads_read_and_write_whole_values(store: Store, key: Key) -> None:
    """Each key has one of two values, of one byte each; whoever reads must see one of them whole."""
    size = 40_000
    store.put(key("shared"), bytes(size))

    def work(me: int) -> None:
        for turn in range(8):
            store.put(key((me, turn)), bytes([me]) * size)
            store.put(key("shared"), bytes([me]) * size)
            found = store.get(key("shared"))
            assert found is not None
            assert found == found[:1] * size
            assert store.get(key((me, turn))) == bytes([me]) * size

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


@pytest.mark.parametrize(
    "wrong", ["", "ab", "AB" * 32, "g" * 64, "../" + "a" * 61, "a" * 64 + "\n", "é" * 64]
)
def test_a_wrong_key_gets_one_sentence(store: Store, wrong: str) -> None:
    calls = [
        lambda: store.get(wrong),
        lambda: store.put(wrong, b""),
        lambda: store.touch(wrong),
        lambda: store.delete(wrong),
        lambda: store.swap("name", wrong, None),
        lambda: store.swap("name", None, wrong),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"^the id of a state must be 64 hex digits in lower case, not '.*$"
        ):
            call()


@pytest.mark.parametrize(
    ("wrong", "found"),
    [("", "1 to 512 bytes, not 0"), ("é" * 257, "1 to 512 bytes, not 514"), ("\ud800", "half a character")],
)
def test_a_wrong_name_gets_one_sentence(store: Store, wrong: str, found: str) -> None:
    for call in (lambda: store.pointer(wrong), lambda: store.swap(wrong, None, KEY)):
        with pytest.raises(ValueError, match=f"^the name of a session must .*{found}$"):
            call()
