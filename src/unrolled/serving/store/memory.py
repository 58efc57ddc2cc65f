"""States in the memory of this process, which are lost when it ends."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from unrolled.serving.store.checks import check_key, check_name, check_size, check_swap


class MemoryStore:
    """A store in memory, with the limits of `open_store`. For its methods, see `Store`.

    Args:
        state_bytes, ttl: as in `open_store`.
        now: a clock in seconds.
    """

    def __init__(
        self, state_bytes: int | None, ttl: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._seconds, self._now = state_bytes, ttl, now
        self._lock = threading.Lock()
        self._values: OrderedDict[str, bytes] = OrderedDict()  # the least recently used first
        self._used: dict[str, float] = {}
        self._sessions: dict[str, str] = {}
        self._bytes = 0

    def get(self, key: str) -> bytes | None:
        """See `Store.get`."""
        check_key(key)
        with self._lock:
            return self._values[key] if self._use(key) else None

    def put(self, key: str, value: bytes) -> None:
        """See `Store.put`."""
        check_key(key)
        if self._most is not None:
            check_size(value, self._most)
        with self._lock:
            self._drop(key)
            self._values[key], self._used[key] = value, self._now()
            self._bytes += len(value)
            self._make_room(key)

    def touch(self, key: str) -> bool:
        """See `Store.touch`."""
        check_key(key)
        with self._lock:
            return self._use(key)

    def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        check_key(key)
        with self._lock:
            return self._drop(key)

    def pointer(self, name: str) -> str | None:
        """See `Store.pointer`."""
        check_name(name)
        with self._lock:
            return self._pointer(name)

    def swap(self, name: str, expected: str | None, new: str | None) -> bool:
        """See `Store.swap`."""
        check_swap(name, expected, new)
        with self._lock:
            if self._pointer(name) != expected:
                return False
            if new is None:
                self._sessions.pop(name, None)
            else:
                self._sessions[name] = new
            return True

    def close(self) -> None:
        """See `Store.close`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of all values."""
        return self._bytes

    def _pointer(self, name: str) -> str | None:
        key = self._sessions.get(name)
        return None if key is None or (key in self._values and self._too_old(key)) else key

    def _use(self, key: str) -> bool:
        """Return whether there is a value, and note that it is used now."""
        if key not in self._values or self._too_old(key):
            return False
        self._values.move_to_end(key)
        self._used[key] = self._now()
        return True

    def _too_old(self, key: str) -> bool:
        return self._seconds is not None and self._used[key] < self._now() - self._seconds

    def _drop(self, key: str) -> bool:
        if key not in self._values:
            return False
        there = not self._too_old(key)
        self._bytes -= len(self._values.pop(key))
        del self._used[key]
        return there

    def _make_room(self, newest: str) -> None:
        while self._too_old(oldest := next(iter(self._values))):
            self._drop(oldest)
            self._sessions = {name: key for name, key in self._sessions.items() if key != oldest}
        while self._most is not None and self._bytes > self._most:
            pointed = set(self._sessions.values())
            others = [key for key in self._values if key != newest]
            self._drop(next((key for key in others if key not in pointed), others[0]))
