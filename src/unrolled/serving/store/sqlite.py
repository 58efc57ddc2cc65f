"""States in a SQLite file, which any number of processes of one machine may use at once.

A process that is killed loses no value whose `put` has returned. A power cut can lose only the last commits:
SQLite writes ahead (WAL), and waits for the disk only at its checkpoints (`synchronous = NORMAL`).
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unrolled.serving.store.checks import check_key, check_name, check_size, check_swap

APPLICATION = 0x756E726C  # "unrl": marks the file as a store of this library
VERSION = 1
WAIT = 10.0  # seconds for other processes that write
LARGEST = 10**9 - 1000  # maximum number of bytes of a value: the limit of a row in SQLite is 10^9
WAL_LEFT = 64 * 2**20  # bytes to which the write-ahead log is cut after a larger write
STALE = 60.0  # seconds: a use is noted only if the last noted use is older
MOST_DROPPED = 64  # maximum number of rows that one `put` drops, so that it does not take long

# `pointed` is 1 if a session points to the state. `value` is last, so that other columns are read without it.
SCHEMA = f"""
CREATE TABLE states(
    key TEXT PRIMARY KEY, used REAL NOT NULL, pointed INTEGER NOT NULL, bytes INTEGER NOT NULL,
    value BLOB NOT NULL
);
CREATE INDEX states_in_order_of_dropping ON states(pointed, used);
CREATE TABLE sessions(name TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX sessions_by_key ON sessions(key);
CREATE TABLE total(bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER state_added AFTER INSERT ON states BEGIN
    UPDATE total SET bytes = bytes + new.bytes;
END;
CREATE TRIGGER state_replaced AFTER UPDATE OF bytes ON states BEGIN
    UPDATE total SET bytes = bytes + new.bytes - old.bytes;
END;
CREATE TRIGGER state_deleted AFTER DELETE ON states BEGIN
    UPDATE total SET bytes = bytes - old.bytes;
END;
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    UPDATE states SET pointed = 1 WHERE key = new.key;
END;
CREATE TRIGGER session_deleted AFTER DELETE ON sessions BEGIN
    UPDATE states SET pointed = EXISTS (SELECT 1 FROM sessions WHERE key = old.key) WHERE key = old.key;
END;
PRAGMA user_version = {VERSION};
PRAGMA application_id = {APPLICATION};
"""
PUT = """
INSERT INTO states(key, used, pointed, bytes, value)
VALUES (:key, :now, EXISTS (SELECT 1 FROM sessions WHERE key = :key), :bytes, :value)
ON CONFLICT(key) DO UPDATE SET used = excluded.used, bytes = excluded.bytes, value = excluded.value
"""
POINTER = "SELECT sessions.key, used FROM sessions LEFT JOIN states USING (key) WHERE name = ?"
TOO_OLD = "SELECT key FROM states WHERE pointed IN (0, 1) AND used < ? LIMIT ?"
IN_ORDER = "SELECT key, bytes FROM states WHERE key != ? ORDER BY pointed, used LIMIT ?"


class SqliteStore:
    """A store in a SQLite file. For its methods, see `Store`.

    Values that no session points to are dropped before values that a session points to, and the least
    recently used before others. One `put` drops at most 64 values, so after a large value, the file may be
    above `state_bytes` for a while. The file never shrinks: the space of dropped values is used again. The
    use of a value is noted at most once a minute, or 20 times in `ttl`, so a value may stay that much longer.

    Args:
        path: the file, which is made if needed, in a folder that exists.
        state_bytes, ttl: as in `open_store`.
        now: a clock in seconds that all processes share.

    Raises:
        ValueError: the file is not a database, or is a database of another program.
        OSError: the file cannot be made, read or written.
    """

    def __init__(
        self,
        path: Path,
        state_bytes: int | None = None,
        ttl: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._most, self._seconds, self._now = path, state_bytes, ttl, now
        self._stale = STALE if ttl is None else min(STALE, ttl / 20)
        self._lock = (
            threading.Lock()
        )  # one connection for all threads: its calls take less than a millisecond
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path} cannot be made: there is no folder {path.parent}")
        with self._errors():
            self._db = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException as error:
                self._db.close()
                damaged = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
                if isinstance(error, sqlite3.Error) and _code(error) in damaged:
                    raise ValueError(f"{path} is not a database, or a damaged one: {error}") from error
                raise

    def get(self, key: str) -> bytes | None:
        """See `Store.get`."""
        check_key(key)
        now = self._now()
        with self._using():
            row = self._db.execute("SELECT value, used FROM states WHERE key = ?", (key,)).fetchone()
            if row is None or row[1] < self._oldest(now):
                return None
            value: bytes = row[0]
            self._note_use(key, row[1], now)
            return value

    def put(self, key: str, value: bytes) -> None:
        """See `Store.put`."""
        check_key(key)
        check_size(value, LARGEST if self._most is None else min(LARGEST, self._most))
        now = self._now()
        with self._using(), self._transaction():
            self._db.execute(PUT, {"key": key, "now": now, "bytes": len(value), "value": value})
            self._drop_old(now)
            self._drop_above_budget(key)

    def touch(self, key: str) -> bool:
        """See `Store.touch`."""
        check_key(key)
        now = self._now()
        with self._using():
            row = self._db.execute("SELECT used FROM states WHERE key = ?", (key,)).fetchone()
            if row is None or row[0] < self._oldest(now):
                return False
            self._note_use(key, row[0], now)
            return True

    def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        check_key(key)
        oldest = self._oldest(self._now())
        with self._using():
            deleted = self._db.execute("DELETE FROM states WHERE key = ? RETURNING used", (key,)).fetchall()
            return any(used >= oldest for (used,) in deleted)

    def pointer(self, name: str) -> str | None:
        """See `Store.pointer`."""
        check_name(name)
        with self._using():
            return self._pointer(name)

    def swap(self, name: str, expected: str | None, new: str | None) -> bool:
        """See `Store.swap`."""
        check_swap(name, expected, new)
        with self._using(), self._transaction():
            if self._pointer(name) != expected:
                return False
            if new != expected:
                self._db.execute("DELETE FROM sessions WHERE name = ?", (name,))
                if new is not None:
                    self._db.execute("INSERT INTO sessions VALUES (?, ?)", (name, new))
            return True

    def close(self) -> None:
        """See `Store.close`."""
        with self._using():
            self._db.close()

    def _prepare(self) -> None:
        """Make the tables, or check that the existing tables are those of a store."""
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_LEFT}")
        with self._transaction():
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if (application, version) != (APPLICATION, VERSION):
                if application or version or tables:
                    raise ValueError(f"{self._path} is a database, but not one of states of this version")
                for statement in _statements(SCHEMA):
                    self._db.execute(statement)
        self._write_ahead()

    def _write_ahead(self) -> None:
        """Set the mode; retry while another process does so too, since SQLite does not wait in this case."""
        until = time.monotonic() + WAIT
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock, self._errors():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise OSError(f"the states in {self._path} cannot be read or written: {error}") from error

    def _pointer(self, name: str) -> str | None:
        row = self._db.execute(POINTER, (name,)).fetchone()
        if row is None or (row[1] is not None and row[1] < self._oldest(self._now())):
            return None
        key: str = row[0]
        return key

    def _oldest(self, now: float) -> float:
        """Return the earliest noted use that a value may have without being dropped."""
        return float("-inf") if self._seconds is None else now - self._seconds - self._stale

    def _note_use(self, key: str, used: float, now: float) -> None:
        if used < now - self._stale:
            # If the disk is full or another process writes for long, the value can still be read.
            with suppress(sqlite3.OperationalError):
                self._db.execute("UPDATE states SET used = ? WHERE key = ?", (now, key))

    def _drop_old(self, now: float) -> None:
        """Drop values that were not used for `ttl`, and the sessions that point to them."""
        if self._seconds is None:
            return
        old = self._db.execute(TOO_OLD, (self._oldest(now), MOST_DROPPED)).fetchall()
        self._db.executemany("DELETE FROM states WHERE key = ?", old)
        self._db.executemany("DELETE FROM sessions WHERE key = ?", old)

    def _drop_above_budget(self, newest: str) -> None:
        (total,) = self._db.execute("SELECT bytes FROM total").fetchone()
        if self._most is None or total <= self._most:
            return
        dropped = []
        for key, size in self._db.execute(IN_ORDER, (newest, MOST_DROPPED)).fetchall():
            if total <= self._most:
                break
            dropped.append((key,))
            total -= size
        self._db.executemany("DELETE FROM states WHERE key = ?", dropped)


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements, since `executescript` would end the transaction."""
    part = ""
    for piece in script.split(";"):
        part += piece + ";"
        if sqlite3.complete_statement(part):
            yield part
            part = ""


def _code(error: sqlite3.Error) -> int | None:
    """Return the primary code of an error of SQLite; None if there is no code, as for a closed database."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
