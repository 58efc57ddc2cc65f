"""Stores for the states of sequences: values by ids, and sessions, which are names that point to ids."""

from pathlib import Path
from typing import Protocol


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
            ValueError: the value is larger than the limit of the store.
        """

    def touch(self, key: str) -> bool:
        """Return whether there is a value, without reading the value. This counts as use."""

    def delete(self, key: str) -> bool:
        """Delete a value and return whether there was one. Sessions that point to it are left as they are."""

    def pointer(self, name: str) -> str | None:
        """Return the key that a session points to, or None if there is no such session."""

    def swap(self, name: str, expected: str | None, new: str | None) -> bool:
        """Point a session to `new` if it points to `expected`, and return whether it did.

        None stands for no session: the session is made if `expected` is None, and ended if `new` is None. The
        method does not check whether there is a value for `new`.
        """

    def close(self) -> None:
        """Close connections and files. No other method may be called afterwards."""


def open_store(url: str, *, most_bytes: int | None = None, seconds: float | None = None) -> Store:
    """Open the store at an address.

    Args:
        url: "memory:", which ends with the process; the path of a SQLite file, or "sqlite:PATH";
            "s3://BUCKET/PREFIX" or "gs://BUCKET/PREFIX", with credentials from the environment;
            "file:///FOLDER"; or "redis://HOST:PORT/DB" (with TLS: "rediss://").
        most_bytes: maximum number of bytes of all values; beyond it, the least recently used values are
            dropped. For stores in memory and SQLite; None is no limit.
        seconds: a value that is not used for this time is dropped. For stores in memory, SQLite and Redis;
            None is no limit.

    Raises:
        ValueError: the address, `most_bytes` or `seconds` is wrong, or the file is not a store.
        OSError: the store cannot be reached, read or written.
        ImportError: the store needs a library that is missing.
    """
    if most_bytes is not None and most_bytes < 1:
        raise ValueError(f"most_bytes must be at least 1, not {most_bytes}")
    if seconds is not None and not 0.001 <= seconds <= 1e9:
        raise ValueError(f"seconds must be from 0.001 to 1e9, not {seconds}")
    scheme, colon, rest = url.partition(":")
    if scheme == "memory" and colon:
        if rest:
            raise ValueError(f"the address of a store in memory is memory:, not {url!r}")
        from unrolled.serving.store.memory import MemoryStore

        return MemoryStore(most_bytes, seconds)
    if scheme in ("redis", "rediss"):
        if most_bytes is not None:
            raise ValueError("most_bytes is for SQLite; for Redis, set its own maxmemory")
        from unrolled.serving.store.redis import RedisStore

        return RedisStore(url, seconds)
    if scheme in ("s3", "gs", "file"):
        if most_bytes is not None or seconds is not None:
            raise ValueError(
                "most_bytes and seconds are for SQLite; for objects, set a lifecycle rule of the bucket"
            )
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

    return SqliteStore(Path(path), most_bytes, seconds)
