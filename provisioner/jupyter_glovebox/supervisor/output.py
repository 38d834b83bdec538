"""What a kernel prints outside its messages (standard output and error of its process).

The text is hostile: it is escaped before it reaches the server's log, and its rate is limited. The
last of it is kept, since it explains a kernel that ends at its start.
"""

from __future__ import annotations

import os
import sys
import time

from ..ledger.events import escape

_TAIL = 4096
_BYTES_PER_SECOND = 64 << 10


class KernelOutput:
    """A pipe the kernel writes to, and we read.

    Attributes:
        read_fd: ours, non-blocking; -1 when closed.
        write_fd: the kernel's; closed by `started`.
    """

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._tail = b""
        self._second = 0
        self._left = _BYTES_PER_SECOND
        self._dropped = 0

    def started(self) -> None:
        """The kernel has its copy of the writing end; drop ours, so that the end of it is seen."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def pump(self) -> bool:
        """Read what is there and forward it; False at the end of the pipe."""
        for _ in range(16):
            try:
                data = os.read(self.read_fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._tail = (self._tail + data)[-_TAIL:]
            self._forward(data)
        return True

    def _forward(self, data: bytes) -> None:
        now = int(time.monotonic())
        if now != self._second:
            if self._dropped:
                self._write(f"[glovebox: {self._dropped} bytes of the kernel's output were left out here]\n")
            self._second, self._left, self._dropped = now, _BYTES_PER_SECOND, 0
        taken = data[: self._left]
        self._left -= len(taken)
        self._dropped += len(data) - len(taken)
        if taken:
            self._write("\n".join(escape(line) for line in taken.split(b"\n")))

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # a server without a standard error is no reason to end a kernel

    @property
    def tail(self) -> str:
        """The last lines, escaped."""
        return "\n".join(escape(line) for line in self._tail.rstrip().split(b"\n")[-12:])

    def close(self) -> None:
        """Close both ends; idempotent."""
        self.started()
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1
