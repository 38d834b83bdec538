"""The ledger's store: one SQLite file per user, append-only, one hash chain over everything.

Several processes write at once (each supervisor, the command line, the server). Each append is one
`BEGIN IMMEDIATE` transaction, so sequence numbers have no gaps and the chain has one order. A store that
cannot be written raises; nothing is lost in silence.

Source: SQLite WAL documentation (https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from typing import Any, TypeVar

import msgspec

from ..errors import GloveboxError
from .events import Event, UsageRecord, escape

SCHEMA = 1
_BUSY_SECONDS = 30.0
_START = "0" * 64
_Shape = TypeVar("_Shape")
_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, kernel_id TEXT NOT NULL,
    notebook TEXT, body TEXT NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS entries_kernel ON entries (kernel_id, kind);
CREATE INDEX IF NOT EXISTS entries_kind ON entries (kind);
CREATE TRIGGER IF NOT EXISTS entries_stay BEFORE UPDATE ON entries
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER IF NOT EXISTS entries_remain BEFORE DELETE ON entries
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""


class LedgerError(GloveboxError):
    """The ledger cannot be read or written."""


def _hash(
    previous: str, seq: int, when: float, kind: str, kernel_id: str, notebook: str | None, body: str
) -> str:
    text = msgspec.json.encode([previous, seq, when, kind, kernel_id, notebook, body])
    return hashlib.sha256(text).hexdigest()


class Ledger:
    """An open ledger. Safe to use from several threads; not across fork (open a new one).

    Args:
        path: the database file; made with mode 0600 when missing.

    Raises:
        LedgerError: it cannot be opened, is damaged, or comes from a newer version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        try:
            # Made here, so that it is private from its first moment.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise self._error(error) from error
        try:
            self._prepare()
        except (sqlite3.Error, LedgerError) as error:
            self._db.close()
            raise (error if isinstance(error, LedgerError) else self._error(error)) from error

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.execute("BEGIN IMMEDIATE")
            for statement in _statements():
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA}")
            self._db.execute("COMMIT")
        elif version > SCHEMA:
            raise LedgerError(
                f"The ledger {self.path} was written by a newer version (schema {version}).",
                "Update jupyter-glovebox, or move the file away to start a new ledger.",
            )

    def _error(self, error: Exception) -> LedgerError:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError) and "full" in text:
            remedy = "Free space on its file system."
        elif isinstance(error, OSError) or "readonly" in text or "unable to open" in text:
            remedy = "Check the owner and the rights of the file and of its folder."
        elif "locked" in text:
            remedy = "Another process holds it; end that process, then try again."
        else:
            remedy = "Move the file away to keep it as evidence; a new one is made at the next start."
        return LedgerError(f"The ledger {self.path} cannot be used: {text}.", remedy)

    # -- writing --------------------------------------------------------------------------------

    def add_event(self, event: Event) -> Event:
        """Append an event; the same event with its sequence number.

        Raises:
            LedgerError: it could not be stored.
        """
        body = msgspec.json.encode(event, order="deterministic").decode()
        seq = self._append("event", event.kernel_id, event.notebook, body, event.time)
        return msgspec.structs.replace(event, seq=seq)

    def add_usage(self, record: UsageRecord) -> int:
        """Append a usage record; its sequence number. Raises LedgerError."""
        body = msgspec.json.encode(record, order="deterministic").decode()
        return self._append("usage", record.kernel_id, record.notebook, body, record.ended)

    def add(self, kind: str, kernel_id: str, body: dict[str, Any], *, notebook: str | None = None) -> int:
        """Append any other entry (`approval`, `revocation`, `promotion`, …); its sequence number.

        Raises:
            LedgerError: it could not be stored.
            ValueError: `kind` is one that has a shape of its own.
        """
        if kind in ("event", "usage"):
            raise ValueError(f"use add_{kind}")
        text = msgspec.json.encode(body, order="deterministic").decode()
        return self._append(kind, kernel_id, notebook, text, time.time())

    def _append(self, kind: str, kernel_id: str, notebook: str | None, body: str, when: float) -> int:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    last = self._db.execute(
                        "SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1"
                    ).fetchone()
                    seq, previous = (last[0] + 1, last[1]) if last else (1, _START)
                    digest = _hash(previous, seq, when, kind, kernel_id, notebook, body)
                    self._db.execute(
                        "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (seq, when, kind, kernel_id, notebook, body, previous, digest),
                    )
                    self._db.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._error(error) from error
        return int(seq)

    # -- reading --------------------------------------------------------------------------------

    def _select(
        self, kind: str, since: int, kernel_id: str | None, notebook: str | None, limit: int
    ) -> list[tuple[int, str]]:
        query, values = "SELECT seq, body FROM entries WHERE kind = ? AND seq > ?", [kind, since]
        if kernel_id is not None:
            query, values = query + " AND kernel_id = ?", [*values, kernel_id]
        if notebook is not None:
            query, values = query + " AND notebook = ?", [*values, notebook]
        with self._lock:
            try:
                rows = self._db.execute(query + " ORDER BY seq LIMIT ?", [*values, limit]).fetchall()
            except sqlite3.Error as error:
                raise self._error(error) from error
        return [(int(seq), str(body)) for seq, body in rows]

    def _decode(self, seq: int, body: str, shape: type[_Shape]) -> _Shape:
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.DecodeError as error:
            raise LedgerError(
                f"Entry {seq} of the ledger {self.path} cannot be read: {escape(str(error))}.",
                "See whether it was changed: jupyter glovebox events --verify",
            ) from error

    def events(
        self,
        since: int = 0,
        kernel_id: str | None = None,
        notebook: str | None = None,
        limit: int = 1000,
    ) -> tuple[list[Event], int]:
        """Events with a sequence number above `since`, oldest first, and the number to go on from."""
        rows = self._select("event", since, kernel_id, notebook, limit)
        events = [msgspec.structs.replace(self._decode(seq, body, Event), seq=seq) for seq, body in rows]
        return events, rows[-1][0] if rows else since

    def usage(
        self, since: int = 0, kernel_id: str | None = None, notebook: str | None = None, limit: int = 1000
    ) -> list[UsageRecord]:
        """Usage records, oldest first."""
        rows = self._select("usage", since, kernel_id, notebook, limit)
        return [self._decode(seq, body, UsageRecord) for seq, body in rows]

    def records(
        self, kind: str, kernel_id: str | None = None, notebook: str | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Entries of any other kind, oldest first, each with its `seq`."""
        rows = self._select(kind, 0, kernel_id, notebook, limit)
        return [self._decode(seq, body, dict[str, Any]) | {"seq": seq} for seq, body in rows]

    def verify_chain(self) -> int | None:
        """None when the chain is whole, else the first sequence number that does not fit."""
        previous, expected = _START, 1
        with self._lock:
            try:
                rows = self._db.execute(
                    "SELECT seq, time, kind, kernel_id, notebook, body, previous, hash FROM entries ORDER BY seq"
                )
                for seq, when, kind, kernel_id, notebook, body, before, digest in rows:
                    fits = seq == expected and before == previous
                    if not fits or digest != _hash(previous, seq, when, kind, kernel_id, notebook, body):
                        return int(expected)
                    previous, expected = digest, expected + 1
            except sqlite3.Error as error:
                raise self._error(error) from error
        return None

    def close(self) -> None:
        """Close the database; idempotent."""
        with self._lock:
            self._db.close()


def _statements() -> list[str]:
    """The schema's statements, one by one (executescript would end our transaction)."""
    statements, current = [], ""
    for line in _TABLES.strip().splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
