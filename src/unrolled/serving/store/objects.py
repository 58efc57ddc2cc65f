"""States as objects in a bucket of S3 or Google Cloud Storage, or as files in a folder.

A value is at `states/ab/abcdef...`. A session is at `sessions/<SHA-256 of its name>`, as JSON with "name" and
"state". After the session was ended, "state" is null, because objects can be written conditionally but not
deleted conditionally. A lifecycle rule of the bucket decides how long values are kept.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from unrolled.contract import UnsupportedError
from unrolled.extras import how_to_install
from unrolled.serving.store.checks import check_key, check_name, check_swap

RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}


class _Session(NamedTuple):
    """A session as it was read: the state that it points to, and the version of the object."""

    state: str | None
    version: dict[str, Any] | None  # None: there is no object


class ObjectStore:
    """A store of objects. For its methods, see `Store`.

    A folder of files has no conditional updates: sessions can be made there, but neither moved nor ended.

    Args:
        url: "s3://BUCKET/PREFIX", "gs://BUCKET/PREFIX" or "file:///FOLDER"; a folder is made if needed.

    Raises:
        ValueError: the address is wrong.
        OSError: the bucket cannot be reached.
        ImportError: the library obstore is missing.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ImportError(f"a store of objects needs obstore: {how_to_install('store')}") from error
        self._objects: Any = obstore
        self._url = url
        with self._errors():
            options: dict[str, Any] = {"retry_config": RETRIES}
            self._store: Any = from_url(url, **({"mkdir": True} if url.startswith("file:") else options))
            self._read("states/none")  # fails at once if the address or the credentials are wrong

    def get(self, key: str) -> bytes | None:
        """See `Store.get`."""
        path = _path(key)
        with self._errors():
            found = self._read(path)
            return None if found is None else bytes(found.bytes())

    def put(self, key: str, value: bytes) -> None:
        """See `Store.put`."""
        path = _path(key)
        with self._errors():
            self._objects.put(self._store, path, value)

    def touch(self, key: str) -> bool:
        """See `Store.touch`."""
        path = _path(key)
        with self._errors():
            return self._there(path)

    def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        path = _path(key)
        with self._errors():
            if not self._there(path):
                return False
            try:
                self._objects.delete(self._store, path)
            except FileNotFoundError:
                return False
            return True

    def pointer(self, name: str) -> str | None:
        """See `Store.pointer`."""
        check_name(name)
        with self._errors():
            return self._session(name).state

    def swap(self, name: str, expected: str | None, new: str | None) -> bool:
        """See `Store.swap`."""
        check_swap(name, expected, new)
        with self._errors():
            found = self._session(name)
            if found.state != expected:
                return False
            if new == expected:
                return True
            content = json.dumps({"name": name, "state": new}).encode()
            errors = self._objects.exceptions
            try:
                self._objects.put(self._store, _session_path(name), content, mode=found.version or "create")
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return False
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"{self._url} has no conditional update, so a session cannot be moved there: "
                    "keep the states in a SQLite file, S3 or Redis"
                ) from error
            return True

    def close(self) -> None:
        """See `Store.close`."""

    def _read(self, path: str) -> Any:
        try:
            return self._objects.get(self._store, path)
        except FileNotFoundError:
            return None

    def _there(self, path: str) -> bool:
        try:
            self._objects.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def _session(self, name: str) -> _Session:
        found = self._read(_session_path(name))
        if found is None:
            return _Session(None, None)
        version = {key: x for key in ("e_tag", "version") if (x := found.meta[key]) is not None}
        try:
            state = json.loads(bytes(found.bytes()))["state"]
            if state is not None:
                check_key(state)
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(f"the session {name!r} is damaged") from error
        return _Session(state, version)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self._objects.exceptions.BaseError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise OSError(f"the states in {self._url} cannot be read or written: {reason}") from error


def _path(key: str) -> str:
    check_key(key)
    return f"states/{key[:2]}/{key}"


def _session_path(name: str) -> str:
    return f"sessions/{hashlib.sha256(name.encode()).hexdigest()}"
