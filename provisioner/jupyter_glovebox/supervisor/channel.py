"""The control socket between a manager and its supervisor: lines of JSON over a Unix stream socket.

Neither side may ever block the other: a manager that does not read for hours (a blocking
KernelManager between calls) must not stop the supervisor, so notices are dropped when the socket is
full (the ledger has them), and everything else waits in a bounded buffer.
"""

from __future__ import annotations

import os
import select
import threading
import time

import msgspec

CONTROL_FD = 3
"""The supervisor's end of the control socket."""
_MAX_BUFFER = 4 << 20


class Lines:
    """Splits a byte stream into lines; the last, incomplete one is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The complete lines that `data` finishes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def read_available(fd: int) -> tuple[bytes, bool]:
    """Everything that can be read now from a non-blocking descriptor, and whether the end was met."""
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return b"".join(chunks), False
        except ConnectionError:
            return b"".join(chunks), True
        if not chunk:
            return b"".join(chunks), True
        chunks.append(chunk)


class Channel:
    """The sending half; safe to use from several threads. `fd` is non-blocking."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()
        self._pending = b""
        self._broken = False

    def send(self, message: msgspec.Struct, *, droppable: bool = False) -> None:
        """Queue a message and write what can be written. A droppable one is lost when the peer is slow."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock:
            if self._broken or (droppable and self._pending):
                return
            if len(self._pending) + len(line) > _MAX_BUFFER:
                self._broken = True
                return
            self._pending += line
            self._write()

    def _write(self) -> None:
        while self._pending and not self._broken:
            try:
                sent = os.write(self.fd, self._pending)
            except BlockingIOError:
                return
            except OSError:
                self._broken = True
                return
            self._pending = self._pending[sent:]

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._pending) and not self._broken

    def flush(self, timeout: float) -> bool:
        """Try to write what is pending for at most `timeout` seconds; True when nothing is left."""
        deadline = time.monotonic() + timeout
        while self.pending:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            select.select([], [self.fd], [], left)
            with self._lock:
                self._write()
        return not self._broken
