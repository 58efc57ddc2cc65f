"""Stores for the states of sequences: values by ids, and sessions, which are names that point to ids."""

from pathlib import Path
from typing import Protocol

from unrolled.serving.store.checks import StateTooLargeError as StateTooLargeError


class Store(Protocol):
    """Values by key, and sessions that point to keys. Any number of threads may use a store.

    A key is 64 hex digits in lower case. The name of a session is 1 to 512 bytes of text. All methods raise
    ValueError for any other key or name, and OSError if the store cannot be reached, read or written.
    """

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if there is none. Reading counts as use."""

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, in place of an older one. The value is stored when this method returns.

        Raises:
            StateTooLargeError: the value is larger than the limit of the store.
        """

    def touch(self, key: str) -> bool:
        """Return whether there is a value, without reading the value. This counts as use."""

    def delete(self, key: str) -> bool:
        """Delete a value and return whether there was one. Sessions that point to it are left as they are."""

    def pointer(self, name: str) -> str | None:
        """Return the key that a session points to, or None if there is no such session.

        A session whose value was not used for too long is as good as none, here and in `swap`.
        """

    def swap(self, name: str, expected: str | None, new: str | None) -> bool:
        """Point a session to `new` if it points to `expected`, and return whether it did.

        None stands for no session: the session is made if `expected` is None, and ended if `new` is None. The
        method does not check whether there is a value for `new`.
        """

    def close(self) -> None:
        """Close connections and files. No other method may be called afterwards."""


def open_store(url: str, *, state_bytes: int | None = None, ttl: float | None = None) -> Store:
    """Open the store at an address.

    Args:
        url: "memory:", which ends with the process; the path of a SQLite file, or "sqlite:PATH";
            "s3://BUCKET/PREFIX" or "gs://BUCKET/PREFIX", with credentials from the environment;
            "file:///FOLDER"; or "redis://HOST:PORT/DB" (with TLS: "rediss://").
        state_bytes: maximum number of bytes of all values; beyond it, the least recently used values are
            dropped. For stores in memory and SQLite; None for no limit.
        ttl: a value that is not used for this number of seconds is dropped. For stores in memory, SQLite and
            Redis; None for no limit.

    Raises:
        ValueError: the address, `state_bytes` or `ttl` is wrong, or the file is not a store.
        OSError: the store cannot be reached, read or written.
        ImportError: the store needs a library that is missing.
    """
    if state_bytes is not None and state_bytes < 1:
        raise ValueError(f"state_bytes must be at least 1, not {state_bytes}")
    if ttl is not None and not 0.001 <= ttl <= 1e9:
        raise ValueError(f"ttl must be from 0.001 to 1e9 seconds, not {ttl}")
    scheme, colon, rest = url.partition(":")
    if scheme == "memory" and colon:
        if rest:
            raise ValueError(f"the address of a store in memory is memory:, not {url!r}")
        from unrolled.serving.store.memory import MemoryStore

        return MemoryStore(state_bytes, ttl)
    if scheme in ("redis", "rediss"):
        if state_bytes is not None:
            raise ValueError("state_bytes is for SQLite and memory; for Redis, set its own maxmemory")
        from unrolled.serving.store.redis import RedisStore

        return RedisStore(url, ttl)
    if scheme in ("s3", "gs", "file"):
        if state_bytes is not None or ttl is not None:
            given = "ttl" if state_bytes is None else "state_bytes"
            raise ValueError(f"{given} is not for object storage: set a lifecycle rule of the bucket")
        from unrolled.serving.store.objects import ObjectStore

        return ObjectStore(url)
    if "://" in url:
        raise ValueError(
            f"a store is memory:, a path, sqlite:PATH, s3://, gs://, file:// or redis://, not {scheme}://"
        )
    path = rest if scheme == "sqlite" and colon else url
    if not path:
        raise ValueError("the address of a store must not be empty")
    from unrolled.serving.store.sqlite import SqliteStore

    return SqliteStore(Path(path), state_bytes, ttl)
