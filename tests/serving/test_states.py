"""States in memory in front of a store."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unrolled.serving import states as module
from unrolled.serving.snapshot import Snapshot
from unrolled.serving.states import OVERHEAD, RECENT, States, UnknownState, untold
from unrolled.serving.store.memory import MemoryStore

MODEL = "0" * 64
SIZE = 4000 + OVERHEAD  # of a snapshot in memory


class Counted(MemoryStore):
    """A store in memory that counts calls, and can be made to fail."""

    def __init__(self, most_bytes: int | None = None) -> None:
        super().__init__(most_bytes, None)
        self.calls: list[str] = []
        self.broken = False

    def count(self, name: str) -> None:
        self.calls.append(name)
        if self.broken:
            raise OSError("the store is broken")

    def get(self, key: str) -> bytes | None:
        self.count("get")
        return super().get(key)

    def put(self, key: str, value: bytes) -> None:
        self.count("put")
        super().put(key, value)

    def touch(self, key: str) -> bool:
        self.count("touch")
        return super().touch(key)


def snapshot(number: int, floats: int = 1000) -> Snapshot:
    return Snapshot(MODEL, 1 + number, number, {"x": torch.full((floats,), float(number))})


@pytest.fixture
def store() -> Counted:
    return Counted()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock has gone forward, in a list of one."""
    seconds, clock = [0.0], module.time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + seconds[0])
    return seconds


def test_a_state_is_kept_until_it_is_deleted(store: Counted) -> None:
    states, kept = States(store, 10 * SIZE), snapshot(1)
    assert kept.id not in states
    assert states.keep(kept) == kept.id
    assert states.keep(kept) == kept.id
    assert states.get(kept.id) == kept
    assert kept.id in states
    assert states.nbytes == SIZE
    assert states.delete(kept.id)
    assert not states.delete(kept.id)
    assert kept.id not in states
    assert states.nbytes == 0
    with pytest.raises(UnknownState, match=f"^there is no state with the id {kept.id}$"):
        states.get(kept.id)


def test_it_is_in_the_store_before_keep_returns(store: Counted) -> None:
    kept = snapshot(1)
    States(store, 10 * SIZE).keep(kept)
    assert States(store, 0).get(kept.id) == kept
    store.broken = True
    states = States(store, 10 * SIZE)
    with pytest.raises(OSError, match="broken"):
        states.keep(snapshot(2))
    assert states.nbytes == 0  # what is in memory only would be lost


def test_the_least_recently_used_leaves_memory(store: Counted) -> None:
    states = States(store, 3 * SIZE)
    for number in range(3):
        states.keep(snapshot(number))
    states.get(snapshot(0).id)
    states.keep(snapshot(3))
    store.calls.clear()
    for number in (0, 2, 3):
        states.get(snapshot(number).id)
    assert store.calls == []
    assert states.get(snapshot(1).id) == snapshot(1)
    assert store.calls == ["get"]
    assert states.nbytes == 3 * SIZE


def test_a_state_larger_than_the_memory_works(store: Counted) -> None:
    states = States(store, 3 * SIZE)
    states.keep(snapshot(0))
    large = snapshot(1, floats=4000)
    states.keep(large)
    assert states.get(large.id) == large
    assert states.nbytes == SIZE  # it pushed nothing out
    store.calls.clear()
    states.get(snapshot(0).id)
    assert store.calls == []


def test_the_memory_of_states_is_that_of_the_cache_and_of_a_store_in_memory() -> None:
    states = States(MemoryStore(None, None), 0)
    kept = snapshot(1)
    states.keep(kept)
    assert states.nbytes == 0
    assert states.memory == len(kept.to_bytes())


def test_states_without_tensors_do_not_pile_up(store: Counted) -> None:
    states = States(store, 10 * OVERHEAD)
    for number in range(100):
        states.keep(snapshot(number, floats=0))
    assert states.nbytes == 10 * OVERHEAD


@given(
    st.integers(0, 4 * SIZE),
    st.lists(st.tuples(st.sampled_from(["keep", "get", "delete"]), st.integers(0, 5), st.integers(0, 2000))),
)
def test_memory_changes_nothing_but_speed(memory: int, operations: list[tuple[str, int, int]]) -> None:
    states, expected = States(Counted(), memory), {}
    for operation, number, floats in operations:
        state = snapshot(number, floats)
        match operation:
            case "keep":
                expected[states.keep(state)] = state
            case "get" if state.id in expected:
                assert states.get(state.id) == state
            case "get":
                with pytest.raises(UnknownState):
                    states.get(state.id)
            case _:
                assert states.delete(state.id) == (expected.pop(state.id, None) is not None)
        assert 0 <= states.nbytes <= memory


