"""States in Redis, for sessions that many machines share.

A value is at `unrolled:state:ID`, and a session at `unrolled:session:` and the SHA-256 of its name. Settings
of Redis decide what survives a restart (`appendonly`) and what is dropped when memory is short (`maxmemory`).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from unrolled.extras import how_to_install
from unrolled.serving.store.checks import check_key, check_name, check_size, check_swap

TIMEOUT = 10.0  # seconds
LARGEST = 512 * 2**20  # bytes of a value in Redis
# KEYS: the session. ARGV: the key that it must point to, the new key, its time to live in ms; "" is none.
SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('DEL', KEYS[1])
elseif ARGV[3] == '' then redis.call('SET', KEYS[1], ARGV[2])
else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return 1
"""


class RedisStore:
    """A store in Redis. For its methods, see `Store`.

    Args:
        url: "redis://HOST:PORT/DB", with "USER:PASSWORD@" before the host if Redis requires them.
        ttl: as in `open_store`; a session that is not used for this time is dropped too.

    Raises:
        ValueError: the address is wrong.
        OSError: Redis cannot be reached.
        ImportError: the library redis is missing.
    """

    def __init__(self, url: str, ttl: float | None = None) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(f"a store in Redis needs redis: {how_to_install('store')}") from error
        self._error: Any = redis.RedisError
        self._milliseconds = None if ttl is None else max(1, round(1000 * ttl))
        try:
            address = urlsplit(url)
            self._place = f"{address.hostname}:{address.port or 6379}"  # without a password
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT,
                socket_connect_timeout=TIMEOUT,
                retry=Retry(NoBackoff(), 0),  # a swap that was done would fail if it were repeated
            )
        except ValueError as error:
            raise ValueError(f"a store in Redis is redis://HOST:PORT/DB: {error}") from error
        self._swap: Any = self._client.register_script(SWAP)
        with self._errors():
            self._client.ping()

    def get(self, key: str) -> bytes | None:
        """See `Store.get`."""
        place = _state(key)
        with self._errors():
            value: bytes | None = self._client.getex(place, px=self._milliseconds)
            return value

    def put(self, key: str, value: bytes) -> None:
        """See `Store.put`."""
        place = _state(key)
        check_size(value, LARGEST)
        with self._errors():
            self._client.set(place, value, px=self._milliseconds)

    def touch(self, key: str) -> bool:
        """See `Store.touch`."""
        place = _state(key)
        with self._errors():
            if self._milliseconds is None:
                return bool(self._client.exists(place))
            return bool(self._client.pexpire(place, self._milliseconds))

    def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        place = _state(key)
        with self._errors():
            return bool(self._client.delete(place))

    def pointer(self, name: str) -> str | None:
        """See `Store.pointer`."""
        check_name(name)
        with self._errors():
            found: bytes | None = self._client.getex(_session(name), px=self._milliseconds)
            return None if found is None else found.decode()

    def swap(self, name: str, expected: str | None, new: str | None) -> bool:
        """See `Store.swap`."""
        check_swap(name, expected, new)
        arguments = [expected or "", new or "", self._milliseconds or ""]
        with self._errors():
            return bool(self._swap(keys=[_session(name)], args=arguments))

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise OSError(
                f"the states in Redis at {self._place} cannot be read or written: {error}"
            ) from error


def _state(key: str) -> str:
    check_key(key)
    return f"unrolled:state:{key}"


def _session(name: str) -> str:
    return f"unrolled:session:{hashlib.sha256(name.encode()).hexdigest()}"
