"""States of sequences: all of them in a store, and the most recently used ones also in memory."""

import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

from unrolled.serving.snapshot import Snapshot
from unrolled.serving.store import Store
from unrolled.serving.store.memory import MemoryStore

RECENT = 60.0  # maximum seconds for which a state in memory is assumed to be still in the store

OVERHEAD = 1024  # bytes of a state besides its tensors, so that states without tensors count too


class UnknownState(LookupError):  # noqa: N818 - it is an answer, with the name that it has in the API
    """There is no state with this id: it was dropped, deleted or never kept."""

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no state with the id {id}")


class _Held(NamedTuple):
    snapshot: Snapshot
    seen: float  # when the state was last known to be in the store


def untold(seconds: float) -> float:
    """Return for how long the store is not told of uses of a state in memory, if it drops unused states."""
    return min(RECENT, seconds / 20)


class States:
    """A store of states with a cache in memory. Any number of threads may use it.

    A state that another process deletes is served from memory for up to one more minute, or for a 20th of
    `seconds` if this is shorter.

    Args:
        store: the store.
        memory_bytes: maximum `nbytes` of the cache. Beyond it, the least recently used states are dropped
            from memory; a state that is larger than it is read from the store each time.
        seconds: the time without use after which a state may be dropped, if there is one. The store should
            wait for `untold(seconds)` more.

    Raises:
        ValueError: memory_bytes below 0.
    """

    def __init__(self, store: Store, memory_bytes: int, seconds: float | None = None) -> None:
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes must be at least 0, not {memory_bytes}")
        self._store, self._most = store, memory_bytes
        self._recent = RECENT if seconds is None else untold(seconds)
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()  # the least recently used first
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes of the cache, with 1,024 bytes for each state besides its tensors."""
        return self._bytes

    @property
    def memory(self) -> int:
        """Size in bytes of all states in the memory of this process, also of those of a store in memory."""
        return self._bytes + (self._store.nbytes if isinstance(self._store, MemoryStore) else 0)

    def keep(self, snapshot: Snapshot) -> str:
        """Keep a state and return its id. The state is in the store when this method returns.

        Raises:
            StateTooLargeError: the state is larger than the limit of the store.
            OSError: the store cannot be written.
        """
        self._store.put(snapshot.id, snapshot.to_bytes())
        self._hold(snapshot)
        return snapshot.id

    def get(self, id: str) -> Snapshot:
        """Return a state. This counts as use, also in the store.

        Raises:
            UnknownState: there is no state with this id.
            ValueError: `id` is not 64 hex digits, or the state in the store is damaged.
            OSError: the store cannot be read.
        """
        with self._lock:
            held = self._held.get(id)
            if held is not None:
                self._held.move_to_end(id)
        if held is not None:
            self._check_store(held)
            return held.snapshot
        content = self._store.get(id)
        if content is None:
            raise UnknownState(id)
        snapshot = Snapshot.of_bytes(content, id)
        self._hold(snapshot)
        return snapshot

    def __contains__(self, id: str) -> bool:
        """Return whether the store has a state, without reading the state."""
        return self._store.touch(id)

    def delete(self, id: str) -> bool:
        """Delete a state and return whether there was one."""
        deleted = self._store.delete(id)
        self._forget(id)
        return deleted

    def session(self, name: str) -> str | None:
        """Return the id that a session points to, or None if there is no such session."""
        return self._store.pointer(name)

    def move(self, name: str, expected: str | None, new: str | None) -> bool:
        """Point a session to `new` if it points to `expected`, and return whether it did.

        None stands for no session, as in `Store.swap`.

        Raises:
            UnknownState: there is no state with the id `new`.
        """
        if new is not None and new not in self:
            raise UnknownState(new)
        return self._store.swap(name, expected, new)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _check_store(self, held: _Held) -> None:
        """Now and then, tell the store that a state in memory is in use, and check that it still exists."""
        if time.monotonic() - held.seen < self._recent:
            return
        with suppress(OSError):  # while the store cannot be reached, states in memory are served
            if not self._store.touch(held.snapshot.id):
                self._forget(held.snapshot.id)
                raise UnknownState(held.snapshot.id)
            self._hold(held.snapshot)

    def _hold(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._remove(snapshot.id)
            if _size(snapshot) > self._most:
                return
            self._held[snapshot.id] = _Held(snapshot, time.monotonic())
            self._bytes += _size(snapshot)
            while self._bytes > self._most:
                self._remove(next(iter(self._held)))

    def _forget(self, id: str) -> None:
        with self._lock:
            self._remove(id)

    def _remove(self, id: str) -> None:
        held = self._held.pop(id, None)
        if held is not None:
            self._bytes -= _size(held.snapshot)


def _size(snapshot: Snapshot) -> int:
    return snapshot.nbytes + OVERHEAD