def test_a_damaged_state_is_refused(store: Counted) -> None:
    content = bytearray(snapshot(0).to_bytes())
    content[-1] ^= 1
    store.put(snapshot(0).id, bytes(content))
    store.put(snapshot(1).id, snapshot(2).to_bytes())
    states = States(store, 10 * SIZE)
    with pytest.raises(ValueError, match=r"^the state is damaged"):
        states.get(snapshot(0).id)
    with pytest.raises(ValueError, match=r"^the state has the id"):
        states.get(snapshot(1).id)
    assert states.nbytes == 0
    states.keep(snapshot(0))  # mends it
    assert States(store, 0).get(snapshot(0).id) == snapshot(0)


def test_use_in_memory_counts_in_the_store(store: Counted, passed: list[float]) -> None:
    states, kept = States(store, 10 * SIZE), snapshot(0)
    states.keep(kept)
    store.calls.clear()
    for _ in range(10):
        passed[0] += RECENT / 5 + 0.1
        states.get(kept.id)
    assert store.calls == ["touch"] * 2


@pytest.mark.parametrize("seconds", [30.0, 90.0])
def test_a_state_in_use_is_not_dropped(seconds: float, passed: list[float]) -> None:
    store = MemoryStore(None, seconds + untold(seconds), now=lambda: module.time.monotonic())
    states, kept = States(store, 10 * SIZE, seconds), snapshot(0)
    states.keep(kept)
    for _ in range(20):
        passed[0] += 0.9 * untold(seconds)
        assert states.get(kept.id) == kept
        passed[0] += 0.99 * seconds
        assert states.get(kept.id) == kept
    passed[0] += 1.1 * seconds
    with pytest.raises(UnknownState):
        states.get(kept.id)


def test_a_state_that_another_process_deleted_leaves_memory(store: Counted, passed: list[float]) -> None:
    states, kept = States(store, 10 * SIZE), snapshot(0)
    states.keep(kept)
    store.delete(kept.id)
    passed[0] += RECENT + 1
    with pytest.raises(UnknownState):
        states.get(kept.id)
    assert states.nbytes == 0


def test_memory_serves_while_the_store_is_broken(store: Counted, passed: list[float]) -> None:
    states, kept = States(store, 10 * SIZE), snapshot(0)
    states.keep(kept)
    store.broken = True
    passed[0] += RECENT + 1
    assert states.get(kept.id) == kept
    with pytest.raises(OSError, match="broken"):
        states.get(snapshot(1).id)


def test_a_session_points_to_states_that_are_there(store: Counted) -> None:
    states = States(store, 0)
    one, other = (states.keep(snapshot(number)) for number in range(2))
    assert states.session("name") is None
    assert states.move("name", None, one)
    assert not states.move("name", None, other)
    assert states.move("name", one, other)
    assert states.session("name") == other
    with pytest.raises(UnknownState):
        states.move("name", other, snapshot(5).id)
    assert states.session("name") == other
    assert states.delete(one)
    with pytest.raises(UnknownState):
        states.move("name", other, one)
    assert states.move("name", other, None)
    assert states.session("name") is None


def test_many_threads_get_the_same_states(store: Counted) -> None:
    states, threads = States(store, 3 * SIZE), 6
    ids = [states.keep(snapshot(number)) for number in range(6)]
    start = threading.Barrier(threads)

    def work(me: int) -> None:
        start.wait(timeout=60)
        for turn in range(60):
            number = (me + turn * 5) % 6
            assert states.get(ids[number]).pending == number
            states.keep(snapshot(number))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert states.nbytes == 3 * SIZE


def test_wrong_values() -> None:
    with pytest.raises(ValueError, match=r"^memory_bytes must be at least 0, not -1$"):
        States(Counted(), -1)
    with pytest.raises(
        ValueError, match=r"^the id of a state must be 64 hex digits in lower case, not '../x'$"
    ):
        States(Counted(), 10).get("../x")
    with pytest.raises(ValueError, match=r"^the state has .* bytes, but the store keeps 10 at most$"):
        States(Counted(10), 10).keep(snapshot(0))


def test_close_closes_the_store(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(store, "close", lambda: closed.append(1))
    States(store, 0).close()
    assert closed == [1]
